"""SDAR and PCAT: what theory says that a simulator finds, and that real embeddings of known rows tell more."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vflsec.attacks.inversion_blackbox import BlackBoxInversion
from vflsec.attacks.sdar import PseudoClient, SimulatorDecoding, compute_loss, fit_line
from vflsec.base.errors import UsageError
from vflsec.base.layout import Layout
from vflsec.core.message import Kind, Message
from vflsec.core.view import View
from vflsec.inference.joint_model import JointModel
from vflsec.nn.top import Top
from vflsec.results import metrics

ROWS = {"train": 2000, "test": 400}


def make_view(classes):
    """Labels are drawn from the joint model itself, whose victim has a rotation; own columns are noisy copies.

    The columns are independent, and no two have the same distribution, even mirrored. No other linear model has
    embeddings of the same distribution then (independent component analysis). Their variance is one.
    """
    rng = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    bottom, own = nn.Linear(3, 3), nn.Linear(3, 2)
    top = Top([2, 3], classes, aggregation="concat", head="linear", hidden=1)
    nn.init.orthogonal_(bottom.weight)
    with torch.no_grad():
        top.head.weight.copy_(2.5 * torch.randn(classes, 5, generator=rng))
    truth, features, labels, messages = {}, {}, {}, []
    for split, n in ROWS.items():
        steep = -torch.log(torch.rand(n, 2, generator=rng)) - 1
        even = 12**0.5 * (torch.rand(n, 1, generator=rng) - 0.5)
        truth[split] = torch.cat([steep[:, :1], even, -steep[:, 1:]], dim=1)
        features[split] = truth[split] + torch.randn(n, 3, generator=rng)
        with torch.no_grad():
            h = bottom(truth[split])
            labels[split] = torch.multinomial(top([own(features[split]), h]).softmax(dim=1), 1, generator=rng)[:, 0]
        phase = "train" if split == "train" else "predict"
        messages.append(Message(Kind.EMBEDDING, "passive_1", "active", 0, phase, {"value": h}, torch.arange(n), split))
    known = torch.randperm(ROWS["train"], generator=rng)[:1000]
    view = View(
        party="active", side="active", n_classes=3, features=features, model=own, aux_rows=known,
        aux_labels=truth["train"][known], messages=tuple(messages), victim="passive_1", layout=Layout.numeric(3),
        top=top, labels={"train": labels["train"]},
    )  # fmt: skip
    return view, truth, bottom


def compute_r2(attack, view, truth):
    guess = attack(view, seed=0)
    return [metrics.r2(guess.scores[split].numpy(), truth[split].numpy()) for split in ROWS]


@pytest.mark.parametrize("classes", [2, 6])
def test_sdar_recovers_columns_where_only_one_bottom_model_has_such_embeddings(classes):
    view, truth, _ = make_view(classes)
    assert min(compute_r2(SimulatorDecoding(layers=0, steps=200), view, truth)) > 0.95


@pytest.mark.parametrize(("classes", "is_recovered"), [(6, True), (2, False)])
def test_pcat_recovers_columns_where_labels_determine_embeddings(classes, is_recovered):
    """The top model of six classes reads every direction of three, and that of two only one of them."""
    view, truth, _ = make_view(classes)
    r2 = compute_r2(PseudoClient(layers=0, steps=200), view, truth)
    assert min(r2) > 0.95 if is_recovered else max(r2) < 0.7


def test_without_its_critic_sdar_recovers_no_more_than_labels_determine():
    view, truth, _ = make_view(2)
    assert max(compute_r2(SimulatorDecoding(layers=0, steps=200, likeness=0.0), view, truth)) < 0.7


@pytest.mark.parametrize("classes", [2, 6])
def test_real_embeddings_of_known_rows_make_a_simulator_superfluous(classes):
    """An attack on rows of the victim has them: a decoder of them is exact in either world."""
    view, truth, _ = make_view(classes)
    decoder = BlackBoxInversion(model="ridge", with_columns=False)
    assert min(compute_r2(decoder, view, truth)) > 0.999


def test_the_joint_model_predicts_as_the_federation_does_and_with_other_embeddings():
    view, truth, bottom = make_view(6)
    joint, x = JointModel(view), view.features["train"]
    with torch.no_grad():
        expected = view.top([view.model(x), bottom(truth["train"])])
    torch.testing.assert_close(joint.predict("train"), expected)
    rows = torch.tensor([3, 5])
    torch.testing.assert_close(joint.predict("train", rows), expected[rows])
    h = torch.randn(2, 3, requires_grad=True)
    logits = joint.predict("train", rows, h)
    torch.testing.assert_close(logits, view.top([view.model(x[rows]), h]))
    (gradient,) = torch.autograd.grad(logits.sum(), h)
    torch.testing.assert_close(gradient, view.top.head.weight[:, 2:].sum(dim=0).expand(2, 3))
    assert joint.splits == list(ROWS)


def test_refinements_move_columns_to_where_the_pseudo_client_fits():
    client, x = nn.Linear(3, 3), torch.randn(40, 3)
    nn.init.orthogonal_(client.weight)
    refined = PseudoClient(refinements=500).refine_columns(x + 0.3, client(x).detach(), client)
    torch.testing.assert_close(refined, x, rtol=0, atol=1e-2)
    assert torch.equal(PseudoClient(refinements=0).refine_columns(x, client(x).detach(), client), x)


def test_a_line_is_fitted_to_each_column_and_never_turns_it_around():
    x = torch.randn(50, 3)
    slope, shift = fit_line(x, torch.stack([2 * x[:, 0] + 1, -x[:, 1], torch.ones(50)], dim=1))
    torch.testing.assert_close(slope, torch.tensor([2.0, 0.0, 0.0]))
    torch.testing.assert_close(shift, torch.tensor([1.0, float(-x[:, 1].mean()), 1.0]))


def test_a_critic_pays_for_what_it_takes_for_the_other():
    critic, values, facts = nn.Linear(3, 1), torch.randn(7, 2), torch.randn(7, 1)
    verdict = critic(torch.cat([values, facts], dim=1))
    torch.testing.assert_close(compute_loss(critic, values, facts, real=True), F.softplus(-verdict).mean())
    torch.testing.assert_close(compute_loss(critic, values, facts, real=False), F.softplus(verdict).mean())


@pytest.mark.parametrize(
    ("attack", "options"),
    [(SimulatorDecoding, {"likeness": -1.0}), (SimulatorDecoding, {"steps": 0}), (PseudoClient, {"refinements": -1})],
    ids=str,
)
def test_impossible_options_are_refused(attack, options):
    (name,) = options
    with pytest.raises(UsageError, match=f"expected {name} >"):
        attack(**options)
