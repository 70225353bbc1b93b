"""The limits that runs were given: ``gates.json``, written only if there are any."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from vflsec.base import files
from vflsec.base.errors import StoreError
from vflsec.results.records.folder import home
from vflsec.results.records.manifest import Manifest
from vflsec.results.records.schema import seal, unseal

GATES = "gates.json"

MOST_RUNS = 100
"""Runs whose limits are kept."""


class RunLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits of one run.

    Attributes:
        max_leak: on the leak, by attack.
        min_utility: on the utility; None for no limit.
        max_undetected: on an advantage that could have been overlooked; None for no limit.
    """

    max_leak: dict[str, float] = {}
    min_utility: float | None = None
    max_undetected: float | None = None

    def __post_init__(self) -> None:
        """Check that limits are numbers to which a result can be compared."""
        for value in (*self.max_leak.values(), self.min_utility, self.max_undetected):
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"expected finite limits from 0 to 1, found {value:g}")


class _All(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    runs: Annotated[list[RunLimits], msgspec.Meta(min_length=1, max_length=MOST_RUNS)]


def write_limits(folder: Path, given: RunLimits) -> None:
    """Make ``given`` the limits of a results folder, if there are any; earlier ones are kept before them."""
    if given != RunLimits():
        runs = [*(earlier for earlier in read_limits(folder) if earlier != given), given]
        files.replace(folder / GATES, seal(_All(runs=runs[-MOST_RUNS:])), mode=0o666)


def expect_limits(folder: Path, manifest: Manifest) -> None:
    """Raise StoreError if the limits that a folder was given are lost."""
    path = home(folder) / GATES
    if manifest.limited and not path.exists():
        raise StoreError(f"expected {path} with the limits of earlier runs, found none: restore it, or add --fresh")


def read_limits(folder: Path) -> list[RunLimits]:
    """Return the limits in a results folder, the last ones in force; for a point of a sweep, those of the sweep.

    Raises:
        StoreError: they are damaged.
    """
    path = home(folder) / GATES
    try:
        found: _All = unseal(files.read(path), _All)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise StoreError(f"cannot read {path}: {error}; remove it and set the limits again") from None
    return found.runs
