"""What a split language model tells: states of the text, by noise and by the depth of the cut; gradients of labels.

    python benchmarks/language.py                      compute, about an hour on two cores, and print
    python benchmarks/language.py --write              write docs/language.md as well
    python benchmarks/language.py --cut 1 --cut 2 --cut 3    also the third cut
    python benchmarks/language.py --only labels        one of the tables, text or labels

What is computed is kept in ``runs/language``, so that an interrupted run goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import click
from pages import replace_table

import vflsec

PAGE = Path(__file__).parents[1] / "docs" / "language.md"
FOLDER = Path("runs/language")
CUTS, BLOCKS = (1, 2), 4
ON_TEXT = ("iso:lambda=2,8@embedding", "santext:epsilon=16,8", "custext:epsilon=8,4", "snd:epsilon=64,32")
DEEPER = ("iso:lambda=2@embedding", "santext:epsilon=16")
"""Defenses of the text with their strengths, after the first block and after later ones."""

KNOWN, SEEDS = 200, 3
AGAINST_LABELS = ("gaussian-dp", "santext:epsilon=16,8", "snd:epsilon=64")
"""Defenses of labels, and those of the text, under which the same is measured."""

ON_LABELS = ("direction", "exploit", "fusion", "mc")
"""Attacks of the party with the text: on gradients of rows, on all it has, and on its model alone."""


BY_WORDS = ("custext", "santext", "snd")


def name_defense(name: str, strength: float) -> str:
    """Return a defense with its strength in the symbol that is usual for it."""
    if not strength:
        return "none"
    value = f"ε = {1 / strength:g}" if name in BY_WORDS else f"{'σ' if name == 'gaussian-dp' else 'λ'} = {strength:g}"
    return f"`{name}`, {value}"


def evaluate(cut: int, seeds: int, jobs: int) -> vflsec.Report:
    """Return the report on the text, at one depth of the cut."""
    return vflsec.evaluate(
        attack="text-inversion", adversary="active", dataset="census-text", methods=["split-lm"],
        method={"split-lm": {"cut": cut, "blocks": BLOCKS}}, defense=list(ON_TEXT if cut == 1 else DEEPER),
        aux={"n": KNOWN}, seeds=seeds, jobs=jobs, out=FOLDER / f"cut-{cut}",
    )  # fmt: skip


def list_texts(cuts: Sequence[int], seeds: int, jobs: int) -> Iterator[str]:
    """Yield the lines of the table of recovered text."""
    yield "| cut after block | defense | texts | words | *alone* | gained | whole texts | utility (AUC) |"
    yield "|---|---|---|---|---|---|---|---|"
    for cut in cuts:
        for point in evaluate(cut, seeds, jobs).points:
            if not point.strength and point.defense in BY_WORDS:
                continue  # without a defense, once
            defense = name_defense(point.defense.partition("@")[0], point.strength)
            for rows, leak in (("training", point.leak_train), ("test", point.leak)):
                shares = (leak.mean, leak.alone, leak.others["gained"], leak.others["exact"])
                cells = " | ".join(f"{100 * (share or 0.0):.1f} %" for share in shares)
                yield f"| {cut} | {defense} | {rows} | {cells} | {point.utility.mean or 0.0:.3f} |"


def list_labels(_cuts: Sequence[int], seeds: int, jobs: int) -> Iterator[str]:
    """Yield the lines of the table of inferred labels; the cut is the usual one."""
    report = vflsec.evaluate(
        attack=list(ON_LABELS), dataset="census-text", methods=["split-lm"], defense=list(AGAINST_LABELS),
        seeds=seeds, jobs=jobs, out=FOLDER / "labels",
    )  # fmt: skip
    yield (
        "| defense | ε of a row | attack | training texts | test texts | *alone*, training | *alone*, test "
        "| utility (AUC) |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for point in report.points:
        defense, by_words = point.defense.partition("@")[0], point.defense in BY_WORDS
        if point.attack in ON_LABELS and (point.strength or not by_words):  # without a defense, once
            leaks = [point.leak_train, point.leak if point.leak.rows == "test" else None]
            shares = [*(leak and leak.mean for leak in leaks), *(leak and leak.alone for leak in leaks)]
            cells = " | ".join("–" if share is None else f"{share:.3f}" for share in shares)
            epsilon = f"{max(spent['epsilon'] for spent in point.spent):.3g}" if point.spent and not by_words else "∞"
            shown = name_defense(defense, point.strength)
            yield f"| {shown} | {epsilon} | `{point.attack}` | {cells} | {point.utility.mean or 0.0:.3f} |"


TABLES = {"text": list_texts, "labels": list_labels}


@click.command()
@click.option("--cut", "cuts", type=int, multiple=True, default=CUTS, help="After which block; may repeat.")
@click.option("--seeds", default=SEEDS, help="Trainings of each row.")
@click.option("--jobs", default=2, help="Processes.")
@click.option("--only", type=click.Choice(list(TABLES)), multiple=True, default=list(TABLES), help="May repeat.")
@click.option("--write", is_flag=True, help="Write the tables to docs/language.md.")
def main(cuts: tuple[int, ...], seeds: int, jobs: int, only: tuple[str, ...], write: bool) -> None:
    """Compute and print the tables."""
    for name in only:
        table = "\n".join(TABLES[name](cuts, seeds, jobs))
        print(table)
        if write:
            replace_table(PAGE, f"table of {name}", table)


if __name__ == "__main__":
    main()
