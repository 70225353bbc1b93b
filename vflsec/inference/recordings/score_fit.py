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

from vflsec.inference.recordings.samples import Floats

SAMPLE = 6000  # scores from which the preconditioner and the start of a fit are computed


class Visit(NamedTuple):
    """One step as the active party sees it.

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
    ) -> None:
        self.n, self.width = n, width
        self.rng = np.random.default_rng(0)  # of the sample of scores
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
        self.kept = self._compute_kept_share()
        self._gather = sparse.csr_array(
            (np.ones(self.rows.size), (self.rows.ravel(), np.arange(self.rows.size))), shape=(n + 1, self.rows.size)
        )[:n]
        self.places = self._places()

    def _compute_kept_share(self) -> Floats:
        """Return (S,) which share of W_0 weight decay has left."""
        kept, velocity, shares = 1.0, 0.0, np.ones(len(self.rates))
        for s, (rate, learns) in enumerate(zip(self.rates, self.learns, strict=True)):
            shares[s] = kept
            if learns:
                velocity = self.momentum * velocity + self.weight_decay * kept
                kept -= rate * velocity
        return shares

    def _places(self) -> NDArray[np.int64]:
        """Return (n, V) the positions in ``rows`` at which each row is, and -1."""
        flat = self.rows.ravel()
        order = np.argsort(flat, kind="stable")[: (flat < self.n).sum()]
        counts = np.bincount(flat[order], minlength=self.n)
        places = np.full((self.n, counts.max()), -1)
        places[flat[order], np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)] = order
        return places

    def compute_features(self, features: Floats) -> Floats:
        """Return (S, B, g) the features of each visit."""
        padded = np.concatenate([features, np.zeros((1, *features.shape[1:]))])
        at: Floats = padded[:, 0][self.rows]
        if features.shape[1] > 1:
            at = at + self.basis[:, 1, None, None] * padded[:, 1][self.rows]
        return at

    def accumulate_gradients(self, at: Floats) -> Floats:
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

    def accumulate_adjoint(self, outer: Floats) -> Floats:
        """Return (S, C, g) the derivative by each step's gradient of what has the derivative ``outer`` by P_t."""
        derivative = np.zeros_like(outer)
        if not self.momentum and not self.weight_decay:
            derivative[:-1] = self.rates[:-1, None, None] * np.cumsum(outer[::-1], axis=0)[::-1][1:]
            return derivative
        now, velocity = np.zeros_like(outer[0]), np.zeros_like(outer[0])
        for s in range(len(outer) - 1, -1, -1):
            if self.learns[s]:
                velocity = velocity + self.rates[s] * now
                derivative[s] = velocity
                now = now - self.weight_decay * velocity
                velocity = self.momentum * velocity
            now = now + outer[s]
        return derivative

    def weights(self, features: Floats, first: Floats) -> Floats:
        """Return (S, C, g) the weights at each step."""
        return self.kept[:, None, None] * first - self.accumulate_gradients(self.compute_features(features))

    def predict_scores(self, features: Floats, weights: Floats) -> Floats:
        """Return (S, B, C) the scores."""
        return self.compute_features(features) @ weights.transpose(0, 2, 1)

    def spread(self, visits: Floats) -> Floats:
        """Return (n, k, g) the adjoint of ``at``."""
        weighted = [(visits * column[:, None, None]).reshape(-1, self.width) for column in self.basis.T]
        return np.stack([self._gather @ part for part in weighted], axis=1)

    def draw_visits(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the steps and places of some visits."""
        s, b = np.nonzero(self.rows < self.n)
        most = max(SAMPLE // self.scores.shape[2], 4 * self.width)
        if len(s) > most:
            pick = np.sort(self.rng.choice(len(s), most, replace=False))
            s, b = s[pick], b[pick]
        return s, b


SWEEPS = 150  # gauss-Newton steps, at most
INNER = 100  # steps of conjugate gradients in each of them, at most
ENOUGH = 1e-7  # relative residual at which the fit ends
FLOOR = 1e-3  # damping of directions that a row's own scores do not determine, relative to the mean curvature
POLISH = 1e-10  # ridge of the step that fits the linear map, relative to each column's size
CALM = 3e-3  # relative change of the estimated noise below which a step counts as converged; three in a row end the fit


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
    off = model.scores - model.predict_scores(features, model.weights(features, weights))
    return ScoreFit(features, weights, _compare(model, off, model.fitted), _compare(model, off, model.left))


def _invert(matrices: Floats) -> Floats:
    """Return the inverse of (n, d, d) matrices, of which those of rows with few scores are singular up to rounding."""
    d = matrices.shape[-1]
    ridge = 1e-13 * np.trace(matrices, axis1=1, axis2=2) / d + np.finfo(np.float64).tiny
    return np.asarray(np.linalg.inv(matrices + ridge[:, None, None] * np.eye(d)))


def _compare(model: ScoreModel, off: Floats, which: NDArray[np.bool_]) -> float:
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
    at = model.compute_features(features)
    design, target = _update_rule(model, at, model.accumulate_gradients(at), np.append(known, False))
    above, right = np.triu_indices(g)
    free = g * outputs
    scaled = np.c_[design[:, :free], design[:, free:] @ (above == right)]
    size = max(float(_solve(scaled, target, 1e-10)[-1]), 1e-3)
    prior = np.r_[np.zeros(free), size * (above == right)]
    solution = prior + _solve(design, target - design @ prior, np.r_[np.full(free, 1e-10), np.full(len(above), 1e-3)])
    values, axes = np.linalg.eigh(_fill_lower(solution[free:], g))
    linear = axes * np.sqrt(np.maximum(values, 0.05 * size))
    return features @ linear, np.linalg.solve(linear, solution[:free].reshape(-1, g).T).T


def _update_rule(model: ScoreModel, at: Floats, moved: Floats, known: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Return the linear system in W_0 (C g) and the upper half of K, for a sample of the scores of known rows."""
    g, outputs = model.width, model.scores.shape[2]
    s, b = model.draw_visits()
    here, past = at[s, b], moved[s]  # (N, g), (N, C, g)
    above, right = np.triu_indices(g)
    design = np.zeros((len(s), outputs, outputs * g + len(above)))
    for c in range(outputs):
        design[:, c, c * g : (c + 1) * g] = here * model.kept[s][:, None]
        mirrored = np.where(above != right, here[:, right] * past[:, c, above], 0)
        design[:, c, outputs * g :] = -(here[:, above] * past[:, c, right] + mirrored)
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
    prior = _Prior.create_first(features, total / model.fitted.sum())
    loss, off = _compute_loss(model, features, weights, prior)
    calm = 0
    for _ in range(sweeps):
        system = _System(model, features, weights, prior)
        towards = system.adjoint(off)
        towards = (towards[0] - prior.compute_pull(features), towards[1])
        while True:
            move, expected = system.solve(towards, damping)
            nearer, start = features + move[0], first + move[1]
            there = model.weights(nearer, start)
            lower, rest = _compute_loss(model, nearer, there, prior)
            ratio = (loss - lower) / expected
            if ratio > 0:
                break
            damping, growth = damping * growth, growth * 2
            if growth > 1e6:
                return features, first
        features, first, weights, off = _refine_features(model, nearer, start, there, rest)
        damping, growth = max(damping * max(0.2, 1 - (2 * ratio - 1) ** 3), 1e-13), 2.0
        squares = float((off**2).sum())
        before, prior = prior.noise, system.prior(features, squares)
        loss, off = _compute_loss(model, features, weights, prior)
        calm = calm + 1 if abs(before / prior.noise - 1) < CALM else 0
        if squares < ENOUGH**2 * total or calm == 3:
            break
    return features, first


def _refine_features(
    model: ScoreModel, features: Floats, first: Floats, weights: Floats, off: Floats
) -> tuple[Floats, ...]:
    """Return the same with the best linear map of all features, if that fits better.

    The weights depend on the square of the map, a linear unknown, so that this step needs no damping. Without it
    the descent follows a long curved valley.
    """
    at = model.compute_features(features)
    design, target = _update_rule(model, at, model.accumulate_gradients(at), np.ones(model.n + 1, dtype=bool))
    above, right = np.triu_indices(model.width)
    now = np.r_[first.ravel(), above == right]
    solution = now + _solve(design, target - design @ now, POLISH)
    values, axes = np.linalg.eigh(_fill_lower(solution[first.size :], model.width))
    if values[0] > 0:
        root = (axes * np.sqrt(values)) @ axes.T
        mapped, start = features @ root, np.linalg.solve(root, solution[: first.size].reshape(first.shape).T).T
        there = model.weights(mapped, start)
        rest = np.where(model.fitted, model.scores - model.predict_scores(mapped, there), 0)
        if (rest**2).sum() < (off**2).sum():
            return mapped, start, there, rest
    return features, first, weights, off


def _compute_loss(model: ScoreModel, features: Floats, weights: Floats, prior: _Prior) -> tuple[float, Floats]:
    """Return the squared residuals and what the prior adds to them, and the residuals."""
    off = np.where(model.fitted, model.scores - model.predict_scores(features, weights), 0)
    return float((off**2).sum() + (prior.compute_pull(features) * features).sum()), off


@dataclass(frozen=True)
class _Prior:
    """What is taken for probable of features (n, k, g): Gaussian, with noise of variance ``noise`` on the scores."""

    precision: Floats  # (k g, k g)
    noise: float

    @classmethod
    def create_first(cls, features: Floats, variance: float) -> _Prior:
        """Return one that the fit then adapts: noise of a tenth of the scores' deviation, a slow drift."""
        _, k, g = features.shape
        sizes = np.repeat([float((features[:, 0] ** 2).mean()) * share for share in (1, 0.01)[:k]], g)
        return cls(np.diag(1 / sizes), 0.01 * variance)

    def compute_pull(self, features: Floats) -> Floats:
        """Return half the derivative of what it adds to the squared residuals."""
        n, k, g = features.shape
        return np.asarray((self.noise * features.reshape(n, k * g) @ self.precision).reshape(n, k, g))


class _System:
    """The linear system of one Gauss-Newton step, solved by preconditioned conjugate gradients.

    Every row alone, and one linear map of all rows together with W_0: what couples rows is mostly of the second kind.
    """

    def __init__(self, model: ScoreModel, features: Floats, weights: Floats, prior: _Prior) -> None:
        self.model, self.weights = model, weights
        n, k, g = features.shape
        outputs = weights.shape[1]
        self.at = model.compute_features(features)
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
        s, b = model.draw_visits()
        here, now = self.at[s, b], weights[s]
        past = model.kept[s][:, None, None] * weights[0] - now  # P_t, since nothing has moved at the first step
        mapped = here[:, None, :, None] * now[:, :, None, :]
        both = (mapped - past[:, :, :, None] * here[:, None, None, :]).reshape(len(s), outputs, g * g)
        start = np.zeros((len(s), outputs, outputs * g))
        for c in range(outputs):
            start[:, c, c * g : (c + 1) * g] = here * model.kept[s][:, None]
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
        at = model.compute_features(d_features)
        weights = model.kept[:, None, None] * d_first - model.accumulate_gradients(at)
        change = at @ self.weights.transpose(0, 2, 1) + self.at @ weights.transpose(0, 2, 1)
        return np.where(model.fitted, change, 0)

    def adjoint(self, off: Floats) -> tuple[Floats, Floats]:
        """Return the derivative by the features and by W_0."""
        model = self.model
        outer = off.transpose(0, 2, 1) @ self.at  # (S, C, g)
        visits = off @ self.weights - model.delta @ model.accumulate_adjoint(outer)
        return model.spread(visits), np.tensordot(model.kept, outer, axes=1)

    def prior(self, features: Floats, loss: float) -> _Prior:
        """Return the covariances that the features and the residuals bear out: one step of empirical Bayes."""
        n, k, g = features.shape
        spread = self.before.noise * _invert(self.rows)  # (n, k g, k g) of each row's features
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
        inverse = _invert(self.rows + damping * self.damped_rows)
        coarse = self.coarse + damping * self.damped_coarse
        coarse += 1e-12 * np.trace(coarse) / len(coarse) * np.eye(len(coarse))
        factor = cho_factor((coarse + coarse.T) / 2)

        def precondition(a: Floats, b: Floats) -> tuple[Floats, Floats]:
            apart = (inverse @ a.reshape(n, k * g, 1)).reshape(n, k, g)
            mapped = np.tensordot(self.features, a, axes=([0, 1], [0, 1]))
            together = cho_solve(factor, np.r_[mapped.ravel(), b.ravel()], check_finite=False)
            return apart + self.features @ together[: g * g].reshape(g, g), together[g * g :].reshape(-1, g)

        def curvature(a: Floats, b: Floats) -> tuple[Floats, Floats]:
            rows, start = self.adjoint(self.apply(a, b))
            flat_a = a.reshape(n, k * g)
            rows = rows + (flat_a @ self.pull + damping * (self.damped_rows @ flat_a[..., None])[..., 0]).reshape(
                n, k, g
            )
            return rows, start + damping * b @ self.damped_first

        left = (towards[0].copy(), towards[1].copy())
        step = (np.zeros_like(left[0]), np.zeros_like(left[1]))
        ready = precondition(*left)
        direction, size = ready, _multiply(left, ready)
        goal = 1e-4 * size
        for _ in range(INNER):
            bent = curvature(*direction)
            length = size / _multiply(direction, bent)
            step = (step[0] + length * direction[0], step[1] + length * direction[1])
            left = (left[0] - length * bent[0], left[1] - length * bent[1])
            ready = precondition(*left)
            before, size = size, _multiply(left, ready)
            if size < goal:
                break
            direction = (ready[0] + size / before * direction[0], ready[1] + size / before * direction[1])
        # 2 towards'x - x'Hx, where (H + damping D) x = towards - left
        damped = (self.damped_rows @ step[0].reshape(n, k * g, 1)).reshape(n, k, g)
        lowered = _multiply(step, towards) + _multiply(step, left)
        lowered += damping * (_multiply(step, (damped, step[1] @ self.damped_first)))
        return step, lowered


def _multiply(a: tuple[Floats, Floats], b: tuple[Floats, Floats]) -> float:
    return float((a[0] * b[0]).sum() + (a[1] * b[1]).sum())


def _fill_lower(upper: Floats, size: int) -> Floats:
    """Return the symmetric matrix with this upper half, diagonal included."""
    matrix = np.zeros((size, size))
    above, right = np.triu_indices(size)
    matrix[above, right] = matrix[right, above] = upper
    return matrix


def _solve(design: Floats, target: Floats, penalty: Floats | float) -> Floats:
    """Return the least-squares solution with ``penalty`` on each squared unknown, relative to its column's size."""
    normal = design.T @ design
    sizes = np.sqrt(np.maximum(np.diag(normal), 1e-300))
    scaled = normal / sizes[:, None] / sizes + np.diag(np.broadcast_to(penalty, sizes.shape))
    return np.asarray(np.linalg.solve(scaled, design.T @ target / sizes) / sizes)
