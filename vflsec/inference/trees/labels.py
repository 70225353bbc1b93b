"""Labels under which trees would have been split as they were, by columns, by row, and near what forests learn."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vflsec.core.view import View, memoize
from vflsec.inference.opinion_pool import fit_out_of_bag
from vflsec.inference.regression import standardize
from vflsec.inference.trees.choices import Choices
from vflsec.inference.trees.nodes import get_components, list_partners, weigh_components
from vflsec.inference.trees.replay import Ensemble, Rates, Replay, observe_trees, replay_boosting

FEW_BINS, MANY_BINS = 100, 400
"""Largest numbers of own bins with which splits are compared, for all rows together and for each row."""

TEMPERATURE = 2.0
COLUMN_STEPS, COLUMN_STEP = 20, 0.1
COLUMN_PENALTY = 3.0
SURPRISE_SHARE = 0.3

HOTTEST, COLDEST = 4.0, 0.5
ROW_STEPS, ROW_STEP = 40, 0.4
ROW_PENALTY = 0.1
AGREEMENT = 0.3
ROWS_PER_SPLIT = 20
"""With more training rows for each known split, splits say too little of a single row."""

MAX_ROWS = 5000
"""With more training rows, a label for each of them takes too long."""

ROUNDS = 3
"""Forests that are fitted, each to the labels from the forest before."""

SHARE = 0.5
MAX_FITTED_ROWS = 5000
"""Rows that a forest is fitted to, drawn among all that are not auxiliary."""

AUXILIARY_WEIGHT = 4.0
"""Of an auxiliary row in a forest, as its label is known."""

MIN_SHARE, FARTHEST = 0.01, 6.0


def fit_labels_by_columns(views: Sequence[View], trees: Ensemble, starts: Sequence[Tensor], rates: Rates) -> Tensor:
    """Return probabilities of classes (k, n, C') of training rows that explain the splits and the auxiliary labels.

    Logits are those of ``starts`` plus a linear function of own columns and of principal components of nodes. The
    function minimizes, with a ridge penalty, the cross-entropy of the auxiliary labels plus a share of the surprise at
    all known splits (``vflsec.inference.trees.choices``), while boosting on the probabilities is replayed.

    Source: this project.

    Args:
        views: k copies of a view of a passive party, with auxiliary rows of their own. Each is fitted by itself.
        trees: whose nodes it knows.
        starts: (n, C') probabilities to start from, for each view, of the last of two classes only.
        rates: of the training.
    """
    fit, x = LabelFit(views, trees, starts, FEW_BINS, rates), _join_columns(views[0])
    slopes = x.new_zeros(len(views), x.shape[1], fit.base.shape[2]).requires_grad_()
    # auxiliary rows are balanced
    offset, of_aux = (x.new_zeros(len(views), 1, fit.base.shape[2]).requires_grad_() for _ in range(2))

    def loss(_: int) -> Tensor:
        logits = fit.base + x @ slopes + offset
        surprise = torch.stack(fit.replay(logits, TEMPERATURE).notes).sum()
        error = (_cross_entropy(logits + of_aux, fit.answers) * fit.known).sum()
        return error + COLUMN_PENALTY / 2 * slopes.square().sum() + SURPRISE_SHARE * surprise

    _minimize(loss, [slopes, offset, of_aux], COLUMN_STEPS, COLUMN_STEP)
    return fit.to_probabilities((fit.base + x @ slopes + offset).detach()).double()


def fit_labels_by_row(views: Sequence[View], trees: Ensemble, starts: Sequence[Tensor], rates: Rates) -> Tensor | None:
    """Return probabilities of classes (k, n, C') of training rows, each with its own logit, that explain the splits.

    The logits minimize the surprise at all known splits, at a temperature that falls; plus a share of the
    cross-entropy of what a row scores in the replay without its own label; plus a ridge penalty on the difference from
    ``starts``. Auxiliary rows keep their labels. There is no result, None, with more than ``ROWS_PER_SPLIT`` rows for
    each split or more than ``MAX_ROWS``.

    Source: this project.

    Args are those of ``fit_labels_by_columns``.
    """
    if not has_splits_for_each_row(views[0]):
        return None
    fit = LabelFit(views, trees, starts, MANY_BINS, rates)
    change = torch.zeros_like(fit.base).requires_grad_()

    def loss(step: int) -> Tensor:
        logits = fit.base + change
        replay = fit.replay(logits, HOTTEST * (COLDEST / HOTTEST) ** (step / (ROW_STEPS - 1)))
        agreement = _cross_entropy(replay.left_out, fit.to_probabilities(logits)).sum()
        return torch.stack(replay.notes).sum() + AGREEMENT * agreement + ROW_PENALTY / 2 * change.square().sum()

    _minimize(loss, [change], ROW_STEPS, ROW_STEP)
    return fit.to_probabilities((fit.base + change).detach()).double()


def has_splits_for_each_row(view: View) -> bool:
    """Whether there are so few training rows for each known split that splits say much of a single row."""
    rows = len(view.features[view.aux_split])
    splits = sum(int(known.nodes.any(dim=1).sum()) for known in _get_choices(view, FEW_BINS).rounds.values())
    return rows <= min(MAX_ROWS, ROWS_PER_SPLIT * splits)


class LabelFit:
    """Guessed logits (k, n, C') of training rows, and the boosting on them, for k views that differ in auxiliary rows.

    Attributes:
        base: (k, n, C') logits of ``starts``.
        known: (k, n, 1) whether a row is auxiliary.
        answers: (k, n, C') the auxiliary labels, 0 for other rows.
    """

    def __init__(
        self, views: Sequence[View], trees: Ensemble, starts: Sequence[Tensor], bins: int, rates: Rates
    ) -> None:
        self.rates, self.split = rates, views[0].aux_split
        self.choices = _get_choices(views[0], bins)
        self.trees = trees._replace(nodes={self.split: trees.nodes[self.split]})
        base = torch.stack(list(starts)).float().clamp(1e-3, 1 - 1e-3)
        self.base = base.logit() if base.shape[2] == 1 else base.log()
        self.answers, self.known = torch.zeros_like(base), torch.zeros_like(base[..., :1], dtype=torch.bool)
        for k, view in enumerate(views):
            self.known[k, view.aux_rows] = True
            self.answers[k, view.aux_rows] = F.one_hot(view.aux_labels, view.n_classes).to(base)[:, -base.shape[2] :]

    def to_probabilities(self, logits: Tensor) -> Tensor:
        """Return probabilities (k, n, C'), of the auxiliary rows those of their labels."""
        return torch.where(self.known, self.answers, _to_probabilities(logits))

    def replay(self, logits: Tensor, temperature: float | None = None) -> Replay:
        """Return the boosting on the probabilities, with the surprise at the splits of each round as its notes.

        Without a temperature there are no notes.
        """
        noted = None
        if temperature is not None:
            noted = partial(self.choices.score_surprise, temperature=temperature, l2=self.rates.l2)
        return replay_boosting(self.trees, self.to_probabilities(logits), self.split, self.rates, noted)


class ForestDraw(NamedTuple):
    """What is random in a forest: at most ``MAX_FITTED_ROWS`` positions of rows that are not auxiliary, a seed."""

    rows: Tensor
    seed: int


def draw_forests(view: View, count: int, rng: torch.Generator) -> Iterator[ForestDraw]:
    """Draw what is random in ``count`` forests."""
    rest = len(view.features[view.aux_split]) - len(view.aux_rows)
    draws = []
    for _ in range(count):
        rows = torch.randperm(rest, generator=rng)[:MAX_FITTED_ROWS].clone()
        draws.append(ForestDraw(rows, int(torch.randint(2**31, (), generator=rng))))
    return iter(draws)


def fit_labels_by_forest(
    views: Sequence[View],
    trees: Ensemble,
    starts: Sequence[Tensor],
    draws: Sequence[Iterator[ForestDraw]],
    rates: Rates,
) -> Tensor:
    """Return probabilities of classes (k, n, C') of training rows, near those that a forest predicts.

    Randomized trees are fitted to the guess by own columns, components of nodes, and scores of a replay without the
    row's own label. Their out-of-bag predictions and the scores of the replay, half and half, are the prior of each
    row. Logits minimize the divergence from the prior plus the surprise at all known splits
    (``vflsec.inference.trees.choices``), at a temperature that falls. They are the guess of the next round. With few
    rows for each split, more bins are compared, in more steps, and it gets colder.

    Source: this project. Randomized trees: Geurts, Ernst, Wehenkel 2006.

    ``draws`` are what is random in ``ROUNDS`` forests, for each view; other args are as above.
    """
    bins, coldest, steps = (MANY_BINS, 0.5, 18) if has_splits_for_each_row(views[0]) else (FEW_BINS, 1.0, 12)
    fit = LabelFit(views, trees, starts, bins, rates)
    known = torch.cat([_standardize_columns(views[0])[fit.split], *_get_components(views[0])], dim=1)
    logits = fit.base
    for temperature in np.geomspace(HOTTEST, coldest, ROUNDS).tolist():
        scores, guess = fit.replay(logits).left_out.detach(), fit.to_probabilities(logits)
        each = zip(views, scores, guess, map(next, draws), strict=True)
        prior = torch.stack([_fit_prior(view, known, *parts) for view, *parts in each])
        logits = _fit_near(fit, prior, temperature, coldest, steps)
    return fit.to_probabilities(logits).double()


def _fit_near(fit: LabelFit, prior: Tensor, hottest: float, coldest: float, steps: int) -> Tensor:
    """Return logits (k, n, C') near ``prior`` that explain the splits."""
    change, expected = torch.zeros_like(prior).requires_grad_(), _to_probabilities(prior)

    def loss(step: int) -> Tensor:
        replay = fit.replay(prior + change, max(coldest, hottest * 0.5 ** (step / steps)))
        return torch.stack(replay.notes).sum() + _measure(fit.to_probabilities(prior + change), expected)

    _minimize(loss, [change], steps, ROW_STEP)
    return (prior + change).detach()


def score_by_forest(view: View, replay: Replay, targets: Tensor, draw: ForestDraw) -> dict[str, Tensor]:
    """Return scores (n, C') of the rows of every split, half of a replay and half of a forest that reads its scores.

    The forest is fitted to the ``targets`` of training rows, by own columns and scores. Training rows have its
    out-of-bag predictions.

    ``targets`` (n, C') are probabilities of classes; ``replay`` is the boosting on them in nodes known of every split.
    """
    columns = _standardize_columns(view)
    scores = {s: (replay.left_out if s == view.aux_split else x).float() for s, x in replay.scores.items()}
    x = {s: torch.cat([columns[s], score], dim=1) for s, score in scores.items()}
    order = sorted(x, key=lambda s: s != view.aux_split)
    predictions = _predict_by_forest(view, [x[s] for s in order], targets, draw)
    forests = dict(zip(order, predictions, strict=True))
    return {s: ((_log_odds(forests[s]) + score) / 2).double() for s, score in scores.items()}


def _fit_prior(view: View, known: Tensor, scores: Tensor, targets: Tensor, draw: ForestDraw) -> Tensor:
    """Return logits (n, C'), half of a forest that reads ``known`` (n, k) and the scores of a replay, half of these."""
    (prediction,) = _predict_by_forest(view, [torch.cat([known, scores], dim=1)], targets, draw)
    replay = scores if scores.shape[1] == 1 else scores.log_softmax(dim=1)
    return (_log_odds(prediction) + replay.clamp(-FARTHEST, FARTHEST)) / 2


def _predict_by_forest(view: View, tables: Sequence[Tensor], targets: Tensor, draw: ForestDraw) -> list[Tensor]:
    """Return predictions (n, C') for tables, out-of-bag predictions for the first, which is of training rows."""
    x, *others = (table.cpu().numpy() for table in tables)
    y = targets.cpu().numpy()
    known = view.aux_rows.cpu().numpy()
    rest = np.setdiff1d(np.arange(len(x)), known)[draw.rows.numpy()]
    rows = np.concatenate([known, rest])
    weights = np.concatenate([np.full(len(known), AUXILIARY_WEIGHT), np.ones(len(rest))])
    forest, left_out = fit_out_of_bag(x[rows], y[rows], draw.seed, share=SHARE, weights=weights)
    left = np.setdiff1d(np.arange(len(x)), rows)
    first = np.zeros_like(y)
    first[rows] = left_out
    if len(left):
        first[left] = forest.predict(x[left]).reshape(len(left), -1)
    predictions = [first, *(forest.predict(table).reshape(len(table), -1) for table in others)]
    return [torch.as_tensor(p, dtype=torch.float32, device=targets.device) for p in predictions]


def _to_probabilities(logits: Tensor) -> Tensor:
    """Return the probabilities of logits (..., C'), of the last of two classes only."""
    return logits.sigmoid() if logits.shape[-1] == 1 else logits.softmax(dim=-1)


def _log_odds(q: Tensor) -> Tensor:
    q = q.clamp(MIN_SHARE, 1 - MIN_SHARE)
    return q.logit() if q.shape[1] == 1 else (q / q.sum(dim=1, keepdim=True)).log()


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy (..., 1) of targets (..., C')."""
    if logits.shape[-1] == 1:
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return -(targets * logits.log_softmax(dim=-1)).sum(dim=-1, keepdim=True)


def _measure(q: Tensor, expected: Tensor) -> Tensor:
    """Return the divergence of probabilities (k, n, C') from those that are expected, summed over rows."""
    if q.shape[-1] == 1:
        q, expected = torch.cat([1 - q, q], dim=-1), torch.cat([1 - expected, expected], dim=-1)
    return F.kl_div(expected.clamp_min(1e-6).log(), q, reduction="sum")


def _minimize(loss: Callable[[int], Tensor], parameters: Sequence[Tensor], steps: int, step: float) -> None:
    """Take ``steps`` steps of Adam on ``loss``, a function of the number of the step."""
    optimizer = torch.optim.Adam(parameters, lr=step)
    for number in range(steps):
        optimizer.zero_grad()
        loss(number).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


@memoize
def _get_choices(view: View, bins: int) -> Choices:
    trees = observe_trees(view)
    return Choices(view, trees.drawn if trees else {}, bins)


def _standardize_columns(view: View) -> dict[str, Tensor]:
    """Return own columns (n, d) by split, with mean 0 and deviation 1 on training rows."""
    return {s: standardize(x, view.features[view.aux_split]).float() for s, x in view.features.items()}


def _get_components(view: View) -> list[Tensor]:
    """Return principal components (n, k) of the nodes that training rows share, one table for each sender."""
    tables = [get_components(view, other) for other in list_partners(view)]
    return [weigh_components(*table[view.aux_split], 1).float().to(view.aux_rows.device) for table in tables if table]


@memoize
def _join_columns(view: View) -> Tensor:
    """Return own columns and components of nodes, (n, k), whose rows have a mean squared length of one."""
    columns = _standardize_columns(view)[view.aux_split]
    x = torch.cat([*_get_components(view), columns / max(1, columns.shape[1]) ** 0.5], dim=1)
    return x / x.square().sum(dim=1).mean().sqrt().clamp_min(torch.finfo(x.dtype).tiny)
