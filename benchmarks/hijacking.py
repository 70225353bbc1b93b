"""What an active party gains that trains another party's model to give its columns away, and whether that is noticed.

    python benchmarks/hijacking.py            compute, some minutes on two cores, and print the page
    python benchmarks/hijacking.py --write    write docs/hijacking.md as well

What is computed is kept in ``runs/hijacking``, so that an interrupted run goes on.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click

import vflsec
from vflsec.core.message import Kind, Transcript
from vflsec.inference.hijacking import find_alarm
from vflsec.run.federation import build_federation, build_method
from vflsec.run.plan import list_trials
from vflsec.run.spec import read

PAGE = Path(__file__).parents[1] / "docs" / "hijacking.md"
FOLDER = Path("runs/hijacking")
DATASETS = ("credit-default", "digits")
ATTACKS = (
    "column-fusion", "fsha", "steering", "steering:aim=novel", "steering:quiet=true", "steering:aim=novel,quiet=true",
)  # fmt: skip
"""The first follows the protocol."""

SEEDS, HONEST = 3, 100
"""Trainings of each attack, and honest ones of each data set in which an alarm would be false."""


def evaluate(dataset: str, attack: str, jobs: int) -> vflsec.Report:
    """Return the report on what an attack recovers of the columns."""
    return vflsec.evaluate(
        attack=[attack], adversary="active", dataset=dataset, seeds=SEEDS, jobs=jobs,
        out=FOLDER / f"{dataset}-{ATTACKS.index(attack)}",
    )  # fmt: skip


def count_false_alarms(dataset: str) -> int:
    """Return in how many honest trainings the passive party raises an alarm."""
    settings = {"dataset": dataset, "seeds": HONEST}
    trials, alarms = list_trials(read({**settings, "attacks": [{"name": ATTACKS[0]}], "adversary": "active"})), 0
    for cell in {trial.cell.key: trial.cell for trial in trials}.values():
        federation = build_federation(cell, "cpu")
        transcript = Transcript(frozenset({"passive_1"}), frozenset({Kind.GRADIENT}))
        federation.channel.taps.append(transcript)
        build_method(cell).fit(federation)
        sent = [m for m in transcript.messages if m.split == "train"]
        rows = [m.rows for m in sent if m.rows is not None]
        alarms += find_alarm([m.payload["value"] for m in sent], rows, federation.n_classes - 1)[0] is not None
    return alarms


def list_rows(dataset: str, jobs: int) -> Iterable[str]:
    """Yield the lines of a data set's table."""
    for attack in ATTACKS:
        report = evaluate(dataset, attack, jobs)
        leak, utility = report.worst[0].leak, report.worst[0].utility
        assert leak.mean is not None
        assert leak.alone is not None
        assert utility.mean is not None
        name = f"`{attack}`" + (", honest" if attack == ATTACKS[0] else "")
        yield (
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


def name_strongest(dataset: str, jobs: int) -> str:
    """Return which attack recovers most, and which of those that raise no alarm, beside honest reading."""
    means, quiet = {}, []
    for attack in ATTACKS:
        report = evaluate(dataset, attack, jobs)
        means[attack] = report.worst[0].leak.mean or 0.0
        quiet += [attack] * describe_alarm(report).startswith("none")
    honest, *others = ATTACKS
    strongest, unnoticed = (max(names, key=means.__getitem__) for names in (others, quiet))
    beside = f", and `{unnoticed}` most without an alarm ({means[unnoticed]:.3f})"
    return (
        f"On `{dataset}`, `{strongest}` recovers most ({means[strongest]:.3f})"
        f"{', without an alarm' if strongest == unnoticed else beside}; an honest active party recovers "
        f"{means[honest]:.3f}."
    )


def write_page(jobs: int) -> str:
    """Return the page."""
    rows = [row for dataset in DATASETS for row in list_rows(dataset, jobs)]
    alarms = {dataset: count_false_alarms(dataset) for dataset in DATASETS}
    parts = [
        "# An active party that cheats",
        "Written by `python benchmarks/hijacking.py --write`.",
        "The active party sends gradients, so it can try to train another party's bottom model to give columns away. "
        "`fsha` replaces the gradients by its own, and does not need to know which row an embedding belongs to. "
        "`steering` keeps the honest gradients and adds to them: for the rows whose columns it knows, what makes their "
        "embeddings easier to decode; or with `aim=novel`, for all rows, what moves embeddings away from what those of "
        "earlier epochs predict, so that every epoch adds something. It then reads all embeddings with "
        "`column-fusion`, which an honest active party can do as well.",
        "```text\nvflsec eval --adversary active --attack column-fusion,fsha,steering,steering:aim=novel\n```",
        f"Split learning between two parties; the active one knows the columns of 80 rows. {SEEDS} seeds; ± is a 95 % "
        "interval. *Recovered* is R2 of the columns, on training or test rows, whichever is higher; *alone* is what "
        "the active party infers without joining, on the same rows, so that it can differ between attacks; *utility* "
        "is that of the joint model under attack. *Alarm* is the batch in which the passive party notices, the "
        "median of the seeds in which it does.",
        "| data | attack | recovered | alone | utility | alarm |\n|---|---|---|---|---|---|\n" + "\n".join(rows),
        " ".join(name_strongest(dataset, jobs) for dataset in DATASETS),
        "## Can the passive party notice?",
        "It has no labels. Suppose that it knows the number of classes C and that the head is linear. The gradients of "
        "an honest batch then have a rank of at most C - 1. With two classes they lie on one line, and two rows that "
        "point the same way in one batch do so in every later one. An alarm is the first batch that contradicts this "
        "(`vflsec.inference.hijacking`); `--details` has it under *budget*. Nothing is said of batches whose gradients "
        "are a thousand times shorter than the longest before, where rounding decides: these are counted.",
        f"In {HONEST} honest trainings of each data set, as long as those under attack, there were "
        + " and ".join(f"{n} false alarms on `{dataset}`" for dataset, n in alarms.items())
        + ".",
        "`quiet=true` is made to pass this check, so that no alarm is no proof of honesty. The check says nothing "
        "where embeddings are no wider than C - 1, where the head is not linear, or where the active party has a "
        "defense. Published detectors (SplitGuard, gradient scrutiny) need labels, which a passive party lacks.",
    ]
    return "\n\n".join(parts) + "\n"


@click.command()
@click.option("--jobs", default=1, show_default=True)
@click.option("--write", is_flag=True, help="Write the page to docs/hijacking.md.")
def main(jobs: int, write: bool) -> None:
    """Compute and print the page."""
    page = write_page(jobs)
    if write:
        PAGE.write_text(page, encoding="utf-8")
    click.echo(page)


if __name__ == "__main__":
    main()
