"""Gradient averaging: rows leave as the mean of a group that was drawn without looking at labels."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from vflsec.core.defense import Defense, Release
from vflsec.core.errors import UsageError
from vflsec.core.message import Kind


class GroupAverage(Defense):
    """Every row leaves as the mean of its group: a batch (B, d) is split at random into groups of k rows or more.

    With k = strength + 1 there are max(1, floor(B / k)) groups, whose sizes differ by one at most, drawn afresh at each
    release; a row i of group G leaves as sum_{j in G} g_j / |G|. The sum over the batch stays what it is, so that the
    passive party's bias learns as before, and the rest of its model learns less.

    Source: class-blind averaging as a k-anonymous release (microaggregation, Domingo-Ferrer and Mateo-Sanz 2002), with
    random groups instead of similar ones: similar rows share a label, which averaging them would confirm.

    From the passive party it hides which row of a group has which gradient; a group's mean still tells its mix of
    classes. Costs one draw and two sums over the batch. Fails over epochs: the group is drawn anew, so that the mean of
    T releases of a row holds 1/k of its own gradient and 1/sqrt(T) of the others' spread, and ``averaging`` comes back
    with enough epochs. A batch of a single row leaves as it is, and one class in the batch stays one class.

    Guarantee: none, empirical only.

    | case | result |
    |---|---|
    | strength 0 | the release itself, bit for bit |
    | fewer than 2·k rows | the mean of the batch, in every row |
    | one row | that row |
    | empty batch | the empty batch |

    Args:
        strength: how many other rows are in a group at least, k - 1; a whole number.
        at: the kinds of release to act on.

    Raises:
        UsageError: a strength that is not whole.
    """

    name = "average"
    strengths = (1.0, 3.0, 7.0)
    points = (Kind.GRADIENT,)
    reference = "Domingo-Ferrer and Mateo-Sanz 2002 (microaggregation), IEEE TKDE 14(1), with random groups"
    guarantee = "none, empirical only"

    def __init__(self, strength: float, *, at: Iterable[str] | None = None) -> None:
        super().__init__(strength, at=at)
        if self.strength % 1:
            raise UsageError(f"expected a whole number of other rows as strength, got {strength}")

    def on_gradient(self, g: Tensor, release: Release) -> Tensor:
        """Return the gradients (B, d) averaged in groups."""
        rows = len(g)
        groups = max(1, rows // (int(self.strength) + 1))
        group = torch.randperm(rows, generator=release.rng, device=g.device) % groups
        sums = g.new_zeros(groups, g.shape[1]).index_add_(0, group, g)
        sizes = torch.bincount(group, minlength=groups).clamp(min=1)
        return (sums / sizes[:, None])[group]
