"""Deals the columns of a dataset to the parties in another way: to ask how much a leak depends on who holds what.

    given               each party keeps its own columns
    even                blocks of equal size, in the order of the columns
    random              blocks of equal size, in a random order
    dirichlet           each column goes to a party that is drawn with probabilities from a Dirichlet distribution:
                        a small concentration gives one party most columns (importance-based split of VertiBench)
    together            correlated columns go to one party
    apart               correlated columns go to different parties (correlation-based splits of VertiBench)

Source: Wu, Hou and He 2024, "VertiBench", ICLR, arXiv 2307.02040, section 4, for ``dirichlet`` and for splits by
correlation. There a genetic algorithm searches for a given correlation between parties; here columns are put in the
order of a hierarchical clustering, which gives the two ends.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import pandas as pd
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform

from vflsec.base.errors import UsageError
from vflsec.base.seeds import derive
from vflsec.data.dataset import PartyTable, VerticalDataset

ColumnSplit = Literal["given", "even", "random", "dirichlet", "together", "apart"]

MAX_CORRELATED_ROWS = 5000
"""Rows that correlations are computed of."""


def deal_again(
    dataset: VerticalDataset, how: ColumnSplit, parties: int | None, concentration: float, seed: int
) -> VerticalDataset:
    """Return ``dataset`` with its columns dealt to ``parties`` parties, active and passive; labels stay where they are.

    Every party gets a column at least, and holds the rows that all parties have held. Parties lose the names that the
    data give them, since they hold other columns.

    Args:
        dataset: tables without images, text, groups of columns or a source.
        how: see the module.
        parties: how many; None for as many as there are.
        concentration: of the Dirichlet distribution.
        seed: of the random splits.

    Raises:
        UsageError: a dataset whose columns belong together, or fewer columns than parties.
    """
    tables, k = dataset.parties, parties or len(dataset.parties)
    if dataset.source or dataset.draw or any(table.image or table.grouping or table.vocabulary for table in tables):
        raise UsageError(f"expected a dataset of plain tables for data.columns={how}, got {dataset.name}")
    if len({table.impute for table in tables}) > 1:
        raise UsageError(f"expected one way to fill gaps for data.columns={how}, got several: set impute at the top")
    joined = _join_tables(dataset)
    names = list(joined.frame.columns)
    if not 2 <= k <= len(names):
        raise UsageError(f"expected data.parties from 2 to the {len(names)} columns of {dataset.name}, got {k}")
    rng = np.random.default_rng(derive(seed, "columns"))
    owners = _deal(joined, how, k, concentration, rng)
    dealt = [
        _select(joined, [name for name, party in zip(names, owners, strict=True) if party == j], j) for j in range(k)
    ]
    return replace(dataset, parties=tuple(dealt), labels=dataset.labels.loc[joined.frame.index], names={})


def _join_tables(dataset: VerticalDataset) -> PartyTable:
    """Return one table of all columns on common rows; a name that two parties use is preceded by the party."""
    used = [column for table in dataset.parties for column in table.frame.columns]
    frames, roles = [], {"categorical": set[str](), "signed_log": set[str]()}
    rare: dict[str, int] = {}
    for table in dataset.parties:
        new = {c: _make_unique(c, dataset.display_name(table.name), used) for c in table.frame.columns}
        frames.append(table.frame.loc[dataset.common].rename(columns=new))
        for role, columns in roles.items():
            columns |= {new[column] for column in getattr(table, role)}
        rare |= {new[column]: most for column, most in table.rare.items()}
    return PartyTable(
        "active",
        pd.concat(frames, axis=1),
        frozenset(roles["categorical"]),
        frozenset(roles["signed_log"]),
        impute=dataset.parties[0].impute,
        rare=rare,
    )


def _make_unique(column: str, party: str, used: Sequence[str]) -> str:
    """Return the name of a column, preceded by its party as often as another column is called so."""
    name = column
    while used.count(name) > (name == column):
        name = f"{party}.{name}"
    return name


def _select(joined: PartyTable, columns: Sequence[str], number: int) -> PartyTable:
    kept = frozenset(columns)
    return replace(
        joined,
        name=f"passive_{number}" if number else "active",
        frame=joined.frame[list(columns)],
        categorical=joined.categorical & kept,
        signed_log=joined.signed_log & kept,
        rare={column: most for column, most in joined.rare.items() if column in kept},
    )


def _split_order(order: np.ndarray, k: int) -> np.ndarray:
    """Return the owner of each column: k blocks of ``order``, whose sizes differ by one at most."""
    owner = np.empty(len(order), dtype=int)
    for j, block in enumerate(np.array_split(order, k)):
        owner[block] = j
    return owner


def _deal(table: PartyTable, how: ColumnSplit, k: int, concentration: float, rng: np.random.Generator) -> np.ndarray:
    """Return which of ``k`` parties gets each column."""
    n = len(table.frame.columns)
    if how == "even":
        return _split_order(np.arange(n), k)
    if how == "random":
        return _split_order(rng.permutation(n), k)
    if how == "dirichlet":
        owner = rng.choice(k, size=n, p=rng.dirichlet(np.full(k, concentration)))
        owner[rng.permutation(n)[:k]] = np.arange(k)  # nobody is left without a column
        return np.asarray(owner)
    order = _sort_by_similarity(table)
    if how == "together":
        return _split_order(order, k)
    owner = np.empty(n, dtype=int)
    owner[order] = np.arange(n) % k
    return owner


def _sort_by_similarity(table: PartyTable) -> np.ndarray:
    """Return the columns in an order in which correlated ones are close: the leaves of a hierarchical clustering."""
    distance = 1 - np.abs(correlate(table))
    np.fill_diagonal(distance, 0)
    return np.asarray(leaves_list(linkage(squareform(distance, checks=False), method="average", optimal_ordering=True)))


def correlate(table: PartyTable) -> np.ndarray:
    """Return the rank correlation (d, d) of every two columns; categories count by the frequency of their values."""
    frame = table.frame.iloc[:: max(1, len(table.frame) // MAX_CORRELATED_ROWS)]
    numbers = {
        name: frame[name].map(frame[name].value_counts()).astype(float) if name in table.categorical else frame[name]
        for name in frame.columns
    }
    correlation = pd.DataFrame(numbers).corr(method="spearman").to_numpy(copy=True)
    return np.asarray(np.nan_to_num(correlation))  # NaN: a column that is constant in these rows
