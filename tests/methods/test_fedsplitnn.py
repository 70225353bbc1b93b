"""Split training is joint training, its traffic is exact, and the wire's defenses and hooks are honored."""

import math

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from vflsec.base.errors import Diverged, UsageError
from vflsec.base.seeds import make_rng
from vflsec.core.attack import Attack, IntegrityAttack
from vflsec.core.defense import Defense
from vflsec.core.message import Kind, Route, Transcript
from vflsec.core.party import Party
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.data.partition import DataSpec
from vflsec.defenses.iso import IsotropicNoise
from vflsec.methods.checkpoint import load_states, save_states
from vflsec.methods.fedsplitnn import FedSplitNN
from vflsec.methods.split_training import SplitTraining
from vflsec.protocols.plain import PlainBoundary
from vflsec.testing.federations import make_toy_federation

VALIDATION = DataSpec(validation=0.25)
QUICK = {"epochs": 3, "batch": 32}


def make_federation(*, parties=2, classes=2, data=None, rows=150, defenses=(), **options):
    federation = make_toy_federation(parties=parties, classes=classes, data=data, rows=rows, columns=4, **options)
    for party in federation.parties.values():
        party.defenses = tuple(defenses)
    return federation


def method(*, model=None, boundary=PlainBoundary, **train):
    model = ModelSpec(**{"bottom": (6,), **(model or {})})
    return FedSplitNN(TrainSpec(**{**QUICK, **train}), model, boundary=boundary)


def weights(federation, *names):
    """Every parameter of the parties ``names`` (of all, unless given), in one vector each."""
    return {
        name: torch.cat([p.detach().flatten() for p in party.modules.parameters()])
        for name, party in federation.parties.items()
        if not names or name in names
    }


def joint_training(federation, spec, phase="train"):
    """Train the same network in one piece: no parties, no wire, one optimizer, one graph."""
    modules = nn.ModuleList([party.modules for party in federation.parties.values()])
    rates = {
        "adam": lambda p: torch.optim.Adam(p, spec.lr),
        "sgd": lambda p: torch.optim.SGD(p, spec.lr, spec.momentum),
        "adagrad": lambda p: torch.optim.Adagrad(p, spec.lr),
    }
    optimizer = rates[spec.optimizer](modules.parameters())
    order, labels = make_rng(federation.seed, "batches", phase), federation.active.labels["train"]
    for epoch in range(spec.epochs):
        for group in optimizer.param_groups:
            group["lr"] = spec.rate(epoch, spec.epochs)
        for rows in torch.randperm(len(labels), generator=order).split(spec.batch):
            embeddings = [p.modules["bottom"](p.features["train"][rows]) for p in federation.parties.values()]
            loss = F.cross_entropy(federation.active.modules["top"](embeddings), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@pytest.mark.sampled
@pytest.mark.parametrize("parties", [2, 4])
@pytest.mark.parametrize("optimizer", ["adam", "sgd", "adagrad"])
@pytest.mark.parametrize(
    ("aggregation", "head"), [("concat", "linear"), ("sum", "none"), ("mean", "mlp"), ("max", "linear")]
)
def test_split_training_equals_joint_training(parties, optimizer, aggregation, head):
    made = method(model={"aggregation": aggregation, "head": head}, optimizer=optimizer, schedule="cosine", lr=0.01)
    split, joint = (make_federation(parties=parties) for _ in range(2))
    made.build(joint)
    before = weights(joint)
    joint_training(joint, made.train_spec)
    made.fit(split)
    expected = weights(joint)
    for name, found in weights(split).items():
        assert torch.allclose(found, expected[name], atol=2e-6, rtol=1e-5), name
        assert not torch.allclose(found, before[name], atol=1e-3), "nothing was trained"


def test_strength_zero_changes_no_bit():
    plain, defended = make_federation(), make_federation(defenses=[IsotropicNoise(0.0, at=["gradient", "embedding"])])
    for federation in (plain, defended):
        method().fit(federation)
    for name, found in weights(defended).items():
        assert torch.equal(found, weights(plain)[name])


@pytest.mark.parametrize("parties", [2, 3])
def test_traffic_is_exact_and_as_much_comes_down_as_goes_up(parties):
    federation = make_federation(parties=parties)
    trained = method(model={"cut": 5}).fit(federation)
    trained.predict("test")
    expected = {}
    for party in federation.passive:
        nbytes = QUICK["epochs"] * federation.n_rows("train") * 5 * 4
        expected[Route("train", party.name, "active", Kind.EMBEDDING)] = nbytes
        expected[Route("train", "active", party.name, Kind.GRADIENT)] = nbytes
        expected[Route("predict", party.name, "active", Kind.EMBEDDING)] = federation.n_rows("test") * 5 * 4
    assert dict(federation.channel.traffic) == expected


def test_no_gradient_rides_on_a_message_that_a_tap_keeps():
    """A transcript may keep an embedding; the clean gradient with respect to it must not come along."""
    federation = make_federation(defenses=[IsotropicNoise(5.0)])
    transcript = Transcript(frozenset({"passive_1"}), frozenset(Kind))
    federation.channel.taps.append(transcript)
    method().fit(federation)
    assert all(message.payload["value"].grad is None for message in transcript.messages)
    assert not any(message.payload["value"].requires_grad for message in transcript.messages)


def received_gradients(classes, defenses=()):
    """What passive_1 hears, row by row, and the true labels of these rows."""
    federation = make_federation(classes=classes, rows=60 * classes, defenses=defenses)
    transcript = Transcript(frozenset({"passive_1"}), frozenset({Kind.GRADIENT}))
    federation.channel.taps.append(transcript)
    method(model={"aggregation": "sum", "head": "none"}, epochs=2, lr=1e-4).fit(federation)
    gradients = torch.cat([message.payload["value"] for message in transcript.messages])
    rows = torch.cat([message.rows for message in transcript.messages])
    return gradients, federation.active.labels["train"][rows]


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_summed_logits_hand_over_the_label(classes):
    """softmax(z) - onehot(y) is negative at the true class and nowhere else."""
    gradients, labels = received_gradients(classes)
    assert ((gradients < 0).sum(dim=1) == 1).all()
    assert torch.equal(gradients.argmin(dim=1), labels)


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_strong_noise_takes_the_label_back(classes):
    gradients, labels = received_gradients(classes, [IsotropicNoise(100.0)])
    hits, chance = float((gradients.argmin(dim=1) == labels).double().mean()), 1 / classes
    assert hits - chance < 4 * math.sqrt(chance * (1 - chance) / len(labels)) + 0.02  # the signal is 1 % of the noise


@pytest.mark.parametrize("settings", [{"patience": 1}, {"select": "best_on_val"}])
def test_selection_needs_validation_rows(settings):
    with pytest.raises(UsageError, match=r"got none: add .*data\.validation=0\.1"):
        method(**settings).fit(make_federation())


@pytest.fixture
def scripted(monkeypatch):
    """Replace the metric after each epoch by given values; record the split and the models at that time."""

    def script(values):
        seen, values = [], iter(values)

        def _score(self, split):
            seen.append((split, weights(self.federation)))
            return next(values)

        monkeypatch.setattr(SplitTraining, "_score", _score)
        return seen

    return script


@pytest.mark.parametrize(
    ("select", "data", "split", "taken"),
    [("best_on_val", VALIDATION, "val", 1), ("paper_best_on_test", None, "test", 1), ("last", VALIDATION, "val", 4)],
)
def test_the_best_epoch_is_the_one_used(scripted, select, data, split, taken):
    seen = scripted([0.5, 0.9, 0.7, 0.9, 0.8])
    federation = make_federation(data=data)
    trained = method(epochs=5, select=select, patience=5).fit(federation)
    assert [where for where, _ in seen] == [split] * 5
    assert len(trained.history["train"]) == 5
    for name, found in weights(federation).items():
        assert torch.equal(found, seen[taken][1][name])


@pytest.mark.parametrize(("patience", "epochs"), [(1, 2), (2, 5), (3, 6), (None, 6)])
def test_patience_ends_training(scripted, patience, epochs):
    scripted([0.5, 0.5, 0.6, 0.6, 0.5, 0.4])
    made = method(epochs=6, patience=patience, select="best_on_val")
    assert len(made.fit(make_federation(data=VALIDATION)).history["train"]) == epochs


def test_the_default_looks_at_no_held_out_row(scripted):
    seen = scripted([])
    method().fit(make_federation(data=VALIDATION))
    assert not seen


def test_scoring_on_validation_rows_is_counted_and_seen_as_what_it_is():
    plain, selecting = make_federation(data=VALIDATION), make_federation(data=VALIDATION)
    heard = []
    selecting.channel.taps.append(heard.append)
    epochs = len(method().fit(plain).history["train"])
    method(select="best_on_val").fit(selecting)
    extra = selecting.channel.traffic - plain.channel.traffic
    assert extra == {("validate", "passive_1", "active", Kind.EMBEDDING): epochs * selecting.n_rows("val") * 2 * 4}
    assert {message.phase for message in heard} == {"train", "validate"}


@pytest.mark.parametrize("select", ["last", "best_on_val"])
def test_divergence_is_a_status(select):
    made = method(optimizer="sgd", lr=1e12, epochs=30, select=select)
    with pytest.raises(Diverged, match=r"lower train\.lr"):
        made.fit(make_federation(data=VALIDATION))


def test_predictions_that_blow_up_in_the_last_update_are_a_divergence():
    """One epoch of one update: its loss, taken before the update, is still finite."""
    made = method(optimizer="sgd", lr=1e38, epochs=1, batch=1000, select="best_on_val")
    with pytest.raises(Diverged, match="not finite on val rows"):
        made.fit(make_federation(data=VALIDATION))


class Declining(Attack):
    """Acts in training, if it had an optimizer."""

    name = reference = verified = "made for a test"
    needs = frozenset()

    def run(self, view, *, rng):
        raise NotImplementedError


def test_a_malicious_party_replaces_its_own_optimizer_only():
    honest, attacked = make_federation(parties=3), make_federation(parties=3)
    asked = []

    class Climbing(Declining):
        def optimizer(self, parameters, lr):
            parameters = list(parameters)
            asked.append((len(parameters), lr))
            return torch.optim.SGD(parameters, lr, maximize=True)

    attacked.malicious = {"passive_1": Climbing()}
    made = method(epochs=1, batch=1000, optimizer="sgd", lr=0.5)
    made.build(attacked)
    fresh = weights(attacked)
    made.fit(honest)
    made.fit(attacked)
    assert asked == [(4, 0.5)]
    step = {n: w - fresh[n] for n, w in weights(attacked).items()}
    usual = {n: w - fresh[n] for n, w in weights(honest).items()}
    assert torch.allclose(step["passive_1"], -usual["passive_1"], atol=1e-6)  # it climbs where others descend
    assert torch.equal(step["passive_2"], usual["passive_2"])
    assert torch.equal(step["active"], usual["active"])


def test_a_party_that_declines_plays_by_the_rules():
    honest, declined = make_federation(), make_federation()
    declined.malicious = {"passive_1": Declining()}
    for federation in (honest, declined):
        method().fit(federation)
    assert all(torch.equal(w, weights(honest)[name]) for name, w in weights(declined).items())


class Hooks(IntegrityAttack):
    """An attack on integrity whose hooks are given; each keeps the steps that it was called in."""

    name = reference = verified = "made for a test"

    def __init__(self, **hooks):
        self.hooks = {name: lambda value, step: value for name in ("features", "embedding", "gradient")} | hooks
        self.steps = []

    def _called(self, hook, value, step):
        self.steps.append((hook, step.phase, step.split, step.labels))
        return self.hooks[hook](value, step)

    def on_features(self, x, step):
        return self._called("features", x, step)

    def on_embedding(self, h, step):
        return self._called("embedding", h, step)

    def on_gradient(self, g, step):
        return self._called("gradient", g, step)


@pytest.mark.parametrize("train", [{}, {"local_steps": 2}, {"select": "best_on_val"}], ids=str)
def test_a_malicious_party_without_malice_is_the_honest_training(train):
    honest, attacked = (make_federation(parties=3, data=VALIDATION) for _ in range(2))
    attacked.malicious = {"passive_1": Hooks()}
    trained = [method(**train).fit(federation) for federation in (honest, attacked)]
    assert all(torch.equal(w, weights(honest)[name]) for name, w in weights(attacked).items())
    assert torch.equal(*(one.predict("test") for one in trained))


def test_a_malicious_party_acts_wherever_it_speaks_and_is_told_no_label():
    federation = make_federation(data=VALIDATION)
    hooks = Hooks()
    federation.malicious = {"passive_1": hooks}
    method(select="best_on_val").fit(federation).predict("test")
    assert {step[:3] for step in hooks.steps} == {
        ("features", "train", "train"), ("embedding", "train", "train"), ("gradient", "train", "train"),
        ("features", "validate", "val"), ("embedding", "validate", "val"),
        ("features", "predict", "test"), ("embedding", "predict", "test"),
    }  # fmt: skip
    assert {step[3] for step in hooks.steps} == {None}


def test_a_malicious_party_feeds_sends_and_learns_from_what_it_likes():
    federation, heard = make_federation(), []
    fresh = make_federation()
    method().build(fresh)
    hooks = Hooks(features=lambda x, step: x + 1, embedding=lambda h, step: 2 * h, gradient=lambda g, step: 0 * g)
    federation.malicious = {"passive_1": hooks}
    federation.channel.taps.append(heard.append)
    trained = method(epochs=1, batch=1000).fit(federation)
    party = federation.parties["passive_1"]
    assert torch.equal(weights(federation)["passive_1"], weights(fresh)["passive_1"]), "it learned from nothing"
    up = next(m for m in heard if m.kind is Kind.EMBEDDING)
    with torch.no_grad():
        expected = 2 * party.modules["bottom"](party.features["train"][up.rows] + 1)
    assert torch.equal(up.payload["value"], expected)
    heard.clear()
    trained.predict("test")
    with torch.no_grad():
        assert torch.equal(heard[0].payload["value"], 2 * party.modules["bottom"](party.features["test"] + 1))


def test_a_malicious_partys_own_defenses_still_act_on_what_it_sends():
    heard = []
    federation = make_federation(defenses=[IsotropicNoise(5.0, at=["embedding"])])
    federation.malicious = {"passive_1": Hooks(embedding=lambda h, step: torch.zeros_like(h) + 1)}
    federation.channel.taps.append(heard.append)
    method(epochs=1).fit(federation)
    up = next(m for m in heard if m.kind is Kind.EMBEDDING).payload["value"]
    assert up.std() > 0.1, "noise on what would be all ones"


class Hooked(Defense):
    """A defense of the active party at home: each hook can be set."""

    name = "hooked"
    reference = guarantee = "made for a test"
    points = ()

    def __init__(self, strength=1.0, **hooks):
        super().__init__(strength)
        vars(self).update(hooks)


class Learned(Hooked):
    """One with a learned part."""

    def __init__(self, strength=1.0, **hooks):
        super().__init__(strength, **hooks)
        self._scale = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self._scale.weight, 0.5)

    def modules(self):
        return [self._scale]


def fitted(*defenses):
    federation = make_federation(defenses=())
    was = federation.active
    active = Party("active", was.features, federation.channel, noise=was._noise, labels=was.labels, defenses=defenses)
    federation.parties = {**federation.parties, "active": active}
    return federation, method().fit(federation)


def test_labels_are_changed_once_before_training():
    calls = []

    def flip(y, *, features, n_classes, rng):
        calls.append(n_classes)
        return 1 - y

    flipped, trained = fitted(Hooked(on_labels=flip))
    assert calls == [2]
    by_hand = make_federation()
    by_hand.active.labels["train"] = 1 - by_hand.active.labels["train"]
    method().fit(by_hand)
    assert all(torch.equal(w, weights(by_hand)[name]) for name, w in weights(flipped).items())
    assert trained.history


def test_what_was_done_to_labels_last_is_undone_first_in_predictions():
    _, plain = fitted()
    _, changed = fitted(Hooked(on_predictions=lambda z: z + 1), Hooked(on_predictions=lambda z: z * 2))
    assert torch.allclose(changed.predict("test"), plain.predict("test") * 2 + 1)


class Certain(Hooked):
    """Softens by nothing: probabilities of 1."""

    softens = True

    def on_labels(self, y, *, features, n_classes, rng):
        return torch.nn.functional.one_hot(y, n_classes).float()


def test_soft_labels_that_are_certain_teach_what_class_numbers_do():
    """And what leaves, and what is penalized, goes by class numbers."""
    seen = []

    def penalty(h, labels, sender):
        seen.append(labels)

    soft, _ = fitted(Certain(penalty=penalty))
    plain, _ = fitted()
    assert all(torch.allclose(w, weights(plain)[name], atol=1e-5) for name, w in weights(soft).items())
    assert all((labels.dim(), labels.dtype) == (1, torch.long) for labels in seen)
    assert seen


def test_no_step_that_a_malicious_party_sees_holds_soft_labels():
    steps = []
    federation, _ = fitted()
    active = federation.active
    active.defenses = (Certain(),)
    federation.malicious = {"passive_1": Hooks(embedding=lambda h, step: steps.append(step) or h)}
    method().fit(federation)
    assert steps
    assert all(value is None or getattr(value, "dim", lambda: 1)() == 1 for step in steps for value in step)
    assert all(step.labels is None for step in steps)


def test_an_update_learns_from_what_a_defense_makes_of_its_batch():
    sizes = []

    def on_batch(embeddings, targets):
        sizes.append((len(embeddings), len(targets)))
        return [h[:4] for h in embeddings], targets[:4]

    federation, trained = fitted(Hooked(on_batch=on_batch))
    assert {size for size, _ in sizes} == {2}
    assert sum(rows for _, rows in sizes) == 3 * federation.n_rows("train")
    before = len(sizes)
    trained.predict("test")
    assert len(sizes) == before, "predictions are of every row as it is"


def test_what_was_received_passes_the_active_partys_defense_in_training_and_at_prediction():
    senders = []

    def drop(h, sender):
        senders.append(sender)
        return h * 0

    federation, trained = fitted(Hooked(on_received=drop))
    assert set(senders) == {"passive_1"}
    before = trained.predict("test")
    federation.passive[0].features["test"].add_(5)
    assert torch.equal(trained.predict("test"), before)


def test_a_penalty_joins_the_loss_and_its_learned_part_learns():
    made = Learned()
    made.penalty = lambda h, labels, sender: made._scale(torch.ones(len(h), 1)).square().mean()
    _, trained = fitted(made)
    _, plain = fitted()
    assert made._scale.weight.item() < 0.5
    extra = trained.history["train"][0] - plain.history["train"][0]
    assert 0.2 < extra < 0.25


def test_what_a_defense_learned_is_stored_with_its_party(tmp_path):
    made = Learned()
    made.penalty = lambda h, labels, sender: made._scale(torch.ones(len(h), 1)).square().mean()
    federation, trained = fitted(made)
    save_states(trained.federation, tmp_path)
    learned = made._scale.weight.item()
    torch.nn.init.zeros_(made._scale.weight)
    load_states(federation, tmp_path)
    assert made._scale.weight.item() == learned


def test_a_defense_learns_in_time_what_it_will_receive():
    """Its parts are sized before the optimizer is made, draw from a stream of their own, and know when they learn."""
    first, modes = [], []
    part = nn.ModuleDict()

    def prepare(widths, *, n_classes, rng):
        assert isinstance(rng, torch.Generator)
        part.update({name: nn.Linear(width, width) for name, width in widths.items()})
        first.append(part["passive_1"].weight.detach().clone())

    def on_received(h, sender):
        modes.append(part[sender].training)
        return part[sender](h)

    federation, trained = fitted(Hooked(modules=lambda: [part], prepare=prepare, on_received=on_received))
    assert all(modes)
    modes.clear()
    trained.predict("test")
    assert modes == [False]
    assert not torch.equal(part["passive_1"].weight, first[0])
    assert any("defenses" in name for name in federation.active.modules.state_dict())
    part.clear()
    fitted(Hooked(modules=lambda: [part], prepare=prepare, on_received=on_received))
    assert torch.equal(*first)


class ScaledBoundary(PlainBoundary):
    """Keeps a learned factor at the active party, and its own step count: a boundary with state."""

    def __init__(self, passive, active):
        super().__init__(passive, active)
        self.factor = nn.Parameter(torch.ones(1))
        self.ups = 0

    def forward(self, h, step):
        self.ups += 1
        return super().forward(h, step)

    def modules(self):
        holder = nn.Module()
        holder.factor = self.factor
        return {"active": holder}


def test_a_boundary_keeps_its_state_and_is_stored_with_its_owner(tmp_path):
    made = []

    class Counted(ScaledBoundary):
        def __init__(self, passive, active):
            super().__init__(passive, active)
            made.append(self)

    trained = method(epochs=1, batch=1000, boundary=Counted).fit(make_federation())
    trained.predict("test")
    assert [boundary.ups for boundary in made] == [2], "one boundary, in training and at prediction"
    save_states(trained.federation, tmp_path)
    assert "boundary_passive_1.factor" in load_file(tmp_path / "active.safetensors")


def test_a_penalty_reaches_the_passive_party():
    """Its gradient is part of the one that comes down."""
    federation, _ = fitted(Hooked(penalty=lambda h, labels, sender: 100 * h.square().mean()))
    plain, _ = fitted()
    h, usual = (w.passive[0].modules["bottom"](w.passive[0].features["train"]) for w in (federation, plain))
    assert h.square().mean() < usual.square().mean()


def test_hooks_at_strength_zero_are_not_called():
    def never(*_, **__):
        raise AssertionError

    hooks = dict.fromkeys(("on_labels", "on_predictions", "on_received", "penalty", "modules", "prepare"), never)
    _, trained = fitted(Hooked(0.0, **hooks))
    assert torch.isfinite(trained.predict("test")).all()


def test_an_empty_split_gives_no_logits():
    federation, trained = fitted()
    assert trained.predict("val").shape == (0, 2)
    assert sum(nbytes for route, nbytes in federation.channel.traffic.items() if route.phase == "predict") == 0


def test_progress_counts_epochs():
    seen = []
    method().fit(make_federation(), lambda *progress: seen.append(progress))
    assert seen == [("train", n, 3) for n in (1, 2, 3)]


def test_a_target_is_met_once_and_changes_nothing():
    """It is measured beside the run: noise, weights and traffic are those of a run without one, bit for bit."""
    federations = []
    for target in (None, 0.01):
        federation = make_federation(defenses=[IsotropicNoise(1.0, at=["embedding", "gradient"])])
        method(target=target).fit(federation)
        federations.append(federation)
    plain, aimed = federations
    assert all(torch.equal(found, weights(plain)[name]) for name, found in weights(aimed).items())
    assert aimed.channel.traffic == plain.channel.traffic
    assert (plain.reached, aimed.reached["epochs"]) == ({}, 1)
    missed = make_federation()
    method(target=1.0).fit(missed)
    assert missed.reached == {}
