"""A federation: the parties, the channel between them and their task; reads and writes its models."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from vflsec.base import files
from vflsec.base.errors import StoreError
from vflsec.base.seeds import make_rng
from vflsec.core.attack import Attack
from vflsec.core.checkpoint import Checkpoint
from vflsec.core.message import Channel
from vflsec.core.party import Party

if TYPE_CHECKING:
    from vflsec.results.canaries import Canaries


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
        checkpoint: the state from which a killed phase resumes.
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
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
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


def save_states(federation: Federation, folder: Path, roles: Collection[str] | None = None) -> None:
    """Write each party's models, or those in the given roles, to ``folder/<party>.safetensors``."""
    folder.mkdir(parents=True, exist_ok=True)
    for party in federation.all_parties:
        kept = {role: module for role, module in party.modules.items() if roles is None or role in roles}
        state = {
            f"{role}.{key}": value.detach().cpu().contiguous().clone()
            for role, module in kept.items()
            for key, value in module.state_dict().items()
        }
        save_file(state, folder / f"{party.name}.safetensors", metadata={"format": "vflsec", "party": party.name})


def load_states(federation: Federation, folder: Path, *, complete: bool = False) -> None:
    """Load what ``save_states`` wrote into each party's models, already built; other roles stay as they are.

    Args:
        federation: with models of the same shapes.
        folder: of the files.
        complete: whether they must hold every role of every party, and nothing else.

    Raises:
        StoreError: a file is damaged, or its values do not fit the models.
    """
    for party in federation.all_parties:
        path = folder / f"{party.name}.safetensors"
        try:
            stored = load(files.read(path))
            if complete:
                _expect_types(stored, party)
            for role, module in party.modules.items():
                start = f"{role}."
                state = {key.removeprefix(start): value for key, value in stored.items() if key.startswith(start)}
                if state:
                    module.load_state_dict(state)
        except (OSError, RuntimeError, ValueError, SafetensorError) as error:
            raise StoreError(f"{path} is damaged ({' '.join(str(error).split())[:200]}): train it again") from None


def _expect_types(stored: Mapping[str, Tensor], party: Party) -> None:
    """Raise ValueError unless ``stored`` has the names and types of a party's models."""
    states = {f"{role}.{key}": x for role, module in party.modules.items() for key, x in module.state_dict().items()}
    if stored.keys() != states.keys():
        odd = sorted(stored.keys() ^ states.keys())[0]
        raise ValueError(f"expected {'no ' * (odd in stored)}{odd}")
    for name, x in states.items():
        if stored[name].dtype != x.dtype:
            raise ValueError(f"expected {name} as {x.dtype}, found {stored[name].dtype}")
