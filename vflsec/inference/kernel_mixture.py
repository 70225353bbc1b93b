"""Gaussian process regression on several tables, averaged over the subsets of tables to use."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from vflsec.inference.opinion_pool import TEMPERATURES
from vflsec.inference.regression import standardize

NOISE = torch.logspace(-4, 2, 13, dtype=torch.float64)
"""Candidate variances of the noise; a kernel has variance one."""

BEAM = 10
"""Number of subsets that the beam search extends by each further table."""

NEGLIGIBLE = 0.003
"""Candidates with a smaller share of the largest weight are dropped."""

HEAVIEST = 100
"""Candidates that are kept at most: where many tables say the same, the weights of hundreds are alike."""

SEARCHED = 400
"""Known rows on which tables are chosen at most; the chosen processes are fitted to all."""

CHUNK = 8192

Likelihood = Callable[[Tensor, Tensor], Tensor]
"""Maps predictions (candidates, n, d) for the known rows at positions (n,) to log likelihoods (candidates,)."""


class Kernel(NamedTuple):
    """A table of standardized numbers (n, k) and its kernel: linear, or Gaussian in the distance of two rows."""

    x: Tensor
    nonlinear: bool = False

    def compute_similarity(self, x: Tensor, known: Tensor) -> Tensor:
        """Return the similarity (a, b) of rows ``x`` (a, k) and ``known`` (b, k)."""
        return torch.exp(-torch.cdist(x, known).square() / 2) if self.nonlinear else x @ known.T

    def times(self, x: Tensor, known: Tensor, coefficients: Tensor) -> Tensor:
        """Return ``between(x, known) @ coefficients`` (a, d), in chunks that bound the memory."""
        if not self.nonlinear:
            return x @ (known.T @ coefficients)
        return torch.cat([self.compute_similarity(part, known) @ coefficients for part in torch.split(x, CHUNK)])


class Candidate(NamedTuple):
    """A Gaussian process: the names of the kernels that it averages, its noise variance, the log of its weight."""

    names: frozenset[str]
    noise: float
    score: float


class Mixture:
    """A weighted mean of Gaussian processes, each with the mean kernel of a subset of tables.

    A candidate is a subset and a noise variance. The log of its weight is the mean of the log marginal likelihood of
    one target (Rasmussen and Williams 2006, eq. 2.30, with the signal's variance profiled out) and the leave-one-out
    log likelihood (section 5.4.2). The first penalizes unnecessary tables, the second wrong predictions. The prior
    divides the weight by e for each further table. A beam search extends subsets, starting from single tables, as long
    as the best score rises.

    Args:
        kernels: by name.
        rows: (n,) positions of the known rows.
        targets: (n, d) of the known rows; they are centered here.
        likelihood: of leave-one-out predictions.
        rng: draws the rows for the search if there are more than ``SEARCHED``.
    """

    def __init__(
        self, kernels: Mapping[str, Kernel], rows: Tensor, targets: Tensor, likelihood: Likelihood, rng: torch.Generator
    ) -> None:
        self.kernels, self.likelihood = kernels, likelihood
        self.known = {name: kernel.x[rows] for name, kernel in kernels.items()}
        self.mean = targets.mean(dim=0)
        self.centered = targets - self.mean
        searched = torch.randperm(len(rows), generator=rng)[:SEARCHED].sort().values.to(rows.device)
        grams = {name: self._average_kernels([name], searched) for name in kernels}
        tried = self._search(grams, searched)
        weights = torch.softmax(torch.tensor([c.score for c in tried], dtype=torch.float64), dim=0)
        heaviest = sorted(zip(tried, weights.tolist(), strict=True), key=lambda pair: -pair[1])[:HEAVIEST]
        kept = [(c, w) for c, w in heaviest if w >= NEGLIGIBLE * heaviest[0][1]]
        total = sum(w for _, w in kept)
        self.candidates = [(c, w / total) for c, w in kept]
        self.n_tried = len(tried)
        self._grams: dict[frozenset[str], Tensor] = {}
        self.coefficients = self._get_coefficients()

    def predict(self, tables: Mapping[str, Tensor]) -> Tensor:
        """Return the mean prediction (m, d) for rows with the standardized ``tables`` (m, k), given by name."""
        return self.mean + self._weigh(tables, self.coefficients)

    def predict_without(self, parts: Sequence[Tensor], tables: Mapping[str, Tensor]) -> list[Tensor]:
        """Return for each of ``parts`` (n,) the prediction as in ``predict`` without the known rows where it is true.

        Candidates keep their weights.
        """
        fitted = [self._get_coefficients(~part) for part in parts]
        together = {
            name: torch.cat([coefficients[name] for coefficients in fitted], dim=1) for name in self.coefficients
        }
        predicted = torch.split(self._weigh(tables, together), len(self.mean), dim=1)
        return [x + self.mean for x in predicted]

    def _weigh(self, tables: Mapping[str, Tensor], coefficients: Mapping[str, Tensor]) -> Tensor:
        """Return the sum (m, d) over known rows of similarities times coefficients."""
        total = sum(c.sum(dim=0) for c in coefficients.values())
        for name, part in coefficients.items():
            total = total + self.kernels[name].times(tables[name], self.known[name], part)
        return torch.as_tensor(total)

    def predict_left_out(self) -> Tensor:
        """Return the leave-one-out prediction (n, d) of the known rows; candidates keep their weights."""
        prediction = torch.zeros_like(self.centered)
        for (names, noise, _), weight in self.candidates:
            inverse = torch.linalg.inv(self._regularize(names, noise))
            prediction += weight * (self.centered - inverse @ self.centered / inverse.diagonal()[:, None])
        return prediction + self.mean

    def _regularize(self, names: frozenset[str], noise: float) -> Tensor:
        """Return the mean kernel (n, n) of all known rows plus the noise variance on the diagonal."""
        everything = torch.arange(len(self.centered), device=self.centered.device)
        if names not in self._grams:
            self._grams[names] = self._average_kernels(sorted(names), everything)
        return self._grams[names] + noise * torch.eye(len(everything), dtype=torch.float64, device=everything.device)

    def _average_kernels(self, names: Sequence[str], rows: Tensor) -> Tensor:
        """Return the mean kernel (n, n) of some known rows, plus one for an unknown constant."""
        parts = [self.kernels[n].compute_similarity(self.known[n][rows], self.known[n][rows]) for n in names]
        return torch.stack(parts).mean(dim=0) + 1

    def _search(self, grams: Mapping[str, Tensor], rows: Tensor) -> list[Candidate]:
        """Return every candidate of the beam search."""
        candidates: list[Candidate] = []
        level, best = [frozenset({name}) for name in grams], -float("inf")
        while level:
            tried = [self._score(names, grams, rows) for names in level]
            candidates += chain.from_iterable(tried)
            reached = {group[0].names: max(candidate.score for candidate in group) for group in tried}
            before, best = best, max(best, *reached.values())
            if len(level[0]) > 2 and best == before:  # pairs are always tried
                break
            beam = sorted(reached, key=lambda names: -reached[names])[: BEAM if len(level[0]) > 1 else None]
            level = list(dict.fromkeys(names | {name} for names in beam for name in grams if name not in names))
        return candidates

    def _score(self, names: frozenset[str], grams: Mapping[str, Tensor], rows: Tensor) -> list[Candidate]:
        """Return a candidate with these kernels for each noise variance."""
        values, vectors = torch.linalg.eigh(torch.stack([grams[name] for name in sorted(names)]).mean(dim=0))
        noise = NOISE.to(values.device)
        inverse = 1 / (values.clamp_min(0) + noise[:, None])  # (noises, n)
        targets = self.centered[rows]
        rotated = vectors.T @ targets  # (n, d)
        explained = (rotated.square().sum(dim=1) * inverse).sum(dim=1).clamp_min(torch.finfo(values.dtype).tiny)
        evidence = -(len(rows) * explained.log() - inverse.log().sum(dim=1)) / 2
        solved = vectors @ (rotated * inverse[:, :, None])  # (noises, n, d)
        diagonal = vectors.square() @ inverse.T  # (n, noises), of each inverse
        left_out = targets - solved / diagonal.T[:, :, None]
        scores = (evidence + self.likelihood(left_out + self.mean, rows)) / 2 - (len(names) - 1)
        return [Candidate(names, *pair) for pair in zip(noise.tolist(), scores.tolist(), strict=True)]

    def _get_coefficients(self, used: Tensor | None = None) -> dict[str, Tensor]:
        """Return the coefficients (n, d) of each kernel's similarities to the known rows, by name.

        Those of rows where ``used`` (n,) is false are zero.
        """
        coefficients: dict[str, Tensor] = {}
        rows = torch.nonzero(torch.ones(len(self.centered)) if used is None else used)[:, 0].to(self.centered.device)
        for (names, noise, _), weight in self.candidates:
            regular = self._regularize(names, noise)[rows[:, None], rows]
            solved = torch.zeros_like(self.centered)
            solved[rows] = weight / len(names) * torch.linalg.solve(regular, self.centered[rows])
            for name in sorted(names):  # in any process the same order, and so the same rounding
                coefficients[name] = coefficients.get(name, 0) + solved
        return coefficients


def score_classes(labels: Tensor) -> Likelihood:
    """Return the log likelihood of classes, whose logits are predictions times the best of ``TEMPERATURES``."""

    def likelihood(predicted: Tensor, rows: Tensor) -> Tensor:
        log_p = torch.log_softmax(TEMPERATURES.to(predicted.device)[:, None, None, None] * predicted, dim=3)
        of_class = log_p.gather(3, labels[rows].expand(*log_p.shape[:2], -1)[..., None])
        return of_class.sum(dim=(2, 3)).amax(dim=0)

    return likelihood


def scale_rows(x: Tensor, reference: Tensor) -> Tensor:
    """Return ``x`` (m, k), standardized by ``reference`` (n, k), so that a row has a squared norm of about 1.

    Columns that are constant in ``reference`` are dropped.
    """
    varying = (reference != reference[:1]).any(dim=0)
    units: Tensor = standardize(x[:, varying], reference[:, varying]) / int(varying.sum()) ** 0.5
    return units
