"""Invariants of every report."""

from __future__ import annotations

from vflsec.results.analysis.results import Leak, Point, Summary


def check_report(summary: Summary) -> None:
    """Check the headline and the baseline of a report.

    * *alone* is one value for each target and rows.
    * *alone* has no advantage.
    * The headline is not below any attack's row by more than that row's interval.

    Raises:
        AssertionError: one of them does not hold.
    """
    alone: dict[tuple[str, str, str], float] = {}
    for point in (*summary.points, *summary.worst, *summary.picked, *summary.columns):
        for leak in (point.leak, point.leak_train):
            if leak.alone is not None:
                first = alone.setdefault((point.target, point.column, leak.rows), leak.alone)
                assert leak.alone == first, f"alone is {first} and {leak.alone} on {leak.rows} rows, {point.target}"
        if point.choice == "alone":
            assert point.leak.advantage in (None, 0.0), f"not joining has advantage {point.leak.advantage}"
    headlines = {_place(point): point.leak for point in summary.worst}
    for point in summary.points:
        if point.among:  # the strongest column gains most, and may leak less
            continue
        for leak in (point.leak, point.leak_train):
            _check_not_below(headlines.get(_place(point)), leak, f"{point.attack} on {leak.rows} rows")


def _place(point: Point) -> tuple[str, str, float, str]:
    return point.method, point.defense, point.strength, point.target


def _check_not_below(worst: Leak | None, leak: Leak, name: str) -> None:
    low = leak.ci95[0]
    if low is not None:
        assert worst is not None, f"{name} leaks {leak.mean}, and there is no headline"
        assert worst.mean is not None, f"{name} leaks {leak.mean}, and the headline has no number"
        assert worst.mean >= low, f"worst is {worst.mean}, below the interval of {name}, which begins at {low}"
