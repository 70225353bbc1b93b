"""Pseudo-labels: Gaussian classes of own columns, fitted to few labels and to guesses of all other rows."""

import warnings
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from vflsec.base.checks import check_positive
from vflsec.core.attack import THRESHOLD, Attack
from vflsec.core.view import Guess, Need, View
from vflsec.inference.regression import log_probabilities, standardize

RIDGE = 0.1
"""Share of the identity in each class's covariance."""

FOLDS = 5

MAX_COLUMNS = 300
"""More columns than this are replaced by their principal components: covariances cost the square of their number."""

Rule = Callable[[Tensor], Tensor]
"""Returns log-probabilities (n, C) of the known classes for rows (n, p)."""


class PseudoLabels(Attack):
    """Gaussian classes of own columns, fitted to the auxiliary samples and then to pseudo-labels of all rows.

    Each class has a mean and a covariance of its own (quadratic discriminant analysis). In each round, the most likely
    class of a training row is its label for models that then guess other rows. Rows are divided into folds anew, and no
    row is guessed by a model that was fitted to its own pseudo-label. Auxiliary samples keep their labels and are in
    every fit. While a class has no more rows than there are columns, its covariance is singular, and all classes share
    one (linear discriminant analysis). With one auxiliary sample of each class there is no covariance at first, and a
    logistic regression makes the first guesses. More than 300 columns are replaced by as many principal components.

    It reads neither the model nor messages. Its leak is a baseline that an adversary reaches without joining, and a
    candidate for *alone* if rows form clusters and many of them have no known label.

    Source: McLachlan 1975, "Iterative reclassification procedure for constructing an asymptotically optimal rule of
    allocation in discriminant analysis", JASA 70; Friedman 1989 for the regularized covariance.

    Args:
        rounds: number of rounds.
    """

    name = "pseudo-labels"
    baseline = True
    version = 3
    side = "either"
    needs = frozenset({Need.FEATURES, Need.AUX_LABELS})
    reference = "McLachlan 1975, Journal of the American Statistical Association 70"
    verified = "the Bayes rule of a Gaussian mixture; scikit-learn's own estimators"
    differs = (
        "The paper has two classes with one covariance. Here there is any number, each with its own, regularized.",
        "The paper fits one model to all guesses. Here a row is guessed by a model that was fitted without it.",
        "The paper repeats until no guess changes. Here the number of rounds is fixed.",
        "Beyond 300 columns, as many of their principal components are used.",
        THRESHOLD,
    )
    costs = "rounds x folds discriminant analyses of all training rows"
    fails = "if classes are far from Gaussian, or if the first guesses are so poor that they confirm each other"

    def __init__(self, *, rounds: int = 10) -> None:
        check_positive(rounds=rounds)
        self.rounds = rounds

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return log-probabilities (n, C), up to a constant of each row, for every split."""
        split, known, labels = view.aux_split, view.aux_rows.cpu(), view.aux_labels.cpu()
        if len(torch.unique(labels)) == 1:  # a single class
            same = torch.nn.functional.one_hot(labels[:1], view.n_classes).float()
            return Guess({name: same.expand(len(rows), -1) for name, rows in view.features.items()})
        x = {name: standardize(rows, view.features[split]).cpu() for name, rows in view.features.items()}
        if x[split].shape[1] > MAX_COLUMNS:
            x = _reduce(x, split, seed=int(torch.randint(2**31, (), generator=rng)))
        classes, labels = torch.unique(labels, return_inverse=True)
        rules = [_make_rule(_get_moments(x[split][known], labels, len(classes))) or _fit_lda(x[split][known], labels)]
        guessed = rules[0](x[split])
        for _ in range(self.rounds):
            pseudo = guessed.argmax(dim=1)
            pseudo[known] = labels
            fold = torch.randperm(len(pseudo), generator=rng) % FOLDS
            rules = _fit_without_each_fold(x[split], pseudo, fold, known)
            for k, rule in enumerate(rules):
                guessed[fold == k] = rule(x[split][fold == k])
        others = {
            name: torch.stack([rule(rows) for rule in rules]).mean(0) for name, rows in x.items() if name != split
        }
        by_split = {split: guessed, **others}
        scores = {}
        for name, log_p in by_split.items():  # a class without an auxiliary sample is the least likely of every row
            unlikely = log_p.new_full((len(log_p), view.n_classes), float(log_p.min()) - 1.0)
            scores[name] = unlikely.index_copy(1, classes, log_p)
        return Guess(scores, budget={"fits": 1 + self.rounds * len(rules)})


def _reduce(x: Mapping[str, Tensor], split: str, seed: int) -> dict[str, Tensor]:
    """Return the first principal components of rows (n, p) by split, those of the rows of ``split``."""
    components = PCA(min(MAX_COLUMNS, len(x[split])), svd_solver="randomized", random_state=seed).fit(
        np.asarray(x[split])
    )
    return {name: torch.from_numpy(components.transform(np.asarray(rows))) for name, rows in x.items()}


def _fit_without_each_fold(x: Tensor, y: Tensor, fold: Tensor, known: Tensor) -> list[Rule]:
    """Return for each fold the rule that is fitted to the other rows (n, p), and to the ``known`` ones of the fold."""
    in_fold = [fold == k for k in range(int(fold.max()) + 1)]
    is_known = torch.zeros(len(y), dtype=torch.bool).index_fill(0, known, True)
    n_classes = int(y.max()) + 1
    left_out = [_get_moments(x[rows & ~is_known], y[rows & ~is_known], n_classes) for rows in in_fold]
    total = torch.stack(left_out).sum(0) + _get_moments(x[known], y[known], n_classes)
    return [
        _make_rule(total - moments) or _fit_lda(x[~rows | is_known], y[~rows | is_known])
        for rows, moments in zip(in_fold, left_out, strict=True)
    ]


def _get_moments(x: Tensor, y: Tensor, n_classes: int) -> Tensor:
    """Return by class the second moments (C, p + 1, p + 1) of rows (n, p) and a column of ones.

    They hold also the sum and the number of rows, and those of a part of the rows add up.
    """
    z = nn.functional.pad(x, (0, 1), value=1.0)
    return torch.stack([z[y == c].T @ z[y == c] for c in range(n_classes)])


def _make_rule(moments: Tensor) -> Rule | None:
    """Return the quadratic discriminant rule by the moments of classes; None if a class has too few rows for it."""
    counts, width = moments[:, -1, -1], moments.shape[1] - 1
    if counts.min() <= width:
        return None
    mean = moments[:, -1, :width] / counts[:, None]
    covariance = moments[:, :width, :width] / counts[:, None, None] - mean[:, :, None] * mean[:, None, :]
    factor = torch.linalg.cholesky((1 - RIDGE) * covariance + RIDGE * torch.eye(width, dtype=mean.dtype))
    inverse = torch.cholesky_inverse(factor)
    pulled = inverse @ mean[:, :, None]  # (C, p, 1)
    offset = (counts / counts.sum()).log() - factor.diagonal(dim1=1, dim2=2).log().sum(1)
    corner = offset[:, None, None] - mean[:, None, :] @ pulled / 2
    form = torch.cat([torch.cat([-inverse / 2, pulled / 2], 2), torch.cat([pulled.mT / 2, corner], 2)], 1)
    return partial(_evaluate_forms, form)


def _evaluate_forms(form: Tensor, x: Tensor) -> Tensor:
    """Return log-probabilities (n, C) of rows (n, p), each a quadratic form (C, p + 1, p + 1) of the row and a one."""
    z = nn.functional.pad(x, (0, 1), value=1.0)
    return ((z @ form) * z).sum(dim=2).T.log_softmax(dim=1)


def _fit_lda(x: Tensor, y: Tensor) -> Rule:
    """Return the rule of a linear discriminant analysis; for one row of each class, of a regression."""
    model = LogisticRegression()
    if len(y) > len(torch.unique(y)):
        model = LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto")
    with warnings.catch_warnings():  # a class of one row adds nothing to the shared covariance
        warnings.filterwarnings("ignore", message="Only one sample available")
        return partial(log_probabilities, model.fit(np.asarray(x), np.asarray(y)), n_classes=int(y.max()) + 1)
