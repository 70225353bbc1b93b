"""Attribute inference: a sensitive column of the victim from the embeddings that it sends."""

from __future__ import annotations

import warnings
from typing import Literal, NamedTuple

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from vflsec.core.attack import Attack
from vflsec.core.checks import one_of, positive, positive_or_none
from vflsec.core.message import Kind
from vflsec.core.view import Guess, Need, View
from vflsec.inference.regression import Searched, log_probabilities, searched
from vflsec.inference.releases import averages, latest

FEWEST = 3
"""Auxiliary rows that a category must have for the classifier to learn it."""


class AttributeInference(Attack):
    """Classification of one column of the victim, which the task never asked for, from what it sends.

    Logistic regression on received embeddings (n, d), with or without own columns (n, p) beside them, all standardized
    by training rows; which of the two, and the penalty, is chosen by log loss on folds of the auxiliary rows. A
    category with under three auxiliary rows counts as the least likely everywhere. A number is inferred as above or
    below its median.

    Of training rows the mean of the last 1, 3 or 10 releases is read, whichever these folds find the best: over
    several, noise averages out. Of test rows there is the one release at prediction, and they have a classifier of
    their own, fitted on one release of each auxiliary row: as noisy as they.

    Costs some dozens of small fits for each number of releases, a second. Fails where neither the task nor own columns
    have to do with the attribute, and where the embedding is as narrow as the task; a categorical attribute of rare
    categories needs more rows.

    Source: Song and Shmatikov, ICLR 2020, "Overlearning reveals sensitive attributes" (arXiv 1905.11742), section 3.1,
    with a linear classifier.

    Args:
        victim: whose column; None for the first passive party.
        column: its name; None for the victim's first categorical column, or its first.
        reads: ``received`` embeddings alone, ``both``, or ``own`` columns alone, which needs no federation; None for
            the better of the first two.
        folds: of the search for the penalty.
        turns: of how many last releases of a training row the mean is taken; None for the best of 1, 3 and 10.
    """

    name = "attribute"
    baseline = False
    side = "either"
    target = "attribute"
    needs = frozenset({Need.OWN_FEATURES, Need.EMBEDDINGS, Need.AUX_LABELS})
    reference = "Song and Shmatikov, ICLR 2020, arXiv 1905.11742, section 3.1"
    verified = "scikit-learn's own estimator; figures of the source: unverified"
    differs = (
        "The classifier is linear; the source has a network.",
        "Own columns may be read beside the embedding (reads), and several releases of a training row are averaged "
        "(turns).",
        "A number is inferred as above or below its median.",
        "Two classes: where argmax divides the auxiliary labels badly, a threshold that they support takes its place.",
    )
    version = 3

    def __init__(
        self,
        *,
        victim: str | None = None,
        column: str | None = None,
        reads: Literal["received", "both", "own"] | None = None,
        folds: int = 5,
        turns: int | None = None,
    ) -> None:
        if reads is not None:
            one_of(("received", "both", "own"), reads=reads)
        positive(folds=folds)
        positive_or_none(turns=turns)
        self.folds = folds
        self.victim = victim
        self.column = column
        self.reads = reads
        self.turns = turns
        if reads == "own":
            self.needs = frozenset({Need.OWN_FEATURES, Need.AUX_LABELS})  # type: ignore[misc]

    def alone(self) -> Attack | None:
        """Return the same classifier on own columns."""
        return AttributeInference(victim=self.victim, column=self.column, reads="own", folds=self.folds)

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return log-probabilities (n, A) for every split of which something is known."""
        tables, y = self._tables(view), view.aux_labels.cpu().numpy()
        if view.n_classes < 2:  # a column that is the same everywhere
            return Guess({split: torch.zeros(len(own), view.n_classes) for split, own in tables[0][0].items()})
        counts = np.bincount(y[y >= 0], minlength=view.n_classes)
        learned = counts >= min(FEWEST, max(1, np.sort(counts)[-2]))  # two categories at least, however rare
        if learned.sum() < 2:  # nothing to tell apart
            commonest = torch.from_numpy(counts).double()
            return Guess({split: commonest.expand(len(own), -1) for split, own in tables[0][0].items()})
        known = (y >= 0) & learned[y]
        rows, y = view.aux_rows.cpu().numpy()[known], y[known]
        folds = min(self.folds, int(counts[learned].min()))
        seed = int(torch.randint(2**31, (), generator=rng))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ConvergenceWarning)
            tried = [
                [Fitted(searched(x[view.aux_split].cpu().numpy()[rows], y, folds, seed), x) for x in choices]
                for choices in tables
            ]
        best = [max(fits, key=lambda fit: fit.found.value) for fits in tried]
        averaged = best[1:] if self.turns else best  # a fixed number of releases is no choice
        for_known = max(averaged or best, key=lambda fit: fit.found.value)
        read = {**best[0].x, view.aux_split: for_known.x[view.aux_split]}
        scores = {
            split: log_probabilities((for_known if split == view.aux_split else best[0]).found.model, x, view.n_classes)
            for split, x in read.items()
        }
        unfinished = any(issubclass(warning.category, ConvergenceWarning) for warning in caught)
        return Guess(scores, converged=not unfinished)

    def _tables(self, view: View) -> list[list[Table]]:
        """Return what may be classified, standardized by the rows among which the auxiliary ones are.

        First what is known of every split, one release of each row; then, of the auxiliary rows' split alone, each mean
        of several. Of either, received embeddings and the same beside own columns.
        """
        known = view.aux_split
        if self.reads == "own":
            return [[_standardized(dict(view.features), known)]]

        def choices(received: Table) -> list[Table]:
            beside = {split: torch.cat([h, view.features[split]], dim=1) for split, h in received.items()}
            read = {"received": [received], "both": [beside], None: [received, beside]}[self.reads]
            return [_standardized(x, known) for x in read]

        single = latest(view, Kind.EMBEDDING, sender=view.victim)
        means = averages(view, Kind.EMBEDDING, sender=view.victim, turns=self.turns)
        return [choices(single), *(choices({known: h}) for h in means if not torch.equal(h, single[known]))]


Table = dict[str, Tensor]
"""What is classified, (n, p) by split."""


class Fitted(NamedTuple):
    """What was found on a table, and the table."""

    found: Searched
    x: Table


def _standardized(inputs: Table, split: str) -> Table:
    mean, deviation = inputs[split].double().mean(dim=0), inputs[split].double().std(dim=0, correction=0)
    return {name: (x - mean) / deviation.clamp_min(1e-12) for name, x in inputs.items()}
