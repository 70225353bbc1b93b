"""VFLHLP: what is constrained, what is initialized, what each party reads, and that a killed pre-training goes on."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vflsec.base.errors import Diverged, UsageError
from vflsec.base.seeds import make_rng
from vflsec.core import registry
from vflsec.core.defense import Defense
from vflsec.core.federation import Checkpoint
from vflsec.core.message import Kind, Route, Step
from vflsec.core.settings import ModelSpec, PretrainSpec, TrainSpec
from vflsec.data.partition import DataSpec
from vflsec.defenses.iso import IsotropicNoise
from vflsec.methods.checkpoint import load_states, save_states
from vflsec.methods.fedsplitnn import FedSplitNN
from vflsec.methods.local import Local
from vflsec.methods.split_training import SplitTraining
from vflsec.methods.vflhlp import VFLHLP, ScarfSSL, get_rows
from vflsec.results.metrics import auc
from vflsec.testing.federations import make_tiny_federation, make_toy_federation

DATA = DataSpec(overlap=0.6, aligned=0.8, validation=0.2)
VFLHLPActive, VFLHLPPassive = (registry.load("methods", name) for name in ("vflhlp-a", "vflhlp-p"))
FAMILY = [VFLHLP, VFLHLPActive, VFLHLPPassive]
QUICK = {"epochs": 3, "batch": 32}


def make_federation(*, parties=3, data=DATA, rows=240, defenses=(), **options):
    federation = make_toy_federation(parties=parties, data=data, rows=rows, columns=5, **options)
    for party in federation.parties.values():
        party.defenses = tuple(defenses)
    return federation


def method(kind=VFLHLP, *, model=None, pretrain=None, train=None, **options):
    spec = TrainSpec(**{**QUICK, **(train or {})}, pretrain=PretrainSpec(**(pretrain or {})))
    return kind(spec, ModelSpec(**{"encoder": "mlp", "bottom": (8,), "cut": 4, **(model or {})}), **options)


def pretrained(made, federation):
    made.build(federation)
    made.run("pretrain", federation)
    return federation


def state(module):
    return {key: value.clone() for key, value in module.state_dict().items()}


def equal(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[key], other[key]) for key in one)


def states(federation):
    return {name: state(party.modules) for name, party in federation.parties.items()}


# The constraint


def test_the_distance_is_half_the_sum_of_all_squares():
    """One number after the other: the encoder, the head's first columns, its bias; nothing else."""
    made = method(model={"encoder": "tabular"})  # with running statistics, which do not count
    federation = pretrained(made, make_federation(classes=3))
    own = federation.active.modules
    total = 0.0
    then = dict(own["pretrained"].encoder.named_parameters())
    for name, now in own["bottom"].named_parameters():
        for a, b in zip(now.flatten().tolist(), then[name].flatten().tolist(), strict=True):
            total += (a - b) ** 2
    weight, bias = own["pretrained"].head.weight, own["pretrained"].head.bias
    assert own["top"].head.weight.shape == (3, 3 * 4)
    for c in range(3):
        total += (own["top"].head.bias[c].item() - bias[c].item()) ** 2
        for j in range(4):
            total += (own["top"].head.weight[c, j].item() - weight[c, j].item()) ** 2
    assert made.measure_distance(federation).item() == pytest.approx(total / 2, rel=1e-5)


def test_the_distance_is_zero_at_the_model_itself():
    made = method()
    federation = pretrained(made, make_federation())
    own = federation.active.modules
    own["bottom"].load_state_dict(own["pretrained"].encoder.state_dict())
    with torch.no_grad():
        own["top"].head.weight[:, :4] = own["pretrained"].head.weight
        own["top"].head.bias.copy_(own["pretrained"].head.bias)
    assert made.measure_distance(federation).item() == 0
    with torch.no_grad():
        own["top"].head.weight[0, 3] += 2
        own["top"].head.weight[0, 4] += 5  # a passive party's
    assert made.measure_distance(federation).item() == pytest.approx(2)


def gradients(beta):
    """Every party's gradients of the loss on one batch, before any step; and the messages that came down."""
    made = method(beta=beta)
    federation = pretrained(made, make_federation())
    heard = []
    federation.channel.taps.append(lambda message: heard.append(message.payload["value"]))
    labels = federation.active.labels["train"]
    training = made.split(federation)
    training._update(Step(0, "finetune", torch.arange(20), labels[:20]), [])
    found = {
        f"{name}.{key}": p.grad
        for name, party in federation.parties.items()
        for key, p in party.modules.named_parameters()
        if not key.startswith("pretrained")
    }
    return federation, found, heard


def test_the_constraint_touches_the_active_partys_part_and_no_other():
    federation, plain, said = gradients(beta=0.0)
    _, held, said_held = gradients(beta=0.5)
    own = federation.active.modules
    for key, found in held.items():
        if key.startswith("active.bottom."):
            name = key.removeprefix("active.bottom.")
            offset = own["bottom"].get_parameter(name) - own["pretrained"].encoder.get_parameter(name)
            assert torch.allclose(found, plain[key] + 0.5 * offset, atol=1e-6), key
        elif key == "active.top.head.bias":
            offset = own["top"].head.bias - own["pretrained"].head.bias
            assert torch.allclose(found, plain[key] + 0.5 * offset, atol=1e-6)
        elif key == "active.top.head.weight":
            offset = own["top"].head.weight[:, :4] - own["pretrained"].head.weight
            assert torch.allclose(found[:, :4], plain[key][:, :4] + 0.5 * offset, atol=1e-6)
            assert offset.abs().max() > 0.01, "nothing to see"
            assert torch.equal(found[:, 4:], plain[key][:, 4:])
        else:
            assert torch.equal(found, plain[key]), key
    assert len(said) == len(said_held) == 4
    assert all(torch.equal(a, b) for a, b in zip(said, said_held, strict=True)), "nothing of it is said"


def test_a_large_beta_pins_the_active_part_to_the_pretrained_one():
    """SGD with rate times beta one: a step leads to Theta, less the rate times the gradient of the plain loss there."""
    made = method(beta=1e3, train={"optimizer": "sgd", "momentum": 0.0, "lr": 1e-3})
    federation = make_federation()
    made.fit(federation)
    gaps = [float((now - then).detach().abs().max()) for now, then in made._pair(federation)]
    assert 0 < max(gaps) < 0.01
    free = method(beta=0.0, train={"optimizer": "sgd", "momentum": 0.0, "lr": 1e-3})
    federation = make_federation()
    free.fit(federation)
    assert free.measure_distance(federation) > 0.5


def test_beta_zero_is_split_learning_from_the_same_start_bit_for_bit():
    held, plain = make_federation(), make_federation()
    method(beta=0.0).fit(held)
    made = method(beta=7.0)
    pretrained(made, plain)
    for party in plain.parties.values():
        assert set(party.modules) == ({"bottom", "top", "pretrained"} if party.active else {"bottom"})
    bottoms = {name: party.modules["bottom"] for name, party in plain.parties.items()}
    SplitTraining(plain, bottoms, plain.active.modules["top"], made._boundaries, made.train_spec).fit(
        "finetune", lambda *_: None
    )
    assert all(equal(mine, states(plain)[name]) for name, mine in states(held).items())


def test_a_beta_that_is_not_zero_changes_the_result():
    federations = [make_federation(), make_federation()]
    for federation, beta in zip(federations, (0.0, 1e-2), strict=True):
        method(beta=beta).fit(federation)
    assert not equal(states(federations[0])["active"], states(federations[1])["active"])


def test_fine_tuning_leaves_the_pretrained_model_as_it_is():
    made = method(beta=1.0, train={"weight_decay": 0.1})
    federation = pretrained(made, make_federation())
    before = state(federation.active.modules["pretrained"])
    made.run("finetune", federation)
    assert equal(before, state(federation.active.modules["pretrained"]))


# Pre-training


@pytest.mark.parametrize("train", [{}, {"select": "best_on_val", "patience": 2, "optimizer": "sgd", "lr": 0.1}])
def test_the_active_partys_model_is_that_of_the_method_local(train):
    made, alone = method(train=train), make_federation()
    federation = pretrained(made, make_federation())
    Local(made.train_spec, made.model_spec).fit(alone)
    assert equal(state(federation.active.modules["pretrained"]), state(alone.active.modules["local"]))


def test_numbers_of_pretraining_go_before_those_of_training():
    given = {"epochs": 5, "batch": 16, "lr": 0.02}
    made, alone = method(VFLHLPActive, pretrain=given), make_federation()
    federation = pretrained(made, make_federation())
    Local(TrainSpec(**given), made.model_spec).fit(alone)
    assert equal(state(federation.active.modules["pretrained"]), state(alone.active.modules["local"]))


def scarf(party=None, *, model=None, epochs=30, lr=1e-2, **options):
    party = party or make_federation(signal="planted").passive[0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model or nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8))
    settings = {"seed": 0, "batch": 64, "rate": 0.6, "temperature": 1.0, **options}
    return ScarfSSL(party, model, epochs=epochs, lr=lr, **settings)


def test_scarf_learns_to_tell_rows_apart():
    """Its loss is 0 where all rows look alike, and falls on the rows that it does not learn from."""
    learner = scarf()
    before, first = learner.compute_validation_loss(), learner.epoch()
    while not learner.state.is_done:
        last = learner.epoch()
    learner.finish()
    assert last < first - 0.05
    assert learner.compute_validation_loss() < before - 0.05
    assert learner.compute_validation_loss() == pytest.approx(-float(learner.state.best_score), rel=1e-6)


def test_scarf_learns_from_nine_tenths_of_the_partys_own_rows():
    party = make_federation().passive[1]
    learner = scarf(party)
    own = torch.cat([party.features["aligned"], party.features["local"]])
    count = round(len(own) / 10)
    assert (len(learner.rows), len(learner.held_out)) == (len(own) - count, count)
    together = torch.cat([learner.rows, learner.held_out])
    assert torch.equal(together[together[:, 0].argsort()], own[own[:, 0].argsort()])


def test_scarfs_steps_are_those_of_its_loss():
    """Two updates by hand: clean rows against corrupted ones, through encoder and head, by Adam."""
    learner, other = scarf(batch=1000, epochs=2), scarf(batch=1000, epochs=2)
    optimizer = torch.optim.Adam(other.model.parameters(), 1e-2)
    for epoch in range(2):
        order = torch.randperm(len(other.rows), generator=make_rng(0, "batches", "scarf", "passive_1", epoch))
        x = other.rows[order]
        corrupted = other.corrupt(x, make_rng(0, "corruption", "passive_1", epoch))
        z, z_corrupted = (F.normalize(other.model(rows), dim=1) for rows in (x, corrupted))
        s = z @ z_corrupted.T
        loss = (-s.diagonal() + s.exp().mean(dim=1).log()).mean()
        assert learner.epoch() == pytest.approx(loss.item(), rel=1e-4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for mine, by_hand in zip(learner.model.parameters(), other.model.parameters(), strict=True):
        assert torch.allclose(mine, by_hand, atol=1e-5)


def test_rows_held_out_leave_no_trace_and_are_judged_alike():
    """With BatchNorm: its statistics are those of training rows, and the same corruption is drawn each time."""
    learner = scarf(model=nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8)))
    learner.epoch()
    before = state(learner.model)
    first = learner.compute_validation_loss()
    assert equal(before, state(learner.model))
    assert learner.compute_validation_loss() == first


@pytest.mark.parametrize(("losses", "epochs", "best"), [([3, 2, 1, 1, 1, 1], 6, 2), ([1, 2, 3, 4, 0], 4, 0)])
def test_scarf_stops_after_three_epochs_without_a_better_loss(monkeypatch, losses, epochs, best):
    learner, seen, values = scarf(), [], iter(losses)
    monkeypatch.setattr(learner, "compute_validation_loss", lambda: float(next(values)))
    while not learner.state.is_done:
        learner.epoch()
        seen.append(state(learner.model))
    assert len(seen) == epochs
    learner.finish()
    assert equal(seen[best], state(learner.model))


def test_scarf_stops_at_the_latest_when_it_is_told():
    assert len(pretraining_history(VFLHLPPassive, pretrain={"epochs": 2})) == 2


def pretraining_history(kind, **options):
    made, federation = method(kind, **options), make_federation()
    made.build(federation)
    return made.run("pretrain", federation)


def test_a_passive_party_reads_its_own_rows_alone():
    federations = [make_federation(), make_federation()]
    for name, party in federations[1].parties.items():
        if name != "passive_2":
            for features in party.features.values():
                features.neg_()
    federations[1].active.labels["train"].neg_().add_(1)
    for federation in federations:
        pretrained(method(), federation)
    first, second = (states(federation) for federation in federations)
    assert equal(first["passive_2"], second["passive_2"])
    assert not equal(first["passive_1"], second["passive_1"])
    assert not equal(first["active"], second["active"])


@pytest.mark.parametrize("split", ["aligned", "local"])
def test_a_passive_party_reads_all_its_rows(split):
    federations = [make_federation(), make_federation()]
    federations[1].passive[0].features[split][0] += 1
    for federation in federations:
        pretrained(method(), federation)
    first, second = (states(federation) for federation in federations)
    assert not equal(first["passive_1"], second["passive_1"])
    assert equal(first["passive_2"], second["passive_2"])
    assert equal(first["active"], second["active"])


@pytest.mark.parametrize("kind", FAMILY)
def test_nothing_is_said_in_pretraining_and_the_usual_in_fine_tuning(kind):
    federation = make_federation()
    method(kind).fit(federation)
    nbytes = QUICK["epochs"] * federation.n_rows("train") * 4 * 4
    expected = {}
    for party in federation.passive:
        expected[Route("finetune", party.name, "active", Kind.EMBEDDING)] = nbytes
        expected[Route("finetune", "active", party.name, Kind.GRADIENT)] = nbytes
    assert dict(federation.channel.traffic) == expected


def test_fine_tuning_starts_from_scarf_at_passive_parties_and_at_random_at_the_active_one():
    made, fresh = method(), make_federation()
    FedSplitNN(made.train_spec, made.model_spec).build(fresh)
    federation = pretrained(made, make_federation())
    assert equal(state(federation.active.modules["bottom"]), state(fresh.active.modules["bottom"]))
    assert equal(state(federation.active.modules["top"]), state(fresh.active.modules["top"]))
    for party, other in zip(federation.passive, fresh.passive, strict=True):
        assert not equal(state(party.modules["bottom"]), state(other.modules["bottom"]))


# Ablations


def test_vflhlp_a_pretrains_the_active_party_alone():
    made, whole = method(VFLHLPActive), method()
    federation, fresh = pretrained(made, make_federation()), make_federation()
    FedSplitNN(made.train_spec, made.model_spec).build(fresh)
    for party, other in zip(federation.passive, fresh.passive, strict=True):
        assert equal(state(party.modules), state(other.modules))
    assert equal(state(federation.active.modules), state(pretrained(whole, make_federation()).active.modules))
    assert made.split(federation).constraint is not None


def test_vflhlp_p_pretrains_the_passive_parties_alone():
    made, whole = method(VFLHLPPassive), method()
    federation, other = pretrained(made, make_federation()), pretrained(whole, make_federation())
    assert set(federation.active.modules) == {"bottom", "top"}
    assert made.split(federation).constraint is None
    for mine, its in zip(federation.passive, other.passive, strict=True):
        assert equal(state(mine.modules), state(its.modules))


def test_without_both_parts_it_is_fedsplitnn(monkeypatch):
    """vflhlp-a with beta = 0, but for the name of the phase, which names the order of batches."""
    held, plain = make_federation(), make_federation()
    made = method(VFLHLPActive, beta=0.0)
    made.fit(held)
    monkeypatch.setattr(FedSplitNN, "phases", ("finetune",))
    FedSplitNN(made.train_spec, made.model_spec).fit(plain)
    del held.active.modules["pretrained"]
    assert all(equal(mine, states(plain)[name]) for name, mine in states(held).items())


@pytest.mark.parametrize("kind", FAMILY)
def test_what_pretraining_leaves_is_all_that_is_kept_of_it(kind, tmp_path):
    """Models in the roles of ``stored_modules``, read into a federation that was only built."""
    made, later = method(kind), method(kind)
    federation = pretrained(made, make_federation())
    save_states(federation, tmp_path, kind.stored_modules)
    resumed = make_federation()
    later.build(resumed)
    load_states(resumed, tmp_path)
    assert all(equal(mine, states(resumed)[name]) for name, mine in states(federation).items())
    for one, where in ((made, federation), (later, resumed)):
        one.run("finetune", where)
    assert all(equal(mine, states(resumed)[name]) for name, mine in states(federation).items())


# A killed run


class Killed(Exception):
    pass


@pytest.mark.sampled
@pytest.mark.parametrize("kind", FAMILY)
@pytest.mark.parametrize("when", [1, 2, 4])
def test_a_killed_pretraining_goes_on_after_its_last_iteration(kind, when, tmp_path):
    settings = {"train": {"epochs": 4, "select": "best_on_val"}, "pretrain": {"batch": 32, "lr": 0.02, "epochs": 6}}
    whole, (lost, resumed) = make_federation(), (make_federation() for _ in range(2))
    made = method(kind, **settings)
    made.build(whole)
    history = made.run("pretrain", whole)

    def kill(phase, done, total):
        if done == when:
            raise Killed

    lost.checkpoint = resumed.checkpoint = Checkpoint(tmp_path / "partial.safetensors")
    made = method(kind, **settings)
    made.build(lost)
    with pytest.raises(Killed):
        made.run("pretrain", lost, kill)
    seen = []
    made = method(kind, **settings)
    made.build(resumed)
    assert made.run("pretrain", resumed, lambda phase, done, total: seen.append(done)) == history
    assert seen == list(range(when + 1, len(history) + 1))
    assert all(equal(mine, states(resumed)[name]) for name, mine in states(whole).items())


def test_parties_that_are_done_learn_no_more():
    """The active party makes three epochs, the passive ones up to eight: histories of their own, side by side."""
    both = pretraining_history(VFLHLP, train={"epochs": 3}, pretrain={})
    alone = [pretraining_history(kind, train={"epochs": 3}, pretrain={}) for kind in (VFLHLPActive, VFLHLPPassive)]
    assert len(alone[0]) == 3 < len(alone[1]) == len(both)
    assert both[3:] == alone[1][3:]
    for mixed, active, passive in zip(both, *alone, strict=False):
        assert mixed == pytest.approx((active + 2 * passive) / 3)


# Defenses


class Flipping(Defense):
    """Randomized response: each label flips with probability a half, and every draw is remembered."""

    name = "flipping"
    reference = guarantee = "made for a test"
    points = ()
    drawn = ()

    def on_labels(self, y, *, features, n_classes, rng):
        noised = torch.where(torch.rand(len(y), generator=rng) < 0.5, 1 - y, y)
        self.drawn = (*self.drawn, noised)
        return noised


def test_a_label_is_noised_once_for_both_phases(monkeypatch):
    defense, fitted = Flipping(1.0), []
    federation = make_federation(defenses=[defense])
    made = method(VFLHLPActive)
    learners = made._make_learners
    monkeypatch.setattr(
        made, "_make_learners", lambda federation: fitted.extend(found := list(learners(federation))) or iter(found)
    )
    made.fit(federation)
    aligned, local, again = defense.drawn
    assert torch.equal(aligned, again), "a second draw of the same label"
    assert not torch.equal(aligned, federation.active.labels["train"])
    assert torch.equal(fitted[0][1].labels, torch.cat([aligned, local]))
    assert len(local) == len(federation.active.labels["local"])


class Turned(Defense):
    """Each class is learned under the other's name, as probabilities, and read back."""

    name = "turned"
    reference = guarantee = "made for a test"
    points = ()
    softens = True

    def on_labels(self, y, *, features, n_classes, rng):
        assert len(features) == len(y)
        return torch.nn.functional.one_hot(1 - y, n_classes).float()

    def on_predictions(self, logits):
        return logits.flip(1)


def test_a_coded_label_is_learned_by_both_phases_and_read_back_where_an_epoch_is_chosen(monkeypatch):
    scores, fitted = [], []
    for defenses in ((), (Turned(1.0),)):
        federation = make_federation(defenses=list(defenses))
        train = {"epochs": 8, "lr": 0.02, "select": "best_on_val"}
        made = method(VFLHLPActive, train=train)
        learners = made._make_learners
        monkeypatch.setattr(made, "_make_learners", lambda w, ask=learners: fitted.extend(f := list(ask(w))) or iter(f))
        trained = made.fit(federation)
        scores.append(auc(trained.predict("test").numpy(), federation.active.labels["test"].numpy()))
    plain, turned = (learner for _, learner in fitted)
    assert torch.equal(turned.labels.argmax(dim=1), 1 - plain.labels)
    assert min(plain._score("val"), turned._score("val")) > 0.9
    assert min(scores) > 0.9


def test_a_defense_of_releases_changes_nothing_in_pretraining():
    plain, noisy = make_federation(), make_federation(defenses=[IsotropicNoise(5.0)])
    for federation in (plain, noisy):
        pretrained(method(), federation)
    assert all(equal(mine, states(noisy)[name]) for name, mine in states(plain).items())


# Refusals


@pytest.mark.parametrize("kind", [VFLHLP, VFLHLPActive])
@pytest.mark.parametrize(
    "model", [{"head": "mlp"}, {"aggregation": "sum"}, {"aggregation": "mean", "head": "none", "cut": None}]
)
def test_the_constraint_needs_a_slice_of_the_head(kind, model):
    made, federation = method(kind, model=model), make_federation()
    made.build(federation)
    with pytest.raises(UsageError, match=r"model\.head=linear and model\.aggregation=concat"):
        made.check(federation)


def test_initialization_alone_takes_any_head():
    made, federation = method(VFLHLPPassive, model={"head": "mlp", "aggregation": "sum"}), make_federation()
    made.build(federation)
    made.check(federation)
    assert torch.isfinite(made.fit(federation).predict("test")).all()


def test_scarf_needs_a_few_rows():
    federation, made = make_tiny_federation(rows=3), method(VFLHLPPassive)
    for party in federation.parties.values():
        party.features["local"] = party.features["local"][:0]
    made.build(federation)
    assert len(get_rows(federation.passive[0])) == 3
    with pytest.raises(UsageError, match="4 rows .*3 at passive_1"):
        made.check(federation)


def test_four_rows_will_do():
    federation, made = make_tiny_federation(rows=4), method(VFLHLPPassive)
    for party in federation.parties.values():
        party.features["local"] = party.features["local"][:0]
    made.build(federation)
    made.check(federation)
    assert all(map(math.isfinite, made.run("pretrain", federation)))


@pytest.mark.parametrize(
    ("option", "match"),
    [({"beta": -1.0}, "beta >= 0"), ({"rate": 0.0}, "rate <= 1"), ({"temperature": 0.0}, "temperature > 0")],
)
def test_impossible_settings_are_refused(option, match):
    with pytest.raises(UsageError, match=match):
        method(**option)


@pytest.mark.parametrize("held_out", [False, True])
def test_a_nan_in_scarf_is_a_divergence(held_out):
    learner = scarf()
    (learner.held_out if held_out else learner.rows)[0, 0] = float("nan")
    learner.corrupt = lambda x, rng: x  # corruption could bring it to where it is looked for
    with pytest.raises(Diverged, match=r"Scarf at passive_1 .*nan.*train\.pretrain\.lr"):
        learner.epoch()
