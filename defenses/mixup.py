"""Mixup: each update learns from blends of two rows, of all parties' embeddings and of the labels alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from scipy.special import betaincinv
from torch import Tensor
from torch.nn import functional as F

from vflsec.core.defense import Defense


class Mixup(Defense):
    """The top model is trained on blends of the rows of a batch, made at the active party afresh for each update.

    Row i has a partner p(i), p a random permutation of the batch, and a weight w_i >= 1/2, the larger of a draw from
    Beta(alpha, alpha) and of one less it. Every party's embedding (B, d) becomes w_i · h_i + (1 - w_i) · h_p(i), and
    the label (B, C), one-hot or soft, likewise. The gradient that goes back for a row is therefore the sum of two: of
    its own blend, w_i of it, and of the blend in which it is the partner.

    Source: Zhang et al. 2018 (arXiv 1710.09412), section 2; at the cut layer, as in Verma et al. 2019 (manifold mixup,
    arXiv 1806.05236). Parties other than the active one could mix their rows before these leave only with one seed for
    all, which hides nothing among them.

    From the passive party it hides part of the label in each gradient: of a row's two blends, both know its label, and
    each that of another row too. With w = 1/2 for all, half of what a gradient says of labels is its own row's, and a
    quarter each of two rows drawn at random. Embeddings and predictions are as they were: the active party sees every
    row by itself. Costs two weighted sums per embedding. Fails over epochs: partners are drawn afresh, and the mean of
    a row's gradients is again of its own label (``direct``, ``averaging``, ``direction``, which read all epochs); and
    against ``mc``, since the model still learns the classes.

    Guarantee: none, empirical only.

    | case | result |
    |---|---|
    | strength 0 | no mixing: training without it, bit for bit |
    | strength close to 0 | weights of 1: each row by itself |
    | strength without end | weights of 1/2 |
    | one row | that row |

    Args:
        strength: alpha.
    """

    name = "mixup"
    strength_name = "alpha"
    strengths = (0.2, 1.0, 5.0)
    points = ()
    reference = (
        "Zhang et al. 2018, arXiv 1710.09412, section 2; at the cut layer, as Verma et al. 2019, arXiv 1806.05236"
    )
    guarantee = "none, empirical only; over epochs a row's partners average out"

    def __init__(self, strength: float, *, at: Iterable[str] | None = None) -> None:
        super().__init__(strength, at=at)
        self._rng = torch.Generator()
        self._classes = 0

    def prepare(self, widths: Mapping[str, int], *, n_classes: int, rng: torch.Generator) -> None:
        """Take the stream that partners and weights are drawn from."""
        self._rng = rng
        self._classes = n_classes

    def on_batch(self, embeddings: Sequence[Tensor], targets: Tensor) -> tuple[Sequence[Tensor], Tensor]:
        """Return blended embeddings, one (B, d) of each party, and targets (B, C)."""
        like = embeddings[0]
        soft = targets if targets.dim() > 1 else F.one_hot(targets, self._classes)
        partner = torch.randperm(len(like), generator=self._rng, device=self._rng.device)
        drawn = torch.rand(len(like), generator=self._rng, device=self._rng.device, dtype=torch.float64)
        beta = torch.from_numpy(betaincinv(self.strength, self.strength, drawn.cpu().numpy()))
        weight = torch.maximum(beta, 1 - beta).to(like)[:, None]

        def blended(x: Tensor) -> Tensor:
            return weight * x + (1 - weight) * x[partner]

        return [blended(h) for h in embeddings], blended(soft.to(like))
