"""The tables of a Summary and the lines around them, for a terminal, Markdown and LaTeX."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from vflsec.base.checks import count, group
from vflsec.report.columns import (
    CHOSEN,
    TEXTS,
    drop_column,
    get_deltas,
    has_lower_bound,
    select_columns,
    select_headline_columns,
    select_table_columns,
    write_highest,
)
from vflsec.report.formats import LAST_DETAIL, MIN_SHOWN, Cells, Column, Document, with_ends, with_margin, write_number
from vflsec.results.analysis.results import Cap, Damage, Gate, Point, Rank, Summary, name_defense
from vflsec.results.analysis.verdict import MEASURES, suggest_run
from vflsec.results.canaries import bound_accuracy
from vflsec.results.records.manifest import NO_ADVERSARY, UNDEFENDED
from vflsec.results.statistics import LEVEL

OF_MODELS = "EPSILON (models) bounds what own models learn of a row, not its embedding and gradient, which attacks read"

AT_LEAST = "EPSILON (at least) is shown by guesses of tossed labels, with a confidence of 95 %; 0 proves nothing"

SINGLE_COLUMN = "ONE COLUMN attacks on an attribute recover one column; others may leak more: run {}:column=all"

SIMULATED = "SIMULATED noise and keys of defenses are drawn from seeds here, and protect no real data"

FEW_COLUMNS = 5
"""So many columns are listed below a table."""

ALONE = "without joining (alone)"
"""The first row of the table of several adversaries."""

WORST_FIRST: str = TEXTS["several"]

ATTACK = Column("attack", lambda row: row.attack, "attack", kind="prose")
TARGET = Column("target", lambda row: row.target, "of", kind="name")

FOLDED = (
    Column("", title="CAP ↑", cell=lambda cap: with_ends(cap.value, cap.ci95),
           help="The mean of utility times (1 - leak) over the strengths of a defense. Larger is better."),
    Column("", title="calibrated ↑", cell=lambda cap: with_ends(cap.calibrated, cap.calibrated_ci95),
           help="CAP with the advantage over alone in place of the leak. A destroyed model gains less by it."),
    Column("", title="hypervolume ↑", cell=lambda cap: with_ends(cap.hypervolume, cap.hypervolume_ci95), detail=2,
           help="How much of what joining gains is kept, times the privacy kept; a destroyed model scores 0."),
)  # fmt: skip
"""The scores of a curve, with their intervals."""

CAPS = (
    Column("", title="CAP (accuracy)", cell=lambda cap: write_number(cap.accuracy_value), detail=1,
           help="CAP with the accuracy of the guesses as the leak, as papers compute it."),
    Column("", title="DCS", cell=lambda cap: write_number(cap.dcs), detail=1,
           help="The mean over the strengths of 1 / (1 + distance to no leak at full utility). 1 is best."),
)  # fmt: skip


def list_points(summary: Summary) -> list[Cells]:
    """Return one table per curve and target: a row per strength and attack, on the rows where it gains most.

    The headline comes first, then the adversary's pick where it is another, then the attacks by falling leak.
    """
    ordered = sorted(_sort_points(summary), key=lambda p: _list_targets(summary).index(p.target))
    curves = group(ordered, lambda p: _name_table(p, summary))
    shown = [column for column in select_table_columns(Point, summary) if column.name not in ("method", "defense")]
    if any(map(is_larger_on_train, summary.points)):
        shown = [column._replace(detail=0) if column.name == "leak_train" else column for column in shown]
    return [
        Cells.fill(_write_title(label, points, summary), shown, map(show_most, points))
        for label, points in curves.items()
    ]


def list_headlines(summary: Summary) -> list[Cells]:
    """Return one table per target: what the strongest attack infers under each defense, and once without one."""
    questions: dict[str, list[Point]] = {}
    headlines = [*summary.worst, *(point for point in summary.points if point.attack == NO_ADVERSARY)]
    for point in sorted(headlines, key=lambda p: (p.strength > 0, _list_targets(summary).index(p.target))):
        points = questions.setdefault(_name_question(point), [])
        if point.strength or all(point.method != other.method for other in points):
            points.append(point)
    methods = len({point.method for point in headlines}) > 1
    shown = [*(select_columns("method") if methods else []), *select_headline_columns(summary)]
    return [
        _name_fixed(Cells.fill(f"Strongest attack on {asked}{_write_measure(points)}", shown, points), summary)
        for asked, points in questions.items()
    ]


def measure_gain(summary: Summary) -> float:
    """Return the most that a headline has beyond *alone*, or beyond chance where nothing is alone.

    Several adversaries are ordered by it; one without a number has infinity.
    """
    leaks = [point.leak for point in summary.worst if point.leak.mean is not None]
    gains = [(leak.mean or 0.0) - (leak.chance or 0.0) if leak.alone is None else leak.advantage for leak in leaks]
    return max((math.inf if gain is None else gain for gain in gains), default=math.inf)


def name_roles(summaries: Sequence[Summary]) -> list[str]:
    """Return a numbered name for each adversary, with its data where these are several."""
    data = [summary.audited or summary.dataset for summary in summaries]
    several = len({*data}) > 1
    named = enumerate(zip(summaries, data, strict=True), 1)
    return [f"{k}. {summary.adversary}{f' on {name}' if several else ''}" for k, (summary, name) in named]


def show_roles(summaries: Sequence[Summary]) -> Document:
    """Return the headlines of several adversaries side by side, a table for each target and measure.

    It has a row for each defense, and one for *alone*, and a column for each adversary.
    """
    tables: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
    several = len({point.method for summary in summaries for point in summary.worst}) > 1
    named = [(p, name, s) for name, s in zip(name_roles(summaries), summaries, strict=True) for p in s.worst]
    for point, name, summary in sorted(named, key=lambda row: row[0].place if row[0].strength else ()):
        target, _, of = _name_question(point).partition(" ")
        rows = tables.setdefault((target, MEASURES.get(point.leak.metric, point.leak.metric)), {ALONE: {}})
        column = f"{name}: {of}" if of else name
        rows[ALONE].setdefault(column, write_number(point.leak.alone))
        label = f"{point.method}, " * several + name_defense(point, summary.undefended)
        text = drop_column(with_margin(point.leak) + write_highest(point), point)
        rows.setdefault(label, {}).setdefault(column, text)
    joined = [_join(f"What each adversary infers of {', '.join(key)}", rows) for key, rows in tables.items()]
    return Document([WORST_FIRST], joined, [])


def _join(title: str, rows: dict[str, dict[str, str]]) -> Cells:
    known = [label for label in rows if label != ALONE or {*rows[ALONE].values()} != {"–"}]
    texts = [[label, *(rows[label].get(name, "not run") for name in rows[ALONE])] for label in known]
    columns = [Column("", title="defense", kind="name"), *(Column("", title=name) for name in rows[ALONE])]
    return Cells(title, columns, texts)


def list_caps(summary: Summary, *, details: bool) -> Cells:
    """Return one row per curve, by the strongest attack; none where nothing was swept."""
    shown = [cap for cap in summary.cap if cap.attack == "worst"]
    scores = [*FOLDED, *(CAPS if details else ())]
    columns = [*select_columns("method", "defense"), *_list_target(shown), *scores]
    return Cells.fill("CAP over the defended strengths", columns, shown)


def list_cap_notes(summary: Summary) -> list[str]:
    """Return a line for each note on scores, with the defenses that it is about."""
    noted = [(note, cap.defense) for cap in summary.cap for note in filter(None, cap.note.split("; "))]
    by_note = group(noted, lambda pair: pair[0]).items()
    return [f"CAP of {', '.join(dict.fromkeys(name for _, name in pairs))}: {note}" for note, pairs in by_note]


def list_integrity(summary: Summary) -> Cells:
    """Return one row per curve, strength and attack on integrity."""
    title = "Integrity: what a malicious party can break"
    return Cells.fill(title, select_table_columns(Damage, summary), summary.integrity)


def order(summary: Summary) -> Cells | None:
    """Return the defenses, the least leak first, with each score and the place it gives; None for a single one.

    A place that is not told apart from the one before or after it has an ≈.
    """
    if not summary.ranks:
        return None
    scores = [score for score in summary.ranks[0].values if any(score in rank.ranks for rank in summary.ranks)]
    columns = [*select_columns("method", "defense"), *_list_target(summary.ranks), *map(_score_column, scores)]
    ranked = sorted(summary.ranks, key=lambda rank: (rank.target, rank.ranks.get(scores[-1], 0)))
    title = "Defenses in the order of their means, each against the strongest attack that was run"
    return Cells.fill(title, columns, ranked)


def _score_column(score: str) -> Column:
    def cell(rank: Rank) -> str:
        close = "≈" if score in rank.close else ""
        place = f" ({close}{rank.ranks[score]})" if score in rank.ranks else ""
        return f"{write_number(rank.values[score])}{place}"

    return Column("", title=f"{score} (place)", cell=cell)


def _list_target(rows: Iterable[Cap | Rank]) -> list[Column]:
    return [TARGET] if len({row.target for row in rows}) > 1 else []


def list_row_shares(summary: Summary) -> Cells:
    """Return how much the strongest attacks tell of how many rows, with *alone* in brackets; files have all attacks."""
    columns = select_table_columns(Point, summary, "per row")
    headlines = [point for point in _sort_points(summary) if point.attack == "worst"]
    shown = [point for point in headlines if any(column.name in point.leak.others for column in columns)]
    places = [] if summary.audited else select_columns("method", "defense", "strength")
    before = [*places, *([TARGET] if _is_mixed(summary) else [])]
    title = "How much, of how many rows (alone in brackets)"
    return Cells.fill(title, [*before, *select_columns("attack", "leak_rows"), *columns], shown)


def is_larger_on_train(point: Point) -> bool:
    """Whether an attack that is reported on test rows has a larger advantage on training rows, in what is shown.

    The headline is reported on the rows on which it leaks most, and may be another attack on training rows.
    """
    test, train = point.leak.advantage, point.leak_train.advantage
    return point.attack != "worst" and test is not None and train is not None and train - test >= MIN_SHOWN


def show_most(point: Point) -> Point:
    """Return a point whose leak is that on training rows if the attack gains more there; the other is kept."""
    moved = {"leak": point.leak_train, "leak_test": point.leak} if is_larger_on_train(point) else {}
    return msgspec.structs.replace(point, **moved)


def list_columns(summary: Summary) -> Cells:
    """Return the headline of each column where several of one party are attacked, the largest gain first."""
    headlines = [p for p in summary.columns if p.attack == "worst"]
    shown = [
        *([] if summary.audited else select_columns("method", "defense", "strength")),
        Column("", title="column", cell=lambda p: p.question.removeprefix("attribute "), kind="name"),
        Column("attack", title="attack", cell=lambda p: p.choice.split(":")[0], kind="prose"),
        Column("", title="measure", cell=lambda p: MEASURES.get(p.leak.metric, p.leak.metric), kind="name"),
        *select_columns("leak", "leak_rows", "alone", "chance", "advantage"),
    ]
    rows = sorted(headlines, key=lambda p: (p.strength, -(p.leak.advantage or 0.0)))
    return Cells.fill("Every column that was attacked, the largest advantage first", shown, rows)


def list_subgroups(summary: Summary) -> Cells | None:
    """Return a row for each attack and group of rows, or None if no groups were asked for."""
    if not summary.subgroups:
        return None
    column = summary.subgroups[0].column
    shown = [
        *([] if summary.audited else select_columns("method", "defense", "strength")),
        ATTACK,
        Column("", lambda group: group.rows, "rows", kind="name", detail=LAST_DETAIL),
        Column("", lambda group: group.group, column),
        Column("", lambda group: group.n, "n"),
        Column("", title="leak ↓", cell=lambda group: with_margin(group.leak)),
        Column("", title="p (Holm)", cell=lambda group: write_number(group.p_holm)),
    ]
    return Cells.fill(f"Leak by {column}; p is small if its groups do not all leak the same", shown, summary.subgroups)


def show(summary: Summary, *, details: bool = False) -> Document:
    """Return what a report shows: headlines, CAP, the order of defenses, integrity; with ``details`` every attack."""
    details = details or bool(summary.audited)
    others, further = (
        [_name_fixed(cells, summary) for cells in several if cells and cells.rows]
        for several in (
            (list_caps(summary, details=details), order(summary), list_subgroups(summary), list_integrity(summary)),
            (list_columns(summary), *([list_row_shares(summary)] if details else [])),
        )
    )
    above = [write_heading(summary), *write_epsilon(summary), *(f"NOTE {note}" for note in summary.notes)]
    first = list_points(summary) if details else list_headlines(summary)
    explained = 0 if details else len(first)
    below = [f"WORST {CHOSEN}"] * (details and bool(summary.worst)) + list_remarks(summary)
    return Document(above, [*first, *others], below, further, explained)


def write_epsilon(summary: Summary) -> list[str]:
    """Return the lines on the delta of an epsilon, what it permits, and where its noise comes from, or nothing."""
    losses = [loss for point in summary.points for loss in point.spent]
    if not losses:
        return []
    bounds = {loss["epsilon"]: bound_accuracy(loss["epsilon"], loss["delta"]) for loss in losses if "of" not in loss}
    kept = ", ".join(f"{100 * bounds[e]:.1f} % at ε = {e:.3g}" for e in sorted(bounds) if bounds[e] <= LEVEL)
    empty = ", ".join(f"{e:.3g}" for e in sorted(bounds) if bounds[e] > LEVEL)
    says = "; of two values of a row, equally likely by all else it knows, an adversary names the right one in at most "
    says = f"{says}{kept}" * bool(kept)
    says += f"; an ε of {empty} permits more than {100 * LEVEL:.0f} %, and so practically everything" * bool(empty)
    return [f"EPSILON (ε) is stated at δ = {get_deltas(summary.points)}{says}", *write_simulated(summary)]


def write_simulated(summary: Summary) -> list[str]:
    """Return the line on noise, where there is a defense and no audit."""
    defended = summary.undefended != UNDEFENDED or any(point.strength for point in summary.points)
    return [SIMULATED] * (defended and not summary.audited)


def list_remarks(summary: Summary) -> list[str]:
    """Return the lines below the tables: notes on epsilon, Pareto front, gates, failures, what was not run."""
    return [
        *([OF_MODELS] if any(spent.get("of") == "models" for point in summary.points for spent in point.spent) else []),
        *([AT_LEAST] if has_lower_bound(summary) else []),
        *list_exceeded(summary),
        *list_cap_notes(summary),
        *(get_front(summary) if summary.ranks else []),
        *(f"VERDICT NOTE {alarm}" for alarm in summary.alarms),
        *(f"VERDICT {sentence}" for sentence in summary.verdict),
        *(write_gate(gate) for gate in summary.gates),
        *list_next(summary),
        *suggest_columns(summary),
        *(f"ERROR {line}" for line in summary.failures),
        *list_lost(summary),
        *list_not_run(summary),
    ]


def list_exceeded(summary: Summary) -> list[str]:
    """Return a line for each point whose attack shows more than the promised epsilon."""
    return [
        f"EPSILON EXCEEDED {p.method}, {p.defense} {p.strength:.4g}: {p.empirical.attack} shows at least "
        f"{p.empirical.epsilon:.3g}, and {p.empirical.promised:.3g} is promised"
        for p in summary.worst
        if p.empirical and p.empirical.promised is not None and p.empirical.epsilon > p.empirical.promised
    ]


def get_front(summary: Summary) -> list[str]:
    """Return a line for each target: the places that no other beats in both utility and leak, by falling utility."""
    several = len({place.method for place in summary.front}) > 1
    lines = []
    for target in _list_targets(summary):
        places = []
        for p in sorted((p for p in summary.front if p.target == target), key=lambda p: -p.utility):
            method = f"{p.method}, " if several else ""
            place = f"{p.defense} {p.strength:.4g}" if p.strength else summary.undefended
            places.append(f"{method}{place} ({write_number(p.utility)}, {write_number(p.leak)})")
        of = f" of {target}" if _is_mixed(summary) else ""
        lines.append(f"PARETO FRONT{of} (utility, strongest leak): {'; '.join(dict.fromkeys(places))}")
    return lines


def write_gate(gate: Gate) -> str:
    """Return the sentence on one gate."""
    why = gate.why or "a cell gave no number"
    if gate.gate == "max-undetected" and not gate.why:
        why += ", or it is not known what would have been seen"
    holds = f"holds, but {gate.why}" if gate.why else "holds"
    verdict = {True: holds, False: "FAILED", None: f"UNDECIDED: {why}"}[gate.holds]
    ends = {"min-utility": "lower end of the interval", "max-undetected": "an advantage is seen from"}
    ends["max-rise"] = "lower end of the interval of the rise"
    what = ends.get(gate.gate, "upper end of the interval")
    where = f", {what} {gate.worst:.3f} at {gate.at}" if gate.worst is not None else ""
    earlier = " (an earlier limit, since replaced)" if gate.replaced else ""
    return f"GATE {gate.gate} {gate.limit:g}{earlier}: {verdict}{where}"


def list_next(summary: Summary) -> list[str]:
    """Return a line for each party of which several columns are attacked: those that leak most without a defense."""
    undefended = [p for p in summary.columns if p.attack == "worst" and not p.strength and p.leak.mean is not None]
    lines = []
    for top in (p for p in summary.worst if p.among and not p.strength):
        rivals = [p for p in undefended if (*p.place, p.victim) == (*top.place, top.victim)]
        rivals.sort(key=lambda p: -(p.leak.advantage or 0.0))
        names = [f"{p.column} {write_number(p.leak.mean)} ({write_number(p.leak.alone)})" for p in rivals[:FEW_COLUMNS]]
        more = f"; all {top.among} are in --format markdown, csv and json" if top.among > len(names) else ""
        lines.append(f"COLUMNS of {top.victim}, leak and alone: {', '.join(names)}{more}")
    return list(dict.fromkeys(lines))


def suggest_columns(summary: Summary) -> list[str]:
    """Return the line that names the attack of this adversary which attacks every column, where it attacked few."""
    attacks = [p.attack.partition(":")[0] for p in summary.points if p.column and not p.among]
    attacks = [name for name in attacks if name.startswith("attribute")] or attacks
    return [SINGLE_COLUMN.format(min(attacks, key=len))] if attacks else []


def list_lost(summary: Summary) -> list[str]:
    """Return the line on baselines that gave no number, if any."""
    if not summary.lost:
        return []
    return [f"LOST without the federation: {', '.join(summary.lost)}; alone may be too low: add --retry-errors"]


def list_not_run(summary: Summary) -> list[str]:
    """Return the line that counts the attacks which this adversary could mount and which were not run, if any."""
    if not summary.not_run:
        return []
    attacks = count(len(summary.not_run), "attack")
    names = ", ".join(summary.not_run)
    way = suggest_run(summary)
    way += "" if summary.audited else " or name them"
    if len({point.method for point in summary.points}) > 1:  # leaves out attacks that do not fit all of them
        way += ", with one --method for an attack that only fits that method"
    return [f"NOT RUN {attacks} that {summary.adversary} could mount: {names}; {way}"]


def write_heading(summary: Summary) -> str:
    """Return the line above the tables: dataset, adversary, metric, seeds."""
    if summary.audited:
        over = "rows" if summary.seeds == 1 else "draws and rows"
        draws = f"{count(summary.seeds, 'draw')}, ± 95 % over {over}"
        return f"{summary.audited} · {summary.dataset} · adversary {summary.adversary} · {draws}"
    seeds = f"{summary.seeds} seeds, ± 95 % over seeds and rows" if summary.seeds > 1 else "1 seed, ± 95 % over rows"
    metric = MEASURES.get(summary.metric, summary.metric)
    every = f" · every training with {summary.undefended}" if summary.undefended != UNDEFENDED else ""
    return f"{summary.dataset} · adversary {summary.adversary} · utility: {metric} on test rows · {seeds}{every}"


def _get_defense(name: str, summary: Summary) -> str:
    """Return the swept defense, else what every training has."""
    return summary.undefended if summary.undefended != UNDEFENDED and name == "none" else name


def _name_fixed(cells: Cells, summary: Summary) -> Cells:
    """Return ``cells``, whose column of defenses names what every training has."""
    names = [column.name for column in cells.columns]
    rows = [
        [_get_defense(text, summary) if name == "defense" else text for name, text in zip(names, row, strict=True)]
        for row in cells.rows
    ]
    return cells._replace(rows=rows)


def _sort_points(summary: Summary) -> list[Point]:
    """Points in order of curves, strengths and targets; of those the headline, the pick, and then the strongest.

    Those without a defense stand once.
    """
    order = {p.place: i for i, p in reversed(list(enumerate(summary.points)))}
    headlines = {(p.place, p.target): p.choice for p in summary.worst}
    picked = [p for p in summary.picked if headlines[p.place, p.target] != p.choice]

    def place(p: Point) -> tuple[int, int, int, float]:
        kind = {"worst": 0, "picked": 1}.get(p.attack, 2)
        return order[p.place], _list_targets(summary).index(p.target), kind, -(show_most(p).leak.mean or 0.0)

    rows: dict[tuple[Any, ...], Point] = {}
    for p in sorted([*summary.points, *summary.worst, *picked], key=place):
        rows.setdefault((p.method, p.defense * bool(p.strength), p.strength, p.question, p.attack), p)
    return list(rows.values())


def _list_targets(summary: Summary) -> list[str]:
    """Return what is recovered, in the order of the attacks."""
    return list(dict.fromkeys(p.target for p in summary.points))


def _name_question(point: Point) -> str:
    """Return what is recovered, in words."""
    return f"strongest {point.target} of {point.among} columns of {point.victim}" if point.among else point.question


def _name_table(point: Point, summary: Summary) -> str:
    asked = _name_question(point)
    if summary.audited:
        return asked
    of = f", {asked}" if _is_mixed(summary) else ""
    return f"{point.method}, {_get_defense(point.defense, summary)}{of}"


def _write_title(label: str, points: Sequence[Point], summary: Summary) -> str:
    """Return the title of a table, with the measure of its leaks where not all leaks are of labels."""
    return f"{label}{_write_measure(points)}" if _is_mixed(summary) or summary.audited else label


def _write_measure(points: Sequence[Point]) -> str:
    leak = next((p.leak for p in points if p.leak.metric), None)
    if leak is None:
        return ""
    several = len({p.leak.metric for p in points if p.leak.metric}) > 1
    measure = "measure of the column" if several else MEASURES.get(leak.metric, leak.metric)
    chance = f", {write_number(leak.chance)} by chance" if leak.chance is not None and not several else ""
    return f" (leak: {measure}{chance})"


def _is_mixed(summary: Summary) -> bool:
    """Whether something other than labels is recovered, so that leaks are of several kinds."""
    return any(p.target != "labels" for p in summary.points)
