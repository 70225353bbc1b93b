"""The suites run over the whole registry, and each check catches a plug-in broken in the way it is for."""

import inspect
from random import SystemRandom
from unittest import SkipTest

import numpy as np
import pytest
import torch

from vflsec.core import registry
from vflsec.core.attack import Attack, IntegrityAttack
from vflsec.core.defense import Defense
from vflsec.core.message import Kind
from vflsec.core.settings import ModelSpec, PretrainSpec, TrainSpec
from vflsec.core.view import Guess, Need
from vflsec.methods.fedsplitnn import FedSplitNN
from vflsec.protocols.paillier import PaillierBoundary
from vflsec.protocols.plain import PlainBoundary
from vflsec.testing.conformance import (
    AttackConformance,
    DefenseConformance,
    IntegrityConformance,
    MethodConformance,
    ProtocolConformance,
)

QUICK = {  # options that keep a plug-in cheap
    "active-mc": {"epochs": 60},
    "attribute": {"releases": 1},
    "boosting-replay": {"replays": 1},
    "grn": {"steps": 100},
    "mc": {"epochs": 60, "lr": 0.02},
    "pcat": {"steps": 200},
    "sdar": {"steps": 200},
    "villain": {"warm": 1, "probed": 0},  # the suite trains for two epochs
    "self-training": {"iterations": 3},
    "forest-training": {"iterations": 2},
    "lira": {"shadows": 8},
    "rmia": {"shadows": 8},
    "shadow-classifier": {"shadows": 8},
}
SIDE = {
    "membership": "active",
    "attribute": "active",
    "inversion-blackbox": "active",
}  # of the adversary, where either can mount an attack
WILD_SCENES = {"sdar": 3}  # its critics end in another equilibrium when their inputs move a little
METHOD_OPTIONS = {"direct": {"aggregation": "sum", "head": "none"}}
_SILENT = {"test_messages_carry_no_graph": "one party alone, or pooled columns, say nothing"}
EXEMPT: dict[str, dict[str, str]] = {  # by plug-in: checks that do not apply, and why
    "local": _SILENT | {"test_a_nan_is_a_divergence": "it does not read the column that the check spoils"},
    "lr": _SILENT,
    "lightgbm": _SILENT | {
        "test_a_nan_is_a_divergence": "trees take a missing value for what it is",
        "test_equal_seeds_give_equal_parameters": "nothing is drawn without bagging: another seed changes nothing",
    },
    "compress": {"test_noise_is_fresh_at_each_release": "nothing is drawn"},
    "discrete": {"test_noise_is_fresh_at_each_release": "nothing is drawn"},
    "id-lmid": {"test_noise_is_fresh_at_each_release": "nothing is drawn"},
    "fedcvt": {"test_any_number_of_parties_and_classes": "it is a method of exactly two parties"},
}  # fmt: skip
STRENGTHS = {  # a weak and a strong setting, where 1 and 10 are not
    "compress": {"weak": 0.5, "strong": 0.9},
    "discrete": {"weak": 0.5, "strong": 1.5},
    "id-lmid": {"weak": 1.5, "strong": 20.0},
    "phe": {"weak": 1.0, "strong": 1.0},
    "kd-k": {"weak": 0.2, "strong": 0.6},
    "ppdl": {"weak": 1e-5, "strong": 10.0},
    "sign": {"weak": 0.5, "strong": 1.0},
}
SAME_STEPS = {
    f"{steps}-{loss}" for steps in ("fedlocal", "fedgssl", "fedcssl") for loss in ("byol", "moco")
}  # as with simsiam: the suites of fedhssl, with all steps, hold the losses
COSTLY = (  # which train forests or shadows: the suite of others holds the checks in the README's command
    *("attribute-fusion", "boosting-replay", "forest-training", "fusion", "self-training"),
    *("lira", "rmia", "shadow-classifier"),
)
WITH_SMALL_FORESTS = ("attribute-fusion", "boosting-replay", "forest-training")
WITH_FEW_TREES = ("fusion", "self-training")
SMALL = {"projector": 16, "predictor": 8}  # heads of self-supervised methods


def small(name):
    """The method ``name`` with few epochs and narrow networks."""
    method = registry.load("methods", name)
    train = TrainSpec(epochs=2, batch=32, pretrain=PretrainSpec(epochs=2, batch=32))
    options = {key: value for key, value in SMALL.items() if key in inspect.signature(method).parameters}
    return registry.build("methods", name, train, ModelSpec(bottom=(8, 8), encoder=method.encoder), **options)


def _siblings(kind):
    """The presets of each class, except for the one with the fewest settings, which stands for it in every run."""
    families = {}
    for name, entry in sorted(registry.list_all(kind).items()):
        made = entry.target
        target, settings = (made.target, made.settings) if isinstance(made, registry.Preset) else (made, ())
        families.setdefault(target, []).append((len(settings), name))
    return {name for family in families.values() for _, name in sorted(family)[1:]}


def _is_of_language(entry):
    """Whether a technique works on text, so that its own tests run the suite, in a federation with text."""
    return isinstance(entry.target, str) and entry.target.startswith("vflsec.language")


def _over_the_registry(kind, suite, make, names=None):
    siblings = _siblings(kind)
    for name in [n for n, entry in sorted(registry.list_all(kind).items()) if names is None or n in names]:
        if _is_of_language(registry.list_all(kind)[name]):
            continue
        body = {"make": make(name), "exempt": EXEMPT.get(name, {}), "__module__": __name__}
        body |= {"side": SIDE[name]} if name in SIDE else {}
        body |= {"wild_scenes": WILD_SCENES[name]} if name in WILD_SCENES else {}
        body |= STRENGTHS.get(name, {})
        body |= {"method_options": METHOD_OPTIONS[name]} if name in METHOD_OPTIONS else {}
        title = f"Test{suite.__name__}_{name}"
        made = type(title, (suite,), body)
        if name in WITH_SMALL_FORESTS:
            made = pytest.mark.usefixtures("small_forests")(made)
        elif name in WITH_FEW_TREES:
            made = pytest.mark.usefixtures("few_trees")(made)
        globals()[title] = pytest.mark.long(made) if name in siblings or name in COSTLY else made


_over_the_registry(
    "defenses",
    DefenseConformance,
    lambda name: lambda self, strength, **o: registry.build("defenses", name, strength, **o),
)
ON_INTEGRITY = [n for n in sorted(registry.list_all("attacks")) if registry.load("attacks", n).target == "integrity"]


def attack(name):
    return lambda self: registry.build("attacks", name, **QUICK.get(name, {}))


_over_the_registry("attacks", IntegrityConformance, attack, ON_INTEGRITY)
ON_RECORDINGS = [n for n in registry.list_all("attacks") if Need.RECORDING in registry.load("attacks", n).needs]
"""They read a recording of an encrypted layer; test_recording_conformance.py has their suite."""
SUITED = sorted(registry.list_all("attacks").keys() - {*ON_INTEGRITY, *ON_RECORDINGS})
_over_the_registry("attacks", AttackConformance, attack, SUITED)
_over_the_registry(
    "methods",
    MethodConformance,
    lambda name: lambda self: small(name),
    registry.list_all("methods").keys() - SAME_STEPS,
)


class SmallKeys(PaillierBoundary):
    """A key for tests alone."""

    def __init__(self, passive, active):
        super().__init__(passive, active, bits=1024)


def protocol(name):
    return lambda self: SmallKeys if name == SmallKeys.name else registry.load("protocols", name)


_over_the_registry("protocols", ProtocolConformance, protocol)


@pytest.mark.long
class TestMixMatch(AttackConformance):
    def make(self):
        return registry.build("attacks", "mc", mode="mixmatch", epochs=4, steps=200)


class Noise(Defense):
    """Sound: white noise of standard deviation ``strength``."""

    name = "noise"
    reference = "made for a test"
    guarantee = "none"
    points = (Kind.GRADIENT, Kind.EMBEDDING)

    def on_gradient(self, g, release):
        return g + self.strength * torch.randn(g.shape, generator=release.rng, dtype=g.dtype)

    on_embedding = on_gradient


class NeverOff(Noise):
    def __init__(self, strength, *, at=None):
        super().__init__(strength + 1, at=at)


class GlobalNoise(Noise):
    def on_gradient(self, g, release):
        return g + self.strength * torch.randn(g.shape, dtype=g.dtype)

    on_embedding = on_gradient


class Repeating(Noise):
    def on_gradient(self, g, release):
        rng = torch.Generator().manual_seed(0)
        return g + self.strength * torch.randn(g.shape, generator=rng, dtype=g.dtype)

    on_embedding = on_gradient


class OnlyGradients(Noise):
    on_embedding = Defense.on_embedding


class Backwards(Noise):
    def on_gradient(self, g, release):
        return g + torch.randn(g.shape, generator=release.rng, dtype=g.dtype) / self.strength

    on_embedding = on_gradient


class Widening(Noise):
    def on_gradient(self, g, release):
        return super().on_gradient(g, release).double()

    on_embedding = on_gradient


class Unbounded(Noise):
    def on_gradient(self, g, release):
        return g / (g - g.mean(dim=0))  # a batch of one divides by zero

    on_embedding = on_gradient


class Credulous(Noise):
    def __init__(self, strength, *, at=None):
        super().__init__(abs(strength), at=at)


class Silent(Noise):
    guarantee = ""


class Nothing(Defense):
    name = "nothing"
    reference = "made for a test"
    guarantee = "none"
    points = ()


class NoisyUpdates(Nothing):
    """Sound: white noise on what its party learns."""

    name = "noisy-updates"

    def on_update(self, modules, rows, rng):
        for p in modules.parameters():
            p.grad += self.strength * self.noise(p, rng)

    def noise(self, p, rng):
        return torch.randn(p.shape, generator=rng)


class GlobalUpdates(NoisyUpdates):
    def noise(self, p, rng):
        return torch.randn(p.shape)


class RepeatingUpdates(NoisyUpdates):
    def noise(self, p, rng):
        return torch.ones(p.shape)


class BackwardsUpdates(NoisyUpdates):
    def noise(self, p, rng):
        return super().noise(p, rng) / self.strength**2


class Untidy(NoisyUpdates):
    def on_update(self, modules, rows, rng):
        super().on_update(modules, rows, rng)
        modules["bottom"].noised = True


class Guesser(Attack):
    """Sound: scores each class by nearness to its mean among the auxiliary samples."""

    name = "guesser"
    needs = frozenset({Need.FEATURES, Need.AUX_LABELS})
    reference = "made for a test"
    verified = "unverified"

    def run(self, view, *, rng):
        own = view.features["train"][view.aux_rows]
        means = torch.stack([own[view.aux_labels == c].mean(dim=0) for c in range(view.n_classes)])
        return Guess({split: -torch.cdist(x, means) for split, x in view.features.items()})


class Tampering(Guesser):
    needs = Guesser.needs | {Need.MODEL}

    def __call__(self, view, *, seed):  # a subclass that ignores ``final``
        self.check(view.side, view.has())
        with torch.no_grad():
            next(view.model.parameters()).zero_()
        return self.run(view, rng=None).check(view)


class GlobalRandom(Guesser):
    def run(self, view, *, rng):
        scores = super().run(view, rng=rng).scores
        return Guess({split: s + 1e-3 * torch.from_numpy(np.random.rand(*s.shape)) for split, s in scores.items()})  # noqa: NPY002


class Remembering(Guesser):
    calls = 0

    def run(self, view, *, rng):
        self.calls += 1
        scores = super().run(view, rng=rng).scores
        return Guess({split: s * self.calls for split, s in scores.items()})


class Overreaching(Guesser):
    """Reads the model without saying so."""

    def run(self, view, *, rng):
        return Guess({split: view.model(x) for split, x in view.features.items()})


class Undemanding(Guesser):
    def check(self, side, shown):
        """Refuse nobody."""


class Blind(Guesser):
    def run(self, view, *, rng):
        return Guess({s: torch.rand(len(x), view.n_classes, generator=rng) for s, x in view.features.items()})


class Unsourced(Guesser):
    reference = ""


class Malicious(IntegrityAttack):
    """Sound: sends the half of each embedding, and has no trigger."""

    name = "malicious"
    reference = "made for a test"
    verified = "by this test"

    def on_embedding(self, h, step):
        return h / 2


class Harmless(Malicious):
    def on_embedding(self, h, step):
        return h


class Hidden(Malicious):
    aim = 1


class Shortening(Malicious):
    def on_gradient(self, g, step):
        return g[:, :-1]


class Scribbling(Malicious):
    def on_features(self, x, step):
        return x.mul_(2)


class Careless(Malicious):
    def on_features(self, x, step):
        return x + torch.rand(())


class Unsteady(Malicious):
    calls = 0

    def on_embedding(self, h, step):
        self.calls += 1
        return h * self.calls


class Everywhere(Malicious):
    side = "either"


class Overheard(FedSplitNN):
    """Leaves each gradient on the embedding that a transcript keeps."""

    def train(self, phase, federation, progress):
        def taint(message):
            message.payload["value"].requires_grad_()

        federation.channel.taps.append(taint)
        return super().train(phase, federation, progress)


class Forgetful(FedSplitNN):
    def train(self, phase, federation, progress):
        history = super().train(phase, federation, progress)
        with torch.no_grad():
            next(federation.active.modules.parameters()).add_(SystemRandom().random())
        return history


class Deaf(FedSplitNN):
    def train(self, phase, federation, progress):
        for party in federation.parties.values():
            for features in party.features.values():
                features.nan_to_num_()
        return super().train(phase, federation, progress)


class Discreet(PlainBoundary):
    reveals = {"active": ("everything",), "passive": ()}  # noqa: RUF012


class Swallowing(PlainBoundary):
    def backward(self, g, step):
        return super().backward(g, step)[:-1]


def _suite(plugin):
    if issubclass(plugin, Defense):
        return type("Suite", (DefenseConformance,), {"make": lambda self, strength, **o: plugin(strength, **o)})()
    if issubclass(plugin, FedSplitNN):
        spec = TrainSpec(epochs=1, batch=32), ModelSpec(bottom=(8,))
        return type("Suite", (MethodConformance,), {"make": lambda self: plugin(*spec)})()
    if issubclass(plugin, IntegrityAttack):
        return type("Suite", (IntegrityConformance,), {"make": lambda self: plugin()})()
    if issubclass(plugin, Attack):
        return type("Suite", (AttackConformance,), {"make": lambda self: plugin()})()
    return type("Suite", (ProtocolConformance,), {"make": lambda self: plugin})()


def _checks(suite):
    return [getattr(suite, name) for name in dir(suite) if name.startswith("test_")]


@pytest.mark.parametrize("plugin", [Noise, NoisyUpdates, Guesser, Malicious])
def test_a_sound_plugin_passes_every_check(plugin):
    for check in _checks(_suite(plugin)):
        check()


@pytest.mark.parametrize(
    ("plugin", "check"),
    [
        (NeverOff, "test_strength_zero_is_the_identity"),
        (GlobalNoise, "test_equal_seeds_give_equal_releases"),
        (Repeating, "test_noise_is_fresh_at_each_release"),
        (OnlyGradients, "test_is_visible_at_non_zero_strength"),
        (Nothing, "test_is_visible_at_non_zero_strength"),
        (Backwards, "test_larger_strength_distorts_more"),
        (Widening, "test_keeps_shape_and_dtype"),
        (Unbounded, "test_keeps_shape_and_dtype"),
        (Credulous, "test_refuses_impossible_settings"),
        (Silent, "test_states_what_it_is"),
        *(
            (plugin, "test_updates_are_changed_reproducibly")
            for plugin in (GlobalUpdates, RepeatingUpdates, BackwardsUpdates, Untidy)
        ),
        (Tampering, "test_leaves_no_trace"),
        (GlobalRandom, "test_leaves_no_trace"),
        (GlobalRandom, "test_equal_seeds_give_equal_guesses"),
        (Remembering, "test_equal_seeds_give_equal_guesses"),
        (Undemanding, "test_refuses_a_poor_view"),
        (Blind, "test_beats_chance_on_a_planted_leak"),
        (Unsourced, "test_states_what_it_is"),
        (Everywhere, "test_states_what_it_is"),
        (Shortening, "test_keeps_shape_and_dtype"),
        (Scribbling, "test_leaves_its_input_untouched"),
        (Careless, "test_leaves_no_trace"),
        (Careless, "test_equal_seeds_give_equal_models"),
        (Unsteady, "test_equal_seeds_give_equal_models"),
        (Harmless, "test_makes_a_difference"),
        (Hidden, "test_a_trigger_has_an_aim"),
        (Overheard, "test_messages_carry_no_graph"),
        (Forgetful, "test_equal_seeds_give_equal_parameters"),
        (Forgetful, "test_phases_can_be_cached_apart"),
        (Deaf, "test_a_nan_is_a_divergence"),
        (Discreet, "test_states_what_it_is"),
        (Swallowing, "test_a_boundary_carries_both_ways"),
    ],
)
def test_a_broken_plugin_is_caught(plugin, check):
    with pytest.raises(AssertionError):
        getattr(_suite(plugin), check)()


def test_a_guess_that_follows_the_truth_is_caught():
    suite = _suite(Guesser)
    labels = suite._get_scene("planted", 0).trained.federation.active.labels  # what no attack could hold

    class Spy(Guesser):
        def run(self, view, *, rng):
            return Guess({s: torch.nn.functional.one_hot(labels[s], 2).float() for s in view.features})

    spying = _suite(Spy)
    with pytest.raises(AssertionError, match="follows labels"):
        spying.test_guess_does_not_depend_on_the_truth()


def test_an_exempted_check_skips_with_its_reason():
    class Exempted(DefenseConformance):
        exempt = {"test_noise_is_fresh_at_each_release": "nothing is random"}  # noqa: RUF012

    with pytest.raises(SkipTest, match="nothing is random"):
        Exempted().test_noise_is_fresh_at_each_release()


def test_an_exemption_from_nothing_is_refused():
    with pytest.raises(AssertionError, match="not a check"):
        type("Mistyped", (DefenseConformance,), {"exempt": {"test_tpyo": "none"}})
