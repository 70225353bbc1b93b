"""Split order: the directions of rows at a party's splits order them by its columns."""

import torch

from vflsec.attacks.imputation import Imputation
from vflsec.core.attack import Attack
from vflsec.core.view import Guess, Need, View
from vflsec.inference.trees.bounds import find_bounds
from vflsec.inference.trees.values import recover_columns


class SplitOrder(Attack):
    """Recovery of a party's columns from the side of its splits to which rows go, and from its histograms.

    The active party chooses a bin, by its number, and learns which rows go left. In an ordered column these have
    smaller values than the others, so that each split at another bin halves what is unknown. Over all trees each row
    has bounds on the quantile of each column. Of training rows histograms tell more, since the active party knows the
    derivatives that were added up: which rows are in a bin of few rows follows exactly
    (``vflsec.inference.trees.histograms``), and the bins of others obey linear equations
    (``vflsec.inference.trees.values``). A category's bin tells which rows are of it.

    Quantiles become values by isotonic regression on the auxiliary rows, if there are at least 5, else by the quantiles
    of a normal distribution. A column that no tree splits has its mean.

    Source: Luo et al. 2021 (arXiv 2010.10152) restrict the paths of trees; Weng et al. 2020 (arXiv 2011.09290) read
    sums over rows with known derivatives.

    Args:
        victim: whose columns; None for the first other party.
    """

    name = "split-order"
    side = "active"
    target = "features"
    version = 5
    needs = frozenset({Need.NODES, Need.HISTOGRAMS})
    wants = frozenset({Need.HISTOGRAMS, Need.AUX_LABELS})
    reference = "Luo et al. 2021, arXiv 2010.10152; Weng et al. 2020, arXiv 2011.09290"
    verified = "the exact order of rows where a column is split at every bin; all bins from sums over small nodes"
    differs = (
        "Luo et al. restrict the possible paths by a prediction; here the active party is told the path of each row.",
        "Luo et al. know thresholds; here bins are numbers without values, which auxiliary rows give.",
        "Weng et al. encode magic numbers in the derivatives they send; here the party follows the protocol.",
    )
    costs = (
        "a search in each histogram, and 60 products of up to 1,000 equations with the bins of "
        "each row, for each column"
    )
    fails = "for columns that are split in few places, and if nodes are few and have many rows"

    def __init__(self, *, victim: str | None = None) -> None:
        self.victim = victim

    def alone(self) -> Attack:
        """Return imputation: without the federation there are neither splits nor histograms."""
        return Imputation(victim=self.victim)

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return values (n, d) for every split."""
        victim = view.victim or self.victim or next(name for name in view.parties if name not in view.party.split("+"))
        known = find_bounds(view, victim)
        return Guess(recover_columns(view, victim), budget={} if known is None else {"units": len(known.units)})
