"""How a party's raw columns lie in the matrix that its network reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple


class Column(NamedTuple):
    """Where a raw column lies in the encoded matrix: columns ``start`` to ``start + width``.

    A category is one-hot, and its first slot stands for categories that training never showed.
    """

    name: str
    kind: Literal["numeric", "categorical"]
    start: int
    width: int


class Group(NamedTuple):
    """Raw columns that belong together in the eyes of who knows them.

    Attributes:
        name: ``emp``, or ``emp-demo`` for two groups together.
        columns: names of the raw columns.
        widths: of the layers of a network that reads them; none for the network's own.
    """

    name: str
    columns: tuple[str, ...]
    widths: tuple[int, ...] = ()


class Grouping(NamedTuple):
    """A party's columns by what they are about.

    Attributes:
        single: the groups; no column is in two of them.
        pairs: each two of them together.
        whole: all of them together.
        embeddings: how many numbers stand for a category, by raw column.
    """

    single: tuple[Group, ...]
    pairs: tuple[Group, ...]
    whole: Group
    embeddings: Mapping[str, int]


class Layout(NamedTuple):
    """What the columns of a party's matrix (n, d) are.

    Attributes:
        columns: one entry per raw column, in order.
        image: (channels, height, width) where the d columns are the pixels of an image in that order, else None.
        grouping: which raw columns belong together, where the party says so.
    """

    columns: tuple[Column, ...]
    image: tuple[int, int, int] | None = None
    grouping: Grouping | None = None

    @property
    def width(self) -> int:
        """The number d of encoded columns."""
        return sum(column.width for column in self.columns)

    @property
    def names(self) -> list[str]:
        """The name of each encoded column: that of its raw column, with a number for each slot of a category."""
        return [
            column.name if column.width == 1 else f"{column.name}[{slot}]"
            for column in self.columns
            for slot in range(column.width)
        ]

    @classmethod
    def numeric(cls, count: int) -> Layout:
        """Return the layout of ``count`` numbers."""
        return cls(tuple(Column(f"x{j}", "numeric", j, 1) for j in range(count)))
