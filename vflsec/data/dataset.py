"""A dataset split by columns: each party's own table, keyed by id, and the active party's labels."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd

from vflsec.base.errors import DataError
from vflsec.base.layout import Grouping

GAPS = " (missing)"
"""Ends the name of the encoded column that says where another column has gaps."""


@dataclass(frozen=True)
class Card:
    """The source of a dataset and its terms of use.

    Attributes:
        split: the test set: official, or drawn by seed.
        sha256: of the bundled file (for digits: of the pixel bytes); empty where nothing is bundled.
        columns: feature columns of the source table, label and id not counted.
    """

    title: str
    source: str
    license: str
    rows: int
    label: str
    split: str
    notes: str = ""
    sha256: str = ""
    columns: int = 0


@dataclass(frozen=True, repr=False)
class PartyTable:
    """One party's rows, in its own order, and the roles of its columns.

    Attributes:
        name: ``active``, ``passive_1``, ``passive_2``...
        frame: the columns, indexed by row id (unique); no label among them.
        categorical: columns whose values are categories; all others are numbers.
        signed_log: numeric columns with heavy tails (money), passed through sign(x)·log(1+|x|) before scaling.
        image: (channels, height, width) if the columns are the pixels of an image, in that order; else None.
        grouping: of the columns, or None.
        impute: what takes the place of a missing number; None if none may be missing.
        rare: categories of which only the most frequent values are told apart, and how many.
        vocabulary: of text, the words; column t is then the number of the word at position t, 0 for padding.
        learned: whether words that occur in no training row become the word 1, ``[unknown]``.
    """

    name: str
    frame: pd.DataFrame
    categorical: frozenset[str] = frozenset()
    signed_log: frozenset[str] = frozenset()
    image: tuple[int, int, int] | None = None
    grouping: Grouping | None = None
    impute: Literal["mean", "median", "mode"] | None = None
    rare: Mapping[str, int] = field(default_factory=dict)
    vocabulary: tuple[str, ...] = ()
    learned: bool = False

    def __post_init__(self) -> None:
        """Check that an encoder can use the table.

        Raises:
            DataError: unknown or contradictory column roles, a non-numeric or non-finite number, an empty category, or
                an image with another number of columns than pixels or with a category among them.
        """
        if self.image and len(self.frame.columns) != math.prod(self.image):
            pixels = " x ".join(map(str, self.image))
            raise DataError(f"{self.name}: expected {pixels} pixels as columns, got {len(self.frame.columns)}")
        unknown = sorted((self.categorical | self.signed_log) - set(self.frame.columns))
        if unknown:
            raise DataError(f"{self.name}: expected a role only for its own columns, got {unknown}; drop those names")
        both = sorted(self.categorical & self.signed_log)
        if both:
            raise DataError(f"{self.name}: expected signed_log columns to be numbers, got categories {both}")
        if self.image and self.categorical:
            raise DataError(f"{self.name}: expected pixels to be numbers, got categories {sorted(self.categorical)}")
        for column in self.frame.columns if self.impute else ():
            if f"{column}{GAPS}" in self.frame.columns:
                raise DataError(f"{self.name}: expected no column {column + GAPS!r} beside {column!r}; rename it")
        for column in self.frame.columns:
            _check_values(self.name, self.frame[column], column in self.categorical, self.impute is not None)

    def __repr__(self) -> str:
        """Return the size and the names of the columns, without the data."""
        return f"PartyTable({self.name!r}, {len(self.frame)} rows of {', '.join(map(str, self.frame.columns))})"


class Roles(NamedTuple):
    """The rows of each role, if the task of a dataset defines them; only ``adaptation`` overlaps with other roles.

    Attributes:
        train: rows whose label the active party uses.
        unlabeled: aligned training rows whose label is unused.
        val: rows for selecting a model.
        test: rows for evaluating it.
        adaptation: rows of the active party that passive models may be fitted to without labels.
        source: rows of the other active party.
    """

    train: pd.Index
    unlabeled: pd.Index
    val: pd.Index
    test: pd.Index
    adaptation: pd.Index
    source: pd.Index


@dataclass(frozen=True, repr=False)
class VerticalDataset:
    """Tables of K >= 2 parties with overlapping sets of ids; only the active party holds labels.

    There may be a second active party with rows of its own, the source of a domain adaptation: it holds the same
    columns as the active party, and labels; passive parties hold columns of its rows as well.

    Attributes:
        parties: the active party first.
        labels: class index 0..C-1 for each id of the active party, and of the source.
        classes: names of the C classes, in index order.
        test_ids: the ids of an official test set, or None for a seeded split.
        source: the other active party, or None.
        draw: the roles by seed, if the task defines them; else ``DataSpec`` does.
        names: what tables and pictures call a party, by its name here; a party that is missing keeps its name.
        headline: the metric of the utility, if it is not the usual one; ``f1`` on a binary task.
        warnings: what looks wrong in the data.
    """

    name: str
    parties: tuple[PartyTable, ...]
    labels: pd.Series
    classes: tuple[str, ...]
    test_ids: pd.Index | None = None
    card: Card | None = field(default=None, compare=False)
    source: PartyTable | None = None
    draw: Callable[[int], Roles] | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    headline: Literal["f1"] | None = None
    warnings: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        """Check that the tables can be split between parties and learned from.

        Raises:
            DataError: fewer than two parties, another first party, fewer than two classes, F1 of more than two, rows
                without label; a source that has other columns than the active party, or some of its people.
        """
        names = [party.name for party in self.parties]
        expected = ["active", *(f"passive_{k}" for k in range(1, max(2, len(names))))]
        if names != expected:
            raise DataError(f"{self.name}: expected parties {expected}, got {names}; name them in this order")
        if len(self.classes) < 2:
            raise DataError(f"{self.name}: expected at least two classes, got {list(self.classes)}")
        if self.headline and len(self.classes) > 2:
            raise DataError(f"{self.name}: expected two classes for {self.headline}, got {len(self.classes)}; drop it")
        for table in (self.parties[0], *([self.source] if self.source else [])):
            bare = ~table.frame.index.isin(self.labels.index)
            if bare.any():
                raise DataError(
                    f"{self.name}: expected a label for each row of {table.name}, got none for {bare.sum()}; drop them"
                )
        if self.source:
            self._check_source(self.source, self.parties[0])

    def _check_source(self, source: PartyTable, active: PartyTable) -> None:
        if list(source.frame.columns) != list(active.frame.columns):
            raise DataError(
                f"{self.name}: expected the source to have the columns {list(active.frame.columns)} of active, got "
                f"{list(source.frame.columns)}"
            )
        common = source.frame.index.isin(active.frame.index).sum()
        if common:
            raise DataError(f"{self.name}: expected source and active to have no id in common, got {common}")

    def __repr__(self) -> str:
        """Return name, rows, classes and parties, without the data."""
        parties = ", ".join(f"{self.display_name(p.name)} {len(p.frame)} x {p.frame.shape[1]}" for p in self.parties)
        return f"VerticalDataset({self.name!r}, {len(self.classes)} classes; {parties})"

    def display_name(self, party: str) -> str:
        """Return what tables and pictures call a party."""
        return self.names.get(party, party)

    @cached_property
    def common(self) -> pd.Index:
        """The sorted ids that every party holds."""
        return align(self.parties)

    @property
    def metric(self) -> str:
        """The headline of the utility: ``auc`` on binary tasks (accuracy hides a rare class), else ``accuracy``.

        A dataset may declare another one, by which its papers judge. A guess of labels keeps the usual one.
        """
        if self.headline:
            return self.headline
        return "auc" if len(self.classes) == 2 else "accuracy"


def align(tables: Sequence[PartyTable]) -> pd.Index:
    """Return the sorted ids that every table holds.

    Raises:
        DataError: a table names an id twice, or no id is in all tables.
    """
    for table in tables:
        ids = table.frame.index
        if not ids.is_unique:
            raise DataError(
                f"{table.name}: expected one row per id, got {ids[ids.duplicated()][0]} more than once; drop its copies"
            )
    common = tables[0].frame.index
    for table in tables[1:]:
        common = common[table.frame.index.get_indexer(common) >= 0]
    if common.empty:
        samples = ", ".join(f"{table.name} has {table.frame.index[:2].tolist()}" for table in tables)
        raise DataError(f"expected ids that all parties hold, got none: {samples}; give them ids of one form")
    return common.sort_values()


def _check_values(party: str, values: pd.Series, is_categorical: bool, gaps: bool) -> None:
    if is_categorical:
        if values.isna().any():
            raise DataError(f"{party}: expected a category in every row of {values.name!r}; name the gap '(missing)'")
    elif not pd.api.types.is_numeric_dtype(values.dtype):
        raise DataError(f"{party}: expected numbers in {values.name!r}, got {values.dtype}; or list it as categorical")
    elif not (
        np.isfinite(numbers := values.to_numpy(dtype=np.float64, na_value=np.nan)) | gaps & np.isnan(numbers)
    ).all():
        raise DataError(f"{party}: expected finite numbers in {values.name!r}; fill or drop its gaps and infinities")
