"""Scales of columns and of rows that a few wild values cannot move."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vflsec.core.message import Kind, Message
from vflsec.core.sparse_rows import SparseRows
from vflsec.core.view import View

FAR = 5.0
"""Scales from the middle beyond which a model reads a value as nearer, in the same order, than it is."""

WILD = 100.0
"""Likewise, for everything that an attack reads: an encoded column and an embedding are within it."""

LONG = 10.0
"""Times the 90 % quantile of the lengths around it, beyond which a gradient is shortened."""

TAIL = 0.05
"""Share of the rows on either side that can hold any value without moving a scale."""

SAMPLED = 10_000
"""Rows, evenly spaced, of which a scale is computed at most."""

BLOCK = 256
"""Gradients in a row whose lengths are compared; they change by orders of magnitude during a training."""

HUGE = 1e30

RELEASED = (Kind.EMBEDDING, Kind.GRADIENT)


class Bounds(NamedTuple):
    """Middle and scale (d,) of each column.

    The scale is that of a normal distribution with the same 5 % and 95 % quantiles, but at least the median distance
    of the values that differ from the median: most rows of a rare category, or of a ReLU, have the same value. A
    constant column has an infinite scale.
    """

    middle: Tensor
    scale: Tensor

    @classmethod
    def of(cls, x: Tensor) -> Bounds:
        """Return the bounds of the columns of ``x`` (n, d), in double precision."""
        x = x[:: max(1, len(x) // SAMPLED)].double()
        n, ordered = len(x), x.sort(dim=0).values
        if not n:
            return cls(x.new_zeros(x.shape[1]), x.new_full((x.shape[1],), torch.inf))
        middle, cut = ordered[(n - 1) // 2], min(-int(-TAIL * n // 1), (n - 1) // 2)
        away = (x - middle).abs().sort(dim=0).values
        equal = (away == 0).sum(dim=0)
        typical = away.gather(0, (equal + (n - equal - 1) // 2).clamp_max(n - 1)[None])[0]
        scale = torch.maximum((ordered[n - 1 - cut] - ordered[cut]) / 3.29, typical)
        return cls(middle, torch.where(scale > 0, scale, torch.inf))

    def near(self, x: Tensor, far: float = FAR) -> Tensor:
        """Return ``x`` (n, d) with values beyond ``far`` scales within twice that; others keep every bit."""
        middle, limit = self.middle.to(x.dtype), (far * self.scale).to(x.dtype)
        rows = ((x - middle).abs() > limit).any(dim=1)
        if not rows.any():
            return x
        values = x[rows].double()
        z = (values - self.middle) / self.scale
        moved = torch.where(z.abs() > far, self.middle + self.scale * bounded(z, far), values)
        return x.clone().masked_scatter_(rows[:, None], moved.to(x.dtype))


def bounded(z: Tensor, far: float = FAR) -> Tensor:
    """Return a smooth increasing function of ``z``: z up to ``far`` from zero, and within twice ``far`` beyond."""
    inside = z.clamp(-far, far)
    beyond = (z - inside).clamp(-HUGE, HUGE)
    return inside + far * (beyond / (far + beyond.abs()))


def near(x: Tensor, reference: Tensor | None = None, far: float = FAR) -> Tensor:
    """Return ``x`` (n, d) with far values brought near, by the columns of ``reference``; None for its own."""
    reference = x if reference is None else reference
    if isinstance(x, SparseRows) and isinstance(reference, SparseRows):  # a number has its place in every row
        return SparseRows(near(x.entries, reference.entries, far), x.places, x.shape[1])
    return Bounds.of(reference).near(x, far)


class Standardize(nn.Module):
    """Brings far values of (B, d) near and gives columns mean 0 and deviation 1; nothing is learned.

    Args:
        reference: (n, d) rows whose columns give scales, mean and deviation. A column that is constant in them becomes
            0.
    """

    middle: Tensor
    scale: Tensor
    mean: Tensor
    deviation: Tensor

    def __init__(self, reference: Tensor) -> None:
        super().__init__()
        middle, scale = Bounds.of(reference)
        z = bounded((reference.double() - middle) / scale)
        deviation = z.std(dim=0, correction=0)
        # rounding errors of a constant are no information
        deviation[(deviation == 0) | (scale <= 1e-12 * middle.abs())] = torch.inf
        scales = {"middle": middle, "scale": scale, "mean": z.mean(dim=0), "deviation": deviation}
        for name, value in scales.items():
            self.register_buffer(name, value.to(reference.dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return the standardized rows (B, d)."""
        return (bounded((x - self.middle) / self.scale) - self.mean) / self.deviation


def standardized(x: Tensor, reference: Tensor | None = None) -> Tensor:
    """Return ``x`` (n, d) in double precision, standardized by the rows of ``reference``; None for its own."""
    found: Tensor = Standardize((x if reference is None else reference).double())(x.double())
    return found


def shortened(x: Tensor, long: float = LONG) -> Tensor:
    """Return rows ``x`` (n, d), of which one that is much longer than those around it is shorter, with its direction.

    Rows of equal direction stay in the order of their lengths.
    """
    length = torch.linalg.vector_norm(x, dim=1, dtype=torch.double)
    usual = torch.cat([_usual(own).expand(len(own)) for own in torch.tensor_split(length, max(1, len(x) // BLOCK))])
    times = length / usual
    if not (times > long).any():
        return x
    factor = torch.where(times > long, bounded(times, long) / times, 1.0)
    return (x.double() * factor[:, None]).to(x.dtype)


def _usual(length: Tensor) -> Tensor:
    """Return the 90 % quantile of lengths (n,), at least the median of those above zero; infinite without any."""
    above = length[length > 0]
    if not len(above):
        return length.new_tensor(torch.inf)
    return torch.maximum(length.sort().values[int(0.9 * (len(length) - 1))], above.median())


def tamed(view: View) -> View:
    """Return ``view`` without wild values, if it has any: in columns, predictions, embeddings and gradients.

    A value of a column, a prediction or an embedding is brought within twice ``WILD`` scales of its column, and a
    gradient within twice ``LONG`` times the usual length. All others keep every bit.
    """
    if "tamed" not in view.memo:
        train = view.features.get(view.aux_split)
        view.memo["tamed"] = {
            "features": {split: near(x, train, WILD) for split, x in view.features.items()},
            "unlabeled": None if view.unlabeled is None else near(view.unlabeled, train, WILD),
            "predictions": {split: near(z, far=WILD) for split, z in view.predictions.items()},
            "messages": _tamed(view.messages),
        }
    answers = near(view.aux_labels, far=WILD) if view.aux_labels.is_floating_point() else view.aux_labels
    return view.with_shared_memo(replace(view, aux_labels=answers, **view.memo["tamed"]))


def _tamed(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return messages, of which those with a wild value are others."""
    routes: dict[tuple[Kind, *tuple[Hashable, ...]], list[int]] = {}
    for number, m in enumerate(messages):
        x = m.payload.get("value")
        if m.kind in RELEASED and isinstance(x, Tensor) and x.dim() == 2 and x.is_floating_point():
            routes.setdefault((m.kind, m.sender, m.receiver, m.phase, x.shape[1], x.dtype), []).append(number)
    found = list(messages)
    for (kind, *_), numbers in routes.items():
        values = torch.cat([messages[k].payload["value"] for k in numbers])
        tame = shortened(values) if kind is Kind.GRADIENT else near(values, far=WILD)
        if tame is values:
            continue
        parts = torch.split(tame, [len(messages[k].payload["value"]) for k in numbers])
        for k, part in zip(numbers, parts, strict=True):
            found[k] = replace(messages[k], payload={**messages[k].payload, "value": part})
    return tuple(found)
