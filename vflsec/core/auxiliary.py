"""Uses of a few known labels beside fitting: to fix the sign and threshold of a score, and as references."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist

import torch
from torch import Tensor

from vflsec.core.view import Guess, View
from vflsec.results import metrics

SURE = 2.0
"""A new threshold must gain more auxiliary labels than it loses by this many standard deviations."""

THRESHOLD = "Two classes: if argmax separates the auxiliary labels badly, a threshold that they support replaces it."
"""How ``apply_threshold`` makes an attack differ from its source."""


def orient(view: View, score: Tensor, *, train: Tensor | None = None) -> Tensor:
    """Return scores (n, 2) from ``score`` (n,), with the sign that fits the auxiliary labels better.

    Args:
        view: of the adversary; without labels of both classes the sign is kept.
        score: larger for class 1, which is guessed above 0.
        train: (n_train,) the same score of the training rows, which contain the auxiliary samples; None for ``score``.
    """
    known, labels = _select_known(view, score if train is None else train)
    if known is not None and metrics.auc(torch.stack([-known, known], dim=1).numpy(), labels.numpy()) < 0.5:
        score = -score
    return torch.stack([-score, score], dim=1)


def separate(view: View, score: Tensor, *, train: Tensor | None = None) -> Tensor:
    """Return scores (n, 2) like ``orient``, for a score whose zero means nothing.

    The threshold has the largest balanced accuracy on the auxiliary labels, since they may have been drawn evenly from
    uneven classes; without labels it is the median of the training rows. Without a threshold all guesses would be of
    one class, and the accuracy would flatter a defense.

    Args:
        view: of the adversary.
        score: larger for class 1.
        train: (n_train,) the same score of the training rows; None for ``score``.
    """
    train = score if train is None else train
    signed, known_scores = (orient(view, values, train=train)[:, 1] for values in (score, train))
    known, labels = _select_known(view, known_scores)
    zero = known_scores.median() if known is None else _find_threshold(known, labels)
    return torch.stack([zero - signed, signed - zero], dim=1)


def measure_sureness(view: View, guess: Guess) -> float | None:
    """Return the confidence, by the auxiliary labels, that a guess of two classes has the right sign.

    That is one minus the one-sided p-value of the Mann-Whitney test, by the normal approximation; 1/2 is no evidence.
    None without labels of both classes, or for a guess of other rows than theirs.
    """
    if view.aux_split not in guess.scores:
        return None
    scores = guess.scores[view.aux_split]
    known, labels = _select_known(view, scores[:, 1] - scores[:, 0])
    if known is None:
        return None
    ones, n = int((labels == 1).sum()), len(labels)
    spread = math.sqrt((n + 1) / (12 * ones * (n - ones)))
    above = metrics.auc(torch.stack([-known, known], dim=1).numpy(), labels.numpy()) - 0.5
    return NormalDist().cdf(above / spread)


def apply_threshold(view: View, guess: Guess) -> Guess:
    """Return a guess of two classes with the threshold that the auxiliary labels support; the order of scores is kept.

    The candidate is the threshold with the highest accuracy on the auxiliary labels. It replaces zero if it gains more
    labels than it loses by ``SURE`` standard deviations (a sign test), so that a good threshold is kept, bit for bit.
    Each label counts once: labels drawn evenly from uneven classes weigh the classes alike, and labels drawn at random
    have the base rate of the task. Scores of the auxiliary samples flatter an attack that was fitted on them, but show
    on which side of zero it puts them.

    Args:
        view: of the adversary; without labels of both classes the guess is unchanged.
        guess: scores (n, 2) by split.
    """
    if view.aux_split not in guess.scores or view.aux_split in guess.rows:
        return guess
    margins = {split: s[:, 1].double() - s[:, 0].double() for split, s in guess.scores.items()}
    known, labels = _select_known(view, margins[view.aux_split])
    if known is None:
        return guess
    ones = labels == 1
    zero = _find_split(known, ones)
    before, after = (known > 0) == ones, (known > zero) == ones
    gained, lost = int((after & ~before).sum()), int((before & ~after).sum())
    if gained - lost < SURE * max(1, gained + lost) ** 0.5:
        return guess
    return replace(guess, scores={s: torch.stack([zero - m, m - zero], dim=1) / 2 for s, m in margins.items()})


def _find_split(known: Tensor, ones: Tensor) -> Tensor:
    """Return the midpoint between two neighboring scores with the highest accuracy."""
    order = torch.argsort(known)
    right = (~ones[order]).cumsum(0) - ones[order].cumsum(0)  # up to a constant, with everything up to here as class 0
    best = int(right[:-1].argmax())
    return (known[order[best]] + known[order[best + 1]]) / 2


def _select_known(view: View, train: Tensor) -> tuple[Tensor | None, Tensor]:
    """Return the scores and labels of the auxiliary samples; no scores if they are of one class."""
    labels = view.aux_labels.cpu()
    return (train.cpu()[view.aux_rows.cpu()] if len(set(labels.tolist())) == 2 else None), labels


def _find_threshold(known: Tensor, labels: Tensor) -> Tensor:
    """Return the midpoint between two neighboring scores with the best balanced accuracy."""
    order = torch.argsort(known)
    ones, zeros = labels[order] == 1, labels[order] == 0
    right = zeros.cumsum(0) / zeros.sum() + 1 - ones.cumsum(0) / ones.sum()  # with everything up to here as class 0
    best = int(right[:-1].argmax())
    return (known[order[best]] + known[order[best + 1]]) / 2


def draw_references(view: View, limit: int | None, rng: torch.Generator) -> list[Tensor]:
    """Return for each class at most ``limit`` of the training rows that are known to be of it."""
    by_class = []
    for c in range(view.n_classes):
        rows = view.aux_rows[view.aux_labels == c]
        drawn = torch.randperm(len(rows), generator=rng)[:limit]
        by_class.append(rows[drawn.to(rows.device)])
    return by_class
