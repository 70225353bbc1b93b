"""Noisy samples: noise of the moments that were asked for, on the rows that were drawn, the attacker's own."""

import pytest
import torch

from vflsec.attacks.noisy_sample import NoisySample
from vflsec.base.errors import UsageError
from vflsec.core.message import Step
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.core.view import View
from vflsec.methods.fedsplitnn import FedSplitNN
from vflsec.run.adversary import observe_before
from vflsec.run.spec import AuxSpec
from vflsec.testing.federations import make_toy_federation

ROWS = 4000
X = torch.zeros(ROWS, 5)


def joined(party="passive_1", **options):
    attack = NoisySample(**options)
    attack.join(View(party, "passive", 2, {"train": X}, None, torch.tensor([]), torch.tensor([])), seed=0)
    return attack


def step(number=0, phase="train"):
    return Step(number, phase, torch.arange(ROWS))


def test_the_noise_has_the_moments_that_were_asked_for_on_a_share_of_the_rows():
    noisy = joined(scale=3.0, rate=0.25).on_features(X, step())
    hit = (noisy != 0).any(dim=1)
    assert hit.float().mean() == pytest.approx(0.25, abs=4 * (0.25 * 0.75 / ROWS) ** 0.5)
    values = noisy[hit].flatten()
    assert values.mean() == pytest.approx(0.0, abs=4 * 3.0 / len(values) ** 0.5)
    assert values.std() == pytest.approx(3.0, abs=4 * 3.0 / (2 * len(values)) ** 0.5)


def test_parties_that_collude_blur_the_same_rows_each_with_its_own_noise():
    one, other = (joined(party).on_features(X, step()) for party in ("passive_1", "passive_2"))
    assert torch.equal((one != 0).any(dim=1), (other != 0).any(dim=1))
    assert not torch.equal(one, other)
    assert not torch.equal(one, joined().on_features(X, step(1)))


@pytest.mark.parametrize(("when", "acts"), [("train", [True, False]), ("predict", [False, True]), ("both", [True] * 2)])
def test_it_acts_when_it_is_to(when, acts):
    attack = joined(when=when)
    assert [bool(attack.on_features(X, s).any()) for s in (step(), step(phase="predict"))] == acts


@pytest.mark.parametrize("options", [{"scale": 0.0}, {"rate": 0.0}], ids=str)
def test_without_noise_it_is_the_honest_federation(options):
    found = []
    for attack in (None, NoisySample(**options)):
        federation = make_toy_federation(rows=200)
        if attack:
            attack.join(observe_before(federation, federation.parties["passive_1"], AuxSpec(n=0)), seed=1)
            federation.malicious = {"passive_1": attack}
        found.append(FedSplitNN(TrainSpec(epochs=2, batch=32), ModelSpec(bottom=(6,))).fit(federation).predict("test"))
    assert torch.equal(*found)


@pytest.mark.parametrize(("options", "match"), [({"scale": -1.0}, "scale >= 0"), ({"rate": 2.0}, "0 <= rate <= 1")])
def test_impossible_settings_are_refused(options, match):
    with pytest.raises(UsageError, match=match):
        NoisySample(**options)
