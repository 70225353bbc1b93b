"""What attacks that hijack a training share, and what a victim can notice: gradients that no honest party sends."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from vflsec.core.knowledge import Knowledge
from vflsec.core.message import AFTERWARDS, Kind, Message
from vflsec.core.method import Trained
from vflsec.core.view import View
from vflsec.nn.top import Top

SENT = Knowledge(
    "sent gradients",
    "choose a method whose last phase is split learning in clear, such as fedsplitnn",
    frozenset({Kind.GRADIENT}),
    sent=True,
)

EXCESS = 1e-6
"""The share of the squared length of a batch's gradients that rounding can put outside their subspace."""

FAINT = 1e-3
"""Gradients whose length is a smaller part of the longest in their batch have no sure sign."""


def read_rank(trained: Trained, _: Sequence[str]) -> int | None:
    """Return the rank of an honest batch of gradients, C - 1, or None if no rank is certain.

    It is certain under a linear head, whatever its weights, if the active party has no defense.
    """
    active = trained.federation.active
    top = dict(active.modules.items()).get("top")
    linear = isinstance(top, Top) and isinstance(top.head, nn.Linear) and top.aggregation != "max"
    return trained.federation.n_classes - 1 if linear and not tuple(active.defenses) else None


EXPECTED = Knowledge(
    "the rank of honest gradients",
    "evaluate the job with vflsec eval, with model.head=linear and no defense of the active party",
    read=read_rank,
    sides=("active",),
    at_end=True,
)


def find_alarm(gradients: Sequence[Tensor], rows: Sequence[Tensor], rank: int) -> int | None:
    """Return the number of the first batch, from 1, in which the victim notices the adversary, or None.

    Under a linear head W the gradient of row i is W'(p_i - y_i). The C entries of p_i - y_i add up to zero, so that the
    gradients of a batch have a rank of at most C - 1. With two classes they lie on one line, and a row's place on it
    keeps its sign for the whole training, since p - y does, up to a sign of all rows of the batch. An honest training
    therefore raises no alarm but by rounding. A rank of at least the gradients' width shows nothing.

    Like the gradient scrutinizer of Fu et al., NDSS 2023, this compares the geometry of gradients with that of an
    honest training; their victim knows the labels, which a passive party does not.

    Args:
        gradients: (B, d) of each batch, as they were received.
        rows: (B,) their positions.
        rank: C - 1.
    """
    n_rows = 1 + max((int(positions.max()) for positions in rows), default=0)
    group, signs = torch.full((n_rows,), -1), torch.zeros(n_rows, dtype=torch.double)
    for number, (g, positions) in enumerate(zip(gradients, rows, strict=True), start=1):
        _, lengths, axes = torch.linalg.svd(g.double().cpu(), full_matrices=False)
        energy = lengths.square()
        if energy[rank:].sum() > EXCESS * energy.sum():
            return number
        if rank > 1:
            continue
        place = g.double().cpu() @ axes[0]
        sure = place.abs() > FAINT * place.abs().max()
        now, at = place[sure].sign(), positions.cpu()[sure]
        for earlier in torch.unique(group[at[group[at] >= 0]]):  # rows whose signs are known of each other
            agreement = (signs[at] * now)[group[at] == earlier]
            if not (agreement == agreement[0]).all():
                return number
            signs[group == earlier] *= agreement[0]
            group[group == earlier] = number
        signs[at], group[at] = now, number
    return None


def describe_alarm(view: View, victim: str | None) -> dict[str, float]:
    """Return after how many batches the victim notices what the adversary sent, or how many it received unalarmed."""
    if EXPECTED.name not in view.further:
        return {}
    sent = [m for m in view.messages if _is_gradient(m, victim)]
    rows = [m.rows for m in sent if m.rows is not None]
    alarm = find_alarm([m.payload["value"] for m in sent], rows, view.further[EXPECTED.name])
    return {"batches to an alarm": alarm} if alarm else {"batches without an alarm": len(sent)}


def _is_gradient(m: Message, victim: str | None) -> bool:
    return m.kind is Kind.GRADIENT and m.receiver == victim and m.split == "train" and m.phase not in AFTERWARDS


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Take a step down ``loss``."""
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def build_network(*widths: int) -> nn.Sequential:
    """Return linear layers of these widths, with leaky rectifiers between them."""
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.LeakyReLU(0.2))]
    return nn.Sequential(*layers[:-1])
