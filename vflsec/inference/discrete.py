"""Columns that take few values: what a guess with an error says about them."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from vflsec.base.layout import Layout
from vflsec.inference.opinion_pool import Opinion, blend_opinions

ROWS_PER_VALUE = 4
"""Known rows for each distinct value, below which a column counts as continuous."""

MAX_VALUES = 64

FOLDS = 5

UNSEEN = 0.3
"""Known rows that a value counts as having that lies on the grid of the others, and in no known row."""

MIN_DEVIATION = 1e-4
"""Least one of the errors of a guess, as a share of that of the values: guesses are rounded."""


class DistinctValues(NamedTuple):
    """The values (k, w) of a column, or of the columns of a category, and how many known rows (k,) have each."""

    columns: list[int]
    values: Tensor
    counts: Tensor


def expect_values(opinion: Opinion, targets: Tensor, layout: Layout | None) -> Opinion:
    """Return the opinion blended with ``round_softly`` of it, column by column."""
    return blend_opinions([opinion, round_softly(opinion, targets, layout)], targets)


def round_softly(opinion: Opinion, targets: Tensor, layout: Layout | None) -> Opinion:
    """Return the expectation of the columns of few values given the opinion; other columns stay.

    A guess is a linear function of the value plus a Gaussian error, which known rows give: each fold of them is judged
    by the function that the others have. The columns of a category are taken together.

    Source: Duda, Hart, Stork 2001, "Pattern Classification", section 2.6, for the posterior of each value.

    Args:
        opinion: on rows (n, d), and on the known rows (m, d).
        targets: (m, d) values of the known rows.
        layout: of the d columns.
    """
    guess, held_out = opinion.scores.double().clone(), opinion.held_out.double().clone()
    part = torch.arange(len(targets), device=targets.device) % FOLDS
    for block in find_discrete(targets, layout):
        known_guess, known = opinion.held_out[:, block.columns].double(), targets[:, block.columns]
        guess[:, block.columns] = _expect(guess[:, block.columns], known_guess, known, block)
        folds = [(part == fold, part != fold) for fold in range(FOLDS)]
        predictions = [_expect(known_guess[out], known_guess[rest], known[rest], block) for out, rest in folds]
        order = torch.cat([torch.nonzero(out)[:, 0] for out, _ in folds])
        held_out[order[:, None], torch.tensor(block.columns)] = torch.cat(predictions)
    return Opinion(guess, held_out)


def find_discrete(targets: Tensor, layout: Layout | None) -> Iterator[DistinctValues]:
    """Yield the values of each column that takes few in the known rows ``targets`` (m, d), categories as a whole."""
    columns = (layout or Layout.numeric(targets.shape[1])).columns
    for column in columns if len(targets) >= 2 * FOLDS else ():
        at = list(range(column.start, column.start + column.width))
        values, counts = torch.unique(targets[:, at], dim=0, return_counts=True)
        if 1 < len(values) <= min(MAX_VALUES, max(2, len(targets) // ROWS_PER_VALUE)):
            grid = extend_grid(values[:, 0]) if len(at) == 1 else None
            if grid is None:
                yield DistinctValues(at, values, counts.double())
            else:
                on_grid = torch.full_like(grid, UNSEEN)
                on_grid[(values - grid).abs().argmin(dim=1)] = counts.to(grid)
                yield DistinctValues(at, grid[:, None], on_grid)


def extend_grid(values: Tensor) -> Tensor | None:
    """Return the evenly spaced grid that holds ``values`` (k,) in order, a quarter longer at each end; None if none.

    Two values, and three, are not extended.
    """
    step = values.diff().min()
    places = (values - values[0]) / step
    rounded = places.round()
    if float((places - rounded).abs().max()) > 0.01 or float(rounded[-1]) > 2 * MAX_VALUES:
        return None
    step, more = (values[-1] - values[0]) / rounded[-1], len(values) // 4
    return torch.as_tensor(values[0] + step * torch.arange(-more, int(rounded[-1]) + 1 + more).to(values))


def _expect(guess: Tensor, known_guess: Tensor, known: Tensor, block: DistinctValues) -> Tensor:
    """Return the posterior mean (n, w) of the values given ``guess`` (n, w), by the guesses (m, w) of ``known`` rows.

    The prior of each value is its share of all known rows.
    """
    x, q = known - known.mean(dim=0), known_guess - known_guess.mean(dim=0)
    slope = (x * q).sum(dim=0) / x.square().sum(dim=0).clamp_min(torch.finfo(x.dtype).tiny)
    root = _invert_root(q - slope * x, float(block.values.var(dim=0).max()))
    at_values = known_guess.mean(dim=0) + slope * (block.values - known.mean(dim=0))  # (k, w)
    distances = torch.cdist(guess @ root, at_values @ root).square()
    posterior = (block.counts.log() - distances / 2).softmax(dim=1)
    return torch.as_tensor(posterior @ block.values)


def _invert_root(errors: Tensor, variance: float) -> Tensor:
    """Return W (w, w) with W W^T the inverse of the covariance of ``errors`` (m, w), shrunk toward its diagonal."""
    m, w = errors.shape
    covariance = errors.T @ errors / m + MIN_DEVIATION**2 * variance * torch.eye(w).to(errors)
    share = w / (w + m)
    shrunk = (1 - share) * covariance + share * covariance.diagonal().diag()
    return torch.as_tensor(torch.linalg.inv(torch.linalg.cholesky(shrunk)).T)
