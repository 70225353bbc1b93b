"""The checkpoint of ``vflsec train``: all that an audit needs of a federation besides the data themselves.

Beside the models of each party, the folder has ``training.toml`` (settings and seed), ``rows.json`` (salted hashes of
the ids of each split) and ``encoders.json`` (the fitted encoder of each party).
"""

import hashlib
import math
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import pandas as pd
import torch

from vflsec.audit.foreign import check_classes
from vflsec.audit.transcript import TranscriptFolder, TranscriptWriter
from vflsec.audit.transcript_lines import AUDITOR, Sent, TranscriptHeader
from vflsec.base import files
from vflsec.base.checks import count
from vflsec.base.errors import StoreError, UsageError
from vflsec.base.seeds import derive
from vflsec.core.message import SERVER, Kind, Message, Transcript
from vflsec.core.method import Trained
from vflsec.data.partition import Partition
from vflsec.methods.checkpoint import load_states, save_states
from vflsec.run import spec as specs
from vflsec.run.cell import Cell
from vflsec.run.federation import build_federation, build_method, get_partition
from vflsec.run.plan import build_cell
from vflsec.run.spec import EvalSpec
from vflsec.run.store import CellFacts, CellFolder

SETTINGS, ROWS, ENCODERS = "training.toml", "rows.json", "encoders.json"

KINDS = (Kind.EMBEDDING, Kind.GRADIENT, Kind.NODES)  # the messages that a transcript can hold: one vector for each row
BUFFER = 1 << 24  # bytes of vectors after which a file of the transcript is written


class _Rows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of ``rows.json``: hashes (n,) of the ids of each split, keyed with a salt."""

    salt: str
    splits: dict[str, list[str]]


class Restored(NamedTuple):
    """A federation from a checkpoint.

    Attributes:
        cell: what was trained.
        facts: of the training.
        fingerprint: a hash of the checkpoint.
    """

    cell: Cell
    facts: CellFacts
    fingerprint: str
    folder: Path

    def load_trained(self, draw: int) -> Trained:
        """Return the federation as it was trained, for one draw of auxiliary samples; the first is that of its seed."""
        trained = self.build_untrained(draw)
        load_states(trained.federation, self.folder, complete=True)
        return trained

    def build_untrained(self, draw: int) -> Trained:
        """Return the federation before training."""
        federation, method = build_federation(self.cell, "cpu"), build_method(self.cell)
        method.build(federation)
        if draw:
            federation.seed = derive(self.cell.seed, "audit", "draw", draw)
        return Trained(method, federation, self.facts.history)


def save(folder: Path, trained: Trained, spec: EvalSpec, seed: int) -> None:
    """Write the models of ``trained`` and what describes them into a new folder."""
    save_states(trained.federation, folder)
    data = get_partition(build_cell(spec, spec.methods[0], seed))
    settings = {key: value for key, value in msgspec.to_builtins(spec).items() if key in specs.TRAINING}
    (folder / SETTINGS).write_text(files.dump({"seed": seed, **settings}), encoding="utf-8")
    salt = secrets.token_hex(16)
    rows = _Rows(salt, {split: _hash_ids(ids, salt) for split, ids in data.ids.items()})
    (folder / ROWS).write_bytes(msgspec.json.encode(rows))
    (folder / ENCODERS).write_bytes(msgspec.json.encode(_get_encoders(data)))


def restore(folder: Path, dataset: str | None = None, options: Mapping[str, Any] | None = None) -> Restored:
    """Return the federation in a checkpoint, on the data that it was trained on.

    ``dataset`` and ``options`` name the data if they are elsewhere now.

    Raises:
        StoreError: the checkpoint is damaged.
        UsageError: the data are not those of the training.
    """
    facts = CellFolder(folder).read()
    if not isinstance(facts, CellFacts):
        raise StoreError(f"expected the models of a training in {folder}, found others than its cell.json states")
    try:
        settings = files.parse_toml(files.read(folder / SETTINGS).decode())
        rows = msgspec.json.decode(files.read(folder / ROWS), type=_Rows)
        encoders = msgspec.json.decode(files.read(folder / ENCODERS))
        seed = msgspec.convert(settings.pop("seed", None), Annotated[int, msgspec.Meta(ge=0)])
        salt = bytes.fromhex(rows.salt)
        if len(salt) > hashlib.blake2b.MAX_KEY_SIZE:
            raise ValueError(f"expected a salt of at most {hashlib.blake2b.MAX_KEY_SIZE} bytes in {ROWS}")
        if not isinstance(settings.get("data", {}), dict):
            raise ValueError(f"expected a table [data] in {SETTINGS}")
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise StoreError(f"{folder} is damaged ({error}): train it again") from None
    if dataset is not None:
        settings["dataset"] = dataset
        settings["data"] = {**settings.get("data", {}), **({"options": dict(options)} if options else {})}
    spec = specs.read_training(settings)
    cell = build_cell(spec, spec.methods[0], seed)
    data = get_partition(cell)
    for split, ids in data.ids.items():
        hashes, expected = _hash_ids(ids, rows.salt), rows.splits.get(split, [])
        if hashes != expected:
            other = len(set(hashes) ^ set(expected))
            raise UsageError(
                f"expected the rows of the training in {spec.dataset}, found {count(other, 'other row')} in {split}: "
                f"use the files that it was trained on"
            )
    if not _is_equal_up_to_rounding(encoders, msgspec.json.decode(msgspec.json.encode(_get_encoders(data)))):
        raise UsageError(f"expected the columns of the training in {spec.dataset}, found other values: use its files")
    fingerprint = hashlib.sha256(files.read(folder / "cell.json")).hexdigest()
    return Restored(cell, facts, fingerprint, folder)


class TranscriptTap(Transcript):
    """A tap that writes the embeddings, gradients and nodes of all parties into a transcript.

    Args:
        folder: a new folder.
        spec: of the training.
        seed: of the training.

    Attributes:
        lost: the error after which nothing was recorded, for example of a full disk; None without any.

    Raises:
        UsageError: the method sends neither, or the folder holds something else.
    """

    def __init__(self, folder: Path, spec: EvalSpec, seed: int) -> None:
        cell = build_cell(spec, spec.methods[0], seed)
        sent = frozenset[Kind]().union(*build_method(cell).messages.values())
        if not sent & set(KINDS):
            raise UsageError(
                f"expected a method that sends embeddings, gradients or nodes to record, got {cell.method.name}"
            )
        self.data = get_partition(cell)
        super().__init__(frozenset({*self.data.parties, SERVER}), frozenset(KINDS))
        sides = {name: "active" if name == "active" else "passive" for name in self.data.parties}
        header = TranscriptHeader(
            observer=AUDITOR, parties=sides, classes=len(self.data.classes), software="vflsec train"  # type: ignore[arg-type]
        )  # fmt: skip
        self._writer = TranscriptWriter(folder, header)
        if self._writer.parts:
            raise UsageError(f"expected a new folder for a recording, found a transcript in {folder}: choose another")
        self._pending: list[Sent] = []
        self.lost: StoreError | None = None

    def __call__(self, message: Message) -> None:
        """Write ``message`` if it holds one vector for each row."""
        if self.lost or message.kind not in self.kinds or message.rows is None or message.split not in self.data.ids:
            return
        if message.sender == message.receiver:  # it notes what it knows, and sends nothing
            return
        if set(message.payload) != {"value"} or message.payload["value"].dim() != 2:
            return
        rows = self.data.ids[message.split][message.rows.cpu().numpy()].astype(str)
        values = message.payload["value"].detach().cpu().float().numpy().copy()
        head = (message.kind, message.sender, message.receiver, message.phase, message.split, message.step)
        self._pending.append(Sent(*head, rows, values))
        if sum(sent.values.nbytes for sent in self._pending) >= BUFFER:
            self.close()

    @property
    def empty(self) -> bool:
        """Whether nothing was written."""
        return not self._writer.parts

    def close(self) -> None:
        """Write what is left, or note in ``lost`` why that is impossible: the training goes on."""
        pending, self._pending = self._pending, []
        try:
            self._writer.write(pending)
        except OSError as error:
            folder, cause = self._writer.folder, error.strerror or error
            self.lost = StoreError(f"the recording {folder} is not complete: {cause}; remove it and train again")


def list_messages(restored: Restored, folder: Path, adversary: str) -> Iterator[Message]:
    """Yield the messages that the adversary sent or received in the training of a checkpoint.

    Raises:
        DataError: the transcript is damaged.
        UsageError: it is of another training.
    """
    opened, data = TranscriptFolder(folder), get_partition(restored.cell)
    check_classes(opened.header.classes, data, folder.name)
    models = restored.build_untrained(0).federation.active.modules
    trees = len(models["shape"].owner) if "shape" in models else 0  # type: ignore[arg-type]
    places = {split: pd.Index(ids.astype(str).astype(object)) for split, ids in data.ids.items()}
    names = adversary.split("+")
    for sent in opened.messages():
        if sent.kind == "prediction" or (sent.sender not in names and sent.receiver not in names):
            continue  # a checkpoint makes the predictions itself
        positions = places.get(sent.split, pd.Index([])).get_indexer(sent.rows)
        if (positions < 0).any():
            raise UsageError(f"expected messages of the training of {restored.folder} in {folder}, found other rows")
        kind, values = Kind(sent.kind), torch.tensor(sent.values)
        last = sent.step + values.shape[1] - 1
        if kind is Kind.NODES and last >= trees:
            raise UsageError(
                f"expected messages of the training of {restored.folder} in {folder}, found nodes of tree {last}: it "
                f"has {count(trees, 'tree')}"
            )
        yield Message(
            kind, sent.sender, sent.receiver, sent.step, sent.phase,
            {"value": values.long() if kind is Kind.NODES else values},
            torch.from_numpy(positions), sent.split,
        )  # fmt: skip


def _hash_ids(ids: np.ndarray, salt: str) -> list[str]:
    key = bytes.fromhex(salt)
    return [hashlib.blake2b(str(row).encode(), key=key, digest_size=8).hexdigest() for row in ids]


def _is_equal_up_to_rounding(a: Any, b: Any) -> bool:
    """Whether two decoded JSON values are equal, where another processor may have added numbers in another order."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_is_equal_up_to_rounding(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_is_equal_up_to_rounding, a, b))
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12) if isinstance(a, float) and isinstance(b, float) else a == b


def _get_encoders(data: Partition) -> dict[str, Any]:
    return {name: dict(part.encoder) for name, part in data.parties.items()}
