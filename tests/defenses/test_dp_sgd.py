"""DP-SGD: rows are clipped one by one, the noise has the scale that is accounted for, and nothing stays behind."""

import csv
import math
from contextlib import nullcontext

import pytest
import torch
from games import at_least, gaussian_by_renyi, members_by_their_loss, opposite_updates
from scipy import stats
from torch import nn
from torch.nn import functional as F

import vflsec
from vflsec.base.errors import UsageError
from vflsec.base.seeds import make_rng
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.data.partition import DataSpec
from vflsec.defenses.dp_sgd import DPSGD
from vflsec.defenses.gaussian_dp import ORDERS
from vflsec.run.federation import build_federation, build_method
from vflsec.run.plan import make_cell
from vflsec.run.score import compute_spending
from vflsec.run.spec import AttackSpec, parse_defense

pytestmark = pytest.mark.usefixtures("few_trees_in_module")  # the subject is not how well trees guess

DELTA = 1e-5
FAINT = 1e-12  # noise far below anything else


def models(*widths, seed=0):
    """An active party's bottom and top."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        bottom = nn.Sequential(nn.Linear(widths[0], widths[1]), nn.Tanh(), nn.Linear(widths[1], widths[2]))
        return nn.ModuleDict({"bottom": bottom, "top": nn.Linear(widths[2], 2)}).double()


def updated(defense, modules, loss, rows, rng=None):
    """The gradients that an optimizer would read after one backward pass of ``loss``."""
    with defense.training_hooks(modules, ()):
        modules.zero_grad()
        loss(modules).backward()
        defense.on_update(modules, rows, rng or make_rng(0, "update"))
    return [p.grad.clone() for p in modules.parameters()]


def mean_loss(x, y):
    return lambda modules: F.cross_entropy(modules["top"](modules["bottom"](x)), y)


@pytest.mark.parametrize("clip", [0.05, 1.0, 50.0])
def test_clipping_equals_a_loop_over_rows(clip):
    modules, rows = models(4, 6, 3), 20
    x = torch.randn(rows, 4, generator=make_rng(1, "x"), dtype=torch.float64) * torch.logspace(-1, 1.5, rows)[:, None]
    y = torch.arange(rows) % 2
    found = updated(DPSGD(FAINT, clip=clip), modules, mean_loss(x, y), rows)
    total, clipped = [torch.zeros_like(p) for p in modules.parameters()], 0
    for i in range(rows):
        modules.zero_grad()
        mean_loss(x[i : i + 1], y[i : i + 1])(modules).backward()
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in modules.parameters()))
        clipped += norm > clip
        for so_far, p in zip(total, modules.parameters(), strict=True):
            so_far.add_(p.grad * min(1.0, clip / norm))
    for got, expected in zip(found, total, strict=True):
        assert torch.allclose(got, expected / rows, rtol=1e-6, atol=1e-10)
    assert {0.05: clipped == rows, 1.0: 0 < clipped < rows, 50.0: clipped == 0}[clip]


@pytest.mark.parametrize(("strength", "clip", "rows"), [(0.5, 1.0, 1), (20.0, 0.3, 16)])
def test_noise_is_strength_times_the_sensitivity(strength, clip, rows):
    """Of rows that teach nothing noise alone is left: on the sum, strength times the 2 C that a row can move."""
    modules = nn.ModuleDict({"bottom": nn.Linear(250, 160, bias=False)}).double()
    zero = torch.zeros(rows, 250, dtype=torch.float64)
    (found,) = updated(DPSGD(strength, clip=clip), modules, lambda m: m["bottom"](zero).sum() / rows, rows)
    z = (found.flatten() * rows / (strength * 2 * clip)).numpy()
    assert float(z.std()) == pytest.approx(1.0, rel=0.02)
    assert stats.kstest(z, "norm").pvalue > 0.01
    assert stats.kstest(z / 1.1, "norm").pvalue < 1e-6  # a scale 10 % off is rejected
    assert stats.kstest(z / 0.9, "norm").pvalue < 1e-6


@pytest.mark.parametrize(("sigma", "updates"), [(1.0, 1), (4.0, 1), (4.0, 20), (20.0, 300)])
def test_epsilon_is_that_of_a_hand_calculation(sigma, updates):
    assert DPSGD(sigma).privacy_spent(updates) == {
        "epsilon": pytest.approx(gaussian_by_renyi(sigma, updates, DELTA, ORDERS), rel=1e-6),
        "delta": DELTA,
    }
    asked = DPSGD(1 / gaussian_by_renyi(sigma, updates, DELTA, ORDERS), unit="1/epsilon")
    asked.plan_releases(updates)
    assert asked.scale == pytest.approx(sigma, rel=1e-4)


def test_two_neighbors_cannot_be_told_apart_better_than_epsilon_says():
    """Rows at opposite ends of what clipping leaves, one update, many times: the bound on epsilon comes close."""
    strength = 1.2
    game = opposite_updates(DPSGD(strength, clip=0.5, delta=0.01))
    (spent,) = game.spent
    found = at_least(game, spent["delta"])
    print(f"one update: lower bound {found:.3f}, stated {spent['epsilon']:.3f}")  # noqa: T201
    assert 0.4 * spent["epsilon"] < found < spent["epsilon"]
    weaker = DPSGD(3 * strength, delta=0.01).privacy_spent(1)
    assert found > weaker["epsilon"]  # it convicts whoever claims three times less


def cell(*texts, method="fedsplitnn", parties=2, rows=300, malicious=None, **train):
    return make_cell(
        dataset="toy",
        data=DataSpec(options={"rows": rows, "parties": parties}),
        method=method,
        method_options={},
        train=TrainSpec(**{"epochs": 2, "batch": 32, **train}),
        model=ModelSpec(bottom=(8,)),
        defenses=tuple(parse_defense(text) for text in texts),
        seed=0,
        malicious=malicious,
    )


def trained(made):
    federation, method = build_federation(made, "cpu"), build_method(made)
    return method.fit(federation)


def parameters(federation):
    return [p for party in federation.federation.parties.values() for p in party.modules.state_dict().values()]


def test_strength_zero_is_training_without_it_bit_for_bit():
    """A cell leaves it out; so it is carried by hand."""
    plain, off = trained(cell()), cell()
    federation, method = build_federation(off, "cpu"), build_method(off)
    for party in federation.parties.values():
        party.defenses = (DPSGD(0.0),)
    assert DPSGD(0.0).privacy_spent(5) is None
    for one, other in zip(parameters(plain), parameters(method.fit(federation)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("local_steps", [1, 2])
def test_without_noise_and_clipping_it_is_training_without_it(local_steps):
    plain, faint = (
        parameters(trained(cell(*texts, parties=3, optimizer="sgd", lr=0.1, local_steps=local_steps)))
        for texts in ((), ("dp-sgd:strength=1e-12,clip=1e6",))
    )
    for one, other in zip(plain, faint, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_only_those_who_carry_it_are_changed_by_their_own_noise():
    """One update of SGD: who does not carry it makes the same step as without."""
    settings = {"optimizer": "sgd", "momentum": 0.0, "epochs": 1, "batch": 300}
    before, after = (
        trained(cell(**settings)).federation,
        trained(cell("dp-sgd:strength=1,by=passive", **settings)).federation,
    )
    for name, changed in (("active", False), ("passive_1", True)):
        one, other = (w.parties[name].modules["bottom"].state_dict().values() for w in (before, after))
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)) is not changed


def test_nothing_stays_on_the_models():
    for problem in (nullcontext(), pytest.raises(ZeroDivisionError)):
        modules = models(4, 6, 3)
        before = [set(vars(layer)) for layer in modules.modules()]
        with problem as expected, DPSGD(1.0).training_hooks(modules, ()):
            mean_loss(torch.zeros(5, 4, dtype=torch.float64), torch.zeros(5, dtype=torch.long))(modules).backward()
            assert modules["top"].weight.grad_sample.shape == (5, 2, 3)
            if expected is not None:
                raise ZeroDivisionError
        assert [set(vars(layer)) for layer in modules.modules()] == before
        assert not any(layer._forward_hooks or layer._backward_hooks for layer in modules.modules())
        assert not any(hasattr(p, "grad_sample") for p in modules.parameters())


def test_a_malicious_party_does_not_carry_it():
    attack = ("passive_1", AttackSpec(name="active-mc"))
    federation = trained(cell("dp-sgd:strength=1e9", malicious=attack))
    sizes = {name: max(float(p.grad.abs().max()) for p in party.modules.parameters())
             for name, party in federation.federation.parties.items()}  # fmt: skip
    assert sizes["active"] > 1e6
    assert sizes["passive_1"] < 1e6


def test_what_the_models_carry_is_told_apart_from_what_is_said():
    federation = trained(cell("dp-sgd:strength=3", "gaussian-dp:strength=2", parties=3, local_steps=2))
    told = compute_spending(federation, federation.federation.channel.releases(), "passive_1")
    models_, releases = (next(one for one in told if ("of" in one) is of) for of in (True, False))
    of_models, of_releases = gaussian_by_renyi(3.0, 4, DELTA, ORDERS), gaussian_by_renyi(2.0, 2, DELTA, ORDERS)
    assert models_ == {
        "defense": repr(DPSGD(3.0)), "epsilon": pytest.approx(of_models), "delta": DELTA, "of": "models", "updates": 4,
    }  # fmt: skip
    assert (releases["releases"], releases["epsilon"]) == (2, pytest.approx(of_releases))
    own = trained(cell("dp-sgd:strength=3,by=passive_1"))
    assert compute_spending(own, own.federation.channel.releases(), "passive_1") == []
    assert len(compute_spending(own, own.federation.channel.releases(), "active")) == 1


def evaluated(folder, **settings):
    return vflsec.evaluate(**{
        "attack": "mc:epochs=5", "dataset": "toy", "data": {"options": {"rows": 300}}, "seeds": 1, "jobs": 1,
        "train": {"epochs": 3}, "aux": {"n": 20, "folds": 0}, "out": folder, "defense": "dp-sgd", **settings,
    })  # fmt: skip


@pytest.mark.long
def test_epsilon_is_asked_for_met_and_told_as_that_of_the_models(tmp_path):
    report = evaluated(tmp_path, epsilons=[8])
    found = {point.strength: point.spent for point in report.points}
    assert found[0.0] == []
    (one,) = found[1 / 8]
    assert one["epsilon"] == pytest.approx(8, rel=1e-3)
    assert (one["of"], one["updates"]) == ("models", 3)
    assert "8 (models)" in report.table(200)
    assert "EPSILON (models) bounds" in report.table(200)
    rows = csv.DictReader(report.to_csv().splitlines())
    assert [row["epsilon_of"] for row in rows] == ["", "models", "", "models"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": {"encoder": "tabular"}}, "BatchNorm for dp-sgd.*bottom"),
        ({"methods": ["fedhssl-simsiam"], "model": {"encoder": "mlp"}}, "choose --method fedsplitnn"),
        ({"methods": ["ss-vfl-i"], "model": {"encoder": "mlp"}}, "choose --method fedsplitnn"),
        ({"fixed": ["dcor:lambda=1"]}, "dcor on batches.*by=passive"),
        ({"fixed": ["mid:lambda=1"]}, "got the penalty of mid"),
        ({"defense": "dp-sgd@embedding"}, "expected dp-sgd without a point"),
        ({"defense": "dp-sgd:clip=0.0"}, "expected clip > 0"),
    ],
)
def test_what_it_cannot_serve_is_refused_before_anything_is_trained(tmp_path, settings, message):
    with pytest.raises(UsageError, match=message) as caught:
        evaluated(tmp_path, strengths=[1.0], **settings)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_method_without_a_wire_refuses_it_too():
    with pytest.raises(UsageError, match="got local: .*not be protected"):
        vflsec.train(dataset="toy", method="local", defense="dp-sgd:strength=1.0", data={"options": {"rows": 300}})


def test_a_penalty_at_another_party_is_none_of_its_business():
    with pytest.raises(UsageError, match="got the penalty of dcor"):
        trained(cell("dp-sgd:strength=1", "dcor:lambda=0.1"))
    trained(cell("dp-sgd:strength=1,by=passive", "dcor:lambda=0.1"))


def test_models_that_opacus_cannot_follow_are_refused():
    modules = models(4, 6, 3)
    modules["own"] = nn.Module()
    modules["own"].scale = nn.Parameter(torch.ones(1))
    modules["own"].register_buffer("mean", torch.zeros(1))
    with (
        pytest.raises(UsageError, match="expected layers without running statistics"),
        DPSGD(1).training_hooks(modules, ()),
    ):
        pass
    del modules["own"].mean
    loss = mean_loss(torch.zeros(5, 4, dtype=torch.float64), torch.zeros(5, dtype=torch.long))
    with pytest.raises(UsageError, match="dp-sgd can follow row by"):
        updated(DPSGD(1.0), modules, lambda m: loss(m) + m["own"].scale.sum(), 5)


@pytest.mark.statistical
def test_on_the_planted_data_no_membership_attack_beats_epsilon():
    """All parties carry it: their epsilons add up."""
    game, undefended = members_by_their_loss("dp-sgd:epsilon=0.15"), members_by_their_loss()
    stated = sum(one["epsilon"] for one in game.spent)
    assert stated == pytest.approx(0.3, rel=1e-3)
    found = at_least(game, DELTA)
    print(f"membership: lower bound {found:.3f}, stated {stated:.3f}")  # noqa: T201
    assert found < stated < at_least(undefended, DELTA)
