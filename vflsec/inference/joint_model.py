"""The joint model as the active party knows it: the top model, and the embeddings that it read."""

from __future__ import annotations

from torch import Tensor

from vflsec.core.message import Kind
from vflsec.core.view import View
from vflsec.inference.releases import read_last_values


class JointModel:
    """The top model on own embeddings and on the last that were received; the victim's can be replaced.

    Args:
        view: with ``Need.MODEL``, ``Need.TOP`` and ``Need.EMBEDDINGS``. Its models learn no more.

    Attributes:
        splits: those for which every party's embedding was received.
    """

    def __init__(self, view: View) -> None:
        assert view.top is not None
        assert view.model is not None
        senders = dict.fromkeys(
            m.sender for m in view.messages if m.kind is Kind.EMBEDDING and m.receiver == view.party
        )
        received = {sender: read_last_values(view, Kind.EMBEDDING, sender=sender) for sender in senders}
        self.splits = [split for split in view.features if all(split in by_split for by_split in received.values())]
        self._top, self._victim = view.top.eval().requires_grad_(False), view.victim or ""
        bottom = view.model.eval().requires_grad_(False)
        self._embeddings: dict[str, dict[str, Tensor]] = {
            split: {view.party: bottom(view.features[split]), **{s: received[s][split] for s in senders}}
            for split in self.splits
        }

    def predict(self, split: str, rows: Tensor | slice = slice(None), h: Tensor | None = None) -> Tensor:
        """Return the logits (B, C) of ``rows``; with ``h`` (B, d), as if the victim had sent these embeddings."""
        embeddings = {name: values[rows] for name, values in self._embeddings[split].items()}
        logits: Tensor = self._top(list((embeddings if h is None else embeddings | {self._victim: h}).values()))
        return logits
