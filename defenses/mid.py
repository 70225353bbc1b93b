"""MID: each received embedding passes a noisy bottleneck, and the loss penalizes the information that passes."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vflsec.core.defense import Defense


class InformationBottleneck(Defense):
    """A variational bottleneck at the active party, between each received embedding h (B, w) and the top model.

    A linear layer of its own for each sender maps h to mu and r, (B, w) each. With std = softplus(r - 1/2) the
    bottleneck is t = mu + std · eps, where eps ~ N(0, I) is drawn anew in training and is 0 at prediction. A second
    linear layer maps t to the input of the top model, (B, w). The loss gains lambda times the divergence of t from N(0,
    I), the mean over rows of sum_j (mu_j^2 + std_j^2 - 1 - 2 log std_j) / 2, an upper bound of the information in nats
    that t has about h.

    Source: Zou et al. 2023 (arXiv 2301.01142, MID), as in VFLAIR's code, where lambda is 0 to 1e4. Their encoder and
    decoder end in ReLU, which forces mu >= 0 and std >= .47; here they are linear.

    The penalty's gradient has a part that all rows share. Added to gradients that point to opposite sides, it makes
    those of one class longer. This reveals no more than ``direction`` reads without it, and disappears if an attacker
    subtracts the mean of each message.

    A strength close to 0 gives a bottleneck without a penalty.

    Args:
        strength: lambda.
    """

    name = "mid"
    strength_name = "lambda"
    strengths = (0.01, 0.03, 0.1)
    points = ()
    reference = "Zou et al. 2023, Mutual Information Regularization for Vertical Federated Learning, arXiv 2301.01142"
    guarantee = "none, empirical only; the penalty bounds information in the bottleneck, but gradients are sent"
    hides = "from the passive party: labels in gradients, which shrink and get noise, and so in its bottom model (mc)"
    costs = "two layers with 3 w^2 weights for each passive party, and a noisier loss"
    fails = (
        "with a small lambda, because the model trains against the noise and gradients keep their sign (direction), "
        "and norm can gain; with a large one the top model ignores the passive party"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._encoders, self._decoders = nn.ModuleDict(), nn.ModuleDict()
        self._rng = torch.Generator()

    def prepare(self, widths: Mapping[str, int], *, n_classes: int, rng: torch.Generator) -> None:
        """Draw the two layers of each sender."""
        self._rng = rng
        for sender, width in widths.items():
            self._encoders[sender] = nn.Linear(width, 2 * width)
            self._decoders[sender] = nn.Linear(width, width)

    def on_received(self, h: Tensor, sender: str) -> Tensor:
        """Return the input (B, w) of the top model in place of the embedding (B, w)."""
        t, deviation = self._encode(h, sender)
        if self._encoders.training:
            t = t + deviation * torch.randn(t.shape, generator=self._rng, device=t.device, dtype=t.dtype)
        fed: Tensor = self._decoders[sender](t)
        return fed

    def penalty(self, h: Tensor, labels: Tensor, sender: str) -> Tensor:
        """Return lambda times the divergence of the bottleneck from N(0, I), a scalar."""
        mean, deviation = self._encode(h, sender)
        return self.strength * measure_divergence(mean, deviation).mean()

    def _encode(self, h: Tensor, sender: str) -> tuple[Tensor, Tensor]:
        mean, raw = self._encoders[sender](h).chunk(2, dim=1)
        return mean, F.softplus(raw - 0.5) + 1e-6  # the divergence needs its logarithm


def measure_divergence(mean: Tensor, deviation: Tensor) -> Tensor:
    """Return KL(N(mean, deviation^2) || N(0, I)) of each row (B, w), in nats, as (B,)."""
    return (mean.square() + deviation.square() - 1 - 2 * deviation.log()).sum(dim=1) / 2
