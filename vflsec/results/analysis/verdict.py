"""The verdict of a report: a few sentences that a privacy officer understands, each from points of the summary."""

import re
from collections.abc import Mapping, Sequence

from vflsec.base.checks import count, group
from vflsec.results.analysis.groups import USABLE
from vflsec.results.analysis.results import MIN_GAIN, Leak, Point, Summary, name_defense
from vflsec.results.records.manifest import UNDEFENDED

MEASURES = {"auc": "AUC", "f1": "F1", "r2": "R²", "tokens": "share of words"}
"""What readers call a metric, where that is not its name."""

ROWS = {"train": "training rows", "test": "rows that the model was not trained on", "candidates": "candidate rows"}
TARGETS = {
    "labels": "the labels",
    "attribute": "an attribute of another party",
    "features": "the columns of another party",
    "text": "the words of another party's text",
    "membership": "which rows the model was trained on",
    "parameters": "the parameters of another party",
    "exposure": "what lies open without a guess",
}
KNOWING = {
    "labels": "{} known labels",
    "attribute": "the column known for {} rows",
    "features": "the columns known for {} rows",
    "text": "the text known for {} rows",
    "membership": "{} rows of known membership",
}
"""What the adversary knows of the rows that it does not infer."""

MIN_DRAWS = 5
"""Fewer draws of the auxiliary labels than this may tell nothing apart."""

LARGE_COST = 0.02
"""A defense that costs more utility than this is named only if every one does."""

ALMOST_ALL = 0.995
KNOWN, RIGHT = "known_of_class@0.99", "right_of_class@0.99"

SPLIT = ("fedsplitnn", "fedlocal", "fedcssl", "fedgssl", "fedhssl", "vflhlp", "vertical-lr")
"""How the names of methods begin that ``sealed`` can train."""


def state_verdict(summary: Summary, run: Sequence[str], known: int, guarantees: Mapping[str, str]) -> list[str]:
    """Return sentences: what the adversary infers without a defense, labels first, then what a defense leaves.

    A defense is recommended only if all attacks that could be mounted were run and gave a number, if there is no alarm,
    and if the joint model that it leaves is of use. Without a defense, the last sentence says what was not tested.
    Under an alarm, the first sentence says so, and each target has a sentence whatever was inferred. ``guarantees`` are
    those that defenses state, by name.
    """
    targets = [point.target for point in summary.worst]
    first = "labels" if "labels" in targets else targets[0] if targets else ""
    headlines = [point for point in summary.worst if point.target == first and point.leak.mean is not None]
    clean = [point for point in headlines if point.strength == 0]
    unusable = ["Not usable for a decision: resolve the notes above first."] * bool(summary.alarms)
    if not clean:
        return unusable
    start = max(clean, key=lambda point: point.leak.mean or 0.0)
    others = [point for point in summary.worst if point.target != first and point.strength == 0]
    leaking = [point for point in others if (point.leak.mean or 0.0) > (point.leak.chance or 0.0)]
    gained = [point for point in leaking if _is_more_than_alone(point.leak, corrected=True)]
    fixed = summary.undefended != UNDEFENDED
    without = f"without a{' further' * fixed} defense"
    sentences = unusable + [f"Every training has the defense {summary.undefended}."] * fixed
    given = summary.adversary, known, without * any(point.strength for point in headlines)
    sentences += [_describe_start(start, *given) + _add_highest(start), _describe_test(start, given[2])]
    sentences += [_describe_start(p, *given) + _add_highest(p) for p in (others if unusable else gained)]
    sentences += [] if unusable else [_describe_joining(start, summary)]
    if summary.alarms:
        last = "No defense is recommended." * any(point.strength for point in summary.worst)
    else:
        defended = [point for point in headlines if point.strength > 0 and point.utility.mean is not None]
        useful = [point for point in defended if not point.useless]
        sentences += [
            f"{_name_all(points, defended)}, the joint model is {why}: such a defense is not recommended."
            for why, points in group((p for p in defended if p.useless), lambda point: point.useless).items()
        ]
        none = _explain_none(summary, run, defended, useful)
        best = None if none else _choose_best(start, useful)
        if best:
            several = len({point.method for point in headlines}) > 1, len({point.place for point in useful}) > 1
            left = _describe_best(start, best, useful, summary.points, *several) + _name_widest(best, summary.points)
            sentences += [left, _state_guarantee(best, guarantees)]
            sentences += [_describe_columns(best, summary.worst)]
        sentences += [_describe_joining(best, summary)] if best else []
        cheap = " that costs at most two points of utility on average" * bool(useful and _list_cheap(start, useful))
        lowers_none = f"No tested defense{cheap} is shown to lower this." * bool(useful and not best)
        last = none or " ".join(filter(None, [lowers_none, _suggest_sealed(summary.worst, useful)]))
        last = last or _describe_untested(summary) * (not best)
    return [*dict.fromkeys(filter(None, [*sentences, last]))]  # each defense has a row without it


def suggest_run(summary: Summary) -> str:
    """Return how to run all attacks, also those that ``all`` leaves out."""
    if summary.audited:
        return "leave --attack out"
    return f"add --attack {','.join(['all', *(name for name in summary.not_run if name in summary.left_out)])}"


def _describe_start(point: Point, adversary: str, known: int, without: str) -> str:
    """Return what the adversary infers ``without`` a defense, where others have one, and whether joining helps it."""
    leak, what = point.leak, _name_target(point)
    rows = _name_rows(leak.rows)
    if leak.mean is None:
        return f"No attack on {what} gave a number."
    by_chance = f"{_say(leak.chance)} by chance"
    low = leak.ci95[0]
    if leak.chance is not None and (leak.alone is None if low is None else low <= leak.chance):
        alone = "" if leak.alone is None else f" and {_say(leak.alone)} without joining"
        return f"These runs do not show that {adversary} infers {what}: {_state(leak)} on {rows}, {by_chance}{alone}."
    if leak.alone is None:
        return f"{adversary} infers {what} of {rows} with {_state(leak)} ({by_chance})."
    given = KNOWING.get(point.target.partition(" ")[0], KNOWING["labels"])
    conditions = " and ".join(filter(None, [without, f"with {given.format(known)}" * bool(known)]))
    subject = f"{conditions.capitalize()}, {adversary}" if conditions else adversary
    measure = f"{_state(leak)}, {by_chance}" if point.victim else _state(leak)
    if _is_more_than_alone(leak, corrected=True):
        whole = f"{subject} infers {what} of {_name_share(leak).format(rows)}"
        return f"{whole} ({measure}; {_say(leak.alone)} without joining).{_count_known(leak).replace('it', ' It', 1)}"
    if (leak.advantage or 0.0) > 0:
        return f"{subject} infers {what} of {rows} with {measure}{_end_open_gain(leak)}"
    return f"{subject} infers {what} no better than without joining, as far as {_end_no_gain(point, measure, rows)}"


def _name_share(leak: Leak) -> str:
    """Return of how many rows: an AUC says in which order they are, and not which of them are known."""
    right = leak.others.get("known@0.99", 0.0) * leak.others.get("right@0.99", 0.0)
    if (right if leak.metric == "auc" else leak.mean or 0.0) >= ALMOST_ALL and leak.metric != "r2":
        return "practically all {}"
    is_ordered = leak.metric == "auc" and (leak.mean or 0.0) >= ALMOST_ALL
    return "{}: it ranks almost every pair of them right" if is_ordered else "{}"


def _end_open_gain(leak: Leak) -> str:
    """Return the end of the sentence on a gain that these runs do not show."""
    is_few = leak.interval == "draws and rows" and leak.n < MIN_DRAWS
    runs = f"these {leak.n} draws" if is_few else "these runs"
    more = f": add --draws {MIN_DRAWS}" if is_few else ""
    shown = f"{runs} do not show whether this is more than without joining ({_say(leak.alone)}){more}"
    known = _count_known(leak)
    return f". By {_name_metric(leak)}, {shown}, but {known}" if known else f"; {shown}."


def _end_no_gain(point: Point, measure: str, rows: str) -> str:
    """Return the end of the sentence on a leak that is no larger than *alone*."""
    leak = point.leak
    known = _count_known(leak)
    shows = f"{_name_metric(leak)} shows" if known else "these attacks show"
    comma = "," if "," in measure else ""
    gain = _state_detectable(leak)
    ends = f"; but {known}" if known else "."
    return f"{shows}: {measure}{comma} on {rows}, {_say(leak.alone)} without joining{gain}{ends}"


def _state_detectable(leak: Leak) -> str:
    if leak.is_blind:
        return f"; with {name_few(leak)} no gain could have been seen"
    return f"; a gain of {_say(leak.detectable)} would have been seen" * ((leak.detectable or 0.0) >= MIN_GAIN)


def name_few(leak: Leak) -> str:
    """Return what is too few for any gain to be seen."""
    unit = "draw" if leak.interval == "draws and rows" else "seed"
    return f"only {count(leak.n, unit)}" if leak.few == "seeds" else "so few rows"


def _name_target(point: Point) -> str:
    """Return what is inferred: of a column its name, that of its party, and from where on a number counts as high."""
    kind, of = point.target.partition(" ")[0], f"of {point.victim}"
    if not point.victim:
        which = point.target.replace(" of ", " ").partition(" ")[2]
        return f"{TARGETS.get(kind, kind)}{f' ({which})' * bool(which)}"
    strongest = f", the strongest of {point.among} columns," * bool(point.among)
    if point.above is not None:
        return f"whether {point.column} {of}{strongest} is above its median {point.above:.6g}"
    words = {"attribute": f"{point.column} {of}{strongest}", "features": f"the columns {of}", "text": f"the words {of}"}
    return words.get(kind, f"the parameters {of}")


def _count_known(leak: Leak) -> str:
    """Return how many rows of a class are known with more than 99 %, if more than without joining."""
    share, alone = leak.others.get(KNOWN, 0.0), leak.alone_others.get(KNOWN, 0.0)
    right = f", and is right on {100 * leak.others[RIGHT]:.0f} % of these" if RIGHT in leak.others else ""
    known = f"it knows {100 * share:.0f} % of the rows of a class with a certainty of more than 99 %"
    return f"{known} ({100 * alone:.0f} % without joining){right}." * (share - alone >= MIN_GAIN)


def _find_known(point: Point, attacks: Sequence[Point], rows: str) -> float | None:
    """Return the largest share of a class that an attack knows with more than 99 %, not only the headline."""
    leaks = [leak for leak in _list_leaks(point, attacks) if leak.rows == rows]
    return max((leak.others[KNOWN] for leak in leaks if KNOWN in leak.others), default=None)


def _count_known_left(before: Leak, after: float | None, others: Sequence[float | None]) -> str:
    """Return how many rows of a class are still known with more than 99 % under a defense, and under cheap others."""
    left = "an unknown share" if after is None else f"{100 * after:.0f} %"
    known = f" With a certainty of more than 99 %, {left} of the rows of a class are known by any measured attack"
    shares = [f"{100 * share:.0f} %" for share in sorted(share for share in others if share is not None)]
    span = " to ".join(dict.fromkeys(shares[:1] + shares[-1:]))
    cheap = f", and {span} under the others that cost at most two points" * bool(span)
    return f"{known} ({100 * before.others[KNOWN]:.0f} % without it{cheap})." if _count_known(before) else ""


def _describe_test(start: Point, without: str) -> str:
    """Return what is inferred on test rows, where the headline is on training rows."""
    leak = start.leak_test
    if leak is None or leak.mean is None or leak.alone is None or start.leak.rows != "train":
        return ""
    shown = "" if _is_more_than_alone(leak) else ", not shown to be more"
    rows, measured = ROWS["test"], " ".join(filter(None, [_name_metric(leak), _say(leak.mean), without]))
    return f"On {rows}, the strongest attack reaches {measured} ({_say(leak.alone)} without joining{shown})."


def _add_highest(point: Point) -> str:
    """Return a sentence on the single attack that leaks more than the headline, if one does."""
    highest = f"{point.highest_attack}, reaches {_say(point.highest)} on {_name_rows(point.highest_rows)}"
    why = "it was chosen and scored on the same rows, so this may be too high"
    return f" A single attack, {highest}; {why}." * point.is_exceeded


def _name_rows(rows: str) -> str:
    return " and ".join(ROWS.get(name, name) for name in rows.split("+"))


def _name_metric(leak: Leak) -> str:
    return MEASURES.get(leak.metric, leak.metric)


def _state(leak: Leak) -> str:
    """Return the measure with the upper end of its interval, since the strongest of many attacks may be stronger."""
    upper = leak.upper
    up_to = f", interval up to {_say(upper)}" if upper >= (leak.mean or 0.0) + MIN_GAIN else ""
    return f"{_name_metric(leak)} {_say(leak.mean)}{up_to}"


def list_first(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _explain_none(summary: Summary, run: Sequence[str], defended: Sequence[Point], useful: Sequence[Point]) -> str:
    """Return why no defense is recommended; empty if one may be."""
    if summary.not_run and defended:
        return _describe_part(summary, run, defended)
    if any(set(point.statuses) - {*USABLE, "unseen"} for point in defended):
        return (
            "None of the defenses is recommended: some results are missing or failed, and the leak may be larger there."
        )
    return "None of the defenses is recommended." if defended and not useful else ""


def _describe_part(summary: Summary, run: Sequence[str], defended: Sequence[Point]) -> str:
    """Return how strong the attacks were that ran, where others could be mounted: no defense is recommended.

    A strength gives away more than *alone* if the interval of an attack on some rows shows it.
    """
    ran, every = len(run), count(len(run) + len(summary.not_run), "attack")
    others = f"may infer far more: {suggest_run(summary)} to run them."
    if not ran:  # nothing but baselines, which read no message
        return f"None of the defenses is recommended: none of the {every} that it could mount was run; they {others}"
    leaks = {point.place: _list_leaks(point, summary.points) for point in defended}
    attacked = [p for p in defended if any(leak.alone is None or _is_more_than_alone(leak) for leak in leaks[p.place])]
    who = run[0] if ran == 1 else "the strongest of them"
    most = {place: max(at_place, key=_find_gain) for place, at_place in leaks.items()}
    reached = []
    if attacked:
        reached.append(f"{_name_all(attacked, defended)}, {who} reaches {_span([most[p.place] for p in attacked])}")
    if alone := [point for point in defended if point not in attacked]:
        those = "the attacks that ran reach" if ran != 1 else f"{run[0]} reaches"
        leak = max((most[point.place] for point in alone), key=_find_gain)
        measured = f"{_span([leak])}, {_say(leak.alone)} without joining{_state_detectable(leak)}"
        reached.append(
            f"{_name_all(alone, defended)}, {count(leak.n, 'seed')} do{'es' * (leak.n == 1)} not show that {those} "
            f"more than {summary.adversary} does without joining ({measured})"
        )
    return (
        f"None of the defenses is recommended: only {ran} of the {every} that it could mount, on this and other "
        f"targets, {'was' if ran == 1 else 'were'} run ({list_first(run)}). {'. '.join(reached)}; the others {others}"
    )


def _list_leaks(point: Point, attacks: Sequence[Point]) -> list[Leak]:
    """Return the leaks at the place of a headline, that and those of all attacks on the same, on all rows."""
    same = [p for p in attacks if (p.place, p.target) == (point.place, point.target)]
    return [leak for p in (point, *same) for leak in (p.leak, p.leak_train) if leak.mean is not None]


def _find_cost(start: Point, point: Point) -> float:
    is_paired = point.cost is not None and point.method == start.method
    return (point.cost or 0.0) if is_paired else (start.utility.mean or 0.0) - (point.utility.mean or 0.0)


def _list_names(points: Sequence[Point], defended: Sequence[Point]) -> list[str]:
    several = len({point.method for point in defended}) > 1
    return [f"{p.method} with " * several + f"{p.defense} {p.strength:g}" for p in points]


def _name_all(points: Sequence[Point], defended: Sequence[Point]) -> str:
    """Return under which of the defenses, all of them if so."""
    if len(points) == len(defended):
        return "Under the tested defenses"
    names = list_first(_list_names(points, defended))
    return f"Under {names if ' and ' in names else ' and '.join(names.rsplit(', ', 1))}"


def _span(leaks: Sequence[Leak]) -> str:
    means = [_say(mean) for mean in sorted(leak.mean or 0.0 for leak in leaks)]
    return f"{_name_metric(leaks[0])} {' to '.join(dict.fromkeys([means[0], means[-1]]))}"


def _list_cheap(start: Point, defended: Sequence[Point]) -> list[Point]:
    return [point for point in defended if _find_cost(start, point) <= LARGE_COST]


def _choose_best(start: Point, defended: Sequence[Point]) -> Point | None:
    """Return the best defense by the upper end of its interval, if it is shown to lower the leak."""
    cheap = _list_cheap(start, defended)
    ranked = sorted(cheap or defended, key=lambda point: (_measure_excess(point)[1], _find_cost(start, point)))
    return next((best for best in ranked[:1] if _is_lower(start, best)), None)


def _describe_best(
    start: Point, best: Point, useful: Sequence[Point], attacks: Sequence[Point], several_methods: bool, several: bool
) -> str:
    """Return what the best defense leaves, and what it costs.

    It is compared with no defense on the same rows: those on which joining gives most away.
    """
    is_cheap = bool(_list_cheap(start, [best]))
    cost, ends = 100 * _find_cost(start, best), best.cost_ci95 if best.method == start.method else (None, None)
    price = f"at a cost of {cost:.1f} points of utility" if cost >= 0.05 else "at no cost in utility"
    price += "" if ends[0] is None or ends[1] is None else f" (interval {100 * ends[0]:.1f} to {100 * ends[1]:.1f})"
    price += "" if is_cheap else "; each one costs more than two"
    before, after = _group_by_rows(start), _group_by_rows(best)
    rows = max(before.keys() & after.keys(), key=lambda name: _find_gain(before[name]))
    leak = after[rows]
    which = "the best defense" if several else "the only tested defense"
    alone = "" if leak.alone is None else f"; {_say(before[rows].mean)} without it, {_say(leak.alone)} without joining"
    which += " that costs at most two points of utility on average" * is_cheap
    left = (
        f"By the upper end of the interval, {which} is {f'{best.method} with ' * several_methods}{best.defense} at "
        f"strength {best.strength:g}: on {ROWS.get(rows, rows)} it leaves {_name_metric(leak)} {_say(leak.mean)} "
        f"(interval up to {_say(leak.upper)}{alone}), {price}.{_state_missed(leak)}"
    )
    of_table = f" Its row in the table, {_say(best.leak.mean, 3)}, is on {_name_rows(best.leak.rows)}."
    others = [_find_known(p, attacks, rows) for p in _list_cheap(start, useful) if p is not best]
    further = [_count_known_left(before[rows], _find_known(best, attacks, rows), others), _add_highest(best)]
    weak = f" Attacks that had not converged under it, and may be too weak: {list_first(best.unconverged)}."
    further += [weak * bool(best.unconverged)]
    return f"{left}{of_table * (best.leak.rows != rows)}{''.join(further)}"


def _state_missed(leak: Leak) -> str:
    """Return that an advantage is not shown, and which size these runs would have seen."""
    if leak.advantage is None or _is_more_than_alone(leak):
        return ""
    seen = _state_detectable(leak)
    often = " in about four of five cases" * seen.endswith("seen")
    return f" That this is more than without joining is not shown{seen}{often}: this is no proof that it is not."


def _name_widest(best: Point, points: Sequence[Point]) -> str:
    """Return which single attacks may leak more, where their intervals end above that of the headline."""
    same = [point for point in points if (point.place, point.target) == (best.place, best.target)]
    ends = [(leak.upper, p.attack) for p in same for leak in (p.leak, p.leak_train) if leak.metric == best.leak.metric]
    wider = {name: end for end, name in sorted(ends) if end >= best.leak.upper + MIN_GAIN}
    named = [f"{name} {_say(end)}" for name, end in sorted(wider.items(), key=lambda item: -item[1])]
    return f" By the ends of their wider intervals, single attacks may reach more: {list_first(named)}." * bool(named)


def _state_guarantee(best: Point, guarantees: Mapping[str, str]) -> str:
    """Return what the recommended defense guarantees, as its class states it."""
    stated = (text for name, text in guarantees.items() if re.match(rf"{re.escape(name)}(?=[:@]|$)", best.defense))
    text = next(stated, "").rstrip(".")
    if text.startswith("none"):
        why = text.removeprefix("none").lstrip(",; ")
        return f"{best.defense} has no guarantee{f' ({why})' * bool(why)}: a stronger attack may infer more."
    return f"The guarantee of {best.defense}: {text}." * bool(text)


def _describe_columns(best: Point, worst: Sequence[Point]) -> str:
    """Return a sentence for each kind of columns of which no setting tells more than the recommended defense."""
    sentences = []
    for target in dict.fromkeys(p.target for p in worst if p.target.partition(" ")[0] in ("attribute", "features")):
        points = [p for p in worst if p.target == target and p.method == best.method and p.leak.mean is not None]
        under = max(points, key=lambda point: point.leak.mean or 0.0, default=best)
        clean = next((p.leak.mean for p in points if not p.strength), None)
        if under.place != best.place or clean is None or (under.leak.mean or 0.0) - clean < MIN_GAIN:
            continue
        shown = "" if _is_more_than_alone(under.leak, corrected=True) else "; more than alone is not shown"
        sentences.append(
            f"Of all tested settings, {best.defense} {best.strength:g} has the highest recovery of "
            f"{_name_target(under)}: {_name_metric(under.leak)} {_say(under.leak.mean)} ({_say(clean)} without a "
            f"defense, {_say(under.leak.alone)} without joining{shown})."
        )
    return " ".join(sentences)


def _describe_joining(point: Point, summary: Summary) -> str:
    """Return whether the interval of what joining gains in utility shows that it pays."""
    low, high = point.gain_ci95
    if point.gain is None or point.utility.mean is None:
        return ""
    metric = MEASURES.get(point.utility.metric, point.utility.metric)
    pays = "pays" if (low or 0.0) > 0 else "is not shown to pay"
    interval = "" if low is None else f", interval {_say(low, 3)} to {_say(high, 3)}"
    return (
        f"With {name_defense(point, summary.undefended)}, joining {pays}: the joint model has a utility of {metric} "
        f"{_say(point.utility.mean, 3)}, a quick model of the active party's own columns "
        f"{_say(point.utility.mean - point.gain, 3)} (difference {_say(point.gain, 3)}{interval})."
    )


def _suggest_sealed(worst: Sequence[Point], defended: Sequence[Point]) -> str:
    """Return the next step where all defenses leave labels readable, but for one that was not tried."""
    leaks = [_group_by_rows(p).values() for p in defended if p.target == "labels" and p.method.startswith(SPLIT)]
    is_open = len(leaks) == len(defended) and all(any(map(_is_more_than_alone, of_point)) for of_point in leaks)
    if not leaks or not is_open or any("sealed" in p.defense for p in worst):
        return ""
    return (
        "Labels stay readable, and sealed training, which sends no gradient of a single row, was not tested: add "
        "--defense sealed --epsilon 1,4."
    )


def _group_by_rows(point: Point) -> dict[str, Leak]:
    leaks = [leak for leak in (point.leak_train, point.leak_test) if leak and leak.mean is not None]
    return {leak.rows: leak for leak in leaks or [point.leak]}


def _find_gain(leak: Leak) -> float:
    return (leak.mean or 0.0) - (leak.alone or 0.0)


def _measure_excess(point: Point) -> tuple[float, float]:
    """Return the largest mean and upper end beyond *alone* on the same rows, of all kinds of rows."""
    leaks = _group_by_rows(point).values()
    return max(map(_find_gain, leaks)), max(leak.upper - (leak.alone or 0.0) for leak in leaks)


def _is_lower(start: Point, left: Point) -> bool:
    """Whether mean and upper end are lower on the same rows, or all that joining gives away is gone.

    The latter is what counts where *alone* is high and varies more than the little that is left to be gained.
    """
    mean, upper = (a - b for a, b in zip(_measure_excess(start), _measure_excess(left), strict=True))
    gave, gives = (any(map(_is_more_than_alone, _group_by_rows(point).values())) for point in (start, left))
    has_alone = all(leak.alone is not None for leak in _group_by_rows(left).values())
    return mean >= MIN_GAIN and (upper >= MIN_GAIN or (has_alone and gave and not gives))


def _describe_untested(summary: Summary) -> str:
    not_run, left_out = count(len(summary.not_run), "attack"), count(len(summary.left_out), "attack")
    mountable = f"{not_run} that it could mount on this and other targets ({suggest_run(summary)} to run them)"
    parts = [mountable] * bool(summary.not_run)
    parts += [f"{left_out} that could not be run on this material"] * bool(summary.left_out)
    if not parts:
        return f"No {'further ' * (summary.undefended != UNDEFENDED)}defense was tested."
    return f"Not tested: {', and '.join(parts)}. The leak may be larger."


def _is_more_than_alone(leak: Leak, *, corrected: bool = False) -> bool:
    """Whether the interval shows an advantage; what speaks for a defense is not made easier by a correction."""
    low = leak.advantage_ci95[0]
    return (leak.advantage or 0.0) > 0 and (low is None or (leak.is_shown if corrected else low > 0))


def _say(value: float | None, digits: int = 2) -> str:
    if value is None:
        return "unknown"
    text = f"{round(value, digits) + 0.0:.{digits}f}"  # no -0.00
    return text.replace("0.", ".", 1) if abs(value) < 1 else text
