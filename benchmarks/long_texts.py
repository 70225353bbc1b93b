"""Peak memory and CPU seconds of the audit of a transcript of long texts, by rows and words.

    python benchmarks/long_texts.py            compute, about ten minutes of one core, and print the table
    python benchmarks/long_texts.py --write    write docs/language.md as well

Each audit runs in a process of its own. The states of a word are a random vector that stands for it, with noise, so
that the right answer is known.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import numpy as np
from pages import replace_table

import vflsec
from vflsec.audit.transcript import TranscriptWriter
from vflsec.audit.transcript_lines import Sent, TranscriptHeader

PAGE = Path(__file__).parents[1] / "docs" / "language.md"
SIZES = ((2_500, 64), (5_000, 64), (10_000, 32), (10_000, 64))
WIDTH, WORDS, KNOWN, BATCH = 64, 500, 100, 500


def make(folder: Path, rows: int, length: int) -> None:
    """Write texts, labels and the transcript of a release of each text: four fifths are training rows."""
    rng = np.random.default_rng(0)
    words = rng.zipf(1.3, size=(rows, length)) % WORDS
    words = np.where(np.arange(length) < rng.integers(length // 2, length + 1, size=(rows, 1)), words, -1)
    lines = [f"{k},{' '.join(f'w{word}' for word in row if word >= 0)}" for k, row in enumerate(words)]
    (folder / "notes.csv").write_text("\n".join(["id,note", *lines]))
    columns = rng.normal(size=(rows, 3))  # which say nothing, and are read all the same
    (folder / "bank.csv").write_text(
        "\n".join(["id,late,x,y,z", *(f"{k},{k % 2},{x},{y},{z}" for k, (x, y, z) in enumerate(columns))])
    )
    (folder / "notes.toml").write_text(
        'label = "late"\nid = "id"\n[parties.bank]\nfile = "bank.csv"\n'
        f'[parties.clinic]\nfile = "notes.csv"\ntext = "note"\nmax_words = {length}\n'
    )
    vectors = rng.normal(size=(WORDS + 1, WIDTH)).astype(np.float32)
    vectors[-1] = 0  # of padding
    header = TranscriptHeader(observer="bank", parties={"bank": "active", "clinic": "passive"})
    writer = TranscriptWriter(folder / "sent", header)
    for step, batch in enumerate(np.split(np.arange(rows), range(BATCH, rows, BATCH))):
        states = vectors[words[batch]] + 0.1 * rng.normal(size=(len(batch), length, WIDTH)).astype(np.float32)
        states[words[batch] < 0] = 0
        place = ("train", "train") if step * BATCH < 0.8 * rows else ("predict", "test")
        writer.write([Sent("embedding", "clinic", "bank", *place, step, batch, states.reshape(len(batch), -1))])


def measure(rows: int, length: int) -> str:
    """Return the line of an audit in this process."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([sys.executable, __file__, "--make", name, f"{rows}x{length}"], check=True)  # noqa: S603
        began = time.process_time()
        report = vflsec.audit_system(
            folder / "sent", str(folder / "notes.toml"), attack="text-inversion", aux={"n": KNOWN},
            draws=1, out=folder / "out", progress=False,
        )  # fmt: skip
        seconds = time.process_time() - began
    leak = report.points[0].leak_train
    peak, size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 4 * rows * length * WIDTH / 1e6
    return f"| {rows:,} | {length} | {size:.0f} | {peak:.2f} | {seconds:.0f} | {100 * leak.mean:.1f} % |"


@click.command(help=__doc__)
@click.option("--write", is_flag=True, help="Write docs/language.md.")
@click.option("--make", "folder", type=Path, hidden=True)
@click.argument("size", required=False)
def main(write: bool, folder: Path | None, size: str | None) -> None:
    """Compute and print the table."""
    if size:
        rows, length = map(int, size.split("x"))
        return make(folder, rows, length) if folder else print(measure(rows, length))
    lines = [
        "| texts | words | states, MB | peak memory, GB | CPU seconds | words recovered |",
        "|---|---|---|---|---|---|",
    ]
    for rows, length in SIZES:
        run = [sys.executable, __file__, f"{rows}x{length}"]
        lines += subprocess.run(run, check=True, capture_output=True, text=True).stdout.splitlines()  # noqa: S603
    print(*lines, sep="\n")
    if write:
        replace_table(PAGE, "table of memory", "\n".join(lines))
    return None


if __name__ == "__main__":
    main()
