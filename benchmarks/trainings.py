"""What an adversary infers of labels under ``label-dp`` from several trainings on the same rows, and their epsilon.

    python benchmarks/trainings.py            compute, about ten minutes on one core, and print the table
    python benchmarks/trainings.py --write    write it into docs/sweeps.md as well

What is computed is kept in ``runs/trainings``, so that an interrupted run goes on.
"""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np
from pages import replace_table

import vflsec

PAGE = Path(__file__).parents[1] / "docs" / "sweeps.md"
TRAININGS, EPSILON, SEEDS = (1, 4, 16), 2.0, 3
FOLDER = Path("runs/trainings")


def count_votes(trainings: int, epsilon: float) -> float:
    """Return the AUC of the number of ones among independent randomized answers about labels 0 and 1."""
    kept = np.exp(epsilon) / (1 + np.exp(epsilon))
    ones = np.array([1.0])
    for _ in range(trainings):
        ones = np.convolve(ones, [1 - kept, kept])
    zeros = ones[::-1]
    return float(sum(p * (zeros[:k].sum() + zeros[k] / 2) for k, p in enumerate(ones)))


def make_table() -> str:
    """Return the table of the command on the page."""
    report = vflsec.sweep(
        {"trainings": TRAININGS}, attack="direction", defense="label-dp", epsilons=[EPSILON], seeds=SEEDS, out=FOLDER
    )
    lines = ["| trainings | epsilon | AUC | counting answers | alone |", "|---|---|---|---|---|"]
    for trainings, part in zip(TRAININGS, report.reports, strict=True):
        (point,) = [point for point in part.worst if point.strength]
        (epsilon,) = {spent["epsilon"] for spent in point.spent}
        leak = point.leak
        assert leak.mean is not None
        assert leak.alone is not None
        lines.append(
            f"| {trainings} | {epsilon:g} | {leak.mean:.3f} ±{leak.upper - leak.mean:.3f} "
            f"| {count_votes(trainings, EPSILON):.3f} | {leak.alone:.3f} |"
        )
    return "\n".join(lines)


@click.command()
@click.option("--write", is_flag=True, help="Write the table into docs/sweeps.md.")
def main(write: bool) -> None:
    """Compute and print the table."""
    table = make_table()
    if write:
        replace_table(PAGE, "trainings", table)
    click.echo(table)


if __name__ == "__main__":
    main()
