"""The active party's top model, from embeddings to logits."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from vflsec.core.settings import ModelSpec


class Top(nn.Module):
    """Aggregation and head: K embeddings of (B, d_k) -> logits (B, C).

    Args:
        widths: d_k for each party; all equal unless ``aggregation`` is ``concat``.
        n_classes: C.
        aggregation: ``concat``, ``sum``, ``mean`` or ``max``.
        head: ``linear``, ``mlp`` or ``none``.
        hidden: width of the hidden layer of an ``mlp`` head.
        logistic: whether a head of two classes has one output z, so that it is a logistic regression: logits (0, z).
    """

    def __init__(
        self,
        widths: Sequence[int],
        n_classes: int,
        *,
        aggregation: str,
        head: str,
        hidden: int,
        logistic: bool = False,
    ) -> None:
        super().__init__()
        self.logistic = logistic and n_classes == 2
        n_classes = 1 if self.logistic else n_classes
        self.aggregation = aggregation
        width = sum(widths) if aggregation == "concat" else widths[0]
        assert aggregation == "concat" or set(widths) == {width}, "embeddings of unequal width can only be concatenated"
        self.head: nn.Module
        if head == "linear":
            self.head = nn.Linear(width, n_classes)
        elif head == "mlp":
            self.head = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, n_classes))
        else:
            assert width == n_classes, "without a head the embeddings are the logits"
            self.head = nn.Identity()

    def forward(self, embeddings: Sequence[Tensor]) -> Tensor:
        """Return logits (B, C)."""
        logits: Tensor = self.head(aggregate(embeddings, self.aggregation))
        return functional.pad(logits, (1, 0)) if self.logistic else logits


def build_top(widths: Sequence[int], n_classes: int, spec: ModelSpec, *, logistic: bool = False) -> Top:
    """Return the top model that ``spec`` describes."""
    return Top(
        widths,
        n_classes,
        aggregation=spec.aggregation,
        head=spec.head,
        hidden=spec.head_hidden,
        logistic=logistic,
    )


class SharedTop(nn.Module):
    """The active party's part of a linear head on concatenated embeddings; other parties compute theirs.

    Args:
        top: the whole head, (sum d_k) -> C; the active party's embedding comes first.
        width: d of the active party's embedding.
    """

    def __init__(self, top: Top, width: int) -> None:
        super().__init__()
        whole, self.logistic = top.head, top.logistic
        assert isinstance(whole, nn.Linear)
        self.head = nn.Linear(width, whole.out_features, device=whole.weight.device)
        with torch.no_grad():
            self.head.weight.copy_(whole.weight[:, :width])
            self.head.bias.copy_(whole.bias)

    def forward(self, embeddings: Sequence[Tensor]) -> Tensor:
        """Return logits (B, C) from the active party's embedding (B, d) and the parts of the others."""
        h, *parts = embeddings
        logits: Tensor = self.head(h)
        for part in parts:
            logits = logits + part
        return functional.pad(logits, (1, 0)) if self.logistic else logits


def aggregate(embeddings: Sequence[Tensor], how: str) -> Tensor:
    """Join K embeddings (B, d): ``concat`` gives (B, sum d), the others (B, d)."""
    if how == "concat":
        return torch.cat(list(embeddings), dim=1)
    stacked = torch.stack(list(embeddings))  # (K, B, d)
    if how == "sum":
        return stacked.sum(dim=0)
    return stacked.mean(dim=0) if how == "mean" else stacked.amax(dim=0)
