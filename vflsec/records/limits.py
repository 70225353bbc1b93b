"""The limits that runs were given: ``gates.json``, written only if there are any."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from vflsec.core import files
from vflsec.core.errors import StoreError
from vflsec.records.folder import home
from vflsec.records.schema import seal, unseal

GATES = "gates.json"


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
        values = [*self.max_leak.values(), self.min_utility, self.max_undetected]
        if not all(value is None or math.isfinite(value) for value in values):
            raise ValueError("expected finite limits, found another one")


class _All(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    runs: list[RunLimits]


def write_limits(folder: Path, given: RunLimits) -> None:
    """Make ``given`` the limits of a results folder, if there are any; earlier ones are kept before them."""
    if given != RunLimits():
        runs = [*(earlier for earlier in read_limits(folder) if earlier != given), given]
        files.replace(folder / GATES, seal(_All(runs=runs)), mode=0o666)


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
