"""How a party's raw columns lie in the matrix that its network reads."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Column(NamedTuple):
    """Where a raw column lies in the encoded matrix: columns ``start`` to ``start + width``.

    A category is one-hot, and its first slot stands for categories that training never showed.
    """

    name: str
    kind: Literal["numeric", "categorical"]
    start: int
    width: int


class Layout(NamedTuple):
    """What the columns of a party's matrix (n, d) are.

    Attributes:
        columns: one entry per raw column, in order.
        image: (channels, height, width) where the d columns are the pixels of an image in that order, else None.
    """

    columns: tuple[Column, ...]
    image: tuple[int, int, int] | None = None

    @property
    def width(self) -> int:
        """The number d of encoded columns."""
        return sum(column.width for column in self.columns)

    @classmethod
    def numeric(cls, count: int) -> Layout:
        """Return the layout of ``count`` numbers."""
        return cls(tuple(Column(f"x{j}", "numeric", j, 1) for j in range(count)))
