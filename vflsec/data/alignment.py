"""Which rows do all parties hold? The plain inner join of ids that private set intersection would compute."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from vflsec.core.errors import DataError
from vflsec.data.dataset import PartyTable


def align(tables: Sequence[PartyTable]) -> pd.Index:
    """Return the ids that every table holds, sorted, so that the result depends on no party's row order.

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
