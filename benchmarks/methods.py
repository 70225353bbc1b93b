"""All methods side by side at few labels, and which of the papers' claims hold on the data that come with vflsec.

    python benchmarks/methods.py                     everything; goes on where it was stopped
    python benchmarks/methods.py --only few-labels   one experiment
    python benchmarks/methods.py --write             renew benchmarks/methods.md

Every method is tuned by the rule of ``vflsec eval --tune 4``: at each point and for each seed, the settings as they are
and three random ones are compared on a quarter of the labels, and the best train on all. ``vflsec show method NAME``
says what is drawn, rates of pre-training among it. With 14 labels of ten classes none can be held out, and nothing is
tuned. No test row is used for a choice. The encoder is the same for all.

A claim that A exceeds B is judged by the paired differences over seeds, each the mean over the points that the claim is
about, with their 95 % t interval:

- *holds*: the interval lies above 0;
- *does not hold here*: it lies below half a point (0.005), so that there is no gain to speak of;
- *undecided*: neither; or the end that decides lies within 0.002 of its limit, where rounding on another machine
  can move it across; or the reading changes when one seed is left out; or a model of some seed diverged or collapsed.

A claim of several parts holds if all do, and does not if one does not.

Splits of different seeds share rows, so intervals are somewhat too short. A page makes many comparisons, of which one
in twenty may seem decided by chance: beside each decided one stands its reading with the interval at the level
1 - 0.05 / (number of comparisons), Bonferroni's, which allows for all of them.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import click
from scipy import stats

from vflsec.report.progress import show_progress
from vflsec.results.records.schema import Record, Result
from vflsec.results.statistics import Interval, bound_over_seeds
from vflsec.run import engine
from vflsec.run import spec as specs
from vflsec.run.plan import Trial, build_cell, make_training
from vflsec.run.store import Store

Measured = dict[str, Any]
"""What is kept of one training."""

SEEDS = 5
MARGIN = 0.005
"""Half a point: a gain that is surely smaller is no gain."""

NEAR = 0.002
"""How far from its limit the end of an interval must lie to decide anything: rounding moves a test row or so."""

RULES = [
    "*Holds*: the 95 % t interval of the paired differences lies above 0. *Does not hold here*: it lies below 0.005.",
    "*Undecided*: neither, or the deciding end lies within 0.002 of its limit, or the reading changes when one seed is",
    "left out. In brackets: in how many of the leave-one-out intervals it is the same, and for what is decided how it",
    "reads with intervals that allow for all comparisons of this page (Bonferroni).",
]

SMALL = 0.25
"""The part of the bytes that counts as small."""

TRIALS = 4
"""Settings that each method compares."""

PAGE = Path(__file__).with_name("methods.md")

LABELS = (200, 400, 600, 800, 1000)
FLAVOURS = ("simsiam", "byol", "moco")
HOLDS, FAILS, OPEN = "holds", "does not hold here", "undecided"


class Experiment(NamedTuple):
    """One table: methods as rows, points as columns.

    Attributes:
        dataset: a registered name.
        about: one sentence.
        common: settings of all.
        points: settings of each column.
        arms: the rows.
        some: rows that have the points ``extra`` as well.
        extra: settings of further columns.
    """

    dataset: str
    about: str
    common: tuple[str, ...]
    points: Mapping[str, tuple[str, ...]]
    arms: tuple[str, ...]
    some: tuple[str, ...] = ()
    extra: Mapping[str, tuple[str, ...]] = {}

    def columns(self, arm: str) -> dict[str, tuple[str, ...]]:
        """Return the points of one row."""
        return {**self.points, **(self.extra if arm in self.some else {})}


SUPERVISED = ("local", "lr", "lightgbm", "fedsplitnn")
FAMILY = ("fedlocal-{}", "fedlocal-{} + pma", "fedcssl-{}", "fedgssl-{}", "fedhssl-{}")
OTHERS = ("fedcvt", "ss-vfl-i", "ss-vfl-c", "vflhlp", "vflhlp-a", "vflhlp-p")


def family(*flavours: str) -> tuple[str, ...]:
    """Return the arms of FedHSSL's family for these flavours."""
    return tuple(one.format(flavour) for flavour in flavours for one in FAMILY)


CROSS = tuple(f"{one}-simsiam" for one in ("fedcssl", "fedgssl", "fedhssl"))
ALIGNED = {
    "20 % aligned": ("data.n_labeled=200", "data.aligned=0.2"),
    "40 % aligned": ("data.n_labeled=200", "data.aligned=0.4"),
}
BUDGETS = {f"{n} labels": (f"data.n_labeled={n}",) for n in LABELS}
FEW_ALIGNED = {f"{share:.0%} aligned": (f"data.aligned={share}",) for share in (0.05, 0.1, 0.2)}
SCARCE = ("local", "fedsplitnn", "fedcvt", "ss-vfl-c", "fedhssl-simsiam", "vflhlp", "vflhlp-a", "vflhlp-p")
CREDIT = ("data.test=0.9",)  # 3,000 of the training rows: pre-training takes minutes for all of them

EXPERIMENTS = {
    "multiple-features": Experiment(
        "multiple-features",
        "1,400 training rows, 10 classes, all aligned, of which some have labels; accuracy.",
        (),
        BUDGETS,
        (*SUPERVISED, *family(*FLAVOURS), *OTHERS),
        CROSS,
        ALIGNED,
    ),
    "digits": Experiment(
        "digits",
        "Halves of 8 x 8 images, read as 32 columns, altered as images; 1,258 training rows, 10 classes; accuracy.",
        ("model.encoder=tabular",),
        BUDGETS,
        (*SUPERVISED, *family("simsiam"), *OTHERS),
    ),
    "credit-default": Experiment(
        "credit-default",
        "3,000 training rows, 2 classes, 40 % aligned; AUC.",
        (*CREDIT, "data.aligned=0.4"),
        BUDGETS,
        (*SUPERVISED, *family("simsiam"), *OTHERS),
    ),
    "few-aligned": Experiment(
        "multiple-features",
        "Few of 1,400 training rows are aligned, and the active party has all labels; accuracy.",
        (),
        FEW_ALIGNED,
        SCARCE,
    ),
    "few-aligned-credit": Experiment(
        "credit-default",
        "Few of 3,000 training rows are aligned, and the active party has all labels; AUC.",
        CREDIT,
        FEW_ALIGNED,
        tuple(arm for arm in SCARCE if arm not in ("fedcvt", "fedhssl-simsiam")),  # these take minutes
    ),
    "few-labels": Experiment(
        "multiple-features",
        "1 % and 5 % of 1,400 aligned training rows have labels; accuracy.",
        (),
        {"1 % labels": ("data.n_labeled=14", "tune=1"), "5 % labels": ("data.n_labeled=70",)},
        ("fedsplitnn", "ss-vfl-i", "ss-vfl-c"),
    ),
    "few-labels-credit": Experiment(
        "credit-default",
        "1 % and 5 % of 6,000 aligned training rows have labels; AUC.",
        ("data.test=0.8",),
        {"1 % labels": ("data.n_labeled=60",), "5 % labels": ("data.n_labeled=300",)},
        ("fedsplitnn", "ss-vfl-i", "ss-vfl-c"),
    ),
}


def make_row(experiment: Experiment, arm: str, seed: int, point: Sequence[str]) -> Trial:
    """Return one result: a training that is tuned, without an attack."""
    label = arm.replace(" + pma", ":pma=true")
    base = {"dataset": experiment.dataset, "methods": [label], "model": {"encoder": "auto"}, "tune": TRIALS}
    spec = specs.read(specs.merge(base, (*experiment.common, *point)))
    return make_training(spec, label, build_cell(spec, label, seed))


def measured(record: Record) -> Measured:
    """Return utility on test rows, bytes of training, and status."""
    assert isinstance(record, Result)
    sent = sum(nbytes for phase, *_, nbytes in record.traffic if phase not in ("predict", "validate"))
    test = record.utility.headline if record.utility else None
    return {"status": record.status, "test": test, "bytes": sent}


Found = dict[str, dict[str, dict[str, list[Measured]]]]
"""Experiment, arm, point: what was measured with each seed."""


def compute(names: Sequence[str], seeds: int, folder: Path, jobs: int) -> Found:
    """Return everything; what is in ``folder`` is not computed again."""
    wanted = {
        (name, arm, label): [make_row(EXPERIMENTS[name], arm, seed, point) for seed in range(seeds)]
        for name in names
        for arm in EXPERIMENTS[name].arms
        for label, point in EXPERIMENTS[name].columns(arm).items()
    }
    store = Store(folder)
    with store.lock():
        store.trim()
        todo = engine.plan_trials(chain(*wanted.values()), (), store)
        for _ in show_progress(engine.evaluate(todo, store, jobs=jobs), todo, jobs):
            pass
    records, found = store.records(), Found()
    for (name, arm, label), rows in wanted.items():
        found.setdefault(name, {}).setdefault(arm, {})[label] = [measured(records[row.key]) for row in rows]
    return found


# Claims


class Part(NamedTuple):
    """One comparison of a claim.

    Attributes:
        text: what is compared.
        difference: the paired differences over seeds.
        verdict: on "this is more than nothing".
        stable: in how many leave-one-out intervals the reading is that of all seeds.
    """

    text: str
    difference: Interval
    verdict: str
    stable: int


class Claim(NamedTuple):
    """What a paper says, and its parts."""

    text: str
    parts: tuple[Part, ...]
    verdict: str


def read(difference: Interval) -> str:
    """Return how an interval reads by its ends alone."""
    if difference.low > 0:
        return HOLDS
    return FAILS if difference.high < MARGIN else OPEN


def judge(difference: Interval) -> str:
    """Return the reading, unless the end that decides lies near its limit."""
    found = read(difference)
    near = difference.low <= NEAR if found == HOLDS else difference.high > MARGIN - NEAR
    return OPEN if near else found


def leave_one_out(differences: Sequence[float]) -> int:
    """Return without how many single seeds the rest reads as all of them do."""
    whole = read(bound_over_seeds(differences))
    rests = [[*differences[:i], *differences[i + 1 :]] for i in range(len(differences))]
    return sum(bool(rest) and read(bound_over_seeds(rest)) == whole for rest in rests)


def widened(difference: Interval, tests: int) -> Interval:
    """Return a 95 % t interval over seeds at the level that allows for so many ``tests``, Bonferroni's."""
    if difference.n < 2:
        return difference
    one, all_ = (float(stats.t.ppf(1 - 0.025 / m, difference.n - 1)) for m in (1, tests))
    half = (difference.high - difference.mean) * all_ / one
    return difference._replace(low=difference.mean - half, high=difference.mean + half)


def reading(part: Part, tests: int) -> str:
    """Return the verdict on a part, its sensitivity to seeds, and what allowing for all ``tests`` makes of it."""
    adjusted = f"; of {tests}: {judge(widened(part.difference, tests))}" if part.verdict != OPEN else ""
    return f"*{part.verdict}* ({part.stable}/{part.difference.n}{adjusted})"


def together(verdicts: Sequence[str]) -> str:
    """Return the verdict on a claim of several parts."""
    if FAILS in verdicts:
        return FAILS
    return HOLDS if all(verdict == HOLDS for verdict in verdicts) else OPEN


def compare(rows: Mapping[str, Mapping[str, list[Measured]]], more: str, less: str, *pairs: tuple[str, str]) -> Part:
    """Compare ``more`` with ``less``, at pairs of points; seeds are paired."""
    differences = []
    for seed in range(len(next(iter(rows[more].values())))):
        values = [(rows[more][a][seed]["test"], rows[less][b][seed]["test"]) for a, b in pairs]
        if all(a is not None and b is not None for a, b in values):
            differences.append(statistics.fmean(a - b for a, b in values))
    difference = bound_over_seeds(differences) if differences else Interval(float("nan"), float("nan"), float("nan"), 0)
    text = f"{more} > {less}" if more != less else f"{more}, {pairs[0][0]} > {pairs[0][1]}"
    seeds = len(next(iter(rows[more].values())))
    stable = leave_one_out(differences)
    decided = len(differences) == seeds == stable
    return Part(text, difference, judge(difference) if decided else OPEN, stable)


def claims(name: str, rows: Mapping[str, Mapping[str, list[Measured]]]) -> Iterator[Claim]:
    """Yield the papers' claims that the experiment speaks to."""
    experiment = EXPERIMENTS[name]
    same = [(point, point) for point in experiment.points]

    def over(more: str, less: str) -> Part:
        return compare(rows, more, less, *same)

    def claim(text: str, *parts: Part, verdict: Callable[[Sequence[str]], str] = together) -> Claim:
        return Claim(text, parts, verdict([part.verdict for part in parts]))

    for flavour in FLAVOURS:
        if f"fedhssl-{flavour}" not in rows or "fedgssl-simsiam" not in rows:
            continue
        hssl, gssl, cssl, alone = (f"{one}-{flavour}" for one in ("fedhssl", "fedgssl", "fedcssl", "fedlocal"))
        links = ((hssl, gssl), (gssl, cssl), (cssl, alone), (alone, "fedsplitnn"))
        title = f"FedHSSL > FedGSSL > FedCSSL > FedLocalSSL > FedSplitNN ({flavour})"
        yield claim(title, *(over(*link) for link in links))
        yield claim(
            f"partial model aggregation helps only with guidance ({flavour})",
            over(hssl, gssl),
            over(f"{alone} + pma", alone),
            verdict=only_first,
        )
    if experiment.extra:
        most = next(point for point, settings in experiment.points.items() if settings == ("data.n_labeled=200",))
        for arm in experiment.some:
            few, more = experiment.extra
            steps = [compare(rows, arm, arm, pair) for pair in ((more, few), (most, more))]
            steps[1] = steps[1]._replace(text=f"{arm}, all aligned > {more}")
            yield claim(f"more aligned rows help {arm} (200 labels)", *steps)
    if name.startswith("few-aligned"):
        rivals = [arm for arm in experiment.arms if not arm.startswith("vflhlp")]
        yield claim("VFLHLP leads where few rows are aligned", *(over("vflhlp", rival) for rival in rivals))
        halves = (over("vflhlp", "vflhlp-p"), over("vflhlp", "vflhlp-a"))
        yield claim("both halves of VFLHLP contribute (without the constraint, without initialization)", *halves)
    if name.startswith("few-labels"):
        for point in experiment.points:
            part = compare(rows, "ss-vfl-i", "fedsplitnn", (point, point))
            share = mean_bytes(rows["ss-vfl-i"][point]) / mean_bytes(rows["fedsplitnn"][point])
            text = f"SS-VFL-I beats supervised VFL at {point} for a small part of the bytes ({share:.1%} here)"
            yield Claim(text, (part,), together([part.verdict, HOLDS if share < SMALL else FAILS]))
            yield claim(
                f"SS-VFL-C beats supervised VFL at {point}", compare(rows, "ss-vfl-c", "fedsplitnn", (point, point))
            )


def only_first(verdicts: Sequence[str]) -> str:
    """Return the verdict on "the first and not the second"."""
    first, second = verdicts
    opposite = {HOLDS: FAILS, FAILS: HOLDS, OPEN: OPEN}
    return together([first, opposite[second]])


def mean_bytes(records: Sequence[Measured]) -> float:
    """Return the mean number of bytes that training said."""
    return statistics.fmean(record["bytes"] for record in records)


def losses(rows: Mapping[str, Mapping[str, list[Measured]]]) -> Iterator[str]:
    """Yield where FedSplitNN is better than a method that pre-trains, by the rules of claims."""
    for arm, points in rows.items():
        if arm in (*SUPERVISED, "fedcvt"):
            continue
        for point in points:
            pair = (point, point)
            if point in rows["fedsplitnn"] and compare(rows, "fedsplitnn", arm, pair).verdict == HOLDS:
                yield f"{arm} at {point}: {_signed(compare(rows, arm, 'fedsplitnn', pair).difference)}"


# The page


def page(found: Found, seeds: int) -> str:
    """Return the page, in Markdown."""
    lines = [
        "# Methods side by side",
        "",
        f"Made by `python benchmarks/methods.py --write`; {seeds} seeds, ± is half a 95 % t interval. The rules of",
        "tuning and of judging are at the head of that file. `local` has one party's columns, `lr` and `lightgbm` have",
        "all columns in one place and no adversary. Utility only: what leaks is the business of `vflsec eval`.",
        "",
        "None of these datasets is one that the papers used, and networks are small: a claim that does not hold here",
        "may hold there. Across parties SimSiam and BYOL have one loss in the released code, so that `fedcssl-byol` is",
        "`fedcssl-simsiam`.",
        "",
        "## Claims",
        "",
    ]
    judged = [(name, one) for name, rows in found.items() for one in claims(name, rows)]
    tests = sum(len(one.parts) for _, one in judged)
    lines += [*RULES, f"{tests} comparisons are made.", "", "| claim | data | verdict | parts |", "|---|---|---|---|"]
    for name, one in judged:
        parts = "; ".join(f"{part.text} {_signed(part.difference)} {reading(part, tests)}" for part in one.parts)
        lines.append(f"| {one.text} | {name} | **{one.verdict}** | {parts} |")
    for name, rows in found.items():
        experiment = EXPERIMENTS[name]
        columns = list(dict.fromkeys(point for points in rows.values() for point in points))
        lines += ["", f"## {name}", "", experiment.about, "", f"| method | {' | '.join(columns)} | MB | status |"]
        lines.append(f"|{'---|' * (len(columns) + 3)}")
        last = list(experiment.points)[-1]
        for arm, points in rows.items():
            cells = [_plain(points[point]) if point in points else "" for point in columns]
            status = _status([record for records in points.values() for record in records])
            lines.append(f"| {arm} | {' | '.join(cells)} | {mean_bytes(points[last]) / 1e6:.1f} | {status} |")
        lines += ["", f"MB: said in training, at {last}.", ""]
        worse = list(losses(rows))
        lines.append("Where pre-training loses against FedSplitNN, by the same rules:" + ("" if worse else " nowhere."))
        lines += [f"* {one}" for one in worse]
    return "\n".join(lines) + "\n"


def _plain(records: Sequence[Measured]) -> str:
    values = [record["test"] for record in records if record["test"] is not None]
    if not values:
        return "–"
    interval = bound_over_seeds(values)
    lost = "" if len(values) == len(records) else f" ({len(values)}/{len(records)})"
    return f"{interval.mean:.3f} ±{interval.high - interval.mean:.3f}{lost}"


def _signed(interval: Interval) -> str:
    return f"{interval.mean:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"


def _status(records: Sequence[Measured]) -> str:
    """Return what went wrong, and how often; ``ok`` if nothing did."""
    wrong = [record["status"] for record in records if record["status"] != "ok"]
    return ", ".join(f"{wrong.count(one)}/{len(records)} {one}" for one in dict.fromkeys(wrong)) or "ok"


@click.command()
@click.option("--only", type=click.Choice(list(EXPERIMENTS)), multiple=True, help="One experiment; repeat for several.")
@click.option("--seeds", default=SEEDS, show_default=True, type=click.IntRange(2))
@click.option("--jobs", default=os.cpu_count(), show_default="the number of cores")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/methods"), show_default=True)
@click.option("--write", is_flag=True, help="Write the page to benchmarks/methods.md.")
def main(only: tuple[str, ...], seeds: int, jobs: int, out: Path, write: bool) -> None:
    """Compute what is missing, print the page."""
    text = page(compute(only or tuple(EXPERIMENTS), seeds, out, jobs), seeds)
    if write:
        PAGE.write_text(text, encoding="utf-8")
    click.echo(text)


if __name__ == "__main__":
    main()
