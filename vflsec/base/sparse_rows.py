"""Rows with few entries, as a tensor: a wide one-hot matrix whose memory grows with its entries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from vflsec.base.errors import DataError

WIDE = 1000
"""Tables of more encoded columns are sparse; up to so many, a dense product takes less time."""

MAX_DENSE_BYTES = 16 * 2**30
"""Bytes of the largest dense copy that is made."""

aten = torch.ops.aten


class SparseRows(Tensor):
    """A read-only matrix (n, d) with p entries in each row.

    Rows are selected, joined, copied and multiplied by a matrix in time and memory of their entries; a layer can read
    ``places`` and ``entries`` itself. Any other operation works on a dense copy and returns a dense tensor, so that
    code that expects a tensor gives the same result, with more memory. What looks like a view, such as ``x[0]`` or
    ``x.T``, is a copy then.

    Args:
        entries: (n, p) values.
        places: (n, p) long, the column of each entry; the columns of one row differ.
        width: d.
    """

    entries: Tensor
    places: Tensor

    @staticmethod
    def __new__(cls, entries: Tensor, places: Tensor, width: int) -> SparseRows:
        """Return the tensor, which has no storage of its own."""
        made: SparseRows = Tensor._make_wrapper_subclass(
            cls, (len(places), width), dtype=entries.dtype, device=entries.device
        )
        made.entries, made.places = entries, places
        return made

    def __init__(self, entries: Tensor, places: Tensor, width: int) -> None:
        super().__init__()

    def __repr__(self) -> str:  # type: ignore[override]
        """Return the shape, without the data."""
        return f"SparseRows({len(self)} x {self.shape[1]}, {self.places.shape[1]} entries a row)"

    def dense(self) -> Tensor:
        """Return the matrix (n, d).

        Raises:
            DataError: it is larger than ``MAX_DENSE_BYTES``.
        """
        rows, width = self.shape
        if (size := rows * width * self.entries.element_size()) > MAX_DENSE_BYTES:
            raise DataError(
                f"expected at most {MAX_DENSE_BYTES / 2**30:.0f} GiB for a dense copy of {rows:,} rows of "
                f"{width:,} encoded columns, got {size / 2**30:,.0f} GiB: take fewer rows, or tell fewer categories "
                "apart (categories=)"
            )
        empty = torch.zeros(rows, width, dtype=self.dtype, device=self.device)
        return empty.scatter_(1, self.places, self.entries)

    def csr(self) -> csr_array:
        """Return the matrix for SciPy and scikit-learn."""
        rows, entries = self.places.shape
        order = self.places.argsort(dim=1)
        parts = (self.entries.gather(1, order), self.places.gather(1, order))
        values, columns = (part.flatten().cpu().numpy() for part in parts)
        return csr_array((values, columns, np.arange(0, rows * entries + 1, max(1, entries))), shape=tuple(self.shape))

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """Return a dense copy."""
        return self.dense().numpy(force=force)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return a dense copy."""
        return self.numpy().astype(dtype or np.float32, copy=False)

    def tolist(self) -> list[Any]:
        """Return the matrix as lists."""
        return self.dense().tolist()

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute, but not the data."""
        if name == "data":
            raise TypeError("expected no change of SparseRows: change x.dense()")
        super().__setattr__(name, value)

    def __setitem__(self, where: object, value: object) -> None:
        """Raise TypeError; some forms of it would change a copy."""
        raise TypeError("expected no change of SparseRows: change x.dense()")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on the entries, if there is a way, else on dense copies."""
        way = _ON_ENTRIES.get(func)
        result = way(*args, **(kwargs or {})) if way else NotImplemented
        if result is not NotImplemented:
            return result
        if any(isinstance(argument, SparseRows) for argument in _list_written(func, args, kwargs or {})):
            raise TypeError(f"expected no change of SparseRows, got {func}: change x.dense()")
        return func(*tree_map(_make_dense, args), **tree_map(_make_dense, dict(kwargs or {})))


def to_tensor(matrix: np.ndarray | csr_array, device: torch.device | str = "cpu") -> Tensor:
    """Return a copy of a matrix (n, d) as a tensor; a sparse one has as many entries in each row."""
    if isinstance(matrix, np.ndarray):
        return torch.tensor(matrix, device=device)
    shape = (matrix.shape[0], -1 if matrix.shape[0] else 0)
    entries, places = torch.tensor(matrix.data).view(shape), torch.tensor(matrix.indices, dtype=torch.long).view(shape)
    return SparseRows(entries.to(device), places.to(device), matrix.shape[1])


def to_matrix(rows: Tensor) -> np.ndarray | csr_array:
    """Return rows (n, d) for scikit-learn: sparse if they are ``SparseRows``."""
    return rows.csr() if isinstance(rows, SparseRows) else rows.cpu().numpy()


def find_words(x: Tensor, size: int) -> Tensor:
    """Return the words (n, T) of encoded text (n, T·size), by number: of each position the largest entry."""
    if isinstance(x, SparseRows):
        starts = torch.arange(0, x.shape[1], size, device=x.places.device)
        return torch.sub(x.places, starts)
    return x.reshape(len(x), x.shape[1] // size, size).argmax(dim=2)


def _list_written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    expected = func._schema.arguments
    given = {**dict(zip((x.name for x in expected), args, strict=False)), **kwargs}
    written = [x.name for x in expected if x.alias_info is not None and x.alias_info.is_write]
    return tree_leaves([given.get(name) for name in written])


def _make_dense(value: object) -> object:
    return value.dense() if isinstance(value, SparseRows) else value


def _share(x: SparseRows) -> SparseRows:
    return SparseRows(x.entries, x.places, x.shape[1])


def _clone(x: SparseRows, **_: object) -> SparseRows:
    return SparseRows(x.entries.clone(), x.places.clone(), x.shape[1])


def _move(x: SparseRows, **to: Any) -> Any:
    if to.get("dtype", x.dtype) != x.dtype or not isinstance(x, SparseRows):
        return NotImplemented
    device = to.get("device", x.device)
    return SparseRows(x.entries.to(device), x.places.to(device), x.shape[1])


def _select(x: SparseRows, by: Sequence[Tensor | None]) -> Any:
    if len(by) != 1 or not isinstance(x, SparseRows) or by[0] is None or by[0].dim() != 1:
        return NotImplemented
    return SparseRows(x.entries[by[0]], x.places[by[0]], x.shape[1])


def _slice(x: SparseRows, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    if dim != 0:
        return NotImplemented
    rows = slice(start, end, step)
    return SparseRows(x.entries[rows], x.places[rows], x.shape[1])


def _split(x: SparseRows, size: int, dim: int = 0) -> Any:
    if dim != 0:
        return NotImplemented
    parts = zip(torch.split(x.entries, size), torch.split(x.places, size), strict=True)
    return [SparseRows(entries, places, x.shape[1]) for entries, places in parts]


def _concatenate(parts: Sequence[Tensor], dim: int = 0) -> Any:
    if any(part.dim() != 2 or part.dtype != parts[0].dtype for part in parts):
        return NotImplemented
    if len(parts) == 1 and isinstance(parts[0], SparseRows):
        return _share(parts[0])
    if dim in (1, -1):
        return _join(parts) if len({len(part) for part in parts}) == 1 else NotImplemented
    rows = [part for part in parts if isinstance(part, SparseRows)]
    if len(rows) < len(parts) or len({(*part.shape[1:], *part.places.shape[1:]) for part in rows}) > 1:
        return NotImplemented
    entries, places = (torch.cat([getattr(part, name) for part in rows]) for name in ("entries", "places"))
    return SparseRows(entries, places, parts[0].shape[1])


def _join(parts: Sequence[Tensor]) -> SparseRows:
    entries, places, start = [], [], 0
    for part in parts:
        if isinstance(part, SparseRows):
            values, columns = part.entries, part.places
        else:
            values, columns = part, torch.arange(part.shape[1], device=part.device).expand(len(part), -1)
        entries.append(values)
        places.append(start + columns)
        start += part.shape[1]
    return SparseRows(torch.cat(entries, dim=1), torch.cat(places, dim=1), start)


def _multiply(x: Tensor, y: Tensor) -> Any:
    if x.shape[1] != y.shape[0] or x.dtype != y.dtype:  # PyTorch says what is wrong
        return NotImplemented
    if isinstance(x, SparseRows) and not isinstance(y, SparseRows):
        return F.embedding_bag(x.places, y.contiguous(), mode="sum", per_sample_weights=x.entries)
    if isinstance(x, SparseRows) or not isinstance(y, SparseRows):
        return NotImplemented
    terms = x.t().unsqueeze(1) * y.entries.unsqueeze(2)  # (B, p, k)
    return x.new_zeros(y.shape[1], len(x)).index_add_(0, y.places.flatten(), terms.flatten(0, 1)).t()


def _affine(bias: Tensor, x: Tensor, weight: Tensor, **scale: float) -> Any:
    product = NotImplemented if scale else _multiply(x, weight)
    return product if product is NotImplemented else bias + product


_ON_ENTRIES: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _share,
    aten.clone.default: _clone,
    aten._to_copy.default: _move,
    aten.index.Tensor: _select,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.cat.default: _concatenate,
    aten.mm.default: _multiply,
    aten.addmm.default: _affine,
}
