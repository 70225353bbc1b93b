"""Every release of a row, side by side: earlier models send other functions of the same columns."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from vflsec.base.layout import Layout
from vflsec.core.message import Kind
from vflsec.core.scaling import standardized
from vflsec.core.view import View
from vflsec.inference.completion import completed
from vflsec.inference.releases import Releases, received
from vflsec.inference.trees.components import weighed

LANDMARKS = 256
"""Rows whose span holds the components, beside up to ``MOST_KNOWN`` auxiliary rows."""

MOST_KNOWN = 1024

LINEAR = (8, 16)
"""Numbers of first components that a linear model reads: with more, it fits noise."""

MOST_COMPLETED = 40
"""Coordinates up to which the rows' places are computed: time and memory grow with their square."""

CURVED = (32, 64, 128)
"""Numbers of first components whose distances a kernel compares: columns are no linear function of releases."""

NEIGHBORS = 4
"""Releases of a row through which a polynomial runs: the bottom model changes smoothly from step to step."""

LONGEST = 3.0
"""Times the median length beyond which a row does not count among those that give the components."""

NEGLIGIBLE = 1e-10
"""Share of the largest variance below which a component is a rounding error."""


class Trajectories(NamedTuple):
    """Functions of all releases of each row.

    Attributes:
        every: (n, k) whose inner products are those of the standardized releases side by side.
        components: (n, r) the first principal components, each with variance one.
        completed: coordinates (n, k) that explain each message as it was sent, by k; of aligned releases
            only, and of those alone that have more units together than coordinates, and each at most 16.
    """

    every: Tensor
    components: Tensor
    completed: Mapping[tuple[int, int], Tensor]

    def first(self, numbers: Iterable[int]) -> dict[int, Tensor]:
        """Return the first components by their number, without repetitions."""
        most = self.components.shape[1]
        return {min(number, most): self.components[:, :number] for number in numbers}


def trajectories(view: View, kind: Kind, *, sender: str | None, phase: str | None = None) -> list[Trajectories]:
    """Return functions of all releases of each row in the split of the auxiliary rows, as sent and aligned in time.

    The bottom model changes during training, so the releases of a row are many projections of its columns. The first
    principal components are what most releases share; the last ones are noise and drift within an epoch, of which
    aligned releases have less.

    The list is empty if no row has a second release that the adversary reads. The result is computed once for a view
    and its copies, and must not be changed.

    Args:
        view: of the adversary.
        kind: of message.
        sender: None for any sender.
        phase: None for the last phase with such a message.

    Raises:
        InsufficientView: there is no such message about these rows.
    """
    return trajectories_of(view, kind, [(sender, phase)])


def trajectories_of(view: View, kind: Kind, routes: Sequence[tuple[str | None, str | None]]) -> list[Trajectories]:
    """Return functions of all releases by several pairs of a sender and a phase together, as ``trajectories`` does."""
    key = ("trajectories", kind, *routes, *view.aux_rows.tolist())
    if key not in view.memo:
        releases = [received(view, kind, split=view.aux_split, sender=sender, phase=phase) for sender, phase in routes]
        view.memo[key] = _trajectories(view, [own for own in releases if int(own.epoch.max())])
    result: list[Trajectories] = view.memo[key]
    return result


def has_several_releases(view: View, *, sender: str | None) -> bool:
    """Return whether a row of the auxiliary split has embeddings of several epochs."""
    return bool(received(view, Kind.EMBEDDING, split=view.aux_split, sender=sender).epoch.max())


def functions_of_all(view: View, *, sender: str | None, with_completed: bool = False) -> list[Tensor]:
    """Return the functions (n, k) of all embeddings of each row that a linear model may read; none without any."""
    results = trajectories(view, Kind.EMBEDDING, sender=sender)
    functions = [x for each in results for x in (each.every, *each.first((*LINEAR, *CURVED)).values())]
    return [*functions, *(x for each in results for x in each.completed.values() if with_completed)]


def _trajectories(view: View, releases: Sequence[Releases]) -> list[Trajectories]:
    results = []
    for aligned in (False, True) if releases else ():
        blocks = chain.from_iterable(side_by_side(own, aligned=aligned) for own in releases)
        u, values = principal_components(blocks, landmarks(view))
        if len(values):
            every = weighed((u * values).cpu().numpy(), values.cpu().numpy(), 1, len(values)).to(u.device)
            found = Trajectories(every, u[:, : max(CURVED)] * len(u) ** 0.5, {})
            results.append(found._replace(completed=_completed(releases, found, view.layout) if aligned else {}))
    return results


def _completed(
    releases: Sequence[Releases], found: Trajectories, layout: Layout | None
) -> dict[tuple[int, int], Tensor]:
    """Return what completes each number of coordinates that a row's releases more than determine, and none alone."""
    lengths = found.components.square().sum(dim=1)
    usual = lengths <= LONGEST**2 * lengths.median()
    if any(part.values.shape[1] > max(LINEAR) for part in releases):
        return {}
    width = layout.width if layout else max(LINEAR)
    most = min(found.components.shape[1] - 1, MOST_COMPLETED)
    numbers = sorted({k for k in (*LINEAR, width, width * 3 // 2) if k <= most})
    choices = [(k, 1) for k in numbers] + [(width, 2)] * (width <= most)  # a linear model changes more smoothly
    return {(k, order): completed(releases, found.components[:, :k], usual, order=order) for k, order in choices if k}


class Block(NamedTuple):
    """The releases (n, d) of one epoch, and the number (n,) of the message with each; NaN for a row without any."""

    values: Tensor
    time: Tensor


def side_by_side(releases: Releases, *, aligned: bool = False) -> Iterator[Tensor]:
    """Yield the standardized releases (n, d) of the rows in each epoch.

    Epochs are equal numbers of messages. A row that has several releases in an epoch gets their mean, and a row without
    any keeps its last; before its first it is at the mean, which is zero.

    Args:
        releases: of rows of a split.
        aligned: whether releases are interpolated to the middle of their epoch. Rows of different batches are sent by
            different models, which hides the components that say least.
    """
    blocks = split_by_epoch(releases)
    current = releases.values.new_zeros(releases.n_rows, releases.values.shape[1], dtype=torch.float64)
    for values, time in align(blocks, releases) if aligned else blocks:
        present = ~time.isnan()
        if present.any():
            current = current.clone()
            current[present] = standardized(values[present])
        yield current


def split_by_epoch(releases: Releases) -> Iterator[Block]:
    """Yield the mean release of each row in each epoch."""
    n_epochs = int(releases.epoch.max()) + 1
    epoch = releases.message * n_epochs // (int(releases.message.max()) + 1)
    for number in range(n_epochs):
        present = releases.where(epoch == number)
        has_any = torch.bincount(present.rows, minlength=releases.n_rows) > 0
        time = present.mean(present.message.double()[:, None])[:, 0].masked_fill(~has_any, torch.nan)
        yield Block(present.mean(present.values.double()), time)


def align(blocks: Iterator[Block], releases: Releases) -> Iterator[Block]:
    """Yield each epoch as it would be in the middle, by the polynomial through up to ``NEIGHBORS`` epochs around it."""
    n_epochs = int(releases.epoch.max()) + 1
    window: deque[Block] = deque(maxlen=min(NEIGHBORS, n_epochs))
    done = 0
    for number, block in enumerate(blocks):
        window.append(block)
        if len(window) < window.maxlen:  # type: ignore[operator]
            continue
        last = n_epochs if number == n_epochs - 1 else max(number - 1, 1)
        for epoch in range(done, last):
            yield _interpolated(window, epoch - (number + 1 - len(window)))
        done = last


def _interpolated(window: Sequence[Block], place: int) -> Block:
    """Return the block at ``place`` in the middle of its epoch; rows that miss an epoch of the window stay."""
    times = torch.stack([block.time for block in window])  # (k, n)
    values, time = window[place]
    middle = time[~time.isnan()].median() if not time.isnan().all() else time[0]
    target = torch.clamp(middle, times.amin(dim=0), times.amax(dim=0))
    moved = torch.zeros_like(values)
    for k, block in enumerate(window):
        others = torch.cat([times[:k], times[k + 1 :]])
        weight = ((target - others) / (times[k] - others)).prod(dim=0)
        moved += weight[:, None] * block.values
    return Block(torch.where(moved.isfinite().all(dim=1)[:, None], moved, values), time)


def landmarks(view: View) -> Tensor:
    """Return the positions of the auxiliary rows, and of others at equal distances."""
    n = len(view.features[view.aux_split])
    chosen = torch.zeros(n, dtype=torch.bool, device=view.aux_rows.device)
    chosen[:: max(1, n // LANDMARKS)] = True
    chosen[view.aux_rows[:MOST_KNOWN]] = True
    return torch.nonzero(chosen)[:, 0]


def principal_components(blocks: Iterator[Tensor], landmarks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the left singular vectors (n, r) and singular values (r,) of ``blocks`` (n, d) side by side.

    They are those of the rows' projections onto the span of the rows at ``landmarks`` (l,). Inner products with
    landmarks stay as they are, and so does a ridge regression that is fitted to landmarks. The memory is that of n l
    numbers, for any number and width of blocks.

    Rows that are much longer than others, wild in many releases, have coordinates but decide none.

    Source: Williams and Seeger 2001, "Using the Nystroem method to speed up kernel machines".
    """
    products = lengths = torch.zeros(0)
    for block in blocks:
        products = products if len(products) else block.new_zeros(len(block), len(landmarks))
        lengths = block.square().sum(dim=1) + (lengths if len(lengths) else 0)
        products.addmm_(block, block[landmarks].T)
    usual = lengths <= LONGEST**2 * lengths.median()
    among = usual[landmarks]
    products = products[:, among]
    variances, axes = torch.linalg.eigh((products[landmarks[among]] + products[landmarks[among]].T) / 2)
    kept = variances > NEGLIGIBLE * variances[-1]
    projected = products @ axes[:, kept] / variances[kept].sqrt()  # (n, r)
    squares, rotation = torch.linalg.eigh(projected[usual].T @ projected[usual])
    kept = squares > NEGLIGIBLE * squares[-1:]
    values = squares[kept].flip(0).sqrt()
    return projected @ rotation[:, kept].flip(1) / values, values
