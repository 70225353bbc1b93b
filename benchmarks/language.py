"""What hidden states of a split language model tell of the text, by noise and by the depth of the cut.

    python benchmarks/language.py            compute, some minutes on two cores, and print the page
    python benchmarks/language.py --write    write docs/language.md as well

What is computed is kept in ``runs/language``, so that an interrupted run goes on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click

import vflsec

PAGE = Path(__file__).parents[1] / "docs" / "language.md"
FOLDER = Path("runs/language")
CUTS, NOISE = (1,), (1, 2, 8)
KNOWN, SEEDS = 200, 1


def evaluate(cut: int, seeds: int, jobs: int) -> vflsec.Report:
    """Return the report on the text, at one depth of the cut."""
    return vflsec.evaluate(
        attack="text-inversion", adversary="active", dataset="census-text", methods=["split-lm"],
        method={"split-lm": {"cut": cut}}, defense="iso@embedding", strengths=NOISE, aux={"n": KNOWN},
        seeds=seeds, jobs=jobs, out=FOLDER / f"cut-{cut}",
    )  # fmt: skip


def list_rows(seeds: int, jobs: int) -> Iterator[str]:
    """Yield the lines of the table."""
    for cut in CUTS:
        for point in evaluate(cut, seeds, jobs).points:
            for rows, leak in (("training", point.leak_train), ("test", point.leak)):
                shares = (leak.mean, leak.alone, leak.others["gained"], leak.others["exact"])
                cells = " | ".join(f"{100 * (share or 0.0):.1f} %" for share in shares)
                yield f"| {cut} | {point.strength:g} | {rows} | {cells} | {point.utility.mean or 0.0:.3f} |"


@click.command()
@click.option("--seeds", default=SEEDS, help="Trainings of each row.")
@click.option("--jobs", default=2, help="Processes.")
@click.option("--write", is_flag=True, help="Write the table to docs/language.md.")
def main(seeds: int, jobs: int, write: bool) -> None:
    """Compute and print the table."""
    table = "\n".join(
        [
            "| cut after block | noise λ | texts | words | *alone* | gained | whole texts | utility (AUC) |",
            "|---|---|---|---|---|---|---|---|",
            *list_rows(seeds, jobs),
        ]
    )
    print(table)
    if write:
        page = PAGE.read_text("utf-8")
        page, places = re.subn(r"(<!-- table: .*? -->\n).*?(<!-- /table -->)", rf"\1{table}\n\2", page, flags=re.DOTALL)
        assert places == 1, "the page has one table"
        PAGE.write_text(page, "utf-8")


if __name__ == "__main__":
    main()
