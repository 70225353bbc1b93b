"""Methods at few labels on five data sets, tuned by one rule, and how FedHSSL trades utility for privacy.

    python benchmarks/methods.py            compute, about an hour and a half on two cores, and print the page
    python benchmarks/methods.py --write    write benchmarks/methods.md as well

What is computed is kept in ``runs/methods``, so that an interrupted run goes on. The papers' claims are judged in
RESULTS.md, with more seeds; this page shows the methods side by side.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import click

import vflsec
from vflsec.report.progress import show_progress
from vflsec.results.records.schema import Record, Result
from vflsec.results.statistics import Interval, bound_over_seeds
from vflsec.run import engine
from vflsec.run import spec as specs
from vflsec.run.plan import Trial, build_cell, make_training
from vflsec.run.store import Store

PAGE = Path(__file__).with_name("methods.md")
FOLDER = Path("runs/methods")

TRIALS = 4
"""Settings of training that each method compares for each seed."""

LABELS, ALIGNED = 200, 0.4
HEAD_ROOM = "fedsplitnn, all labels"
NARROW = {"projector": 64, "predictor": 32}
"""Heads of pre-training, of which the paper's are eight and four times as wide."""

SUPERVISED = ("local", "lr", "lightgbm", "fedsplitnn")
ORDER = ("fedhssl-simsiam", "fedgssl-simsiam", "fedcssl-simsiam", "fedlocal-simsiam", "fedsplitnn")
"""The order of FedHSSL's figure 6, the best one first."""

FAMILY = ("fedlocal", "fedcssl", "fedgssl", "fedhssl")
METHODS = (
    *SUPERVISED,
    *reversed(ORDER[:-1]),
    *(f"{name}-byol" for name in FAMILY),
    *("fedcvt", "ss-vfl-i", "ss-vfl-c", "vflhlp", "vflhlp-a", "vflhlp-p"),
)

TRADING = ("fedsplitnn", "fedlocal-simsiam", "fedhssl-simsiam")
READERS = ("mc@pretrain", "mc", "direction", "fusion")
"""The first one attacks the pre-trained encoder, which ``fedsplitnn`` has not."""

STRENGTHS = (1, 5, 25)


class Data(NamedTuple):
    """One table: the name of a data set, what it is, and settings of all trainings."""

    name: str
    description: str
    settings: tuple[str, ...] = ()


WHOLE = ("train.pretrain.epochs=1", "model.encoder=tabular")
"""Settings of data with so many rows that an epoch has more updates than 20 of the others."""

DATA = (
    Data("multiple-features", "1,400 training rows, 10 classes; accuracy"),
    Data("digits", "halves of 1,258 images, 10 classes; accuracy", ("model.encoder=tabular",)),
    Data("credit-default", "3,000 training rows, 2 classes; AUC", ("data.test=0.9",)),
)
LARGE = (
    Data("fashion-mnist", "halves of 60,000 images, 10 classes; accuracy", WHOLE),
    Data("census-income", "199,523 training rows, 2 classes; AUC", WHOLE),
)
"""Data on which only the methods of the order are compared, since a training takes minutes."""

TRADES = (
    Data("control-views", "5,600 training rows", ("data.options.rows=8000",)),
    Data("flights", "6,300 training rows", ("data.options.rows=9000",)),
)


class Line(NamedTuple):
    """A method on one of the data.

    Attributes:
        utilities: of each seed, None where there is none.
        nbytes: sent in training, on average.
        seconds: of the CPU that the trials took, over all seeds.
    """

    utilities: list[float | None]
    nbytes: float
    seconds: float


def list_options(method: str) -> dict[str, int]:
    """Return the options of a method that is pre-trained with heads."""
    return NARROW if method.startswith(FAMILY) else {}


def make_row(data: Data, method: str, seed: int, n_labeled: int | None) -> Trial:
    """Return a training that is tuned, without an attack."""
    base: dict[str, Any] = {
        "dataset": data.name,
        "methods": [method],
        "method": {method: list_options(method)},
        "tune": TRIALS,
        "model": {"encoder": "auto"},
        "data": {"n_labeled": n_labeled, "aligned": ALIGNED},
        "train": {"pretrain": {"epochs": 20}},
    }
    spec = specs.read(specs.merge(base, data.settings))
    return make_training(spec, method, build_cell(spec, method, seed))


def compute(data: Data, methods: Sequence[str], seeds: int, jobs: int) -> dict[str, Line]:
    """Return a line of each method; what is stored is not computed again."""
    rows = {name: [make_row(data, name, seed, LABELS) for seed in range(seeds)] for name in methods}
    rows[HEAD_ROOM] = [make_row(data, "fedsplitnn", seed, None) for seed in range(seeds)]
    store = Store(FOLDER / data.name)
    with store.lock():
        store.trim()
        todo = engine.plan_trials([row for some in rows.values() for row in some], (), store)
        for _ in show_progress(engine.evaluate(todo, store, jobs=jobs), todo, jobs):
            pass
    records = store.records()
    return {name: summarize([records[row.key] for row in some]) for name, some in rows.items()}


def summarize(records: Sequence[Record]) -> Line:
    """Return the line of a method's results."""
    results = [record for record in records if isinstance(record, Result)]
    return Line(
        [result.utility.headline if result.utility else None for result in results],
        statistics.fmean(result.nbytes for result in results),
        sum(result.tuning.seconds for result in results if result.tuning),
    )


def compare(more: Line, less: Line) -> Interval:
    """Return the mean difference with its 95 % t interval; seeds are paired."""
    pairs = zip(more.utilities, less.utilities, strict=True)
    return bound_over_seeds([a - b for a, b in pairs if a is not None and b is not None])


def list_rows(lines: Mapping[str, Line]) -> Iterator[str]:
    """Yield the rows of a table."""
    for name, line in lines.items():
        known = [value for value in line.utilities if value is not None]
        lost = f" ({len(known)}/{len(line.utilities)})" if len(known) < len(line.utilities) else ""
        gain = "" if name == "fedsplitnn" else write_difference(compare(line, lines["fedsplitnn"]))
        yield (
            f"| {name} | {write_mean(bound_over_seeds(known)) if known else '–'}{lost} | {gain} | "
            f"{line.nbytes / 1e6:.1f} | {line.seconds:.0f} |"
        )


def describe_order(lines: Mapping[str, Line]) -> str:
    """Return how the figures stand to FedHSSL's order, and what could be gained."""
    gains = {(a, b): compare(lines[a], lines[b]) for a, b in pairwise(ORDER)}
    steps = [f"{a} − {b} {write_difference(gain)}" for (a, b), gain in gains.items()]
    sure = sum(gain.low > 0 for gain in gains.values()), sum(gain.high < 0 for gain in gains.values())
    above = compare(lines[HEAD_ROOM], lines["fedsplitnn"])
    joined = compare(lines["fedsplitnn"], lines["local"])
    return (
        f"FedHSSL's order, step by step: {'; '.join(steps)}. Of these {len(steps)} intervals {sure[0]} lie above 0 and "
        f"{sure[1]} below. All labels would bring FedSplitNN "
        f"{write_difference(above)}, and the passive party's columns bring it {write_difference(joined)}."
    )


def write_mean(interval: Interval) -> str:
    """Return a mean and half its interval."""
    return f"{interval.mean:.3f} ±{interval.high - interval.mean:.3f}"


def write_difference(interval: Interval) -> str:
    """Return a difference and half its interval."""
    return f"{interval.mean:+.3f} ±{interval.high - interval.mean:.3f}"


def evaluate_trade(data: Data, method: str, seeds: int, jobs: int) -> vflsec.Report:
    """Return the report on what noise costs FedHSSL or a baseline, and what it hides."""
    spec = specs.merge({}, data.settings)
    return vflsec.evaluate(
        attack=READERS[method == "fedsplitnn" :], defense="iso", strengths=STRENGTHS, dataset=data.name,
        methods=[method], seeds=seeds, jobs=jobs, out=FOLDER / f"{data.name}-{method}", tune=TRIALS,
        model={"encoder": "auto"},
        data={"n_labeled": 1000, "aligned": 0.2, **spec.get("data", {})}, train={"pretrain": {"epochs": 20}},
        aux={"folds": 0}, method={method: list_options(method)},
    )  # fmt: skip


def list_trade_rows(data: Data, report: vflsec.Report) -> Iterator[str]:
    """Yield the rows of a table of CAP."""
    points = [*report.points, *report.worst]
    for cap in report.cap:
        bare = next(p for p in points if (p.method, p.attack, p.strength) == (cap.method, cap.attack, 0.0))
        leak = f"{write_number(bare.leak.mean)} ({write_number(bare.leak.alone)})"
        yield (
            f"| {data.name} | {cap.method} | {cap.attack} | {write_number(bare.utility.mean)} | {leak} | "
            f"{write_number(cap.value)} | {write_number(cap.calibrated)} |"
        )


def write_number(value: float | None) -> str:
    """Return a number with three decimal places."""
    return "–" if value is None else f"{value:.3f}"


def write_page(seeds: int, jobs: int) -> str:
    """Return the page."""
    parts = [
        "# Methods side by side",
        f"Made by `python benchmarks/methods.py --write`; {seeds} seeds, ± is half a 95 % t interval over seeds. Each "
        f"method compares {TRIALS} settings for each seed on a quarter of the labels (`--tune {TRIALS}`; "
        "`vflsec show method NAME` says what is drawn), and trains on all labels with the best. "
        f"{LABELS} labels, {100 * ALIGNED:.0f} % of the training rows aligned, and for `{HEAD_ROOM}` all labels of "
        "these. `local` has one party's columns, `lr` and `lightgbm` have all columns in one place. *gain* is over "
        "`fedsplitnn`, paired by seed; MB are sent in training; CPU s are those of the trials, over all seeds.",
        "Networks are small, projectors and predictors have 64 and 32 units. MoCo is on the first two alone: its "
        "queue makes a training four times as long. Across parties SimSiam and BYOL have one loss in the released code,"
        " so that `fedcssl-byol` is `fedcssl-simsiam`. The papers' claims are judged in [RESULTS.md](../RESULTS.md). "
        "The active party has labels of aligned rows alone here, where VFLHLP's paper gives it those of all its rows.",
    ]
    for data in (*DATA, *LARGE):
        methods = METHODS if data in DATA else (*SUPERVISED, *reversed(ORDER[:-1]))
        methods += tuple(f"{name}-moco" for name in FAMILY) if data in DATA[:2] else ()
        lines = compute(data, methods, seeds, jobs)
        head = "| method | utility | gain | MB | CPU s |\n|---|---|---|---|---|\n"
        parts += [f"## {data.name}", f"{data.description}.", head + "\n".join(list_rows(lines)), describe_order(lines)]
    pairs = [(data, method) for data in TRADES for method in TRADING]
    rows = [row for data, method in pairs for row in list_trade_rows(data, evaluate_trade(data, method, seeds, jobs))]
    parts += [
        "## What noise buys",
        f"`iso` at {', '.join(map(str, STRENGTHS))}, each method tuned by the same rule, 1,000 labels, 20 % aligned. "
        "CAP is the paper's (table VII), calibrated CAP counts the leak above *alone*. `mc@pretrain` attacks the "
        "encoder before fine-tuning, all others after it; *worst* is the strongest of all. Utility and leak are without"
        " noise. RESULTS.md (fedhssl-privacy) has CAP of the same methods without tuning and with more seeds.",
        "| data | method | attack | utility | leak (alone) | CAP | calibrated |\n|---|---|---|---|---|---|---|\n"
        + "\n".join(rows),
    ]
    return "\n\n".join(parts) + "\n"


@click.command()
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(2))
@click.option("--jobs", default=2, show_default=True)
@click.option("--write", is_flag=True, help="Write the page to benchmarks/methods.md.")
def main(seeds: int, jobs: int, write: bool) -> None:
    """Compute what is missing, print the page."""
    page = write_page(seeds, jobs)
    if write:
        PAGE.write_text(page, encoding="utf-8")
    click.echo(page)


if __name__ == "__main__":
    main()
