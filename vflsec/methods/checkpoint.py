"""Stored models, and checkpoints: tensors and facts about them in one sealed file, replaced as a whole.

A phase keeps one between its epochs, and a party of a two-company run one after each batch. A killed run resumes
from the last one.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors import numpy as numpy_format
from safetensors import torch as torch_format
from torch import Tensor, nn

from vflsec.base import files
from vflsec.base.errors import StoreError
from vflsec.base.files import replace, seal, unseal
from vflsec.core.federation import Checkpoint, Federation
from vflsec.core.message import Channel, Kind, Route
from vflsec.core.party import Party

_LOG = logging.getLogger(__name__)

F = TypeVar("F")
State = dict[str, np.ndarray]


class _File(msgspec.Struct, frozen=True):
    """The content of a checkpoint: facts in msgpack, tensors as safetensors."""

    facts: msgspec.Raw
    tensors: bytes


def write(path: Path, facts: object, tensors: Mapping[str, np.ndarray]) -> None:
    """Replace the checkpoint ``path``.

    Raises:
        OSError: it cannot be written.
    """
    content = numpy_format.save({key: np.asarray(value, order="C") for key, value in tensors.items()})
    replace(path, seal(msgspec.msgpack.encode(_File(msgspec.Raw(msgspec.msgpack.encode(facts)), content))))


def read(path: Path, kind: type[F]) -> tuple[F, State]:
    """Return the facts, as a ``kind``, and the tensors of a checkpoint.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged, or no checkpoint.
    """
    file = msgspec.msgpack.decode(unseal(path.read_bytes()), type=_File)
    try:
        return msgspec.msgpack.decode(file.facts, type=kind), numpy_format.load(file.tensors)
    except SafetensorError as error:
        raise ValueError(f"damaged tensors: {error}") from None


def copy_state(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> State:
    """Return copies of a model's tensors and of its optimizer's."""
    tensors = {f"model/{key}": value for key, value in model.state_dict().items()}
    return _to_numpy(tensors | (_copy_optimizer(optimizer, "optimizer") if optimizer else {}))


def load_model_state(
    state: Mapping[str, np.ndarray], model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Put back what ``copy_state`` returned."""
    model.load_state_dict(_to_tensors(select_entries("model", state)))
    if optimizer:
        _load_optimizer(optimizer, select_entries("optimizer", state))


def select_entries(stem: str, state: Mapping[str, np.ndarray]) -> State:
    """Return the entries whose names start with ``stem/``, without that."""
    return {key.removeprefix(f"{stem}/"): value for key, value in state.items() if key.startswith(f"{stem}/")}


def prefix_entries(stem: str, state: Mapping[str, np.ndarray]) -> State:
    """Return the entries with ``stem/`` before their names."""
    return {f"{stem}/{key}": value for key, value in state.items()}


class Stateful(Protocol):
    """What a checkpoint keeps: a module, or anything else with a state of named tensors."""

    def state_dict(self) -> Mapping[str, Tensor]:
        """Return the state."""

    def load_state_dict(self, state: Mapping[str, Tensor], /) -> object:
        """Go back to a state that ``state_dict`` returned."""


def save(
    path: Path,
    kept: Mapping[str, Stateful],
    optimizers: Sequence[torch.optim.Optimizer],
    history: Sequence[float],
    channel: Channel,
) -> None:
    """Replace the checkpoint of a phase by the state after ``len(history)`` epochs, with traffic and releases.

    Raises:
        StoreError: it cannot be written.
    """
    tensors: dict[str, Tensor] = {f"heard/{k}": counts for k, counts in enumerate(channel.counts.values())}
    for name, stateful in kept.items():
        tensors |= {f"{name}/{key}": value for key, value in stateful.state_dict().items()}
    for k, optimizer in enumerate(optimizers):
        tensors |= _copy_optimizer(optimizer, f"optimizer/{k}")
    facts = {
        "history": list(history),
        "traffic": [[*route, nbytes] for route, nbytes in channel.traffic.items()],
        "heard": [[*route, split] for route, split in channel.counts],
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, facts, _to_numpy(tensors))
    except OSError as error:  # of the disk, and no result of the training
        raise StoreError(f"cannot write {path}: {error}; choose another --out") from None


def restore(
    checkpoint: Checkpoint,
    kept: Mapping[str, Stateful],
    optimizers: Sequence[torch.optim.Optimizer],
    channel: Channel,
) -> list[float]:
    """Load what ``save`` has stored, in place; return the losses of the epochs done, none where nothing is stored.

    A damaged file is ignored, and a line is logged.
    """
    if checkpoint.path is None or not checkpoint.path.is_file():
        return []
    try:
        facts, state = read(checkpoint.path, dict[str, Any])
    except (OSError, ValueError) as error:
        _LOG.warning("%s is damaged (%s): training starts again", checkpoint.path, error)
        return []
    if checkpoint.most is not None and len(facts["history"]) > checkpoint.most:
        return []
    for name, stateful in kept.items():
        stateful.load_state_dict(_to_tensors(select_entries(name, state)))
    for k, optimizer in enumerate(optimizers):
        _load_optimizer(optimizer, select_entries(f"optimizer/{k}", state))
    for phase, sender, receiver, kind, nbytes in facts["traffic"]:
        channel.traffic[Route(phase, sender, receiver, Kind(kind))] = nbytes
    device = next(
        (p.device for stateful in optimizers for group in stateful.param_groups for p in group["params"]), "cpu"
    )
    for k, (phase, sender, receiver, kind, split) in enumerate(facts["heard"]):
        counts = torch.from_numpy(state[f"heard/{k}"]).to(device)
        channel.counts[Route(phase, sender, receiver, Kind(kind)), split] = counts
    return list(facts["history"])


def _copy_optimizer(optimizer: torch.optim.Optimizer, stem: str) -> dict[str, Tensor]:
    return {
        f"{stem}/{index}/{key}": value
        for index, entries in optimizer.state_dict()["state"].items()
        for key, value in entries.items()
        if isinstance(value, Tensor)
    }


def _load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, np.ndarray]) -> None:
    entries: dict[int, dict[str, Tensor]] = {}
    for key, value in _to_tensors(state).items():
        index, _, name = key.partition("/")
        entries.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": entries, "param_groups": optimizer.state_dict()["param_groups"]})


def _to_numpy(tensors: Mapping[str, Tensor]) -> State:
    return {key: value.detach().cpu().numpy().copy() for key, value in tensors.items()}


def _to_tensors(state: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    return {key: torch.from_numpy(value.copy()) for key, value in state.items()}


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
        torch_format.save_file(
            state, folder / f"{party.name}.safetensors", metadata={"format": "vflsec", "party": party.name}
        )


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
            stored = torch_format.load(files.read(path))
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
