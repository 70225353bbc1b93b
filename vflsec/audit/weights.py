"""A bottom model of PyTorch: weights as safetensors, and the user's own function that builds the model."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from vflsec.audit.subject import Subject, listed
from vflsec.audit.tables import read_file
from vflsec.base.checks import count
from vflsec.base.errors import DataError, UsageError, VflsecError, plain
from vflsec.run.spec import class_of

OPTIMIZER = ("exp_avg", "momentum", "optimizer", "optim.", "state_step", "max_exp_avg")
"""Parts of the names of an optimizer's state."""


def from_weights(path: Path, party: str, factory: str | None) -> Subject:
    """Return the system with the bottom model of ``party`` in a safetensors file.

    Args:
        path: of the weights.
        party: whose bottom model this is.
        factory: ``path/to/file.py:function``, which returns the model; executed, since the user has named it.

    Raises:
        DataError: a damaged file, or weights of another model.
        UsageError: no factory, or one that returns no module.
    """
    content = read_file(path)
    if factory is None:
        raise UsageError(f"{path} holds weights alone: add --model FILE.py:FUNCTION, which returns the bottom model")
    tensors = _tensors(path, content)
    model = _built(factory)
    expected = dict(model.state_dict())
    lacking = [name for name in expected if name not in tensors]
    if lacking:
        raise DataError(
            f"{path}: expected the tensors of {factory}, found no {listed(lacking)}; it holds "
            f"{listed(map(plain, tensors))}"
        )
    for name, own in expected.items():
        if own.shape != tensors[name].shape:
            shapes = f"expected {name} of shape {tuple(own.shape)} as in {factory}, found {tuple(tensors[name].shape)}"
            raise DataError(f"{path}: {shapes}")
        if not torch.isfinite(tensors[name].float()).all():
            raise DataError(f"{path}: expected finite weights, found others in {name}")
    _check_trained(path, expected, tensors)
    model.load_state_dict({name: tensors[name].to(own.dtype) for name, own in expected.items()})
    weights = sum(tensors[name].numel() for name in expected)
    notes = [f"{path.name} holds {count(len(expected), 'tensor')} of the bottom model, {weights:,} numbers"]
    notes += _surplus(path.name, {name: own for name, own in tensors.items() if name not in expected})
    return Subject(
        name=path.name,
        adversary=party,
        side="active" if party == "active" else "passive",
        fingerprint=hashlib.sha256(content + Path(factory.rpartition(":")[0]).read_bytes()).hexdigest(),
        model=model.eval(),
        notes=notes,
    )


def _tensors(path: Path, content: bytes) -> dict[str, Tensor]:
    try:
        return load(content)
    except (
        SafetensorError,
        ValueError,
        KeyError,
        TypeError,
        OverflowError,
        json.JSONDecodeError,
        MemoryError,
    ) as error:
        raise DataError(f"{path}: cannot be read as safetensors: {plain(str(error))[:200]}") from None


@contextmanager
def without_exit() -> Iterator[None]:
    """Let ``os._exit`` raise SystemExit, so that the user's code cannot end the process as if a gate held."""

    def leave(status: int) -> NoReturn:
        raise SystemExit(f"os._exit({status})")

    original = os._exit
    os._exit = leave
    try:
        yield
    finally:
        os._exit = original


def _built(factory: str) -> nn.Module:
    if ".py:" not in factory:
        raise UsageError(f"expected --model FILE.py:FUNCTION, got {factory!r}")
    try:
        with redirect_stdout(sys.stderr), without_exit():  # results alone go to stdout
            model: Any = class_of("models", factory)()
    except (VflsecError, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001  (the user's own code, which may also exit)
        raise UsageError(f"{factory} failed: {type(error).__name__}: {plain(str(error))[:200]}") from None
    if not isinstance(model, nn.Module):
        raise UsageError(f"expected {factory} to return a torch.nn.Module, got {type(model).__name__}")
    return model


def _check_trained(path: Path, expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Raise DataError if weights are zero, or of another type than floating point."""
    floats = [name for name, own in expected.items() if own.is_floating_point()]
    others = [name for name in floats if not tensors[name].is_floating_point()]
    if others:
        found = f"{plain(others[0])} of type {str(tensors[others[0]].dtype).removeprefix('torch.')}"
        raise DataError(f"{path}: expected weights as floating point numbers, found {found}: save the trained model")
    if floats and not any(bool(tensors[name].any()) for name in floats):
        raise DataError(f"{path}: expected trained weights, found zeros only: save the trained model")


def _surplus(name: str, tensors: Mapping[str, Tensor]) -> list[str]:
    """Return notes on tensors that a file of the bottom model should not hold."""
    states = [one for one in tensors if any(part in one.lower() for part in OPTIMIZER)]
    others = [f"{one} {tuple(own.shape)}" for one, own in tensors.items() if one not in states]
    notes = []
    if states:
        notes.append(
            f"{name} also holds the state of an optimizer, {listed(map(plain, states))}: it reveals the last "
            f"gradients; not read"
        )
    if others:
        notes.append(
            f"{name} also holds tensors that are not of the bottom model, {listed(map(plain, others))}: a head, or a "
            f"model of another party, should not be in it; not read"
        )
    return notes
