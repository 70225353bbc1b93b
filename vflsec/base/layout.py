"""The layout of a party's raw columns in the matrix that its network reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

PADDING, UNKNOWN = 0, 1
SPECIAL = ("[padding]", "[unknown]")
"""The first words of each vocabulary of a text."""


class EncodedColumn(NamedTuple):
    """The place of a raw column in the encoded matrix: columns ``start`` to ``start + width``.

    A category is one-hot; its first slot is for categories that do not occur in training rows.
    """

    name: str
    kind: Literal["numeric", "categorical"]
    start: int
    width: int


class Group(NamedTuple):
    """Raw columns that belong together.

    Attributes:
        name: ``emp``, or ``emp-demo`` for two groups together.
        columns: names of the raw columns.
        widths: of the layers of a network that reads them; empty for the network's default.
    """

    name: str
    columns: tuple[str, ...]
    widths: tuple[int, ...] = ()


class Grouping(NamedTuple):
    """A party's columns by subject.

    Attributes:
        single: the groups; no column is in two of them.
        pairs: the union of each two groups.
        whole: the union of all groups.
        embeddings: the width of the embedding of a category, by raw column.
    """

    single: tuple[Group, ...]
    pairs: tuple[Group, ...]
    whole: Group
    embeddings: Mapping[str, int]


class Layout(NamedTuple):
    """The meaning of the columns of a party's matrix (n, d).

    Attributes:
        columns: one entry per raw column, in order.
        image: (channels, height, width) if the d columns are the pixels of an image in that order, else None.
        grouping: of the raw columns, if the party has one.
        vocabulary: of text, the words of which each column is one; else empty. Public, as all else here.
    """

    columns: tuple[EncodedColumn, ...]
    image: tuple[int, int, int] | None = None
    grouping: Grouping | None = None
    vocabulary: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """The number d of encoded columns."""
        return sum(column.width for column in self.columns)

    @property
    def names(self) -> list[str]:
        """The names of the encoded columns: the raw column's, with a number for each slot of a category."""
        return [
            column.name if column.width == 1 else f"{column.name}[{slot}]"
            for column in self.columns
            for slot in range(column.width)
        ]

    @classmethod
    def numeric(cls, count: int) -> Layout:
        """Return the layout of ``count`` numeric columns."""
        return cls(tuple(EncodedColumn(f"x{j}", "numeric", j, 1) for j in range(count)))
