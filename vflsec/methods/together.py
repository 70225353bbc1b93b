"""Several federations as one, so that a method trains all of them at once."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vflsec.base.errors import NotStackable
from vflsec.base.seeds import Generators, Seeds, make_rng
from vflsec.base.sparse_rows import SparseRows
from vflsec.core import hooks
from vflsec.core.defense import Defense, DefenseStack, Release
from vflsec.core.federation import Federation
from vflsec.core.hooks import Hook
from vflsec.core.message import Channel, Message, Route
from vflsec.core.party import Noise, Party
from vflsec.nn.stacked import divide, stack, stack_modules, stack_tree, unstack_modules


class DefensesOfRuns:
    """The defenses of one party in R runs, with the methods of ``DefenseStack``; each acts on the part of its run."""

    def __init__(self, stacks: Sequence[DefenseStack]) -> None:
        self.stacks = stacks

    def __iter__(self) -> Iterator[Defense]:
        """Yield the defenses of all runs."""
        return (defense for defenses in self.stacks for defense in defenses)

    def select(self, hook: Hook) -> list[Defense]:
        """Return the defenses of any run that use ``hook``."""
        return [defense for defenses in self.stacks for defense in defenses.select(hook)]

    def _call_each(self, method: str, *args: Any, **options: Any) -> Any:
        """Return what a method of each run's defenses returns for its part of the arguments, joined."""
        calls = zip(self.stacks, divide((args, options), len(self.stacks)), strict=True)
        return stack_tree([getattr(defenses, method)(*part, **rest) for defenses, (part, rest) in calls])

    def apply_to_release(self, value: Any, release: Release) -> Any:
        """Return what leaves in place of ``value``, in which each run's defenses have changed its part."""
        hook = hooks.OF_KIND.get(release.kind)
        if not hook or not self.select(hook):
            return value
        known = {name: getattr(release, name) for name in ("rows", "labels", "rng")}
        calls = zip(self.stacks, divide((value.detach(), known), len(self.stacks)), strict=True)
        return stack([defenses.apply_to_release(part, replace(release, **rest)) for defenses, (part, rest) in calls])

    def training_targets(self, y: Tensor, features: Tensor, *, n_classes: int, rng: Generators) -> Any:
        """Return class numbers and targets of each run."""
        return self._call_each("training_targets", y, features, n_classes=n_classes, rng=rng)

    def batch(self, embeddings: Sequence[Tensor], targets: Tensor) -> Any:
        """Return the embeddings and targets of an update."""
        given = list(embeddings), targets
        return self._call_each("batch", *given) if self.select(hooks.BATCH) else given

    def apply_to_received(self, h: Tensor, sender: str) -> Any:
        """Return the input of the top model."""
        return self._call_each("apply_to_received", h, sender) if self.select(hooks.RECEIVED) else h

    def penalize(self, loss: Tensor, received: Mapping[str, Tensor], labels: Tensor) -> Any:
        """Return the losses with penalties."""
        return self._call_each("penalize", loss, dict(received), labels) if self.select(hooks.PENALTY) else loss

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
            parts = divide((dict(message.payload), message.rows), len(self.channels))
            for channel, (payload, rows) in zip(self.channels, parts, strict=True):
                for tap in channel.taps:
                    tap(replace(message, payload=payload, rows=rows))

    def _count(self, key: tuple[Route, str], rows: Tensor) -> None:
        at = torch.stack(divide(rows, len(self.channels)))
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
            for channel, count in zip(self.channels, counts, strict=True):
                channel.counts[key] = count


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
            self.stacked[split] = stack([rows[split] for rows in self.each])
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
        if (reason := _find_obstacle(federation, first)) is not None:
            raise NotStackable(reason)
    channel = ChannelOfRuns([federation.channel for federation in federations])
    seeds = Seeds(federation.seed for federation in federations)
    parties = {
        name: PartyOfRuns(
            [federation.parties[name] for federation in federations],
            channel,
            noise=partial(make_rng, seeds, "noise", name, device=first.device),
        )
        for name in first.parties
    }
    joined = Federation(parties, channel, first.n_classes, first.metric, seeds, first.device)
    joined.label_seed = Seeds(f.seed if f.label_seed is None else f.label_seed for f in federations)
    return joined


def separate(joined: Federation, federations: Sequence[Federation]) -> None:
    """Copy the models, traffic and releases of each run back into its own federation."""
    for name, party in joined.parties.items():
        unstack_modules(party.modules, [federation.parties[name].modules for federation in federations])
    assert isinstance(joined.channel, ChannelOfRuns)
    joined.channel.settle()


def _find_obstacle(federation: Federation, first: Federation) -> str | None:
    """Return why ``federation`` cannot train as one with ``first``, or None."""
    if federation.malicious:
        return "a malicious party acts in training"
    for name, party in federation.parties.items():
        if party.defenses.select(hooks.TRAINING) or party.defenses.select(hooks.UPDATE):
            return f"a defense changes how {name} computes its updates"
        if party.defenses.modules():
            return f"a defense of {name} learns"
        if isinstance(party.features["train"], SparseRows):
            return f"the rows of {name} are sparse"
        if _list_shapes(party) != _list_shapes(first.parties[name]):
            return f"rows or models of {name} have different shapes by run"
        if any(isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p for layer in party.modules.modules()):
            return f"the models of {name} draw at random in training"
    return None


def _list_shapes(party: Party) -> list[object]:
    return [party.layout, party.features["train"].shape, *(p.shape for p in party.modules.parameters())]
