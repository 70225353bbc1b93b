"""Self-training: guessed labels of all training rows train models of own columns, which improve the guesses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vflsec.base.checks import check_positive
from vflsec.core.attack import Attack
from vflsec.core.view import Guess, Need, View
from vflsec.inference.fused import fuse_classes
from vflsec.inference.opinion_pool import Opinion, fit_out_of_bag, pool_opinions
from vflsec.inference.regression import standardize
from vflsec.inference.releases import find_span
from vflsec.inference.sources import EVERYTHING, Table, list_sources

WEIGHT = 3.0
"""Weight of an auxiliary row; a row with a guessed label has weight one."""

N_COSINES = 100
"""Cosines of random projections, which make the regression nonlinear."""

MAX_REGRESSION_ROWS = 20_000
"""Rows to which the regression is fitted, at most."""

MAX_FOREST_ROWS = 5_000
"""Rows to which trees are fitted, at most."""

EARLY_TREES = 50
"""Of each forest but the last, whose trees guess the rows."""

N_FOLDS = 4
"""Parts of the training rows; each is predicted by a regression on the others."""

LBFGS_STEPS = 30
"""Steps of the search for the regressions' coefficients in each iteration."""

GUESS_DECIMALS = 4
"""Decimals to which guesses are rounded, so that results do not depend on how libraries round."""

PENALTY = 1e-3
"""Weight of the squared slopes of a regression."""

MIN_SHARE = 1e-3
"""Lower bound of probabilities and of counts of a class, so that logarithms and means are finite."""


class SelfTraining(Attack):
    """Label inference that also learns from rows without a known label, by expectation maximization.

    It starts from the guess of ``fusion``. Each iteration fits models of p(y | x) to the guessed labels of all training
    rows, where x is what the adversary knows about every split (own columns, embeddings): a softmax regression and
    randomized trees, which are averaged. Tables z that cover training rows only, such as received gradients, have a
    Gaussian for each class with a common covariance. The new guess of a row is p(y | x) times a power of the density of
    z. Gradients of thousands of rows thus train models that also predict rows without any message. No row is predicted
    by a model that was fitted to its own guess, which would confirm it.

    Source: Nigam et al. 2000, "Text classification from labeled and unlabeled documents using EM", Machine Learning 39;
    random features: Rahimi and Recht 2007; trees: Geurts, Ernst, Wehenkel 2006, Machine Learning 63.

    Args:
        iterations: of expectation and maximization.
    """

    name = "self-training"
    stream = "fusion"  # whose guess it starts from
    version = 15
    needs = frozenset({Need.FEATURES, Need.AUX_LABELS})
    wants = EVERYTHING
    reference = "Nigam et al. 2000, Machine Learning 39, by expectation maximization"
    differs: ClassVar[tuple[str, ...]] = (
        "The paper has naive Bayes on words. Here, classes have a softmax regression and trees on tables that cover "
        "every split, and a Gaussian on tables that cover training rows only.",
        "A row is guessed by models that were fitted without it.",
        "Guesses start from fusion, not from a model of the known labels.",
    )
    verified = "the Bayes rule of Gaussian data"
    costs = "iterations x (softmax regressions and a forest on thousands of rows), after fusion"
    fails = "if the guess of fusion is so poor that wrong guesses confirm each other"

    trust: ClassVar[float] = 0.75
    """Power of the density of z, which is less Gaussian than the model assumes."""

    every_table: ClassVar[bool] = True
    """Whether z has every table of the received messages; else, for gradients, only the means of thirds of training."""

    def __init__(self, *, iterations: int = 8) -> None:
        check_positive(iterations=iterations)
        self.iterations = iterations

    def alone(self) -> Attack:
        """Return the same attack, which then reads the adversary's own columns only."""
        return self

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return log posteriors (n, C), up to a constant of each row, for every split."""
        held = {name: source for name, source in list_sources(view).items() if not source.rescaled}
        shared = {name: source for name, source in held.items() if view.features.keys() <= source.table.keys()}
        received = {name: source for name, source in held.items() if name not in shared}
        split, known = view.aux_split, F.one_hot(view.aux_labels, view.n_classes).double()
        guessed = fuse_classes(view, rng).scores[split].clamp_min(MIN_SHARE)
        guessed = (guessed / guessed.sum(dim=1, keepdim=True)).round(decimals=GUESS_DECIMALS)
        everywhere = [source.table for source in shared.values()]
        x = {s: torch.cat([standardize(t[s], t[split]) for t in everywhere], dim=1) for s in view.features}
        models = self.models(x, guessed.shape, rng, split)
        tables = [source.table[split] for source in received.values() if self.every_table or not source.derived]
        z = _whiten_tables(tables, len(guessed))
        weight = torch.ones(len(guessed), dtype=torch.float64, device=guessed.device)
        weight[view.aux_rows] = WEIGHT
        for iteration in range(self.iterations):
            guessed[view.aux_rows] = known
            # Maximization: fit p(y | x) to the guesses. The last models alone guess the other splits.
            last = iteration == self.iterations - 1
            fitted = [model.fit(guessed, weight, split, view.aux_rows, last=last) for model in models]
            log_p = self.join_models(fitted, split, view)
            # Expectation: combine it with the density of z.
            posterior = log_p[split] + self.trust * _log_density(z, guessed)
            guessed = torch.softmax(posterior, dim=1).round(decimals=GUESS_DECIMALS)
        return Guess({**log_p, split: posterior}, budget={"iterations": self.iterations})

    def models(
        self, x: Table, shape: torch.Size, rng: torch.Generator, split: str
    ) -> list[_Regressions | _OutOfBagForest]:
        """Return the models of p(y | x) for guesses of ``shape`` (n, C)."""
        return [_Regressions(_add_cosines(x, rng), shape, rng, split), _OutOfBagForest(x, rng)]

    def join_models(self, fitted: Sequence[Table], split: str, view: View) -> dict[str, Tensor]:
        """Return log p(y | x) by split from the log probabilities of each model."""
        return {name: torch.stack([log_p[name].exp() for log_p in fitted]).mean(dim=0).log() for name in fitted[0]}


class ForestTraining(SelfTraining):
    """Label inference that also learns from rows without a known label, by randomized trees only.

    As ``self-training``, but p(y | x) comes from trees and is calibrated on the auxiliary rows, and z has the mean
    gradient of each third of training only: the effect of a class on gradients changes as the model learns. It departs
    from its start faster, which helps with many columns, or if few labels make the start poor.

    Source: as ``self-training``.

    Args:
        iterations: of expectation and maximization.
    """

    name = "forest-training"
    version = 15
    costs = "iterations forests on thousands of rows, after fusion"
    fails = "if classes are smooth functions of few columns, which trees approximate in steps"
    trust = 1.0
    every_table = False
    differs = (
        "The paper has naive Bayes on words. Here, classes have trees on tables that cover every split, and a Gaussian "
        "on tables that cover training rows only.",
        *SelfTraining.differs[1:],
    )

    def __init__(self, *, iterations: int = 5) -> None:
        super().__init__(iterations=iterations)

    def models(
        self, x: Table, shape: torch.Size, rng: torch.Generator, split: str
    ) -> list[_Regressions | _OutOfBagForest]:
        """Return trees."""
        return [_OutOfBagForest(x, rng)]

    def join_models(self, fitted: Sequence[Table], split: str, view: View) -> dict[str, Tensor]:
        """Return log p(y | x) by split, calibrated on the auxiliary rows."""
        (trees,) = fitted
        log_p = pool_opinions([Opinion(torch.cat(list(trees.values())), trees[split][view.aux_rows])], view.aux_labels)
        log_p = log_p.clamp_min(torch.finfo(log_p.dtype).tiny).log()
        return dict(zip(trees, torch.split(log_p, [len(rows) for rows in trees.values()]), strict=True))


def _add_cosines(x: Table, rng: torch.Generator) -> Table:
    """Return ``x`` with cosines of random projections as further columns."""
    width = next(iter(x.values())).shape[1]
    directions = torch.randn(width, N_COSINES, generator=rng, dtype=torch.float64) / width**0.5
    phase = 2 * torch.pi * torch.rand(N_COSINES, generator=rng, dtype=torch.float64)
    return {
        name: torch.cat([rows, torch.cos(rows @ directions.to(rows.device) + phase.to(rows.device))], dim=1)
        for name, rows in x.items()
    }


def _project_on_span(x: Table, split: str) -> Table:
    """Return ``x`` in coordinates of the span of the rows of ``split``, if these are fewer than its columns.

    With a penalty on squared slopes, no regression on these rows has a slope outside of it.
    """
    if len(x[split]) >= x[split].shape[1]:
        return x
    span = find_span(x[split].T)
    return {name: rows @ span for name, rows in x.items()}


def _whiten_tables(tables: list[Tensor], n: int) -> Tensor | None:
    """Return the principal components (n, r) of the tables side by side, each with variance one; None without any."""
    if not tables:
        return None
    z = torch.cat([standardize(table) for table in tables], dim=1)
    wide = z.shape[1] > n
    variances, axes = torch.linalg.eigh((z @ z.T if wide else z.T @ z) / n)
    kept = variances > 1e-6 * variances[-1].clamp_min(1e-12)
    whitened: Tensor = axes[:, kept] * n**0.5 if wide else z @ axes[:, kept] / variances[kept].sqrt()
    return whitened


def _log_density(z: Tensor | None, guessed: Tensor) -> Tensor:
    """Return log densities (n, C) of Gaussians with the guessed classes' means and one covariance; 0 without ``z``.

    The means for a row are those of the other rows. The columns of ``z`` (n, r) have no covariance, and variance one.
    """
    if z is None:
        return torch.zeros_like(guessed)
    counts, sums = guessed.sum(dim=0), guessed.T @ z  # (C,), (C, r)
    # The covariance is that of z, which is one, less that of the means. The inverse is by Woodbury's identity.
    ridge, covered = 1 + 1e-6, len(z) * torch.diag(counts.clamp_min(MIN_SHARE))
    weights = torch.linalg.solve(ridge * covered - sums @ sums.T, sums)  # (C, r)
    scaled = (z + (z @ sums.T) @ weights) / ridge
    # Without row i, a class has the mean m = (sums - g_i z_i) / (counts - g_i). This is z S^-1 m - m S^-1 m / 2,
    # expanded so that no tensor (n, C, r) is needed; z S^-1 z is the same for all classes.
    others = (counts - guessed).clamp_min(MIN_SHARE)
    square = (scaled * z).sum(dim=1, keepdim=True)  # (n, 1)
    cross = scaled @ sums.T  # (n, C)
    squared = (guessed * cross).sum(dim=0) - 2 * guessed * cross + guessed.square() * square
    density: Tensor = (cross - guessed * square) / others - squared / others.square() / 2
    return density


class _Regressions:
    """Softmax regressions on (n, k), each fitted to all folds but one, which it then predicts.

    All are fitted at once, in coordinates in which the curvature of the loss is about the same in every direction, so
    that the search takes few steps.
    """

    def __init__(self, x: Table, shape: torch.Size, rng: torch.Generator, split: str) -> None:
        n, n_classes = shape
        device = x[split].device
        self.fold = torch.randint(N_FOLDS, (n,), generator=rng).to(device)
        self.order = torch.randperm(n, generator=rng)[:MAX_REGRESSION_ROWS].to(device)
        x = _project_on_span(x, split)
        with_bias = {name: F.pad(rows, (0, 1), value=1.0) for name, rows in x.items()}
        fitted = with_bias[split][self.order]
        self.penalty = torch.full((fitted.shape[1],), PENALTY, dtype=fitted.dtype, device=device)
        self.penalty[-1] = 0
        curvature = fitted.T @ fitted / len(fitted) / 4 + torch.diag(2 * self.penalty)
        self.axes = torch.linalg.inv(torch.linalg.cholesky(curvature + 1e-9 * torch.eye(len(curvature)).to(curvature)))
        self.x = {name: rows @ self.axes.T for name, rows in with_bias.items()}
        self.coefficients = torch.zeros(N_FOLDS * n_classes, len(curvature), dtype=fitted.dtype, device=device)

    def fit(self, guessed: Tensor, weight: Tensor, split: str, known: Tensor, *, last: bool) -> Table:
        """Fit to guesses (n, C) of ``split``; return log probabilities of it, the last time of all splits."""
        n_classes = guessed.shape[1]
        rows = torch.unique(torch.cat([self.order, known]))
        # (n, N_FOLDS)
        inside = weight[rows, None] * (self.fold[rows, None] != torch.arange(N_FOLDS, device=rows.device))
        share = (inside / inside.sum(dim=0))[:, :, None] * guessed[rows, None, :]
        self.coefficients = self._minimize_loss(self.x[split][rows], share)
        predicted = {}
        for name in self.x if last else [split]:
            x = self.x[name]
            logits = (x @ self.coefficients.T).view(len(x), N_FOLDS, n_classes)
            log_p = torch.log_softmax(logits, dim=2)
            held_out = (torch.arange(len(self.fold), device=log_p.device), self.fold)
            predicted[name] = log_p[held_out] if name == split else log_p.mean(dim=1)
        return predicted

    def _minimize_loss(self, x: Tensor, share: Tensor) -> Tensor:
        """Return coefficients (N_FOLDS C, k) fitted to ``share`` (n, N_FOLDS, C), from those of the iteration before.

        For each fold, ``share`` sums to one, and the loss is the cross-entropy with a penalty on the slopes.
        """
        coefficients = self.coefficients.clone().requires_grad_()
        of_row = share.sum(dim=2, keepdim=True)
        penalty = (self.axes * self.penalty) @ self.axes.T
        optimizer = torch.optim.LBFGS([coefficients], max_iter=LBFGS_STEPS, line_search_fn="strong_wolfe")

        @torch.no_grad()
        def loss() -> Tensor:
            log_p = torch.log_softmax((x @ coefficients.T).view_as(share), dim=2)
            penalized = coefficients @ penalty
            coefficients.grad = (of_row * log_p.exp() - share).flatten(1).T @ x + 2 * penalized
            value: Tensor = (penalized * coefficients).sum() - (share * log_p).sum()
            return value

        optimizer.step(loss)  # type: ignore[no-untyped-call]
        return coefficients.detach()


class _OutOfBagForest:
    """Randomized trees, with out-of-bag probabilities of the rows to which they are fitted."""

    def __init__(self, x: Table, rng: torch.Generator) -> None:
        self.x = {name: rows.float().cpu().numpy() for name, rows in x.items()}
        self.rng = rng

    def fit(self, guessed: Tensor, weight: Tensor, split: str, known: Tensor, *, last: bool) -> Table:
        """Fit to guesses (n, C) of ``split``; return log probabilities of it, the last time of all splits."""
        order = torch.randperm(len(guessed), generator=self.rng)[:MAX_FOREST_ROWS]
        rows = torch.unique(torch.cat([order, known.cpu()])).numpy()
        seed = int(torch.randint(2**31, (), generator=self.rng))
        # a row of large weight may be in every sample: its probabilities are 0
        trees, left_out = fit_out_of_bag(
            self.x[split][rows], guessed.cpu().numpy()[rows], seed,
            share="sqrt", weights=weight.cpu().numpy()[rows], trees=None if last else EARLY_TREES,
        )  # fmt: skip
        others = np.setdiff1d(np.arange(len(guessed)), rows)
        predicted = {name: trees.predict(self.x[name]) for name in self.x if last and name != split}
        predicted[split] = np.empty(guessed.shape)
        predicted[split][rows] = left_out
        if len(others):
            predicted[split][others] = trees.predict(self.x[split][others])
        shares = {name: torch.as_tensor(p).clamp_min(MIN_SHARE) for name, p in predicted.items()}
        return {name: (p / p.sum(dim=1, keepdim=True)).log().to(guessed.device) for name, p in shares.items()}
