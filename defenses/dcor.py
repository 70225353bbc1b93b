"""Distance correlation: the embeddings that arrive are trained to depend less on the label."""

from __future__ import annotations

import torch
from torch import Tensor

from vflsec.core.defense import Defense

STABILISER = 1e-16


class DistanceCorrelation(Defense):
    """Adds lambda · log dCor(h, Y) to the active party's loss, for each embedding h (B, d) that it receives.

    With Y the one-hot labels (B, C), A and B the doubly centered matrices (B, B) of Euclidean distances between rows of
    h and of Y (row means and column means taken away, the grand mean added), and means over all entries:
    dCor = sqrt(mean(A·B)) / sqrt(sqrt(mean(A·A)) · sqrt(mean(B·B))), in [0, 1]; 1e-16 is added to each mean.

    Source: Sun et al. 2022 (arXiv 2203.01451), section 4; the form of VFLAIR's code. lambda from 1e-4 upwards.

    Hides the label in the embedding, from whoever sees embeddings or keeps the passive party's bottom model: ``mc`` and
    ``spectral-embedding``. The active party acts alone, through the gradient that it sends, and holds the labels
    anyway: the passive party is the one kept from learning them. It does not aim at gradients. They carry one more term
    that depends on the label; where the top model comes to ignore the embedding, that term is most of what is left, and
    ``direction`` still reads it (planted toy data, lambda .1 to 3: .78 to .97). Where one class is rare, ``norm`` gains
    (credit-default, lambda 1, one seed: .99, from .94, while ``direction`` and ``averaging`` fall to .55 and .51): the
    term does not know where embeddings lie, its gradients add up to nothing over a batch, and those of a class with a
    share p of the rows are (1 - p) / p times as long as the others', on average. No penalty that pushes two classes
    together does otherwise; ``max-norm`` after it makes lengths alike. Costs two (B, B) matrices per passive party and
    step, O(B^2·(d + C)) time. Fails against whoever has what was said early in training, and where the active party has
    no columns of its own to predict from: less dependence is then less utility. The estimate in a batch is biased
    upwards, more in small ones.

    On credit-default lambda .03 takes ``mc`` below what the party reaches alone, and with it most of what joining is
    worth (one seed: an AUC of .740, from .774; the active party alone has .726). On digits, three seeds, .1 costs
    nothing and leaves ``mc`` at .79; .3 takes it to .33, and six points of accuracy.
    On census-income with 5,000 labels, three seeds, .03 takes ``mc`` to .52, ``direction`` to .79 and the model from
    .93 to .88, raises ``norm`` to 1.00, and lets one seed collapse.

    Guarantee: none, empirical only. Strength 0 trains as without it, bit for bit; a batch of one class, or of one row,
    adds nothing.

    Args:
        strength: lambda.
    """

    name = "dcor"
    strength_name = "lambda"
    strengths = (0.01, 0.03, 0.1)
    points = ()
    reference = (
        "Sun et al. 2022, Label Leakage and Protection from Forward Embedding in VFL, arXiv 2203.01451, section 4"
    )
    guarantee = "none, empirical only; it acts on embeddings, and gradients go on to tell labels"

    def penalty(self, h: Tensor, labels: Tensor, sender: str) -> Tensor | None:
        """Return lambda · log dCor of embeddings (B, d) and labels (B,), a scalar; None where there is one class."""
        if bool((labels == labels[:1]).all()):
            return None
        return self.strength * log_distance_correlation(h, labels)


def log_distance_correlation(h: Tensor, labels: Tensor) -> Tensor:
    """Return log dCor of embeddings (B, d) and one-hot labels, given as class numbers (B,)."""
    a = _centered(torch.cdist(h, h, compute_mode="donot_use_mm_for_euclid_dist"))
    b = _centered((labels[:, None] != labels).to(h.dtype) * 2**0.5)  # the distance of two one-hot rows
    logs = [torch.log((x * y).mean().clamp(min=0) + STABILISER) for x, y in ((a, b), (a, a), (b, b))]
    return logs[0] / 2 - (logs[1] + logs[2]) / 4


def _centered(distances: Tensor) -> Tensor:
    rows, columns = distances.mean(dim=1, keepdim=True), distances.mean(dim=0, keepdim=True)
    return distances - rows - columns + distances.mean()
