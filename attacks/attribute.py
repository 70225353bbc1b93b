"""Attribute inference: a sensitive column of the victim from the embeddings that it sends."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from vflsec.attacks.fusion import AttributeFusion
from vflsec.base.checks import check_positive, check_positive_or_none
from vflsec.core.attack import THRESHOLD, Attack
from vflsec.core.message import Kind
from vflsec.core.view import Guess, Need, View
from vflsec.inference.fused import fuse_classes
from vflsec.inference.regression import (
    SearchedModel,
    has_unfinished_fit,
    log_probabilities,
    search_penalty,
    standardize,
)
from vflsec.inference.releases import average, read_last_values
from vflsec.inference.trajectories import has_several_releases, join_functions

MIN_CATEGORY_ROWS = 3
"""Auxiliary rows that a category needs for the classifier to learn it."""

Inputs = dict[str, Tensor]
"""Inputs (n, p) of the classifier, by split."""


@dataclass(kw_only=True, eq=False, repr=False)
class AttributeInference(Attack):
    """Classification of one column of the victim, which is not part of the task, from the embeddings that it sends.

    The classifier is a logistic regression on received embeddings (n, d), with or without own columns (n, p), all
    standardized by training rows. Cross-validation on the auxiliary rows chooses the inputs and the penalty. A category
    with fewer than three auxiliary rows is the least likely one of every row. A number is inferred as above or below
    its median.

    For training rows the input is the mean of the last 1, 3 or 10 releases, because noise averages out. Earlier bottom
    models show other columns: with embeddings of several epochs and no choice of ``reads`` or ``releases``, training
    rows have the model of ``attribute-fusion``; with ``reads``, the input may be a function of all releases
    (``vflsec.inference.trajectories``). Cross-validation chooses. A test row has one release, at prediction. Test rows
    therefore have a classifier of their own, fitted to one release of each auxiliary row, which is as noisy as they
    are.

    Source: Song and Shmatikov, ICLR 2020, "Overlearning reveals sensitive attributes" (arXiv 1905.11742), section 3.1,
    with a linear classifier.

    Args:
        victim: whose column; None for the first passive party.
        column: its name; None for the victim's first categorical column, or its first.
        reads: ``received`` embeddings, ``both`` these and own columns, or ``own`` columns only, which needs no
            federation; None for the better of the first two.
        folds: of the cross-validation.
        releases: number of last releases of a training row that are averaged; None for the best of 1, 3 and 10, and of
            functions of all.
    """

    name = "attribute"
    baseline = False
    side = "either"
    target = "attribute"
    needs = frozenset({Need.FEATURES, Need.EMBEDDINGS, Need.AUX_LABELS})
    reference = "Song and Shmatikov, ICLR 2020, arXiv 1905.11742, section 3.1"
    verified = "scikit-learn's own estimator; figures of the source: unverified"
    differs = (
        "The classifier is linear, or attribute-fusion's of releases of several epochs; the source has a network.",
        "Own columns can be inputs beside the embedding (reads), and several or all releases of a training row are "
        "read (releases).",
        "A number is inferred as above or below its median.",
        THRESHOLD,
    )
    version = 7
    costs = "a few dozen small fits for each number of releases, and for each function of all"
    fails = (
        "if neither the task nor own columns depend on the attribute, and with an embedding as narrow as the task; an "
        "attribute with rare categories needs more auxiliary rows"
    )

    victim: str | None = None
    column: str | None = None
    reads: Literal["received", "both", "own"] | None = None
    folds: int = 5
    releases: int | None = None

    def __post_init__(self) -> None:
        check_positive(folds=self.folds)
        check_positive_or_none(releases=self.releases)
        if self.reads == "own":
            self.needs = frozenset({Need.FEATURES, Need.AUX_LABELS})  # type: ignore[misc]

    def alone(self) -> Attack | None:
        """Return the same model on own columns."""
        if self._reads_all:
            return AttributeFusion(victim=self.victim, column=self.column)
        return AttributeInference(victim=self.victim, column=self.column, reads="own", folds=self.folds)

    @property
    def _reads_all(self) -> bool:
        return self.reads is None and self.releases is None

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return log-probabilities (n, A) for every split with inputs."""
        single, *means = self._list_inputs(view)
        if view.n_classes < 2:  # a constant column
            return _repeat_scores(single[0], torch.zeros(view.n_classes))
        y = view.aux_labels.cpu().numpy()
        counts = np.bincount(y[y >= 0], minlength=view.n_classes)
        learned = counts >= min(MIN_CATEGORY_ROWS, max(1, np.sort(counts)[-2]))  # at least two categories, however rare
        if learned.sum() < 2:  # a single category
            return _repeat_scores(single[0], torch.from_numpy(counts).double())
        known = (y >= 0) & learned[y]
        rows, y = view.aux_rows.cpu().numpy()[known], y[known]
        folds, seed = min(self.folds, int(counts[learned].min())), int(torch.randint(2**31, (), generator=rng))

        def best(choices: Sequence[Inputs]) -> AttributeFit:
            fits = [
                AttributeFit(search_penalty(x[view.aux_split].cpu().numpy()[rows], y, folds, seed), x) for x in choices
            ]
            return max(fits, key=lambda fit: fit.result.value)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ConvergenceWarning)
            of_single, of_means = best(single), [best(choices) for choices in means]
        candidates = of_means if self.releases and of_means else [of_single, *of_means]
        of_train = max(candidates, key=lambda fit: fit.result.value)
        fits = dict.fromkeys(of_single.inputs, of_single) | {view.aux_split: of_train}
        scores = {
            split: log_probabilities(fit.result.model, fit.inputs[split], view.n_classes) for split, fit in fits.items()
        }
        if self._reads_all and has_several_releases(view, sender=view.victim):
            of_kernels = fuse_classes(view.restrict(torch.nonzero(torch.from_numpy(known))[:, 0]), rng)
            scores[view.aux_split] = of_kernels.scores[view.aux_split]
        return Guess(scores, converged=not has_unfinished_fit(caught))

    def _list_inputs(self, view: View) -> list[list[Inputs]]:
        """Return the choices of inputs: of one release for every split, then of several for the auxiliary split.

        Each item has received embeddings, the same beside own columns, or both choices, as ``reads`` says.
        """
        known = view.aux_split
        if self.reads == "own":
            return [[_standardize(view.features, known)]]

        def choices(received: Inputs) -> list[Inputs]:
            both = {split: torch.cat([h, view.features[split]], dim=1) for split, h in received.items()}
            chosen = {"received": [received], "both": [both], None: [received, both]}[self.reads]
            return [_standardize(x, known) for x in chosen]

        single = read_last_values(view, Kind.EMBEDDING, sender=view.victim)
        means = average(view, Kind.EMBEDDING, sender=view.victim, releases=self.releases)
        reads_all = self.releases is None and self.reads is not None
        of_all = join_functions(view, sender=view.victim) if reads_all else []
        further = [*(h for h in means if not torch.equal(h, single[known])), *of_all]
        return [choices(single), *(choices({known: h}) for h in further)]


def _standardize(inputs: Mapping[str, Tensor], split: str) -> Inputs:
    return {name: standardize(x, inputs[split]) for name, x in inputs.items()}


class AttributeFit(NamedTuple):
    """A classifier and its inputs."""

    result: SearchedModel
    inputs: Inputs


def _repeat_scores(inputs: Inputs, scores: Tensor) -> Guess:
    """Return the same scores (A,) for all rows."""
    return Guess({split: scores.expand(len(x), -1) for split, x in inputs.items()})
