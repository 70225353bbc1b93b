"""Residue reconstruction: solve a batch's summed gradient for what each of its rows had sent."""

from __future__ import annotations

import torch
from torch import Tensor

from vflsec.core.attack import Attack
from vflsec.core.auxiliary import oriented
from vflsec.core.checks import positive_or_none
from vflsec.core.message import Kind
from vflsec.core.view import Guess, Need, View
from vflsec.inference.directions import multiples, span
from vflsec.inference.releases import Releases, received


class Residual(Attack):
    """Label inference where only the sum of a batch is seen, X'g, the gradient of a linear bottom model. Two classes.

    In vertical logistic regression a party gets Σ_i d_i x_i over a batch of B rows, or decrypts it, and knows its own
    columns X (B, k). The residuals d = p - y are the least-squares solution by the pseudo-inverse, and a row is of
    class 1 where d < 0. They are exact if X has rank B; otherwise the solution is the part of d that lies in the
    columns' span, a share of k/B of it, and each epoch's other batches add another part: it is averaged over releases.

    In split learning a party receives each row's gradient. This attack sums them, X'g (k, d), and forgets them: it
    measures what would be left if batches were summed before they were sent. Where the cut is one wide, the sign is as
    above; where it is wider, a row's residual is its multiple of the principal axis of its turn, an epoch. Auxiliary
    labels turn it round if that serves them better; without any, the sign stays at a cut of one, and class 1 is the
    rarer at a wider one.

    Costs one decomposition of a (k, k) matrix for each batch. Fails where batches have far more rows than there are
    columns, and where many rows have the same columns.

    Source: Tan et al. 2022 (arXiv 2205.04166), abstract; by the pseudo-inverse as in the code of Attack-Defense-VFL.

    Args:
        turns: how many releases of each row are read, from the first; None for all.
    """

    name = "residual"
    needs = frozenset({Need.GRADIENTS, Need.OWN_FEATURES})
    classes = 2
    reference = "Tan et al. 2022, arXiv 2205.04166, and code of Attack-Defense-VFL"
    verified = "exact: all residuals are recovered where a batch has no more rows than columns"
    differs = (
        "Residuals come from the pseudo-inverse; the source solves for them by gradient descent.",
        "They are averaged over releases; the source solves each batch by itself.",
        "Embeddings wider than one are read along their principal axis; the source has logistic regression alone.",
        "Only the abstract of the source could be read.",
    )

    def __init__(self, *, turns: int | None = None) -> None:
        positive_or_none(turns=turns)
        self.turns = turns

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return scores (n, 2) of the training rows."""
        releases = received(view, Kind.GRADIENT).first(self.turns)
        solved = releases._replace(values=unsummed(releases, view.features["train"]))
        wide = solved.values.shape[1] > 1
        scores = -multiples(solved.values, releases.by_turn())
        score = releases.mean(scores[:, None])[:, 0]
        if wide and (score > 0).double().mean() > 0.5:  # class 1 is the rarer
            score = -score
        return Guess({"train": oriented(view, score)}, budget={"batches": len(releases.by_message())})


def unsummed(releases: Releases, inputs: Tensor) -> Tensor:
    """Return for each line (R, d) what the least-squares solution of X'g says of it, X (B, k) its batch's inputs.

    The shortest g with a given X'g is its projection on the span of X's columns: what can be known of g, and no more.

    Args:
        releases: gradients g, of which only the sums X'g are used.
        inputs: (n, k) of the training rows.
    """
    found = torch.empty_like(releases.values)
    for lines in releases.by_message():
        basis = span(inputs[releases.rows[lines]].to(found.dtype))
        found[lines] = basis @ (basis.T @ releases.values[lines])
    return found
