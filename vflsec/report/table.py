"""The table of a Summary: plain cells first, then rich, CSV or Markdown."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from vflsec.base.checks import count
from vflsec.results.analysis.intervals import Ends, longer_side
from vflsec.results.analysis.results import Cap, Damage, Gate, Leak, Measure, Point, Rank, Summary
from vflsec.results.analysis.verdict import way_to_run
from vflsec.results.records.manifest import UNDEFENDED

CSV_HEADER = (
    "method", "defense", "strength", "attack", "target", "status",
    "utility_metric", "utility", "utility_low", "utility_high",
    "leak_metric", "leak_rows", "leak", "leak_low", "leak_high", "leak_train", "chance", "alone", "advantage",
    "advantage_low", "advantage_high", "detectable", "recovery_accuracy", "seeds", "nbytes", "seconds",
    "utility_under_attack", "lost", "lost_low", "lost_high", "success", "success_low", "success_high",
    "epsilon_at_least", "epsilon", "delta", "epsilon_of", "budget",
    "bits", "bits_low", "bits_high", "tpr@0.001", "tpr@0.01", "known@0.99", "right@0.99",
    "known_of_class@0.99", "right_of_class@0.99", "victim", "column", "above",
)  # fmt: skip

CSV_TEXT = ("method", "defense", "attack", "target", "status", "utility_metric", "leak_metric", "leak_rows",
            "epsilon_of", "budget", "victim", "column")  # fmt: skip
"""The columns of text; all others are numbers."""

PER_ROW = ("tpr@0.001", "tpr@0.01", "known_of_class@0.99", "right_of_class@0.99")
"""The metrics that tell how many rows are known, and how surely."""

MEASURES = {"auc": "AUC", "f1": "F1", "r2": "R²"}

OF_MODELS = (
    "EPSILON (models) bounds what a party's own models learn about one row; it does not cover the row's own embedding "
    "and gradient, which attacks read"
)

AT_LEAST = (
    "EPSILON (at least) is shown by guesses of labels that were tossed, with a confidence of 95 %; 0 proves nothing"
)

OF_ONE_COLUMN = "ONE COLUMN attacks on an attribute recover one column; others may leak more: run {}:column=all"

FEW_COLUMNS = 5
"""So many columns are listed below a table."""

PICK = "adversary's pick"

LONGEST = 20
"""Up to this length names of attacks are not broken."""

NARROW = 110
"""Below this width of a terminal, the columns that decide the least are left out."""

LEAST = 0.0005
"""What three decimals do not show."""

DETAILS = (
    "on train", "chance", "seen from", "budget", "MB", "epochs to target", "MB to target", "as SS-VFL counts",
    "CAP (accuracy)", "DCS", "note",
)  # fmt: skip
"""The columns that are left out there."""

LAST = ("hypervolume ↑", "alone", "rows")
"""The columns that are left out next, in this order, as long as a table does not fit."""

BOTH = ("test+train", "train+test")
"""Rows of both kinds, whose names may stand in two lines where there is little room."""

OF_TRAINING = ("λ", "utility ↑", "MB")
"""The columns that are left out for a system that was trained elsewhere."""

_UNTIL = {"epochs": 1.0, "true_bytes": 1e6, "paper_bytes": 2.0**20}
"""What is shown of the way to ``train.target``, and its unit; SS-VFL's megabyte has 2^20 bytes."""


LATEX = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$",
    "λ": r"$\lambda$", "ε": r"$\varepsilon$", "↑": r"$\uparrow$", "↓": r"$\downarrow$", "±": r"$\pm$",
    "≈": r"$\approx$", "∞": r"$\infty$", "·": r"$\cdot$", "²": r"$^2$", "–": "--",
}  # fmt: skip
"""What stands for a sign in LaTeX."""


class Cells(NamedTuple):
    """A table as text: a title, headings, rows."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def points(summary: Summary) -> list[Cells]:
    """Return one table per curve and target: a row per strength and attack.

    The headline comes first, then the adversary's pick where it is another, then the attacks by falling leak.
    """
    curves: dict[str, list[Point]] = {}
    for point in sorted(_interleaved(summary), key=lambda p: _targets(summary).index(p.target)):
        asked = f"strongest {point.target} of {point.among} columns of {point.victim}" if point.among else point.asked
        name = asked if summary.audited else f"{point.method}, {_defense(point.defense, summary)}"
        of = f", {asked}" if _mixed(summary) and not summary.audited else ""
        curves.setdefault(f"{name}{of}", []).append(point)
    header = [
        "λ",
        *(["ε"] if is_private(summary) else []),
        *(["ε at least"] if _shown(summary) else []),
        "attack",
        "utility ↑",
        "leak ↓",
        "rows",
        "on train",
        "alone",
        "chance",
        "advantage",
        *(["seen from"] if _detectable(summary) else []),
    ]
    header += ["budget", "MB"]
    header += ["epochs to target", "MB to target", "as SS-VFL counts"] if summary.target is not None else []
    found = [
        Cells(_title(label, points, summary), [*header, "status"], [_point_row(point, summary) for point in points])
        for label, points in curves.items()
    ]
    return [without(cells, OF_TRAINING) for cells in found] if summary.audited else found


def caps(summary: Summary) -> Cells | None:
    """Return one row per curve and attack, or None where nothing was swept."""
    if not summary.cap:
        return None
    several = len({cap.target for cap in summary.cap}) > 1
    header = ["method", "defense", *(["of"] if several else []), "attack", "CAP ↑", "calibrated ↑"]
    header += ["hypervolume ↑", "CAP (accuracy)"]
    lines = [_cap_row(cap, [cap.target] if several else []) for cap in summary.cap]
    return Cells("CAP over the defended strengths", [*header, "DCS", "note"], lines)


def integrity(summary: Summary) -> Cells | None:
    """Return one row per curve, strength and attack on integrity, or None where there is no such attack."""
    if not summary.integrity:
        return None
    header = ["method", "defense", "λ", "attack", "utility ↑", "under attack ↑", "lost ↓", "success ↓", "chance"]
    found = [_damage_row(damage) for damage in summary.integrity]
    return Cells("Integrity: what a malicious party can break", [*header, "status"], found)


def order(summary: Summary) -> Cells | None:
    """Return the defenses, the least leak first, with each score and the place it gives; None for a single one.

    A place that is not told apart from the one before or after it has an ≈.
    """
    if not summary.ranks:
        return None
    scores = [score for score in summary.ranks[0].values if any(score in rank.ranks for rank in summary.ranks)]
    several = len({rank.target for rank in summary.ranks}) > 1
    header = ["method", "defense", *(["of"] if several else []), *(f"{score} (place)" for score in scores)]
    ranked = sorted(summary.ranks, key=lambda rank: (rank.target, rank.ranks.get(scores[-1], 0)))
    lines = [
        [rank.method, rank.defense, *([rank.target] if several else []), *(_place(rank, score) for score in scores)]
        for rank in ranked
    ]
    return Cells("Defenses in the order of their means, each against the strongest attack that was run", header, lines)


def per_row(summary: Summary) -> Cells | None:
    """Return how much is known of how many rows, with *alone* in brackets; None if no attack guesses classes."""
    shown = [point for point in _interleaved(summary) if any(name in point.leak.others for name in PER_ROW)]
    if not shown:
        return None
    of = ["of"] if _mixed(summary) else []
    header = ["method", "defense", "λ", *of, "attack", "rows", "bits per row ↓"]
    header += ["TPR at 0.1 % FPR ↓", "TPR at 1 % FPR ↓", "of a class known > 99 % ↓", "of these right"]

    def line(p: Point) -> list[str]:
        leak = p.leak_train if gains_on_train(p) else p.leak
        own, alone = ([number(found.get(name)) for name in PER_ROW] for found in (leak.others, leak.alone_others))
        bits = f"{number(leak.bits)}{spread(leak.bits, leak.bits_ci95)}"
        place = [p.method, p.defense, f"{p.strength:.4g}", *([p.target] if of else []), _attack(p), leak.rows]
        return [*place, bits, *(f"{joined} ({other})" for joined, other in zip(own, alone, strict=True))]

    return Cells("How much, of how many rows (alone in brackets)", header, [line(point) for point in shown])


def gains_on_train(point: Point) -> bool:
    """Whether an attack that is reported on test rows has a larger advantage on training rows, in what is shown.

    The headline is reported on the rows on which it leaks most, and may be another attack on training rows.
    """
    test, train = point.leak.advantage, point.leak_train.advantage
    return point.attack != "worst" and test is not None and train is not None and train - test >= LEAST


def columns(summary: Summary) -> Cells | None:
    """Return the headline of each column, the largest gain first; None if not several of one party are attacked."""
    shown = [p for p in summary.columns if p.attack == "worst"]
    if not shown:
        return None
    header = ["method", "defense", "λ", "column", "attack", "measure", "leak ↓", "rows", "alone", "chance", "advantage"]
    rows = [
        [
            p.method, p.defense, f"{p.strength:.4g}", p.asked.removeprefix("attribute "), p.choice.split(":")[0],
            MEASURES.get(p.leak.metric, p.leak.metric), with_margin(p.leak), p.leak.rows, number(p.leak.alone),
            number(p.leak.chance), signed(p.leak.advantage),
        ]
        for p in sorted(shown, key=lambda p: (p.strength, -(p.leak.advantage or 0.0)))
    ]  # fmt: skip
    found = Cells("Every column that was attacked, the largest advantage first", header, rows)
    return without(found, ("method", "defense", *OF_TRAINING)) if summary.audited else found


def next_columns(summary: Summary) -> list[str]:
    """Return a line for each party of which several columns are attacked: those that leak most without a defense."""
    found = []
    for top in (p for p in summary.worst if p.among and not p.strength):
        own = [p for p in summary.columns if p.attack == "worst" and (p.method, p.defense) == (top.method, top.defense)]
        own = [p for p in own if p.strength == 0 and p.victim == top.victim and p.leak.mean is not None]
        own.sort(key=lambda p: -(p.leak.advantage or 0.0))
        names = [f"{p.column} {number(p.leak.mean)} ({number(p.leak.alone)})" for p in own[:FEW_COLUMNS]]
        more = f"; all {top.among} are in --format markdown, csv and json" if top.among > len(names) else ""
        found.append(f"COLUMNS of {top.victim}, leak and alone: {', '.join(names)}{more}")
    return list(dict.fromkeys(found))


def subgroups(summary: Summary) -> Cells | None:
    """Return a row for each attack and group of rows, or None if no groups were asked for."""
    if not summary.subgroups:
        return None
    column = summary.subgroups[0].column
    rows = [
        [
            one.method, one.defense, f"{one.strength:.4g}", one.attack, one.rows, one.group, str(one.n),
            with_margin(one.leak), number(one.p_holm),
        ]
        for one in summary.subgroups
    ]  # fmt: skip
    header = ["method", "defense", "λ", "attack", "rows", column, "n", "leak ↓", "p (Holm)"]
    return Cells(f"Leak by {column}; p is small if its groups do not all leak the same", header, rows)


def detailed(summary: Summary) -> list[Cells]:
    """Return all tables, also that with details for which a terminal has no room."""
    return [*tables(summary), *(_named(cells, summary) for cells in (columns(summary), per_row(summary)) if cells)]


def tables(summary: Summary) -> list[Cells]:
    """Return all tables: one per curve, then CAP, the order of defenses, and integrity."""
    others = caps(summary), order(summary), subgroups(summary), integrity(summary)
    return [*points(summary), *(_named(cells, summary) for cells in others if cells)]


def remarks(summary: Summary) -> list[str]:
    """Return the lines below the tables: notes on epsilon, Pareto front, orders, gates, failures, what was not run."""
    apart = any(" > " in line for line in summary.orders)
    agreed = "all scores agree wherever they tell two defenses apart" if apart else "no score tells two defenses apart"
    verdicts = summary.disagreements or [agreed]
    return [
        *([OF_MODELS] if any("of" in one for point in summary.points for one in point.spent) else []),
        *([AT_LEAST] if _shown(summary) else []),
        *exceeded(summary),
        *(front(summary) if summary.ranks else []),
        *(f"ORDER {line}" for line in ([*summary.orders, *verdicts] if summary.orders else [])),
        *(f"VERDICT NOTE {alarm}" for alarm in summary.alarms),
        *(f"VERDICT {sentence}" for sentence in summary.verdict),
        *(gate_line(gate) for gate in summary.gates),
        *next_columns(summary),
        *of_one_column(summary),
        *(f"ERROR {line}" for line in summary.failures),
        *lost(summary),
        *not_run(summary),
    ]


def of_one_column(summary: Summary) -> list[str]:
    """Return the line that names the attack of this adversary which attacks every column, where it attacked few."""
    attacks = [p.attack.partition(":")[0] for p in summary.points if p.column and not p.among]
    attacks = [name for name in attacks if name.startswith("attribute")] or attacks
    return [OF_ONE_COLUMN.format(min(attacks, key=len))] if attacks else []


def lost(summary: Summary) -> list[str]:
    """Return the line on baselines that gave no number, if any."""
    if not summary.lost:
        return []
    return [f"LOST without the federation: {', '.join(summary.lost)}; alone may be too low: add --retry-errors"]


def not_run(summary: Summary) -> list[str]:
    """Return the line that counts the attacks which this adversary could mount and which were not run, if any."""
    if not summary.not_run:
        return []
    attacks = count(len(summary.not_run), "attack")
    names = ", ".join(summary.not_run)
    way = way_to_run(summary.not_run, summary.left_out, audited=bool(summary.audited))
    way += "" if summary.audited else " or name them"
    if len({point.method for point in summary.points}) > 1:  # leaves out attacks that do not fit all of them
        way += ", with one --method for an attack that only fits that method"
    return [f"NOT RUN {attacks} that {summary.adversary} could mount: {names}; {way}"]


def front(summary: Summary) -> list[str]:
    """Return a line for each target: the places that no other beats in both utility and leak, by falling utility."""
    found = []
    several = len({place.method for place in summary.front}) > 1
    for target in _targets(summary):
        along = sorted((p for p in summary.front if p.target == target), key=lambda p: -p.utility)
        names = [f"{p.method}, {p.defense}" if several else p.defense for p in along]
        places = [
            f"{name} {p.strength:.4g}" if p.strength else f"{p.method}, " * several + summary.undefended
            for name, p in zip(names, along, strict=True)
        ]
        shown = [f"{place} ({number(p.utility)}, {number(p.leak)})" for place, p in zip(places, along, strict=True)]
        of = f" of {target}" if _mixed(summary) else ""
        found.append(f"PARETO FRONT{of} (utility, strongest leak): {'; '.join(dict.fromkeys(shown))}")
    return found


def heading(summary: Summary) -> str:
    """Return the line above the tables: dataset, adversary, metric, seeds."""
    if summary.audited:
        draws = "1 draw" if summary.seeds == 1 else f"{summary.seeds} draws"
        over = "rows" if summary.seeds == 1 else "draws and rows"
        return f"{summary.audited} · {summary.dataset} · adversary {summary.adversary} · {draws}, ± 95 % over {over}"
    seeds = f"{summary.seeds} seeds, ± 95 % over seeds and rows" if summary.seeds > 1 else "1 seed, ± 95 % over rows"
    metric = MEASURES.get(summary.metric, summary.metric)
    every = f" · every training with {summary.undefended}" if has_fixed(summary) else ""
    return f"{summary.dataset} · adversary {summary.adversary} · utility: {metric} on test rows · {seeds}{every}"


def has_fixed(summary: Summary) -> bool:
    """Whether some defense is in every training."""
    return summary.undefended != UNDEFENDED


def _defense(name: str, summary: Summary) -> str:
    """Return the swept defense, else what every training has."""
    return summary.undefended if has_fixed(summary) and name == "none" else name


def _named(cells: Cells, summary: Summary) -> Cells:
    """Return ``cells``, whose column of defenses names what every training has."""
    at = [k for k, name in enumerate(cells.header) if name == "defense"]
    rows = [[_defense(cell, summary) if k in at else cell for k, cell in enumerate(row)] for row in cells.rows]
    return cells._replace(rows=rows)


def rich(summary: Summary, width: int) -> RenderableType:
    """Return the tables for a terminal of ``width`` columns."""
    parts: list[RenderableType] = [Text(heading(summary)), *(Text(f"NOTE {note}") for note in summary.notes)]
    found = tables(summary)
    narrow = width < NARROW or not all(fits(cells, width, narrow=False) for cells in found)
    order = [name for name in (*DETAILS, *LAST) if name != "on train" or not any(map(gains_on_train, summary.points))]
    tries = (order[:n] for n in range(len(order) - len(LAST), len(order)))
    details = next((some for some in tries if all(fits(without_details(cells, some), width) for cells in found)), order)
    for cells in found:
        parts += [Text(), as_rich(without_details(cells, details), width)] if narrow else [as_rich(cells)]
    parts += [Text()] if narrow else []
    parts += [Text(line) for line in remarks(summary)]
    hidden = list(dict.fromkeys(name for cells in found for name in cells.header if name in details))
    if narrow and hidden:
        parts.append(Text(f"NOT SHOWN {', '.join(hidden)}: widen the terminal, or add --format markdown"))
    return Group(*parts)


def fits(cells: Cells, width: int, *, narrow: bool = True) -> bool:
    """Whether a table has room for whole words."""
    if narrow:
        return sum(_least(cells)) + 2 * (len(cells.header) - 1) <= width
    shown = as_text(as_rich(cells), width).split()
    return all(word in shown for row in (cells.header, *cells.rows) for cell in row for word in cell.split())


def without_details(cells: Cells, details: Sequence[str] = DETAILS) -> Cells:
    """Return ``cells`` without the columns in ``details``; a method that all rows share moves to the title."""
    methods = {row[cells.header.index("method")] for row in cells.rows} if "method" in cells.header else set()
    title = f"{cells.title}, {methods.pop()}" if len(methods) == 1 else cells.title
    narrow = [[cell.replace("+", "+\n") if cell in BOTH else cell for cell in row] for row in cells.rows]
    return without(Cells(title, cells.header, narrow), details if title == cells.title else (*details, "method"))


def without(cells: Cells, names: Sequence[str]) -> Cells:
    """Return ``cells`` without the columns in ``names``."""
    kept = [k for k, name in enumerate(cells.header) if name not in names]
    return Cells(cells.title, [cells.header[k] for k in kept], [[row[k] for k in kept] for row in cells.rows])


def markdown(summary: Summary) -> str:
    """Return the tables as Markdown."""
    parts = [
        heading(summary),
        *(f"NOTE {note}" for note in summary.notes),
        *(f"{cells.title}\n\n{as_markdown(cells)}" for cells in detailed(summary)),
    ]
    return "\n\n".join([*parts, *remarks(summary)]) + "\n"


def lines(summary: Summary) -> list[list[Any]]:
    """Return one line per point, per headline and per attack on integrity, with the columns of ``CSV_HEADER``."""
    found: list[list[Any]] = [
        [
            *map(_no_formula, (p.method, p.defense)), p.strength, _no_formula(p.attack), p.target, p.status,
            p.utility.metric, p.utility.mean, *p.utility.ci95,
            p.leak.metric, p.leak.rows, p.leak.mean, *p.leak.ci95, p.leak_train.mean, p.leak.chance, p.leak.alone,
            p.leak.advantage, *p.leak.advantage_ci95, p.leak.detectable, p.leak.accuracy,
            p.utility.n, p.nbytes, p.seconds,
            *[None] * 7, p.empirical.epsilon if p.empirical else None, *_spent(p), _budget_cell(p).replace(", ", "; "),
            p.leak.bits, *p.leak.bits_ci95, *map(p.leak.others.get, CSV_HEADER[-9:-3]),
            *map(_no_formula, (p.victim, p.column)), p.above,
        ]
        for p in (*summary.points, *summary.worst, *summary.columns)
    ]  # fmt: skip
    found += [
        [
            *map(_no_formula, (d.method, d.defense)), d.strength, _no_formula(d.attack), "integrity", d.status,
            d.utility.metric, d.utility.mean, *d.utility.ci95, *[None] * 6, d.chance, *[None] * 6,
            d.lost.n, None, None,
            d.under_attack.mean, d.lost.mean, *d.lost.ci95, d.success.mean, *d.success.ci95, *[None] * 17,
        ]
        for d in summary.integrity
    ]  # fmt: skip
    return found


def as_csv(summary: Summary) -> str:
    """Return ``lines`` in full precision, ``CSV_HEADER`` first."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([CSV_HEADER, *lines(summary)])
    return out.getvalue()


def _no_formula(name: str) -> str:
    """Return a name that a spreadsheet does not take for a formula."""
    return f"'{name}" if name.startswith(("=", "+", "-", "@")) else name


def _spent(point: Point) -> tuple[Any, Any, Any]:
    """Return epsilon, delta and what they are of, if exactly one defense has them; the JSON has those of several."""
    if len(point.spent) != 1:
        return None, None, None
    return point.spent[0]["epsilon"], point.spent[0]["delta"], point.spent[0].get("of", "releases")


def gate_line(gate: Gate) -> str:
    """Return the sentence on one gate."""
    why = gate.why or "a cell gave no number"
    if gate.gate == "max-undetected" and not gate.why:
        why += ", or it is not known what would have been seen"
    holds = f"holds, but {gate.why}" if gate.why else "holds"
    verdict = {True: holds, False: "FAILED", None: f"UNDECIDED: {why}"}[gate.holds]
    ends = {"min-utility": "lower end of the interval", "max-undetected": "an advantage is seen from"}
    what = ends.get(gate.gate, "upper end of the interval")
    where = f", {what} {gate.worst:.3f} at {gate.at}" if gate.worst is not None else ""
    earlier = " (an earlier limit, since replaced)" if gate.replaced else ""
    return f"GATE {gate.gate} {gate.limit:g}{earlier}: {verdict}{where}"


def number(value: float | None) -> str:
    """Return three decimals without the leading zero, or a dash."""
    return "–" if value is None else _short(f"{value:.3f}")


def signed(value: float | None) -> str:
    """Return three decimals with a sign, or a dash."""
    return "–" if value is None else _short(f"{value:+.3f}")


def with_margin(measure: Measure | Leak) -> str:
    """Return ``mean ±margin``."""
    return f"{number(measure.mean)}{spread(measure.mean, measure.ci95)}"


def spread(mean: float | None, ends: Ends) -> str:
    """Return `` ±margin``, the longer side of the interval, or nothing.

    Over rows, or near 0 or 1, the sides differ: both ends are shown where ± would cross 0 or 1 and they do not.
    """
    margin = longer_side(mean, ends)
    if mean is None or margin is None or ends[0] is None or ends[1] is None:
        return ""
    if any(mean - margin < bound - LEAST < ends[0] or ends[1] < bound + LEAST < mean + margin for bound in (0.0, 1.0)):
        return f" ({number(ends[0])} to {number(ends[1])})"
    return f" ±{number(margin)}"


def status(point: Point | Damage) -> str:
    """Return ``ok``, or how many seeds ended in which way, or guess one class, and whether all lies below chance."""
    bad = sorted((name, n) for name, n in point.statuses.items() if name != "ok")
    if isinstance(point, Point) and point.leak.one_class:
        bad.append(("one class", point.leak.one_class))
    found = [f"{n}/{sum(point.statuses.values())} {name}" for name, n in bad]
    if isinstance(point, Point) and below_chance(point.leak):
        found.append("below chance")
    return ", ".join(found) or "ok"


def below_chance(leak: Leak) -> bool:
    """Whether the whole interval of ``leak`` is below chance: the attack guesses the wrong way round."""
    return leak.chance is not None and leak.ci95[1] is not None and leak.ci95[1] < leak.chance


def _short(text: str) -> str:
    return re.sub(r"^([+-]?)0\.", r"\1.", text.removeprefix("-") if float(text) == 0 else text)


def _interleaved(summary: Summary) -> list[Point]:
    """Points in order of curves, strengths and targets; of those the headline, the pick, and then the strongest."""
    order = {(p.method, p.defense, p.strength): i for i, p in reversed(list(enumerate(summary.points)))}
    headlines = {(p.method, p.defense, p.strength, p.target): p.choice for p in summary.worst}
    picked = [p for p in summary.picked if headlines[p.method, p.defense, p.strength, p.target] != p.choice]

    def place(p: Point) -> tuple[int, int, int, float]:
        curve = order[p.method, p.defense, p.strength]
        kind = {"worst": 0, "picked": 1}.get(p.attack, 2)
        return curve, _targets(summary).index(p.target), kind, -(p.leak.mean or 0.0)

    return sorted([*summary.points, *summary.worst, *picked], key=place)


def _targets(summary: Summary) -> list[str]:
    """Return what is recovered, in the order of the attacks."""
    return list(dict.fromkeys(p.target for p in summary.points))


def _title(label: str, points: Sequence[Point], summary: Summary) -> str:
    """Return the title of a table, with the measure of its leaks where not all leaks are of labels."""
    leak = next((p.leak for p in points if p.leak.metric), None)
    if leak is None or not (_mixed(summary) or summary.audited):
        return label
    several = len({p.leak.metric for p in points if p.leak.metric}) > 1
    measure = "measure of the column" if several else MEASURES.get(leak.metric, leak.metric)
    chance = f", {number(leak.chance)} by chance" if leak.chance is not None and not several else ""
    return f"{label} (leak: {measure}{chance})"


def _attack(point: Point) -> str:
    """Return the attack's name; of the headline and of the adversary's pick, which it is."""
    if point.attack not in ("worst", "picked") or not point.choice:
        return point.choice if point.among else point.attack
    column = f" on {point.column}" if point.choice == "alone" and point.among else ""
    return f"{'worst' if point.attack == 'worst' else PICK}: {point.choice}{column}"


def _mixed(summary: Summary) -> bool:
    """Whether something other than labels is recovered, so that leaks are of several kinds."""
    return any(p.target != "labels" for p in summary.points)


def _shown(summary: Summary) -> bool:
    """Whether guesses of tossed labels bound epsilon from below."""
    return any(point.empirical for point in summary.points)


def is_private(summary: Summary) -> bool:
    """Whether there is an epsilon to be shown, or its absence."""
    return _shown(summary) or any(point.spent for point in summary.points)


def exceeded(summary: Summary) -> list[str]:
    """Return a line for each point whose attack shows more than the promised epsilon."""
    return [
        f"EPSILON EXCEEDED {p.method}, {p.defense} {p.strength:.4g}: {p.empirical.attack} shows at least "
        f"{p.empirical.epsilon:.3g}, and {p.empirical.promised:.3g} is promised"
        for p in summary.worst
        if p.empirical and p.empirical.promised is not None and p.empirical.epsilon > p.empirical.promised
    ]


def _detectable(summary: Summary) -> bool:
    """Whether some runs say from where they would have seen an advantage."""
    return any(p.leak.detectable is not None for p in summary.points)


def _point_row(point: Point, summary: Summary) -> list[str]:
    reached = point.reached or {}
    until = [_scaled(reached.get(key), unit) for key, unit in _UNTIL.items()] if summary.target is not None else []
    return [
        f"{point.strength:.4g}",
        *([epsilon(point)] if is_private(summary) else []),
        *([number(point.empirical.epsilon if point.empirical else None)] if _shown(summary) else []),
        _attack(point),
        with_margin(point.utility),
        with_margin(point.leak),
        "–" if point.leak.mean is None else point.leak.rows,
        number(point.leak_train.mean),
        number(point.leak.alone),
        number(point.leak.chance),
        signed(point.leak.advantage),
        *([number(point.leak.detectable)] if _detectable(summary) else []),
        _budget_cell(point),
        _scaled(point.nbytes, 1e6),
        *until,
        status(point),
    ]


def _budget_cell(point: Point) -> str:
    """Return what the attack spent, and how certain its sign is, given the auxiliary labels."""
    found = [f"{_count(value)} {name}" for name, value in point.budget.items()]
    found += [f"sign {point.sureness:.0%}".replace("%", " %")] if point.sureness is not None else []
    return ", ".join(found) or "–"


def epsilon(point: Point) -> str:
    """Return the epsilon of each defense that has one, to three digits; infinity where none has."""
    found = [_count(float(f"{one['epsilon']:.3g}")) + (f" ({one['of']})" if "of" in one else "") for one in point.spent]
    return ", ".join(found) or ("∞" if point.status != "missing" else "–")


def _count(value: float) -> str:
    """Return a number of at most four characters: 600, 25.6k, 420k."""
    return f"{value / 1000:.3g}k" if value >= 1000 else f"{value:g}"


def _scaled(value: float | None, unit: float) -> str:
    return "–" if value is None else f"{value / unit:.1f}"


def _cap_row(cap: Cap, of: list[str]) -> list[str]:
    return [
        cap.method,
        cap.defense,
        *of,
        cap.attack,
        f"{number(cap.value)}{spread(cap.value, cap.ci95)}",
        f"{number(cap.calibrated)}{spread(cap.calibrated, cap.calibrated_ci95)}",
        f"{number(cap.hypervolume)}{spread(cap.hypervolume, cap.hypervolume_ci95)}",
        number(cap.accuracy_value),
        number(cap.dcs),
        cap.note,
    ]


def _damage_row(damage: Damage) -> list[str]:
    return [
        damage.method,
        damage.defense,
        f"{damage.strength:g}",
        damage.attack,
        with_margin(damage.utility),
        with_margin(damage.under_attack),
        with_margin(damage.lost),
        with_margin(damage.success),
        number(damage.chance),
        status(damage),
    ]


def _place(rank: Rank, score: str) -> str:
    close = "≈" if score in rank.close else ""
    place = f" ({close}{rank.ranks[score]})" if score in rank.ranks else ""
    return f"{number(rank.values[score])}{place}"


def as_text(shown: RenderableType, width: int) -> str:
    """Return what a terminal of ``width`` columns shows."""
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, force_jupyter=False).print(shown)
    return out.getvalue()


def as_rich(cells: Cells, width: int | None = None) -> RichTable:
    """Return a table for a terminal; in a narrow one, of ``width`` columns, any cell may wrap and none is cut."""
    narrow = width is not None
    cells = _broken(cells) if narrow else cells
    table = RichTable(
        title=Text(cells.title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=not narrow,
        pad_edge=not narrow,
    )  # fmt: skip
    widths = [None] * len(cells.header) if width is None else _widths(cells, width)
    for i, (name, least) in enumerate(zip(cells.header, _least(cells), strict=True)):
        text = narrow or name in ("attack", "budget", "status", "note")  # these may wrap; numbers may not
        left = i == 0 or name in ("attack", "budget", "status", "note", "before", "after")
        justify: Literal["left", "right"] = "left" if left else "right"
        longest = max((len(row[i]) for row in cells.rows), default=0)
        whole = not narrow and name == "attack" and longest <= LONGEST
        room = longest if whole else least
        table.add_column(name, no_wrap=not text, overflow="fold", justify=justify, min_width=room, width=widths[i])
    for row in cells.rows:
        table.add_row(*map(Text, row))  # names are no markup
    return table


def _broken(cells: Cells) -> Cells:
    """Return ``cells`` whose long words break after a colon, as in ``attribute-fusion:column=a0``."""
    long = re.compile(rf"\S{{{LONGEST + 1},}}")
    rows = [[long.sub(lambda word: word[0].replace(":", ":\n"), cell) for cell in row] for row in cells.rows]
    return cells._replace(rows=rows)


def _least(cells: Cells) -> list[int]:
    """Return the width of each column in which its words are whole, those of up to ``LONGEST`` letters."""
    columns = zip(cells.header, *_broken(cells).rows, strict=True)
    return [min(LONGEST, max(cell_len(word) for text in column for word in ("", *text.split()))) for column in columns]


def _widths(cells: Cells, width: int) -> list[int]:
    """Return the width of each column of a table of at most ``width``: of as many as possible their whole cells."""
    cells_of = zip(cells.header, *cells.rows, strict=True)
    columns = [[line for text in column for line in ("", *text.splitlines())] for column in cells_of]
    parts = [[part for line in column for part in re.split(r" (?=[(±])|(?<= to) ", line)] for column in columns]
    widths = _least(cells)
    room = width - 2 * (len(widths) - 1) - sum(widths)
    for texts in (parts, columns):
        missing = [max(map(cell_len, column)) - least for column, least in zip(texts, widths, strict=True)]
        for k in sorted(range(len(widths)), key=missing.__getitem__):
            more = max(0, min(missing[k], room))
            widths[k], room = widths[k] + more, room - more
    while room < 0 and max(widths) > 1:  # words are broken rather than cut
        widths[widths.index(max(widths))] -= 1
        room += 1
    return widths


def as_markdown(cells: Cells) -> str:
    """Return a table as Markdown."""
    lines = [cells.header, ["---"] * len(cells.header), *([_escaped(cell) for cell in row] for row in cells.rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def latex(summary: Summary) -> str:
    """Return the tables as LaTeX."""
    above = [heading(summary), *(f"NOTE {note}" for note in summary.notes)]
    comments = [
        "\n".join(f"% {' '.join(line.split())}" for line in lines) for lines in (above, remarks(summary)) if lines
    ]
    return "\n\n".join([comments[0], *map(as_latex, detailed(summary)), *comments[1:]]) + "\n"


def as_latex(cells: Cells) -> str:
    """Return a table as LaTeX with the rules of booktabs; the first column and columns of text are flush left."""
    text = ("attack", "budget", "status", "note", "method", "defense", "of", "rows")
    columns = "".join("l" if i == 0 or name in text else "r" for i, name in enumerate(cells.header))
    header, *rows = [" & ".join(map(_for_latex, row)) + r" \\" for row in (cells.header, *cells.rows)]
    return "\n".join(
        [
            r"\begin{table}",
            rf"\caption{{{_for_latex(cells.title)}}}",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            header,
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
    )


def _for_latex(cell: str) -> str:
    """Return a cell of LaTeX that is read as text; a number with a minus is set as one."""
    if re.fullmatch(r"[+-][\d.]+", cell):
        return f"${cell}$"
    return "".join(LATEX.get(sign, sign) for sign in cell)


def _escaped(cell: str) -> str:
    """Return a cell of Markdown that is read as text."""
    return re.sub(r"([\\|<\[`])", r"\\\1", cell)
