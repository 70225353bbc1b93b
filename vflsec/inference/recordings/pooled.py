"""Labels out of noised delta^C, pooled over a whole run: W moves little from batch to batch, and labels never."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.signal import lfilter
from scipy.special import expit

from vflsec.inference.recordings.samples import Floats

# most numbers in the second moments (T, g, g) of all batches; where there are more, the last batches are taken
MAX_ENTRIES = 1 << 26
DECAYS = (0.5, 0.8, 0.9, 0.95, 0.99, 0.999, 1.0)  # how much less each neighboring batch counts; the data choose
ROUNDS = 4  # of estimating W from the labels of other visits, then the labels from W
# noise below this, relative to the signal and squared, is rounding: each batch then gives its own axis exactly
EXACT = 1e-8
RESTARTS, TURNS = 40, 100  # of the search for the rotation of several outputs
MAX_FITTED_SAMPLES = 2000  # samples on which the model of the loss gradients is fitted
SPREAD = 0.1  # least deviation of an averaged loss gradient, so that the nodes below are close enough together

_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(21)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()


class GradientBatch(NamedTuple):
    """What the passive party has of one step."""

    number: int
    rows: NDArray[np.int64]  # (B,) which samples
    mu: Floats | None  # (B, g)
    gradient: Floats  # (B, g), delta^C


class PooledLabels(NamedTuple):
    """What all batches together tell.

    Attributes:
        delta: (n, C) for each sample; as loss gradients it is least, of one output negative, at the label. Of one or
            two outputs its size says how sure that is.
        weights: by step, W (g, C); of more than two outputs, up to a factor.
        samples: for each batch, where its rows are in ``delta``.
        noise: deviation of the noise on each coordinate of delta^C; 0 where there is none.
    """

    delta: Floats
    weights: dict[int, Floats]
    samples: list[NDArray[np.int64]]
    noise: float


def pool(batches: Sequence[GradientBatch], outputs: int, rng: np.random.Generator) -> PooledLabels:
    """Return what delta^C of all ``batches`` tells of each sample, whatever noise is on every coordinate.

    delta^C = delta W^T + noise has rank r = max(1, C - 1) but for the noise. The second moments of neighboring batches
    are added, and their first r eigenvectors are the axes of W; how many neighbors is chosen by how well they predict
    the batch left out. Projections on the axes, summed over all visits of a sample, average the noise out: W moves, the
    label does not. Then W is estimated anew by regression on what the other visits of the same samples say, and so on.

    Of one or two outputs, the passive party also uses mu: its part mu W of the score says how likely each class is. The
    model is delta = s - y, with y = 1 with probability s, and logit s normal around a multiple of mu W; its parameters
    maximize the likelihood of the averages.

    Args:
        batches: learning steps, of which none is all zero.
        outputs: C.
        rng: for the rotation of several outputs.
    """
    rank = max(1, outputs - 1)
    gradients = [batch.gradient for batch in batches]
    counts = np.array([len(gradient) for gradient in gradients])
    ids, members = np.unique(np.concatenate([batch.rows for batch in batches]), return_inverse=True)
    samples = np.split(members, np.cumsum(counts)[:-1])
    axes, noise, exact = _find_axes(gradients, rank)
    several = np.bincount(members)[members] > 1
    for _ in range(ROUNDS if several.mean() > 0.5 and not exact else 0):
        visits, sure = _find_visits(gradients, axes, noise)
        total, sureness = _sum_visits(visits, sure, members, len(ids))
        rest = np.where(several, sureness[members] - sure, 1.0)
        others = np.where(several[:, None], total[members] - sure[:, None] * visits, 0.0) / rest[:, None]
        others = others @ _compute_whitening(others)
        parts = np.split(others, np.cumsum(counts)[:-1])
        axes = _regress(gradients, parts, noise)
    visits, sure = _find_visits(gradients, axes, noise)
    total, sureness = _sum_visits(visits, sure, members, len(ids))
    mean = total / sureness[:, None]
    signal = max(float(np.average((visits**2).mean(axis=1) - 1 / sure, weights=sure**2)), 1e-12)
    unit = 1.0
    if rank > 1:
        turn = find_orientation(mean, outputs, rng)
        delta = mean @ turn
    else:
        turn = np.ones((1, 1)) if outputs == 1 else make_simplex(2).T
        odds = mean[:, 0] / np.sqrt(signal)
        if len(batches) > 1 and all(batch.mu is not None for batch in batches):
            scores = np.concatenate([batch.mu @ axis for batch, axis in zip(batches, axes, strict=True)])[:, 0]
            averages = np.bincount(members, sure * scores) / sureness
            odds, unit = _compute_odds(odds, 1 / (sureness * signal), np.bincount(members), averages)
        if (odds < 0).mean() > 0.5:  # of one output, class 1 is taken to be the rarer
            odds, axes = -odds, -axes
        delta = odds[:, None] @ turn
    weights = {batch.number: axis @ turn * np.sqrt(signal) / unit for batch, axis in zip(batches, axes, strict=True)}
    return PooledLabels(delta, weights, samples, 0.0 if exact else float(np.sqrt(np.median(noise))))


def _find_axes(gradients: Sequence[Floats], rank: int) -> tuple[Floats, Floats, bool]:
    """Return the axes (T, g, r) at their length, the noise's variance (T,), and whether there is none."""
    moments = np.stack([gradient.T @ gradient for gradient in gradients])
    counts = np.array([len(gradient) for gradient in gradients], dtype=np.float64)
    sizes, vectors = np.linalg.eigh(moments / counts[:, None, None])
    noise = sizes[:, :-rank].mean(axis=1) if sizes.shape[1] > rank else np.zeros(len(sizes))
    exact = bool(np.median(noise / sizes[:, -1]) < EXACT)
    noise = np.maximum(noise, EXACT * sizes[:, -1])
    if not exact and len(gradients) > 1:
        moments /= noise[:, None, None]

        def measure_fit(decay: float) -> float:
            around = np.linalg.eigh(_sum_around(moments, decay) - moments)[1][:, :, -rank:]
            return float(np.einsum("tgr,tgh,thr->", around, moments, around))

        decay = max(DECAYS, key=measure_fit)
        sizes, vectors = np.linalg.eigh(_sum_around(moments, decay) / _sum_around(counts, decay)[:, None, None])
        sizes *= noise[:, None]
    lengths = np.sqrt(np.maximum(sizes[:, -rank:] - noise[:, None], EXACT * sizes[:, -1:]))
    axes = vectors[:, :, -rank:] * lengths[:, None]
    for t in range(1, len(axes)):  # each is known up to a rotation of its outputs
        axes[t] = axes[t] @ find_rotation(axes[t], axes[t - 1])
    return axes, noise, exact


def _sum_around(values: Floats, decay: float) -> Floats:
    """Return for each entry of the first axis the sum of all, those k away times ``decay``^k."""
    before = lfilter([1.0], [1.0, -decay], values, axis=0)
    after = lfilter([1.0], [1.0, -decay], values[::-1], axis=0)[::-1]
    return np.asarray(before + after - values)


def _find_visits(gradients: Sequence[Floats], axes: Floats, noise: Floats) -> tuple[Floats, Floats]:
    """Return the loss gradients of each visit along the axes (N, r), and their sureness (N,), one over the variance."""
    visits = np.concatenate([gradient @ np.linalg.pinv(axis).T for gradient, axis in zip(gradients, axes, strict=True)])
    sure = (axes**2).sum(axis=1).mean(axis=1) / noise
    sure = np.maximum(sure, EXACT * sure.max())  # a batch that nothing is known of counts for nothing
    return visits, np.repeat(sure, [len(gradient) for gradient in gradients])


def _sum_visits(visits: Floats, sure: Floats, members: NDArray[np.int64], count: int) -> tuple[Floats, Floats]:
    """Return the sums (n, r) of each sample's visits, weighted by ``sure``, and of the weights (n,)."""
    total: Floats = np.stack([np.bincount(members, sure * column, count) for column in visits.T], axis=1, dtype=float)
    return total, np.asarray(np.bincount(members, sure, count), dtype=np.float64)


def _compute_whitening(rows: Floats) -> Floats:
    """Return the symmetric matrix after which the second moment of ``rows`` is the identity."""
    sizes, vectors = np.linalg.eigh(rows.T @ rows / len(rows))
    return np.asarray(vectors / np.sqrt(np.maximum(sizes, 1e-300)) @ vectors.T)


def _regress(gradients: Sequence[Floats], others: Sequence[Floats], noise: Floats) -> Floats:
    """Return W (T, g, r), up to a factor, by regression of delta^C on what other visits say, over near batches."""
    products = np.stack([gradient.T @ other / v for gradient, other, v in zip(gradients, others, noise, strict=True)])
    counts = np.array([len(gradient) for gradient in gradients]) / noise

    def measure_fit(decay: float) -> float:
        around = _sum_around(products, decay) - products
        return float((around * products).sum() / max(np.sqrt((around**2).sum()), 1e-300))

    decay = max(DECAYS, key=measure_fit)
    return _sum_around(products, decay) / _sum_around(counts, decay)[:, None, None]


def _compute_odds(mean: Floats, variance: Floats, visits: NDArray[np.int64], scores: Floats) -> tuple[Floats, float]:
    """Return minus the log odds of class 1 of each sample, and the root mean square of the released delta.

    ``mean`` (n,) are averages of delta over ``visits``, in units of its root mean square, and ``variance`` that of the
    noise on delta^C in them; ``scores`` are the passive party's part of z, in any unit.
    """
    scores = scores / max(float(np.sqrt(np.mean(scores**2))), 1e-300)
    rng = np.random.default_rng(0)
    few = rng.permutation(len(mean))[:MAX_FITTED_SAMPLES]

    usual = np.array([2, 2, 2, 1])  # a prior's deviations, which keep it from wandering

    def cost(parameters: Floats) -> float:
        likelihood = _fit_model(parameters, mean[few], variance[few], visits[few], scores[few])[0]
        return float(((parameters / usual) ** 2).sum() / 2 - likelihood.sum())

    starts = [np.array([slope, sign, 0.5, 0.3]) for slope in (0.0, 1.0) for sign in (-1, 1)]
    options = {"maxiter": 150, "xatol": 0.02, "fatol": 0.05}
    fits = [minimize(cost, x, method="Nelder-Mead", options=options) for x in starts]
    _, odds, unit = _fit_model(min(fits, key=lambda fit: fit.fun).x, mean, variance, visits, scores)
    return -odds, unit


def _fit_model(
    parameters: Floats, mean: Floats, variance: Floats, visits: NDArray[np.int64], scores: Floats
) -> tuple[Floats, Floats, float]:
    """Return the log likelihood of each average, the log odds of class 1, and the root mean square of delta.

    The parameters are slope, intercept and deviation of logit s given the passive party's part of the score, and the
    deviation of noise that was added to delta itself at each visit. The rest is as in ``_compute_odds``.
    """
    slope, intercept, spread, more = parameters
    s = expit(np.abs(slope) * scores[:, None] + intercept + spread * _NODES)
    unit = float(np.sqrt(np.mean((s * (1 - s)) @ _WEIGHTS) + more**2))
    x = mean[:, None] * unit
    variance = variance[:, None] * unit**2 + more**2 / visits[:, None] + SPREAD**2
    first = (s * np.exp(-((x - s + 1) ** 2) / 2 / variance)) @ _WEIGHTS
    zero = ((1 - s) * np.exp(-((x - s) ** 2) / 2 / variance)) @ _WEIGHTS
    first, zero = np.maximum(first, 1e-300), np.maximum(zero, 1e-300)
    return np.log(first + zero) + np.log(unit) - np.log(variance[:, 0]) / 2, np.log(first) - np.log(zero), unit


def make_simplex(classes: int) -> Floats:
    """Return an orthonormal basis (C, C - 1) of the vectors whose entries sum to zero, in which loss gradients lie."""
    return np.linalg.svd(np.ones((classes, 1)))[0][:, 1:]


def find_orientation(rows: Floats, classes: int, rng: np.random.Generator) -> Floats:
    """Return a map (r, C) under which ``rows`` (n, r) become loss gradients, up to the names of the classes.

    A row of softmax(z) - y has one negative entry, its label's. Alternately each row is given to the class whose entry
    is least and the rotation is fitted to that; of several starts the one with the most such rows wins. One output has
    only a sign to find: class 1, of negative rows, is taken to be the rarer.
    """
    if classes == 1:
        return np.array([[1.0 if (rows < 0).mean() < 0.5 else -1.0]])
    basis = make_simplex(classes)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    units = rows / np.where(lengths > 0, lengths, 1)
    best, most = basis.T, -1.0
    for _ in range(RESTARTS):
        turn, fitted = np.eye(classes - 1), np.linalg.qr(rng.normal(size=(classes - 1, classes - 1)))[0]
        for _ in range(TURNS):
            if np.array_equal(turn, fitted):
                break
            turn = fitted
            fitted = find_rotation(units, -basis[(units @ turn @ basis.T).argmin(axis=1)])
        share = (((units @ turn @ basis.T) < 0).sum(axis=1) == 1).mean()
        if share > most:
            best, most = turn @ basis.T, share
    return best


def find_rotation(a: Floats, b: Floats) -> Floats:
    """Return the orthogonal matrix R that brings ``a`` R nearest to ``b``; both (n, r)."""
    left, _, right = np.linalg.svd(a.T @ b)
    return np.asarray(left @ right)
