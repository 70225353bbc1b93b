"""Fusion: one guess from everything that an adversary holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from vflsec.attacks.kernel_mixture import Kernel, Likelihood, Mixture, standardized

from vflsec.core.attack import Attack
from vflsec.core.sources import Source, sources
from vflsec.core.view import Guess, Need, View

EVERYTHING = frozenset({Need.OWN_MODEL, Need.GRADIENTS, Need.EMBEDDINGS, Need.PARAMETERS, Need.PREDICTIONS})

TEMPERATURES = torch.logspace(-1, 2, 16, dtype=torch.float64)
"""Factors of the predictions of classes by which they become log odds."""


class FromAllSources(Attack):
    """One guess from all sources together: own columns, embeddings, received gradients, whatever else is held.

    Each way of reading each source is a table (``vflsec.core.sources``). Gaussian processes on subsets of the tables
    are fitted to the auxiliary rows and averaged by how well they explain these rows, so that a source that says
    nothing costs next to nothing. Some tables are also read by the distances between their rows. A split is guessed
    from the tables that cover it: gradients are received for training rows alone.

    The adversary alone runs the same attack on its own columns.

    Costs some hundreds of eigenvalue decompositions of the auxiliary rows' similarities, about a second. Fails where
    the auxiliary rows are too few to tell which source speaks of the target.

    Source: this project. Gaussian processes and their model selection: Rasmussen and Williams 2006, chapters 2 and 5.
    """

    version = 2
    needs = frozenset({Need.OWN_FEATURES, Need.AUX_LABELS})
    wants = EVERYTHING
    reference = "this project; Rasmussen and Williams 2006, Gaussian Processes for Machine Learning, chapters 2 and 5"
    differs: ClassVar[tuple[str, ...]] = (
        "Candidates are weighted by the mean of the log marginal likelihood and the leave-one-out log likelihood, with "
        "a prior against further tables. The book describes each of the two by itself (sections 5.4.1 and 5.4.2).",
    )
    verified = "leave-one-out predictions against naive refits, predictions and evidence against scikit-learn"

    def alone(self) -> Attack:
        """Return the same attack, which then has nothing but the adversary's own columns."""
        return self


class OfClasses(FromAllSources):
    """Classes are regressed as numbers, one for each class."""

    differs = (
        *FromAllSources.differs,
        "Classes are regressed as numbers, one for each class, as in the book's section 6.5; it prefers a likelihood "
        "of classes (chapter 3).",
    )

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return a score for each class, (n, C), for every split; each is near the class's probability."""
        return fused(view, F.one_hot(view.aux_labels, view.n_classes).double(), _of_classes(view.aux_labels), rng)


class Fusion(OfClasses):
    """Label inference from all sources together."""

    name = "fusion"


class AttributeFusion(OfClasses):
    """Inference of one column of the victim from all sources together.

    Args:
        victim: whose column; None for the first other party.
        column: its name; None for the victim's first categorical column, or its first.
    """

    name = "attribute-fusion"
    side = "either"
    target = "attribute"

    def __init__(self, *, victim: str | None = None, column: str | None = None) -> None:
        self.victim = victim
        self.column = column


class ColumnFusion(FromAllSources):
    """Recovery of the victim's columns from all sources together.

    Args:
        victim: whose columns; None for the first other party.
    """

    name = "column-fusion"
    side = "either"
    target = "features"

    def __init__(self, *, victim: str | None = None) -> None:
        self.victim = victim

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return values (n, d) for every split."""
        return fused(view, view.aux_labels.double(), _of_values(view.aux_labels.double()), rng)


def fused(view: View, targets: Tensor, likelihood: Likelihood, rng: torch.Generator) -> Guess:
    """Return predictions of ``targets`` (n, d), which are known of the auxiliary rows, for every split of ``view``."""
    held = sources(view)
    scores, tried = {}, 0
    fitted: dict[frozenset[str], Mixture] = {}
    for split in view.features:
        covering = frozenset(name for name, source in held.items() if split in source.table)
        if covering not in fitted:
            kernels = _kernels({name: held[name] for name in held if name in covering}, view.aux_split)
            fitted[covering] = Mixture(kernels, view.aux_rows, targets, likelihood, rng)
            tried += fitted[covering].n_tried
        tables = {name: held[name].table for name in covering}
        x = {name: standardized(table[split], table[view.aux_split]) for name, table in tables.items()}
        found = fitted[covering].predict({**x, **{name + _DISTANCES: own for name, own in x.items()}})
        scores[split] = found.expand(len(view.features[split]), -1)  # without any table, the mean for everybody
    return Guess(scores, budget={"candidates": tried})


_DISTANCES = ", distances"


def _kernels(held: Mapping[str, Source], split: str) -> dict[str, Kernel]:
    """Return a linear kernel of each source, and one of distances where that is worth it."""
    x = {name: standardized(source.table[split], source.table[split]) for name, source in held.items()}
    curved = {name + _DISTANCES: Kernel(x[name], nonlinear=True) for name, source in held.items() if source.distances}
    return {**{name: Kernel(own) for name, own in x.items()}, **curved}


def _of_classes(labels: Tensor) -> Likelihood:
    """Return the log likelihood of classes, where predictions times the best of ``TEMPERATURES`` are log odds."""

    def likelihood(predicted: Tensor, rows: Tensor) -> Tensor:
        log_p = torch.log_softmax(TEMPERATURES.to(predicted.device)[:, None, None, None] * predicted, dim=3)
        of_class = log_p.gather(3, labels[rows].expand(*log_p.shape[:2], -1)[..., None])
        return of_class.sum(dim=(2, 3)).amax(dim=0)

    return likelihood


def _of_values(targets: Tensor) -> Likelihood:
    """Return the log likelihood of values with Gaussian errors, as of one column."""

    def likelihood(predicted: Tensor, rows: Tensor) -> Tensor:
        errors = (predicted - targets[rows]).square().mean(dim=(1, 2)).clamp_min(torch.finfo(targets.dtype).tiny)
        return -len(rows) / 2 * errors.log()

    return likelihood
