"""Residue reconstruction: solve the summed gradient of a batch for the residual of each row."""

import torch
from torch import Tensor

from vflsec.core.message import Kind
from vflsec.core.view import Guess, Need, View
from vflsec.inference.auxiliary import orient
from vflsec.inference.releases import OnReleases, Releases, find_span, project_batches, read_releases


class Residual(OnReleases):
    """Label inference from the sum over a batch, X'g, which is the gradient of a linear bottom model. Two classes.

    In vertical logistic regression a party receives, or decrypts, Σ_i d_i x_i over a batch of B rows, and knows its own
    columns X (B, k). The least-squares solution for the residuals d = p - y comes from the pseudo-inverse; a row
    belongs to class 1 if d < 0. It is exact if X has rank B. Otherwise it is the part of d in the span of the columns,
    a share of k/B. Other batches in other epochs add other parts, so it is averaged over releases.

    In split learning a party receives the gradient of each row. This attack computes X'g (k, d) and uses it only: it
    measures what would be left if batches were summed before they were sent. If the cut layer is one wide, the sign is
    as above. If it is wider, a row's residual is its projection on the principal axis of its epoch. Auxiliary labels
    can reverse the sign; without any, it stays for a cut of width one, and class 1 is taken to be rarer for a wider
    one.

    Source: Tan et al. 2022 (arXiv 2205.04166), abstract; by the pseudo-inverse as in the code of Attack-Defense-VFL.

    Args:
        releases: number of releases of each row to use, from the first; None for all.
    """

    name = "residual"
    version = 2
    needs = frozenset({Need.GRADIENTS, Need.FEATURES})
    classes = 2
    reference = "Tan et al. 2022, arXiv 2205.04166, and code of Attack-Defense-VFL"
    verified = "exact: all residuals are recovered where a batch has no more rows than columns"
    differs = (
        "Residuals come from the pseudo-inverse; the source solves for them by gradient descent.",
        "They are averaged over releases; the source solves each batch separately.",
        "Gradients wider than one are projected on their principal axis; the source has logistic regression only.",
        "Only the abstract of the source could be read.",
    )
    contrib = True
    costs = "one decomposition of a (k, k) matrix for each batch"
    fails = "if batches have far more rows than there are columns, and if many rows have the same columns"

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return scores (n, 2) of the training rows."""
        releases = read_releases(view, Kind.GRADIENT).take_first(self.releases)
        solved = releases._replace(values=solve_gradients(releases, view.features["train"]))
        wide = solved.values.shape[1] > 1
        scores = -project_batches(solved.values, releases.group_by_epoch())
        score = releases.mean(scores[:, None])[:, 0]
        if wide and (score > 0).double().mean() > 0.5:  # class 1 is rarer
            score = -score
        return Guess({"train": orient(view, score)}, budget={"batches": len(releases.group_by_message())})


def solve_gradients(releases: Releases, inputs: Tensor) -> Tensor:
    """Return the least-squares solution (R, d) for the gradients of a batch, from X'g and the batch's inputs X (B, k).

    The shortest g with a given X'g is the projection of g on the span of X's columns. Only the sums X'g are used.
    """
    solved = torch.empty_like(releases.values)
    for indices in releases.group_by_message():
        basis = find_span(inputs[releases.rows[indices]].to(solved.dtype))
        solved[indices] = basis @ (basis.T @ releases.values[indices])
    return solved
