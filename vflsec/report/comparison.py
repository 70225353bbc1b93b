"""Two results folders side by side: the settings that differ, and how far leak and utility have moved."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from vflsec.base.errors import clean
from vflsec.report.formats import Cells, Column, Document, format_signed, write_number
from vflsec.report.table import TARGET, is_larger_on_train
from vflsec.results.analysis.results import Ends, Measure, Point, Summary, name_defense
from vflsec.results.records.manifest import UNDEFENDED, Manifest

MAX_LETTERS = 34
"""The most characters of a setting that are shown."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The second mean minus the first, with its 95 % interval; None where a side has no number or no interval.

    The two intervals are added in quadrature, as of independent runs, which is too wide for runs that share rows.
    """

    before: float | None
    after: float | None
    change: float | None
    ci95: Ends

    @property
    def is_shown(self) -> bool:
        """Whether the interval excludes zero."""
        low, high = self.ci95
        return low is not None and high is not None and (low > 0 or high < 0)


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """One line of both reports.

    Attributes:
        attack: its name, or ``worst`` for the headline.
        choice: what stands for the headline before and after; empty for other attacks.
        rows: those that the leak is of, in both reports.
    """

    method: str
    defense: str
    strength: float
    target: str
    attack: str
    choice: tuple[str, str]
    rows: tuple[str, str]
    leak: Difference
    utility: Difference


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """A setting, version or hash that differs; None where a side does not have it."""

    name: str
    before: str | None
    after: str | None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What changed from one evaluation or audit to another."""

    before: str
    after: str
    settings: list[Setting]
    moves: list[Move]
    only_before: list[str]
    only_after: list[str]


def compare(before: tuple[Summary, Manifest], after: tuple[Summary, Manifest]) -> Comparison:
    """Return what changed."""
    first, second = (_index_points(summary) for summary, _ in (before, after))
    old, new = (dict(list_settings(manifest)) for _, manifest in (before, after))
    changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return Comparison(
        before=before[0].out,
        after=after[0].out,
        settings=[Setting(name=name, before=old.get(name), after=new.get(name)) for name in changed],
        moves=[_move(first[line], second[line]) for line in first if line in second],
        only_before=[_describe(point) for line, point in first.items() if line not in second],
        only_after=[_describe(point) for line, point in second.items() if line not in first],
    )


def _index_points(summary: Summary) -> dict[tuple[str, ...], Point]:
    return {
        (point.method, point.defense, f"{point.strength:g}", point.target, point.attack): point
        for point in (*summary.worst, *summary.points)
    }


def _describe(point: Point) -> str:
    where = "" if point.defense == "none" else f", {point.defense} {point.strength:g}"
    return f"{point.attack} ({point.method}{where}, {point.target})"


def _move(before: Point, after: Point) -> Move:
    """Return how far a line moved, on training rows if either attack gains most there."""
    points = before, after
    if any(map(is_larger_on_train, points)) and all(point.leak_train.mean is not None for point in points):
        before, after = (msgspec.structs.replace(point, leak=point.leak_train) for point in points)
    return Move(
        method=before.method, defense=before.defense, strength=before.strength, target=before.target,
        attack=before.attack, choice=(before.choice, after.choice), rows=(before.leak.rows, after.leak.rows),
        leak=_subtract(before.leak, after.leak), utility=_subtract(before.utility, after.utility),
    )  # fmt: skip


def _subtract(before: Measure, after: Measure) -> Difference:
    if before.mean is None or after.mean is None or before.metric != after.metric:
        return Difference(before=before.mean, after=after.mean, change=None, ci95=(None, None))
    change = after.mean - before.mean
    ci95: Ends = (None, None)
    if None not in (*before.ci95, *after.ci95):
        below = math.hypot(before.upper - before.mean, after.mean - after.lower)
        above = math.hypot(before.mean - before.lower, after.upper - after.mean)
        ci95 = (change - below, change + above)
    return Difference(before=before.mean, after=after.mean, change=change, ci95=ci95)


def list_settings(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield settings, versions and hashes with their paths, as text."""
    where = manifest.provenance
    yield from _flatten({"adversary": manifest.adversary, "seeds": manifest.seeds, **manifest.settings})
    yield from _flatten({"versions": where.versions, "commit": where.commit, "sources": where.sources})


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", write_plain(value)


def write_plain(value: Any) -> str:
    """Return a setting as one would say it: names with the options that are set, items after commas, ``none``.

    >>> write_plain([{"name": "iso", "at": None, "options": {"unit": 2}}, {"name": "mid"}])
    'iso (unit=2), mid'
    """
    if isinstance(value, Mapping):
        options = ", ".join(text for name, of in value.items() if name != "name" for text in _write_option(name, of))
        return f"{value['name']} ({options})" if "name" in value and options else str(value.get("name", options))
    if isinstance(value, list | tuple):
        return ", ".join(map(write_plain, value)) or "none"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _write_option(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from (text for inner, of in value.items() for text in _write_option(inner, of))
    elif value not in (None, []) and (value or name != "strength"):
        yield f"{name}={write_plain(value)}"


def show(comparison: Comparison) -> Document:
    """Return the settings that differ, then how far each line has moved."""
    hidden = []
    if len({(move.method, move.defense, move.strength) for move in comparison.moves}) <= 1:
        hidden.append(PLACE)
    if all(move.utility.change is None for move in comparison.moves):
        hidden.append(UTILITY)
    moved = Cells.fill("What moved", [column for column in MOVES if column not in hidden], comparison.moves)
    moved = moved._replace(rows=list(dict.fromkeys(map(tuple, moved.rows))))  # curves share the row without a defense
    changed = Cells.fill("Settings that differ", SETTINGS, comparison.settings)
    lines = [] if comparison.settings else ["SAME settings, versions and data"]
    lines += [
        f"WARNING different datasets, {setting.before} and {setting.after}: the changes are not those of a defense"
        for setting in comparison.settings
        if setting.name == "dataset"
    ]
    lines += [f"ONLY before: {', '.join(comparison.only_before)}"] * bool(comparison.only_before)
    lines += [f"ONLY after: {', '.join(comparison.only_after)}"] * bool(comparison.only_after)
    above = [f"before: {comparison.before}", f"after: {comparison.after}"]
    return Document(above, [changed, moved] if comparison.settings else [moved], lines)


def _shorten(value: str | None) -> str:
    text = "–" if value is None else clean(value)
    return text if len(text) <= MAX_LETTERS else f"{text[: MAX_LETTERS - 3]}..."


def _name_attack(move: Move) -> str:
    if move.attack != "worst":
        return move.attack
    before, after = move.choice
    return f"worst: {before}" if before == after else f"worst: {before}, then {after}"


def _describe_move(move: Move) -> str:
    if move.leak.change is None:
        return "no number to compare"
    rows = "" if move.rows[0] == move.rows[1] else f"; of {move.rows[0]}, then {move.rows[1]} rows"
    if not move.leak.is_shown:
        return f"not told apart{rows}"
    return f"{'more' if move.leak.change > 0 else 'less'} leak{rows}"


SETTINGS = (
    Column("", lambda setting: setting.name, "setting"),
    Column("", title="before", cell=lambda setting: _shorten(setting.before), kind="prose"),
    Column("", title="after", cell=lambda setting: _shorten(setting.after), kind="prose"),
)
PLACE = Column("", title="where", cell=lambda move: f"{move.method}, {name_defense(move, UNDEFENDED)}")
UTILITY = Column("", title="utility", cell=lambda move: format_signed(move.utility.change))
MOVES = (
    PLACE,
    Column("", title="attack", cell=_name_attack, kind="prose"),
    TARGET._replace(detail=1),
    Column("", title="leak before", cell=lambda move: write_number(move.leak.before), detail=1),
    Column("", title="leak after", cell=lambda move: write_number(move.leak.after)),
    Column("", title="change", cell=lambda move: format_signed(move.leak.change)),
    Column("", title="95 % interval", detail=1,
           cell=lambda move: "–" if None in move.leak.ci95 else " to ".join(map(format_signed, move.leak.ci95))),
    UTILITY,
    Column("", title="status", cell=_describe_move, kind="prose"),
)  # fmt: skip
