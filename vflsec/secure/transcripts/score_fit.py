"""The features and the first weights that explain the scores of a run: a low-rank bilinear least-squares problem.

The scores of row i at step t are z_t(i) = M_i(t) (kept_t W_0 - P_t), where P_t sums the loss gradients of all earlier
batches, each multiplied by the features of its rows, with the learning rate, momentum and weight decay of the run. All
but M and W_0 is known to the party that has the scores. M is determined up to a rotation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.linalg import cho_factor, cho_solve

Floats = NDArray[np.float64]

SWEEPS = 150
"""Gauss-Newton steps, at most."""
INNER = 100
"""Steps of conjugate gradients in each of them, at most."""
SAMPLE = 6000
"""Scores from which the preconditioner and the start are made."""
ENOUGH = 1e-7
"""Relative residual at which the fit ends."""
FLOOR = 1e-3
"""Damping of directions that a row's own scores do not determine, relative to the mean curvature."""
POLISH = 1e-10
"""Ridge of the step that fits the linear map, relative to each column's size."""
CALM = 3e-3
"""Relative change of the estimated noise below which a step counts as converged; three in a row end the fit."""


class Visit(NamedTuple):
    """One step as p sees it.

    Attributes:
        rows: (B,) which samples, numbered from 0.
        scores: (B, C).
        delta: (B, C) loss gradients divided by B; None where nothing is learned.
        rate: of learning; 0 where nothing is learned.
        time: from 0 to 1 over the run.
    """

    rows: NDArray[np.int64]
    scores: Floats
    delta: Floats | None
    rate: float
    time: float


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


class ScoreModel:
    """The model above, for the visits of one recording.

    Args:
        visits: the steps in order.
        n: number of samples.
        width: g.
        momentum: of the optimizer of W.
        weight_decay: of the optimizer of W.
        drifts: whether features move linearly in time.
        held_out: share of the scores that is left out of the fit.
        seed: of the sample of scores.
    """

    def __init__(
        self,
        visits: Sequence[Visit],
        n: int,
        width: int,
        *,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        drifts: bool = False,
        held_out: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.n, self.width = n, width
        self.rng = np.random.default_rng(seed)
        self.momentum, self.weight_decay = momentum, weight_decay
        steps, most = len(visits), max(len(visit.rows) for visit in visits)
        outputs = visits[0].scores.shape[1]
        self.rows = np.full((steps, most), n)  # row n is zero: it pads short batches
        self.scores, self.delta = np.zeros((steps, most, outputs)), np.zeros((steps, most, outputs))
        for s, visit in enumerate(visits):
            self.rows[s, : len(visit.rows)] = visit.rows
            self.scores[s, : len(visit.rows)] = visit.scores
            if visit.delta is not None:
                self.delta[s, : len(visit.rows)] = visit.delta
        self.rates = np.array([visit.rate for visit in visits])
        self.learns = np.array([visit.delta is not None for visit in visits])
        time = np.array([visit.time for visit in visits])
        self.basis = np.stack([np.ones(steps), time], axis=1) if drifts else np.ones((steps, 1))  # (S, k)
        seen = np.broadcast_to((self.rows < n)[..., None], self.scores.shape)
        left = self.rng.random(self.scores.shape) < held_out
        self.fitted, self.left = seen & ~left, seen & left
        self.kept = self._kept()
        self._gather = sparse.csr_matrix(
            (np.ones(self.rows.size), (self.rows.ravel(), np.arange(self.rows.size))), shape=(n + 1, self.rows.size)
        )[:n]
        self._visits = self._visits_of_rows()

    def fit(self, start: ScoreFit | None = None, sweeps: int = SWEEPS) -> ScoreFit:
        """Return the best fit near ``start``, or near the principal directions of the scores."""
        features, weights = self._start() if start is None else (start.features, start.weights)
        missing = self.basis.shape[1] - features.shape[1]
        features = np.pad(features, ((0, 0), (0, missing), (0, 0)))
        features, weights = self._descend(features, weights, sweeps)
        off = self.scores - self._predicted(features, self._weights(features, weights))
        return ScoreFit(features, weights, self._relative(off, self.fitted), self._relative(off, self.left))

    def _relative(self, off: Floats, which: NDArray[np.bool_]) -> float:
        return float(np.sqrt((off[which] ** 2).sum() / (self.scores[which] ** 2).sum())) if which.any() else np.nan

    def _kept(self) -> Floats:
        """Return (S,) which share of W_0 weight decay has left."""
        kept, velocity, found = 1.0, 0.0, np.ones(len(self.rates))
        for s, (rate, learns) in enumerate(zip(self.rates, self.learns, strict=True)):
            found[s] = kept
            if learns:
                velocity = self.momentum * velocity + self.weight_decay * kept
                kept -= rate * velocity
        return found

    def _visits_of_rows(self) -> NDArray[np.int64]:
        """Return (n, V) the positions in ``rows`` at which each row is, and -1."""
        flat = self.rows.ravel()
        order = np.argsort(flat, kind="stable")[: (flat < self.n).sum()]
        counts = np.bincount(flat[order], minlength=self.n)
        found = np.full((self.n, counts.max()), -1)
        found[flat[order], np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)] = order
        return found

    # M and W_0 to scores, and the derivative with its adjoint

    def _at(self, features: Floats) -> Floats:
        """Return (S, B, g) the features of each visit."""
        padded = np.concatenate([features, np.zeros((1, *features.shape[1:]))])
        found: Floats = padded[:, 0][self.rows]
        if features.shape[1] > 1:
            found = found + self.basis[:, 1, None, None] * padded[:, 1][self.rows]
        return found

    def _moved(self, at: Floats) -> Floats:
        """Return (S, C, g) P_t."""
        gradients = self.delta.transpose(0, 2, 1) @ at
        moved, velocity = np.zeros_like(gradients), np.zeros_like(gradients[0])
        if not self.momentum and not self.weight_decay:
            moved[1:] = np.cumsum(self.rates[:-1, None, None] * gradients[:-1], axis=0)
            return moved
        now = np.zeros_like(velocity)
        for s in range(len(gradients)):
            moved[s] = now
            if self.learns[s]:
                velocity = self.momentum * velocity + gradients[s] - self.weight_decay * now
                now = now + self.rates[s] * velocity
        return moved

    def _moved_adjoint(self, outer: Floats) -> Floats:
        """Return (S, C, g) the derivative by each step's gradient of what has the derivative ``outer`` by P_t."""
        found = np.zeros_like(outer)
        if not self.momentum and not self.weight_decay:
            found[:-1] = self.rates[:-1, None, None] * np.cumsum(outer[::-1], axis=0)[::-1][1:]
            return found
        now, velocity = np.zeros_like(outer[0]), np.zeros_like(outer[0])
        for s in range(len(outer) - 1, -1, -1):
            if self.learns[s]:
                velocity = velocity + self.rates[s] * now
                found[s] = velocity
                now = now - self.weight_decay * velocity
                velocity = self.momentum * velocity
            now = now + outer[s]
        return found

    def _weights(self, features: Floats, first: Floats) -> Floats:
        """Return (S, C, g) the weights at each step."""
        return self.kept[:, None, None] * first - self._moved(self._at(features))

    def _predicted(self, features: Floats, weights: Floats) -> Floats:
        return self._at(features) @ weights.transpose(0, 2, 1)

    def _spread(self, visits: Floats) -> Floats:
        """Return (n, k, g) the adjoint of ``_at``."""
        found = [
            self._gather @ (visits * self.basis[:, j, None, None]).reshape(-1, self.width)
            for j in range(self.basis.shape[1])
        ]
        return np.stack(found, axis=1)

    # the start

    def _start(self) -> tuple[Floats, Floats]:
        """Return features and W_0 from the principal directions of the scores.

        If W were the same during each epoch, the table of rows by visits would have rank g, and its left directions
        would be the features up to a linear map. The map, squared, and W_0 follow from the update rule by linear least
        squares. Rows with another number of visits than most start at zero.
        """
        g, places, outputs = self.width, self._visits, self.scores.shape[2]
        counts = (places >= 0).sum(axis=1)
        usual = int(np.bincount(counts).argmax())
        known = counts == usual
        seen = self.fitted.reshape(-1, outputs)[places[known, :usual]]
        table = np.where(seen, self.scores.reshape(-1, outputs)[places[known, :usual]], 0).reshape(known.sum(), -1)
        left = np.linalg.svd(table, full_matrices=False)[0][:, :g] * np.sqrt(len(table))
        features = np.zeros((self.n, 1, g))
        features[known, 0, : left.shape[1]] = left
        features[known, 0, left.shape[1] :] = self.rng.normal(size=(len(left), g - left.shape[1]))
        at = self._at(features)
        design, target = self._update_rule(at, self._moved(at), np.append(known, False))
        above, right = np.triu_indices(g)
        free = g * outputs
        scaled = np.c_[design[:, :free], design[:, free:] @ (above == right)]
        size = max(float(_ridge(scaled, target, 1e-10)[-1]), 1e-3)
        prior = np.r_[np.zeros(free), size * (above == right)]
        found = prior + _ridge(design, target - design @ prior, np.r_[np.full(free, 1e-10), np.full(len(above), 1e-3)])
        values, axes = np.linalg.eigh(_symmetric(found[free:], g))
        linear = axes * np.sqrt(np.maximum(values, 0.05 * size))
        return features @ linear, np.linalg.solve(linear, found[:free].reshape(-1, g).T).T

    def _update_rule(self, at: Floats, moved: Floats, known: NDArray[np.bool_]) -> tuple[Floats, Floats]:
        """Return the linear system in W_0 (C g) and the upper half of K, for a sample of the scores of known rows."""
        g, outputs = self.width, self.scores.shape[2]
        s, b = self._sampled()
        own, past = at[s, b], moved[s]  # (N, g), (N, C, g)
        above, right = np.triu_indices(g)
        design = np.zeros((len(s), outputs, outputs * g + len(above)))
        for c in range(outputs):
            design[:, c, c * g : (c + 1) * g] = own * self.kept[s][:, None]
            mirrored = np.where(above != right, own[:, right] * past[:, c, above], 0)
            design[:, c, outputs * g :] = -(own[:, above] * past[:, c, right] + mirrored)
        use = self.fitted[s, b] & known[self.rows[s, b]][:, None]
        return design[use], self.scores[s, b][use]

    def _sampled(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the steps and places of some visits."""
        s, b = np.nonzero(self.rows < self.n)
        most = max(SAMPLE // self.scores.shape[2], 4 * self.width)
        if len(s) > most:
            pick = np.sort(self.rng.choice(len(s), most, replace=False))
            s, b = s[pick], b[pick]
        return s, b

    # Gauss-Newton

    def _descend(self, features: Floats, first: Floats, sweeps: int) -> tuple[Floats, Floats]:
        """Return the most probable features and W_0 near the start, by damped Gauss-Newton steps.

        Features and noise are Gaussian, and their covariances follow from the scores too: with few noisy scores of each
        row, the likelier directions count for more.
        """
        damping, growth = 0.1, 2.0
        weights = self._weights(features, first)
        total = float((self.scores[self.fitted] ** 2).sum())
        prior = _Prior.first(features, total / self.fitted.sum())
        loss, off = self._loss(features, weights, prior)
        calm = 0
        for _ in range(sweeps):
            system = _System(self, features, weights, prior)
            towards = system.adjoint(off)
            towards = (towards[0] - prior.pulled(features), towards[1])
            while True:
                move, expected = system.solve(towards, damping)
                nearer, start = features + move[0], first + move[1]
                there = self._weights(nearer, start)
                lower, rest = self._loss(nearer, there, prior)
                ratio = (loss - lower) / expected
                if ratio > 0:
                    break
                damping, growth = damping * growth, growth * 2
                if growth > 1e6:
                    return features, first
            features, first, weights, off = self._polished(nearer, start, there, rest)
            damping, growth = max(damping * max(0.2, 1 - (2 * ratio - 1) ** 3), 1e-13), 2.0
            squares = float((off**2).sum())
            before, prior = prior.noise, system.prior(features, squares)
            loss, off = self._loss(features, weights, prior)
            calm = calm + 1 if abs(before / prior.noise - 1) < CALM else 0
            if squares < ENOUGH**2 * total or calm == 3:
                break
        return features, first

    def _polished(self, features: Floats, first: Floats, weights: Floats, off: Floats) -> tuple[Floats, ...]:
        """Return the same with the best linear map of all features, if that fits better.

        The weights depend on the square of the map, a linear unknown, so that this step needs no damping. Without it
        the descent follows a long curved valley.
        """
        at = self._at(features)
        design, target = self._update_rule(at, self._moved(at), np.ones(self.n + 1, dtype=bool))
        above, right = np.triu_indices(self.width)
        now = np.r_[first.ravel(), above == right]
        found = now + _ridge(design, target - design @ now, POLISH)
        values, axes = np.linalg.eigh(_symmetric(found[first.size :], self.width))
        if values[0] > 0:
            root = (axes * np.sqrt(values)) @ axes.T
            mapped, start = features @ root, np.linalg.solve(root, found[: first.size].reshape(first.shape).T).T
            there = self._weights(mapped, start)
            rest = np.where(self.fitted, self.scores - self._predicted(mapped, there), 0)
            if (rest**2).sum() < (off**2).sum():
                return mapped, start, there, rest
        return features, first, weights, off

    def _loss(self, features: Floats, weights: Floats, prior: _Prior) -> tuple[float, Floats]:
        """Return the squared residuals and what the prior adds to them, and the residuals."""
        off = np.where(self.fitted, self.scores - self._predicted(features, weights), 0)
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
        self.at = model._at(features)
        # each row's own curvature
        places = model._visits
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
        s, b = model._sampled()
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
        at = model._at(d_features)
        weights = model.kept[:, None, None] * d_first - model._moved(at)
        change = at @ self.weights.transpose(0, 2, 1) + self.at @ weights.transpose(0, 2, 1)
        return np.where(model.fitted, change, 0)

    def adjoint(self, off: Floats) -> tuple[Floats, Floats]:
        """Return the derivative by the features and by W_0."""
        model = self.model
        outer = off.transpose(0, 2, 1) @ self.at  # (S, C, g)
        visits = off @ self.weights - model.delta @ model._moved_adjoint(outer)
        return model._spread(visits), np.tensordot(model.kept, outer, axes=1)

    def prior(self, features: Floats, loss: float) -> _Prior:
        """Return the covariances that the features and the residuals bear out: one step of empirical Bayes."""
        n, k, g = features.shape
        spread = self.before.noise * np.linalg.inv(self.rows)  # (n, k g, k g) of each row's features
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
        inverse = np.linalg.inv(self.rows + damping * self.damped_rows)
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
