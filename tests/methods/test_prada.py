"""PrADA: pre-training is what its formulas say, what stays stays, who hears what, and that a killed run goes on."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vflsec.base.errors import Diverged, UsageError
from vflsec.base.layout import Group, Grouping
from vflsec.base.seeds import make_rng, seed_weights
from vflsec.core import registry
from vflsec.core.defense import Defense
from vflsec.core.federation import Checkpoint
from vflsec.core.message import Kind, Transcript
from vflsec.core.protocol import Boundary
from vflsec.core.settings import ModelSpec, PretrainSpec, TrainSpec
from vflsec.defenses.iso import IsotropicNoise
from vflsec.defenses.label_dp import LabelDP
from vflsec.defenses.phe import EncryptedBoundary
from vflsec.methods.feature_group_method import VerticalLogisticRegression
from vflsec.methods.prada import PrADA, decay, scale_reversal
from vflsec.nn.stacked import draw_batches
from vflsec.run import spec as specs
from vflsec.run import training
from vflsec.run.federation import build_federation
from vflsec.run.plan import build_cell
from vflsec.run.store import Store
from vflsec.testing.federations import make_toy_federation

PrADAWithoutIR, PrADAWithoutFGIR, PrADAWithoutDAFGIR = (
    registry.load("methods", name) for name in ("prada-no-ir", "prada-no-fg-ir", "prada-no-da-fg-ir")
)
COLUMNS = [f"passive_1_x{j}" for j in range(4)]
SINGLE = tuple(Group(f"g{k}", tuple(COLUMNS[2 * k : 2 * k + 2]), (4, 3, 2)) for k in range(2))
GROUPS = Grouping(SINGLE, (Group("g0-g1", tuple(COLUMNS), (6, 5, 3)),), Group("all", tuple(COLUMNS), (7, 4, 2)), {})


def make_federation(*, parties=2, defenses=(), source=96, **options):
    federation = make_toy_federation(parties=parties, **{"rows": 160, "columns": 4, "source": source, **options})
    federation.passive[0].layout = federation.passive[0].layout._replace(grouping=GROUPS)
    for party in federation.all_parties:
        party.defenses = tuple(defenses)
    return federation


def make(kind=PrADA, *, pretrain=None, model=None, train=None, **options):
    spec = TrainSpec(
        **{"epochs": 3, "batch": 32, **(train or {})},
        pretrain=PretrainSpec(**{"epochs": 2, "batch": 32, **(pretrain or {})}),
    )
    return kind(spec, ModelSpec(**(model or {})), **options)


def pretrained(made, federation):
    made.build(federation)
    made.run("pretrain", federation)
    return federation


def state(module):
    return {key: value.clone() for key, value in module.state_dict().items()}


def equal(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[key], other[key]) for key in one)


def test_schedules_are_those_of_the_authors_code():
    assert (scale_reversal(0), decay(0)) == (0, 1)
    assert scale_reversal(0.1) == pytest.approx((math.e - 1) / (math.e + 1))
    assert decay(0.1) == pytest.approx(2**-0.75)
    assert scale_reversal(200 / 600) == pytest.approx(0.93, abs=0.005)  # where the paper's longest run ends
    assert scale_reversal(120 / 600) == pytest.approx(0.76, abs=0.005)


def test_the_groups_that_each_variant_sends():
    found = {}
    for kind in (PrADA, PrADAWithoutIR, PrADAWithoutFGIR, PrADAWithoutDAFGIR):
        federation, made = make_federation(), make(kind)
        made.build(federation)
        bottom = federation.passive[0].modules["bottom"]
        found[kind] = (bottom.names, bottom.widths, bottom.width, federation.active.modules["top"].head.weight.shape)
        tell = federation.passive[0].modules["discriminators"] if kind is not PrADAWithoutDAFGIR else None
        first = tell and [m.weight.shape for m in tell.layers[0].maps]
        assert first == {
            PrADA: [(24, 2), (24, 2), (24, 3)], PrADAWithoutIR: [(24, 2)] * 2, PrADAWithoutFGIR: [(36, 2)],
            PrADAWithoutDAFGIR: None,
        }[kind]  # fmt: skip
    assert found == {  # one output, of the active party's 4 columns and of mu
        PrADA: (("g0", "g1", "g0-g1"), (2, 2, 3), 3, (1, 7)),
        PrADAWithoutIR: (("g0", "g1"), (2, 2), 2, (1, 6)),
        PrADAWithoutFGIR: (("all",), (2,), 4, (1, 8)),
        PrADAWithoutDAFGIR: (("all",), (2,), 4, (1, 8)),
    }


def test_the_head_is_a_logistic_regression():
    federation, made = make_federation(), make()
    made.build(federation)
    top = federation.active.modules["top"]
    own, mu = torch.randn(9, 4), torch.randn(9, 3)
    logits, y = top([own, mu]), torch.arange(9) % 2
    z = torch.cat([own, mu], dim=1) @ top.head.weight[0] + top.head.bias[0]
    assert torch.equal(logits[:, 0], torch.zeros(9))
    assert F.cross_entropy(logits, y).item() == pytest.approx(
        F.binary_cross_entropy_with_logits(z, y.float()).item(), rel=1e-6
    )


def one_piece(federation, made, *, alternating):
    """Pre-train the same networks in one piece: no wire, one graph, autograd for everything but the reversal."""
    passive, source = federation.passive[0], federation.source
    bottom, tell, top = passive.modules["bottom"], passive.modules["discriminators"], source.modules["top"]
    spec = made.pretrain_spec

    def sgd(*modules):
        parameters = [p for m in modules for p in m.parameters()]
        return torch.optim.SGD(parameters, spec.lr, 0.99, weight_decay=1e-5)

    joint, alone = sgd(top, bottom, tell), sgd(bottom, tell)
    losses = []
    for epoch in range(spec.epochs):
        y, seed = source.labels["source"], federation.seed
        parts = draw_batches(len(y), spec.batch, make_rng(seed, "batches", "pretrain", epoch), federation.device)
        with seed_weights(seed, "dropout", "pretrain", epoch):
            total = 0.0
            for number, rows in enumerate(parts, epoch * len(parts)):
                q, ramp = (number / (length * len(parts)) for length in (made.decay_epochs, made.ramp_epochs or 1))
                alpha = made.adaptation * (2 / (1 + math.exp(-10 * ramp)) - 1 if made.ramp_epochs else 1)
                for optimizer in (joint, alone):
                    optimizer.param_groups[0]["lr"] = spec.lr / (1 + 10 * q) ** 0.75
                x, x_p = passive.features["source"][rows], source.features["source"][rows]
                others = target_rows(federation, made, number)

                def domain(f_source, others=others, alpha=alpha, rows=rows):
                    f = torch.cat([f_source, bottom.extract(passive.features["adaptation"][others])])
                    f = (1 + alpha) * f.detach() - alpha * f  # the value of f, the gradient of -alpha f
                    d = torch.tensor([0] * len(rows) + [1] * len(others))
                    logits = tell.layers(f).view(len(f), -1, 2)
                    return sum(F.cross_entropy(logits[:, i], d) for i in range(logits.shape[1]))

                if alternating:
                    alone.zero_grad()
                    domain(bottom.extract(x)).backward()
                    alone.step()
                joint.zero_grad()
                f = bottom.extract(x)
                z = top.head(torch.cat([x_p, bottom.aggregators(f)], dim=1))[:, 0]
                loss = F.binary_cross_entropy_with_logits(z, y[rows].float())
                total += loss.item() * len(rows)
                (loss if alternating else loss + domain(f)).backward()
                joint.step()
        losses.append(total / len(y))
    return losses


def target_rows(federation, made, number):
    """The passive party goes through its rows to adapt to again and again, in a new order each time."""
    count = len(federation.passive[0].features["adaptation"])
    several = len(draw_batches(count, made.pretrain_spec.batch, make_rng(0), federation.device))
    order = make_rng(federation.seed, "batches", "adaptation", "passive_1", number // several)
    return draw_batches(count, made.pretrain_spec.batch, order, federation.device)[number % several]


@pytest.mark.sampled
@pytest.mark.parametrize("ramp", [None, 2])
@pytest.mark.parametrize("alternating", [False, True])
def test_pre_training_is_the_joint_loss_with_a_reversed_gradient(alternating, ramp):
    pretrain = {"epochs": 4, "lr": 1e-3}
    options = {"alternating": alternating, "ramp_epochs": ramp, "decay_epochs": 3, "pretrain": pretrain}
    federation, made = make_federation(), make(**options)
    made.build(federation)
    twin, same = make_federation(), make(**options)
    same.build(twin)
    for party in twin.all_parties:
        party.modules.train()
    history = made.run("pretrain", federation)
    assert history == pytest.approx(one_piece(twin, same, alternating=alternating), rel=1e-4)
    for one, other in zip(federation.all_parties, twin.all_parties, strict=True):
        for key, value in one.modules.state_dict().items():
            assert torch.allclose(value.float(), other.modules.state_dict()[key].float(), atol=2e-5), key


@pytest.mark.parametrize(
    ("ramp", "alphas"),
    [(None, [0.5] * 4), (3, [0.0, 0.5 * scale_reversal(0.5), 0.5 * scale_reversal(1), 0.5 * scale_reversal(1.5)])],
)
def test_the_adaptation_weight_and_the_learning_rate_have_schedules_of_their_own(ramp, alphas):
    made, federation = make(adaptation=0.5, ramp_epochs=ramp, decay_epochs=6), make_federation()
    made.build(federation)
    training = made.make_adversarial(federation)
    found = [(training._set_schedule(epochs, ()), training._alpha) for epochs in (0.0, 1.5, 3.0, 4.5)]
    assert [rate for rate, _ in found] == pytest.approx([5e-4 * decay(q) for q in (0, 0.25, 0.5, 0.75)])
    assert [alpha for _, alpha in found] == pytest.approx(alphas)


def test_without_adaptation_the_target_changes_no_weight():
    """Discriminators learn, and extractors hear nothing of it; running means do count the target's rows."""
    found = {}
    for adaptation in (0.0, 1.0):
        for shift in (0.0, 3.0):
            federation, made = make_federation(), make(adaptation=adaptation)
            federation.passive[0].features["adaptation"] = federation.passive[0].features["adaptation"] + shift
            bottom = pretrained(made, federation).passive[0].modules["bottom"]
            found[adaptation, shift] = {k: p.detach().clone() for k, p in bottom.named_parameters()}
    assert equal(found[0.0, 0.0], found[0.0, 3.0])
    assert not equal(found[1.0, 0.0], found[1.0, 3.0])


# Fine-tuning


def test_extractors_that_stay_are_the_same_bit_for_bit_and_hear_nothing():
    federation, made, heard = make_federation(), make(finetune_extractors=False), []
    bottom = pretrained(made, federation).passive[0].modules["bottom"]
    before, head = state(bottom), state(federation.active.modules["top"])
    federation.channel.taps.append(heard.append)
    made.run("finetune", federation)
    assert equal(before, state(bottom)), "running statistics as well"
    assert not equal(head, state(federation.active.modules["top"]))
    assert {m.kind for m in heard} == {Kind.EMBEDDING}
    rows = torch.cat([m.rows for m in heard])
    assert sorted(rows.tolist()) == list(range(federation.n_rows("train"))), "each row crosses once"


def test_extractors_learn_on_by_default_and_the_head_starts_anew():
    federation, made = make_federation(), make()
    made.build(federation)
    head = state(federation.active.modules["top"])
    made.run("pretrain", federation)
    assert equal(head, state(federation.active.modules["top"])), "the active party has no part in it"
    before, of_source = state(federation.passive[0].modules["bottom"]), state(federation.source.modules["top"])
    made.run("finetune", federation)
    assert not equal(before, state(federation.passive[0].modules["bottom"]))
    assert equal(of_source, state(federation.source.modules["top"])), "nor has the source in this"


class Holding(Boundary):
    """A boundary that has weights of its own, and learns of what comes back."""

    name = "holding"
    reference = "none: a test"
    reveals = {"passive": ("nothing",), "active": ("nothing",)}  # noqa: RUF012

    def __init__(self, passive, active):
        super().__init__(passive, active)
        self.weight = nn.Linear(3, 1)
        self.came_back = []

    def modules(self):
        return {self.active.name: self.weight}

    def forward(self, h, step):
        self.h = h.detach()
        return self.weight(self.h)

    def backward(self, g, step):
        self.weight.weight.grad = g.T @ self.h
        self.came_back.append(len(g))
        return g @ self.weight.weight.detach()


def test_extractors_stay_where_the_boundary_learns(monkeypatch):
    monkeypatch.setattr(PrADA, "width", lambda self, party: 4 if party.modules["bottom"].width == 4 else 1)
    federation, made = make_federation(), make(finetune_extractors=False, boundary=Holding)
    bottom = pretrained(made, federation).passive[0].modules["bottom"]
    before = state(bottom)
    boundary = made._boundaries["passive_1"]
    weight = boundary.weight.weight.detach().clone()
    made.run("finetune", federation)
    assert equal(before, state(bottom))
    assert sum(boundary.came_back) == 3 * federation.n_rows("train")
    assert not torch.equal(boundary.weight.weight, weight)


# Who hears what


def test_the_source_sends_as_an_active_party_does_and_its_rows_are_its_own():
    federation, made, heard = make_federation(), make(), []
    made.build(federation)
    federation.channel.taps.append(heard.append)
    made.run("pretrain", federation)
    assert {(m.sender, m.receiver, m.kind, m.split) for m in heard} == {
        ("passive_1", "source", Kind.EMBEDDING, "source"),
        ("source", "passive_1", Kind.GRADIENT, "source"),
    }
    rows = torch.cat([m.rows for m in heard if m.kind is Kind.GRADIENT])
    assert torch.equal(torch.bincount(rows), torch.full((96,), 2)), "each row twice: two epochs"
    made.prepare(federation)
    assert made.releases(IsotropicNoise(1.0), federation) == 2 + 3
    assert made.releases(IsotropicNoise(1.0, at=["finetune.gradient"]), federation) == 3


class Recorder(Defense):
    name, reference, guarantee, points = "recorder", "none: a test", "none", (Kind.GRADIENT,)

    def __init__(self, strength=1.0, *, at=None):
        super().__init__(strength, at=at)
        self._labels, self._received = [], []

    def on_labels(self, y, *, features, n_classes, rng):
        self._labels.append(len(y))
        return 1 - y

    def on_received(self, h, sender):
        self._received.append(sender)
        return h


def test_the_sources_defenses_act_in_pre_training():
    recorder = Recorder()
    federation, made = make_federation(), make()
    federation.source.defenses = (recorder,)
    pretrained(made, federation)
    assert recorder._labels == [96]
    assert set(recorder._received) == {"passive_1"}
    twin = make_federation()
    for labels in twin.source.labels.values():
        labels.copy_(1 - labels)
    pretrained(make(), twin)
    bottoms = [state(w.passive[0].modules["bottom"]) for w in (federation, twin)]
    assert equal(*bottoms), "labels that a defense changes are changed"


def test_an_active_partys_defense_is_the_sources_as_well():
    def carriers(text):
        spec = specs.read_training(
            {"dataset": "toy", "data": {"options": {"source": 60}}, "methods": ["prada"], "fixed": [text]}
        )
        federation = build_federation(build_cell(spec, "prada", 0), "cpu")
        return [party.name for party in federation.all_parties if party.defenses]

    assert carriers("iso:lambda=1,by=active") == ["active", "source"]
    assert carriers("iso:lambda=1,by=passive@embedding") == ["passive_1"]
    assert carriers("iso:lambda=1") == ["active", "passive_1", "source"]


SETTINGS = {
    "dataset": "toy",
    "data": {"options": {"rows": 200, "columns": 4, "source": 96}},
    "methods": ["prada"],
    "train": {"epochs": 2, "pretrain": {"epochs": 2}},
}


def cell(**changes):
    return build_cell(specs.read_training({**SETTINGS, **changes}), "prada", 0)


@pytest.mark.parametrize(
    ("changes", "shared"),
    [
        ({"train": {"epochs": 9, "lr": 0.1, "pretrain": {"epochs": 2}}}, True),
        ({"method": {"prada": {"finetune_extractors": False}}}, True),
        ({"fixed": ["iso:lambda=5@finetune.gradient"]}, True),
        ({"fixed": ["iso:lambda=5@gradient"]}, False),
        ({"fixed": ["label-dp:epsilon=1"]}, False),
        ({"fixed": ["dcor:strength=1"]}, False),
        ({"train": {"epochs": 2, "pretrain": {"epochs": 3}}}, False),
        ({"method": {"prada": {"adaptation": 0.5}}}, False),
        ({"data": {"options": {"rows": 200, "columns": 4, "source": 97}}}, False),
    ],
)
def test_what_comes_later_shares_the_pre_training(changes, shared):
    assert (cell().stage_key("pretrain") == cell(**changes).stage_key("pretrain")) == shared


def test_an_attack_hears_of_the_active_partys_rows_alone_and_needs_no_second_pre_training(tmp_path, monkeypatch):
    ran = []
    train = PrADA.train
    monkeypatch.setattr(PrADA, "train", lambda self, phase, *rest: ran.append(phase) or train(self, phase, *rest))
    for _ in range(2):
        tap = Transcript(frozenset({"passive_1"}), frozenset({Kind.GRADIENT}))
        training.train(cell(), "cpu", store=Store(tmp_path), tap=tap)
        assert {m.phase for m in tap.messages} == {"finetune"}
        assert {m.sender for m in tap.messages} == {"active"}
    assert ran == ["pretrain", "finetune", "finetune"]


def test_a_killed_pre_training_goes_on_where_it_stopped(tmp_path):
    whole = pretrained(make(alternating=True, pretrain={"epochs": 3}), make_federation())
    federation, made = make_federation(), make(alternating=True, pretrain={"epochs": 3})
    federation.checkpoint = Checkpoint(tmp_path / "partial")
    made.build(federation)

    def kill(phase, done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made.run("pretrain", federation, kill)
    again, later = make_federation(), make(alternating=True, pretrain={"epochs": 3})
    again.checkpoint = federation.checkpoint
    assert pretrained(later, again).channel.traffic == whole.channel.traffic
    for one, other in zip(whole.all_parties, again.all_parties, strict=True):
        assert equal(state(one.modules), state(other.modules))


# Refusals


@pytest.mark.parametrize(
    ("settings", "federation", "message"),
    [
        ({}, {"source": 0}, "got none: .*--dataset census-domains"),
        ({"model": {"head": "mlp"}}, {}, "model.head=linear .*got mlp and concat"),
        ({"train": {"batch": 1}}, {}, "train.batch >= 2, got 1"),
    ],
)
def test_what_cannot_be_trained_is_refused(settings, federation, message):
    federation, made = make_federation(**federation), make(**settings)

    def start():
        made.build(federation)
        made.check(federation)

    with pytest.raises(UsageError, match=message):
        start()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pretrain": {"batch": 1}}, "expected train.pretrain.batch >= 2, got 1"),
        ({"ramp_epochs": 0}, "expected ramp_epochs > 0, got 0"),
        ({"decay_epochs": 0}, "expected decay_epochs > 0, got 0"),
        ({"adaptation": -1}, "expected adaptation >= 0, got -1"),
    ],
)
def test_numbers_out_of_range_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        make(**options)


def test_a_loss_that_is_no_number_is_a_divergence():
    federation = make_federation()
    federation.source.features["source"][0, 0] = float("nan")
    with pytest.raises(Diverged, match="loss is nan after epoch"):
        pretrained(make(), federation)


# Vertical logistic regression


def test_vertical_lr_is_logistic_regression_on_all_columns():
    federation = make_federation(parties=3)
    made = make(VerticalLogisticRegression, train={"optimizer": "sgd", "momentum": 0.9, "lr": 0.1})
    made.build(federation)
    head = copy.deepcopy(federation.active.modules["top"].head)
    made.run("train", federation)
    x = torch.cat([party.features["train"] for party in federation.parties.values()], dim=1)
    y, optimizer = federation.active.labels["train"], torch.optim.SGD(head.parameters(), 0.1, 0.9)
    order = make_rng(federation.seed, "batches", "train")
    for _ in range(3):
        for rows in draw_batches(len(y), 32, order, federation.device):
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(head(x[rows])[:, 0], y[rows].float()).backward()
            optimizer.step()
    trained = federation.active.modules["top"].head
    assert torch.allclose(trained.weight, head.weight, atol=1e-5)
    assert trained.weight.shape == (1, 12)
    logits = made.predict(federation, "test")
    columns = torch.cat([party.features["test"] for party in federation.parties.values()], dim=1)
    assert torch.allclose(logits[:, 1] - logits[:, 0], (columns @ head.weight.T + head.bias)[:, 0], atol=1e-4)


def test_label_dp_serves_it_too():
    federation = make_federation(defenses=[LabelDP(1.0)])
    assert torch.isfinite(make(VerticalLogisticRegression).fit(federation).predict("test")).all()


# The encrypted boundary

LINEAR = {"optimizer": "sgd", "momentum": 0.9, "lr": 0.02}


RAMP = {"adaptation": 1.0, "ramp_epochs": 600}
"""The authors' schedule: a weight that starts at 0 amplifies rounding less than a constant one."""


@pytest.mark.sampled
@pytest.mark.parametrize("backend", ["plain", "paillier"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (PrADA, RAMP),
        (PrADA, {**RAMP, "finetune_extractors": False}),
        (PrADA, {**RAMP, "alternating": True}),
        (PrADAWithoutFGIR, RAMP),
        (PrADAWithoutDAFGIR, {}),
        (VerticalLogisticRegression, {}),
    ],
    ids=["prada", "extractors stay", "alternating", "no-fg-ir", "no-da-fg-ir", "vertical-lr"],
)
def test_under_encryption_every_phase_learns_what_it_learns_in_clear(kind, options, backend):
    """The source's weights as well, at the rates and with the momentum of pre-training."""
    found = []
    for defenses in ((), (EncryptedBoundary(backend=backend, bits=1024),)):
        federation = make_federation(defenses=defenses)
        found.append(make(kind, train=LINEAR, pretrain={"lr": 0.005}, **options).fit(federation))
    clear, sealed = found
    for phase, losses in clear.history.items():
        assert sealed.history[phase] == pytest.approx(losses, rel=1e-4), phase
        assert losses[-1] < losses[0]
    within = {"plain": {"rtol": 1e-3, "atol": 1e-4}, "paillier": {"rtol": 1e-2, "atol": 2e-2}}[backend]
    torch.testing.assert_close(sealed.predict("test"), clear.predict("test"), **within)  # networks amplify rounding
    bottoms = [state(one.federation.passive[0].modules["bottom"]) for one in found]
    for key, value in bottoms[0].items():
        torch.testing.assert_close(bottoms[1][key], value, **within)


@pytest.mark.parametrize(
    ("kind", "options", "backend"),
    [
        (VerticalLogisticRegression, {}, "plain"),
        (PrADA, {"finetune_extractors": False}, "plain"),
        (VerticalLogisticRegression, {}, "paillier"),
    ],
)
def test_models_that_stay_get_no_gradient_under_encryption(kind, options, backend):
    """Delta of a party that has nothing to move would tell it the labels, and serve no other purpose."""
    federation = make_federation(defenses=[EncryptedBoundary(backend=backend, bits=1024)])
    made = make(kind, train={**LINEAR, "epochs": 1}, **options)
    made.build(federation)
    heard = []
    federation.channel.taps.append(heard.append)
    made.run(made.phases[-1], federation)
    assert {message.kind for message in heard} == {Kind.EMBEDDING, Kind.CIPHERTEXT}
    told = [type(message.payload["value"]).__name__ for message in heard if message.kind is Kind.CIPHERTEXT]
    if backend == "paillier":
        assert set(told) == {"Features", "MaskedScores", "Scores", "MaskedGradient", "NoisedGradient"}
    assert made.messages_in(made.phases[-1], options) == {Kind.EMBEDDING}


def test_the_price_of_encryption_is_that_of_both_phases(monkeypatch):
    federation = make_federation(defenses=[EncryptedBoundary(bits=1024)])
    made = make(train=LINEAR)
    made.build(federation)
    asked = []
    monkeypatch.setattr("vflsec.protocols.paillier.estimate", lambda layout, batches: asked.append(batches) or 1)
    rows = {"source": len(federation.source.labels["source"]), "train": federation.n_rows("train")}
    expected = [2 * math.ceil(rows["source"] / 32), 3 * math.ceil(rows["train"] / 32)]
    assert made.cryptography(federation) == sum(expected)
    assert asked == expected
