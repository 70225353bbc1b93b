"""Gradient averaging: each row is replaced by the mean of a random group, drawn without labels."""

import torch
from torch import Tensor

from vflsec.base.errors import UsageError
from vflsec.core.defense import Defense, Release
from vflsec.core.message import Kind


class GroupAverage(Defense):
    """Every row is replaced by the mean of its group: a batch (B, d) is split at random into groups of at least k rows.

    With k = strength + 1 there are max(1, floor(B / k)) groups, drawn anew for each release, whose sizes differ by at
    most one. A row i of group G is released as sum_{j in G} g_j / |G|. The sum over the batch does not change, so the
    passive party's bias learns as before, and the rest of its model learns less.

    Source: class-blind averaging as a k-anonymous release (microaggregation, Domingo-Ferrer and Mateo-Sanz 2002), with
    random groups instead of similar ones: similar rows share a label, which their mean would confirm.

    | case | result |
    |---|---|
    | fewer than 2·k rows | the mean of the batch, in every row |
    | one row | that row |

    Args:
        strength: smallest number of other rows in a group, k - 1; an integer.
        at: the kinds of release to act on.

    Raises:
        UsageError: a strength that is not an integer.
    """

    name = "average"
    strengths = (1.0, 3.0, 7.0)
    points = (Kind.GRADIENT,)
    reference = "Domingo-Ferrer and Mateo-Sanz 2002 (microaggregation), IEEE TKDE 14(1), with random groups"
    guarantee = "none, empirical only"
    hides = (
        "from the passive party: which row of a group has which gradient; the mean reveals the group's mix of classes"
    )
    costs = "one draw and two sums over the batch"
    fails = (
        "over epochs, against averaging: groups are drawn anew, so the mean of T releases of a row has 1/k of its own "
        "gradient and 1/sqrt(T) of the spread of the others; and in batches of one row or of one class"
    )
    contrib = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strength % 1:
            raise UsageError(f"expected a whole number of other rows as strength, got {self.strength:g}")

    def on_gradient(self, g: Tensor, release: Release) -> Tensor:
        """Return the gradients (B, d) averaged in groups."""
        rows = len(g)
        groups = max(1, rows // (int(self.strength) + 1))
        group = torch.randperm(rows, generator=release.rng, device=g.device) % groups
        sums = g.new_zeros(groups, g.shape[1]).index_add_(0, group, g)
        sizes = torch.bincount(group, minlength=groups).clamp(min=1)
        return (sums / sizes[:, None])[group]
