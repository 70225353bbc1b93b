"""What each defense leaves to the strongest attack on labels, and at what cost in utility.

    python benchmarks/defenses.py            compute, about an hour on two cores, and print the page
    python benchmarks/defenses.py --write    write docs/choosing_a_defense.md as well

Every defense is tuned by one rule: of its usual strengths (``vflsec show defense``), the one counts that leaks least
among those that cost at most two points of AUC. What is computed is kept in
``runs``, so that an interrupted run goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import click

import vflsec
from vflsec.core import registry
from vflsec.results.analysis.results import Point

PAGE = Path(__file__).parents[1] / "docs" / "choosing_a_defense.md"
FOLDER = Path("runs/choosing-a-defense")
JOINING = ("fusion", "self-training", "forest-training")
ATTACKS = (*JOINING, "mc", "averaging", "norm", "sums")
BUDGET = 0.02
LEFT_OUT = {
    "phe": "encrypts embeddings, which the active party would read; gradients are decrypted as they are",
    "id-lmid": "withholds nodes of trees, which split learning does not send ([Trees](trees.md) measures it)",
}


class Line(NamedTuple):
    """One defense at the strength that counts: its headline and its cost."""

    worst: Point
    cost: float


def evaluated(seeds: int, jobs: int) -> vflsec.Report:
    """Run what is missing of all attacks."""
    names = [name for name in registry.list_all("defenses") if name not in LEFT_OUT]
    return vflsec.evaluate(attack=ATTACKS, defense=names, seeds=seeds, out=FOLDER, jobs=jobs)


def local_utility(seeds: int) -> float:
    """Return what the active party reaches without anybody."""
    report = vflsec.evaluate(methods=["local"], seeds=seeds, out=FOLDER.with_name(FOLDER.name + "-local"))
    found = report.points[0].utility.mean
    assert found is not None
    return found


def lines(worst: Sequence[Point]) -> tuple[Line, list[Line]]:
    """Return the undefended line, and that of each defense at the strength that counts, the least leak first."""
    whole = next(p for p in worst if p.strength == 0)
    found: dict[str, Line] = {}
    for point in worst:
        if point.strength == 0 or point.leak.mean is None or point.utility.mean is None:
            continue
        line = Line(point, _utility(whole) - point.utility.mean)
        before = found.get(point.defense)
        if line.cost <= BUDGET and (before is None or _leak(line) < _leak(before)):
            found[point.defense] = line
    return Line(whole, 0.0), sorted(found.values(), key=_leak)


def page(report: vflsec.Report, alone: float) -> str:
    """Return the page."""
    whole, found = lines(report.worst)
    seeds, cells = report.summary.seeds, [p for p in report.worst if p.leak.mean is not None]
    joined = sum(any(name in p.choice for name in JOINING) for p in cells)
    baseline = whole.worst.leak.alone
    assert baseline is not None
    near = [line for line in found if _not_above(line)]
    private = [line for line in found if line.worst.spent]
    missing = sorted({p.defense for p in report.worst if p.strength} - {line.worst.defense for line in found})
    table = [
        "| defense | strength | cost | worst | attack | advantage | epsilon |",
        "|---|---|---|---|---|---|---|",
    ]
    table += [_row(line) for line in (whole, *found)]
    attacks = ", ".join(f"`{name}` (version {registry.load('attacks', name).version})" for name in ATTACKS)
    joining = ", ".join(f"`{name}`" for name in JOINING)
    gain = 100 * (_utility(whole.worst) - alone)
    parts = [
        "# Choosing a defense",
        f"Written by `python benchmarks/defenses.py --write`; {seeds} seeds of `credit-default`, split learning. A "
        "credit bureau, the passive party, wants to know which clients of the bank failed to pay. It knows 80 labels.",
        f"Without a defense the joint model has an AUC of {_utility(whole.worst):.3f}, and the bank alone "
        f"{alone:.3f}: joining is worth {gain:.1f} points. The strongest attack infers the labels with an "
        f"AUC of {_leak(whole):.3f}; the bureau alone reaches {baseline:.3f}.",
        "Each defense is taken at the strength that leaks least among those that cost at most "
        f"{100 * BUDGET:.0f} points of utility, of its usual ones. *worst* is the strongest of "
        f"{attacks}, chosen on half of the rows and scored on the other half. ± is a 95 % interval over seeds.",
        "\n".join(table),
        f"{joining} join the bureau's columns, its trained model and the gradients that it received. "
        f"One of them is the strongest attack in {joined} of {len(cells)} cells of this evaluation.",
        "## What follows",
        _advice(found, near, private, missing, baseline),
        "What a defense is worth depends on the data. Compare on your own: "
        "`vflsec eval --dataset mine.toml --attack all --defense iso,gaussian-dp,label-dp`.",
        *(f"`{name}` is not in the table: it {why}." for name, why in LEFT_OUT.items()),
        "[Sealed training](sealed_training.md) shows what is left where a passive party receives noised sums over a "
        "batch in place of a gradient for each row.",
        "[Other risks of a defense](cross_risk.md) shows what defenses of labels do to columns, attributes, membership "
        "and backdoors.",
    ]
    return "\n\n".join(parts) + "\n"


def _advice(
    found: Sequence[Line], near: Sequence[Line], private: Sequence[Line], missing: Sequence[str], baseline: float
) -> str:
    best = found[0]
    above = _leak(best) - baseline
    items = [
        f"At this cost `{best.worst.defense}` leaves least: {_leak(best):.3f}, {above:+.3f} beside the bureau alone."
    ]
    if near:
        names = ", ".join(f"`{line.worst.defense}` ({line.worst.leak.detectable or 0.0:.3f})" for line in near)
        items.append(
            "Under these, the interval of the advantage includes 0. In parentheses: the advantage that such an "
            f"evaluation detects in four of five cases. {names}."
        )
    else:
        items.append("Every defense leaves an advantage whose interval lies above 0: none of them hides the labels.")
    void = [line for line in private if _epsilon(line) > 10]
    held = [line for line in private if line not in void]
    if held:
        names = ", ".join(
            f"`{line.worst.defense}` ({_leak(line):.3f} at epsilon {_epsilon(line):.3g})" for line in held
        )
        items.append(f"With an epsilon of at most 10, which bounds every attack on what it is of: {names}.")
    if void:
        names = ", ".join(f"`{line.worst.defense}` ({_epsilon(line):.3g})" for line in void)
        items.append(f"With an epsilon above 10, which bounds next to nothing: {names}.")
    open_ = [line for line in found if _leak(line) > 0.95]
    if open_:
        names = ", ".join(f"`{line.worst.defense}`" for line in open_)
        items.append(f"Labels stay open (an AUC above .95) under {names}.")
    if missing:
        items.append(f"No strength that was tried costs so little: {', '.join(f'`{name}`' for name in missing)}.")
    return "\n".join(f"* {item}" for item in items)


def _row(line: Line) -> str:
    worst = line.worst
    margin = worst.leak.ci95[1] - _leak(line) if worst.leak.ci95[1] is not None else float("nan")
    name = f"`{worst.defense}`" if worst.strength else "none"
    epsilon = f"{_epsilon(line):.3g}" if worst.spent else "–"
    cells = (name, f"{worst.strength:.3g}", f"{100 * line.cost:.1f}", f"{_leak(line):.3f} ±{margin:.3f}",
             worst.choice, f"{worst.leak.advantage or 0.0:+.3f}", epsilon)  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _leak(line: Line) -> float:
    assert line.worst.leak.mean is not None
    return line.worst.leak.mean


def _utility(point: Point) -> float:
    assert point.utility.mean is not None
    return point.utility.mean


def _not_above(line: Line) -> bool:
    low = line.worst.leak.advantage_ci95[0]
    return low is None or low <= 0


def _epsilon(line: Line) -> float:
    return float(max(one["epsilon"] for one in line.worst.spent))


@click.command()
@click.option("--seeds", default=3, show_default=True)
@click.option("--jobs", default=2, show_default=True)
@click.option("--write", is_flag=True, help="Write the page to docs/choosing_a_defense.md.")
def main(seeds: int, jobs: int, write: bool) -> None:
    """Compute and print the page."""
    report = evaluated(seeds, jobs)
    text = page(report, local_utility(seeds))
    if write:
        PAGE.write_text(text, encoding="utf-8")
    click.echo(text)


if __name__ == "__main__":
    main()
