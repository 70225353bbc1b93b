"""What a long phase keeps between its global iterations, so that a killed run goes on where it stopped."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from vflsec.core.errors import StoreError
from vflsec.core.message import Channel, Kind, Route


class Checkpoint:
    """Models, optimizers, losses, traffic and releases after each global iteration, in one file, replaced as a whole.

    No state of a random stream is kept: each iteration starts streams of its own, named by its number.

    Args:
        path: of the file; None keeps nothing.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path

    def save(
        self,
        modules: Mapping[str, nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        history: Sequence[float],
        channel: Channel,
    ) -> None:
        """Replace what is kept by the state after ``len(history)`` iterations.

        Raises:
            StoreError: it cannot be written.
        """
        if self.path is None:
            return
        tensors = {f"{name}/{key}": value for name, module in modules.items() for key, value in _state(module).items()}
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
        temporary = self.path.with_name(f"{self.path.name}-{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            save_file(
                {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()},
                temporary,
                metadata={"facts": msgspec.json.encode(facts).decode()},
            )
            temporary.replace(self.path)
        except (OSError, SafetensorError) as error:  # of the disk, and no result of the training
            raise StoreError(f"cannot write {self.path}: {error}; choose another --out") from None

    def restore(
        self, modules: Mapping[str, nn.Module], optimizers: Sequence[torch.optim.Optimizer], channel: Channel
    ) -> list[float]:
        """Put back what is kept, in place; return the losses of the iterations done, none where nothing is kept."""
        if self.path is None or not self.path.is_file():
            return []
        try:
            with safe_open(self.path, "pt") as file:
                facts = msgspec.json.decode(file.metadata()["facts"])
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (not a dict)
        except (SafetensorError, msgspec.DecodeError, KeyError, TypeError):  # damaged: the phase is run from its start
            return []
        for name, module in modules.items():
            module.load_state_dict({key: tensors[f"{name}/{key}"] for key in _state(module)})
        for k, optimizer in enumerate(optimizers):
            states: dict[int, dict[str, Tensor]] = {}
            for key, value in tensors.items():
                if key.startswith(f"optimizer/{k}/"):
                    _, _, index, entry = key.split("/")
                    states.setdefault(int(index), {})[entry] = value
            optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
        for phase, sender, receiver, kind, nbytes in facts["traffic"]:
            channel.traffic[Route(phase, sender, receiver, Kind(kind))] = nbytes
        for k, (phase, sender, receiver, kind, split) in enumerate(facts["heard"]):
            device = next((p.device for module in modules.values() for p in module.parameters()), "cpu")
            channel.counts[Route(phase, sender, receiver, Kind(kind)), split] = tensors[f"heard/{k}"].to(device)
        return list(facts["history"])

    def remove(self) -> None:
        """Drop what is kept."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _state(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.state_dict())
