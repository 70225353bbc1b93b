"""Families as presets of one class, and methods named with options."""

import pytest
import torch

from vflsec.core import registry
from vflsec.core.message import SERVER, Kind
from vflsec.core.settings import ModelSpec, PretrainSpec, TrainSpec
from vflsec.methods.feature_group_method import FeatureGroupMethod
from vflsec.methods.fedhssl import FedHSSL
from vflsec.methods.prada import PrADA
from vflsec.methods.vflhlp import VFLHLP
from vflsec.testing.federations import make_toy_federation

SSL = ("simsiam", "byol", "moco")


def trained(name, **options):
    spec = TrainSpec(epochs=2, batch=32, pretrain=PretrainSpec(epochs=2, batch=32))
    federation = make_toy_federation(rows=160, columns=4)
    method = registry.build("methods", name, spec, ModelSpec(bottom=(6,)), projector=8, predictor=4, **options)
    return federation, method.fit(federation)


def weights(federation, *, without=()):
    return {
        f"{party.name}.{key}": value
        for party in federation.parties.values()
        for key, value in party.modules.state_dict().items()
        if not key.startswith(without)
    }


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


@pytest.mark.sampled
@pytest.mark.parametrize("ssl", SSL)
def test_fedhssl_without_averaging_is_fedgssl(ssl):
    hybrid, guided = trained(f"fedhssl-{ssl}", pma=False), trained(f"fedgssl-{ssl}")
    assert same(weights(hybrid[0]), weights(guided[0]))
    assert hybrid[1].history == guided[1].history
    assert hybrid[0].channel.traffic == guided[0].channel.traffic
    averaged = trained(f"fedhssl-{ssl}", pma=True)
    assert not same(weights(averaged[0], without=("shared",)), weights(guided[0]))
    assert same(weights(averaged[0]), weights(trained(f"fedhssl-{ssl}")[0])), "True is the default"


@pytest.mark.parametrize("ssl", SSL)
@pytest.mark.parametrize(
    ("family", "kinds", "version"),
    [
        ("fedlocal", {Kind.PARAMETERS}, 4),
        ("fedcssl", {Kind.EMBEDDING}, 3),
        ("fedgssl", {Kind.EMBEDDING}, 3),
        ("fedhssl", {Kind.EMBEDDING, Kind.PARAMETERS}, 4),
    ],
)
def test_what_a_member_of_the_family_declares(family, ssl, kinds, version):
    found = registry.load("methods", f"{family}-{ssl}")
    assert issubclass(found, FedHSSL)
    assert found.name == f"{family}-{ssl}"
    assert (found.prior, found.version) == (f"fedlocal-{ssl}", version)
    assert found.messages["pretrain"] == kinds
    averaged = Kind.PARAMETERS in kinds
    assert (Kind.PARAMETERS in found.receives["active"]) == (SERVER in found.receives) == averaged
    assert (Kind.EMBEDDING in found.receives["passive"]) == (Kind.EMBEDDING in kinds)
    assert len(set(found.differs)) == len(found.differs)


def test_a_phase_that_averages_no_models_sends_none():
    hybrid, alone = (registry.load("methods", f"{name}-moco") for name in ("fedhssl", "fedlocal"))
    assert hybrid.messages_in("pretrain", {}) == {Kind.EMBEDDING, Kind.PARAMETERS}
    assert hybrid.messages_in("pretrain", {"pma": False}) == {Kind.EMBEDDING}
    assert alone.messages_in("pretrain", {}) == set()
    assert alone.messages_in("pretrain", {"pma": True}) == {Kind.PARAMETERS}
    masked = {"pma": True, "average": "secure-average"}
    assert alone.messages_in("pretrain", masked) == {Kind.PARAMETERS, Kind.CIPHERTEXT, Kind.CONTROL}


@pytest.mark.parametrize(
    ("name", "base", "facts"),
    [
        ("prada-no-ir", PrADA, {"interacting": False, "version": 2, "phases": ("pretrain", "finetune")}),
        ("prada-no-fg-ir", PrADA, {"grouped": False, "version": 2, "source_phases": {"pretrain"}}),
        ("prada-no-da-fg-ir", FeatureGroupMethod, {"grouped": False, "version": 1, "phases": ("train",)}),
        ("vflhlp-a", VFLHLP, {"prior": None, "stored_modules": {"pretrained"}}),
        ("vflhlp-p", VFLHLP, {"prior": "vflhlp-p", "stored_modules": {"bottom"}, "last_phase_options": {"boundary"}}),
    ],
)
def test_what_an_ablation_declares(name, base, facts):
    found = registry.load("methods", name)
    assert issubclass(found, base)
    assert {fact: getattr(found, fact) for fact in facts} == facts
    assert found.name == name
    assert base.__dict__.get("grouped", True)
    assert len(set(found.differs)) == len(found.differs)


def test_a_subclass_of_ones_own_keeps_what_it_sets_itself():
    class Mine(registry.load("methods", "fedgssl-byol")):
        name = "mine"
        version = 7
        differs = ("in all",)

    assert (Mine.version, Mine.differs, Mine.ssl, Mine.prior) == (7, ("in all",), "byol", "fedlocal-byol")
