"""Bottom models without layers of their own: columns as they are, frozen models, several models as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vflsec.base.sparse_rows import SparseRows


class Columns(nn.Identity):
    """(B, d) -> (B, d).

    Args:
        width: d.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        """Return the columns, dense."""
        return x.dense() if isinstance(x, SparseRows) else x


class Frozen(nn.Module):
    """Returns the outputs of a model as leaves; its parameters and running statistics do not change.

    Args:
        model: always in evaluation mode.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def width(self) -> int:
        """The width of its outputs."""
        width = self.model.width
        assert isinstance(width, int)
        return width

    def train(self, mode: bool = True) -> Frozen:
        """Ignore ``mode``."""
        self.training = mode
        self.model.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return the model's output."""
        h: Tensor = self.model(x)
        return h.detach().requires_grad_()


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


class SideBySide(nn.Module):
    """Apply each model to its own columns and concatenate the embeddings, (B, sum of columns) -> (B, sum of widths).

    Args:
        models: bottom models, in the order of the columns.
        columns: number of columns of each.
    """

    def __init__(self, models: Sequence[nn.Module], columns: Sequence[int]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        self.columns = list(columns)

    def forward(self, x: Tensor) -> Tensor:
        """Return the joined embeddings."""
        parts = torch.split(x, self.columns, dim=1)
        return torch.cat([model(part) for model, part in zip(self.models, parts, strict=True)], dim=1)
