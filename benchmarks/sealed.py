"""What sealed training leaves of labels and columns, and what it costs.

    python benchmarks/sealed.py            compute, an hour with --jobs 2, and print the page
    python benchmarks/sealed.py --write    write docs/sealed_training.md as well

What is computed is kept in ``runs/sealed``, so that an interrupted run goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click

import vflsec
from vflsec.cipher.lattice import SumsLayout
from vflsec.results.analysis.results import Leak, Point

PAGE = Path(__file__).parents[1] / "docs" / "sealed_training.md"
FOLDER = Path("runs/sealed")
BOTTOM = 16
MODEL: dict[str, Any] = {"bottom": [BOTTOM]}
ATTACKS = ("sums", "fusion", "mc")
SLOW = ("self-training", "forest-training")
"""Attacks that are left out where there are ten classes."""

EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
BINARY = ("credit-default", "flights", "census-income")
"""The data of two classes."""
PARTS = {"census-income": {"aligned": 0.03}}
"""Settings of data that would take too long: of 425 columns, `sums` takes a second or two for each batch."""
DATASETS = (*BINARY, "multiple-features", "digits")
OTHERS = ("ppdl", "iso", "marvell", "label-dp", "gaussian-dp")
READERS = ("fusion", "mc")
"""Other defenses, at their usual strengths, and the attacks that are run on them."""

TUNED_ON = "credit-default"
SEEDS = {TUNED_ON: 5}
FEWER = 2
"""Seeds of the other data sets."""

COLUMN_ATTACKS = ("column-fusion", "attribute-fusion")


class Setup(NamedTuple):
    """What a passive party shows the active one: the name in the page, settings, and defenses of every training."""

    name: str
    model: Mapping[str, Any]
    fixed: tuple[str, ...] = ()


SEALED, NARROW = "sealed:strength=1", MODEL | {"cut": 1}
NOISE = "gaussian-dp:clip=2,strength=0.25@embedding"
BOTH = Setup(f"the same, with `{NOISE}`", NARROW, (SEALED, NOISE))
"""Recommended where both parties have something to hide."""

SETUPS = (
    Setup("no defense", {}),
    Setup("`sealed`, epsilon 1", MODEL, (SEALED,)),
    Setup("the same, one number a row", NARROW, (SEALED,)),
    BOTH,
)


def evaluate_labels(dataset: str, jobs: int) -> vflsec.Report:
    """Return the report on what a passive party infers of the labels."""
    return vflsec.evaluate(
        attack=list_attacks(dataset), defense="sealed", epsilons=EPSILONS, dataset=dataset, model=MODEL,
        seeds=SEEDS.get(dataset, FEWER), out=FOLDER / dataset, jobs=jobs, data=PARTS.get(dataset, {}),
    )  # fmt: skip


def evaluate_others(dataset: str, jobs: int) -> vflsec.Report:
    """Return the report on what a passive party infers of the labels under other defenses."""
    return vflsec.evaluate(
        attack=READERS, defense=list_others(dataset), dataset=dataset, model=MODEL, seeds=FEWER, jobs=jobs,
        out=FOLDER / f"{dataset}-others", data=PARTS.get(dataset, {}),
    )  # fmt: skip


def list_others(dataset: str) -> tuple[str, ...]:
    """Return the other defenses; ``marvell`` hides one of two classes."""
    return OTHERS if dataset in BINARY else tuple(name for name in OTHERS if name != "marvell")


def list_attacks(dataset: str) -> tuple[str, ...]:
    """Return the attacks that are run under ``sealed``."""
    return (*ATTACKS, *SLOW) if dataset in BINARY else ATTACKS


def evaluate_columns(setup: Setup, jobs: int) -> vflsec.Report:
    """Return the report on what the active party infers of the passive party's columns."""
    return vflsec.evaluate(
        attack=COLUMN_ATTACKS, adversary="active", model=setup.model, fixed=setup.fixed, seeds=FEWER,
        out=FOLDER / f"columns-{SETUPS.index(setup)}", jobs=jobs,
    )  # fmt: skip


def evaluate_both(jobs: int) -> vflsec.Report:
    """Return the report on what the passive party infers of the labels where both sides are protected."""
    return vflsec.evaluate(
        attack=ATTACKS, model=BOTH.model, fixed=BOTH.fixed, seeds=FEWER, out=FOLDER / "both", jobs=jobs
    )


def measure_local() -> float:
    """Return the utility that the active party reaches alone."""
    return get_mean(vflsec.evaluate(methods=["local"], seeds=FEWER, out=FOLDER / "local").points[0].utility)


def list_label_rows(dataset: str, report: vflsec.Report) -> Iterable[str]:
    """Yield the lines of a data set's table."""
    whole = next(p for p in report.worst if p.strength == 0)
    for point in sorted(report.worst, key=lambda p: p.strength):
        epsilon = f"{1 / point.strength:g}" if point.strength else "none"
        cost = 100 * (get_mean(whole.utility) - get_mean(point.utility))
        leak = point.leak
        yield (
            f"| `{dataset}` | {leak.n} | {epsilon} | {get_mean(point.utility):.3f} | {cost:+.1f} | "
            f"{show_leak(leak)} ({point.choice}) | {leak.alone or 0.0:.3f} |"
        )


def list_other_rows(dataset: str, sealed: vflsec.Report, others: vflsec.Report) -> Iterable[str]:
    """Yield the lines of a data set's comparison: each at the strength that leaks least and is as useful as sealed."""
    reference = next(p for p in sealed.worst if p.strength == 1.0)
    undefended = get_mean(next(p for p in sealed.worst if p.strength == 0).utility)
    yield show_other(dataset, "epsilon 1", reference, undefended)
    undefended = get_mean(next(p for p in others.worst if p.strength == 0).utility)
    for name in list_others(dataset):
        points = [p for p in others.worst if p.defense == name and p.strength and p.utility.mean is not None]
        useful = [p for p in points if p.leak.mean is not None and get_mean(p.utility) >= get_mean(reference.utility)]
        if useful:
            least = min(useful, key=lambda p: p.leak.mean or 0.0)
            yield show_other(dataset, f"{least.strength:g}", least, undefended)
        else:
            yield f"| `{dataset}` | `{name}` | none is as useful | – | – |"


def show_other(dataset: str, strength: str, point: Point, undefended: float) -> str:
    """Return a line of the comparison."""
    cost = 100 * (undefended - get_mean(point.utility))
    return f"| `{dataset}` | `{point.defense}` | {strength} | {cost:+.1f} | {show_leak(point.leak)} ({point.choice}) |"


def list_column_rows(setup: Setup, report: vflsec.Report) -> Iterable[str]:
    """Yield the line of a setup."""
    columns, attribute = report.worst
    cells = " | ".join(map(show_beside_alone, (columns, attribute)))
    yield f"| {setup.name} | {get_mean(columns.utility):.3f} | {cells} |"


def show_beside_alone(point: Point) -> str:
    """Return a leak, and what the adversary knows without joining."""
    return f"{show_leak(point.leak)} (alone {point.leak.alone or 0.0:.3f})"


def describe_both(report: vflsec.Report, local: float) -> str:
    """Return what the recommended configuration is worth, and what it leaves of the labels."""
    (labels,) = report.worst
    utility = get_mean(labels.utility)
    return (
        f"At epsilon 1 this leaves {show_beside_alone(labels)} of the labels, by the strongest of "
        f"{', '.join(f'`{name}`' for name in ATTACKS)} ({labels.choice}). Utility is {utility:.3f}, "
        f"{100 * (utility - local):.1f} points more than the active party has without the passive one ({local:.3f}). "
        f"Clip and noise were chosen on these {FEWER} seeds, and nothing bounds what is learned of a column. Measure "
        "it on your own data: `--adversary active`."
    )


def show_leak(leak: Leak) -> str:
    """Return a mean with its margin."""
    return f"{leak.mean or 0.0:.3f} ±{leak.upper - (leak.mean or 0.0):.3f}"


def describe_parts() -> str:
    """Return which data sets are used in part."""
    return " ".join(
        f"Of `{name}`, {100 * part['aligned']:g} % of the training rows are aligned." for name, part in PARTS.items()
    )


def get_mean(measure: object) -> float:
    """Return the mean of a measure that has one."""
    mean = getattr(measure, "mean", None)
    assert mean is not None
    return float(mean)


def list_cost_rows() -> Iterable[str]:
    """Yield the bytes of an exchange, by closed form."""
    for rows, numbers, parameters in ((2048, 1, 256), (2048, 1, 418), (8192, 1, 256), (2048, 10, 256)):
        layout = SumsLayout(rows * numbers, parameters)
        yield (
            f"| {rows} | {numbers} | {parameters} | {layout.size_of_values / 1e6:.2f} | "
            f"{layout.size_of_sums / 1e6:.2f} |"
        )


def write_page(jobs: int) -> str:
    """Return the page."""
    reports = {dataset: evaluate_labels(dataset, jobs) for dataset in DATASETS}
    labels = [row for dataset, report in reports.items() for row in list_label_rows(dataset, report)]
    beside = [row for d, report in reports.items() for row in list_other_rows(d, report, evaluate_others(d, jobs))]
    columns = [row for setup in SETUPS for row in list_column_rows(setup, evaluate_columns(setup, jobs))]
    table = "| data | seeds | epsilon | utility | cost | worst | alone |\n|---|---|---|---|---|---|---|\n"
    attacks, slow, readers, others = (
        ", ".join(f"`{name}`" for name in names)
        for names in (ATTACKS, SLOW, READERS, [name for name in DATASETS if name != TUNED_ON])
    )
    parts = [
        "# Sealed training",
        "Written by `python benchmarks/sealed.py --write`.",
        "Most defenses of labels change the gradient of each row, which has to carry noise as long as itself to hide "
        "a label. `sealed` sends no gradient of a row: a passive party learns one noised sum over a batch for each "
        "parameter of its model (`vflsec show defense sealed`). Epsilon is set before training and bounds what all "
        "passive parties together learn of one training label, if they follow the protocol.",
        f"```text\nvflsec eval --attack all --defense sealed --epsilon 1,4 --set model.bottom=[{BOTTOM}]\n```",
        "## Labels",
        f"Split learning between one active and one passive party; both bottom models have {BOTTOM} hidden units, with "
        "and without the defense. Cost is in points of AUC or accuracy. *worst* is the strongest of "
        f"{attacks} and, on two classes, {slow}, chosen on half of the rows and scored on the other half; *alone* is "
        "what the passive party "
        "reaches without training. It knows 80 labels. ± is a 95 % interval. The settings of `sealed` were chosen on "
        f"`{TUNED_ON}`; nothing was tuned on {others}. {describe_parts()}",
        table + "\n".join(labels),
        "Epsilon bounds what is learned of one label beyond all others. It does not bound what the sums teach of "
        "everybody: how own columns go with labels, which is what the passive party's model learns, and what raises "
        "*worst* above *alone*. A passive party that breaks the protocol reads single rows "
        "([two companies](two_companies.md)).",
        "## Beside other defenses",
        "Each of the others is taken at the strength that leaks least among its usual ones whose utility is at least "
        f"that of `sealed` at epsilon 1. Their *worst* is the strongest of {readers} over {FEWER} seeds: fewer attacks "
        "than `sealed` has to stand.",
        "| data | defense | strength | cost | worst |\n|---|---|---|---|---|\n" + "\n".join(beside),
        "## Columns",
        "Embeddings are sent in clear, so `sealed` alone protects no column. The table shows what the active party "
        "recovers of all columns (`column-fusion`, R2) and of the attribute SEX (`attribute-fusion`, AUC), "
        f"on training rows or test rows, where it recovers more; {FEWER} seeds of `{TUNED_ON}`.",
        "| what is sent | utility | columns | SEX |\n|---|---|---|---|\n" + "\n".join(columns),
        "## Both directions",
        "Where both parties have something to hide, let the passive party send one number a row, with noise on it:",
        "```text\nvflsec eval --attack all --defense sealed --epsilon 1,4 "
        f"--with {NOISE} --set model.bottom=[{BOTTOM}] --set model.cut=1\n```",
        describe_both(evaluate_both(jobs), measure_local()),
        "## Messages of a batch with `backend=bfv`",
        "BFV with 8,192 coefficients and 128-bit security. `vflsec eval --defense sealed:backend=bfv --dry-run` tells "
        "the bytes and seconds of a whole run.",
        "| rows | numbers a row | parameters | MB to the passive party | MB back |\n|---|---|---|---|---|\n"
        + "\n".join(list_cost_rows()),
    ]
    return "\n\n".join(parts) + "\n"


@click.command()
@click.option("--jobs", default=1, show_default=True)
@click.option("--write", is_flag=True, help="Write the page to docs/sealed_training.md.")
def main(jobs: int, write: bool) -> None:
    """Compute and print the page."""
    page = write_page(jobs)
    if write:
        PAGE.write_text(page, encoding="utf-8")
    click.echo(page)


if __name__ == "__main__":
    main()
