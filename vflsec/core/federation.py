"""A federation: the parties, the channel between them and their task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vflsec.base.seeds import make_rng
from vflsec.core.attack import Attack
from vflsec.core.message import Channel
from vflsec.core.party import Party

if TYPE_CHECKING:
    from vflsec.results.canaries import Canaries


@dataclass(frozen=True)
class Checkpoint:
    """The file from which a killed phase resumes.

    Attributes:
        path: of the file; None keeps nothing.
        every: seconds between two writes, at least; what is written does not depend on it.
        most: epochs; a state after more of them is not restored.
        kept: whether ``remove`` leaves the file, from which a longer run of the phase goes on.
    """

    path: Path | None = None
    every: float = 0.0
    most: int | None = None
    kept: bool = False

    def remove(self) -> None:
        """Remove the file, unless it is kept."""
        if self.path is not None and not self.kept:
            self.path.unlink(missing_ok=True)


@dataclass
class Federation:
    """Everything that a method may use: parties, channel, task.

    Attributes:
        parties: by name, the active party first.
        channel: between all parties.
        n_classes: C.
        metric: the headline metric, for selection on validation rows.
        seed: of this run; ``Seeds`` of several that train as one.
        label_seed: of what the active party's defenses draw for labels; None for ``seed``.
        device: of models and features.
        malicious: the attack of each party that acts in training, by party.
        checkpoint: where a phase keeps its state between epochs.
        reached: the epochs and bytes after which ``train.target`` was met, once it is.
        source: another active party with rows and labels of its own, the source of a domain adaptation; or None.
        places: by split, the positions (n_train,) of the training rows among its rows, for ``aligned``.
        names: what the data call a party, by its name here; others keep theirs.
        canaries: the training rows whose labels were tossed, or None.
        groups: by split, the group of each row, for intervals over seeds: ``vflsec.results.statistics.draw_groups``.
    """

    parties: Mapping[str, Party]
    channel: Channel
    n_classes: int
    metric: str
    seed: int
    device: torch.device
    malicious: Mapping[str, Attack] = field(default_factory=dict)
    checkpoint: Checkpoint = Checkpoint()
    reached: dict[str, float] = field(default_factory=dict)
    source: Party | None = None
    places: Mapping[str, Tensor] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    canaries: Canaries | None = None
    groups: Mapping[str, NDArray[np.integer]] = field(default_factory=dict)
    label_seed: int | None = None

    def get_label_stream(self, *names: object) -> torch.Generator:
        """Return the stream from which the active party's defenses draw for a set of its labels."""
        seed = self.seed if self.label_seed is None else self.label_seed
        return make_rng(seed, "labels", *names, device=self.device)

    def begin(self, *part: object) -> None:
        """Start every party's noise for one part of the run."""
        for party in self.all_parties:
            party.begin(*part)

    @contextmanager
    def pause_recording(self) -> Iterator[None]:
        """Use the models without counting or recording messages, and without advancing any party's noise."""
        with ExitStack() as stack:
            stack.enter_context(self.channel.mute())
            for party in self.all_parties:
                stack.enter_context(party.pause_recording())
            yield

    @contextmanager
    def run_hooks(self) -> Iterator[None]:
        """Run the training hooks of all parties' defenses, except those of malicious parties.

        Raises:
            UsageError: a defense does not support its party's models.
        """
        with ExitStack() as stack:
            for name, party in self.parties.items():
                if name not in self.malicious:
                    stack.enter_context(party.run_hooks())
            yield

    @property
    def active(self) -> Party:
        """The party with the labels."""
        return next(iter(self.parties.values()))

    @property
    def passive(self) -> list[Party]:
        """All other parties, in order."""
        return [party for party in self.parties.values() if not party.active]

    @property
    def all_parties(self) -> list[Party]:
        """All parties, and the source if there is one."""
        return [*self.parties.values(), *([self.source] if self.source else [])]

    def n_rows(self, split: str) -> int:
        """Return the number of aligned rows of ``split``."""
        return len(self.active.features[split])
