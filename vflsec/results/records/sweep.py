"""The file of a sweep: which settings differ between its points, and where the manifest of each point lies.

DIR/sweep.json   DIR/points/<name>/{manifest.json,spec.toml}   DIR/records.jsonl and DIR/cells, which all points share
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from vflsec.base import files
from vflsec.base.errors import StoreError
from vflsec.results.records.schema import seal, unseal

SWEEP = "sweep.json"
POINTS = "points"


class SweepPoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One evaluation of a sweep.

    Attributes:
        name: of its folder in ``points``.
        values: of the settings that differ, by path.
    """

    name: str
    values: dict[str, Any]

    def __post_init__(self) -> None:
        """Refuse names that lead elsewhere."""
        if not self.name or {"/", "\\", "\0"} & set(self.name) or self.name in (".", ".."):
            raise ValueError(f"{self.name!r} is no name of a point")


class Sweep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a sweep varies.

    Attributes:
        axes: the values of each setting, by path.
        paired: whether the values belong together in their order; else every combination is a point.
        points: in the order of the axes.
    """

    axes: dict[str, list[Any]]
    paired: bool
    points: list[SweepPoint]


def exact(value: float) -> str:
    """Return a number as text: short if nothing is lost, else in full, so that different numbers look different."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def is_sweep(folder: Path) -> bool:
    """Whether ``folder`` holds a sweep."""
    return (folder / SWEEP).is_file()


def read_sweep(folder: Path) -> Sweep:
    """Return the sweep in ``folder``.

    Raises:
        StoreError: there is none, or it is damaged.
    """
    path = folder / SWEEP
    try:
        found: Sweep = unseal(files.read(path), Sweep)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise StoreError(f"{path} is damaged, {error}: run the same vflsec eval again, which writes it anew") from None
    return found


def write_sweep(folder: Path, sweep: Sweep) -> None:
    """Write ``sweep.json``."""
    files.replace(folder / SWEEP, seal(sweep), mode=0o666)
