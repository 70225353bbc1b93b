"""Regression of classes and of columns from few auxiliary samples, and whether a fit has converged."""

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.special import log_softmax, softmax
from sklearn.base import ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.model_selection import StratifiedKFold
from sklearn.neural_network import MLPRegressor
from torch import Tensor, nn

from vflsec.base.layout import Layout
from vflsec.base.sparse_rows import to_matrix
from vflsec.core.scaling import Bounds, clip_outliers, clip_softly
from vflsec.core.view import Guess, View

PENALTIES = np.logspace(-4, 2, 7)
"""Candidate values of scikit-learn's C."""

SMALL = 200
"""Number of weights up to which Newton's method is much faster than L-BFGS."""


class Standardize(nn.Module):
    """Brings far values of (B, d) near and gives columns mean 0 and deviation 1; nothing is learned.

    Args:
        reference: (n, d) rows whose columns give scales, mean and deviation. A column that is constant in them becomes
            0.
        dtype: of the rows that are standardized; None for that of ``reference``.
    """

    middle: Tensor
    scale: Tensor
    mean: Tensor
    deviation: Tensor

    def __init__(self, reference: Tensor, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        middle, scale = Bounds.from_columns(reference)
        z = clip_softly((reference.double() - middle) / scale)
        deviation = z.std(dim=0, correction=0)
        # rounding errors of a constant are no information
        deviation[(deviation == 0) | (scale <= 1e-12 * middle.abs())] = torch.inf
        scales = {"middle": middle, "scale": scale, "mean": z.mean(dim=0), "deviation": deviation}
        for name, value in scales.items():
            self.register_buffer(name, value.to(dtype or reference.dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return the standardized rows (B, d)."""
        return (clip_softly((x - self.middle) / self.scale) - self.mean) / self.deviation


def standardize(x: Tensor, reference: Tensor | None = None) -> Tensor:
    """Return ``x`` (n, d) in double precision, standardized by the rows of ``reference``; None for its own."""
    result: Tensor = Standardize(x if reference is None else reference, torch.double)(x.double())
    return result


def regress_classes(view: View, *, folds: int, rng: torch.Generator) -> Guess:
    """Return the guess of a logistic regression on own columns, fitted to the auxiliary samples, for every split.

    Cross-validation has at most as many ``folds`` as the rarest class has auxiliary samples; below two, C is 1.
    """
    features = {split: clip_outliers(x, view.features["train"]) for split, x in view.features.items()}
    x, y = to_matrix(features["train"][view.aux_rows]), view.aux_labels.cpu().numpy()
    if len(np.unique(y)) == 1:  # a single class
        same = torch.nn.functional.one_hot(view.aux_labels[:1].cpu(), view.n_classes).float()
        return Guess({split: same.expand(len(x), -1) for split, x in view.features.items()})
    folds = min(folds, int(np.bincount(y)[np.unique(y)].min()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        model = search_penalty(x, y, folds, seed=int(torch.randint(2**31, (), generator=rng))).model
    scores = {split: log_probabilities(model, rows, view.n_classes) for split, rows in features.items()}
    return Guess(scores, converged=not has_unfinished_fit(caught), budget={"fits": folds * len(PENALTIES) + 1})


def has_unfinished_fit(caught: Sequence[warnings.WarningMessage]) -> bool:
    """Whether scikit-learn warned that a fit had not converged."""
    return any(issubclass(warning.category, ConvergenceWarning) for warning in caught)


def log_probabilities(model: ClassifierMixin, x: Tensor, n_classes: int) -> Tensor:
    """Return log-probabilities (n, C) of a fitted linear classifier for rows (n, p).

    A class without an auxiliary sample is the least likely one of every row.
    """
    known = torch.from_numpy(_log_softmax(model, to_matrix(x)))
    scores = torch.full((len(x), n_classes), float(known.min()) - 1.0, dtype=known.dtype)
    scores[:, torch.as_tensor(model.classes_)] = known
    return scores


def _log_softmax(model: ClassifierMixin, x: np.ndarray | csr_array) -> np.ndarray:
    """Return log-probabilities of the known classes. Scikit-learn's own end at the logarithm of the smallest number."""
    decision = model.decision_function(x)  # (n,) if two classes are known
    logits = decision if decision.ndim > 1 else np.stack([np.zeros_like(decision), decision], axis=1)
    return np.asarray(log_softmax(logits, axis=1))


class SearchedModel(NamedTuple):
    """A classifier and its log-likelihood in cross-validation."""

    model: LogisticRegression
    value: float


def search_penalty(x: np.ndarray | csr_array, y: np.ndarray, folds: int, seed: int) -> SearchedModel:
    """Return the classifier with the penalty of the best log-likelihood on folds; C = 1 below two folds."""
    # LogisticRegressionCV takes as long, and its warm starts change the decision values by up to 5e-3.
    small = x.shape[1] * len(np.unique(y)) <= SMALL
    make = partial(LogisticRegression, max_iter=2000, solver="newton-cholesky" if small else "lbfgs")
    if folds < 2:
        return SearchedModel(make().fit(x, y), 0.0)
    split = list(StratifiedKFold(folds, shuffle=True, random_state=seed).split(x, y))
    place = np.searchsorted(np.unique(y), y)
    if small and isinstance(x, np.ndarray):
        values = _score_penalties(x, place, split)
    else:
        fitted = [[(make(C=penalty).fit(x[fit], y[fit]), out) for fit, out in split] for penalty in PENALTIES]
        values = [sum(_log_softmax(m, x[out])[np.arange(len(out)), place[out]].sum() for m, out in f) for f in fitted]
    return SearchedModel(make(C=PENALTIES[np.argmax(values)]).fit(x, y), float(max(values)))


def _score_penalties(x: np.ndarray, y: np.ndarray, split: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[float]:
    """Return the log-likelihood of each penalty on folds; all regressions are fitted at once."""
    held_out = np.zeros((len(split), len(y)), dtype=bool)
    for fold, (_, out) in enumerate(split):
        held_out[fold, out] = True
    each = np.tile(held_out, (len(PENALTIES), 1))  # (penalties folds, n)
    fitted, converged = fit_many(x, y, ~each, np.repeat(PENALTIES, len(split)))
    if not converged:
        warnings.warn("a regression on folds has not converged", ConvergenceWarning, stacklevel=2)
    log_p = predict_many(x, fitted)[:, np.arange(len(y)), y]  # (penalties folds, n)
    return [float(value) for value in (log_p * each).reshape(len(PENALTIES), -1).sum(axis=1)]


STEPS = 100
HALVINGS = 30
TOLERANCE = 1e-8
"""Largest entry of the gradient at which a regression has converged, relative to the weight of its rows."""


def fit_many(
    x: NDArray[np.floating], y: NDArray[np.integer], sampled: NDArray[np.bool_], penalties: NDArray[np.floating]
) -> tuple[NDArray[np.float64], bool]:
    """Return the coefficients (M, p + 1, k) of M regressions, the intercept last, and whether all have converged.

    Each minimizes C times the summed log loss of its rows plus half the square of its slopes, as scikit-learn's
    ``LogisticRegression`` does, by Newton's method with halved steps.

    Args:
        x: (n, p) rows.
        y: (n,) classes 0 to K - 1. With two classes there is a single vector of coefficients (k = 1), else k = K.
        sampled: (M, n) the rows of each regression; each class must occur among them.
        penalties: (M,) values of C.
    """
    z = np.concatenate([x, np.ones((len(x), 1))], axis=1)  # (n, q)
    n_classes, width = int(y.max()) + 1, z.shape[1]
    k = 1 if n_classes == 2 else n_classes
    wanted = np.eye(n_classes)[y][:, -k:]  # (n, k)
    weight = sampled * penalties[:, None]  # (M, n)
    ridge = np.ones(width)
    ridge[-1] = 0
    # Adding a number to all intercepts changes nothing: a small curvature keeps them where they are.
    curved = np.diag(np.tile(np.where(ridge > 0, ridge, 0.0 if k == 1 else 1e-9), k))
    fitted, scale = np.zeros((len(weight), width, k)), np.maximum(1.0, weight.sum(axis=1))

    def loss(b: NDArray[np.float64], weight: NDArray[np.floating]) -> NDArray[np.float64]:
        linear = z @ b
        total = np.logaddexp.reduce(_with_zero(linear) if k == 1 else linear, axis=2) - (linear * wanted).sum(axis=2)
        return np.asarray((weight * total).sum(axis=1) + (ridge[:, None] * b**2).sum(axis=(1, 2)) / 2)

    left = np.arange(len(weight))
    for _ in range(STEPS):
        b, part = fitted[left], weight[left]
        p = softmax(_with_zero(z @ b) if k == 1 else z @ b, axis=2)[:, :, -k:]  # (M, n, k)
        slope = z.T @ (part[:, :, None] * (p - wanted)) + ridge[:, None] * b  # (M, q, k)
        steep = np.abs(slope).max(axis=(1, 2)) > TOLERANCE * scale[left]
        left, b, part, p, slope = (x[steep] for x in (left, b, part, p, slope))
        if not len(left):
            return fitted, True
        hessian = np.tile(curved, (len(left), 1, 1))
        for i, j in product(range(k), repeat=2):
            share = part * (p[:, :, i] * ((i == j) - p[:, :, j]))  # (M, n)
            hessian[:, i * width : (i + 1) * width, j * width : (j + 1) * width] += z.T @ (share[:, :, None] * z)
        flat = slope.transpose(0, 2, 1).reshape(len(left), -1, 1)
        step = np.linalg.solve(hessian, flat).reshape(-1, k, width).transpose(0, 2, 1)
        now, decrease, size = loss(b, part), (slope * step).sum(axis=(1, 2)), np.ones(len(left))
        for _ in range(HALVINGS):
            worse = loss(b - size[:, None, None] * step, part) > now - 1e-4 * size * decrease + 1e-12 * np.abs(now)
            if not worse.any():
                break
            size[worse] /= 2
        fitted[left] = b - size[:, None, None] * step
    return fitted, False


def predict_many(x: NDArray[np.floating], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return log-probabilities (M, n, K) of rows (n, p) by coefficients (M, p + 1, k)."""
    linear = x @ b[:, :-1] + b[:, -1:]
    logits = _with_zero(linear) if linear.shape[2] == 1 else linear
    return np.asarray(logits - np.logaddexp.reduce(logits, axis=2, keepdims=True))


def _with_zero(linear: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the logits (M, n, 2) of two classes by those of the second one (M, n, 1)."""
    return np.concatenate([np.zeros_like(linear), linear], axis=2)


RIDGE_PENALTIES = np.logspace(-6, 5, 23)

ENOUGH = 300
"""Auxiliary rows from which a network is compared with ridge regression; with fewer it does not pay."""

MIN_ROWS_TO_COMPARE = 9
"""Auxiliary rows from which a third can be held out to compare both."""

Inputs = dict[str, Tensor]
"""Columns (n, p) to regress on, by split."""

Model = Literal["ridge", "mlp", "better"]


def regress_columns(
    tables: Sequence[Inputs], view: View, *, rng: torch.Generator, model: Model | None = None, hidden: int = 32
) -> Guess:
    """Return the victim's columns (n, d) for every split of ``tables``.

    Each table has a regression of its own, fitted to its auxiliary rows. The last table that covers a split counts.
    One-hot columns are projected onto the simplex, which can only reduce the error.

    Args:
        tables: inputs of the regressions.
        view: of the adversary.
        rng: draws the network's weights and the rows that are held out.
        model: ``ridge``: y = W x + b with ||Y - X W||^2 + alpha_j ||w_j||^2, where leave-one-out errors choose alpha_j
            for each column j. ``mlp``: a network with one hidden layer. ``better``: for each column, the one with the
            smaller error on a held-out third of the auxiliary rows. None: ``ridge`` below 300 auxiliary rows, else
            ``better``.
        hidden: width of the hidden layer.
    """
    known, y = view.aux_rows.cpu().numpy(), view.aux_labels.cpu().double().numpy()
    values: dict[str, np.ndarray] = {}
    seed = int(torch.randint(2**31, (), generator=rng))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        for inputs in tables:
            x = {split: standardize(rows, inputs[view.aux_split]).cpu().numpy() for split, rows in inputs.items()}
            values |= _predict_better(x, known, y, model, hidden, seed)
    scores = {split: project_categories(torch.from_numpy(x), view.layout) for split, x in values.items()}
    return Guess(scores, converged=not has_unfinished_fit(caught))


def _predict_better(
    x: Mapping[str, np.ndarray], known: np.ndarray, y: np.ndarray, model: Model | None, hidden: int, seed: int
) -> dict[str, np.ndarray]:
    """Return predictions (n, d) by split, of one model or of the better one for each column."""
    models: list[Literal["ridge", "mlp"]] = ["mlp" if model == "mlp" else "ridge"]
    if (model == "better" and len(y) >= MIN_ROWS_TO_COMPARE) or (model is None and len(y) >= ENOUGH):
        models = ["ridge", "mlp"]
    fitted = [_predict(name, x, x["train"][known], y, hidden, seed) for name in models]
    if len(models) == 1:
        return fitted[0]
    held_out = np.random.default_rng(seed).permutation(len(y)) < len(y) // 3
    rows = {"held out": x["train"][known[held_out]]}
    trials = [_predict(name, rows, x["train"][known[~held_out]], y[~held_out], hidden, seed) for name in models]
    errors = [((trial["held out"] - y[held_out]) ** 2).mean(axis=0) for trial in trials]
    better = errors[1] < errors[0]  # (d,)
    return {split: np.where(better, fitted[1][split], fitted[0][split]) for split in x}


def _predict(
    model: Literal["ridge", "mlp"],
    x: Mapping[str, np.ndarray],
    known: np.ndarray,
    y: np.ndarray,
    hidden: int,
    seed: int,
) -> dict[str, np.ndarray]:
    """Return predictions (n, d) by split of one model, fitted to ``known`` (m, p) and ``y`` (m, d)."""
    if len(y) < 3:  # too few to choose a penalty
        return {split: np.broadcast_to(y.mean(axis=0), (len(rows), y.shape[1])).copy() for split, rows in x.items()}
    if model == "ridge":
        regression = RidgeCV(RIDGE_PENALTIES, alpha_per_target=y.shape[1] > 1)
    else:
        regression = MLPRegressor(
            hidden_layer_sizes=(hidden,), alpha=1.0, solver="lbfgs", max_iter=1000, random_state=seed
        )
    regression.fit(known, y if y.shape[1] > 1 else y[:, 0])
    return {split: regression.predict(rows).reshape(len(rows), -1) for split, rows in x.items()}


def compute_loo_error(x: Tensor, view: View) -> float:
    """Return the leave-one-out mean squared error of ridge regression on ``x`` (n, p) for the auxiliary rows.

    Zero with fewer than three auxiliary rows.
    """
    if len(view.aux_rows) < 3:
        return 0.0
    known = standardize(x)[view.aux_rows].cpu().numpy()
    y = view.aux_labels.cpu().double().numpy()
    several = y.shape[1] > 1
    score = RidgeCV(RIDGE_PENALTIES, alpha_per_target=several).fit(known, y if several else y[:, 0]).best_score_
    return -float(np.mean(score))


def project_categories(values: Tensor, layout: Layout | None) -> Tensor:
    """Return values (n, d) with each one-hot block at the nearest point whose entries are >= 0 and sum to one."""
    projected = values.clone()
    for _, kind, start, width in layout.columns if layout else ():
        if kind == "categorical":
            projected[:, start : start + width] = project_simplex(values[:, start : start + width])
    return projected


def project_simplex(x: Tensor) -> Tensor:
    """Return the nearest rows (n, k) whose entries are >= 0 and sum to one.

    Source: Duchi et al., ICML 2008, figure 1.
    """
    descending = x.sort(dim=1, descending=True).values
    excess = (descending.cumsum(dim=1) - 1) / torch.arange(1, x.shape[1] + 1, device=x.device)  # (n, k)
    last = (descending > excess).sum(dim=1, keepdim=True) - 1
    return (x - excess.gather(1, last)).clamp_min(0)


def is_still_falling(losses: list[float]) -> bool:
    """Whether the mean of the last tenth of ``losses`` is below that of the tenth before by over 1 % of the whole fall.

    Fewer than four losses count as falling.
    """
    if len(losses) < 4:
        return True
    tenth = max(1, len(losses) // 10)
    last, before = float(np.mean(losses[-tenth:])), float(np.mean(losses[-2 * tenth : -tenth]))
    return before > last and before - last > 0.01 * (losses[0] - last)
