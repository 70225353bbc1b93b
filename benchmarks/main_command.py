"""Wall time of the main command with one process and with two.

    python benchmarks/main_command.py

Runs the README's command in fresh folders, in turn; the ratio is of times taken next to each other.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

COMMAND = ("eval", "--attack", "mc", "--defense", "iso", "--lambda", "1,5,25")


def seconds(jobs: int, out: Path) -> float:
    """Return the wall seconds of one run from nothing."""
    began = time.monotonic()
    command = [sys.executable, "-m", "vflsec", *COMMAND, "--jobs", str(jobs), "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True)  # noqa: S603  (our own command)
    return time.monotonic() - began


@click.command()
@click.option("--pairs", default=3, show_default=True)
def main(pairs: int) -> None:
    """Print the table."""
    found: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(pairs):
            for jobs, times in found.items():
                times.append(seconds(jobs, Path(folder) / f"{pair}-{jobs}"))
    table = Table("processes", "wall s (median)", "min", "max", "ratio to one process (median)")
    for jobs, times in found.items():
        ratio = statistics.median(a / b for a, b in zip(times, found[1], strict=True))
        table.add_row(
            str(jobs), *(f"{t:.1f}" for t in (statistics.median(times), min(times), max(times))), f"{ratio:.2f}"
        )
    Console().print(table)
    Console().print(f"{os.cpu_count()} cores; vflsec {' '.join(COMMAND)}")


if __name__ == "__main__":
    main()
