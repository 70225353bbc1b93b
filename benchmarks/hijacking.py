"""What an active party gains that trains another party's model to give its columns away, and whether that is noticed.

    python benchmarks/hijacking.py                  compute, some minutes on two cores, and print the page
    python benchmarks/hijacking.py --write          write docs/hijacking.md as well
    python benchmarks/hijacking.py --only digits    measure this data set, and keep what the page says of others
    python benchmarks/hijacking.py --only digits --attack urvfl    measure this row alone

What is computed is kept in ``runs/hijacking``, so that an interrupted run goes on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import click
import pandas as pd

import vflsec
from vflsec.core.message import Kind, Transcript
from vflsec.data.dataset import PartyTable, VerticalDataset
from vflsec.inference.hijacking import find_alarm
from vflsec.run.federation import build_federation, build_method
from vflsec.run.plan import list_trials, load_dataset
from vflsec.run.spec import read

PAGE = Path(__file__).parents[1] / "docs" / "hijacking.md"
FOLDER = Path("runs/hijacking")
HONEST = "column-fusion"
IMITATE = ("sdar", "pcat")
"""They follow the protocol as well, and read embeddings by a model that imitates the passive party's."""

ATTACKS = (
    HONEST, *IMITATE, "fsha", "urvfl", "steering", "steering:aim=novel", "steering:quiet=true",
    "steering:aim=novel,quiet=true",
)  # fmt: skip


class Job(NamedTuple):
    """What is measured on a data set.

    Attributes:
        attacks: those with a row.
        honest: trainings in which an alarm would be false.
    """

    attacks: tuple[str, ...] = ATTACKS
    honest: int = 100


IMAGES = "fashion-mnist"
JOBS = {"credit-default": Job(), "digits": Job(), IMAGES: Job(honest=20)}
SEEDS = 3
TRAIN_ROWS, TEST_ROWS = 1000, 500
"""Images of Fashion-MNIST: the forests of ``column-fusion`` grow with rows and columns."""

Rows = dict[tuple[str, str], str]
"""Lines of the table, by data set and attack."""


def load(dataset: str) -> str | VerticalDataset:
    """Return what to evaluate: a name, or a sample of Fashion-MNIST whose pixels are means of eight."""
    if dataset != IMAGES:
        return dataset
    whole = load_dataset(dataset, rows=TRAIN_ROWS)
    assert whole.test_ids is not None
    tested = whole.test_ids[:TEST_ROWS]
    kept = whole.labels.index.difference(whole.test_ids).append(tested)

    def shrink(table: PartyTable) -> PartyTable:
        frame = table.frame[table.frame.index.isin(kept)]
        means = frame.to_numpy().reshape(-1, 7, 4, 7, 2).mean(axis=(2, 4)).reshape(len(frame), -1)
        return replace(table, frame=pd.DataFrame(means, frame.index).add_prefix("pixel_"), image=(1, 7, 7))

    return replace(whole, parties=tuple(map(shrink, whole.parties)), labels=whole.labels[kept], test_ids=tested)


def evaluate(dataset: str, attack: str, jobs: int) -> vflsec.Report:
    """Return the report on what an attack recovers of the columns."""
    folder = FOLDER / re.sub(r"\W+", "-", f"{dataset} {attack}")
    return vflsec.evaluate(
        attack=[attack], adversary="active", dataset=load(dataset), seeds=SEEDS, jobs=jobs, out=folder
    )


def count_false_alarms(dataset: str) -> int:
    """Return in how many honest trainings the passive party raises an alarm."""
    settings = {"dataset": load(dataset), "seeds": JOBS[dataset].honest}
    trials, alarms = list_trials(read({**settings, "attacks": [{"name": HONEST}], "adversary": "active"})), 0
    for cell in {trial.cell.key: trial.cell for trial in trials}.values():
        federation = build_federation(cell, "cpu")
        transcript = Transcript(frozenset({"passive_1"}), frozenset({Kind.GRADIENT}))
        federation.channel.taps.append(transcript)
        build_method(cell).fit(federation)
        sent = [m for m in transcript.messages if m.split == "train"]
        rows = [m.rows for m in sent if m.rows is not None]
        alarms += find_alarm([m.payload["value"] for m in sent], rows, federation.n_classes - 1)[0] is not None
    return alarms


def make_row(dataset: str, attack: str, jobs: int) -> str:
    """Return a line of the table."""
    report = evaluate(dataset, attack, jobs)
    leak, utility = report.worst[0].leak, report.worst[0].utility
    assert leak.mean is not None
    assert leak.alone is not None
    assert utility.mean is not None
    name = f"`{attack}`" + (", honest" if attack in (HONEST, *IMITATE) else "")
    return (
        f"| `{dataset}` | {name} | {leak.mean:.3f} ±{leak.upper - leak.mean:.3f} | {leak.alone:.3f} | "
        f"{utility.mean:.3f} | {describe_alarm(report)} |"
    )


def describe_alarm(report: vflsec.Report) -> str:
    """Return in how many of the seeds there was an alarm, and its batch in the median."""
    budget = report.points[0].budget
    seeds = budget.get("seeds with an alarm", 0) + budget.get("seeds without", 0)
    if not seeds:
        return "–"
    if not budget["seeds with an alarm"]:
        return f"none in {budget['batches without an alarm']:.0f} batches, {seeds:g} of {seeds:g} seeds"
    batch = budget["batches to an alarm"]
    return f"in batch {batch:g}, {budget['seeds with an alarm']:g} of {seeds:g} seeds"


def name_strongest(dataset: str, rows: Rows) -> str:
    """Return which attack recovers most, and which of those that raise no alarm, beside honest reading."""
    lines = {attack: line for (of, attack), line in rows.items() if of == dataset}
    means = {a: float(line.split("|")[3].split("±")[0]) for a, line in lines.items() if a not in IMITATE}
    honest = means.pop(HONEST)
    quiet = [attack for attack in means if "| none in" in lines[attack]]
    strongest, unnoticed = max(means, key=means.__getitem__), max(quiet, key=means.__getitem__, default=None)
    beside = f", and `{unnoticed}` most without an alarm ({means[unnoticed]:.3f})" if unnoticed else ", with an alarm"
    return (
        f"On `{dataset}`, `{strongest}` recovers most ({means[strongest]:.3f})"
        f"{', without an alarm' if strongest == unnoticed else beside}; an honest active party recovers {honest:.3f}."
    )


def judge_urvfl(rows: Rows) -> str:
    """Return whether the passive party notices the attack that its authors call undetectable."""
    lines = {dataset: line for (dataset, attack), line in rows.items() if attack == "urvfl"}
    missed = [f"`{dataset}`" for dataset, line in lines.items() if "| in batch" not in line]
    return (
        "`urvfl` is published as undetectable: by SplitGuard and gradient scrutiny, since its gradients depend on "
        "labels, as honest ones do. "
        + (
            f"This check does not notice it on {', '.join(missed)} either."
            if missed
            else "The claim does not hold against this check, which notices it on all data above: gradients through a "
            "discriminator with hidden layers have a higher rank than C - 1."
        )
    )


def read_page() -> tuple[Rows, dict[str, tuple[int, int]]]:
    """Return the lines of the page's table, and by data set how many of how many alarms were false."""
    page = PAGE.read_text("utf-8")
    rows = {(match[1], match[2]): match[0] for match in re.finditer(r"(?m)^\| `([^`]+)` \| `([^`]+)`.*$", page)}
    return rows, {name: (int(k), int(n)) for k, n, name in re.findall(r"(\d+) of (\d+) on `([^`]+)`", page)}


def compute(only: Sequence[str], attacks: Sequence[str], jobs: int) -> tuple[Rows, dict[str, tuple[int, int]]]:
    """Return all lines and false alarms: those of the page where they are not to be measured."""
    rows, alarms = read_page()
    for dataset in only or JOBS:
        wanted = [attack for attack in JOBS[dataset].attacks if attack in (attacks or ATTACKS)]
        rows |= {(dataset, attack): make_row(dataset, attack, jobs) for attack in wanted}
        if not attacks or dataset not in alarms:
            alarms[dataset] = count_false_alarms(dataset), JOBS[dataset].honest
    order = [(dataset, attack) for dataset, job in JOBS.items() for attack in job.attacks]
    return {key: rows[key] for key in order if key in rows}, {name: alarms[name] for name in JOBS if name in alarms}


def write_page(rows: Rows, alarms: dict[str, tuple[int, int]]) -> str:
    """Return the page."""
    measured = list(dict.fromkeys(dataset for dataset, _ in rows))
    parts = [
        "# An active party that cheats",
        "Written by `python benchmarks/hijacking.py --write`.",
        "The active party sends gradients, so it can try to train another party's bottom model to give columns away. "
        "`fsha` replaces the gradients by its own, and does not need to know which row an embedding belongs to; "
        "`urvfl` does the same class by class. "
        "`steering` keeps the honest gradients and adds to them: for the rows whose columns it knows, what makes their "
        "embeddings easier to decode; or with `aim=novel`, for all rows, what moves embeddings away from what those of "
        "earlier epochs predict, so that every epoch adds something. It then reads all embeddings with "
        "`column-fusion`, which an honest active party can do as well. `sdar` and `pcat` are honest, too: they imitate "
        "the passive party's model, and do not use which embedding belongs to which known row.",
        "```text\nvflsec eval --adversary active --attack column-fusion,fsha,urvfl,steering,steering:aim=novel\n```",
        f"Split learning between two parties; the active one knows the columns of 80 rows. {SEEDS} seeds; ± is a 95 % "
        "interval. *Recovered* is R2 of the columns, on training or test rows, whichever is higher, and that of "
        "*alone* where this is higher still; *alone* is what "
        "the active party infers without joining, on the same rows, so that it can differ between attacks; *utility* "
        "is that of the joint model under attack. *Alarm* is the batch in which the passive party notices, the "
        f"median of the seeds in which it does. Of `{IMAGES}` there are {TRAIN_ROWS} training and {TEST_ROWS} test "
        "images, whose pixels are means of eight; each party has one half. The defaults of `urvfl` "
        "were chosen on seeds of `digits` and `credit-default` in this table: its figures there may be too high.",
        "| data | attack | recovered | alone | utility | alarm |\n|---|---|---|---|---|---|\n"
        + "\n".join(rows.values()),
        " ".join(name_strongest(dataset, rows) for dataset in measured),
        "## Can the passive party notice?",
        "It has no labels. Suppose that it knows the number of classes C and that the head is linear. The gradients of "
        "an honest batch then have a rank of at most C - 1. With two classes they lie on one line, and two rows that "
        "point the same way in one batch do so in every later one. An alarm is the first batch that contradicts this "
        "(`vflsec.inference.hijacking`); `--details` has it under *budget*. Nothing is said of batches whose gradients "
        "are a thousand times shorter than the longest before, where rounding decides: these are counted.",
        "False alarms in honest trainings, as long as those under attack: "
        + ", ".join(f"{k} of {n} on `{dataset}`" for dataset, (k, n) in alarms.items())
        + ".",
        judge_urvfl(rows),
        "`quiet=true` is made to pass this check, so that no alarm is no proof of honesty. The check says nothing "
        "where embeddings are no wider than C - 1, where the head is not linear, or where the active party has a "
        "defense. Published detectors (SplitGuard, gradient scrutiny) need labels, which a passive party lacks.",
    ]
    return "\n\n".join(parts) + "\n"


@click.command()
@click.option("--jobs", default=1, show_default=True)
@click.option("--only", multiple=True, type=click.Choice(list(JOBS)), help="A data set to measure; others are kept.")
@click.option("--attack", "attacks", multiple=True, type=click.Choice(ATTACKS), help="A row to measure; likewise.")
@click.option("--write", is_flag=True, help="Write the page to docs/hijacking.md.")
def main(jobs: int, only: tuple[str, ...], attacks: tuple[str, ...], write: bool) -> None:
    """Compute and print the page."""
    page = write_page(*compute(only, attacks, jobs))
    if write:
        PAGE.write_text(page, encoding="utf-8")
    click.echo(page)


if __name__ == "__main__":
    main()
