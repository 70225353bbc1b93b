"""Active model completion: its optimizer is the formula, and nothing but the adversary's own training changes."""

import numpy as np
import pytest
import torch

from vflsec.attacks.active_model_completion import ActiveModelCompletion
from vflsec.base.errors import UsageError
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.methods.fedsplitnn import FedSplitNN
from vflsec.testing.federations import make_toy_federation

GRADIENTS = np.array([[1.0, -2.0, 0.5], [1.5, 1.0, 0.5], [-1.0, 2.0, 0.4], [-3.0, 2.0, 0.0]])


def steps(attack, lr=0.1):
    """Where three parameters are after each gradient."""
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer, seen = attack.optimizer([parameter], lr), []
    for gradient in GRADIENTS:
        parameter.grad = torch.from_numpy(gradient)
        optimizer.step()
        seen.append(parameter.detach().numpy().copy())
    return np.array(seen)


def naive(gamma, largest, *, feedback, lr=0.1):
    """The source's rule, number by number."""
    at, momentum, last, seen = np.zeros(3), None, None, []
    for gradient in GRADIENTS:
        momentum = gradient.copy() if momentum is None else 0.9 * momentum + gradient
        update = momentum.copy()
        if last is not None:
            for j in range(3):
                update[j] *= min(max(1 + gamma * update[j] / (last[j] + 1e-7), 1.0), largest)
        last = update.copy()
        if feedback:
            momentum = update.copy()
        at = at - lr * update
        seen.append(at.copy())
    return np.array(seen)


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize(("gamma", "largest"), [(1.0, 5.0), (0.3, 1.2), (0.0, 5.0)])
def test_the_optimizer_is_the_formula(gamma, largest, feedback):
    attack = ActiveModelCompletion(base="sgd", gamma=gamma, largest=largest, feedback=feedback)
    np.testing.assert_allclose(steps(attack), naive(gamma, largest, feedback=feedback), rtol=1e-12)


@pytest.mark.parametrize(
    ("base", "honest"),
    [("sgd", lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)), ("adam", lambda p: torch.optim.Adam(p, 0.1))],
)
def test_without_growth_it_is_the_honest_optimizer(base, honest):
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer, seen = honest([parameter]), []
    for gradient in GRADIENTS:
        parameter.grad = torch.from_numpy(gradient)
        optimizer.step()
        seen.append(parameter.detach().numpy().copy())
    np.testing.assert_allclose(steps(ActiveModelCompletion(base=base, gamma=0.0)), seen, rtol=1e-12)


def test_no_update_shrinks_and_none_grows_beyond_the_bound():
    honest, malicious = (np.diff(steps(ActiveModelCompletion(gamma=g)), axis=0) for g in (0.0, 1.0))
    ratio = malicious / honest
    assert ratio.min() >= 1 - 1e-9
    assert 1.5 < ratio.max() <= 5 + 1e-9


def test_only_the_adversarys_own_bottom_is_trained_otherwise():
    """At the first step every ratio is one; afterwards the others hear of it through the embeddings alone."""
    federations = []
    for gamma in (0.0, 1.0):
        federation = make_toy_federation(rows=200)
        federation.malicious = {"passive_1": ActiveModelCompletion(gamma=gamma)}
        FedSplitNN(TrainSpec(epochs=2, batch=500, lr=1e-2), ModelSpec(bottom=(6,))).fit(federation)
        federations.append(federation)
    honest, malicious = federations
    for name, same in (("active", True), ("passive_1", False)):
        pairs = zip(
            honest.parties[name].modules["bottom"].parameters(),
            malicious.parties[name].modules["bottom"].parameters(),
            strict=True,
        )
        assert all(torch.equal(a, b) for a, b in pairs) is same


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"largest": 0.5}, "expected largest >= 1, got 0.5"),
        ({"gamma": -1.0}, "expected gamma >= 0"),
    ],
)
def test_wrong_numbers_are_refused(options, match):
    with pytest.raises(UsageError, match=match):
        ActiveModelCompletion(**options)
