"""Self-training: labels guessed from what was received about all rows teach a model of own columns, and so on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from vflsec.attacks.fusion import EVERYTHING, Fusion

from vflsec.core.attack import Attack
from vflsec.core.checks import positive
from vflsec.core.sources import Source, sources
from vflsec.core.view import Guess, Need, View

WEIGHT = 3.0
"""How much more an auxiliary row counts than one whose label is guessed."""

WAVES = 100
"""Random features of what is known of every split, by which the model of classes becomes nonlinear."""

FITTED = 20_000
"""Rows that the model of classes is fitted to, at most."""

PENALTY = 1e-3


class SelfTraining(Attack):
    """Label inference that also learns from rows without a known label, by expectation maximization.

    It starts from ``fusion``. Then, in turns, a softmax regression p(y | x) is fitted to the guessed labels of all
    training rows, x what is held of every split (own columns, embeddings); and the tables z that cover training rows
    alone, such as received gradients, get a Gaussian for each class, with one covariance. A row's guess is p(y | x)
    times the density of its z. So gradients of thousands of rows teach a model that also guesses rows of which nothing
    was received.

    Costs seconds. Fails where ``fusion`` knows so little that guessed labels confirm themselves.

    Source: Nigam et al. 2000, "Text classification from labeled and unlabeled documents using EM", Machine Learning 39;
    random features: Rahimi and Recht 2007.

    Args:
        turns: of expectation and maximization.
    """

    name = "self-training"
    needs = frozenset({Need.OWN_FEATURES, Need.AUX_LABELS})
    wants = EVERYTHING
    reference = "Nigam et al. 2000, Machine Learning 39, by expectation maximization"
    differs: ClassVar[tuple[str, ...]] = (
        "The paper has naive Bayes on words. Here classes have a softmax regression on what is held of every split, "
        "and a Gaussian on what is held of training rows alone.",
        "Guesses start from fusion, not from a model of the known labels alone.",
    )
    verified = "the Bayes rule of a Gaussian world"

    def __init__(self, *, turns: int = 8) -> None:
        positive(turns=turns)
        self.turns = turns

    def alone(self) -> Attack:
        """Return the same attack, which then has nothing but the adversary's own columns."""
        return self

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return log posteriors (n, C), up to a constant of each row, for every split."""
        held = sources(view)
        shared = {name: source for name, source in held.items() if view.features.keys() <= source.table.keys()}
        received = {name: source for name, source in held.items() if name not in shared}
        split, known = view.aux_split, F.one_hot(view.aux_labels, view.n_classes).double()
        start = Fusion().run(view, rng=rng).scores[split].clamp_min(1e-3)
        guessed = start / start.sum(dim=1, keepdim=True)
        x = _features(view, shared, rng)
        z = _whitened([source.table[split] for source in received.values()], len(guessed))
        weight = torch.ones(len(guessed), dtype=torch.float64, device=guessed.device)
        weight[view.aux_rows] = WEIGHT
        fitted = torch.randperm(len(guessed), generator=rng)[:FITTED].to(guessed.device)
        rows = torch.unique(torch.cat([fitted, view.aux_rows]))
        model = _Regression(torch.zeros(x[split].shape[1], view.n_classes), torch.zeros(view.n_classes))
        for _ in range(self.turns):
            guessed[view.aux_rows] = known
            model = model.fitted(x[split][rows], guessed[rows], weight[rows])
            found = model(x[split]) + _log_density(z, guessed)
            guessed = torch.softmax(found, dim=1)
        scores = {other: model(own) for other, own in x.items() if other != split}
        return Guess({split: found, **scores}, budget={"turns": self.turns})


def _features(view: View, shared: Mapping[str, Source], rng: torch.Generator) -> dict[str, Tensor]:
    """Return by split the standardized tables (n, k) side by side, and cosines of random projections of them."""
    split = view.aux_split
    whole = torch.cat([source.table[split].double() for source in shared.values()], dim=1)
    mean, deviation = whole.mean(dim=0), whole.std(dim=0, correction=0).clamp_min(1e-9)
    waves = torch.randn(whole.shape[1], WAVES, generator=rng, dtype=torch.float64) / whole.shape[1] ** 0.5
    phase = 2 * torch.pi * torch.rand(WAVES, generator=rng, dtype=torch.float64)
    found = {}
    for name in view.features:
        own = torch.cat([source.table[name].double() for source in shared.values()], dim=1)
        own = (own - mean) / deviation
        found[name] = torch.cat([own, torch.cos(own @ waves.to(own.device) + phase.to(own.device))], dim=1)
    return found


def _whitened(tables: list[Tensor], n: int) -> Tensor | None:
    """Return the principal components (n, r) of the tables side by side, each with variance one; None without any."""
    if not tables:
        return None
    z = torch.cat([table.double() for table in tables], dim=1)
    z = (z - z.mean(dim=0)) / z.std(dim=0, correction=0).clamp_min(1e-12)
    variances, axes = torch.linalg.eigh(z.T @ z / n)
    kept = variances > 1e-6 * variances[-1].clamp_min(1e-12)
    whitened: Tensor = z @ axes[:, kept] / variances[kept].sqrt()
    return whitened


def _log_density(z: Tensor | None, guessed: Tensor) -> Tensor:
    """Return log densities (n, C) of Gaussians with the guessed classes' means and one covariance; 0 without ``z``."""
    if z is None:
        return torch.zeros_like(guessed)
    means = (guessed.T @ z) / guessed.sum(dim=0).clamp_min(1e-9)[:, None]  # (C, r)
    within = (z.T @ z - (means.T * guessed.sum(dim=0)) @ means) / len(z)
    inverse = torch.linalg.inv(within + 1e-6 * torch.eye(z.shape[1], dtype=z.dtype, device=z.device))
    density: Tensor = z @ inverse @ means.T - ((means @ inverse) * means).sum(dim=1) / 2
    return density


class _Regression:
    """A softmax regression; called with (m, k), it returns log probabilities (m, C)."""

    def __init__(self, slope: Tensor, bias: Tensor) -> None:
        self.slope = slope
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return torch.log_softmax(x @ self.slope.to(x) + self.bias.to(x), dim=1)

    def fitted(self, x: Tensor, targets: Tensor, weight: Tensor) -> _Regression:
        """Return a regression fitted to probabilities (n, C) of rows x (n, k), each counted by ``weight`` (n,).

        It starts from this one: from turn to turn little changes.
        """
        x, share = x.float(), (weight / weight.sum()).float()[:, None] * targets.float()
        slope, bias = (own.detach().to(x).requires_grad_() for own in (self.slope, self.bias))
        optimizer = torch.optim.LBFGS([slope, bias], max_iter=30, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimizer.zero_grad()
            value = -(share * torch.log_softmax(x @ slope + bias, dim=1)).sum() + PENALTY * slope.square().sum()
            value.backward()  # type: ignore[no-untyped-call]
            return value

        optimizer.step(loss)  # type: ignore[no-untyped-call]
        return _Regression(slope.detach(), bias.detach())
