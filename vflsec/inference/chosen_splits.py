"""Labels under which trees would have been split as they were."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from vflsec.core import scaling
from vflsec.core.view import View
from vflsec.inference.replay import Ensemble, Replayed, replayed
from vflsec.inference.trees.choices import Choices
from vflsec.inference.trees.components import components, weighed
from vflsec.inference.trees.nodes import partners

FEW_BINS, MANY_BINS = 100, 400
"""Largest numbers of own bins with which splits are compared, for all rows together and for each row."""

TEMPERATURE = 2.0
STEPS, STEP = 20, 0.1
PENALTY = 3.0
WEIGHT = 0.3

HOTTEST, COLDEST = 4.0, 0.5
ROW_STEPS, ROW_STEP = 40, 0.4
ROW_PENALTY = 0.1
AGREEMENT = 0.3
ROWS_PER_SPLIT = 20
"""With more training rows for each known split, splits say too little of a single row."""

MOST_ROWS = 5000
"""With more training rows, a label for each of them takes too long."""


def explained(
    views: Sequence[View], trees: Ensemble, starts: Sequence[Tensor], *, learning_rate: float, l2: float
) -> Tensor:
    """Return probabilities of classes (k, n, C') of training rows that explain the splits and the auxiliary labels.

    Logits are those of ``starts`` plus a linear function of own columns and of principal components of nodes. The
    function minimizes, with a ridge penalty, the cross-entropy of the auxiliary labels plus a share of the surprise at
    all known splits (``vflsec.inference.trees.choices``), while boosting on the probabilities is replayed.

    Source: this project.

    Args:
        views: k copies of a view of a passive party, with auxiliary rows of their own. Each is fitted by itself.
        trees: whose nodes it is told.
        starts: (n, C') probabilities to start from, for each view, of the last of two classes only.
        learning_rate: of the training.
        l2: of the training.
    """
    fit, x = Fit(views, trees, starts, FEW_BINS, learning_rate, l2), _columns(views[0])
    slopes = x.new_zeros(len(views), x.shape[1], fit.base.shape[2]).requires_grad_()
    # auxiliary rows are balanced
    offset, of_aux = (x.new_zeros(len(views), 1, fit.base.shape[2]).requires_grad_() for _ in range(2))

    def loss(_: int) -> Tensor:
        logits = fit.base + x @ slopes + offset
        surprise = torch.stack(fit.replayed(logits, TEMPERATURE).notes).sum()
        error = (_error(logits + of_aux, fit.answers) * fit.known).sum()
        return error + PENALTY / 2 * slopes.square().sum() + WEIGHT * surprise

    minimize(loss, [slopes, offset, of_aux], STEPS, STEP)
    return fit.probabilities((fit.base + x @ slopes + offset).detach()).double()


def explained_by_row(
    views: Sequence[View], trees: Ensemble, starts: Sequence[Tensor], *, learning_rate: float, l2: float
) -> Tensor | None:
    """Return probabilities of classes (k, n, C') of training rows, each with its own logit, that explain the splits.

    The logits minimize the surprise at all known splits, at a temperature that falls; plus a share of the
    cross-entropy of what a row scores in the replay without its own label; plus a ridge penalty on the difference from
    ``starts``. Auxiliary rows keep their labels. There is no result, None, with more than ``ROWS_PER_SPLIT`` rows for
    each split or more than ``MOST_ROWS``.

    Source: this project.

    Args are those of ``explained``.
    """
    if not tell_of_rows(views[0], trees):
        return None
    fit = Fit(views, trees, starts, MANY_BINS, learning_rate, l2)
    own = torch.zeros_like(fit.base).requires_grad_()

    def loss(step: int) -> Tensor:
        logits = fit.base + own
        replay = fit.replayed(logits, HOTTEST * (COLDEST / HOTTEST) ** (step / (ROW_STEPS - 1)))
        agreement = _error(replay.left_out, fit.probabilities(logits)).sum()
        return torch.stack(replay.notes).sum() + AGREEMENT * agreement + ROW_PENALTY / 2 * own.square().sum()

    minimize(loss, [own], ROW_STEPS, ROW_STEP)
    return fit.probabilities((fit.base + own).detach()).double()


def tell_of_rows(view: View, trees: Ensemble) -> bool:
    """Whether there are so few training rows for each known split that splits say much of a single row."""
    rows = len(view.features[view.aux_split])
    return rows <= min(MOST_ROWS, ROWS_PER_SPLIT * _choices(view, trees, FEW_BINS).n_splits)


class Fit:
    """Guessed logits (k, n, C') of training rows, and the boosting on them, for k views that differ in auxiliary rows.

    Attributes:
        base: (k, n, C') logits of ``starts``.
        known: (k, n, 1) whether a row is auxiliary.
        answers: (k, n, C') the auxiliary labels, 0 for other rows.
    """

    def __init__(
        self,
        views: Sequence[View],
        trees: Ensemble,
        starts: Sequence[Tensor],
        bins: int,
        learning_rate: float,
        l2: float,
    ) -> None:
        view, self.learning_rate, self.l2 = views[0], learning_rate, l2
        self.split = view.aux_split
        self.choices = _choices(view, trees, bins)
        self.trees = trees._replace(nodes={self.split: trees.nodes[self.split]})
        base = torch.stack(list(starts)).float().clamp(1e-3, 1 - 1e-3)
        self.base = base.logit() if base.shape[2] == 1 else base.log()
        self.answers, self.known = torch.zeros_like(base), torch.zeros_like(base[..., :1], dtype=torch.bool)
        for k, one in enumerate(views):
            self.known[k, one.aux_rows] = True
            self.answers[k, one.aux_rows] = F.one_hot(one.aux_labels, one.n_classes).to(base)[:, -base.shape[2] :]

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return probabilities (k, n, C'), of the auxiliary rows those of their labels."""
        return torch.where(self.known, self.answers, as_probabilities(logits))

    def replayed(self, logits: Tensor, temperature: float | None = None) -> Replayed:
        """Return the boosting on the probabilities, with the surprise at the splits of each round as its notes.

        Without a temperature there are no notes.
        """

        def surprise(round_: int, derivatives: Tensor) -> Tensor:
            assert temperature is not None
            return self.choices.surprise(round_, derivatives, temperature=temperature, l2=self.l2)

        return replayed(
            self.trees, self.probabilities(logits), self.split,
            learning_rate=self.learning_rate, l2=self.l2, noted=None if temperature is None else surprise,
        )  # fmt: skip


def as_probabilities(logits: Tensor) -> Tensor:
    """Return the probabilities of logits (..., C'), of the last of two classes only."""
    return logits.sigmoid() if logits.shape[-1] == 1 else logits.softmax(dim=-1)


def minimize(loss: Callable[[int], Tensor], parameters: Sequence[Tensor], steps: int, step: float) -> None:
    """Take ``steps`` steps of Adam on ``loss``, a function of the number of the step."""
    optimizer = torch.optim.Adam(parameters, lr=step)
    for number in range(steps):
        found = loss(number)
        optimizer.zero_grad()
        found.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def _error(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy (..., 1) of targets (..., C')."""
    if logits.shape[-1] == 1:
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return -(targets * logits.log_softmax(dim=-1)).sum(dim=-1, keepdim=True)


def _choices(view: View, trees: Ensemble, bins: int) -> Choices:
    key = ("chosen splits", bins)
    if key not in view.memo:
        view.memo[key] = Choices(view, trees.drawn, bins)
    found: Choices = view.memo[key]
    return found


def standardized(view: View) -> dict[str, Tensor]:
    """Return own columns (n, d) by split, with mean 0 and deviation 1 on training rows."""
    return {s: scaling.standardized(x, view.features[view.aux_split]).float() for s, x in view.features.items()}


def shared_nodes(view: View) -> list[Tensor]:
    """Return principal components (n, k) of the nodes that training rows share, one table for each sender."""
    shared = [components(view, other) for other in partners(view)]
    return [weighed(*one[view.aux_split], 1).float().to(view.aux_rows.device) for one in shared if one]


def _columns(view: View) -> Tensor:
    """Return own columns and components of nodes, (n, k), whose rows have a mean squared length of one."""
    if "columns and nodes" not in view.memo:
        own = standardized(view)[view.aux_split]
        x = torch.cat([*shared_nodes(view), own / max(1, own.shape[1]) ** 0.5], dim=1)
        view.memo["columns and nodes"] = x / x.square().sum(dim=1).mean().sqrt().clamp_min(torch.finfo(x.dtype).tiny)
    found: Tensor = view.memo["columns and nodes"]
    return found
