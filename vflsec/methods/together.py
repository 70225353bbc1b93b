"""Several federations as one, so that a method trains all of them at once."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vflsec.base.errors import NotStackable
from vflsec.base.seeds import Generators, Seeds, generator
from vflsec.core import hooks
from vflsec.core.defense import Defense, DefenseStack, Release
from vflsec.core.federation import Federation
from vflsec.core.hooks import Hook
from vflsec.core.message import Channel, Message, Route
from vflsec.core.party import Noise, Party
from vflsec.core.sparse_rows import SparseRows
from vflsec.nn.stacked import Stacked, runs, stack, stack_modules, unstack_modules


class DefensesOfRuns:
    """The defenses of one party in R runs; each acts on the messages of its own run."""

    def __init__(self, stacks: Sequence[DefenseStack]) -> None:
        self.stacks = stacks

    def __iter__(self) -> Iterator[Defense]:
        """Yield the defenses of all runs."""
        return (defense for own in self.stacks for defense in own)

    def using(self, hook: Hook) -> list[Defense]:
        """Return the defenses of any run that use ``hook``."""
        return [defense for own in self.stacks for defense in own.using(hook)]

    def released(self, value: Any, release: Release) -> Any:
        """Return what leaves in place of ``value``, in which each run's defenses have changed its part."""
        hook = hooks.OF_KIND.get(release.kind)
        if not hook or not self.using(hook):
            return value
        assert isinstance(release.rng, Generators)
        rows, labels = (_each(one, len(self.stacks)) for one in (release.rows, release.labels))
        each = zip(self.stacks, runs(value.detach()), rows, labels, release.rng, strict=True)
        return stack(
            [
                own.released(part, replace(release, rows=own_rows, labels=own_labels, rng=rng))
                if own.using(hook)
                else part
                for own, part, own_rows, own_labels, rng in each
            ]
        )

    def training_targets(
        self, y: Tensor, features: Tensor, *, n_classes: int, rng: Generators
    ) -> tuple[Tensor, Tensor]:
        """Return class numbers and targets, as ``DefenseStack`` does for each run."""
        found = [
            own.training_targets(labels, x, n_classes=n_classes, rng=one)
            for own, labels, x, one in zip(self.stacks, runs(y), runs(features), rng, strict=True)
        ]
        labels, targets = zip(*found, strict=True)
        return stack(labels), stack(targets)

    def batch(self, embeddings: Sequence[Tensor], targets: Tensor) -> tuple[Sequence[Tensor], Tensor]:
        """Return embeddings and targets, as ``DefenseStack`` does for each run."""
        if not self.using(hooks.BATCH):
            return embeddings, targets
        apart = zip(self.stacks, zip(*map(runs, embeddings), strict=True), runs(targets), strict=True)
        changed, new_targets = zip(*(own.batch(list(h), y) for own, h, y in apart), strict=True)
        return [stack(parts) for parts in zip(*changed, strict=True)], stack(new_targets)

    def received(self, h: Tensor, sender: str) -> Tensor:
        """Return the input of the top model, as ``DefenseStack`` does for each run."""
        if not self.using(hooks.RECEIVED):
            return h
        return stack([own.received(part, sender) for own, part in zip(self.stacks, runs(h), strict=True)])

    def penalized(self, loss: Tensor, received: Mapping[str, Tensor], labels: Tensor) -> Tensor:
        """Return the loss with penalties, as ``DefenseStack`` does for each run."""
        if not self.using(hooks.PENALTY):
            return loss
        apart = [dict(zip(received, parts, strict=True)) for parts in zip(*map(runs, received.values()), strict=True)]
        return stack(
            [
                own.penalized(part, h, y)
                for own, part, h, y in zip(self.stacks, runs(loss), apart, runs(labels), strict=True)
            ]
        )

    def training_hooks(self, modules: nn.Module, penalties: Sequence[str]) -> AbstractContextManager[None]:
        """Do nothing: ``join`` refuses defenses with training hooks."""
        return nullcontext()

    def update(self, modules: nn.Module, rows: int, rng: Generators) -> None:
        """Do nothing: ``join`` refuses defenses of updates."""


class ChannelOfRuns(Channel):
    """Carries the messages of R runs, and counts them in the channel of each."""

    def __init__(self, channels: Sequence[Channel]) -> None:
        super().__init__()
        self.channels = channels

    def _record(self, message: Message) -> None:
        super()._record(message)
        if any(channel.taps for channel in self.channels):
            payload = [dict(zip(message.payload, parts, strict=True)) for parts in _apart(message.payload.values())]
            rows = _each(message.rows, len(self.channels))
            for channel, own_payload, own_rows in zip(self.channels, payload, rows, strict=True):
                for tap in channel.taps:
                    tap(replace(message, payload=own_payload, rows=own_rows))

    def _count(self, key: tuple[Route, str], rows: Tensor) -> None:
        at = torch.stack(list(_each(rows, len(self.channels))))
        before = self.counts.get(key, at.new_zeros(len(at), 0))
        lacking = int(at.max()) + 1 - before.shape[1]
        if lacking > 0:
            before = torch.cat([before, before.new_zeros(len(at), lacking + before.shape[1])], dim=1)
        self.counts[key] = before.scatter_add_(1, at, torch.ones_like(at))

    def settle(self) -> None:
        """Add the bytes and releases of each run to its own channel."""
        for channel in self.channels:
            channel.traffic.update(self.traffic)
        for key, counts in self.counts.items():
            for channel, own in zip(self.channels, counts, strict=True):
                channel.counts[key] = own


def _each(x: Tensor | None, count: int) -> Sequence[Any]:
    """Return the tensor of each run; one that is the same for all, or None, so often."""
    return runs(x) if isinstance(x, Stacked) else [x] * count


def _apart(values: Iterable[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    return zip(*map(runs, values), strict=True)


class PartyOfRuns(Party):
    """One party of R runs; the columns of a split are copied when they are first read."""

    def __init__(self, parties: Sequence[Party], channel: Channel, *, noise: Noise) -> None:
        super().__init__(
            parties[0].name,
            _Splits([party.features for party in parties]),
            channel,
            noise=noise,
            layout=parties[0].layout,
            labels=_Splits([party.labels for party in parties]),
        )
        self._defenses = DefensesOfRuns([party.defenses for party in parties])  # type: ignore[assignment]
        self.modules = copy.deepcopy(parties[0].modules)
        stack_modules([party.modules for party in parties], self.modules)


class _Splits(Mapping[str, Tensor]):
    """The rows of each split, of all runs."""

    def __init__(self, each: Sequence[Mapping[str, Tensor]]) -> None:
        self.each = each
        self.stacked: dict[str, Tensor] = {}

    def __getitem__(self, split: str) -> Tensor:
        if split not in self.stacked:
            self.stacked[split] = stack([own[split] for own in self.each])
        return self.stacked[split]

    def __iter__(self) -> Iterator[str]:
        return iter(self.each[0])

    def __len__(self) -> int:
        return len(self.each[0])


def join(federations: Sequence[Federation]) -> Federation:
    """Return R federations as one, with their models as they are now.

    Raises:
        NotStackable: they cannot train as one, with the reason.
    """
    first = federations[0]
    for federation in federations:
        if (reason := _why_not(federation, first)) is not None:
            raise NotStackable(reason)
    channel = ChannelOfRuns([federation.channel for federation in federations])
    seeds = Seeds(federation.seed for federation in federations)
    parties = {
        name: PartyOfRuns(
            [federation.parties[name] for federation in federations],
            channel,
            noise=partial(generator, seeds, "noise", name, device=first.device),
        )
        for name in first.parties
    }
    joined = Federation(parties, channel, first.n_classes, first.metric, seeds, first.device)
    joined.label_seed = Seeds(f.seed if f.label_seed is None else f.label_seed for f in federations)
    return joined


def part(joined: Federation, federations: Sequence[Federation]) -> None:
    """Copy the models, traffic and releases of each run back into its own federation."""
    for name, own in joined.parties.items():
        unstack_modules(own.modules, [federation.parties[name].modules for federation in federations])
    assert isinstance(joined.channel, ChannelOfRuns)
    joined.channel.settle()


def _why_not(federation: Federation, first: Federation) -> str | None:
    """Return why ``federation`` cannot train as one with ``first``, or None."""
    if federation.malicious:
        return "a malicious party acts in training"
    for name, party in federation.parties.items():
        inside = [hook.name for hook in (hooks.TRAINING, hooks.UPDATE) if party.defenses.using(hook)]
        if inside:
            return f"a defense changes how {name} computes its updates"
        if party.defenses.modules():
            return f"a defense of {name} learns"
        if isinstance(party.features["train"], SparseRows):
            return f"the rows of {name} are sparse"
        if _shapes(party) != _shapes(first.parties[name]):
            return f"rows or models of {name} have different shapes by run"
        if any(isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p for layer in party.modules.modules()):
            return f"the models of {name} draw at random in training"
    return None


def _shapes(party: Party) -> list[object]:
    return [party.layout, party.features["train"].shape, *(p.shape for p in party.modules.parameters())]
