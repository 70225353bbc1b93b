"""How often the triggers of a malicious passive party open, and what defenses leave of them.

    python benchmarks/backdoors.py            compute, some minutes on two cores, and print the table
    python benchmarks/backdoors.py --write    write it into docs/threat_models.md as well

What is computed is kept in ``runs/backdoors``, so that an interrupted run goes on.
"""

from __future__ import annotations

from pathlib import Path

import click
from hijacking import IMAGES, load
from pages import replace_table

import vflsec

PAGE = Path(__file__).parents[1] / "docs" / "threat_models.md"
ATTACKS, SEEDS = ["backdoor", "villain", "villain:beta=0.4"], 3
DATASETS = "digits", "multiple-features", "credit-default", "flights", IMAGES
FOLDER = Path("runs/backdoors")


def make_table(jobs: int) -> str:
    """Return the table."""
    lines = ["| data | defense | attack | success | on the honest model | utility lost |", "|---|---|---|---|---|---|"]
    for dataset in DATASETS:
        report = vflsec.evaluate(
            attack=ATTACKS,
            defense="iso",
            strengths=[5],
            dataset=load(dataset),
            seeds=SEEDS,
            jobs=jobs,
            out=FOLDER / dataset,
        )
        for damage in report.summary.integrity:
            success, lost = damage.success, damage.lost
            assert success is not None
            defense = f"`{damage.defense}`, {damage.strength:g}" if damage.strength else "none"
            low, high = success.ci95
            lines.append(
                f"| `{dataset}` | {defense} | `{damage.attack}` | {success.mean:.3f} ({low:.3f} to {high:.3f}) "
                f"| {damage.chance:.3f} | {lost.mean:z.3f} ±{lost.ci95[1] - lost.mean:.3f} |"
            )
    return "\n".join(lines)


@click.command()
@click.option("--jobs", default=1, show_default=True)
@click.option("--write", is_flag=True, help="Write the table into docs/threat_models.md.")
def main(jobs: int, write: bool) -> None:
    """Compute and print the table."""
    table = make_table(jobs)
    if write:
        replace_table(PAGE, "backdoors", table)
    click.echo(table)


if __name__ == "__main__":
    main()
