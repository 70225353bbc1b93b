"""What attacks that hijack a training share, and what a victim can notice: gradients that no honest party sends."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from vflsec.core.knowledge import Knowledge
from vflsec.core.message import AFTERWARDS, Kind, Message
from vflsec.core.method import Trained
from vflsec.core.view import View
from vflsec.nn.top import Top
from vflsec.results.metrics import ALARM, QUIET, UNSEEN

SENT = Knowledge(
    "sent gradients",
    "choose a method whose last phase is split learning in clear, such as fedsplitnn",
    frozenset({Kind.GRADIENT}),
    sent=True,
)

EXCESS = 1e-6
"""The share of the squared length of a batch's gradients that rounding can put outside their subspace."""

FAINT = 1e-3
"""Gradients shorter than this part of the longest so far may be rounding: p - y is near 0 for a row that is fit."""


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


def find_alarm(gradients: Sequence[Tensor], rows: Sequence[Tensor], rank: int) -> tuple[int | None, int]:
    """Return the number of the first batch, from 1, in which the victim notices the adversary, or None.

    The second number counts the batches before it of which most gradients were long enough to be examined.

    Under a linear head W the gradient of row i is W'(p_i - y_i). The C entries of p_i - y_i add up to zero, so that the
    gradients of a batch have a rank of at most C - 1. With two classes they lie on one line, and a row's place on it
    keeps its sign for the whole training, since p - y does, up to a sign of all rows of the batch. Both are exact, for
    any optimizer and rate. A rank of at least the gradients' width shows nothing, and neither do lengths.

    Like the gradient scrutinizer of Fu et al., NDSS 2023, this compares the geometry of gradients with that of an
    honest training; their victim knows the labels, which a passive party does not.

    Args:
        gradients: (B, d) of each batch, as they were received; those that are not finite raise an alarm.
        rows: (B,) their positions.
        rank: C - 1.
    """
    size = 1 + max((int(positions.max()) for positions in rows if len(positions)), default=0)
    batch, signs, longest = torch.full((size,), -1), torch.zeros(size, dtype=torch.double), 0.0
    examined = 0
    parents: dict[int, tuple[int, float]] = {}  # of a batch: an earlier one with shared rows, and the relative sign
    for number, (received, positions) in enumerate(zip(gradients, rows, strict=True), start=1):
        g = received.double().cpu()
        lengths = torch.linalg.vector_norm(g, dim=1)
        if not lengths.isfinite().all():
            return number, examined
        longest = max([longest, *lengths.tolist()])
        g, at = g[lengths > FAINT * longest], positions.cpu()[lengths > FAINT * longest]
        if not len(g):
            continue
        _, spread, axes = torch.linalg.svd(g, full_matrices=False)
        if spread[rank:].square().sum() > EXCESS * spread.square().sum():
            return number, examined
        if rank == 1:
            now = (g @ axes[0]).sign()
            known = batch[at] >= 0
            earlier, place = torch.unique(batch[at[known]], return_inverse=True)
            roots = [_find_root(parents, k) for k in earlier.tolist()]
            relative = now[known] * signs[at[known]] * torch.tensor([sign for _, sign in roots]).double()[place]
            root = torch.tensor([k for k, _ in roots])[place]
            flips = {k: relative[root == k] for k in {k for k, _ in roots}}
            if any((flip != flip[0]).any() for flip in flips.values()):
                return number, examined
            first = next(iter(flips), number)
            parents |= {k: (first, float(flip[0] * flips[first][0])) for k, flip in flips.items() if k != first}
            parents |= {number: (first, float(flips[first][0]))} if flips else {}
            batch[at], signs[at] = number, now
        examined += 2 * len(g) > len(received)
    return None, examined


def _find_root(parents: Mapping[int, tuple[int, float]], batch: int) -> tuple[int, float]:
    """Return the batch to whose signs those of ``batch`` are known, and what they are multiplied by."""
    sign = 1.0
    while batch in parents:
        batch, relative = parents[batch]
        sign *= relative
    return batch, sign


def describe_alarm(view: View, victim: str | None) -> dict[str, float]:
    """Return after how many batches the victim notices what the adversary sent, or in how many it sees nothing.

    Where most gradients of a batch are far shorter than the longest before, it cannot tell.
    """
    sent = [m for m in view.messages if _is_gradient(m, victim)]
    if EXPECTED.name not in view.further or not sent:
        return {}
    rows = [m.rows for m in sent if m.rows is not None]
    alarm, examined = find_alarm([m.payload["value"] for m in sent], rows, view.further[EXPECTED.name])
    if alarm:
        return {ALARM: float(alarm)}
    unseen = {UNSEEN: float(len(sent) - examined)} if examined < len(sent) else {}
    return {QUIET: float(examined), **unseen}


def _is_gradient(m: Message, victim: str | None) -> bool:
    is_sent = m.kind is Kind.GRADIENT and m.receiver == victim and m.rows is not None
    return is_sent and m.split == "train" and m.phase not in AFTERWARDS


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Take a step down ``loss``."""
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def build_network(*widths: int) -> nn.Sequential:
    """Return linear layers of these widths, with leaky rectifiers between them."""
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.LeakyReLU(0.2))]
    return nn.Sequential(*layers[:-1])
