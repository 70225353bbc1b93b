"""Layers that read the columns of wide tables, whose gradients can be sparse; and optimizers, which take these."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vflsec.base.layout import Layout
from vflsec.base.sparse_rows import SparseRows
from vflsec.core.settings import TrainSpec

MANY = 20_000
"""Rows from which a table of weights has sparse gradients where training allows them."""


class WeightTable(nn.Module):
    """A matrix of weights (rows, width), of which a batch reads few rows.

    Attributes:
        sparse: whether its gradient holds the rows of the batch only; see ``allow_sparse_gradients``.
    """

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.sparse = False


class WideLinear(WeightTable):
    """A linear layer, (B, features) -> (B, width), of dense or sparse rows.

    Args:
        features: number of input columns.
        width: number of outputs.
    """

    def __init__(self, features: int, width: int) -> None:
        super().__init__(features, width)
        self.bias = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialize weights and bias as ``nn.Linear`` does."""
        bound = 1 / math.sqrt(len(self.weight))
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs (B, width)."""
        if not isinstance(x, SparseRows) or x.requires_grad or x.shape[1] != len(self.weight):
            return torch.addmm(self.bias, x, self.weight)
        if self.sparse:
            sums = F.embedding_bag(x.places, self.weight, mode="sum", sparse=True, per_sample_weights=x.entries)
        else:
            sums = _Product.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return sums + self.bias


class _Product(torch.autograd.Function):
    """Sparse rows (B, d) times weights (d, k), with a dense gradient of the weights."""

    @staticmethod
    def forward(ctx: Any, x: SparseRows, weight: Tensor) -> Tensor:
        ctx.rows, ctx.count = x, len(weight)
        return F.embedding_bag(x.places, weight, mode="sum", per_sample_weights=x.entries)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        terms = gradient.unsqueeze(1) * ctx.rows.entries.unsqueeze(2)  # (B, p, k)
        empty = gradient.new_zeros(ctx.count, gradient.shape[1])
        return None, empty.index_add_(0, ctx.rows.places.flatten(), terms.flatten(0, 1))


class CategoryEmbedding(WeightTable):
    """Embeds categories, then appends the numbers: (B, d) -> (B, width · categories + numbers).

    Dense rows are multiplied, not looked up, so that mixtures of categories work and have a gradient.

    Args:
        layout: of the party's matrix.
        width: of the embedding of a category.
        std: standard deviation of the initial embeddings.
    """

    numbers: Tensor
    shift: Tensor
    is_category: Tensor

    def __init__(self, layout: Layout, width: int, std: float) -> None:
        kinds = [column.kind == "categorical" for column in layout.columns]
        blocks = [(column.start, column.width) for column in layout.columns if column.kind == "categorical"]
        super().__init__(sum(size for _, size in blocks), width)
        self.blocks, self.std = blocks, std
        numbers = [column.start for column in layout.columns if column.kind == "numeric"]
        self.register_buffer("numbers", torch.tensor(numbers, dtype=torch.long), persistent=False)
        starts, sizes = (torch.tensor(part, dtype=torch.long) for part in zip(*blocks, strict=True))
        self.register_buffer("shift", sizes.cumsum(0) - sizes - starts, persistent=False)
        self.register_buffer("is_category", torch.tensor(kinds), persistent=False)
        self.width = width * len(blocks) + len(numbers)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialize the embeddings."""
        nn.init.normal_(self.weight, std=self.std)

    def forward(self, x: Tensor) -> Tensor:
        """Return embeddings and numbers (B, width)."""
        if isinstance(x, SparseRows) and not x.requires_grad and self._is_complete(x):
            rows = x.places[:, self.is_category] + self.shift
            embedded = F.embedding(rows, self.weight, sparse=self.sparse).flatten(1)
            return torch.cat([embedded, x.entries[:, ~self.is_category]], dim=1)
        weights = torch.split(self.weight, [size for _, size in self.blocks])
        parts = [x[:, at : at + size] @ w for (at, size), w in zip(self.blocks, weights, strict=True)]
        return torch.cat([*parts, x[:, self.numbers]], dim=1)

    def _is_complete(self, x: SparseRows) -> bool:
        """Whether rows have an entry for each raw column of the layout, as those of ``ColumnEncoder`` have."""
        return x.places.shape[1] == len(self.is_category) and x.shape[1] == len(self.weight) + len(self.numbers)


@contextmanager
def allow_sparse_gradients(model: nn.Module) -> Iterator[None]:
    """Let the large tables of ``model`` have sparse gradients in this context."""
    tables = [module for module in model.modules() if isinstance(module, WeightTable) and len(module.weight) >= MANY]
    for table in tables:
        table.sparse = True
    try:
        yield
    finally:
        for table in tables:
            table.sparse = False


class LazyAdam(torch.optim.Adam):
    """Adam; a parameter with a sparse gradient is updated in the rows of the gradient, and so are its moments.

    Other rows keep their values and moments, where Adam would decay the moments and move the rows by them. With dense
    gradients it is Adam.

    Source: the sparse form of Adam of PyTorch's ``SparseAdam``, in one optimizer with the dense one.
    """

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Make one update; ``closure`` is for the base class."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.is_sparse:
                    self._update(parameter, group)
                    parameter.grad = None
        return super().step(closure)

    @torch.no_grad()
    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad.coalesce()
        rows, values = gradient.indices()[0], gradient.values()
        if group["weight_decay"]:
            values = values + group["weight_decay"] * parameter[rows]
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        step, (beta1, beta2) = float(state["step"]), group["betas"]
        mean = torch.lerp(state["exp_avg"][rows], values, 1 - beta1)
        square = torch.lerp(state["exp_avg_sq"][rows], values.square(), 1 - beta2)
        state["exp_avg"][rows], state["exp_avg_sq"][rows] = mean, square
        deviation = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        parameter.index_add_(0, rows, mean / deviation, alpha=-group["lr"] / (1 - beta1**step))


def create_optimizer(parameters: Iterable[nn.Parameter], spec: TrainSpec) -> torch.optim.Optimizer:
    """Return a new optimizer of ``parameters``."""
    if spec.optimizer == "sgd":
        return torch.optim.SGD(parameters, spec.lr, spec.momentum, weight_decay=spec.weight_decay, fused=True)
    if spec.optimizer == "adagrad":
        return torch.optim.Adagrad(parameters, spec.lr, weight_decay=spec.weight_decay, fused=True)
    return LazyAdam(parameters, spec.lr, weight_decay=spec.weight_decay, fused=True)
