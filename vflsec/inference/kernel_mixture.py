"""Gaussian process regression on several tables at once, averaged over which of them to use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

NOISE = torch.logspace(-2, 2, 9, dtype=torch.float64)
"""Variances of the noise that are tried; a kernel has variance one."""

BEAM = 10
"""Subsets of tables that are extended by each further table."""

NEGLIGIBLE = 0.003
"""Candidates of a smaller weight are left out."""

SEARCHED = 400
"""Known rows on which tables are chosen; all of them are fitted."""

CHUNK = 8192

Likelihood = Callable[[Tensor, Tensor], Tensor]
"""Of predictions (candidates, n, d) for the known rows at positions (n,), the log likelihood (candidates,)."""


class Kernel(NamedTuple):
    """A table of standardized numbers (n, k), and whether similarity is linear or decays with the squared distance."""

    x: Tensor
    nonlinear: bool = False

    def between(self, x: Tensor, known: Tensor) -> Tensor:
        """Return the similarity (a, b) of rows ``x`` (a, k) and ``known`` (b, k)."""
        if not self.nonlinear:
            return x @ known.T
        return torch.exp(-torch.cdist(x, known).square() / 2)

    def times(self, x: Tensor, known: Tensor, coefficients: Tensor) -> Tensor:
        """Return ``between(x, known) @ coefficients`` (a, d) without holding all similarities at once."""
        if not self.nonlinear:
            return x @ (known.T @ coefficients)
        return torch.cat([self.between(part, known) @ coefficients for part in torch.split(x, CHUNK)])


class Candidate(NamedTuple):
    """One Gaussian process: the kernels whose mean it has, its noise variance, and the log of its weight."""

    names: frozenset[str]
    noise: float
    score: float


class Mixture:
    """Gaussian processes with the mean kernel of a subset of tables, averaged by how well each explains known rows.

    A candidate is a subset and a noise variance. The log of its weight is the mean of two: the log marginal likelihood
    of one target (Rasmussen and Williams 2006, eq. 2.30, with the signal's variance profiled out) and the leave-one-out
    log likelihood (section 5.4.2). The first punishes needless tables, the second wrong predictions. Each further table
    costs a factor e, the prior. Subsets grow from single tables by a beam search, for as long as a larger one scores
    better.

    Args:
        kernels: by name.
        rows: (n,) positions of the known rows.
        targets: (n, d) of these rows; they are centered here.
        likelihood: of leave-one-out predictions.
        rng: draws the rows that are searched, where there are many.
    """

    def __init__(
        self,
        kernels: Mapping[str, Kernel],
        rows: Tensor,
        targets: Tensor,
        likelihood: Likelihood,
        rng: torch.Generator,
    ) -> None:
        self.kernels = kernels
        self.known = {name: kernel.x[rows] for name, kernel in kernels.items()}
        self.mean = targets.mean(dim=0)
        self.centered = targets - self.mean
        searched = torch.randperm(len(rows), generator=rng)[:SEARCHED].sort().values.to(rows.device)
        grams = {name: self._gram([name], searched) for name in kernels}
        tried = self._search(grams, searched, likelihood)
        weights = torch.softmax(torch.tensor([c.score for c in tried], dtype=torch.float64), dim=0)
        kept = [(c, w) for c, w in zip(tried, weights.tolist(), strict=True) if w >= NEGLIGIBLE]
        total = sum(w for _, w in kept)
        self.candidates = [(c, w / total) for c, w in kept]
        self.n_tried = len(tried)
        self._grams: dict[frozenset[str], Tensor] = {}
        self.coefficients = self._coefficients()

    def predict(self, tables: Mapping[str, Tensor]) -> Tensor:
        """Return the mean prediction (m, d) for rows whose standardized tables (m, k) are given by name."""
        found = self.mean
        for name, coefficients in self.coefficients.items():
            found = found + self.kernels[name].times(tables[name], self.known[name], coefficients)
        return found + sum(c.sum(dim=0) for c in self.coefficients.values())

    def left_out(self) -> Tensor:
        """Return the mean prediction (n, d) for each known row from all others; candidates keep their weights."""
        found = torch.zeros_like(self.centered)
        for (names, noise, _), weight in self.candidates:
            inverse = torch.linalg.inv(self._regular(names, noise))
            found += weight * (self.centered - inverse @ self.centered / inverse.diagonal()[:, None])
        return found + self.mean

    def _regular(self, names: frozenset[str], noise: float) -> Tensor:
        """Return the mean kernel of all known rows with the noise, (n, n)."""
        everything = torch.arange(len(self.centered), device=self.centered.device)
        if names not in self._grams:
            self._grams[names] = self._gram(sorted(names), everything)
        return self._grams[names] + noise * torch.eye(len(everything), dtype=torch.float64, device=everything.device)

    def _gram(self, names: Sequence[str], rows: Tensor) -> Tensor:
        """Return the mean kernel (n, n) of some known rows; one is added for an unknown constant."""
        parts = [self.kernels[n].between(self.known[n][rows], self.known[n][rows]) for n in names]
        return torch.stack(parts).mean(dim=0) + 1

    def _search(self, grams: Mapping[str, Tensor], rows: Tensor, likelihood: Likelihood) -> list[Candidate]:
        """Return every candidate that was tried."""
        level, found, best = [frozenset({name}) for name in grams], [], -float("inf")
        while level:
            tried = [self._scored(names, grams, rows, likelihood) for names in level]
            found += [candidate for candidates in tried for candidate in candidates]
            reached = {c[0].names: max(one.score for one in c) for c in tried}
            before, best = best, max(best, *reached.values())
            if len(level[0]) > 2 and best == before:  # pairs are always tried
                break
            beam = sorted(reached, key=lambda names: -reached[names])[: BEAM if len(level[0]) > 1 else None]
            level = list(dict.fromkeys(names | {name} for names in beam for name in grams if name not in names))
        return found

    def _scored(
        self,
        names: frozenset[str],
        grams: Mapping[str, Tensor],
        rows: Tensor,
        likelihood: Likelihood,
    ) -> list[Candidate]:
        """Return a candidate for each noise variance."""
        values, vectors = torch.linalg.eigh(torch.stack([grams[name] for name in sorted(names)]).mean(dim=0))
        noise = NOISE.to(values.device)
        inverse = 1 / (values.clamp_min(0) + noise[:, None])  # (noises, n)
        targets = self.centered[rows]
        rotated = vectors.T @ targets  # (n, d)
        explained = (rotated.square().sum(dim=1) * inverse).sum(dim=1).clamp_min(torch.finfo(values.dtype).tiny)
        evidence = -(len(rows) * explained.log() - inverse.log().sum(dim=1)) / 2
        solved = vectors @ (rotated * inverse[:, :, None])  # (noises, n, d)
        own = vectors.square() @ inverse.T  # (n, noises): the diagonal of each inverse
        left_out = targets - solved / own.T[:, :, None]
        scores = (evidence + likelihood(left_out + self.mean, rows)) / 2 - (len(names) - 1)
        return [Candidate(names, *pair) for pair in zip(noise.tolist(), scores.tolist(), strict=True)]

    def _coefficients(self) -> dict[str, Tensor]:
        """Return what each kernel's similarities to the known rows are multiplied by, (n, d) by name."""
        found: dict[str, Tensor] = {}
        for (names, noise, _), weight in self.candidates:
            solved = weight / len(names) * torch.linalg.solve(self._regular(names, noise), self.centered)
            for name in names:
                found[name] = found.get(name, 0) + solved
        return found


def standardized(x: Tensor, reference: Tensor) -> Tensor:
    """Return ``x`` (m, k) by the means and deviations of ``reference`` (n, k), so that squares of a row sum to about 1.

    Columns that are the same in all of ``reference`` are left out.
    """
    reference, x = reference.double(), x.double()
    mean, deviation = reference.mean(dim=0), reference.std(dim=0, correction=0)
    varying = deviation > 1e-9 * deviation.max()
    scale: Tensor = deviation[varying] * int(varying.sum()) ** 0.5
    return (x[:, varying] - mean[varying]) / scale
