"""Attribute inference: a sensitive column of the victim from the embeddings that it sends."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression as Classifier
from sklearn.model_selection import StratifiedKFold
from torch import Tensor
from vflsec.attacks.logistic import PENALTIES, LogisticRegression

from vflsec.core.attack import Attack
from vflsec.core.checks import one_of, positive
from vflsec.core.message import Kind
from vflsec.core.releases import latest
from vflsec.core.view import Guess, Need, View

FEWEST = 3
"""Auxiliary rows that a category must have for the classifier to learn it."""

SMALL = 200
"""Weights up to which Newton's method is the faster one, by far."""


class AttributeInference(LogisticRegression):
    """Classification of one column of the victim, which the task never asked for, from what it sends.

    Logistic regression on received embeddings (n, d), with or without own columns (n, p) beside them, all standardised
    by training rows; which of the two, and the penalty, is chosen by log loss on folds of the auxiliary rows. Of
    training rows the last release is read, of test rows the one at prediction. A category with under three auxiliary
    rows counts as the least likely everywhere. A number is inferred as above or below its median.

    Costs some dozens of small fits, 0.2 s. Fails where neither the task nor own columns have to do with the attribute,
    and where the embedding is as narrow as the task; a categorical attribute of rare categories needs more rows.

    Source: Song and Shmatikov, ICLR 2020, "Overlearning reveals sensitive attributes" (arXiv 1905.11742), section 3.1,
    with a linear classifier.

    Args:
        victim: whose column; None for the first passive party.
        column: its name; None for the victim's first categorical column, or its first.
        reads: ``received`` embeddings alone, ``both``, or ``own`` columns alone, which needs no federation; None for
            the better of the first two.
        folds: of the search for the penalty.
    """

    name = "attribute"
    side = "active"
    target = "attribute"
    needs = frozenset({Need.OWN_FEATURES, Need.EMBEDDINGS, Need.AUX_LABELS})
    reference = "Song and Shmatikov, ICLR 2020, arXiv 1905.11742, section 3.1"
    verified = "scikit-learn's own estimator; figures of the source: unverified"

    def __init__(
        self,
        *,
        victim: str | None = None,
        column: str | None = None,
        reads: Literal["received", "both", "own"] | None = None,
        folds: int = 5,
    ) -> None:
        if reads is not None:
            one_of(("received", "both", "own"), reads=reads)
        positive(folds=folds)
        super().__init__(folds=folds)
        self.victim = victim
        self.column = column
        self.reads = reads
        if reads == "own":
            self.needs = frozenset({Need.OWN_FEATURES, Need.AUX_LABELS})  # type: ignore[misc]

    def alone(self) -> Attack | None:
        """Return the same classifier on own columns."""
        return AttributeInference(victim=self.victim, column=self.column, reads="own", folds=self.folds)

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return log-probabilities (n, A) for every split of which something is known."""
        choices, y = self._inputs(view), view.aux_labels.cpu().numpy()
        counts = np.bincount(y[y >= 0], minlength=view.n_classes)
        learned = counts >= min(FEWEST, max(1, np.sort(counts)[-2]))  # two categories at least, however rare
        if learned.sum() < 2:  # nothing to tell apart
            commonest = torch.from_numpy(counts).double()
            return Guess({split: commonest.expand(len(own), -1) for split, own in choices[0].items()})
        known = (y >= 0) & learned[y]
        rows, y = view.aux_rows.cpu().numpy()[known], y[known]
        folds = min(self.folds, int(counts[learned].min()))
        seed = int(torch.randint(2**31, (), generator=rng))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ConvergenceWarning)
            tried = [searched(x[view.aux_split].cpu().numpy()[rows], y, folds, seed) for x in choices]
        best = max(range(len(choices)), key=lambda i: tried[i].value)
        scores = {s: self._log_probabilities(tried[best].model, x, view.n_classes) for s, x in choices[best].items()}
        unfinished = any(issubclass(warning.category, ConvergenceWarning) for warning in caught)
        return Guess(scores, converged=not unfinished)

    def _inputs(self, view: View) -> list[dict[str, Tensor]]:
        """Return what may be classified, each (n, p) by split, standardised by the rows of the auxiliary ones."""
        own, found = dict(view.features), []
        if self.reads != "own":
            received = latest(view, Kind.EMBEDDING, sender=view.victim)
            beside = {split: torch.cat([h, own[split]], dim=1) for split, h in received.items()}
            found += [received] if self.reads in (None, "received") else []
            found += [beside] if self.reads in (None, "both") else []
        return [_standardized(x, view.aux_split) for x in found or [own]]


class Searched(NamedTuple):
    """A classifier and its log-likelihood on folds."""

    model: Classifier
    value: float


def searched(x: np.ndarray, y: np.ndarray, folds: int, seed: int) -> Searched:
    """Return the classifier with the penalty of best log-likelihood on folds, and that; C = 1 below two folds."""
    small = x.shape[1] * len(np.unique(y)) <= SMALL
    make = partial(Classifier, max_iter=2000, solver="newton-cholesky" if small else "lbfgs")
    if folds < 2:
        return Searched(make().fit(x, y), 0.0)
    split = list(StratifiedKFold(folds, shuffle=True, random_state=seed).split(x, y))
    place = np.searchsorted(np.unique(y), y)
    values = []
    for penalty in PENALTIES:
        fitted = [(make(C=penalty).fit(x[fit], y[fit]), out) for fit, out in split]
        values.append(sum(m.predict_log_proba(x[out])[np.arange(len(out)), place[out]].sum() for m, out in fitted))
    return Searched(make(C=PENALTIES[np.argmax(values)]).fit(x, y), float(max(values)))


def _standardized(inputs: dict[str, Tensor], split: str) -> dict[str, Tensor]:
    mean, deviation = inputs[split].double().mean(dim=0), inputs[split].double().std(dim=0, correction=0)
    return {name: (x - mean) / deviation.clamp_min(1e-12) for name, x in inputs.items()}
