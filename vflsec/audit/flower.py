"""Mods for Flower apps: one records the messages of a client as a transcript, one defends what it sends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from vflsec.audit.defending import CutLayerDefense
from vflsec.audit.recorder import Recorder
from vflsec.base.errors import UsageError, clean

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, Context, Message
else:
    ArrayRecord = Context = Message = Any

Call: TypeAlias = "Callable[[Message, Context], Message]"

# the record of ``context.state`` that counts messages, since each may be handled by a process of its own
STEPS = "vflsec.steps"


class RecorderMod:
    """Records the embeddings that a client sends and the gradients that it gets back.

    The client is a passive party, and the ``ServerApp`` is the active party::

        def about(message, context):
            return {"rows": ids_of_the_batch(message)}

        app = ClientApp(mods=[RecorderMod(parties={"bank": "active", "bureau": "passive"}, about=about)])

    Each node names its party and an absolute folder: ``--node-config 'party="bureau" transcripts="/srv/transcripts"'``.

    Flower calls mods from the first to the last: put this one before those that change messages. Each message becomes a
    file of the transcript before the client answers.

    Args:
        parties: ``active``, ``passive`` or ``server`` by the name of the party.
        about: returns ``rows``, the ids of the rows of a message, and optionally ``split`` and ``phase``, as for
            ``Recorder``. It is called with the message that brings a gradient, and with the reply that has an
            embedding.
        party: the client's name; by default ``party`` in the configuration of its node, or the only passive party.
        folder: for one transcript per party, that of ``bureau`` in ``folder/bureau``; by default ``transcripts`` in the
            configuration of the node.
        embedding: the name of the ``ArrayRecord`` with the embedding, which holds one array (B, d).
        gradient: the name of the ``ArrayRecord`` with the gradient.
        classes: number of classes of the task, if it is known.
    """

    def __init__(
        self,
        *,
        parties: Mapping[str, Any],
        about: Callable[[Message, Context], Mapping[str, Any]],
        party: str | None = None,
        folder: Path | str | None = None,
        embedding: str = "embedding",
        gradient: str = "gradient",
        classes: int | None = None,
    ) -> None:
        self.parties, self.about, self.party, self.folder = dict(parties), about, party, folder
        self.embedding, self.gradient, self.classes = embedding, gradient, classes

    def __call__(self, message: Message, context: Context, call_next: Call) -> Message:
        """Return the reply of ``call_next`` unchanged.

        Raises:
            UsageError: the party is unknown, or a message has no such array or not one id for each row.
            OSError: the transcript cannot be written.
        """
        if self.gradient in message.content.array_records:
            self._record("gradient", _read_array(message, self.gradient), message, context)
        reply = call_next(message, context)
        if reply.has_content() and self.embedding in reply.content.array_records:
            self._record("embedding", _read_array(reply, self.embedding), reply, context)
        return reply

    def _record(self, kind: str, value: Tensor, message: Message, context: Context) -> None:
        from flwr.app import ConfigRecord

        about, party = dict(self.about(message, context)), self._party(context)
        resume = STEPS in context.state.config_records  # or the folder has the messages of another run
        steps = context.state.config_records.setdefault(STEPS, ConfigRecord())
        key = f"{party} {about.get('phase') or about.get('split', 'train')}"
        last = steps.get(key)
        folder = self._get_folder(context) / party
        with Recorder(folder, parties=self.parties, observer=party, classes=self.classes, resume=resume) as recorder:
            if kind == "gradient":
                recorder.gradient(value, party=party, step=last, **about)
            else:
                step = None if last is None else last + 1
                steps[key] = recorder.embedding(value, party=party, step=step, **about)

    def _party(self, context: Context) -> str:
        passive = [name for name, side in self.parties.items() if side == "passive"]
        party = self.party or context.node_config.get("party") or (passive[0] if len(passive) == 1 else None)
        if party not in passive:
            given = "none" if party is None else repr(clean(str(party)))
            raise UsageError(
                f"expected the name of a passive party, one of {', '.join(passive)}, found {given}: start the node "
                f"with --node-config 'party=\"{passive[0] if passive else 'NAME'}\"'"
            )
        return party

    def _get_folder(self, context: Context) -> Path:
        folder = self.folder or context.node_config.get("transcripts")
        if not folder:
            raise UsageError(
                "expected a folder for transcripts, found none: start the node with --node-config "
                "'transcripts=\"/absolute/folder\"', or give RecorderMod folder="
            )
        return Path(str(folder))


class DefenseMod:
    """Applies defenses to the embeddings that a client sends.

    ::

        app = ClientApp(mods=[recorder, DefenseMod(vflsec.defend("iso:lambda=5"))])

    Defenses of gradients act at the ``ServerApp``, by ``CutLayerDefense.active``.

    Args:
        defense: of ``vflsec.defend``.
        embedding: the name of the ``ArrayRecord`` with the embedding, which holds one array (B, d).
    """

    def __init__(self, defense: CutLayerDefense, *, embedding: str = "embedding") -> None:
        self.defense, self.embedding = defense, embedding

    def __call__(self, message: Message, context: Context, call_next: Call) -> Message:
        """Return the reply of ``call_next`` with a defended embedding.

        Raises:
            UsageError: the embedding is not one array of floating-point numbers.
        """
        reply = call_next(message, context)
        if reply.has_content() and self.embedding in reply.content.array_records:
            from flwr.app import Array

            record = reply.content.array_records[self.embedding]
            value = _read_array(reply, self.embedding)
            (key,) = record
            record[key] = Array(np.ascontiguousarray(self.defense.passive(value).numpy()))
        return reply


def _read_array(message: Message, name: str) -> Tensor:
    """Return the only array of a record as a tensor.

    Raises:
        UsageError: another number of arrays, or other values than floating-point numbers.
    """
    record: ArrayRecord = message.content.array_records[name]
    arrays = [array.numpy() for array in record.values()]
    if len(arrays) != 1 or not np.issubdtype(arrays[0].dtype, np.floating):
        kinds = ", ".join(f"{array.dtype} {array.shape}" for array in arrays) or "nothing"
        raise UsageError(f"expected one array of floating-point numbers (B, d) in {name!r}, found {kinds}")
    return torch.from_numpy(arrays[0].copy())
