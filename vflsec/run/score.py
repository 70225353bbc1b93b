"""The scorer: the only place where a guess is compared with the truth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vflsec.base.seeds import derive
from vflsec.core.view import GroundTruth, Guess
from vflsec.results import metrics, statistics
from vflsec.results.calibration import calibrated, knowledge
from vflsec.results.records.schema import Block

FEW = 5
"""Known rows of a class, of which fewer may be so large a share of it by chance."""

ROUNDING = 1e-6
"""Scores that differ by less, as a part of the largest, are the same."""


def score(
    guess: Guess,
    ground_truth: GroundTruth,
    *,
    headline: str,
    exclude: Tensor,
    seed: int,
    known: str = "train",
    names: Sequence[str] = (),
    groups: Mapping[str, NDArray[np.integer]] | None = None,
) -> dict[str, Block]:
    """Return, for each guessed split, all metrics, chance, the number of rows, and the row interval of the headline.

    ``halves`` is the headline on each of two random halves of these rows, which are the same for every guess with the
    same seed, truth and ``exclude``. It is None if the rows are too few to be split; otherwise a guess of classes also
    has the metrics of ``calibration.knowledge``, each half calibrated on the other, and of ``RARE`` as far as the rows
    resolve them.

    Args:
        guess: of an attack.
        ground_truth: the truth; rows whose answer is -1 have none.
        headline: the metric that the interval is for.
        exclude: positions of the auxiliary samples, which the adversary knows, in the split ``known``.
        seed: of the bootstrap and of the halves.
        known: the split of the auxiliary samples.
        names: of the metrics; by default those of a task with as many classes.
        groups: by split, the group of each row, for intervals over seeds; by default those of the rows' positions.
    """
    blocks = {}
    rows = sum(map(len, ground_truth.labels.values()))
    of_class = share_of_class(ground_truth.labels[known].cpu(), exclude.cpu()) if known in ground_truth.labels else 0.0
    for split, guessed in guess.scores.items():
        truth = ground_truth.labels[split].cpu()
        own_rows = guess.rows.get(split, torch.arange(len(truth)))
        keep = is_scored(truth, exclude if split == known else None)[own_rows]
        at = own_rows[keep]
        if len(torch.unique(truth[at])) > 1:  # metrics need two classes
            scored, answers = guessed[keep], truth[at]
            half_seed = derive(seed, "halves", split)
            halves = _on_halves(scored, answers, headline, half_seed)
            own = (groups or {}).get(split, statistics.groups_of(len(truth)))[at.numpy()]
            block = measure(scored, answers, headline, seed, names, own)
            sure = _knowledge(scored, answers, half_seed) if halves and answers.dim() == 1 else {}
            blocks[split] = msgspec.structs.replace(
                block, metrics=block.metrics | sure, halves=halves, known=len(exclude) / rows, known_of_class=of_class
            )
    return blocks


def stated(guess: Guess) -> dict[str, Block]:
    """Return the facts of a guess by what they are of; they do not vary over rows."""
    return {
        fact.of: Block(
            metrics={fact.metric: fact.value},
            ci95_rows=(fact.value, fact.value),
            chance=fact.chance,
            n=fact.n,
            halves=(fact.value, fact.value),
            without=(fact.value,) * statistics.GROUPS,
        )
        for fact in guess.facts
    }


def is_scored(truth: Tensor, exclude: Tensor | None) -> Tensor:
    """Return which rows (n,) have an answer, and one that the adversary does not know."""
    keep = torch.isfinite(truth).all(dim=1) if truth.dim() > 1 else truth >= 0
    if exclude is not None:
        keep[exclude.cpu()] = False
    return keep


def measure(
    scores: Tensor,
    labels: Tensor,
    headline: str,
    seed: int,
    names: Sequence[str] = (),
    groups: NDArray[np.integer] | None = None,
) -> Block:
    """Return all metrics of (n, C) scores against (n,) labels, or of values, and how the headline varies over rows.

    ``one_class`` is set if all rows are guessed to be of the same class: accuracy is then no measure of the leak.
    ``groups`` (n,) are those of the rows, by default of their positions.
    """
    s, y = scores.detach().cpu().numpy(), labels.cpu().numpy()
    ordered = dict.fromkeys((headline, *(names or metrics.applicable(s.shape[1]))))
    return Block(
        metrics={name: metrics.METRICS[name](s, y) for name in ordered},
        ci95_rows=statistics.over_rows(headline, s, y, np.random.default_rng(seed)),
        chance=metrics.chance(headline, y),
        n=len(y),
        one_class=one_class(labels, s),
        constant=is_constant(s),
        without=statistics.without_groups(headline, s, y, statistics.groups_of(len(y)) if groups is None else groups),
    )


def in_first_half(truth: Tensor, seed: int) -> NDArray[np.bool_]:
    """Return which rows (n,) are in the first of two random halves; each class is split evenly, to within one row."""
    order = np.random.default_rng(seed).permutation(len(truth))
    if truth.dim() == 1:
        order = order[np.argsort(truth.numpy()[order], kind="stable")]
    first = np.zeros(len(truth), dtype=bool)
    first[order[::2]] = True
    return first


def _on_halves(scores: Tensor, truth: Tensor, headline: str, seed: int) -> tuple[float, float] | None:
    """Return the headline on each half, or None if a half has a single answer."""
    s, y = scores.detach().cpu().numpy(), truth.cpu().numpy()
    first = in_first_half(truth.cpu(), seed)
    if any(len(np.unique(y[half], axis=0)) < 2 for half in (first, ~first)):
        return None
    measured = metrics.METRICS[headline]
    return measured(s[first], y[first]), measured(s[~first], y[~first])


def _knowledge(scores: Tensor, truth: Tensor, seed: int) -> dict[str, float]:
    """Return how much a guess of classes tells of a row: few rows known surely, and bits of a calibrated guess."""
    s, y = scores.detach().cpu().numpy(), truth.cpu().numpy()
    rates = {name: metrics.METRICS[name](s, y) for name in metrics.RARE}
    resolved = {name: rate for name, rate in rates.items() if not np.isnan(rate)}
    first = in_first_half(truth.cpu(), seed)
    return resolved | knowledge(calibrated(s, y, first), y, first)


def share_of_class(truth: Tensor, known: Tensor) -> float:
    """Return the largest share of a class of ``truth`` (n,) that is at the positions ``known``; 0 for values.

    A class of which fewer than ``FEW`` rows are known counts only with all others, since chance may have drawn these.
    """
    if truth.dim() > 1 or truth.is_floating_point() or not len(known):
        return 0.0
    classes = int(truth.max()) + 1
    every, own = (np.bincount(rows[rows >= 0].numpy(), minlength=classes) for rows in (truth, truth[known]))
    many = own >= FEW
    return float(max([own.sum() / max(1, every.sum()), *(own[many] / every[many])]))


def is_constant(scores: np.ndarray) -> bool:
    """Whether all rows of (n, C) scores are the same, but for rounding."""
    return bool(np.ptp(scores, axis=0).max() <= ROUNDING * np.abs(scores).max())


def one_class(labels: Tensor, scores: np.ndarray) -> bool:
    """Whether the argmax of (n, C) scores is the same class for every row; values have no class."""
    return not labels.is_floating_point() and len(np.unique(scores.argmax(axis=1))) == 1
