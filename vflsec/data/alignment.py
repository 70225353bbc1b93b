"""Alignment of rows: the inner join of ids, in plain, that private set intersection computes."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from vflsec.base.errors import DataError
from vflsec.data.dataset import PartyTable


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
        common = common[common.isin(table.frame.index)]
    if common.empty:
        samples = ", ".join(f"{table.name} has {table.frame.index[:2].tolist()}" for table in tables)
        raise DataError(f"expected ids that all parties hold, got none: {samples}; give them ids of one form")
    return common.sort_values()
