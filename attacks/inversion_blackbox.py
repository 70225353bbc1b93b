"""Black-box inversion: the victim's columns from the embeddings that it sends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vflsec.attacks.imputation import Imputation
from vflsec.base.checks import check_positive, check_positive_or_none
from vflsec.core.attack import Attack
from vflsec.core.message import Kind
from vflsec.core.view import Guess, Need, View
from vflsec.inference.regression import Inputs, Model, compute_loo_error, regress_columns
from vflsec.inference.releases import average, read_last_values
from vflsec.inference.trajectories import join_functions


@dataclass(kw_only=True, eq=False, repr=False)
class BlackBoxInversion(Attack):
    """Recovery of the victim's columns by an inverse map, fitted to auxiliary rows: embedding -> columns.

    The inverse is a regression on received embeddings (n, d) and own columns (n, p). The source has a network
    (``model=mlp``); with a few dozen auxiliary rows ridge regression is the stronger inverse.

    For training rows the input is a function of all releases, since earlier bottom models send other projections of the
    columns: all of them side by side, their first principal components (``vflsec.inference.trajectories``) or what
    completes these (``vflsec.inference.trajectories``), with or without own columns. Or it is the mean of the last 1, 3
    or 10 releases, because noise averages out. The one with the smallest leave-one-out error of ridge regression on
    auxiliary rows is taken. A test row has one release, at prediction. Test rows therefore have an inverse of their
    own, fitted to one release of each auxiliary row, which is as noisy as they are.

    Source: He et al., ACSAC 2019, "Model inversion attacks against collaborative inference", section 5 (black box).

    Args:
        victim: whose columns; None for the first passive party.
        model: ``ridge``; ``mlp``; ``better``, for each column the better of both; None for ``ridge`` below 300
            auxiliary rows, else ``better``.
        hidden: width of the network's hidden layer.
        with_columns: whether the columns of the active party are inputs too.
        releases: number of last releases of a training row that are averaged; None for the best of 1, 3 and 10, and of
            functions of all.
    """

    name = "inversion-blackbox"
    side = "either"
    target = "features"
    needs = frozenset({Need.EMBEDDINGS, Need.AUX_LABELS})
    reference = "He et al., ACSAC 2019, section 5"
    verified = "exact inversion of a linear bottom model; figures of the source: unverified"
    differs = (
        "The inverse is ridge regression below 300 auxiliary rows, else the better of it and a network; the source "
        "has a network.",
        "Own columns are inputs beside the embedding (with_columns).",
        "A function of several or all releases of a training row is the input (releases); the source sends each input "
        "once.",
    )
    version = 5
    costs = "a ridge regression for each column and choice of releases"
    fails = (
        "with a narrow embedding: if it is as wide as there are classes, little more than the label can be recovered; "
        "with noise on embeddings it does as well as own columns"
    )

    victim: str | None = None
    model: Model | None = None
    hidden: int = 32
    with_columns: bool = True
    releases: int | None = None

    def __post_init__(self) -> None:
        check_positive(hidden=self.hidden)
        check_positive_or_none(releases=self.releases)

    @property
    def search(self) -> Mapping[str, Sequence[Any]]:
        """Vary the regression, and the number of releases that are averaged.

        A search scores training rows only. It does not impose a network on test rows, which are noisier: ``better``
        decides for each on auxiliary rows.
        """
        return {"model": (None, "better"), "releases": (None, 1, 3, 10)}

    def alone(self) -> Attack:
        """Return imputation with the same regression."""
        return Imputation(victim=self.victim, model=self.model, hidden=self.hidden)

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return the columns (n, d) of every split with received embeddings."""
        return regress_columns(self._tables(view), view, rng=rng, model=self.model, hidden=self.hidden)

    def _tables(self, view: View) -> list[Inputs]:
        """Return the inputs from one release of each row and, where it is better, from means of several."""

        def inputs(h: Tensor, split: str) -> Tensor:
            return torch.cat([h, view.features[split]], dim=1) if self.with_columns else h

        known = view.aux_split
        means = [inputs(h, known) for h in average(view, Kind.EMBEDDING, sender=view.victim, releases=self.releases)]
        of_all = [] if self.releases else join_functions(view, sender=view.victim, with_completed=True)
        choices = [*means, *of_all, *(inputs(x, known) for x in of_all if self.with_columns)]
        best = means[0] if len(choices) == 1 else min(choices, key=lambda x: compute_loo_error(x, view))
        single = {s: inputs(h, s) for s, h in read_last_values(view, Kind.EMBEDDING, sender=view.victim).items()}
        return [single] if torch.equal(best, single[known]) else [single, {known: best}]
