"""Sealed training: sums equal naive ones, a label changes them by no more than is stated, and noise 0 hides nothing."""

import dataclasses
import math

import pytest
import torch
from click.testing import CliRunner
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn import functional as F

import vflsec
from vflsec.attacks.sums import SolvedSums
from vflsec.base.errors import Diverged, UsageError
from vflsec.cipher.noise import compute_epsilon, find_mu
from vflsec.cli import cli
from vflsec.core.message import Kind, Step, Transcript
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.data.partition import DataSpec
from vflsec.defenses import gaussian_dp
from vflsec.defenses.sealed import SealedGradients
from vflsec.inference import sums
from vflsec.inference.sums import estimate_labels, solve_sums
from vflsec.methods import sealed_training
from vflsec.methods.sealed_training import SealedTraining, round_residuals, round_weights
from vflsec.run.federation import build_federation, build_method
from vflsec.run.plan import make_cell
from vflsec.run.questions import ask
from vflsec.run.spec import AuxSpec, DefenseSpec

pytestmark = pytest.mark.usefixtures("few_trees_in_module")  # the subject is not how well trees guess


def build(*, dataset="toy", rows=200, epsilon=1.0, seed=0, train=None, model=None, method="fedsplitnn", **options):
    """Return a method under sealed training and its federation, built."""
    data = DataSpec(options={"rows": rows}) if dataset == "toy" else DataSpec(n_labeled=rows)
    cell = make_cell(
        dataset=dataset,
        data=data,
        method=method,
        method_options={},
        train=TrainSpec(**(train or {})),
        model=ModelSpec(**(model or {})),
        defenses=(DefenseSpec(name="sealed", strength=1 / epsilon, options=options),),
        seed=seed,
    )
    federation, made = build_federation(cell, "cpu"), build_method(cell)
    made.build(federation)
    return made, federation


def silence(method):
    """Leave out the noise."""
    for boundary in method._boundaries.values():
        boundary.plan = dataclasses.replace(boundary.plan, mu=math.inf)


def sum_of_batch(training, rows, labels):
    """Return what each party learns from one batch, by name, with these labels and the models as they are."""
    federation, before = training.federation, {}
    training.targets = labels
    training._update(Step(0, "train", rows, labels[rows]), [])
    for name, bottom in training.bottoms.items():
        model = training.scores if name == federation.active.name else bottom
        before[name] = torch.cat([p.grad.flatten() for p in model.parameters()]) * len(rows)
    return before


@pytest.mark.parametrize(
    ("dataset", "head"), [("toy", "linear"), ("digits", "linear"), ("toy", "mlp"), ("digits", "mlp")]
)
def test_sums_are_those_of_a_loop_over_rows(dataset, head):
    method, federation = build(dataset=dataset, model={"bottom": (5,), "head": head}, bits=16)
    silence(method)
    training = method.split(federation)
    rows, labels = torch.arange(40), federation.active.labels["train"]
    summed = sum_of_batch(training, rows, labels)
    own, passive = federation.active, federation.passive[0]
    bottom = training.bottoms[passive.name]
    naive = {own.name: 0.0, passive.name: 0.0}
    for row in rows:
        x, x_p = own.features["train"][row : row + 1], passive.features["train"][row : row + 1]
        h = bottom(x_p)
        scores = training.scores(x, h)[0]
        residual = round_residuals(scores[None], labels[row : row + 1], 2.0**16)[0].float() / 2**16
        jacobian = torch.stack([_flat_gradient(z, list(training.scores.parameters())) for z in scores])
        naive[own.name] += (jacobian / torch.linalg.matrix_norm(jacobian, 2)).T @ residual
        slope = torch.stack([torch.autograd.grad(z, h, retain_graph=True)[0][0] for z in scores])
        of_bottom = torch.stack([_flat_gradient(value, list(bottom.parameters())) for value in h[0]])
        if head == "linear":
            joined = slope @ of_bottom
            naive[passive.name] += (joined / torch.linalg.matrix_norm(joined, 2)).T @ residual
        else:
            sealed = (slope / torch.linalg.matrix_norm(slope, 2)).T @ residual
            naive[passive.name] += (of_bottom / torch.linalg.matrix_norm(of_bottom, 2)).T @ sealed
    for name, expected in naive.items():
        torch.testing.assert_close(summed[name], expected, atol=40 * 2e-4, rtol=0)  # 40 rows, factors of 16 bits


def _flat_gradient(value, parameters):
    gradients = torch.autograd.grad(value, parameters, retain_graph=True)
    return torch.cat([g.flatten() for g in gradients])


@pytest.mark.sampled
@pytest.mark.parametrize("dataset", ["toy", "digits"])
@pytest.mark.parametrize("head", ["linear", "mlp"])
@pytest.mark.parametrize("bits", [8, 14])
def test_one_label_changes_all_sums_together_by_no_more_than_stated(dataset, head, bits):
    method, federation = build(dataset=dataset, model={"bottom": (7,), "head": head}, bits=bits)
    silence(method)
    training = method.split(federation)
    for p in [*training.scores.parameters(), *training.bottoms["passive_1"].parameters()]:
        p.data *= 3  # far from where training starts
    labels, rows, largest = federation.active.labels["train"], torch.arange(50), 0.0
    before = sum_of_batch(training, rows, labels)
    for row in rows[:12]:
        for other in range(federation.n_classes):
            changed = labels.clone()
            changed[row] = other
            after = sum_of_batch(training, rows, changed)
            moved = math.sqrt(sum(float((after[k] - before[k]).square().sum()) for k in before))
            assert moved <= training._bound_change() + 1e-5
            largest = max(largest, moved)
    assert bits == 8 or largest > 0.4 * training._bound_change()  # not much larger than necessary


@pytest.mark.parametrize("unit", [2.0**8, 2.0**14])
def test_another_label_changes_integers_by_one_unit_exactly(unit):
    scores = torch.logit((torch.arange(1, int(unit)) + 0.5) / unit + 1e-7)[:, None]  # p is just above a half unit
    zero, ones = torch.zeros(len(scores), dtype=torch.long), torch.ones(len(scores), dtype=torch.long)
    moved = round_residuals(scores, zero, unit) - round_residuals(scores, ones, unit)
    assert (moved == int(unit)).all()


def test_noise_has_the_deviation_that_epsilon_asks_for():
    method, federation = build(rows=600, epsilon=2.0, epochs=4, batch=1000, model={"bottom": (32,)})
    training = method.split(federation)
    rows, labels = torch.arange(federation.n_rows("train")), federation.active.labels["train"]
    noised = [sum_of_batch(training, rows, labels)["passive_1"] for _ in range(8)]
    silence(method)
    exact = sum_of_batch(method.split(federation), rows, labels)["passive_1"]
    drawn = torch.cat([x - exact for x in noised])
    expected = training._bound_change() * math.sqrt(4) / find_mu(2.0, 1e-5)
    n = len(drawn)
    assert abs(float(drawn.square().mean().sqrt()) / expected - 1) < 4 / math.sqrt(2 * n)


@pytest.mark.parametrize("strength", [0.0, 1.0])
def test_a_delta_out_of_range_is_refused_with_and_without_noise(strength):
    with pytest.raises(UsageError, match="expected 0 < delta < 1, got 1.5"):
        SealedGradients(strength, delta=1.5)


def test_epsilon_is_that_of_opacus():
    for mu, epochs in ((0.25, 10), (1.0, 10), (2.0, 3)):
        prv = gaussian_dp.compute_epsilon(math.sqrt(epochs) / mu, epochs, 1e-5, "prv")  # of which .01 is its error
        assert compute_epsilon(mu, 1e-5) == pytest.approx(prv, abs=0.011)
    assert find_mu(compute_epsilon(0.7, 1e-5), 1e-5) == pytest.approx(0.7)


def attacked(epsilon, *, noise=True, rows=150, batch=60, own_columns=True, **options):
    method, federation = build(rows=rows, epsilon=epsilon, batch=batch, model={"bottom": (40,)}, **options)
    if not noise:
        silence(method)
    if not own_columns:
        federation.passive[0].features["train"].normal_(generator=torch.Generator().manual_seed(0))
    seen = Transcript(frozenset({"passive_1"}), frozenset(Kind))
    federation.channel.taps.append(seen)
    federation.begin("train")
    method.split(federation).fit("train", lambda *_: None)
    trained = _Trained(method, federation)
    return ask(SolvedSums(), trained, "passive_1", AuxSpec(n=20), tuple(seen.messages)), seen


class _Trained:
    def __init__(self, method, federation):
        self.method, self.federation = method, federation


def area(asked):
    guess = SolvedSums()(asked.view, seed=0).scores["train"]
    rest = torch.ones(len(guess), dtype=torch.bool)
    rest[asked.view.aux_rows] = False
    return roc_auc_score(asked.truth.labels["train"][rest], (guess[:, 1] - guess[:, 0])[rest])


def test_without_noise_and_with_many_parameters_sums_are_the_labels():
    asked, _ = attacked(1.0, noise=False, bits=16)
    _, solved = solve_sums(asked.view).T
    assert roc_auc_score(asked.truth.labels["train"], -solved) > 0.99
    assert area(asked) > 0.99


def test_labels_are_estimated_where_own_columns_say_nothing_of_them():
    asked, _ = attacked(4.0, dataset="credit-default", rows=800, batch=100, own_columns=False)
    labels, rest = asked.truth.labels["train"], torch.ones(len(asked.truth.labels["train"]), dtype=torch.bool)
    rest[asked.view.aux_rows] = False
    assert 0.58 < roc_auc_score(labels[rest], estimate_labels(asked.view)[rest, 0]) < 0.78  # all else known: .74
    assert area(asked) > 0.58


def test_two_filters_at_once_estimate_what_one_after_the_other_does():
    asked, seen = attacked(1.0)
    view = asked.view
    features = sums._draw_features(view.features["train"])
    batches = []
    for message in (m for m in seen.messages if m.kind is Kind.SUM):
        p = torch.sigmoid(sums._compute_score(view, message))
        batches.append((message.rows, *sums._whiten(view, message, p)))
    n, width = features.shape
    mean = features.new_zeros(width)
    for variance in (sums.SHARED, 1e-9):  # the second time, with the function that the first one has left
        rest, informed = features.new_zeros(2, n)
        state = torch.cat([mean, mean.new_zeros(width)])
        covariance = torch.diag(torch.cat([mean.new_full((width,), variance), mean.new_full((width,), sums.MISSED)]))
        for rows, weights, totals in batches:
            a = features[rows].T @ weights
            a = torch.cat([-a, a])
            covariance.diagonal()[width:] += sums.MOVED
            covariance = torch.linalg.inv(torch.linalg.inv(covariance) + a @ a.T)
            state = state + covariance @ (a @ (totals - state @ a))
            rest[rows] -= weights @ (totals - state @ a)
            informed[rows] += weights.square().sum(dim=1)
        mean = state[:width]
    naive = features @ mean + sums.REST * rest / (sums.REST * informed).clamp(min=1)
    torch.testing.assert_close(estimate_labels(view)[:, 0], naive.float(), rtol=1e-5, atol=1e-5)


def test_a_passive_party_receives_sums_and_no_gradient():
    _, seen = attacked(1.0)
    received = {m.kind for m in seen.messages if (m.receiver == "passive_1" and m.sender == "active") or m.noted}
    assert received == {Kind.SUM, Kind.CIPHERTEXT}
    sealed = next(m for m in seen.messages if m.kind is Kind.CIPHERTEXT)
    with pytest.raises(PermissionError):
        sealed.payload["values"].open(object())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"train": {"select": "best_on_val"}}, "train.select"),
        ({"train": {"local_steps": 2}}, "train.local_steps"),
        ({"model": {"encoder": "tabular"}}, "BatchNorm"),
    ],
)
def test_what_epsilon_does_not_bound_is_refused(settings, said):
    method, federation = build(**settings)
    with pytest.raises(UsageError, match=said):
        method.split(federation).fit("train", lambda *_: None)


@pytest.mark.parametrize("other", ["kd-k:weight=0.4,k=2", "coae:strength=1", "label-dp:epsilon=1", "mixup:strength=1"])
def test_labels_that_may_depend_on_other_rows_are_refused(other):
    with pytest.raises(UsageError, match="beside sealed training"):
        vflsec.evaluate(
            attack="mc", defense="sealed", epsilons=[1.0], fixed=other, dataset="digits", seeds=1, progress=False,
            data={"n_labeled": 200}, train={"epochs": 1},
        )  # fmt: skip


@pytest.mark.parametrize("wild", [1e19, float("nan"), float("inf")])
@pytest.mark.parametrize("dataset", ["toy", "digits"])
def test_values_that_are_not_finite_are_a_divergence_and_large_ones_are_bounded(wild, dataset):
    method, federation = build(dataset=dataset)
    silence(method)
    training = method.split(federation)
    federation.passive[0].features["train"][0, 0] = wild
    labels = federation.active.labels["train"]
    if math.isfinite(wild):
        before = sum_of_batch(training, torch.arange(20), labels)
        changed = torch.cat([(labels[:1] + 1) % federation.n_classes, labels[1:]])
        after = sum_of_batch(training, torch.arange(20), changed)
        moved = math.sqrt(sum(float((after[k] - before[k]).square().sum()) for k in before))
        assert moved <= training._bound_change() + 1e-5
    else:
        with pytest.raises(Diverged, match="not finite"):
            sum_of_batch(training, torch.arange(20), labels)


def test_the_loss_falls_without_noise():
    method, federation = build(rows=400, epsilon=1.0, epochs=20, batch=100)
    silence(method)
    federation.begin("train")
    losses = method.split(federation).fit("train", lambda *_: None)
    assert losses[-1] < 0.7 * losses[0]
    logits = method.predict(federation, "test")
    assert F.cross_entropy(logits, federation.active.labels["test"]) < 0.6
    assert isinstance(federation.active.modules["private"], nn.Module)
    assert type(method.split(federation)) is SealedTraining


@pytest.mark.parametrize(
    ("dataset", "head"), [("toy", "linear"), ("toy", "mlp"), ("digits", "linear"), ("digits", "mlp")]
)
def test_without_noise_and_bound_the_model_is_that_of_plain_split_learning(dataset, head, monkeypatch):
    model, lr = {"bottom": (8,), "head": head}, 0.005
    method, federation = build(dataset=dataset, rows=1000, model=model, epochs=1, batch=100, lr=lr, bits=16)
    silence(method)
    monkeypatch.setattr(sealed_training, "scale_to_unit", lambda jacobian: jacobian)
    monkeypatch.setattr(
        sealed_training, "round_weights", lambda blocks, unit: ((block * unit).round().long() for block in blocks)
    )
    batch = method.split(federation).spec.batch
    train = {"epochs": 1, "batch": batch, "lr": lr, "optimizer": "adam"}
    plain, twin = build(dataset=dataset, rows=1000, model=model, train=train, epsilon=math.inf)
    start = {name: models_of(twin, name) for name in twin.parties}
    for trained, parties in ((method, federation), (plain, twin)):
        parties.begin("train")
        trained.split(parties).fit("train", lambda *_: None)
    for name, before in start.items():
        after = models_of(twin, name)
        assert max(float((after[role] - before[role]).abs().max()) for role in after) > 5 * lr
        torch.testing.assert_close(models_of(federation, name), after, atol=1e-4, rtol=0)


def models_of(federation, name):
    """Return copies of the weights of a party's bottom and top model by name."""
    weights = federation.parties[name].modules.named_parameters()
    return {role: p.detach().clone() for role, p in weights if not role.startswith("private")}


def test_what_a_defense_does_not_send_is_unseen_and_no_number():
    settings = {"dataset": "toy", "data": {"options": {"rows": 200}}, "train": {"epochs": 2}, "seeds": 1, "jobs": 1}
    report = vflsec.evaluate(attack=["norm", "sums"], defense="sealed", epsilons=[1.0], progress=False, **settings)
    statuses = {(point.attack, point.strength): point.status for point in report.points}
    assert statuses == {("norm", 0): "ok", ("sums", 0): "unseen", ("norm", 1): "unseen", ("sums", 1): "ok"}
    (leak,) = (point.leak.mean for point in report.points if (point.attack, point.strength) == ("norm", 1))
    assert leak is None
    (worst,) = (point for point in report.summary.worst if point.strength == 1)
    assert worst.status == "ok"
    spent = [s["epsilon"] for point in report.points for s in point.spent]
    assert spent == [pytest.approx(1.0)]


@pytest.mark.sampled
@pytest.mark.parametrize("parties", [2, 3])
def test_colluding_parties_solve_their_sums_together(parties):
    settings = {
        "dataset": "multiple-features",
        "data": {"parties": parties + 1, "columns": "even", "n_labeled": 300},
        "seeds": 1,
        "jobs": 1,
    }
    adversary = "+".join(f"passive_{k + 1}" for k in range(parties))
    report = vflsec.evaluate(
        attack="sums", defense="sealed", epsilons=[4.0], adversary=adversary, model={"bottom": [8]}, progress=False,
        train={"epochs": 2}, **settings,
    )  # fmt: skip
    assert {point.status for point in report.points if point.strength} == {"ok"}


def test_an_attack_that_lacks_something_else_has_failed_and_is_not_unseen(tmp_path):
    body = """
from vflsec.base.errors import InsufficientView
from vflsec.core.attack import Attack
from vflsec.core.view import Need

class Lacks(Attack):
    name = "lacks"
    needs = frozenset({Need.FEATURES})
    reference = verified = "test"

    def run(self, view, *, rng):
        raise InsufficientView("too few rows")
"""
    (tmp_path / "lacks.py").write_text(body)
    settings = {"dataset": "toy", "data": {"options": {"rows": 200}}, "train": {"epochs": 1}, "seeds": 1, "jobs": 1}
    report = vflsec.evaluate(
        attack=f"{tmp_path / 'lacks.py'}:Lacks", defense="sealed", epsilons=[1.0], progress=False, **settings
    )
    assert {point.status for point in report.points} == {"error"}


@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_encryption_changes_no_bit_of_the_models_and_its_bytes_are_those_foretold(head):
    models, routes = [], []
    for backend in ("plain", "bfv"):
        method, federation = build(rows=60, epochs=2, batch=20, model={"bottom": (4,), "head": head}, backend=backend)
        federation.begin("train")
        method.split(federation).fit("train", lambda *_: None)
        models.append([p for party in federation.parties.values() for p in party.modules.parameters()])
        traffic = {route: sent for route, sent in federation.channel.traffic.items() if route.kind is Kind.CIPHERTEXT}
        assert sum(traffic.values()) == method.count_sums_bytes(federation)
        routes.append(traffic)
    assert all(torch.equal(*pair) for pair in zip(*models, strict=True))
    assert routes[0].keys() == routes[1].keys()
    assert sum(routes[1].values()) > 100 * sum(routes[0].values())


def test_a_dry_run_tells_what_sums_take():
    settings = ["--dataset", "toy", "--attack", "norm", "--epsilon", "1", "--set", "train.epochs=1", "--dry-run"]
    for backend, said in (("plain", ("0.1 MB",)), ("bfv", ("CPU s of each training of fedsplitnn", "MB"))):
        done = CliRunner().invoke(cli, ["eval", "--defense", f"sealed:backend={backend}", *settings])
        assert done.exit_code == 0, done.output
        assert ("encryption takes about" in done.output) == (backend == "bfv")
        assert all(text in done.output for text in said)


@pytest.mark.parametrize("shares", [(0.5, 0.45, 0.05), (0.9, 0.05, 0.05)])
def test_a_rare_category_is_as_near_to_the_others_as_they_are_to_each_other(shares):
    """Waves are of a Gaussian kernel of the distance, which standardized columns make long for rare categories."""
    rows = torch.repeat_interleave(torch.eye(3), (200 * torch.tensor(shares)).round().long(), dim=0)
    many = torch.cat([rows[torch.randperm(200, generator=torch.Generator().manual_seed(k))] for k in range(4)], dim=1)
    base = torch.eye(3)[0].repeat(4)
    probes = torch.stack([base, *(torch.cat([torch.eye(3)[c], base[3:]]) for c in (1, 2))])
    waves = sums._draw_features(torch.cat([probes, many]))[:3, :-1]
    assert torch.isfinite(waves).all()
    kernel = waves @ waves.T
    assert kernel[0, 1] == pytest.approx(kernel[0, 2].item(), abs=0.2)
    assert kernel[0, 2] > 0.5


def test_waves_of_constant_columns_are_constant():
    waves = sums._draw_features(torch.ones(5, 3))
    assert torch.isfinite(waves).all()
    assert (waves == waves[0]).all()


def infer(out, *attacks, method="fedsplitnn", rows=200, **model):
    """Return the leak of each attack and strength, of attacks that are evaluated together."""
    report = vflsec.evaluate(
        dataset="toy", data={"options": {"rows": rows}}, model={"bottom": [4], **model}, seeds=1, methods=[method],
        train={"epochs": 2, "pretrain": {"epochs": 2}}, attack=attacks, defense="sealed:strength=1",
        aux={"n": 20, "folds": 0}, jobs=1, progress=False, out=out / "-".join(attacks),
    )  # fmt: skip
    return {(p.attack, p.strength): p.leak.mean for p in report.points}


@pytest.mark.usefixtures("small_forests")
def test_attacks_that_read_the_same_sums_solve_them_once(tmp_path, monkeypatch):
    solved = []
    monkeypatch.setattr(sums, "_draw_features", lambda x, draw=sums._draw_features: solved.append(1) or draw(x))
    apart = infer(tmp_path, "sums") | infer(tmp_path, "fusion")
    assert len(solved) == 2
    assert infer(tmp_path, "sums", "fusion") == pytest.approx(apart, nan_ok=True)
    assert len(solved) == 3


@pytest.mark.usefixtures("small_forests")
def test_attacks_share_no_sums_with_those_that_do_not_read_them(tmp_path):
    settings = {"method": "fedhssl-simsiam", "encoder": "mlp", "rows": 100}
    apart = infer(tmp_path, "attribute", **settings) | infer(tmp_path, "attribute-fusion", **settings)
    for attacks in (("attribute", "attribute-fusion"), ("attribute-fusion", "attribute")):
        assert infer(tmp_path, *attacks, **settings) == pytest.approx(apart)


def test_what_an_attack_does_to_solved_sums_is_unseen_by_others():
    asked, _ = attacked(1.0)
    expected = estimate_labels(asked.view).clone()
    estimate_labels(asked.view.copy_private()).zero_()
    assert torch.equal(estimate_labels(asked.view), expected)


@pytest.mark.parametrize("count", [5, 2**20])
def test_weights_of_a_row_are_no_longer_than_the_unit(count):
    jacobians = 1 + 1e-3 * torch.rand(3, 1, count, generator=torch.Generator().manual_seed(0))
    (weights,) = round_weights([jacobians], 2.0**16)
    lengths = weights.double().square().sum(dim=(1, 2)).sqrt()
    assert (lengths <= 2**16).all()
    assert (lengths > 0.98 * 2**16).all()
