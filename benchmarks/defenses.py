"""What each defense leaves to the strongest attack on labels, and at what cost in utility.

    python benchmarks/defenses.py            compute, about an hour and a quarter on two cores, and print the page
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
import msgspec

import vflsec
from vflsec.core import registry
from vflsec.results.analysis.results import Point
from vflsec.results.analysis.summary import summarize
from vflsec.run.store import Store

PAGE = Path(__file__).parents[1] / "docs" / "choosing_a_defense.md"
FOLDER = Path("runs/choosing-a-defense")
PICKS = FOLDER.with_name(FOLDER.name + "-picks")
JOINING = ("fusion", "self-training", "forest-training")
ATTACKS = (*JOINING, "mc", "averaging", "norm", "sums")
FOLDS = 3
BUDGET = 0.02
LEFT_OUT = {
    "phe": "encrypts embeddings, which the active party would read; gradients are decrypted as they are",
    "id-lmid": "withholds nodes of trees, which split learning does not send ([Trees](trees.md) measures it)",
}


class Line(NamedTuple):
    """One defense at the strength that counts: its headline and its cost."""

    worst: Point
    cost: float

    @property
    def place(self) -> tuple[str, float]:
        """The defense and its strength."""
        return self.worst.defense, self.worst.strength


def evaluated(seeds: int, jobs: int) -> vflsec.Report:
    """Run what is missing of all attacks."""
    names = [name for name in registry.list_all("defenses") if name not in LEFT_OUT]
    return vflsec.evaluate(attack=ATTACKS, defense=names, seeds=seeds, out=FOLDER, jobs=jobs)


def judged(report: vflsec.Report, seeds: int, jobs: int) -> vflsec.Report:
    """Run what is missing of the page's cells with folds of the auxiliary rows, by which an adversary picks."""
    chosen = [f"{name}:strength={strength!r}" for name, strength in (line.place for line in lines(report.worst)[1])]
    return vflsec.evaluate(
        attack=ATTACKS, defense=chosen, seeds=seeds, aux={"pick": True, "folds": FOLDS}, out=PICKS, jobs=jobs
    )


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


def weaker_picks(report: vflsec.Report) -> list[str]:
    """Return where the adversary's pick leaks less with the attacks that join sources than without them."""
    manifest = report.manifest
    without = msgspec.structs.replace(
        manifest,
        attacks=[attack for attack in manifest.attacks if attack.label not in JOINING],
        rows=[row for row in manifest.rows if row.attack not in JOINING],
        baselines=[baseline for baseline in manifest.baselines if baseline.label not in JOINING],
    )
    before = summarize(without, Store(PICKS).records(), out="").picked
    return [
        f"{now.defense} {now.strength:g}: {now.leak.mean:.3f} ({now.choice}), {then.leak.mean:.3f} ({then.choice})"
        for now, then in zip(report.summary.picked, before, strict=True)
        if now.leak.mean is not None and then.leak.mean is not None and now.leak.mean < then.leak.mean - 1e-9
    ]


def page(report: vflsec.Report, picks: vflsec.Report, alone: float) -> str:
    """Return the page."""
    whole, found = lines(report.worst)
    picked = {(p.defense, p.strength): p for p in picks.summary.picked}
    seeds, cells = report.summary.seeds, [p for p in report.worst if p.leak.mean is not None]
    joined = sum(any(name in p.choice for name in JOINING) for p in cells)
    baseline = whole.worst.leak.alone
    assert baseline is not None
    near = [line for line in found if _not_above(line)]
    private = [line for line in found if line.worst.spent]
    missing = sorted({p.defense for p in report.worst if p.strength} - {line.worst.defense for line in found})
    table = [
        "| defense | strength | cost | worst | attack | advantage | adversary's pick | epsilon |",
        "|---|---|---|---|---|---|---|---|",
    ]
    table.append(_row(whole, next(p for p in picks.summary.picked if p.strength == 0)))
    table += [_row(line, picked[line.place]) for line in found]
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
        f"{attacks}, chosen on half of the rows and scored on the other half. *Adversary's pick* is what the bureau "
        "would choose by its own 80 labels. ± is a 95 % interval over seeds.",
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
        names = ", ".join(f"`{line.worst.defense}`" for line in near)
        items.append(f"No advantage is shown under {names}: the interval of the advantage holds 0.")
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


def _row(line: Line, picked: Point) -> str:
    worst = line.worst
    margin = worst.leak.ci95[1] - _leak(line) if worst.leak.ci95[1] is not None else float("nan")
    name = f"`{worst.defense}`" if worst.strength else "none"
    epsilon = f"{_epsilon(line):.3g}" if worst.spent else "–"
    pick = f"{picked.leak.mean:.3f} ({picked.choice.removeprefix('alone:')})" if picked.leak.mean is not None else "–"
    cells = (name, f"{worst.strength:.3g}", f"{100 * line.cost:.1f}", f"{_leak(line):.3f} ±{margin:.3f}",
             worst.choice, f"{worst.leak.advantage or 0.0:+.3f}", pick, epsilon)  # fmt: skip
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
@click.option("--seeds", default=5, show_default=True)
@click.option("--jobs", default=2, show_default=True)
@click.option("--write", is_flag=True, help="Write the page to docs/choosing_a_defense.md.")
def main(seeds: int, jobs: int, write: bool) -> None:
    """Compute and print the page."""
    report = evaluated(seeds, jobs)
    picks = judged(report, seeds, jobs)
    text = page(report, picks, local_utility(seeds))
    if write:
        PAGE.write_text(text, encoding="utf-8")
    click.echo(text)
    weaker = weaker_picks(picks)
    click.echo(f"The pick is weaker with the joining attacks than without them in {len(weaker)} cells", err=True)
    for one in weaker:
        click.echo(f"  {one}", err=True)


if __name__ == "__main__":
    main()
