"""What the tests of defenses share: one release, and what an attack makes of a small federation that is defended."""

from dataclasses import replace
from functools import lru_cache

import msgspec
import pytest
import torch

from vflsec.base.seeds import make_rng
from vflsec.core import registry
from vflsec.core.defense import Release
from vflsec.core.message import Kind, Transcript
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.data.partition import DataSpec
from vflsec.methods.fedsplitnn import FedSplitNN
from vflsec.results import metrics
from vflsec.run.adversary import draw_auxiliary, observe
from vflsec.run.federation import build_federation
from vflsec.run.plan import make_cell
from vflsec.run.spec import AuxSpec, DefenseSpec


@pytest.fixture(scope="session")
def release():
    """What the sender of gradients knows, with a noise stream at its start."""

    def make(seed=0):
        return Release("active", "passive_1", Kind.GRADIENT, 0, "train", "h", None, None, make_rng(seed, "release"))

    return make


@lru_cache(maxsize=32)
def trained(defense, signal, seed):
    """A federation of two parties trained under ``defense``, and all that was said to the passive one."""
    train, model = TrainSpec(epochs=6, batch=64, lr=5e-3), ModelSpec(bottom=(16,))
    data = DataSpec(options={"seed": seed, "signal": signal})
    cell = make_cell(
        dataset="toy",
        data=data,
        method="fedsplitnn",
        method_options={},
        train=train,
        model=model,
        defenses=(DefenseSpec(**msgspec.structs.asdict(defense)),) if defense.strength else (),
        seed=seed,
    )
    federation = build_federation(cell, "cpu")
    transcript = Transcript(frozenset({"passive_1"}), frozenset(Kind))
    federation.channel.taps.append(transcript)
    return FedSplitNN(train, model).fit(federation), tuple(transcript.messages)


@pytest.fixture(scope="session")
def leak():
    """AUC on training rows, the mean of two seeds, of an attack on planted toy data whose defense has that strength.

    ``read`` is what the attacker itself makes of each message of gradients (B, d) before it attacks.
    """

    def measure(attack, defense, strength, *, signal="planted", read=None, **options):
        found = []
        for seed in (0, 1):
            spec = Plain(name=defense, strength=strength, options=options)
            federation, messages = trained(spec, signal, seed)
            messages = [m if read is None or m.kind is not Kind.GRADIENT else again(m, read) for m in messages]
            labels = federation.federation.active.labels["train"]
            known = draw_auxiliary(labels, 2, AuxSpec(n=20), seed)
            view = observe(federation, [federation.federation.parties["passive_1"]], known, tuple(messages))
            scores = registry.build("attacks", attack)(view, seed=seed).scores["train"]
            rest = torch.ones(len(labels), dtype=torch.bool)
            rest[known] = False  # what it knew
            found.append(metrics.auc(scores[rest].numpy(), labels[rest].numpy()))
        return sum(found) / len(found)

    return measure


def again(message, read):
    """The same message after ``read``."""
    return replace(message, payload={key: read(value) for key, value in message.payload.items()})


class Plain(DefenseSpec, frozen=True):
    """A spec that can be a key of the cache."""

    def __hash__(self):
        return hash((self.name, self.strength, str(sorted(self.options.items()))))
