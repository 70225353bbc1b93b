"""Missing features: with every row missing the joint model is one without the party, with none it is the honest one."""

import pytest
import torch

from vflsec.attacks.missing_feature import MissingFeature
from vflsec.base.errors import UsageError
from vflsec.core.message import Kind
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.methods.fedsplitnn import FedSplitNN
from vflsec.run.adversary import observe_before
from vflsec.run.spec import AuxSpec
from vflsec.testing.federations import make_toy_federation


def trained(attack=None, *, heard=None):
    federation = make_toy_federation(rows=200, parties=3)
    if attack:
        attack.join(observe_before(federation, federation.parties["passive_1"], AuxSpec(n=0)), seed=1)
        federation.malicious = {"passive_1": attack}
    if heard is not None:
        federation.channel.taps.append(heard.append)
    return FedSplitNN(TrainSpec(epochs=3, batch=32), ModelSpec(bottom=(6,))).fit(federation)


def weights(found, *names):
    return torch.cat([p.detach().flatten() for n in names for p in found.federation.parties[n].modules.parameters()])


ALL = ("active", "passive_1", "passive_2")


@pytest.mark.parametrize("when", ["train", "predict", "both"])
def test_a_rate_of_zero_is_the_honest_federation(when):
    honest, attacked = trained(), trained(MissingFeature(rate=0.0, when=when))
    assert torch.equal(weights(honest, *ALL), weights(attacked, *ALL))
    assert torch.equal(honest.predict("test"), attacked.predict("test"))


def test_a_rate_of_one_at_prediction_is_a_party_that_sends_zeros():
    honest, attacked = trained(), trained(MissingFeature(rate=1.0, when="predict"))
    assert torch.equal(weights(honest, *ALL), weights(attacked, *ALL)), "training was honest"
    federation = honest.federation
    with torch.no_grad():
        h = {n: party.modules["bottom"](party.features["test"]) for n, party in federation.parties.items()}
        expected = federation.active.modules["top"]([h["active"], torch.zeros_like(h["passive_1"]), h["passive_2"]])
    assert torch.equal(attacked.predict("test"), expected)


def test_a_party_that_was_never_there_has_learned_nothing():
    fresh = trained()
    FedSplitNN(TrainSpec(epochs=3, batch=32), ModelSpec(bottom=(6,))).build(fresh.federation)
    attacked = trained(MissingFeature(rate=1.0))
    assert torch.equal(weights(attacked, "passive_1"), weights(fresh, "passive_1"))
    assert not torch.equal(weights(attacked, "passive_2"), weights(fresh, "passive_2"))


@pytest.mark.parametrize(("when", "in_training", "later"), [("train", 0.4, 0), ("predict", 0, 0.4), ("both", 0.4, 0.4)])
def test_a_share_of_the_rows_is_missing_when_it_is_to_be(when, in_training, later):
    heard = []
    trained(MissingFeature(rate=0.4, when=when), heard=heard).predict("test")
    sent = [m for m in heard if m.sender == "passive_1" and m.kind is Kind.EMBEDDING]
    for expected, phase in ((in_training, "train"), (later, "predict")):
        values = torch.cat([m.payload["value"] for m in sent if m.phase == phase])
        assert (values == 0).all(dim=1).float().mean() == pytest.approx(expected, abs=0.13)


def test_impossible_rates_are_refused():
    with pytest.raises(UsageError, match=r"expected 0 <= rate <= 1, got 1.5"):
        MissingFeature(rate=1.5)
