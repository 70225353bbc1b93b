"""The leaks of groups of rows, by a column of the owner: ``subgroups.json``, written only if asked for."""

from __future__ import annotations

from pathlib import Path

import msgspec

from vflsec.base import files
from vflsec.base.errors import StoreError
from vflsec.results.records.schema import Maybe, seal, unseal

SUBGROUPS = "subgroups.json"


class Subgroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One group of rows.

    Attributes:
        group: the category, or the interval of a number.
        n: rows per seed.
        by_seed: the leak; empty if the group has too few rows of a class.
        ci95_rows: of the first seed.
    """

    group: str
    n: int
    by_seed: dict[int, float] = {}
    ci95_rows: tuple[Maybe, Maybe] = (None, None)


class Subgroups(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one attack on labels leaks of each group of rows, at one method, defense and strength.

    Attributes:
        keys: of its results, one for each seed.
        rows: the split that the leak is reported on.
        p: of the test that all groups leak the same; None with fewer than two groups that are large enough.
    """

    column: str
    keys: list[str]
    rows: str
    metric: str
    groups: list[Subgroup]
    p: Maybe


class _All(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    subgroups: list[Subgroups]


def write_subgroups(folder: Path, found: list[Subgroups]) -> None:
    """Write the leaks of groups into a results folder."""
    files.replace(folder / SUBGROUPS, seal(_All(subgroups=found)), mode=0o666)


def read_subgroups(folder: Path) -> list[Subgroups]:
    """Return the leaks of groups in a results folder; none if they were not asked for.

    Raises:
        StoreError: they are damaged.
    """
    try:
        found: _All = unseal(files.read(folder / SUBGROUPS), _All)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise StoreError(f"cannot read {folder / SUBGROUPS}: {error}; run the same vflsec eval --by again") from None
    return found.subgroups
