"""FedHSSL's family: what each step trains, what crosses, what is averaged, and that a killed pre-training goes on."""

import inspect
import math

import pytest
import torch

from vflsec.base.errors import UsageError
from vflsec.core import registry
from vflsec.core.defense import Defense
from vflsec.core.federation import Checkpoint
from vflsec.core.message import Kind
from vflsec.core.method import Trained
from vflsec.core.settings import ModelSpec, PretrainSpec, TrainSpec
from vflsec.data.partition import DataSpec
from vflsec.inference.releases import read_last_values
from vflsec.run.adversary import get_adversary, observe
from vflsec.testing.federations import make_toy_federation

DATA = DataSpec(n_labeled=40, aligned=0.5, overlap=0.8)
HEADS = {"projector": 16, "predictor": 8}
SSL = ("simsiam", "byol", "moco")


def make(name, *, epochs=3, widths=(8, 8), encoder="tabular", **options):
    train = TrainSpec(epochs=2, batch=32, pretrain=PretrainSpec(epochs=epochs, batch=32))
    return registry.build("methods", name, train, ModelSpec(bottom=widths, encoder=encoder), **HEADS, **options)


def federation(*, parties=2, seed=0, **options):
    return make_toy_federation(seed=seed, data=DATA, rows=200, columns=5, parties=parties, **options)


def pretrained(method, where):
    method.build(where)
    where.heard = []
    where.channel.taps.append(where.heard.append)
    method.run("pretrain", where)
    return where


def states(where, role="local"):
    return {
        f"{party.name}.{key}": value.clone()
        for party in where.parties.values()
        for key, value in party.modules["encoders"].state_dict().items()
        if key.startswith(role)
    }


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.sampled
@pytest.mark.parametrize("ssl", SSL)
def test_guidance_of_weight_zero_is_fed_local_ssl_bit_for_bit(ssl):
    alone = pretrained(make(f"fedlocal-{ssl}"), federation())
    guided = pretrained(make(f"fedgssl-{ssl}", gamma=0.0), federation())
    assert equal(states(alone), states(guided))


@pytest.mark.sampled
@pytest.mark.parametrize("ssl", SSL)
def test_guidance_of_weight_zero_is_fed_local_ssl_with_averaged_models(ssl):
    averaged, alone = (pretrained(make(f"fedlocal-{ssl}", pma=pma), federation()) for pma in (True, False))
    guided = pretrained(make(f"fedhssl-{ssl}", gamma=0.0), federation())
    assert equal(states(averaged), states(guided))
    assert not equal(states(alone), states(guided))


@pytest.mark.sampled
@pytest.mark.parametrize("ssl", SSL)
def test_guidance_changes_the_local_encoders(ssl):
    plain, guided = (pretrained(make(f"fedgssl-{ssl}", gamma=g), federation()) for g in (0.0, 0.5))
    assert not equal(states(plain), states(guided))


@pytest.mark.sampled
@pytest.mark.parametrize("ssl", SSL)
def test_step_one_is_the_same_with_and_without_the_other_steps(ssl):
    cross, hybrid = (pretrained(make(f"{name}-{ssl}"), federation()) for name in ("fedcssl", "fedhssl"))
    assert equal(states(cross, "cross"), states(hybrid, "cross"))


@pytest.mark.sampled
@pytest.mark.parametrize("ssl", SSL)
@pytest.mark.parametrize("parties", [2, 3])
def test_partial_model_aggregation_makes_top_encoders_equal_and_touches_nothing_else(ssl, parties):
    method, where = make(f"fedhssl-{ssl}", epochs=1), federation(parties=parties)
    pretrained(method, where)
    without = pretrained(make(f"fedgssl-{ssl}", epochs=1), federation(parties=parties))
    found, own = states(where), states(without)
    names = list(where.parties)
    for key in [key.removeprefix("active.") for key in found if key.startswith("active.")]:
        if key.startswith("local.top"):
            if own[f"active.{key}"].is_floating_point():
                mean = torch.stack([own[f"{name}.{key}"] for name in names]).mean(dim=0)
                assert all(torch.equal(found[f"{name}.{key}"], mean) for name in names), key
        else:
            assert all(torch.equal(found[f"{name}.{key}"], own[f"{name}.{key}"]) for name in names), key
    assert equal(states(where, "cross"), states(without, "cross"))


@pytest.mark.parametrize("ssl", SSL)
def test_what_is_sent_for_the_average_is_top_projector_and_predictor_alone(ssl):
    where = pretrained(make(f"fedhssl-{ssl}", epochs=1), federation())
    keys = {key.split(".")[0] for m in where.heard if m.kind is Kind.PARAMETERS for key in m.payload}
    assert keys == {"top", "projector"} | ({"predictor"} if ssl != "moco" else set())
    directions = {(m.sender, m.receiver) for m in where.heard if m.kind is Kind.PARAMETERS}
    assert directions == {(a, b) for name in ("active", "passive_1") for a, b in ((name, "server"), ("server", name))}


def test_passive_parties_hear_from_the_active_one_alone_and_no_gradient_crosses():
    where = pretrained(make("fedcssl-simsiam", epochs=1), federation(parties=3))
    assert {m.kind for m in where.heard} == {Kind.EMBEDDING}
    assert all("active" in (m.sender, m.receiver) for m in where.heard)
    assert {m.split for m in where.heard} == {"aligned"}
    assert sorted(torch.cat([m.rows for m in where.heard if m.receiver == "passive_2"]).tolist()) == list(
        range(where.n_rows("aligned"))
    )


@pytest.mark.parametrize("updates", [1, 4, 8])
def test_further_local_updates_say_nothing_more(updates):
    where = pretrained(make("fedcssl-simsiam", epochs=1, local_updates=updates), federation())
    once = pretrained(make("fedcssl-simsiam", epochs=1), federation())
    assert where.channel.traffic == once.channel.traffic
    assert equal(states(where, "cross"), states(once, "cross")) == (updates == 1)


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["fedhssl-simsiam", "fedhssl-byol", "fedhssl-moco", "fedlocal-moco"])
def test_a_killed_pre_training_goes_on_after_the_last_finished_iteration(name, tmp_path):
    class Killed(BaseException):
        pass

    def kill(phase, done, total):
        if done == 2:
            raise Killed

    options = {"pma": True} if name.startswith("fedlocal") else {}
    whole = pretrained(make(name, epochs=4, **options), federation())
    first, method = federation(), make(name, epochs=4, **options)
    first.checkpoint = Checkpoint(tmp_path / "partial")
    method.build(first)
    with pytest.raises(Killed):
        method.run("pretrain", first, kill)
    second, method = federation(), make(name, epochs=4, **options)
    second.checkpoint = Checkpoint(tmp_path / "partial")
    method.build(second)
    seen = []
    history = method.run("pretrain", second, lambda phase, done, total: seen.append(done))
    assert seen == [3, 4]
    assert len(history) == 4
    for role in ("local", "cross"):
        assert equal(states(whole, role), states(second, role))
    assert second.channel.traffic == whole.channel.traffic
    assert second.channel.releases() == whole.channel.releases()


class Seen(Defense):
    name = "seen"
    reference = guarantee = "made for a test"
    points = (Kind.PARAMETERS, Kind.EMBEDDING)

    def on_parameters(self, p, release):
        return p if release.buffer else p + 1

    def on_embedding(self, h, release):
        return h + 100


def test_a_defense_changes_the_released_copy_of_parameters_and_never_statistics():
    where = make_toy_federation(data=DATA, rows=200, columns=5)
    where.active.defenses = (Seen(1.0, at=["pretrain.parameters"]),)
    method = make("fedgssl-simsiam", epochs=1)
    pretrained(method, where)
    own = states(where)
    defended = make_toy_federation(data=DATA, rows=200, columns=5)
    defended.active.defenses = (Seen(1.0, at=["pretrain.parameters"]),)
    pretrained(make("fedhssl-simsiam", epochs=1), defended)
    after = states(defended)
    key = next(k for k in own if "local.top" in k and k.startswith("active") and k.endswith("0.weight"))
    mean = (own[key] + 1 + own[key.replace("active", "passive_1")]) / 2
    torch.testing.assert_close(after[key], mean)
    for key in own:
        if "running" in key and "local.top" in key and key.startswith("active"):
            torch.testing.assert_close(after[key], (own[key] + own[key.replace("active", "passive_1")]) / 2)


def test_a_defense_limited_to_a_phase_acts_there_alone():
    where = make_toy_federation(data=DATA, rows=200, columns=5)
    where.passive[0].defenses = (Seen(1.0, at=["pretrain.embedding"]),)
    method = make("fedcssl-simsiam", epochs=1)
    pretrained(method, where)
    method.run("finetune", where)
    sent = {phase: [m for m in where.heard if m.phase == phase and m.sender == "passive_1"] for phase in method.phases}
    assert all((m.payload["value"] > 50).all() for m in sent["pretrain"])
    assert not any((m.payload["value"] > 50).any() for m in sent["finetune"])


def test_interleaving_takes_the_same_batches_in_turn():
    orders = []
    for interleave in (False, True):
        where = pretrained(make("fedgssl-simsiam", epochs=2, interleave=interleave), federation())
        orders.append(states(where))
    assert not equal(*orders)  # guidance comes from a cross encoder that is younger


@pytest.mark.parametrize(
    ("encoders", "pool", "width"), [("both", "mean", 8), ("both", "concat", 16), ("local", "mean", 8)]
)
def test_the_representation_is_what_was_asked_for(encoders, pool, width):
    method, where = make("fedgssl-simsiam", encoders=encoders, pool=pool), federation()
    method.build(where)
    party = where.active
    x, own = party.features["test"], party.modules["encoders"].eval()
    h = {role: own[role](x) for role in ("local", "cross")}
    expected = {
        ("both", "mean"): (h["local"] + h["cross"]) / 2,
        ("both", "concat"): torch.cat([h["local"], h["cross"]], dim=1),
        ("local", "mean"): h["local"],
    }[encoders, pool]
    torch.testing.assert_close(method.representation(party).eval()(x), expected)
    assert method.width(party) == width


def test_tops_of_other_shapes_cannot_be_averaged():
    where = federation()
    method = make("fedhssl-simsiam", encoder="mlp", widths=())
    where.passive[0].layout = where.passive[0].layout._replace(columns=where.passive[0].layout.columns[:3])
    method.build(where)
    with pytest.raises(UsageError, match="shape of active's"):
        method.check(where)


def test_unknown_options_of_the_self_supervised_method_are_refused():
    with pytest.raises(UsageError, match="unknown option 'tau'"):
        make("fedlocal-moco", ssl_options={"tau": 1.0})


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("fedlocal-byol", {"momentum": "high"}, "momentum='high': .*float.*str"),
        ("fedlocal-moco", {"queue": 10.5}, r"queue=10\.5: .*int.*float"),
        ("fedlocal-simsiam", {"width": 3}, "ssl_options: unknown option 'width'"),
    ],
)
def test_wrong_options_of_the_self_supervised_method_are_refused(name, options, match):
    with pytest.raises(UsageError, match=match):
        make(name, ssl_options=options)


@pytest.mark.parametrize(
    ("given", "numbers"),
    [
        ({}, {"lr": 0.8, "weight_decay": 1e-3}),
        ({"paper": True}, {"lr": 0.05, "weight_decay": 3e-5}),
        ({"weight_decay": 0.0, "lr": 0.1}, {"lr": 0.1, "weight_decay": 0.0}),
    ],
)
def test_the_numbers_of_pre_training(given, numbers):
    made = registry.build("methods", "fedhssl-byol", TrainSpec(pretrain=PretrainSpec(**given)), ModelSpec())
    assert made.pretraining == PretrainSpec(epochs=40, batch=512, **numbers)


@pytest.mark.parametrize(
    ("given", "options", "momentum"),
    [({}, {}, math.exp(-7 / 4)), ({"paper": True}, {}, 0.995), ({}, {"momentum": 0.9}, 0.9)],
)
def test_the_momentum_of_targets_fits_the_number_of_updates(given, options, momentum):
    """Two iterations of two batches."""
    train = TrainSpec(epochs=1, batch=32, pretrain=PretrainSpec(epochs=2, batch=32, **given))
    federation = make_toy_federation(rows=90)
    made = registry.build("methods", "fedlocal-byol", train, ModelSpec(encoder="mlp"), ssl_options=options)
    made.build(federation)
    made.run("pretrain", federation)
    assert len(federation.active.features["aligned"]) == 63
    assert [tower.momentum for tower in made._towers["local"].values()] == pytest.approx([momentum] * 2)


def test_batches_of_one_row_are_refused():
    with pytest.raises(UsageError, match="expected train.pretrain.batch >= 2, got 1"):
        registry.build("methods", "fedlocal-simsiam", TrainSpec(pretrain=PretrainSpec(batch=1)), ModelSpec())
    where = federation()
    method = registry.build("methods", "fedsplitnn", TrainSpec(batch=1), ModelSpec(encoder="tabular"))
    method.build(where)
    with pytest.raises(UsageError, match="expected train.batch >= 2, got 1"):
        method.check(where)


@pytest.mark.parametrize(
    "name", [name for name in registry.list_all("methods") if name.startswith(("fedlocal", "fedhssl"))]
)
def test_every_member_takes_the_same_heads(name):
    assert {"projector", "predictor", "ssl_options"} <= set(
        inspect.signature(registry.load("methods", name)).parameters
    )


def viewed(method, where, name):
    own = [m for m in where.heard if name in (m.sender, m.receiver)]
    return observe(Trained(method, where, {}), get_adversary(where, name), torch.arange(4), tuple(own))


@pytest.mark.parametrize(("name", "other"), [("passive_1", "active"), ("active", "passive_1")])
def test_of_two_parties_each_assembles_the_others_top_encoder(name, other):
    method, where = make("fedhssl-simsiam"), federation()
    (title, model), *more = viewed(method, pretrained(method, where), name).models.items()
    assert other in title
    assert not more
    sent = [m for m in where.heard if m.kind is Kind.PARAMETERS and m.sender == other]
    truth = {key: value for m in sent for key, value in m.payload.items() if key.startswith("top.")}
    assert truth
    found = model.state_dict()
    assert all(torch.allclose(found[key], value, atol=1e-6) for key, value in truth.items())
    own = where.parties[name].modules["encoders"]["local"].state_dict()
    assert all(torch.equal(found[key], value) for key, value in own.items() if key.startswith("bottom."))
    assert any(not torch.allclose(found[key], own[key], atol=1e-3) for key in truth), "not the mean"


@pytest.mark.parametrize(("method", "parties"), [("fedhssl-simsiam", 3), ("fedgssl-simsiam", 2)])
def test_nobody_assembles_a_model_of_several_others_or_without_an_average(method, parties):
    method, where = make(method, epochs=1), federation(parties=parties)
    assert not viewed(method, pretrained(method, where), "passive_1").models


def test_a_passive_party_reads_the_active_partys_projections_of_its_training_rows():
    method, where = make("fedcssl-simsiam"), federation()
    view = viewed(method, pretrained(method, where), "passive_1")
    found = read_last_values(view, Kind.EMBEDDING, sender="active")["train"]
    assert found.shape == (where.n_rows("train"), HEADS["projector"])
    heard = [m for m in where.heard if m.receiver == "passive_1"]
    place = int(where.places["aligned"][7])
    (last,) = [m.payload["value"][m.rows == place] for m in heard if place in m.rows.tolist()][-1:]
    assert torch.equal(found[7], last[0])
