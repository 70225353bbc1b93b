"""Fusion: one guess from everything that an adversary holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vflsec.core.attack import Attack
from vflsec.core.view import Guess, Need, View
from vflsec.inference.kernel_mixture import Kernel, Likelihood, Mixture, standardized
from vflsec.inference.opinion_pool import TEMPERATURES, Forest, Opinion, pooled
from vflsec.inference.sources import COLUMNS, Source, Table, sources

EVERYTHING = frozenset({Need.OWN_MODEL, Need.GRADIENTS, Need.EMBEDDINGS, Need.PARAMETERS, Need.PREDICTIONS})


class FromAllSources(Attack):
    """One guess from all sources together: own columns, embeddings, received gradients, whatever else is held.

    Each way of reading each source is a table (``vflsec.inference.sources``). Gaussian processes on subsets of the
    tables are fitted to the auxiliary rows and averaged by how well they explain these rows, so that a source that says
    nothing costs next to nothing. Some tables are also read by the distances between their rows. A split is guessed
    from the tables that cover it: gradients are received for training rows alone.

    The adversary alone runs the same attack on its own columns.
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
    """Classes are regressed as numbers, one for each class.

    The Gaussian processes, randomized trees on own columns and randomized trees on all tables side by side each give
    probabilities of classes. Their weighted mean is the guess (``vflsec.inference.opinion_pool``): a weight is what the
    auxiliary rows say of it, each predicted by a model that was fitted without it.
    """

    version = 3
    reference = f"{FromAllSources.reference}; Yao et al. 2018, Bayesian Analysis 13, for the weights"
    differs = (
        *FromAllSources.differs,
        "Classes are regressed as numbers, one for each class, as in the book's section 6.5; it prefers a likelihood "
        "of classes (chapter 3).",
        "Weights of the three models are their posterior mean; Yao et al. take the best ones.",
    )

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return the probability of each class, (n, C), for every split."""
        labels, known = view.aux_labels, view.aux_split
        targets = F.one_hot(labels, view.n_classes).double()
        models = fitted(view, targets, _of_classes(labels), rng)
        forests: dict[tuple[str, ...], Forest] = {}
        scores = {}
        for split, model in models.items():
            opinions = [Opinion(model.predict(split, known), model.mixture.left_out())]
            for names in model.read_by_trees:
                if names not in forests:
                    forests[names] = Forest(model.joined(names, known)[view.aux_rows], labels, view.n_classes, rng)
                opinions.append(forests[names].opinion(model.joined(names, split)))
            scores[split] = pooled(opinions, labels) if model.tables else opinions[0].scores
        return Guess(scores, budget=_budget(models.values()))


class Fusion(OfClasses):
    """Label inference from all sources together.

    Costs some hundreds of eigenvalue decompositions of the auxiliary rows' similarities and four forests, a few
    seconds. Fails where the auxiliary rows are too few to tell which source speaks of the class.

    Source: this project; Rasmussen and Williams 2006, chapters 2 and 5.
    """

    name = "fusion"


class AttributeFusion(OfClasses):
    """Inference of one column of the victim from all sources together.

    Costs some hundreds of eigenvalue decompositions of the auxiliary rows' similarities and four forests, a few
    seconds. Fails where the auxiliary rows are too few to tell which source speaks of the column.

    Source: this project; Rasmussen and Williams 2006, chapters 2 and 5.

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

    Costs some hundreds of eigenvalue decompositions of the auxiliary rows' similarities, about a second. Fails where
    the auxiliary rows are too few to tell which source speaks of the columns.

    Source: this project. Gaussian processes and their model selection: Rasmussen and Williams 2006, chapters 2 and 5.

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
        targets = view.aux_labels.double()
        models = fitted(view, targets, _of_values(targets), rng)
        scores = {split: model.predict(split, view.aux_split) for split, model in models.items()}
        return Guess(scores, budget=_budget(models.values()))


class Fitted(NamedTuple):
    """What is fitted to the auxiliary rows for the splits that the same tables cover.

    Attributes:
        mixture: Gaussian processes on the tables.
        tables: those that cover the split, by name.
        n_rows: by split.
    """

    mixture: Mixture
    tables: Mapping[str, Table]
    n_rows: Mapping[str, int]

    @property
    def read_by_trees(self) -> list[tuple[str, ...]]:
        """Names of tables: own columns, and everything."""
        everything = tuple(self.tables)
        columns = tuple(name for name in everything if name == COLUMNS)
        return [names for names in dict.fromkeys((columns, everything)) if names]

    def predict(self, split: str, known: str) -> Tensor:
        """Return predictions (n, d) of the rows of ``split``; ``known`` is the split of the auxiliary rows."""
        x = {name: standardized(table[split], table[known]) for name, table in self.tables.items()}
        found = self.mixture.predict({**x, **{name + _DISTANCES: own for name, own in x.items()}})
        return found.expand(self.n_rows[split], -1)  # without tables it is the same for everybody

    def joined(self, names: Iterable[str], split: str) -> Tensor:
        """Return tables of ``split`` side by side, (n, k)."""
        return torch.cat([self.tables[name][split].float() for name in names], dim=1)


def fitted(view: View, targets: Tensor, likelihood: Likelihood, rng: torch.Generator) -> dict[str, Fitted]:
    """Return by split what is fitted to ``targets`` (n, d), which are known of the auxiliary rows."""
    held = sources(view)
    by_tables: dict[frozenset[str], Fitted] = {}
    found = {}
    for split in view.features:
        covering = frozenset(name for name, source in held.items() if split in source.table)
        if covering not in by_tables:
            own = {name: held[name] for name in held if name in covering}
            mixture = Mixture(_kernels(own, view.aux_split), view.aux_rows, targets, likelihood, rng)
            tables = {name: source.table for name, source in own.items()}
            by_tables[covering] = Fitted(mixture, tables, {name: len(x) for name, x in view.features.items()})
        found[split] = by_tables[covering]
    return found


def _budget(models: Iterable[Fitted]) -> dict[str, float]:
    return {"candidates": sum(mixture.n_tried for mixture in {id(m.mixture): m.mixture for m in models}.values())}


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
