"""Labels of rows between what trees learn from guesses and what the splits of federated trees say."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from sklearn.ensemble import ExtraTreesRegressor
from torch import Tensor
from torch.nn import functional as F

from vflsec.core.view import View
from vflsec.inference.chosen_splits import (
    FEW_BINS,
    MANY_BINS,
    Fit,
    as_probabilities,
    minimize,
    shared_nodes,
    standardized,
    tell_of_rows,
)
from vflsec.inference.replay import Ensemble, Replayed


class Trust(NamedTuple):
    """How closely labels are fitted to the splits.

    Attributes:
        bins: largest number of own bins with which splits are compared.
        coldest: temperature of the surprise at the end.
        steps: in each round.
    """

    bins: int
    coldest: float
    steps: int


CLOSE, LOOSE = Trust(MANY_BINS, 0.5, 18), Trust(FEW_BINS, 1.0, 12)
"""With few rows for each split, and with many."""

ROUNDS, STEP = 3, 0.4
HOTTEST = 4.0
"""Temperature at the start of the first round; the last round starts from the coldest."""

TREES, LEAF, SHARE = 100, 3, 0.5
MOST = 5000
"""Rows that a forest is fitted to, drawn among all that are not auxiliary."""

WEIGHT = 4.0
"""Of an auxiliary row in a forest, as its label is known."""

LEAST, FARTHEST = 0.01, 6.0


class Draw(NamedTuple):
    """What is random in a forest.

    Attributes:
        rows: at most ``MOST`` positions among the rows that are not auxiliary.
        seed: of the trees.
    """

    rows: Tensor
    seed: int


def draws(view: View, count: int, rng: torch.Generator) -> Iterator[Draw]:
    """Draw what is random in ``count`` forests."""
    rest = len(view.features[view.aux_split]) - len(view.aux_rows)
    found = []
    for _ in range(count):
        rows = torch.randperm(rest, generator=rng)[:MOST].clone()
        found.append(Draw(rows, int(torch.randint(2**31, (), generator=rng))))
    return iter(found)


def learned_labels(
    views: Sequence[View],
    trees: Ensemble,
    starts: Sequence[Tensor],
    drawn: Sequence[Iterator[Draw]],
    *,
    learning_rate: float,
    l2: float,
) -> Tensor:
    """Return probabilities of classes (k, n, C') of training rows, near those that a forest predicts.

    Randomized trees are fitted to the guess by own columns, components of nodes, and scores of a replay without the
    row's own label. Their out-of-bag predictions and the scores of the replay, half and half, are the prior of each
    row. Logits minimize the divergence from the prior plus the surprise at all known splits
    (``vflsec.inference.trees.choices``), at a temperature that falls. They are the guess of the next round.

    Source: this project. Randomized trees: Geurts, Ernst, Wehenkel 2006.

    Args:
        views: k copies of a view of a passive party, with auxiliary rows of their own. Each has labels by itself.
        trees: whose nodes it is told.
        starts: (n, C') probabilities to start from, for each view, of the last of two classes only.
        drawn: what is random in ``ROUNDS`` forests, for each view.
        learning_rate: of the training.
        l2: of the training.
    """
    trust = CLOSE if tell_of_rows(views[0], trees) else LOOSE
    fit = Fit(views, trees, starts, trust.bins, learning_rate, l2)
    known = torch.cat([standardized(views[0])[fit.split], *shared_nodes(views[0])], dim=1)
    logits = fit.base
    for temperature in np.geomspace(HOTTEST, trust.coldest, ROUNDS).tolist():
        scores, guess = fit.replayed(logits).left_out.detach(), fit.probabilities(logits)
        prior = [_prior(view, known, *own) for view, *own in zip(views, scores, guess, map(next, drawn), strict=True)]
        logits = _posterior(fit, torch.stack(prior), temperature, trust)
    return fit.probabilities(logits).double()


def _posterior(fit: Fit, prior: Tensor, temperature: float, trust: Trust) -> Tensor:
    """Return logits (k, n, C') near ``prior`` that explain the splits."""
    own, expected = torch.zeros_like(prior).requires_grad_(), as_probabilities(prior)

    def loss(step: int) -> Tensor:
        replay = fit.replayed(prior + own, max(trust.coldest, temperature * 0.5 ** (step / trust.steps)))
        return torch.stack(replay.notes).sum() + _divergence(fit.probabilities(prior + own), expected)

    minimize(loss, [own], trust.steps, STEP)
    return (prior + own).detach()


def learned_scores(view: View, seen: Replayed, targets: Tensor, drawn: Draw) -> dict[str, Tensor]:
    """Return scores (n, C') of the rows of every split, half of a replay and half of a forest that reads its scores.

    The forest is fitted to the ``targets`` of training rows, by own columns and scores. Training rows have its
    out-of-bag predictions.

    Args:
        view: of a passive party.
        seen: the boosting on the targets, in the nodes that are told of rows of every split.
        targets: (n, C') probabilities of classes of training rows.
        drawn: what is random in the forest.
    """
    columns = standardized(view)
    scores = {split: (seen.left_out if split == view.aux_split else x).float() for split, x in seen.scores.items()}
    x = {split: torch.cat([columns[split], own], dim=1) for split, own in scores.items()}
    others = [split for split in x if split != view.aux_split]
    found, *predicted = _forest(view, x[view.aux_split], targets, drawn, *(x[split] for split in others))
    forests = {view.aux_split: found, **dict(zip(others, predicted, strict=True))}
    return {split: ((_log_odds(forests[split]) + own) / 2).double() for split, own in scores.items()}


def _prior(view: View, known: Tensor, scores: Tensor, targets: Tensor, drawn: Draw) -> Tensor:
    """Return logits (n, C'), half of a forest that reads ``known`` (n, k) and the scores of a replay, half of these."""
    (found,) = _forest(view, torch.cat([known, scores], dim=1), targets, drawn)
    replay = scores if scores.shape[1] == 1 else scores.log_softmax(dim=1)
    return (_log_odds(found) + replay.clamp(-FARTHEST, FARTHEST)) / 2


def _forest(view: View, x: Tensor, targets: Tensor, drawn: Draw, *others: Tensor) -> list[Tensor]:
    """Return out-of-bag predictions (n, C') of a forest fitted to training rows ``x``, and predictions of others."""
    known = view.aux_rows.cpu().numpy()
    rest = np.setdiff1d(np.arange(len(x)), known)[drawn.rows.numpy()]
    rows = np.concatenate([known, rest])
    weights = np.concatenate([np.full(len(known), WEIGHT), np.ones(len(rest))])
    forest = ExtraTreesRegressor(
        TREES, min_samples_leaf=LEAF, max_features=SHARE, bootstrap=True, oob_score=True, random_state=drawn.seed
    )
    own, y = x.cpu().numpy(), targets.cpu().numpy()
    with warnings.catch_warnings():  # few rows can all be in every sample
        warnings.simplefilter("ignore")
        forest.fit(own[rows], y[rows, 0] if y.shape[1] == 1 else y[rows], sample_weight=weights)
    left = np.setdiff1d(np.arange(len(own)), rows)
    found = np.zeros_like(y)
    found[rows] = forest.oob_prediction_.reshape(len(rows), -1)
    if len(left):
        found[left] = forest.predict(own[left]).reshape(len(left), -1)
    predicted = [forest.predict(one.cpu().numpy()).reshape(len(one), -1) for one in others]
    return [torch.as_tensor(one, dtype=torch.float32, device=x.device) for one in (found, *predicted)]


def _log_odds(q: Tensor) -> Tensor:
    q = q.clamp(LEAST, 1 - LEAST)
    return q.logit() if q.shape[1] == 1 else (q / q.sum(dim=1, keepdim=True)).log()


def _divergence(q: Tensor, expected: Tensor) -> Tensor:
    """Return the divergence of probabilities (k, n, C') from those that are expected, summed over rows."""
    if q.shape[-1] == 1:
        q, expected = torch.cat([1 - q, q], dim=-1), torch.cat([1 - expected, expected], dim=-1)
    return F.kl_div(expected.clamp_min(1e-6).log(), q, reduction="sum")
