"""The verdict of a report: a few sentences that a privacy officer understands, each from points of the summary."""

from __future__ import annotations

from collections.abc import Sequence

from vflsec.analysis.results import Leak, Point
from vflsec.core.checks import count

NAMES = {"auc": "AUC", "accuracy": "accuracy", "r2": "R²"}
ROWS = {"train": "training rows", "test": "rows that the model was not trained on", "candidates": "candidate rows"}
TARGETS = {
    "labels": "the labels",
    "attribute": "an attribute of another party",
    "features": "the columns of another party",
    "membership": "which rows the model was trained on",
    "parameters": "the averaged parameters of another party",
}

FEW = 5
"""Fewer draws of the auxiliary labels than this may tell nothing apart."""

LARGE_COST = 0.02
"""A defense that costs more utility than this is named only if every one does."""


LEAST_GAIN = 0.005
"""A leak of which mean or upper end fall by less, which two digits do not show, is not called lower."""


def verdict(worst: Sequence[Point], adversary: str, known: int, not_run: Sequence[str], left_out: int) -> list[str]:
    """Return sentences: what the adversary infers without a defense, labels first, then what a defense leaves.

    Without a defense, the last one says what was not tested.

    Args:
        worst: the headlines.
        adversary: its name.
        known: the number of labels that it knows.
        not_run: the attacks that it could mount and that were not run.
        left_out: the number of attacks that could not be mounted.
    """
    targets = dict.fromkeys(point.target for point in worst)
    first = "labels" if "labels" in targets else next(iter(targets))
    about = [point for point in worst if point.target == first]
    found = [point for point in about if point.leak.mean is not None]
    clean = [point for point in found if point.strength == 0]
    if not clean:
        return []
    start = max(clean, key=lambda point: point.leak.mean or 0.0)
    left = _left(start, found)
    if left and not_run:  # a number of few attacks must not pass for one of all
        others = f"{count(len(not_run), 'attack')} that it could mount, on this and other targets"
        left = f"{left[:-1]}; {others}, were not run, and may leak more."
    also = [_also(point, adversary) for point in worst if point.target != first and point.strength == 0]
    return [_inferred(start, adversary, known), *filter(None, also), left or _untested(not_run, left_out)]


def _inferred(point: Point, adversary: str, known: int) -> str:
    leak, target = point.leak, TARGETS.get(point.target.partition(" ")[0], point.target)
    rows = " and ".join(ROWS.get(one, one) for one in leak.rows.split("+"))
    knowing = f"With {known} known labels, " if known else ""
    measure = _measured(leak)
    if leak.alone is None:
        low = leak.ci95[0]
        if leak.chance is not None and (low is None or low <= leak.chance):
            return (
                f"These runs do not show that {adversary} infers {target}: {measure} on {rows}, "
                f"{_two(leak.chance)} by chance."
            )
        return f"{adversary} infers {target} of {rows} with {measure} ({_two(leak.chance)} by chance)."
    if (leak.advantage or 0.0) > 0 and not _more_than_alone(leak):
        few = f" {leak.n} draws" if leak.interval == "draws and rows" and leak.n < FEW else ""
        return (
            f"{knowing}{adversary} infers {target} of {rows} with {measure}; these{few or ' runs'} do not show whether "
            f"this is more than without joining ({_two(leak.alone)}){f': add --draws {FEW}' * bool(few)}."
        )
    if not _more_than_alone(leak):
        return (
            f"{knowing}{adversary} infers {target} no better than without joining, as far as these attacks show: "
            f"{measure}{',' * (',' in measure)} of {rows}, {_two(leak.alone)} without{_below_chance(leak)}"
            f"{_overlooked(leak)}."
        )
    all_of = "practically all " if leak.metric != "r2" and (leak.mean or 0.0) >= 0.995 else ""
    return f"{knowing}{adversary} infers {target} of {all_of}{rows} ({measure}; {_two(leak.alone)} without joining)."


def _also(point: Point, adversary: str) -> str:
    """Return the sentence on a further target, of which more is inferred than without joining, or nothing."""
    leak = point.leak
    if leak.mean is None or leak.alone is None or not _more_than_alone(leak):
        return ""
    kind, _, which = point.target.replace(" of ", " ").partition(" ")
    target = f"{TARGETS.get(kind, kind)}{f' ({which})' * bool(which)}"
    return f"{adversary} also infers {target} ({_measured(leak)}; {_two(leak.alone)} without joining)."


def _measured(leak: Leak) -> str:
    """Return the measure with the upper end of its interval, since the strongest of many attacks may be stronger."""
    upper = _upper(leak)
    up_to = f", interval up to {_two(upper)}" if upper >= (leak.mean or 0.0) + 0.005 else ""
    return f"{NAMES.get(leak.metric, leak.metric)} {_two(leak.mean)}{up_to}"


def _below_chance(leak: Leak) -> str:
    below = leak.mean is not None and leak.chance is not None and leak.mean < leak.chance
    return f", {_two(leak.chance)} by chance" if below else ""


def _overlooked(leak: Leak) -> str:
    """Return what an attack must have gained for these runs to show it."""
    return f"; a gain of {_two(leak.detectable)} would have been seen" if (leak.detectable or 0.0) >= 0.005 else ""


def _left(start: Point, found: Sequence[Point]) -> str:
    """Return what the best defense leaves, by the upper end of its interval, and what it costs; empty without one."""
    costs = {
        id(point): (start.utility.mean or 0.0) - point.utility.mean
        for point in found
        if point.strength > 0 and point.utility.mean is not None
    }
    defended = [point for point in found if id(point) in costs]
    cheap = [point for point in defended if costs[id(point)] <= LARGE_COST]
    if not defended:
        return ""
    best = min(cheap or defended, key=lambda point: (_upper(point.leak), costs[id(point)]))
    cost = 100 * costs[id(best)]
    price = f"at a cost of {cost:.1f} points of utility" if cost >= 0.05 else "at no cost in utility"
    method = f"{best.method} with " if len({point.method for point in found}) > 1 else ""
    within = " that costs at most two points of utility" if cheap else ""
    lower = (before - after for before, after in zip(_ends(start.leak), _ends(best.leak), strict=True))
    if not all(one >= LEAST_GAIN for one in lower):
        return f"No tested defense{within} is shown to lower this."
    price += "" if cheap else "; each one costs more than two"
    return (
        f"By the upper end of the interval, the best defense{within} is {method}{best.defense} at strength "
        f"{best.strength:g}: it leaves {_two(best.leak.mean)} (interval up to {_two(_upper(best.leak))}), {price}."
    )


def _untested(not_run: Sequence[str], left_out: int) -> str:
    """Return what was not tested."""
    parts = [f"{count(len(not_run), 'attack')} that it could mount on this and other targets"] if not_run else []
    parts += [f"{count(left_out, 'attack')} that could not be run on this material"] if left_out else []
    return f"Not tested: {' and '.join(parts)}; the leak may be larger." if parts else "No defense was tested."


def _more_than_alone(leak: Leak) -> bool:
    low = leak.advantage_ci95[0]
    return (leak.advantage or 0.0) > 0 and (low is None or low > 0)


def _upper(leak: Leak) -> float:
    return leak.ci95[1] if leak.ci95[1] is not None else (leak.mean or 0.0)


def _ends(leak: Leak) -> tuple[float, float]:
    """Return the mean and the upper end of its interval."""
    return leak.mean or 0.0, _upper(leak)


def _two(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.2f}"
