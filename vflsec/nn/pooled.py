"""Several encoders of one party as one bottom model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class PooledEncoder(nn.Module):
    """The mean, or the concatenation, of the outputs of encoders on the same rows: (B, p) -> (B, width).

    Source: FedHSSL's released code fine-tunes the mean of local and cross-party encoder.

    Args:
        encoders: each with its ``width``; all equal for the mean.
        pool: ``mean`` or ``concat``.
    """

    def __init__(self, encoders: Sequence[nn.Module], pool: str) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(encoders)
        self.pool = pool
        widths = [int(encoder.width) for encoder in encoders]  # type: ignore[arg-type]
        self.width = sum(widths) if pool == "concat" else widths[0]

    def forward(self, x: Tensor) -> Tensor:
        """Return the pooled embedding (B, width)."""
        outputs = [encoder(x) for encoder in self.encoders]
        if len(outputs) == 1:
            h: Tensor = outputs[0]
            return h
        return torch.cat(outputs, dim=1) if self.pool == "concat" else torch.stack(outputs).mean(dim=0)
