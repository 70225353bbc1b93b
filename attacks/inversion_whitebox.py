"""White-box inversion: the columns that the victim's own bottom model turns into what it sent."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from sklearn.covariance import LedoitWolf
from sklearn.linear_model import RidgeCV
from torch import Tensor, nn

from vflsec.attacks.imputation import Imputation, on_simplex
from vflsec.core.attack import Attack
from vflsec.core.checks import positive, positive_or_none
from vflsec.core.errors import InsufficientView
from vflsec.core.message import Kind
from vflsec.core.view import Guess, Need, View
from vflsec.inference.releases import averages, latest

EXACT = 1e-10
"""Least share of an embedding's variance that is taken for noise."""

CLOSER = 0.5
"""A map that leaves less than this share of the error is taken for one that a protocol has applied."""

SETTLED = 0.01
"""A step that lowers what is minimized by a smaller share is a row's last; so many rows may not have come to it."""

SHORTEST = 1 / 32
"""A row whose step had to be halved to this stays where it is."""


class WhiteBoxInversion(Attack):
    """Recovery of the victim's columns through its bottom model f, which the adversary knows.

    For each row the x (d,) that minimizes ||(f(x) - h) / s||^2 + (x - m)^T C^-1 (x - m), h being what was received: the
    likeliest one under Gaussian noise and a Gaussian prior. Auxiliary rows tell all three: m is what ``imputation``
    makes of own columns, C the covariance of what that misses (shrunk, Ledoit and Wolf), s^2 the error of f on rows
    whose columns are known, and so of any defense. Without them m = 0, C = 1 and s is next to nothing: of all x that
    explain h, one near the mean.

    Of training rows h is the mean of the last 1, 3 or 10 releases, whichever f is nearest to on auxiliary rows: over
    several, noise averages out, but the earlier ones are of an earlier f. Of test rows it is the one release at
    prediction; s is measured for either.

    A protocol may hand on a linear map of the embedding in its place (scores h W, where the head is encrypted) that
    neither party knows. Where an affine map fitted to auxiliary rows, which ridge regression judges on each row left
    out, comes much closer to what was received than f itself, f is followed by it.

    Minimized by Gauss and Newton for all rows at once, in the coordinates where C is the identity:

        A = f'(x) L / s,   r = (h - f(x)) / s + A u,   x = m + L u,   u <- A^T (A A^T + 1)^-1 r

    with the step halved for each row where it does not lower the sum. One-hot columns are then projected onto the
    simplex.

    Costs seconds: each of the few steps takes as many backward passes as the embedding (n, k) is wide; a gradient
    method needs hundreds. Exact for a linear bottom model that is injective, given no auxiliary rows or all noise
    absent.

    Fails where f discards columns, for then the prior alone speaks; and where f is so folded that a row has several
    preimages of equal prior.

    Source: He et al., ACSAC 2019, "Model inversion attacks against collaborative inference", section 4 (white box,
    gradient descent on ||f(x) - h||^2 and a prior); the prior and the solver are ours.

    Args:
        victim: whose columns; None for the first passive party.
        steps: at most.
        rows: treated at once; bounds the memory.
        turns: of how many last releases of a training row the mean is taken; None for the best of 1, 3 and 10, and for
            one below three auxiliary rows.
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
        "The mean of several releases of a training row is read (turns); the source sends each input once.",
    )
    version = 3

    def __init__(
        self, *, victim: str | None = None, steps: int = 20, rows: int = 8192, turns: int | None = None
    ) -> None:
        positive(steps=steps, rows=rows)
        positive_or_none(turns=turns)
        self.victim = victim
        self.steps = steps
        self.rows = rows
        self.turns = turns

    def alone(self) -> Attack | None:
        """Return imputation: without the federation own columns are all there is."""
        return Imputation(victim=self.victim)

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return the columns (n, d) of every row of which an embedding was received."""
        assert view.victim_model is not None
        f = view.victim_model.double().eval().requires_grad_(False)
        received = {split: h.double() for split, h in latest(view, Kind.EMBEDDING, sender=view.victim).items()}
        f = _as_received(f, view, received)
        noise = {split: self._noise(view, f, received.get(view.aux_split), h) for split, h in received.items()}
        if view.aux_split in received:
            best = received[view.aux_split] = self._averaged(view, f)
            noise[view.aux_split] = self._noise(view, f, best, best)
        prior = self._prior(view, received, noise, rng)
        found, unsettled = {}, 0
        for split, h in received.items():
            chunks = zip(torch.split(h, self.rows), torch.split(prior.mean[split], self.rows), strict=True)
            solved = [self._invert(f, part, Expected(mean, prior.root, prior.noise[split])) for part, mean in chunks]
            found[split] = on_simplex(torch.cat([x for x, _ in solved]), view.layout)
            unsettled += sum(count for _, count in solved)
        return Guess(
            found, converged=unsettled <= SETTLED * sum(len(h) for h in received.values()), budget={"steps": self.steps}
        )

    def _averaged(self, view: View, f: nn.Module) -> Tensor:
        """Return what was received (n, k) of training rows: the mean of so many releases as f is nearest to."""
        means = [h.double() for h in averages(view, Kind.EMBEDDING, sender=view.victim, turns=self.turns)]
        if len(means) == 1 or len(view.aux_rows) < 3:
            return means[0]
        sent = f(view.aux_labels.double())
        return min(means, key=lambda h: (sent - h[view.aux_rows]).square().mean().item())

    def _noise(self, view: View, f: nn.Module, heard: Tensor | None, h: Tensor) -> Tensor:
        """Return the deviation (k,) of noise on h (n, k): of what was ``heard`` of rows whose columns are known."""
        spread = h.var(dim=0, correction=0)
        least = EXACT * spread.mean().clamp_min(1e-12)
        if len(view.aux_rows) < 3 or heard is None:
            return least.expand_as(spread).sqrt()
        error: Tensor = f(view.aux_labels.double()) - heard[view.aux_rows]
        return error.square().mean(dim=0).clamp_min(least).sqrt()

    def _prior(self, view: View, received: dict[str, Tensor], noise: dict[str, Tensor], rng: torch.Generator) -> Prior:
        first, d, n_aux = next(iter(received.values())), view.n_classes, len(view.aux_rows)
        where = first.device
        if n_aux < 3 or view.aux_split not in received:
            means = {split: torch.zeros(len(h), d, dtype=h.dtype, device=where) for split, h in received.items()}
            return Prior(means, torch.eye(d, dtype=first.dtype, device=where), noise)
        folds = torch.randperm(n_aux, generator=rng) % min(5, n_aux)  # what imputation misses of rows not fitted
        guessed = Imputation().run(view, rng=rng).scores
        missed = torch.empty(n_aux, d, dtype=torch.float64)
        for k in range(int(folds.max()) + 1):
            scores = Imputation().run(view.knowing(torch.nonzero(folds != k)[:, 0]), rng=rng).scores[view.aux_split]
            held_out = folds == k
            missed[held_out] = (view.aux_labels.cpu() - scores[view.aux_rows.cpu()])[held_out]
        covariance = LedoitWolf(assume_centered=True).fit(missed.numpy()).covariance_
        root = torch.from_numpy(np.linalg.cholesky(covariance + 1e-9 * np.eye(d))).to(where)
        means = {split: guessed[split].double().to(where) for split in received}
        return Prior(means, root, noise)

    def _invert(self, f: nn.Module, h: Tensor, prior: Expected) -> tuple[Tensor, int]:
        """Return x (n, d), and how many rows had not settled when the steps were over."""
        u = torch.zeros_like(prior.mean)
        value, length = _objective(f, h, prior, u), u.new_ones(len(u))
        open_ = torch.arange(len(u), device=u.device)
        for _ in range(self.steps):
            at = u[open_]
            here = prior._replace(mean=prior.mean[open_])
            tried = at + length[open_, None] * (_gauss_newton(f, h[open_], here, at) - at)
            new = _objective(f, h[open_], here, tried)
            gain = value[open_] - new
            better = gain > 0
            settled = better & (gain < SETTLED * value[open_])
            u[open_], value[open_] = torch.where(better[:, None], tried, at), torch.minimum(new, value[open_])
            length[open_] = torch.where(better, (2 * length[open_]).clamp_max(1), length[open_] / 2)
            open_ = open_[~settled & (length[open_] > SHORTEST)]
            if len(open_) == 0:
                break
        return prior.mean + u @ prior.root.T, len(open_)


class Prior(NamedTuple):
    """What is expected of rows: means (n, d) by split, C = L L^T as L (d, d), deviations (k,) of noise by split."""

    mean: dict[str, Tensor]
    root: Tensor
    noise: dict[str, Tensor]


class Expected(NamedTuple):
    """The same of some rows of one split."""

    mean: Tensor
    root: Tensor
    noise: Tensor


def _objective(f: nn.Module, h: Tensor, prior: Expected, u: Tensor) -> Tensor:
    """Return what is minimized, (n,)."""
    with torch.no_grad():
        misfit = (f(prior.mean + u @ prior.root.T) - h) / prior.noise
        total: Tensor = misfit.square().sum(dim=1) + u.square().sum(dim=1)
        return total


def _gauss_newton(f: nn.Module, h: Tensor, prior: Expected, u: Tensor) -> Tensor:
    """Return the minimum (n, d) of what is minimized if f were linear around ``u``."""
    u = u.clone().requires_grad_()
    scaled = f(prior.mean + u @ prior.root.T) / prior.noise  # (n, k)
    rows = [torch.autograd.grad(scaled[:, j].sum(), u, retain_graph=True)[0] for j in range(scaled.shape[1])]
    a = torch.stack(rows, dim=1)  # (n, k, d)
    u = u.detach()
    r = (h / prior.noise - scaled.detach())[:, :, None] + a @ u[:, :, None]  # (n, k, 1)
    k, d = a.shape[1:]
    if k <= d:
        found: Tensor = a.mT @ torch.linalg.solve(a @ a.mT + torch.eye(k, dtype=a.dtype, device=a.device), r)
    else:
        found = torch.linalg.solve(a.mT @ a + torch.eye(d, dtype=a.dtype, device=a.device), a.mT @ r)
    return found[:, :, 0]


def _as_received(f: nn.Module, view: View, received: dict[str, Tensor]) -> nn.Module:
    """Return what turns columns into what was received: f, or f and an affine map."""
    known, width = view.aux_labels.double(), next(iter(received.values())).shape[1]
    sent = f(known) if len(known) else f(torch.zeros(1, view.n_classes, dtype=torch.float64))
    same = sent.shape[1] == width
    if len(known) < 3 or view.aux_split not in received:
        if not same:
            raise InsufficientView(
                f"expected embeddings of width {sent.shape[1]}, got {width}: a protocol maps them, and auxiliary rows "
                "tell how; set aux.n to 3 or more"
            )
        return f
    heard = received[view.aux_split][view.aux_rows]
    ridge = RidgeCV(alphas=np.logspace(-6, 2, 9)).fit(sent.cpu().numpy(), heard.cpu().numpy())
    if same and -ridge.best_score_ >= CLOSER * float((sent - heard).square().mean()):
        return f
    linear = nn.Linear(sent.shape[1], width, dtype=torch.float64, device=sent.device).requires_grad_(False)
    linear.weight.copy_(torch.as_tensor(np.atleast_2d(ridge.coef_)))
    linear.bias.copy_(torch.as_tensor(ridge.intercept_))
    return nn.Sequential(f, linear)
