"""Fusion: one guess from everything that an adversary knows."""

from typing import ClassVar

import torch

from vflsec.core.attack import Attack
from vflsec.core.view import Guess, Need, View
from vflsec.inference.fused import fuse_classes, fuse_values
from vflsec.inference.sources import EVERYTHING


class FromAllSources(Attack):
    """One model reads own columns, embeddings, received gradients and whatever else the view contains.

    Each source becomes one or more tables (``vflsec.inference.sources``). Gaussian processes on subsets of the tables
    are fitted to the auxiliary rows. They are averaged by how well they explain these rows, so that a useless source
    does little harm. Some tables also have a kernel of the distances between rows. A split is guessed from the tables
    that cover it: gradients, for example, cover training rows only.

    The adversary alone runs the same attack on its own columns.
    """

    version = 3
    needs = frozenset({Need.FEATURES, Need.AUX_LABELS})
    wants = EVERYTHING
    reference = "this project; Rasmussen and Williams 2006, Gaussian Processes for Machine Learning, chapters 2 and 5"
    differs: ClassVar[tuple[str, ...]] = (
        "Candidates are weighted by the mean of the log marginal likelihood and the leave-one-out log likelihood, with "
        "a prior against further tables. The book describes each of the two separately (sections 5.4.1 and 5.4.2).",
    )
    verified = "leave-one-out predictions against naive refits, predictions and evidence against scikit-learn"
    costs = "a few hundred eigenvalue decompositions of kernel matrices of the auxiliary rows"
    fails = "with too few auxiliary rows to find out which source is informative"

    def alone(self) -> Attack:
        """Return the same attack, which then reads the adversary's own columns only."""
        return self


class OfClasses(FromAllSources):
    """Classes are regressed as numbers, one for each class.

    The Gaussian processes, randomized trees on own columns and randomized trees on all tables each give probabilities
    of classes. The guess is their weighted mean (``vflsec.inference.opinion_pool``). The weights depend on predictions
    of the auxiliary rows, each by a model that was fitted without that row.
    """

    version = 4
    reference = f"{FromAllSources.reference}; Yao et al. 2018, Bayesian Analysis 13, for the weights"
    differs = (
        *FromAllSources.differs,
        "Classes are regressed as numbers, one for each class, as in the book's section 6.5; it prefers a likelihood "
        "of classes (chapter 3).",
        "Weights of the three models are their posterior mean; Yao et al. take the best ones.",
    )
    costs = f"{FromAllSources.costs}, and up to four forests"

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return the probability of each class, (n, C), for every split."""
        return fuse_classes(view, rng)


class Fusion(OfClasses):
    """Label inference from all sources together.

    Where a passive party is told the nodes of federated trees, the guesses of ``instance-space`` and
    ``boosting-replay``, with the default options, take the place of the randomized trees.

    Source: this project; Rasmussen and Williams 2006, chapters 2 and 5.
    """

    name = "fusion"
    version = 15


class AttributeFusion(OfClasses):
    """Inference of one column of the victim from all sources together.

    Source: this project; Rasmussen and Williams 2006, chapters 2 and 5.

    Args:
        victim: whose column; None for the first other party.
        column: its name; None for the victim's first categorical column, or its first.
    """

    name = "attribute-fusion"
    version = 9
    side = "either"
    target = "attribute"

    def __init__(self, *, victim: str | None = None, column: str | None = None) -> None:
        self.victim = victim
        self.column = column


class ColumnFusion(FromAllSources):
    """Recovery of the victim's columns from all sources together.

    What ``split-order`` recovers from federated trees is blended with the Gaussian processes, column by column. For
    rows that were not trained on, forests learn from what it recovered for training rows.

    A test row has one embedding, at prediction, where a training row has those of many models. A further Gaussian
    process and randomized trees therefore learn from the guesses of up to 1200 training rows
    (``vflsec.inference.fused``), and are blended in by their errors on auxiliary rows that these guesses left out.

    Known rows show which columns take few values, such as those of a category. These get their expectation given the
    guess, whose errors on known rows are taken as Gaussian (``vflsec.inference.discrete``), where it is nearer.

    An active party knows the gradients that it sent and the agreed optimizer. If the victim's bottom model is linear,
    it replays the training from its guesses, which makes them nearly exact, and then solves for the columns of test
    rows whose values lie on grids (``vflsec.inference.linear_replay``).

    Source: this project. Gaussian processes and their model selection: Rasmussen and Williams 2006, chapters 2 and 5.
    Lattices: Lenstra, Lenstra, Lovasz 1982, Mathematische Annalen 261; Babai 1986, Combinatorica 6.

    Args:
        victim: whose columns; None for the first other party.
    """

    name = "column-fusion"
    side = "either"
    target = "features"
    version = 14

    def __init__(self, *, victim: str | None = None) -> None:
        self.victim = victim

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return values (n, d) for every split."""
        return fuse_values(view, rng)
