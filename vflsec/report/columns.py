"""The columns of a report, each described once: tables, CSV, LaTeX, Markdown, HTML and glossary read ``RESULTS``.

JSON has the fields of ``Point``, and a new number is one of them. A column that is shown by default
changes the layout that tests/report pins: widths of a terminal, LaTeX, Markdown.
"""

import csv
import io
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from typing import Any

from vflsec.report.formats import Column, format_signed, spread, with_ends, with_margin, write_number, write_status
from vflsec.results.analysis.results import Damage, Ends, Point, Summary
from vflsec.results.records.manifest import INTEGRITY

PICK = "adversary's pick"

TEXTS = tomllib.loads((resources.files("vflsec.report") / "words.toml").read_text("utf-8"))
WORDS: dict[str, str] = TEXTS["meanings"]
"""What words in tables and sentences mean."""

CHOSEN = WORDS["worst"]


def name_of_attack(row: Point | Damage) -> str:
    """Return the attack's name; of the headline and of the adversary's pick, which it is."""
    if isinstance(row, Damage):
        return row.attack
    if row.attack not in ("worst", "picked") or not row.choice:
        return row.choice if row.among else drop_column(row.attack, row)
    column = f" on {row.column}" if row.choice == "alone" and row.among else ""
    return f"{'worst' if row.attack == 'worst' else PICK}: {drop_column(row.choice, row)}{column}"


def drop_column(name: str, point: Point) -> str:
    """Return the name of an attack without its column, which the title of its table has."""
    column = rf":column={re.escape(point.column)}(?:(,)(?=\S)|(?=[@ ]|, |$))"
    return re.sub(column, lambda match: ":" * bool(match[1]), name) if point.column and not point.among else name


def get_epsilon(point: Point) -> str:
    """Return the epsilon of each defense that has one, to three digits; infinity where none has."""
    spent = [(shorten(float(f"{loss['epsilon']:.3g}")), loss.get("of")) for loss in point.spent]
    texts = [f"{value} ({of})" if of else value for value, of in spent]
    return ", ".join(texts) or ("–" if point.status in ("missing", "unseen") else "∞")


def has_lower_bound(summary: Summary) -> bool:
    """Whether guesses of tossed labels bound epsilon from below."""
    return any(point.empirical for point in summary.points)


def is_private(summary: Summary) -> bool:
    """Whether there is an epsilon to be shown, or its absence."""
    return has_lower_bound(summary) or any(point.spent for point in summary.points)


def is_tuned(summary: Summary) -> bool:
    """Whether trials chose settings."""
    return any(point.tuning for point in summary.points)


def shorten(value: float) -> str:
    """Return a number of at most five characters: 600, 25.6k, 420k, 3e+07."""
    return f"{value:.3g}" if value >= 999_500 else f"{value / 1000:.3g}k" if value >= 1000 else f"{value:g}"


def get_budget(point: Point) -> str:
    """Return what the attack spent, and how certain its sign is, given the auxiliary labels."""
    parts = [f"{shorten(value)} {name}" for name, value in point.budget.items()]
    parts += [f"sign {100 * point.sureness:.0f} %"] if point.sureness is not None else []
    return ", ".join(parts) or "–"


def scale(value: float | None, unit: float) -> str:
    """Return a number of units with one decimal, or a dash."""
    return "–" if value is None else f"{value / unit:.1f}"


def _get_single(point: Point, key: str, default: Any = None) -> Any:
    """Return what the only defense with an epsilon has spent; None if there are several, which the JSON has."""
    return point.spent[0].get(key, default) if len(point.spent) == 1 else None


def compare_with_alone(point: Point) -> str:
    """Return whether an advantage is shown, and if not, the one that would have been, if any could."""
    detectable = point.leak.detectable
    if point.leak.advantage is None:
        return "–"
    if (point.leak.advantage_ci95[0] or 0.0) > 0:
        return "yes" if point.leak.is_shown else "yes, before correction"
    if point.leak.is_blind:
        return "cannot be shown"
    return "not shown" if detectable is None else f"not shown ({write_number(detectable)})"


def write_highest(point: Point) -> str:
    """Return in brackets the single attack that leaks more than the headline, its leak and its rows."""
    highest = f" (highest: {point.highest_attack} {write_number(point.highest)}, {point.highest_rows})"
    return highest if point.is_exceeded else ""


def write_advantage(point: Point) -> str:
    """Return the advantage with its interval; one that is 0 by definition has none."""
    advantage, ends = point.leak.advantage, point.leak.advantage_ci95
    return f"{format_signed(advantage)}{spread(advantage, ends) if ends != (0.0, 0.0) else ''}"


def write_other_rows(point: Point) -> str:
    """Return the leak on test rows of a point that is shown on training rows, else that on training rows."""
    rows, leak = ("test", point.leak_test) if point.leak.rows == "train" else ("train", point.leak_train)
    return "–" if leak is None or leak.mean is None else f"{write_number(leak.mean)} ({rows})"


def get_deltas(points: Iterable[Point]) -> str:
    """Return each delta at which an epsilon is stated, the smallest first."""
    return ", ".join(f"{delta:g}" for delta in sorted({loss["delta"] for point in points for loss in point.spent}))


def _with_alone(name: str) -> Callable[[Point], str]:
    return lambda p: f"{write_number(p.leak.others.get(name))} ({write_number(p.leak.alone_others.get(name))})"


def _with_interval(name: str, get: Callable[[Any], tuple[float | None, Ends]], **shown: Any) -> tuple[Column, ...]:
    """Return the column of a mean, and those of the ends of its interval, which files have."""
    mean = Column(name, lambda r: get(r)[0], **{"cell": lambda r: with_ends(*get(r)), **shown})
    low = mean._replace(name=f"{name}_low", value=lambda r: get(r)[1][0], title="")
    high = mean._replace(name=f"{name}_high", value=lambda r: get(r)[1][1], title="")
    return mean, low, high


def _build_target_column(title: str, key: str, unit: float, place: int) -> Column:
    return Column("", title=title, cell=lambda p: scale((p.reached or {}).get(key), unit), detail=1, place=place,
                  is_shown=lambda summary: summary.target is not None)  # fmt: skip


def _is_evaluation(summary: Summary) -> bool:
    return not summary.audited


def _has_text(summary: Summary) -> bool:
    return any("gained" in p.leak.others for p in summary.points)


def _has_classes(summary: Summary) -> bool:
    return any(p.target != "text" for p in summary.points)


BOTH = (Point, Damage)

RESULTS: tuple[Column, ...] = (
    Column("method", lambda r: r.method, "method", kind="name", rows=BOTH, place=1),
    Column("defense", lambda r: r.defense, "defense", kind="name", rows=BOTH, place=2),
    Column("strength", lambda r: r.strength, "λ", lambda r: f"{r.strength:.4g}", rows=BOTH, place=10,
           help="The strength of the defense; the row without it has 0.", is_shown=_is_evaluation),
    Column("attack", lambda r: r.attack, "attack", name_of_attack, kind="prose", rows=BOTH, place=40),
    Column("target", lambda r: INTEGRITY if isinstance(r, Damage) else r.target, kind="name", rows=BOTH),
    Column("status", lambda r: r.status, "status", write_status, kind="prose", rows=BOTH, place=200,
           help="ran: without an error, whatever it leaks; unconverged: a lower bound; n/N: in so many seeds; others "
           "replace a number."),
    Column("utility_metric", lambda r: r.utility.metric, kind="name", rows=BOTH),
    *_with_interval("utility", lambda r: (r.utility.mean, r.utility.ci95), title="utility ↑", rows=BOTH, place=50,
                    help="How well the joint model predicts on test rows.", is_shown=_is_evaluation),
    Column("cost", lambda p: p.cost, "cost ↓", lambda p: write_number(p.cost if p.strength else None), where="headline",
           place=55, detail=2, help="How much utility the defense costs."),
    Column("leak_metric", lambda p: p.leak.metric, kind="name"),
    Column("leak_rows", lambda p: p.leak.rows, "rows", lambda p: "–" if p.leak.mean is None else p.leak.rows,
           kind="name", detail=4, place=70,
           help="The rows on which the leak is measured: test or training rows, where joining gains most, or both."),
    *_with_interval("leak", lambda p: (p.leak.mean, p.leak.ci95), title="leak ↓", place=60,
                    help="How well an attack guesses what it is after, by the measure in the title of its table."),
    Column("leak_train", lambda p: p.leak_train.mean, "other rows", write_other_rows, detail=1, place=80,
           help="The leak on the rows in brackets, without those that the adversary knows."),
    Column("chance", lambda r: r.chance if isinstance(r, Damage) else r.leak.chance, "chance",
           lambda r: write_number(r.chance if isinstance(r, Damage) else r.leak.chance), rows=BOTH, detail=1, place=100,
           help="What a guess without any knowledge gives."),
    Column("alone", lambda p: p.leak.alone, "alone", lambda p: write_number(p.leak.alone), detail=3, place=90,
           help="What the adversary infers without joining, by the best attack on its own columns."),
    *_with_interval("advantage", lambda p: (p.leak.advantage, p.leak.advantage_ci95), title="advantage", place=110,
                    cell=write_advantage, help="Leak minus alone, with the interval of the difference; 0 without "
                    "one: alone was chosen, which proves nothing."),
    Column("detectable", lambda p: p.leak.detectable, "seen from", detail=1, place=120,
           cell=lambda p: "none" if p.leak.is_blind else write_number(p.leak.detectable),
           help="The smallest advantage that these runs would have told from 0, in about four of five cases; none if "
           "they would not have told all that is left to be gained.",
           is_shown=lambda summary: any(p.leak.detectable is not None for p in summary.points)),
    Column("recovery_accuracy", lambda p: p.leak.accuracy),
    Column("seeds", lambda r: r.lost.n if isinstance(r, Damage) else r.utility.n, rows=BOTH),
    Column("nbytes", lambda p: p.nbytes, "MB", lambda p: scale(p.nbytes, 1e6), detail=1, place=140,
           help="What crosses between the parties in training, in both directions.", is_shown=_is_evaluation),
    Column("seconds", lambda p: p.seconds),
    Column("trials", lambda p: sum(len(tuning.scores) for tuning in p.tuning.values()), "trials", detail=1,
           place=142, help="How many trainings chose settings, of all seeds.", is_shown=is_tuned),
    Column("trials_seconds", lambda p: sum(tuning.seconds for tuning in p.tuning.values()), "their CPU s",
           lambda p: scale(sum(tuning.seconds for tuning in p.tuning.values()), 1.0), place=143, is_shown=is_tuned),
    _build_target_column("epochs to target", "epochs", 1.0, 150),
    _build_target_column("MB to target", "true_bytes", 1e6, 151),
    _build_target_column("as SS-VFL counts", "paper_bytes", 2.0**20, 152),  # a megabyte of SS-VFL has 2^20 bytes
    Column("utility_under_attack", lambda d: d.under_attack.mean, "under attack ↑",
           lambda d: with_margin(d.under_attack), rows=(Damage,), place=51),
    *_with_interval("lost", lambda d: (d.lost.mean, d.lost.ci95), title="lost ↓", rows=(Damage,), place=52),
    *_with_interval("success", lambda d: (d.success.mean, d.success.ci95), title="success ↓", rows=(Damage,), place=53),
    Column("epsilon_at_least", lambda p: p.empirical.epsilon if p.empirical else None, "ε at least",
           lambda p: write_number(p.empirical.epsilon if p.empirical else None), place=30, is_shown=has_lower_bound),
    Column("epsilon", lambda p: _get_single(p, "epsilon"), "ε", get_epsilon, place=20, is_shown=is_private,
           help="The privacy loss of a defense with differential privacy. Smaller is better; ∞ is no guarantee."),
    Column("delta", lambda p: _get_single(p, "delta"), "δ", lambda p: get_deltas([p]) or "–", where="headline",
           place=21, detail=1, is_shown=is_private, help="Epsilon is stated for all but so small a chance."),
    Column("epsilon_of", lambda p: _get_single(p, "of", "releases"), kind="name"),
    Column("budget", lambda p: get_budget(p).replace(", ", "; "), "budget", get_budget, kind="prose", detail=1,
           place=130, help="What the attack spent, and how surely the known labels give the sign of its score."),
    *_with_interval("bits", lambda p: (p.leak.bits, p.leak.bits_ci95), title="bits per row ↓", where="per row",
                    is_shown=_has_classes,
                    help="What a guess tells of a row beyond alone, both calibrated on other rows."),
    Column("exact", lambda p: p.leak.others.get("exact"), "whole texts ↓", _with_alone("exact"), where="per row",
           is_shown=_has_text, help="The share of texts that are right as a whole; in brackets that of alone."),
    Column("gained", lambda p: p.leak.others.get("gained"), "gained ↓", where="per row", is_shown=_has_text,
           cell=lambda p: write_number(p.leak.others.get("gained")),
           help="Of the words that alone gets wrong, the share that the attack gets right."),
    Column("tpr@0.001", lambda p: p.leak.others.get("tpr@0.001"), "TPR at 0.1 % FPR ↓", _with_alone("tpr@0.001"),
           where="per row", is_shown=_has_classes, help="The share of a class that an attack finds while at most this "
           "share of the other rows is taken for it."),
    Column("tpr@0.01", lambda p: p.leak.others.get("tpr@0.01"), "TPR at 1 % FPR ↓", _with_alone("tpr@0.01"),
           where="per row", is_shown=_has_classes),
    Column("known@0.99", lambda p: p.leak.others.get("known@0.99")),
    Column("right@0.99", lambda p: p.leak.others.get("right@0.99")),
    Column("known_of_class@0.99", lambda p: p.leak.others.get("known_of_class@0.99"), "of a class known > 99 % ↓",
           _with_alone("known_of_class@0.99"), where="per row", place=-2, is_shown=_has_classes,
           help="The share of a class that the calibrated guess names with more than 99 %, as a mean over classes; a "
           "class of more than 90 % of the rows is left out, since its name alone is no knowledge."),
    Column("right_of_class@0.99", lambda p: p.leak.others.get("right_of_class@0.99"), "of these right",
           _with_alone("right_of_class@0.99"), where="per row", place=-1, is_shown=_has_classes),
    Column("highest", lambda p: p.highest),
    Column("highest_attack", lambda p: p.highest_attack, kind="name"),
    Column("highest_rows", lambda p: p.highest_rows, kind="name"),
    Column("victim", lambda p: p.victim, kind="name"),
    Column("column", lambda p: p.column, kind="name"),
    Column("above", lambda p: p.above),
)  # fmt: skip
"""All columns of points and of damages, in the order of files; ``place`` orders those of a table."""

DEFENSE = Column("defense", title="defense", cell=lambda p: p.defense if p.strength else "none", kind="name")
STRONGEST = Column("attack", title="strongest attack", kind="prose", place=65, help=CHOSEN,
                   cell=lambda p: drop_column(f"{p.choice or p.attack}{write_highest(p)}", p))  # fmt: skip
BEYOND = Column("", title="more than alone", cell=compare_with_alone, kind="prose", detail=1, place=115,
                help="Whether the interval of the advantage lies above 0, and still does after Holm's correction for "
                "all defenses of the table; if not, the least that would have shown, if any could.")  # fmt: skip
"""Columns of the table of headlines alone."""


def select_columns(*names: str) -> list[Column]:
    """Return columns of ``RESULTS`` in this order, for further tables."""
    by_name = {column.name: column for column in RESULTS}
    return [by_name[name] for name in names]


def select_table_columns(kind: type, summary: Summary, where: str = "main") -> list[Column]:
    """Return the columns of the table of points, or of damages, from the left."""
    shown = [c for c in RESULTS if c.title and kind in c.rows and c.where == where and c.is_shown(summary)]
    return sorted(shown, key=lambda column: column.place)


def select_headline_columns(summary: Summary) -> list[Column]:
    """Return the columns of the table of headlines, from the left."""
    names = ["strength", "epsilon_at_least", "epsilon", "delta", "utility", "cost", "leak", "alone", "advantage"]
    shown = [column for column in (*select_columns(*names, "status"), STRONGEST, BEYOND) if column.is_shown(summary)]
    return [DEFENSE, *sorted(shown, key=lambda column: column.place)]


def select_file_columns() -> list[Column]:
    """Return the columns of a CSV."""
    return [column for column in RESULTS if column.name]


def list_lines(summary: Summary) -> list[list[Any]]:
    """Return one line per point, per headline and per attack on integrity, with the columns of a CSV."""
    rows: Sequence[Point | Damage] = (*summary.points, *summary.worst, *summary.columns, *summary.integrity)
    return [[_format_cell(c, row) if isinstance(row, c.rows) else None for c in select_file_columns()] for row in rows]


def _format_cell(column: Column, row: Point | Damage) -> Any:
    """Return a value; a text is none that a spreadsheet takes for a formula."""
    value = column.value(row)
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@")) else value


def as_csv(summary: Summary) -> str:
    """Return ``list_lines`` in full precision, below the names of their columns."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([[c.name for c in select_file_columns()], *list_lines(summary)])
    return out.getvalue()
