"""White-box inversion: the columns from which the victim's bottom model computes the embeddings that it sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from sklearn.covariance import LedoitWolf
from sklearn.linear_model import RidgeCV
from torch import Tensor, nn

from vflsec.attacks.imputation import Imputation
from vflsec.base.checks import check_positive, check_positive_or_none
from vflsec.base.errors import InsufficientView
from vflsec.core.attack import Attack
from vflsec.core.message import Kind
from vflsec.core.view import Guess, Need, View
from vflsec.inference.regression import project_categories, regress_columns
from vflsec.inference.releases import average, read_last_values

EXACT = 1e-10
"""Smallest noise variance, as a share of the variance of an embedding."""

CLOSER = 0.5
"""An affine map is added to f if it leaves less than this share of f's squared error."""

MIN_GAIN = 0.01
"""A row is done after a step that lowers its objective by a smaller share; so many rows may be left over."""

SHORTEST = 1 / 32
"""A row is done once its step has been halved to this length."""

MIN_AUX_ROWS = 3
"""Auxiliary rows that the noise, the prior and an affine map take."""


@dataclass(kw_only=True, eq=False, repr=False)
class WhiteBoxInversion(Attack):
    """Recovery of the victim's columns through its bottom model f, which the adversary knows.

    For each row, the guess is the x (d,) that minimizes ||(f(x) - h) / s||^2 + (x - m)^T C^-1 (x - m), where h (k,) is
    the received embedding. It is the most likely x under Gaussian noise and a Gaussian prior. Auxiliary rows give all
    three parameters: m is the guess of ``imputation`` from own columns, C is the covariance of its error (shrunk,
    Ledoit and Wolf), and s^2 is the squared error of f, which includes the noise of any defense. With fewer than three
    auxiliary rows, m = 0, C = 1 and s is close to zero, so that the guess is an x close to the mean with f(x) = h.

    For training rows, h is the mean of the last 1, 3 or 10 releases, whichever is closest to f on auxiliary rows: noise
    averages out, but earlier releases come from an earlier f. For test rows, h is the one release at prediction, with
    an s of its own.

    A protocol may send a linear map of the embedding that neither party knows (scores h W, if the head is encrypted).
    If an affine map of f(x), fitted to auxiliary rows, has a much smaller leave-one-out error than f itself, the attack
    uses f followed by that map.

    The solver is Gauss-Newton for all rows at once, in coordinates u in which C is the identity:

        A = f'(x) L / s,   r = (h - f(x)) / s + A u,   x = m + L u,   u <- A^T (A A^T + 1)^-1 r

    A row's step is halved if it does not lower the objective. One-hot columns are projected onto the simplex. The
    result is exact for a linear injective bottom model without noise.

    Source: He et al., ACSAC 2019, "Model inversion attacks against collaborative inference", section 4 (white box,
    gradient descent on ||f(x) - h||^2 and a prior); the prior and the solver are ours.

    Args:
        victim: whose columns; None for the first passive party.
        steps: largest number of Gauss-Newton steps.
        rows: number of rows that are solved at once; it bounds the memory.
        releases: number of last releases of a training row that are averaged; None for the best of 1, 3 and 10, and
            for 1 with fewer than three auxiliary rows.
    """

    name = "inversion-whitebox"
    side = "active"
    target = "features"
    needs = frozenset({Need.EMBEDDINGS, Need.VICTIM_MODEL})
    reference = "He et al., ACSAC 2019, section 4"
    verified = "exact on injective linear bottom models; figures of the source: unverified"
    differs = (
        "The prior is a Gaussian fitted to auxiliary rows; the source has total variation of images.",
        "The solver is Gauss and Newton's; the source has gradient descent.",
        "The mean of several releases of a training row is read (releases); the source sends each input once.",
    )
    version = 5
    costs = "steps x k backward passes, k the width of the embedding; gradient descent needs many more"
    fails = "if f discards columns, which leaves the prior only, or if several x of equal prior have the same embedding"

    victim: str | None = None
    steps: int = 20
    rows: int = 8192
    releases: int | None = None

    def __post_init__(self) -> None:
        check_positive(steps=self.steps, rows=self.rows)
        check_positive_or_none(releases=self.releases)

    def alone(self) -> Attack:
        """Return imputation: without the federation, the adversary has own columns only."""
        return Imputation(victim=self.victim)

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return the columns (n, d) of every split with received embeddings."""
        assert view.victim_model is not None
        model = view.victim_model.double().eval().requires_grad_(False)
        received = {
            split: h.double() for split, h in read_last_values(view, Kind.EMBEDDING, sender=view.victim).items()
        }
        single = received.get(view.aux_split)
        f = _as_received(model, view, single, width=next(iter(received.values())).shape[1])
        noise = {split: _estimate_noise(f, view, h, single) for split, h in received.items()}
        if single is not None:
            h = received[view.aux_split] = self._average_releases(f, view)
            noise[view.aux_split] = _estimate_noise(f, view, h, h)
        mean, root = _fit_prior(view, received, rng)
        guesses, unsettled = {}, 0
        for split, h in received.items():
            parts = zip(torch.split(h, self.rows), torch.split(mean[split], self.rows), strict=True)
            solved = [_minimize(Objective(f, part, m, root, noise[split]), self.steps) for part, m in parts]
            guesses[split] = project_categories(torch.cat([x for x, _ in solved]), view.layout)
            unsettled += sum(count for _, count in solved)
        converged = unsettled <= MIN_GAIN * sum(len(h) for h in received.values())
        return Guess(guesses, converged=converged, budget={"steps": self.steps})

    def _average_releases(self, f: nn.Module, view: View) -> Tensor:
        """Return the mean (n, k) of last releases that is closest to f on the auxiliary rows."""
        means = [h.double() for h in average(view, Kind.EMBEDDING, sender=view.victim, releases=self.releases)]
        if len(means) == 1 or len(view.aux_rows) < MIN_AUX_ROWS:
            return means[0]
        expected = f(view.aux_labels.double())
        return min(means, key=lambda h: (expected - h[view.aux_rows]).square().mean().item())


def _as_received(model: nn.Module, view: View, h: Tensor | None, width: int) -> nn.Module:
    """Return the map from columns to received values: the bottom model, or the model and an affine map.

    ``h`` (n, width) are received values of the split of the auxiliary rows, or None.
    """
    known = view.aux_labels.double()
    expected = model(known) if len(known) else model(torch.zeros(1, view.n_classes, dtype=torch.float64))
    same_width = expected.shape[1] == width
    if len(known) < MIN_AUX_ROWS or h is None:
        if not same_width:
            raise InsufficientView(
                f"expected embeddings of width {expected.shape[1]}, got {width}: a protocol maps them, and auxiliary "
                "rows tell how; set aux.n to 3 or more"
            )
        return model
    h = h[view.aux_rows]
    ridge = RidgeCV(alphas=np.logspace(-6, 2, 9)).fit(expected.cpu().numpy(), h.cpu().numpy())
    if same_width and -ridge.best_score_ >= CLOSER * float((expected - h).square().mean()):
        return model
    linear = nn.Linear(expected.shape[1], width, dtype=torch.float64, device=h.device).requires_grad_(False)
    linear.weight.copy_(torch.as_tensor(np.atleast_2d(ridge.coef_)))
    linear.bias.copy_(torch.as_tensor(ridge.intercept_))
    return nn.Sequential(model, linear)


def _estimate_noise(f: nn.Module, view: View, h: Tensor, known: Tensor | None) -> Tensor:
    """Return the standard deviation (k,) of the noise on ``h`` (n, k).

    It is the error of f on the auxiliary rows, whose received values are rows of ``known``, or close to zero without.
    """
    variance = h.var(dim=0, correction=0)
    least = EXACT * variance.mean().clamp_min(1e-12)
    if len(view.aux_rows) < MIN_AUX_ROWS or known is None:
        return least.expand_as(variance).sqrt()
    error: Tensor = f(view.aux_labels.double()) - known[view.aux_rows]
    return error.square().mean(dim=0).clamp_min(least).sqrt()


def _fit_prior(view: View, received: dict[str, Tensor], rng: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Return the prior's means (n, d) by split, and L (d, d) of its covariance C = L L^T.

    The means are imputation's guess, the covariance is that of its error on auxiliary rows that are left out.
    """
    first, d, n_aux = next(iter(received.values())), view.n_classes, len(view.aux_rows)
    where = first.device
    if n_aux < MIN_AUX_ROWS or view.aux_split not in received:
        means = {split: torch.zeros(len(h), d, dtype=h.dtype, device=where) for split, h in received.items()}
        return means, torch.eye(d, dtype=first.dtype, device=where)
    columns = [dict(view.features)]
    folds = torch.randperm(n_aux, generator=rng) % min(5, n_aux)
    guessed = regress_columns(columns, view, rng=rng).scores
    errors = torch.empty(n_aux, d, dtype=torch.float64)
    for k in range(int(folds.max()) + 1):
        fitted = view.restrict(torch.nonzero(folds != k)[:, 0])
        scores = regress_columns(columns, fitted, rng=rng).scores[view.aux_split]
        errors[folds == k] = (view.aux_labels.cpu() - scores[view.aux_rows.cpu()])[folds == k]
    covariance = LedoitWolf(assume_centered=True).fit(errors.numpy()).covariance_
    root = torch.from_numpy(np.linalg.cholesky(covariance + 1e-9 * np.eye(d))).to(where)
    return {split: guessed[split].double().to(where) for split in received}, root


class Objective(NamedTuple):
    """The function ||(f(x) - h) / s||^2 + ||u||^2 of u (n, d), where x = m + L u, for n rows of one split.

    Attributes:
        f: maps columns (n, d) to received values (n, k).
        h: (n, k).
        mean: m (n, d).
        root: L (d, d).
        noise: s (k,).
    """

    f: nn.Module
    h: Tensor
    mean: Tensor
    root: Tensor
    noise: Tensor

    def select(self, rows: Tensor) -> Objective:
        """Return the objective of some rows."""
        return self._replace(h=self.h[rows], mean=self.mean[rows])

    def columns(self, u: Tensor) -> Tensor:
        """Return x (n, d)."""
        return self.mean + u @ self.root.T

    def value(self, u: Tensor) -> Tensor:
        """Return the value (n,) of each row."""
        with torch.no_grad():
            misfit = (self.f(self.columns(u)) - self.h) / self.noise
            total: Tensor = misfit.square().sum(dim=1) + u.square().sum(dim=1)
            return total

    def step_gauss_newton(self, u: Tensor) -> Tensor:
        """Return the minimum (n, d) for f linearized at ``u``."""
        u = u.clone().requires_grad_()
        scaled = self.f(self.columns(u)) / self.noise  # (n, k)
        rows = [torch.autograd.grad(scaled[:, j].sum(), u, retain_graph=True)[0] for j in range(scaled.shape[1])]
        a = torch.stack(rows, dim=1)  # (n, k, d)
        u = u.detach()
        r = (self.h / self.noise - scaled.detach())[:, :, None] + a @ u[:, :, None]  # (n, k, 1)
        k, d = a.shape[1:]
        identity = torch.eye(min(k, d), dtype=a.dtype, device=a.device)
        if k <= d:
            minimum: Tensor = a.mT @ torch.linalg.solve(a @ a.mT + identity, r)
        else:
            minimum = torch.linalg.solve(a.mT @ a + identity, a.mT @ r)
        return minimum[:, :, 0]


def _minimize(objective: Objective, steps: int) -> tuple[Tensor, int]:
    """Return the columns x (n, d) of least value, and the number of rows that had not converged after ``steps``."""
    u = torch.zeros_like(objective.mean)
    value, length = objective.value(u), u.new_ones(len(u))
    rows = torch.arange(len(u), device=u.device)  # those that have not converged
    for _ in range(steps):
        here, at = objective.select(rows), u[rows]
        tried = at + length[rows, None] * (here.step_gauss_newton(at) - at)
        new = here.value(tried)
        gain = value[rows] - new
        better = gain > 0
        converged = better & (gain < MIN_GAIN * value[rows])
        u[rows], value[rows] = torch.where(better[:, None], tried, at), torch.minimum(new, value[rows])
        length[rows] = torch.where(better, (2 * length[rows]).clamp_max(1), length[rows] / 2)
        rows = rows[~converged & (length[rows] > SHORTEST)]
        if len(rows) == 0:
            break
    return objective.columns(u), len(rows)
