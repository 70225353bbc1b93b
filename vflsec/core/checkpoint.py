"""The state of a phase between its epochs, in a file, so that an interrupted phase goes on where it stopped."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from vflsec.core import files
from vflsec.core.errors import StoreError
from vflsec.core.message import Channel, Kind, Route

_LOG = logging.getLogger(__name__)


class Stateful(Protocol):
    """What a checkpoint keeps: a module, or anything else with a state of named tensors."""

    def state_dict(self) -> Mapping[str, Tensor]:
        """Return the state."""

    def load_state_dict(self, state: Mapping[str, Tensor], /) -> object:
        """Go back to a state that ``state_dict`` returned."""


class Checkpoint:
    """Models, optimizers, losses, traffic and releases after an epoch, in one file with a checksum.

    The file is written under another name first, and then takes the place of the last one: a kill leaves one of them.

    Args:
        path: of the file; None keeps nothing.
        every: seconds between two writes, at least; what is written does not depend on it.
    """

    def __init__(self, path: Path | None = None, *, every: float = 0.0) -> None:
        self.path = path
        self.every = every
        self._written = time.monotonic()

    def save(
        self,
        kept: Mapping[str, Stateful],
        optimizers: Sequence[torch.optim.Optimizer],
        history: Sequence[float],
        channel: Channel,
    ) -> None:
        """Replace what is stored by the state after ``len(history)`` epochs.

        Raises:
            StoreError: it cannot be written.
        """
        if self.path is None or time.monotonic() - self._written < self.every:
            return
        tensors = {f"{name}/{key}": value for name, one in kept.items() for key, value in one.state_dict().items()}
        for k, optimizer in enumerate(optimizers):
            for index, entries in optimizer.state_dict()["state"].items():
                found = {key: value for key, value in entries.items() if isinstance(value, Tensor)}
                tensors |= {f"optimizer/{k}/{index}/{key}": value for key, value in found.items()}
        tensors |= {f"heard/{k}": counts for k, counts in enumerate(channel.counts.values())}
        facts = {
            "history": list(history),
            "traffic": [[*route, nbytes] for route, nbytes in channel.traffic.items()],
            "heard": [[*route, split] for route, split in channel.counts],
        }
        tensors["facts"] = torch.from_numpy(np.frombuffer(msgspec.json.encode(facts), dtype=np.uint8).copy())
        content = save({key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()})
        temporary = self.path.with_name(f"{self.path.name}-{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            files.discard(temporary)
            files.create(temporary, files.seal(content))
            temporary.replace(self.path)
        except OSError as error:  # of the disk, and no result of the training
            raise StoreError(f"cannot write {self.path}: {error}; choose another --out") from None
        self._written = time.monotonic()

    def restore(
        self, kept: Mapping[str, Stateful], optimizers: Sequence[torch.optim.Optimizer], channel: Channel
    ) -> list[float]:
        """Load what is stored, in place; return the losses of the epochs done, none where nothing is stored.

        A damaged file is ignored, and a line is logged.
        """
        if self.path is None or not self.path.is_file():
            return []
        try:
            tensors = load(files.unseal(self.path.read_bytes()))
            facts = msgspec.json.decode(tensors["facts"].numpy().tobytes())
        except (OSError, ValueError, SafetensorError, msgspec.DecodeError, KeyError) as error:
            _LOG.warning("%s is damaged (%s): training starts again", self.path, error)
            return []
        for name, one in kept.items():
            start = f"{name}/"
            one.load_state_dict({key.removeprefix(start): v for key, v in tensors.items() if key.startswith(start)})
        for k, optimizer in enumerate(optimizers):
            states: dict[int, dict[str, Tensor]] = {}
            for key, value in tensors.items():
                if key.startswith(f"optimizer/{k}/"):
                    _, _, index, entry = key.split("/")
                    states.setdefault(int(index), {})[entry] = value
            optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
        for phase, sender, receiver, kind, nbytes in facts["traffic"]:
            channel.traffic[Route(phase, sender, receiver, Kind(kind))] = nbytes
        device = next((p.device for one in optimizers for group in one.param_groups for p in group["params"]), "cpu")
        for k, (phase, sender, receiver, kind, split) in enumerate(facts["heard"]):
            channel.counts[Route(phase, sender, receiver, Kind(kind)), split] = tensors[f"heard/{k}"].to(device)
        return list(facts["history"])

    def remove(self) -> None:
        """Remove the file."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
