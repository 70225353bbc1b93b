"""Conformance of methods and protocols; see ``vflsec.testing.conformance`` for how to use it."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from vflsec.base.errors import Diverged, NotStackable
from vflsec.core import hooks
from vflsec.core.defense import Defense, Release
from vflsec.core.federation import Federation
from vflsec.core.message import SERVER, Kind, Message, Step
from vflsec.core.method import Method
from vflsec.core.protocol import Boundary, LinearBoundary, Protocol
from vflsec.core.settings import TrainSpec
from vflsec.data.partition import DataSpec
from vflsec.methods.checkpoint import load_states, save_states
from vflsec.methods.together import join, separate
from vflsec.testing.federations import make_tiny_federation, make_toy_federation
from vflsec.testing.suite import Suite, are_same, check_stated, expect_refusal, get_parameters, list_changed

DATA = DataSpec(n_labeled=60, aligned=0.8, overlap=0.8, validation=0.2)
"""Rows in every role: labeled, aligned without label, local, validation, test."""


class MethodConformance(Suite):
    """Checks of one method in small toy federations."""

    _models: ClassVar[dict[str, Tensor]] = {}

    def __init_subclass__(cls) -> None:
        """Give each suite models of its own, which its checks share."""
        super().__init_subclass__()
        cls._models = {}

    def make(self) -> Method:
        """Return the method, with few epochs and narrow networks."""
        raise NotImplementedError

    def federation(self, seed: int = 0, *, parties: int = 2, **options: Any) -> Federation:
        """Return the federation a check trains in, with a source; override it where a method asks for another."""
        settings = {"rows": 160, "columns": 4, "source": 96, **options}
        return make_toy_federation(seed=seed, data=DATA, parties=parties, **settings)

    def test_states_what_it_is(self) -> None:
        """Name, reference, phases and version, what is sent in each phase, and what each side sees, if anybody does."""
        method = self.make()
        check_stated(method, ("name", "reference", "phases", "version", "messages"))
        assert set(method.messages) == set(method.phases)
        assert set(method.receives) - {SERVER, "source"} in ({"passive", "active"}, set())
        assert set(method.learns) <= set(method.phases)
        sent = frozenset[Kind]().union(*method.messages.values())
        assert all(kinds <= sent for kinds in method.receives.values())

    def test_any_number_of_parties_and_classes(self) -> None:
        """Finite logits (n, C), a loss by epoch for every phase, and a representation for every party."""
        for parties, classes in ((2, 2), (3, 3), (4, 2)):
            federation, method = self.federation(parties=parties, classes=classes), self.make()
            trained = method.fit(federation)
            assert list(trained.history) == list(method.phases)
            for split in ("train", "test"):
                logits = trained.predict(split)
                assert tuple(logits.shape) == (federation.n_rows(split), classes)
                assert not logits.requires_grad
            for party in federation.parties.values():
                h = method.representation(party)(party.features["test"])
                assert h.dim() == 2
                assert len(h) == federation.n_rows("test")

    def test_messages_carry_no_graph(self) -> None:
        """During training and after it: a gradient left on a kept tensor would be one that no defense has seen."""
        federation, heard = self.federation(), list[Message]()
        federation.channel.taps.append(heard.append)
        method = self.make()
        method.fit(federation)
        assert heard, "nothing crossed the wire"
        for message in heard:
            assert message.kind in method.messages[message.phase], f"{message.kind} in {message.phase} is not declared"
            for key, value in message.payload.items():
                if isinstance(value, Tensor):
                    assert not value.requires_grad, f"{message.kind} {key!r} carries its graph"
                    assert value.grad is None, f"{message.kind} {key!r} carries a gradient"

    def test_equal_seeds_give_equal_parameters(self) -> None:
        """Bit for bit, whatever torch's global generator holds; and another seed gives others."""
        first, trained = self._train_models(), []
        for global_seed, seed in ((2, 0), (1, 1)):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(global_seed)
                trained.append(get_parameters(self.make().fit(self.federation(seed)).federation))
        again, other = trained
        assert not list_changed(first, again), "not reproducible"
        assert list_changed(first, other), "the seed changes nothing"

    def test_stored_models_predict_the_same(self) -> None:
        """Models saved, and loaded into a fresh federation that was only built, give equal logits."""
        with TemporaryDirectory() as folder:
            trained = self.make().fit(self.federation())
            save_states(trained.federation, Path(folder))
            federation, method = self.federation(), self.make()
            method.build(federation)
            load_states(federation, Path(folder))
            assert are_same(trained.predict("test"), method.predict(federation, "test"))

    def test_phases_can_be_cached_apart(self) -> None:
        """A phase that starts from stored models equals one that follows in the same process."""
        whole = self._train_models()
        with TemporaryDirectory() as name:
            folder = Path(name)
            for phase in self.make().phases:
                federation, method = self.federation(), self.make()
                method.build(federation)
                if list(folder.iterdir()):
                    load_states(federation, folder)
                method.run(phase, federation)
                save_states(federation, folder)
        parts = get_parameters(federation)
        assert not list_changed(whole, parts), "a phase depends on more than models, seed and name"

    def test_a_phase_without_labels_reads_none(self) -> None:
        """One that runs no hook of labels ends in the same models whatever the labels are."""
        ends = []
        for flip in (False, True):
            federation, method = self.federation(), self.make()
            if flip:
                for labels in federation.active.labels.values():
                    labels.copy_(1 - labels)
            method.build(federation)
            for phase in method.phases[:-1]:
                if hooks.LABELS not in method.runs(phase, {}):
                    method.run(phase, federation)
            ends.append(get_parameters(federation))
        assert not list_changed(*ends), "a label was read"

    def test_runs_only_the_hooks_that_it_declares(self) -> None:
        """In each phase, a defense at every party is asked for no more than the method says."""
        federation, method = self.federation(), self.make()
        probes = [_Probe(1.0) for _ in federation.all_parties]
        for party, probe in zip(federation.all_parties, probes, strict=True):
            party.defenses = [probe]
        method.build(federation)
        for phase in method.phases:
            for probe in probes:
                probe.called.clear()
            method.run(phase, federation)
            declared = {hook.name for hook in method.runs(phase, {})}
            declared |= {hooks.OF_KIND[kind].name for kind in method.messages[phase] if kind in hooks.OF_KIND}
            extra = set[str]().union(*(probe.called for probe in probes)) - declared
            assert not extra, f"{phase} runs {', '.join(sorted(extra))} undeclared"

    def test_runs_that_train_together_are_as_by_themselves(self) -> None:
        """In models, losses, traffic and releases, with other seeds and defenses; a method may refuse."""
        together = self._train_runs()
        phase = together[0][1].phases[-1]
        try:
            joined = join([federation for federation, _ in together])
            losses = together[0][1].together(joined).run(phase, joined)
        except NotStackable:
            return
        apart = self._train_runs()
        separate(joined, [federation for federation, _ in together])
        for number, ((federation, method), (other, _)) in enumerate(zip(apart, together, strict=True)):
            expected = method.run(phase, federation)
            assert np.allclose(expected, np.array(losses)[:, number], rtol=1e-6), "the losses differ"
            models, joint = get_parameters(federation), get_parameters(other)
            assert all(torch.allclose(models[key], joint[key], atol=1e-6) for key in models), "the models differ"
            assert federation.channel.traffic == other.channel.traffic, "the bytes differ"
            assert federation.channel.releases() == other.channel.releases(), "the releases differ"

    def test_a_nan_is_a_divergence(self) -> None:
        """One bad number among the inputs ends in Diverged, never in a number."""
        federation = self.federation()
        for features in federation.passive[0].features.values():
            features[0, 0] = float("nan")
        with expect_refusal(Diverged, naming="nan"):
            self.make().fit(federation)

    def _train_runs(self) -> list[tuple[Federation, Method]]:
        """Return federations with models trained up to the last phase: two seeds, one of them with noise as well."""
        runs = []
        for seed, noisy in ((0, False), (0, True), (1, True)):
            federation, method = self.federation(seed), self.make()
            for party in federation.parties.values() if noisy else ():
                party.defenses = [_Noise(1.0, at=_Noise.points)]
            method.build(federation)
            for phase in method.phases[:-1]:
                method.run(phase, federation)
            runs.append((federation, method))
        return runs

    def _train_models(self) -> dict[str, Tensor]:
        """Return the parameters of one training, while torch's global generator holds seed 1."""
        if not self._models:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1)
                self._models.update(get_parameters(self.make().fit(self.federation()).federation))
        return self._models


def _note(hook: hooks.Hook) -> Any:
    """Return a method that notes that its hook was called, and returns what it was given; for a penalty, None."""

    def note(probe: _Probe, value: Tensor, *_: Any, **__: Any) -> Tensor | None:
        probe.called.add(hook.name)
        return None if hook is hooks.PENALTY else value

    return note


class _Probe(Defense):
    """Changes nothing, and notes which of its hooks are called while a method trains."""

    name = "probe"
    reference = "none: made for a check"
    guarantee = "none"
    points = (Kind.EMBEDDING, Kind.GRADIENT, Kind.PARAMETERS, Kind.NODES)
    on_embedding, on_gradient = _note(hooks.EMBEDDING), _note(hooks.GRADIENT)
    on_parameters, on_nodes = _note(hooks.PARAMETERS), _note(hooks.NODES)
    on_labels, on_received, penalty = _note(hooks.LABELS), _note(hooks.RECEIVED), _note(hooks.PENALTY)

    def __init__(self, strength: float) -> None:
        super().__init__(strength, at=[point.value for point in self.points])
        self.called: set[str] = set()


class _Noise(Defense):
    """Noise on whatever leaves."""

    name = "noise"
    reference = "none: made for a check"
    guarantee = "none"
    points = (Kind.EMBEDDING, Kind.GRADIENT)

    def on_embedding(self, h: Tensor, release: Release) -> Tensor:
        return h + torch.randn(h.shape, generator=release.rng)

    def on_gradient(self, g: Tensor, release: Release) -> Tensor:
        return g + torch.randn(g.shape, generator=release.rng)


class ProtocolConformance(Suite):
    """Checks of one protocol; of a boundary, also that it carries a batch up and a gradient down."""

    def make(self) -> type[Protocol]:
        """Return the class."""
        raise NotImplementedError

    def test_states_what_it_is(self) -> None:
        """Name and reference, and for each role what it learns."""
        protocol = self.make()
        check_stated(protocol, ("name", "reference", "roles"))
        assert set(protocol.reveals) == set(protocol.roles)
        assert all(learned and all(learned) for learned in protocol.reveals.values())

    def test_a_boundary_carries_both_ways(self) -> None:
        """One row for each row, traffic counted in both directions, no graph on the wire."""
        protocol = self.make()
        if not issubclass(protocol, Boundary):
            return
        federation, heard = make_tiny_federation(), list[Message]()
        federation.channel.taps.append(heard.append)
        passive, active = federation.passive[0], federation.active
        boundary = protocol(passive, active)
        if isinstance(boundary, LinearBoundary):
            boundary.join(torch.ones(3, 2), TrainSpec(optimizer="sgd"))
        h = torch.ones(4, 3, requires_grad=True)
        step = Step(0, "train", torch.arange(4), torch.arange(4) % 2)
        arrived = boundary.forward(h, step)
        if boundary.instead:  # no gradient comes back
            assert arrived.shape == h.shape
            return
        returned = boundary.backward(torch.full_like(arrived, 0.1), step)
        assert len(arrived) == len(h)
        assert returned.shape == h.shape
        senders = {route.sender for route, nbytes in federation.channel.traffic.items() if nbytes > 0}
        assert senders == {passive.name, active.name}
        tensors = [value for message in heard for value in message.payload.values() if isinstance(value, Tensor)]
        assert not any(value.requires_grad for value in tensors)
