"""Boosting replay: boosting on guessed labels, in the trees of the training, improves the guesses."""

import torch

from vflsec.base.checks import check_non_negative, check_positive, check_positive_or_none
from vflsec.core.attack import THRESHOLD, Attack
from vflsec.core.view import Guess, Need, View
from vflsec.inference.opinion_pool import pool_opinions
from vflsec.inference.sources import EVERYTHING
from vflsec.inference.trees.guesses import ReplaySettings, guess_labels, regress_on_nodes


class BoostingReplay(Attack):
    """Label inference from the node of each row in each tree, by repeating the training on guessed labels.

    A passive party knows which rows are together in a node, and how the value of a leaf follows from labels. It starts
    from the guess of ``instance-space``, with the auxiliary labels put in. With these labels it replays the boosting:
    probabilities, derivatives and the value of each node. The new score of a row is the sum of the values of its nodes,
    from each of which the row's own label is taken out: it would only confirm itself. The new scores, as probabilities,
    are the labels of the next replay. Many replays drift away from the labels.

    The party also knows that none of its own bins has a larger gain than a split that was chosen. More replays take
    labels that explain all known splits in this way (``vflsec.inference.trees.labels``): those that follow from own
    columns and nodes; those near what randomized trees learn from the guesses (``vflsec.inference.trees.labels``);
    and, with few rows for each split and 5,000 at most, a label for each row by itself.

    The guess is a weighted mean of the start and the last replays (``vflsec.inference.opinion_pool``). Weights depend
    on predictions of the auxiliary rows, each part of them guessed without its labels. Test rows are scored by the
    nodes that the party splits itself, which are all that it is told at prediction, and by randomized trees that
    learn from the labels inferred for training rows.

    Source: this project. Values of nodes: Chen and Guestrin 2016 (XGBoost), equation 5; what a passive party sees:
    Cheng et al. 2021 (SecureBoost, arXiv 1901.08755).

    Args:
        replays: how often the boosting is replayed before labels are fitted to the splits.
        learning_rate: of the training; None for what the parties agreed on and for the default of ``secureboost``,
            each with replays of its own. No message says it: an audit of a transcript knows the default only.
        l2: of the training; None for what the parties agreed on, or else the default.
    """

    name = "boosting-replay"
    stream = "fusion"  # which joins the same guesses; with the same view they are computed once
    wants = EVERYTHING
    version = 7
    needs = frozenset({Need.FEATURES, Need.NODES, Need.AUX_LABELS})
    reference = "this project; Chen and Guestrin 2016 (XGBoost), equation 5; Cheng et al. 2021 (SecureBoost)"
    verified = "the scores of trainings of which all nodes and labels are known, left-out values against a naive loop"
    differs = (THRESHOLD,)
    costs = (
        "six times instance-space after its principal components, 24 forests, and 18 fits of labels that explain the "
        "splits, of 20 to 54 replays with products of rows, own bins and nodes"
    )
    fails = (
        "if nodes are withheld or the guess of instance-space is poor; it expects one tree for each class in a round, "
        "and gains less if some rounds are not shown"
    )

    def __init__(self, *, replays: int = 2, learning_rate: float | None = None, l2: float | None = None) -> None:
        check_positive(replays=replays)
        check_positive_or_none(learning_rate=learning_rate)
        check_non_negative(l2=0 if l2 is None else l2)
        self.replays = replays
        self.learning_rate = learning_rate
        self.l2 = l2

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return the probability of each class, (n, C), for training rows, and test rows if any node of them is told.

        Where all nodes are withheld, or with a single auxiliary row, it is the guess of ``instance-space``.
        """
        first = regress_on_nodes(view, rng)
        by_split = guess_labels(view, first, rng, ReplaySettings(self.replays, self.learning_rate, self.l2))
        scores = {split: pool_opinions(opinions, view.aux_labels) for split, opinions in by_split.items()}
        return Guess(scores or first.scores, budget={"candidates": first.tried, "replays": self.replays})
