"""Secure aggregation: the mean is exact, the server sees uniform words, and the masks are new each time."""

import re
from functools import partial

import pytest
import torch
from torch import nn

from vflsec.base.errors import Diverged, UsageError
from vflsec.base.seeds import make_rng, seed_weights
from vflsec.core import registry
from vflsec.core.message import Channel, Kind
from vflsec.core.party import Party
from vflsec.core.settings import ModelSpec, PretrainSpec, TrainSpec
from vflsec.data.partition import DataSpec
from vflsec.testing.federations import make_toy_federation

UNIT = 2.0**-36


def averaged(name, parties=3, scale=1.0, seed=0):
    """The shared modules of each party after one average, and every message that was shown."""
    channel, heard = Channel(), []
    channel.taps.append(heard.append)
    make = lambda who: Party(who, {}, channel, noise=partial(make_rng, seed, "noise", who))  # noqa: E731
    members = [make(f"party_{k}") for k in range(parties)]
    shared = {}
    for party in members:
        with seed_weights(seed, party.name):
            shared[party.name] = {"top": nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30)).double()}
        shared[party.name]["top"][1].running_var.uniform_(0, 5, generator=make_rng(seed, party.name))
        for parameter in shared[party.name]["top"].parameters():
            parameter.data.mul_(scale)
    registry.build("protocols", name, members, make("server")).run(shared, step=0, phase="pretrain")
    return shared, heard


def values(shared, name="party_0"):
    return {key: value for key, value in shared[name]["top"].state_dict().items() if value.is_floating_point()}


@pytest.mark.parametrize("parties", [2, 3, 5])
def test_the_mean_is_the_plain_one_within_a_unit(parties):
    plain, secure = (values(averaged(name, parties)[0]) for name in ("model-average", "secure-average"))
    assert plain.keys() == secure.keys()
    assert all((plain[key] - secure[key]).abs().max() <= UNIT for key in plain)
    assert any((plain[key] - secure[key]).abs().max() > 0 for key in plain), "fixed point rounds"


def test_all_parties_get_the_same_mean_in_every_run_though_the_messages_differ():
    (first, heard), (again, heard_again) = averaged("secure-average"), averaged("secure-average")
    for name in first:
        assert all(torch.equal(values(first)[key], value) for key, value in values(again, name).items())
    words, others = ([m.payload["words"] for m in h if m.kind is Kind.CIPHERTEXT] for h in (heard, heard_again))
    assert len(words) == len(others) == 6
    assert all((one != other).float().mean() > 0.99 for one, other in zip(words, others, strict=True))


def test_what_the_server_receives_of_a_party_looks_uniform_and_nothing_else_is_of_one_party():
    heard = averaged("secure-average", 2)[1]
    to_server = [m for m in heard if m.receiver == "server"]
    assert {m.kind for m in to_server} == {Kind.CONTROL, Kind.CIPHERTEXT, Kind.PARAMETERS}
    assert {m.sender for m in to_server if m.kind is Kind.PARAMETERS} == {"party_0+party_1"}
    words = torch.cat([m.payload["words"] for m in to_server if m.kind is Kind.CIPHERTEXT and m.sender == "party_0"])
    for bit in range(64):
        share = ((words >> bit) & 1).double().mean().item()
        assert share == pytest.approx(0.5, abs=5 * 0.5 / len(words) ** 0.5), bit


def test_two_messages_in_a_row_do_not_share_a_mask():
    """With one mask for both the difference of two messages would be that of two models."""
    heard = averaged("secure-average", 2)[1]
    parameters, statistics = [m.payload["words"] for m in heard if m.kind is Kind.CIPHERTEXT and m.sender == "party_0"]
    assert ((parameters[: len(statistics)] - statistics).double() * UNIT).abs().median() > 1e3


@pytest.mark.parametrize("scale", [float("nan"), 1e12])
def test_what_fixed_point_cannot_hold_is_refused(scale):
    with pytest.raises(Diverged, match="expected parameters below"):
        averaged("secure-average", scale=scale)


def make(**options):
    train = TrainSpec(epochs=1, batch=32, pretrain=PretrainSpec(epochs=2, batch=32))
    model = ModelSpec(bottom=(8, 8), encoder="tabular")
    name = options.pop("method", "fedhssl-simsiam")
    return registry.build("methods", name, train, model, projector=8, predictor=4, **options)


def test_a_method_selects_it_and_trains_as_with_the_plain_one():
    found = []
    for average in ("model-average", "secure-average", "secure-average"):
        method = make(average=average)
        federation = make_toy_federation(data=DataSpec(n_labeled=40, aligned=0.5), rows=120, columns=4)
        heard = []
        federation.channel.taps.append(heard.append)
        found.append(method.fit(federation).predict("test"))
        said = {m.kind for m in heard if m.phase == "pretrain"}
        assert said == method.messages_in("pretrain", {"average": average})
    plain, secure, again = found
    assert torch.allclose(plain, secure, atol=1e-3)
    assert torch.equal(secure, again)


def test_where_no_model_is_averaged_there_is_nothing_to_mask():
    with pytest.raises(UsageError, match="fedgssl-simsiam, which averages no models"):
        make(method="fedgssl-simsiam", average="secure-average")


@pytest.mark.parametrize(("name", "hint"), [("plain", ""), ("secure", " Did you mean secure-average?")])
def test_models_are_averaged_by_a_protocol_that_averages(name, hint):
    known = "Known: model-average, secure-average, or file.py:Class"
    with pytest.raises(UsageError, match=re.escape(f"unknown average '{name}'.{hint} {known}")):
        make(method="fedhssl-simsiam", average=name)


def test_a_file_may_define_how_models_are_averaged(tmp_path):
    path = tmp_path / "mine.py"
    imports = (
        "from vflsec.protocols.model_average import ModelAverage\nfrom vflsec.protocols.plain import PlainBoundary\n"
    )
    path.write_text(f"{imports}class Mine(ModelAverage): name = 'mine'\nclass Other(PlainBoundary): name = 'other'\n")
    assert make(method="fedhssl-simsiam", average=f"{path}:Mine").average.name == "mine"
    with pytest.raises(UsageError, match=r"subclass of .*protocol\.Averaging"):
        make(method="fedhssl-simsiam", average=f"{path}:Other")
