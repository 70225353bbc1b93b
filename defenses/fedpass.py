"""FedPass: received embeddings are scaled and shifted by private random passports."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vflsec.core.defense import Defense


class Passports(Defense):
    """A passport layer at the active party, between each received embedding h (B, w) and the top model.

    A linear layer W of its own for each sender maps h to W h (B, w). The input of the top model is

        tanh(gamma) · W h + tanh(beta),  gamma = D(E(W s)),  beta = D(E(W t)),

    entry by entry. Passports s and t (w,) pass W too, so that the obfuscation adapts as W learns. E and D are linear, w
    -> max(1, w // 4) -> w, with a leaky ReLU between them. Each passport has a center, N(-1, 1) entry by entry, drawn
    once. For each update, the active party draws the passport uniformly from an interval of width range around the
    center. Predictions use the centers.

    Source: Gu et al. 2023 (FedPass, arXiv 2301.12623), unverified: its text was not read. The layer is that of FATE's
    and SecretFlow's code, with one linear map instead of two. There, passports are drawn once, and their mean is
    varied; but constant passports far from 0 are a constant scale, which hides nothing. The paper also has a passport
    layer in each passive party's bottom model, which hides its columns from the active party. This is the active
    party's half only, which hides labels.

    The paper's theorems bound the error of recovering W's input by an attacker who knows neither, not that of guessing
    labels. A strength close to 0 gives a layer with constant passports.

    Args:
        strength: range, the width of the interval from which each entry of a passport is drawn.
    """

    name = "fedpass"
    strength_name = "range"
    points = ()
    reference = "Gu et al. 2023 (FedPass), arXiv 2301.12623; unverified, the active party's half"
    guarantee = "none, empirical only; unverified"
    hides = (
        "from the passive party: labels in gradients, which pass W and tanh(gamma), so that the meaning of their "
        "entries changes from batch to batch"
    )
    costs = (
        "w^2 weights and two small layers for each passive party; utility, because the model learns for all passports"
    )
    fails = "within a batch, whose rows share one passport (direction), and over batches where gamma keeps its sign"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._layers = nn.ModuleDict()
        self._rng = torch.Generator()

    def prepare(self, widths: Mapping[str, int], *, n_classes: int, rng: torch.Generator) -> None:
        """Draw the layers of each sender, and the centers of its passports."""
        self._rng = rng
        for sender, width in widths.items():
            self._layers[sender] = _PassportLayer(width)

    def on_received(self, h: Tensor, sender: str) -> Tensor:
        """Return the input (B, w) of the top model in place of the embedding (B, w)."""
        layer = self._layers[sender]
        assert isinstance(layer, _PassportLayer)
        passports = layer.centers
        if layer.training:
            drawn = torch.rand(passports.shape, generator=self._rng, device=passports.device)
            passports = passports + self.strength * (drawn - 0.5)
        fed: Tensor = layer(h, passports)
        return fed


class _PassportLayer(nn.Module):
    """A linear layer whose output is scaled and shifted by functions of passports.

    Args:
        width: w.

    Attributes:
        centers: (2, w) of the passports for scale and shift.
    """

    centers: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        narrow = max(1, width // 4)
        self.encode, self.decode = nn.Linear(width, narrow, bias=False), nn.Linear(narrow, width, bias=False)
        self.register_buffer("centers", torch.randn(2, width) - 1)

    def forward(self, h: Tensor, passports: Tensor) -> Tensor:
        """Return (B, w) of h (B, w) under passports (2, w)."""
        scale, shift = self.decode(F.leaky_relu(self.encode(self.linear(passports)))).tanh()
        out: Tensor = scale * self.linear(h) + shift
        return out
