"""Whether vectors belong to the rows that are said to have them: held-out prediction against permuted controls."""

from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
Ints = NDArray[np.integer]

MAX_COMPONENTS = 8  # principal components of vectors that are predicted
CONTROLS = 199  # permutations, so that the smallest p-value is .005
RIDGES = (0.01, 1.0)  # of kernel ridge regressions, as multiples of the mean of the kernel's diagonal
ROUNDS = 6  # of regressions on the rows that the last one predicts well
MAX_FITTED_ROWS = 600  # rows that these regressions read; others are only predicted
# shares of the rows, of those whose predictions are most certain, in all of which other rows must show
SUREST = (0.15, 0.25, 0.5)


class HeldOutFit(NamedTuple):
    """How well columns predict vectors of the same rows.

    Attributes:
        r2: of held-out rows, by the regression that predicts best.
        p: of the hypothesis that all vectors are of other rows.
        correlation: of held-out predictions and vectors, by the regression that differs most from its controls.
        better: of each other alignment that predicts significantly better, the correlation.
        largest: of the correlations of single components, by the same regression.
    """

    r2: float
    p: float
    correlation: float
    better: Mapping[str, float]
    largest: float = 0.0


class RowMixture(NamedTuple):
    """A regression on the rows that fit each other.

    Attributes:
        r2: of held-out rows among those.
        others: the share of rows whose vectors are those of other rows, as it is estimated at least.
    """

    r2: float
    others: float


def clip_columns(values: Floats) -> Floats:
    """Return columns (n, d) that no few values decide: clipped at quantiles, then standardized; constants are 0."""
    x = np.asarray(values, dtype=np.float64)
    low, high = _find_ends(x)
    largest = np.abs(x).max(axis=0, initial=0.0)
    x = np.where(low < high, np.clip(x, low, high), x / np.maximum(largest, 1e-30))
    x = x - x.mean(axis=0)
    scale = x.std(axis=0)
    varies = scale > 1e-7 * np.where(low < high, np.maximum(np.abs(low), np.abs(high)), 1.0)
    return np.clip(np.where(varies, x / np.where(varies, scale, 1.0), 0.0), -10.0, 10.0)


def _find_ends(values: Floats) -> tuple[Floats, Floats]:
    """Return the quantiles (d,) at which columns are clipped, which 1 % of wild values cannot reach."""
    return np.quantile(values, 0.02, axis=0, method="higher"), np.quantile(values, 0.98, axis=0, method="lower")


def reduce(values: Floats) -> Floats:
    """Return the robust columns that vary, or their first principal components where they are many."""
    x = clip_columns(values)
    x = x[:, x.any(axis=0)]
    if x.shape[1] > MAX_COMPONENTS:
        u, s, _ = np.linalg.svd(x, full_matrices=False)
        x = u[:, :MAX_COMPONENTS] * s[:MAX_COMPONENTS]
    return x


COPIED = 0.9999
"""A larger correlation of a coordinate with a column makes it a copy."""


class ColumnRegression:
    """Regressions on the columns of n rows.

    A kernel ridge regression is linear in what it predicts. The leave-one-out predictions of any vectors, and of any
    permutation of them, are therefore one product of matrices.

    Args:
        values: (n, p).
        rng: of the permuted controls.
    """

    def __init__(self, values: Floats, rng: np.random.Generator) -> None:
        x = clip_columns(values)
        x = x[:, x.any(axis=0)]
        self.x, self.n, self._rng = x, len(x), rng

    @cached_property
    def kernels(self) -> list[Floats]:
        """A linear and a Gaussian kernel (n, n) whose diagonals are 1 on average."""
        gram = self.x @ self.x.T
        square = np.diag(gram)[:, None] + np.diag(gram)[None, :] - 2 * gram
        linear = gram + max(gram.trace() / self.n, 1e-12)  # with an intercept
        return [linear / (linear.trace() / self.n), np.exp(-square / max(float(np.median(square)), 1e-12))]

    @cached_property
    def smoothers(self) -> list[Floats]:
        """Matrices (n, n) that turn vectors into their leave-one-out predictions."""
        made = []
        for kernel in self.kernels:
            values, vectors = np.linalg.eigh(kernel)
            values = np.maximum(values, 0.0)
            for ridge in RIDGES:
                hat = (vectors * (values / (values + ridge))) @ vectors.T
                leverage = np.minimum(np.diag(hat), 0.999)
                made.append((hat - np.diag(np.diag(hat))) / (1.0 - leverage)[:, None])
        return made

    def fit(self, vectors: Floats, others: Mapping[str, Floats] | None = None) -> HeldOutFit:
        """Return how well the columns predict ``vectors`` (n, d) of the same rows, against permuted controls.

        ``others`` are other alignments of the same vectors, by name.
        """
        target = reduce(vectors)
        if not target.shape[1] or not self.x.shape[1]:
            return HeldOutFit(0.0, 1.0, 0.0, {})
        single = np.array([_correlate(each @ target, target) for each in self.smoothers])
        stated = single.mean(axis=1)
        shuffled = np.stack([target[self._rng.permutation(self.n)] for _ in range(CONTROLS)], axis=1)
        flat = shuffled.reshape(self.n, -1).astype(np.float32)
        controls = np.array(
            [
                _correlate(each.astype(np.float32) @ flat, flat).reshape(CONTROLS, -1).mean(axis=1)
                for each in self.smoothers
            ]
        )
        center, spread = controls.mean(axis=1), np.maximum(controls.std(axis=1), 1e-12)
        z = (stated - center) / spread
        largest = ((controls - center[:, None]) / spread[:, None]).max(axis=0)
        better = {}
        for name, values in (others or {}).items():
            tried = reduce(values)
            if tried.shape[1]:
                result = np.array([_correlate(each @ tried, tried).mean() for each in self.smoothers])
                if ((result - center) / spread).max() > 6.0 and result.max() > stated.max() + 0.1:
                    better[name] = float(result.max())
        p = (1 + int((largest >= z.max()).sum())) / (1 + CONTROLS)
        r2 = max(_r2(each @ target, target) for each in self.smoothers)
        return HeldOutFit(r2, p, float(stated[z.argmax()]), better, float(single[z.argmax()].max()))

    def is_copied(self, vectors: Floats) -> bool:
        """Whether each of two or more coordinates of ``vectors`` (n, d) is one of the columns, but for its scale."""
        coordinates = clip_columns(vectors)
        coordinates = coordinates[:, coordinates.any(axis=0)]
        if min(coordinates.shape[1], self.x.shape[1]) < 2:
            return False
        parts = [
            (each - each.mean(axis=0)) / np.linalg.norm(each - each.mean(axis=0), axis=0)
            for each in (coordinates, self.x)
        ]
        return bool(np.abs(parts[0].T @ parts[1]).max(axis=1).min() > COPIED)

    def mixture(self, vectors: Floats) -> RowMixture:
        """Return a regression that begins with some of the rows and ends with those among them that it predicts well.

        Where it predicts these well, the vector of a row that belongs to another one is as far from its prediction as
        that of any row, so that half of such rows are farther from it than the median row. So are rare rows, which are
        predicted badly without being wrong, but not among those that are most like others.
        """
        target, kernel = reduce(vectors), self.kernels[0] + self.kernels[1]
        read, best = np.sort(self._rng.permutation(self.n)[:MAX_FITTED_ROWS]), RowMixture(0.0, 0.0)
        for ridge in (0.02, 0.5):
            kept = read
            for round_ in range(ROUNDS):
                guess, inverse = _predict_left_out(kernel, target, kept, ridge)
                distance = np.linalg.norm(target - guess, axis=1)
                least = float(np.median(distance[read]))
                far = least if round_ < 2 else max(3 * float(np.median(distance[kept])), least)
                used, kept = kept, read[distance[read] <= far]
            r2 = _r2(guess[kept], target[kept])
            if r2 > best.r2:
                variance = _measure_left_out(kernel, inverse, used, ridge)
                apart = (guess**2).sum(axis=1)[:, None] + (target**2).sum(axis=1)[None, :] - 2 * guess @ target.T
                lost = (apart < (distance**2)[:, None]).mean(axis=1) > 0.5
                shares = [2 * float(lost[variance <= np.quantile(variance, part)].mean()) for part in SUREST]
                best = RowMixture(r2, min(shares))
        return best


def _predict_left_out(kernel: Floats, target: Floats, kept: Ints, ridge: float) -> tuple[Floats, Floats]:
    """Return predictions (n, d) by the rows ``kept``, each left out of its own, and their inverse kernel."""
    inverse = np.linalg.inv(kernel[np.ix_(kept, kept)] + ridge * np.eye(len(kept)))
    weights = inverse @ target[kept]
    guess = np.asarray(kernel[:, kept] @ weights)
    guess[kept] = target[kept] - weights / np.diag(inverse)[:, None]
    return guess, inverse


def _measure_left_out(kernel: Floats, inverse: Floats, kept: Ints, ridge: float) -> Floats:
    """Return the variances (n,) of ``_predict_left_out``."""
    variance = np.diag(kernel) + ridge - np.einsum("ij,ij->i", kernel[:, kept] @ inverse, kernel[:, kept])
    variance[kept] = 1.0 / np.diag(inverse)
    return np.asarray(variance)


def _correlate(guess: Floats, target: Floats) -> Floats:
    g, t = guess - guess.mean(axis=0), target - target.mean(axis=0)
    scale = np.sqrt((g**2).sum(axis=0) * (t**2).sum(axis=0))
    return np.asarray((g * t).sum(axis=0) / np.maximum(scale, 1e-12))


def _r2(guess: Floats, target: Floats) -> float:
    total = float(((target - target.mean(axis=0)) ** 2).sum())
    return 1.0 - float(((target - guess) ** 2).sum()) / max(total, 1e-12)


def accuracy(values: Floats, labels: Ints, n_classes: int) -> float:
    """Return the share of ``labels`` (n,) that the best regression on ``values`` (n, p) gives to held-out rows."""
    target = np.eye(n_classes)[labels]
    mean = target.mean(axis=0)
    smoothers = ColumnRegression(values, np.random.default_rng(0)).smoothers
    return max(float(((each @ (target - mean) + mean).argmax(axis=1) == labels).mean()) for each in smoothers)


def correlate_labels(vectors: Floats, labels: Floats) -> float:
    """Return the correlation of ``labels`` (n, C) and a held-out ridge regression on ``vectors`` (n, d) as scaled."""
    low, high = _find_ends(vectors)
    e = np.clip(np.asarray(vectors, dtype=np.float64), low, high)
    e = e - e.mean(axis=0)
    e = e / max(float(np.sqrt((e**2).sum(axis=1).mean())), 1e-12)
    hat = e @ np.linalg.inv(e.T @ e + 0.01 * len(e) * np.eye(e.shape[1]))
    leverage = (hat * e).sum(axis=1)[:, None]
    t = labels - labels.mean(axis=0)
    return float(_correlate((hat @ (e.T @ t) - leverage * t) / np.maximum(1.0 - leverage, 1e-3), t).mean())


def spread(vectors: Floats) -> float:
    """Return the variance of ``vectors`` (n, d), clipped at quantiles."""
    low, high = _find_ends(vectors)
    return float(np.clip(vectors, low, high).var(axis=0).sum())
