"""Uses of a few known labels beside fitting: to fix the sign and threshold of a score, and as references."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist

import torch
from torch import Tensor

from vflsec.base.errors import UsageError
from vflsec.core.attack import find_threshold, select_known
from vflsec.core.view import Guess, View
from vflsec.results import metrics


def orient(view: View, score: Tensor, *, train: Tensor | None = None) -> Tensor:
    """Return scores (n, 2) from ``score`` (n,), with the sign that fits the auxiliary labels better.

    ``score`` is larger for class 1, which is guessed above 0. ``train`` (n_train,) is that of the training rows, which
    contain the auxiliary samples; None for ``score``. Without labels of both classes the sign is kept.
    """
    known, labels = select_known(view, score if train is None else train)
    if known is not None and metrics.auc(torch.stack([-known, known], dim=1).numpy(), labels.numpy()) < 0.5:
        score = -score
    return torch.stack([-score, score], dim=1)


def separate(view: View, score: Tensor, *, train: Tensor | None = None) -> Tensor:
    """Return scores (n, 2) like ``orient``, for a score whose zero means nothing and which is larger for class 1.

    The threshold has the largest balanced accuracy on the auxiliary labels, since they may have been drawn evenly from
    uneven classes; without labels it is the median of the training rows. Without a threshold all guesses would be of
    one class, and the accuracy would flatter a defense.
    """
    train = score if train is None else train
    signed, known_scores = (orient(view, values, train=train)[:, 1] for values in (score, train))
    known, labels = select_known(view, known_scores)
    zero = known_scores.median() if known is None else find_threshold(known, labels == 1, balanced=True)
    return torch.stack([zero - signed, signed - zero], dim=1)


@torch.no_grad()
def list_embeddings(view: View) -> list[Mapping[str, Tensor]]:
    """Return own embeddings (n, d) by split, and those of auxiliary rows' text as defenses changed it, if they did.

    Of rows that no model has learned from, random words tell nothing beyond the text.
    """
    assert view.model is not None
    model, split = view.model.eval(), view.aux_split
    embedded = {name: model(x) for name, x in view.features.items()}
    return [embedded, {split: view.defended[split]}] if view.defended else [embedded]


def choose_guess(view: View, guesses: Sequence[Guess]) -> Guess:
    """Return the guess that fits auxiliary labels of two or more classes best, and the first one of other splits."""
    known, labels = view.aux_rows.cpu(), view.aux_labels.cpu().numpy()
    if len(guesses) == 1 or len(set(labels.tolist())) < 2:
        return guesses[0]
    score = metrics.METRICS[metrics.list_metrics(view.n_classes)[0]]
    best = max(guesses, key=lambda guess: score(guess.scores[view.aux_split].cpu()[known].numpy(), labels))
    return replace(best, scores={**guesses[0].scores, **best.scores})


def measure_sureness(view: View, guess: Guess) -> float | None:
    """Return the confidence, by the auxiliary labels, that a guess of two classes has the right sign.

    That is one minus the one-sided p-value of the Mann-Whitney test, by the normal approximation; 1/2 is no evidence.
    None without labels of both classes, or for a guess of other rows than theirs.
    """
    if view.aux_split not in guess.scores:
        return None
    scores = guess.scores[view.aux_split]
    known, labels = select_known(view, scores[:, 1] - scores[:, 0])
    if known is None:
        return None
    ones, n = int((labels == 1).sum()), len(labels)
    spread = math.sqrt((n + 1) / (12 * ones * (n - ones)))
    above = metrics.auc(torch.stack([-known, known], dim=1).numpy(), labels.numpy()) - 0.5
    return NormalDist().cdf(above / spread)


def draw_references(view: View, limit: int | None, rng: torch.Generator) -> list[Tensor]:
    """Return for each class at most ``limit`` of the training rows that are known to be of it."""
    by_class = []
    for c in range(view.n_classes):
        rows = view.aux_rows[view.aux_labels == c]
        drawn = torch.randperm(len(rows), generator=rng)[:limit]
        by_class.append(rows[drawn.to(rows.device)])
    return by_class


def list_known(name: str, view: View, aim: int) -> Tensor:
    """Return the known rows of class ``aim`` for the attack ``name``.

    Raises:
        UsageError: no such class, or no known row of it.
    """
    if aim >= view.n_classes:
        raise UsageError(f"{name}: expected aim < {view.n_classes}, the number of classes, got {aim}")
    known = view.aux_rows[view.aux_labels == aim]
    if not len(known):
        raise UsageError(f"{name}: expected a known row of class {aim}, got none: raise aux.n")
    return known


def make_mask(rows: Tensor, count: int) -> Tensor:
    """Return which of ``count`` rows are among ``rows``."""
    return torch.zeros(count, dtype=torch.bool, device=rows.device).index_fill(0, rows, value=True)
