"""Positive controls: worlds in which a method must win, because what it relies on is there by construction."""

from itertools import combinations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from vflsec.base.layout import Group, Grouping
from vflsec.base.seeds import derive
from vflsec.data.bundle import make_table
from vflsec.data.dataset import Card, VerticalDataset

Rows = NDArray[np.float64]

VIEWS, DOMAINS = "control-views", "control-domains"
INNER = 12
"""Dimensions of what varies within a class."""

GROUP = 16
"""Columns of a group of the passive party in two domains."""


def load_views(
    *, rows: int = 16_000, classes: int = 10, columns: int = 60, size: float = 2.7, nuisance: float = 0.8
) -> VerticalDataset:
    """Two views that are independent given the class, as the image and the tags of a photograph nearly are.

    A view of a row is tanh(m + nuisance · u B + e): m the mean of its class, with entries of deviation size /
    sqrt(columns), u B a low-dimensional variation within the class, and e noise of deviation 1. What both views have in
    common is the class alone, so that agreement between parties finds it without labels. Without nuisance what
    columns of one view have in common is the class as well, and survives the corruption of some of them.

    Args:
        rows: in all.
        classes: equally frequent.
        columns: of each of the two parties.
        size: of the differences between classes.
        nuisance: of the variation within a class; 0 for noise of each column alone.
    """
    rng = np.random.default_rng(derive(0, VIEWS))
    labels = rng.integers(classes, size=rows)

    def draw_view() -> Rows:
        means = rng.normal(size=(classes, columns)) * size / np.sqrt(columns)
        inner = rng.normal(size=(rows, INNER)) @ rng.normal(size=(INNER, columns)) / np.sqrt(INNER)
        view: Rows = np.tanh(means[labels] + nuisance * inner + rng.normal(size=(rows, columns)))
        return view

    tables = tuple(make_table(VIEWS, name, _make_frame(name, draw_view())) for name in ("active", "passive_1"))
    named = tuple(f"class_{c}" for c in range(classes))
    return VerticalDataset(VIEWS, tables, _make_labels(labels), named, card=_make_card("Two views", rows))


def load_domains(
    *, rows: int = 2000, source: int = 4000, invariant: float = 0.25, spurious: float = 0.1
) -> VerticalDataset:
    """Two domains, where 40 labels of the target tell less than all labels of the source.

    Columns are normal, with deviation 1. The active parties' two are about plus or minus 0.2 by class; of the 48 of the
    passive party, in three groups, every other one is about plus or minus ``invariant`` in both domains, and the rest
    about plus or minus ``spurious`` in the source and 0 in the target.

    Args:
        rows: of the target.
        source: rows of the source.
        invariant: distance of a class from 0 in the columns that tell it in both domains.
        spurious: in those that tell it in the source alone.
    """
    rng = np.random.default_rng(derive(0, DOMAINS))
    labels = rng.integers(2, size=rows + source)
    signs, is_source = 2 * labels[:, None] - 1, np.arange(rows + source)[:, None] >= rows
    active = _make_frame("active", 0.2 * signs + rng.normal(size=(rows + source, 2)))
    means = np.where(np.arange(3 * GROUP) % 2, spurious * is_source, invariant) * signs
    passive = _make_frame("passive_1", means + rng.normal(size=(rows + source, 3 * GROUP)))
    starts = range(0, 3 * GROUP, GROUP)
    groups = tuple(Group(f"group_{k}", tuple(passive.columns[k : k + GROUP])) for k in starts)
    pairs = tuple(Group(f"{a.name}-{b.name}", a.columns + b.columns) for a, b in combinations(groups, 2))
    grouping = Grouping(groups, pairs, Group("all", tuple(passive.columns)), {})
    tables = (
        make_table(DOMAINS, "active", active[:rows]),
        make_table(DOMAINS, "passive_1", passive, grouping=grouping),
    )
    classes, other = ("negative", "positive"), make_table(DOMAINS, "source", active[rows:])
    return VerticalDataset(
        DOMAINS, tables, _make_labels(labels), classes, card=_make_card("Two domains", rows + source), source=other
    )


def _make_frame(party: str, values: Rows) -> pd.DataFrame:
    ids = pd.RangeIndex(len(values), name="id")
    return pd.DataFrame(values, ids, [f"{party}_x{j}" for j in range(values.shape[1])])


def _make_labels(labels: NDArray[np.int64]) -> pd.Series:
    return pd.Series(labels, pd.RangeIndex(len(labels), name="id"), name="label")


def _make_card(title: str, rows: int) -> Card:
    return Card(title, "drawn from a seed", "none needed", rows, "drawn with the columns", "drawn by seed")
