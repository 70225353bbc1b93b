"""Mixup: each update learns from mixtures of two rows, of all parties' embeddings and of the labels."""

from collections.abc import Mapping, Sequence

import torch
from scipy.special import betaincinv
from torch import Tensor
from torch.nn import functional as F

from vflsec.core.defense import Defense

SMALLEST = 1e-30
"""The smallest alpha. Its weights are 1 in every digit; some versions of scipy have no quantiles of smaller ones."""


class Mixup(Defense):
    """The top model is trained on mixtures of two rows of a batch, drawn anew by the active party for each update.

    Row i has a partner p(i), where p is a random permutation of the batch, and a weight w_i >= 1/2, the larger of a
    draw x from Beta(alpha, alpha) and 1 - x. Every party's embedding (B, d) becomes w_i · h_i + (1 - w_i) · h_p(i), and
    the label (B, C), one-hot or soft, likewise. The gradient of a row is the sum of two parts: w_i of its own mixture's
    gradient, and a part of the mixture in which it is the partner.

    Source: Zhang et al. 2018 (arXiv 1710.09412), section 2; at the cut layer, as in Verma et al. 2019 (manifold mixup,
    arXiv 1806.05236). Other parties could mix their rows before sending only with a common seed, which hides nothing
    among them.

    With w = 1/2 for all, half of a gradient depends on the label of its own row, and a quarter each on those of two
    random rows. Embeddings and predictions are unchanged: the active party sees every row separately.

    | case | result |
    |---|---|
    | strength close to 0 | weights of 1: no mixing |
    | strength towards infinity | weights of 1/2 |
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
    hides = "from the passive party: part of the label in each gradient, which depends on three rows"
    costs = "two weighted sums for each embedding"
    fails = (
        "over epochs, where partners average out (direct, averaging, direction), and against mc, because the model "
        "learns the classes"
    )

    def prepare(self, widths: Mapping[str, int], *, n_classes: int, rng: torch.Generator) -> None:
        """Store the random stream of partners and weights."""
        self._rng = rng
        self._classes = n_classes

    def on_batch(self, embeddings: Sequence[Tensor], targets: Tensor) -> tuple[Sequence[Tensor], Tensor]:
        """Return mixed embeddings, one (B, d) of each party, and targets (B, C)."""
        like = embeddings[0]
        soft = targets if targets.dim() > 1 else F.one_hot(targets, self._classes)
        partner = torch.randperm(len(like), generator=self._rng, device=self._rng.device)
        drawn = torch.rand(len(like), generator=self._rng, device=self._rng.device, dtype=torch.float64)
        alpha = max(self.strength, SMALLEST)
        beta = torch.from_numpy(betaincinv(alpha, alpha, drawn.cpu().numpy()))
        weight = torch.maximum(beta, 1 - beta).to(like)[:, None]

        def mix(x: Tensor) -> Tensor:
            return weight * x + (1 - weight) * x[partner]

        return [mix(h) for h in embeddings], mix(soft.to(like))
