"""The fit of ``score_model``: the features and the first weights that explain the scores of a run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve

from vflsec.inference.recordings.score_model import ScoreModel
from vflsec.inference.recordings.simplex import Floats

SWEEPS = 150
"""Gauss-Newton steps, at most."""
INNER = 100
"""Steps of conjugate gradients in each of them, at most."""
ENOUGH = 1e-7
"""Relative residual at which the fit ends."""
FLOOR = 1e-3
"""Damping of directions that a row's own scores do not determine, relative to the mean curvature."""
POLISH = 1e-10
"""Ridge of the step that fits the linear map, relative to each column's size."""
CALM = 3e-3
"""Relative change of the estimated noise below which a step counts as converged; three in a row end the fit."""


@dataclass(frozen=True)
class ScoreFit:
    """What explains the scores best.

    Attributes:
        features: (n, k, g) the coefficients of ``1, time`` (k of them) of each row's features.
        weights: (C, g) W_0.
        residual: root mean square of what is left of the fitted scores, relative to theirs.
        held_out: the same for the scores that were left out of the fit.
    """

    features: Floats
    weights: Floats
    residual: float
    held_out: float


def fit(model: ScoreModel, start: ScoreFit | None = None, sweeps: int = SWEEPS) -> ScoreFit:
    """Return the best fit near ``start``, or near the principal directions of the scores."""
    features, weights = _start(model) if start is None else (start.features, start.weights)
    missing = model.basis.shape[1] - features.shape[1]
    features = np.pad(features, ((0, 0), (0, missing), (0, 0)))
    features, weights = _descend(model, features, weights, sweeps)
    off = model.scores - model.predicted(features, model.weights(features, weights))
    return ScoreFit(features, weights, _relative(model, off, model.fitted), _relative(model, off, model.left))


def _inverse(matrices: Floats) -> Floats:
    """Return the inverse of (n, d, d) matrices, of which those of rows with few scores are singular up to rounding."""
    d = matrices.shape[-1]
    ridge = 1e-13 * np.trace(matrices, axis1=1, axis2=2) / d + np.finfo(np.float64).tiny
    found: Floats = np.linalg.inv(matrices + ridge[:, None, None] * np.eye(d))
    return found


def _relative(model: ScoreModel, off: Floats, which: NDArray[np.bool_]) -> float:
    return float(np.sqrt((off[which] ** 2).sum() / (model.scores[which] ** 2).sum())) if which.any() else np.nan


def _start(model: ScoreModel) -> tuple[Floats, Floats]:
    """Return features and W_0 from the principal directions of the scores.

    If W were the same during each epoch, the table of rows by visits would have rank g, and its left directions
    would be the features up to a linear map. The map, squared, and W_0 follow from the update rule by linear least
    squares. Rows with another number of visits than most start at zero.
    """
    g, places, outputs = model.width, model.places, model.scores.shape[2]
    counts = (places >= 0).sum(axis=1)
    usual = int(np.bincount(counts).argmax())
    known = counts == usual
    seen = model.fitted.reshape(-1, outputs)[places[known, :usual]]
    table = np.where(seen, model.scores.reshape(-1, outputs)[places[known, :usual]], 0).reshape(known.sum(), -1)
    left = np.linalg.svd(table, full_matrices=False)[0][:, :g] * np.sqrt(len(table))
    features = np.zeros((model.n, 1, g))
    features[known, 0, : left.shape[1]] = left
    features[known, 0, left.shape[1] :] = model.rng.normal(size=(len(left), g - left.shape[1]))
    at = model.at(features)
    design, target = _update_rule(model, at, model.moved(at), np.append(known, False))
    above, right = np.triu_indices(g)
    free = g * outputs
    scaled = np.c_[design[:, :free], design[:, free:] @ (above == right)]
    size = max(float(_ridge(scaled, target, 1e-10)[-1]), 1e-3)
    prior = np.r_[np.zeros(free), size * (above == right)]
    found = prior + _ridge(design, target - design @ prior, np.r_[np.full(free, 1e-10), np.full(len(above), 1e-3)])
    values, axes = np.linalg.eigh(_symmetric(found[free:], g))
    linear = axes * np.sqrt(np.maximum(values, 0.05 * size))
    return features @ linear, np.linalg.solve(linear, found[:free].reshape(-1, g).T).T


def _update_rule(model: ScoreModel, at: Floats, moved: Floats, known: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Return the linear system in W_0 (C g) and the upper half of K, for a sample of the scores of known rows."""
    g, outputs = model.width, model.scores.shape[2]
    s, b = model.sampled()
    own, past = at[s, b], moved[s]  # (N, g), (N, C, g)
    above, right = np.triu_indices(g)
    design = np.zeros((len(s), outputs, outputs * g + len(above)))
    for c in range(outputs):
        design[:, c, c * g : (c + 1) * g] = own * model.kept[s][:, None]
        mirrored = np.where(above != right, own[:, right] * past[:, c, above], 0)
        design[:, c, outputs * g :] = -(own[:, above] * past[:, c, right] + mirrored)
    use = model.fitted[s, b] & known[model.rows[s, b]][:, None]
    return design[use], model.scores[s, b][use]


def _descend(model: ScoreModel, features: Floats, first: Floats, sweeps: int) -> tuple[Floats, Floats]:
    """Return the most probable features and W_0 near the start, by damped Gauss-Newton steps.

    Features and noise are Gaussian, and their covariances follow from the scores too: with few noisy scores of each
    row, the likelier directions count for more.
    """
    damping, growth = 0.1, 2.0
    weights = model.weights(features, first)
    total = float((model.scores[model.fitted] ** 2).sum())
    prior = _Prior.first(features, total / model.fitted.sum())
    loss, off = _loss(model, features, weights, prior)
    calm = 0
    for _ in range(sweeps):
        system = _System(model, features, weights, prior)
        towards = system.adjoint(off)
        towards = (towards[0] - prior.pulled(features), towards[1])
        while True:
            move, expected = system.solve(towards, damping)
            nearer, start = features + move[0], first + move[1]
            there = model.weights(nearer, start)
            lower, rest = _loss(model, nearer, there, prior)
            ratio = (loss - lower) / expected
            if ratio > 0:
                break
            damping, growth = damping * growth, growth * 2
            if growth > 1e6:
                return features, first
        features, first, weights, off = _polished(model, nearer, start, there, rest)
        damping, growth = max(damping * max(0.2, 1 - (2 * ratio - 1) ** 3), 1e-13), 2.0
        squares = float((off**2).sum())
        before, prior = prior.noise, system.prior(features, squares)
        loss, off = _loss(model, features, weights, prior)
        calm = calm + 1 if abs(before / prior.noise - 1) < CALM else 0
        if squares < ENOUGH**2 * total or calm == 3:
            break
    return features, first


def _polished(model: ScoreModel, features: Floats, first: Floats, weights: Floats, off: Floats) -> tuple[Floats, ...]:
    """Return the same with the best linear map of all features, if that fits better.

    The weights depend on the square of the map, a linear unknown, so that this step needs no damping. Without it
    the descent follows a long curved valley.
    """
    at = model.at(features)
    design, target = _update_rule(model, at, model.moved(at), np.ones(model.n + 1, dtype=bool))
    above, right = np.triu_indices(model.width)
    now = np.r_[first.ravel(), above == right]
    found = now + _ridge(design, target - design @ now, POLISH)
    values, axes = np.linalg.eigh(_symmetric(found[first.size :], model.width))
    if values[0] > 0:
        root = (axes * np.sqrt(values)) @ axes.T
        mapped, start = features @ root, np.linalg.solve(root, found[: first.size].reshape(first.shape).T).T
        there = model.weights(mapped, start)
        rest = np.where(model.fitted, model.scores - model.predicted(mapped, there), 0)
        if (rest**2).sum() < (off**2).sum():
            return mapped, start, there, rest
    return features, first, weights, off


def _loss(model: ScoreModel, features: Floats, weights: Floats, prior: _Prior) -> tuple[float, Floats]:
    """Return the squared residuals and what the prior adds to them, and the residuals."""
    off = np.where(model.fitted, model.scores - model.predicted(features, weights), 0)
    return float((off**2).sum() + (prior.pulled(features) * features).sum()), off


@dataclass(frozen=True)
class _Prior:
    """What is taken for probable of features (n, k, g): Gaussian, with noise of variance ``noise`` on the scores."""

    precision: Floats  # (k g, k g)
    noise: float

    @classmethod
    def first(cls, features: Floats, variance: float) -> _Prior:
        """Return one that the fit then adapts: noise of a tenth of the scores' deviation, a slow drift."""
        _, k, g = features.shape
        sizes = np.repeat([float((features[:, 0] ** 2).mean()) * share for share in (1, 0.01)[:k]], g)
        return cls(np.diag(1 / sizes), 0.01 * variance)

    def pulled(self, features: Floats) -> Floats:
        """Return half the derivative of what it adds to the squared residuals."""
        n, k, g = features.shape
        found: Floats = (self.noise * features.reshape(n, k * g) @ self.precision).reshape(n, k, g)
        return found


class _System:
    """The linear system of one Gauss-Newton step, solved by preconditioned conjugate gradients.

    Every row alone, and one linear map of all rows together with W_0: what couples rows is mostly of the second kind.
    """

    def __init__(self, model: ScoreModel, features: Floats, weights: Floats, prior: _Prior) -> None:
        self.model, self.weights = model, weights
        n, k, g = features.shape
        outputs = weights.shape[1]
        self.at = model.at(features)
        # each row's own curvature
        places = model.places
        step = np.where(places >= 0, places // model.rows.shape[1], 0)
        use = (places >= 0)[..., None] & model.fitted.reshape(-1, outputs)[places]
        per_visit = np.where(use[..., None], weights[step], 0)  # (n, V, C, g)
        design = (model.basis[step][:, :, None, :, None] * per_visit[:, :, :, None, :]).reshape(n, -1, k * g)
        self.rows = design.transpose(0, 2, 1) @ design  # (n, k g, k g)
        size = float(np.trace(self.rows[:, :g, :g].sum(axis=0))) / (n * g)
        self.pull, self.before = prior.noise * prior.precision, prior
        self.rows += self.pull
        kept = self.at * model.kept[:, None, None]
        self.first = np.tensordot(kept, kept, axes=([0, 1], [0, 1]))  # (g, g)
        self.damped_rows = self.rows + FLOOR * size * np.eye(k * g)
        self.damped_first = self.first + FLOOR * np.trace(self.first) / g * np.eye(g)
        # the linear map and W_0, on a sample
        s, b = model.sampled()
        own, now = self.at[s, b], weights[s]
        past = model.kept[s][:, None, None] * weights[0] - now  # P_t, since nothing has moved at the first step
        mapped = own[:, None, :, None] * now[:, :, None, :]
        both = (mapped - past[:, :, :, None] * own[:, None, None, :]).reshape(len(s), outputs, g * g)
        start = np.zeros((len(s), outputs, outputs * g))
        for c in range(outputs):
            start[:, c, c * g : (c + 1) * g] = own * model.kept[s][:, None]
        use = model.fitted[s, b]
        together = np.concatenate([both, start], axis=2)[use]
        alone = mapped.reshape(len(s), outputs, g * g)[use]
        scale = (model.rows < n).sum() / len(s)
        self.coarse = scale * together.T @ together
        self.damped_coarse = np.zeros_like(self.coarse)
        self.features = features
        gram = np.tensordot(features, features, axes=([0, 1], [0, 1]))
        for i in range(k):
            for j in range(k):
                block = self.pull[i * g : (i + 1) * g, j * g : (j + 1) * g]
                self.coarse[: g * g, : g * g] += np.kron(features[:, i].T @ features[:, j], block)
        self.damped_coarse[: g * g, : g * g] = scale * alone.T @ alone + FLOOR * size * np.kron(gram, np.eye(g))
        self.damped_coarse[g * g :, g * g :] = np.kron(np.eye(outputs), self.damped_first)

    def apply(self, d_features: Floats, d_first: Floats) -> Floats:
        """Return (S, B, C) the change of the scores."""
        model = self.model
        at = model.at(d_features)
        weights = model.kept[:, None, None] * d_first - model.moved(at)
        change = at @ self.weights.transpose(0, 2, 1) + self.at @ weights.transpose(0, 2, 1)
        return np.where(model.fitted, change, 0)

    def adjoint(self, off: Floats) -> tuple[Floats, Floats]:
        """Return the derivative by the features and by W_0."""
        model = self.model
        outer = off.transpose(0, 2, 1) @ self.at  # (S, C, g)
        visits = off @ self.weights - model.delta @ model.moved_adjoint(outer)
        return model.spread(visits), np.tensordot(model.kept, outer, axes=1)

    def prior(self, features: Floats, loss: float) -> _Prior:
        """Return the covariances that the features and the residuals bear out: one step of empirical Bayes."""
        n, k, g = features.shape
        spread = self.before.noise * _inverse(self.rows)  # (n, k g, k g) of each row's features
        flat = features.reshape(n, k * g)
        covariance = (flat.T @ flat + spread.sum(axis=0)) / n
        explained = n * k * g - float((spread.sum(axis=0) * self.before.precision).sum())
        count = float(self.model.fitted.sum())
        noise = loss / max(count - explained, 0.01 * count)
        covariance += 1e-6 * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
        return _Prior(np.linalg.inv(covariance), noise)

    def solve(self, towards: tuple[Floats, Floats], damping: float) -> tuple[tuple[Floats, Floats], float]:
        """Return the damped step, and by how much it should lower the loss."""
        n, k, g = self.features.shape
        inverse = _inverse(self.rows + damping * self.damped_rows)
        coarse = self.coarse + damping * self.damped_coarse
        coarse += 1e-12 * np.trace(coarse) / len(coarse) * np.eye(len(coarse))
        factor = cho_factor((coarse + coarse.T) / 2)

        def precondition(a: Floats, b: Floats) -> tuple[Floats, Floats]:
            own = (inverse @ a.reshape(n, k * g, 1)).reshape(n, k, g)
            mapped = np.tensordot(self.features, a, axes=([0, 1], [0, 1]))
            found = cho_solve(factor, np.r_[mapped.ravel(), b.ravel()], check_finite=False)
            return own + self.features @ found[: g * g].reshape(g, g), found[g * g :].reshape(-1, g)

        def curvature(a: Floats, b: Floats) -> tuple[Floats, Floats]:
            own, start = self.adjoint(self.apply(a, b))
            flat_a = a.reshape(n, k * g)
            own = own + (flat_a @ self.pull + damping * (self.damped_rows @ flat_a[..., None])[..., 0]).reshape(n, k, g)
            return own, start + damping * b @ self.damped_first

        left = (towards[0].copy(), towards[1].copy())
        found = (np.zeros_like(left[0]), np.zeros_like(left[1]))
        ready = precondition(*left)
        direction, size = ready, _dot(left, ready)
        goal = 1e-4 * size
        for _ in range(INNER):
            bent = curvature(*direction)
            length = size / _dot(direction, bent)
            found = (found[0] + length * direction[0], found[1] + length * direction[1])
            left = (left[0] - length * bent[0], left[1] - length * bent[1])
            ready = precondition(*left)
            before, size = size, _dot(left, ready)
            if size < goal:
                break
            direction = (ready[0] + size / before * direction[0], ready[1] + size / before * direction[1])
        # 2 towards'x - x'Hx, where (H + damping D) x = towards - left
        damped = (self.damped_rows @ found[0].reshape(n, k * g, 1)).reshape(n, k, g)
        lowered = _dot(found, towards) + _dot(found, left)
        lowered += damping * (_dot(found, (damped, found[1] @ self.damped_first)))
        return found, lowered


def _dot(a: tuple[Floats, Floats], b: tuple[Floats, Floats]) -> float:
    return float((a[0] * b[0]).sum() + (a[1] * b[1]).sum())


def _symmetric(upper: Floats, size: int) -> Floats:
    """Return the symmetric matrix with this upper half, diagonal included."""
    found = np.zeros((size, size))
    above, right = np.triu_indices(size)
    found[above, right] = found[right, above] = upper
    return found


def _ridge(design: Floats, target: Floats, penalty: Floats | float) -> Floats:
    """Return the least-squares solution with ``penalty`` on each squared unknown, relative to its column's size."""
    normal = design.T @ design
    sizes = np.sqrt(np.maximum(np.diag(normal), 1e-300))
    scaled = normal / sizes[:, None] / sizes + np.diag(np.broadcast_to(penalty, sizes.shape))
    found: Floats = np.linalg.solve(scaled, design.T @ target / sizes) / sizes
    return found
