"""A stage is shared with the undefended training exactly when a defense changes nothing in it, found by running it."""

from functools import lru_cache

import msgspec
import pytest
import torch
from torch import Tensor

from vflsec.base.errors import UsageError
from vflsec.core import registry
from vflsec.core.message import Message
from vflsec.core.settings import ModelSpec, PretrainSpec, TrainSpec
from vflsec.data.partition import DataSpec
from vflsec.defenses import coae
from vflsec.run.federation import build_federation, build_method
from vflsec.run.plan import make_cell
from vflsec.run.spec import parse_defense

OTHER_LOSSES = ("-byol", "-moco")
"""Endings of methods that pre-train like ``-simsiam``, with another loss. Of ``fedhssl``, with all steps, all run."""

METHODS = [
    name
    for name in sorted(registry.list_all("methods"))
    if len(registry.load("methods", name).phases) > 1
    if name.startswith("fedhssl") or not name.endswith(OTHER_LOSSES)
]
DEFENSES = sorted(registry.list_all("defenses"))
OPTIONS = {"phe": "backend=plain,"}
PLACED = [
    "iso:lambda=5@embedding",
    "iso:lambda=5@pretrain.embedding",
    "iso:lambda=5@pretrain.gradient",
    "iso:lambda=5@pretrain.parameters",
    "iso:lambda=5@finetune.gradient+finetune.embedding",
    "iso:lambda=5,by=active@pretrain.embedding",
    "iso:lambda=5,by=passive@gradient",
    "mixup:alpha=5,by=passive",
    "label-dp:strength=5,by=passive",
    "mid:lambda=0.1,by=passive",
]

DIFFER_NEEDLESSLY = {
    ("prada", "iso:lambda=5,by=active@pretrain.embedding"): "only passive parties send embeddings",
    ("prada", "iso:lambda=5,by=passive@gradient"): "only the source sends gradients",
}
"""Pairs whose key differs although nothing else does: keys do not know which party sends a kind of message.

That costs one more training. The other direction has no exceptions.
"""


def cell(method, *defenses):
    options = {} if method.startswith(("prada", "vflhlp", "ss-vfl")) else {"projector": 8, "predictor": 4}
    updates = {"epochs": 2, "batch": 64} if options else {"epochs": 1, "batch": 24}
    return make_cell(
        dataset="toy",
        data=DataSpec(n_labeled=40, aligned=0.8, overlap=0.8, options={"rows": 90, "columns": 3, "source": 48}),
        method=method,
        method_options={**options, "pma": True} if method.startswith("fedlocal") else options,
        train=TrainSpec(epochs=1, batch=24, optimizer="sgd", lr=0.05, pretrain=PretrainSpec(**updates)),
        model=ModelSpec(bottom=(6,), cut=4, encoder="mlp"),
        defenses=tuple(parse_defense(text) for text in defenses),
        seed=0,
    )


def plain(value):
    return (value.dtype, tuple(value.shape), value.detach().numpy().tobytes()) if isinstance(value, Tensor) else value


def outcome(method, *defenses):
    """What the stage leaves behind: the weights of the models that are kept, every message, and losses."""
    where = cell(method, *defenses)
    federation, made = build_federation(where, "cpu"), build_method(where)
    heard: list[Message] = []
    federation.channel.taps.append(heard.append)
    try:
        made.build(federation)
        history = made.run(where.stages[-1], federation)
    finally:
        made.close()
    weights = {
        (party.name, role, name): plain(value)
        for party in federation.all_parties
        for role in sorted(made.stored_modules & set(party.modules))
        for name, value in party.modules[role].state_dict().items()
    }
    messages = [
        (m.kind, m.sender, m.receiver, m.step, {key: plain(value) for key, value in m.payload.items()}) for m in heard
    ]
    return weights, messages, history


undefended = lru_cache(outcome)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _short_codes(monkeypatch):
    """Stop the fit of CoAE early: any codes change the targets."""
    monkeypatch.setattr(coae, "STEPS", 50)
    monkeypatch.setattr(coae, "SURE", 0.0)


def strongest(defense):
    return f"{defense}:{OPTIONS.get(defense, '')}strength={registry.load('defenses', defense).strengths[-1]}"


def refused(method, defense):
    if defense.startswith("dp-sgd"):
        return "all training is split learning"
    if defense.startswith("perp") and method in ("prada", "prada-no-ir"):
        return "cut layer of width 2"  # three columns are one group, of one number
    if defense.startswith("sealed") and method.startswith("prada"):
        return "last phase is split learning"
    if defense.startswith("phe") and method == "ss-vfl-i":
        return "expected a linear head"
    return None


@pytest.mark.sampled
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("defense", [*map(strongest, DEFENSES), *PLACED])
def test_the_key_of_a_stage_differs_exactly_when_the_stage_does(method, defense):
    (stage,) = cell(method).stages
    differs = cell(method, defense).stage_key(stage) != cell(method).stage_key(stage)
    refusal = refused(method, defense)
    if refusal:  # nothing is trained, so that there is nothing to share
        with pytest.raises(UsageError, match=refusal):
            outcome(method, defense)
        return
    changed = outcome(method, defense) != undefended(method)
    if (method.split("-")[0], defense) in DIFFER_NEEDLESSLY:
        assert differs
        assert not changed
    else:
        assert differs == changed


def test_two_updates_are_two_updates():
    """The undefended stages train, and say what their methods say they do."""
    for method in METHODS:
        weights, messages, _ = undefended(method)
        begun = build_federation(cell(method), "cpu")
        made = build_method(cell(method))
        made.build(begun)
        (stage,) = made.phases[:-1]
        said = made.messages_in(stage, cell(method).method.spec.options)
        assert {kind for kind, *_ in messages} == said
        before = {
            (party.name, role, name): plain(value)
            for party in begun.all_parties
            for role in sorted(made.stored_modules & set(party.modules))
            for name, value in party.modules[role].state_dict().items()
        }
        assert before.keys() == weights.keys()
        assert before != weights
        assert msgspec.structs.replace(cell(method), seed=1).stage_key(stage) != cell(method).stage_key(stage)
