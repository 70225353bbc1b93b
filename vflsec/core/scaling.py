"""Scales of columns and of rows that a few wild values cannot move."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vflsec.base.sparse_rows import SparseRows
from vflsec.core.message import Kind, Message
from vflsec.core.view import View
from vflsec.results.metrics import TAIL, WILD, find_scale

FAR = 5.0
"""Scales from the middle beyond which a model reads a value as nearer, in the same order, than it is."""

LONG = 2.0
"""Times the 90 % quantile of the lengths around it, beyond which a gradient is shortened."""

SAMPLED = 10_000
"""Rows, evenly spaced, of which a scale is computed at most."""

BLOCK = 256
"""Gradients in a row whose lengths are compared; they change by orders of magnitude during a training."""

HUGE = 1e30

RELEASED = (Kind.EMBEDDING, Kind.GRADIENT)


class Bounds(NamedTuple):
    """Middle and scale (d,) of each column (``metrics.middle_and_scale``); that of a constant one is infinite."""

    middle: Tensor
    scale: Tensor

    @classmethod
    def from_columns(cls, x: Tensor) -> Bounds:
        """Return the bounds of the columns of ``x`` (n, d), in double precision."""
        if not len(x):
            return cls(x.new_zeros(x.shape[1]).double(), x.new_full((x.shape[1],), torch.inf).double())
        scales = find_scale(x[:: max(1, len(x) // SAMPLED)].detach().cpu().numpy())
        middle, scale = (torch.from_numpy(values).to(x.device) for values in scales)
        return cls(middle, torch.where(scale > 0, scale, torch.inf))

    def clip(self, x: Tensor, far: float = FAR) -> Tensor:
        """Return ``x`` (n, d) with values beyond ``far`` scales within twice that; others keep every bit."""
        middle, limit = self.middle.to(x.dtype), (far * self.scale).to(x.dtype)
        rows = ((x - middle).abs() > limit).any(dim=1)
        if not rows.any():
            return x
        values = x[rows].double()
        z = (values - self.middle) / self.scale
        moved = torch.where(z.abs() > far, self.middle + self.scale * clip_softly(z, far), values)
        return x.clone().masked_scatter_(rows[:, None], moved.to(x.dtype))


def clip_softly(z: Tensor, far: float = FAR) -> Tensor:
    """Return a smooth increasing function of ``z``: z up to ``far`` from zero, and within twice ``far`` beyond."""
    inside = z.clamp(-far, far)
    beyond = (z - inside).clamp(-HUGE, HUGE)
    return inside + far * (beyond / (far + beyond.abs()))


def clip_outliers(x: Tensor, reference: Tensor | None = None, far: float = FAR) -> Tensor:
    """Return ``x`` (n, d) with far values brought near, by the columns of ``reference``; None for its own."""
    reference = x if reference is None else reference
    if not len(x):
        return x
    if isinstance(x, SparseRows) and isinstance(reference, SparseRows):  # a number has its place in every row
        entries = clip_outliers(x.entries, reference.entries, far)
        return x if entries is x.entries else SparseRows(entries, x.places, x.shape[1])
    return Bounds.from_columns(reference).clip(x, far)


def shorten(x: Tensor) -> Tensor:
    """Return rows ``x`` (n, d), of which one that is much longer than those around it is shorter, with its direction.

    Rows of equal direction stay in the order of their lengths.
    """
    length = torch.linalg.vector_norm(x, dim=1, dtype=torch.double)
    number = max(1, len(x) // BLOCK)
    size, longer = divmod(len(x), number)  # the first blocks have a row more, as in torch.tensor_split
    parts = length.tensor_split([longer * (size + 1)])
    usual = torch.cat([_compute_usual_lengths(part, rows) for part, rows in zip(parts, (size + 1, size), strict=True)])
    times = length / usual
    if not (times > LONG).any():
        return x
    factor = torch.where(times > LONG, clip_softly(times, LONG) / times, 1.0)
    return (x.double() * factor[:, None]).to(x.dtype)


def _compute_usual_lengths(length: Tensor, size: int) -> Tensor:
    """Return for each of (n,) lengths the 90 % quantile of its block, at least the median of those above 0."""
    if not len(length):
        return length
    blocks = length.view(-1, size).sort(dim=1).values
    zeros = (blocks == 0).sum(dim=1, keepdim=True)
    median = blocks.gather(1, (zeros + (size - zeros - 1) // 2).clamp_max(size - 1))
    usual = torch.maximum(blocks[:, [int(0.9 * (size - 1))]], median)
    return usual.masked_fill(zeros == size, torch.inf).expand(-1, size).flatten()


def tame(view: View) -> View:
    """Return ``view`` without wild values, if it has any: in columns, predictions, embeddings, gradients and answers.

    A value of a column, a prediction or an embedding is brought within twice ``WILD`` scales of its column, and a
    gradient within twice ``LONG`` times the usual length. All others keep every bit. Auxiliary rows with such a column,
    prediction or embedding, or with an answer beyond 2 ``FAR`` scales, are left out, unless they are more than a few.
    """
    if "tamed" not in view.memo:
        view.memo["tamed"] = _tame_view(view)
    changes, is_wild = view.memo["tamed"]
    changed = view.with_shared_memo(replace(view, **changes))
    left_out = is_wild[view.aux_rows]
    if view.aux_labels.is_floating_point():
        left_out = left_out | _find_moved(clip_outliers(view.aux_labels, far=2 * FAR), view.aux_labels)
    if 0 < int(left_out.sum()) <= max(1, TAIL * len(left_out)) and not left_out.all():
        known = changed.restrict(torch.nonzero(~left_out)[:, 0])
        is_class = view.aux_labels.dim() == 1 and not view.aux_labels.is_floating_point()
        if not is_class or set(known.aux_labels.tolist()) == set(view.aux_labels.tolist()):
            return known
    return changed


def _tame_view(view: View) -> tuple[dict[str, Any], Tensor]:
    """Return the attributes of ``view`` without wild values, and of which rows (n,) of the auxiliary split any was."""
    split, train = view.aux_split, view.features.get(view.aux_split)
    changes: dict[str, Any] = {
        "features": {name: clip_outliers(x, train, WILD) for name, x in view.features.items()},
        "unlabeled": None if view.unlabeled is None else clip_outliers(view.unlabeled, train, WILD),
        "predictions": {name: clip_outliers(z, far=WILD) for name, z in view.predictions.items()},
        "messages": _tame_messages(view.messages),
    }
    is_wild = torch.zeros(0 if train is None else len(train), dtype=torch.bool, device=view.aux_rows.device)
    for name in ("features", "predictions"):
        if split in getattr(view, name):
            is_wild |= _find_moved(changes[name][split], getattr(view, name)[split])
    for after, before in zip(changes["messages"], view.messages, strict=True):
        if after is not before and after.kind is Kind.EMBEDDING and after.split == split and after.rows is not None:
            is_wild[after.rows[_find_moved(after.payload["value"], before.payload["value"])]] = True
    return changes, is_wild


def _find_moved(after: Tensor, before: Tensor) -> Tensor:
    """Return which rows (n,) differ."""
    return (
        torch.zeros(len(after), dtype=torch.bool, device=after.device) if after is before else (after != before).any(1)
    )


def _tame_messages(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return messages, of which those with a wild value are others."""
    routes: dict[tuple[Kind, *tuple[Hashable, ...]], list[int]] = {}
    for number, m in enumerate(messages):
        x = m.payload.get("value")
        if m.kind in RELEASED and isinstance(x, Tensor) and x.dim() == 2 and x.is_floating_point():
            routes.setdefault((m.kind, m.sender, m.receiver, m.phase, x.shape[1], x.dtype), []).append(number)
    result = list(messages)
    for (kind, *_), numbers in routes.items():
        values = torch.cat([messages[k].payload["value"] for k in numbers])
        changed = shorten(values) if kind is Kind.GRADIENT else clip_outliers(values, far=WILD)
        if changed is values:
            continue
        parts = torch.split(changed, [len(messages[k].payload["value"]) for k in numbers])
        for k, part in zip(numbers, parts, strict=True):
            result[k] = replace(messages[k], payload={**messages[k].payload, "value": part})
    return tuple(result)
