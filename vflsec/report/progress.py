"""Shows how far an evaluation is: a bar on a terminal, a text in a notebook, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from vflsec.results.records.manifest import AUDITED
from vflsec.results.records.schema import FAILED, BaselineResult, Record, Result

if TYPE_CHECKING:
    from vflsec.run.facts import StageDone

    Item = TypeVar("Item", bound=Record | StageDone | str)


def shown(records: Iterable[Item], missing: int) -> Iterator[Item]:
    """Yield ``records``, of which ``missing`` will come, and show each on stderr or in the notebook."""
    console = Console(stderr=True)
    if not missing:
        yield from records
    elif console.is_jupyter:
        yield from _in_notebook(records, missing)
    elif console.is_terminal:
        yield from _bar(records, missing, console)
    else:
        yield from _lines(records, missing)


def _bar(records: Iterable[Item], missing: int, console: Console) -> Iterator[Item]:
    times = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *times, console=console, transient=True) as progress:
        bar = progress.add_task("results", total=missing)
        for record in records:
            if not isinstance(record, str) and record.status in FAILED:
                progress.console.print(describe(record), markup=False)
            progress.update(bar, advance=1, description=describe(record))
            yield record


def _lines(records: Iterable[Item], missing: int) -> Iterator[Item]:
    for done, (record, left) in enumerate(_timed(records, missing), start=1):
        sys.stderr.write(f"[{done}/{missing}{left}] {describe(record)}\n")
        sys.stderr.flush()
        yield record


def _in_notebook(records: Iterable[Item], missing: int) -> Iterator[Item]:
    from IPython import display

    text: Any = display.display(display.HTML(f"<code>0/{missing} results</code>"), display_id=True)  # type: ignore[no-untyped-call]
    for done, (record, left) in enumerate(_timed(records, missing), start=1):
        text.update(display.HTML(f"<code>{done}/{missing} results{left}</code>"))  # type: ignore[no-untyped-call]
        yield record


def _timed(records: Iterable[Item], missing: int) -> Iterator[tuple[Item, str]]:
    """Yield records with the time that is left, if there is some and enough is done to tell.

    Time counts from the first record on, which may be a training of many runs and take longer than all others.
    """
    first = math.inf
    for done, record in enumerate(records):
        passed = time.monotonic() - first
        first = min(first, time.monotonic())
        tells = passed >= 1 and done + 1 < missing
        yield record, f", {timedelta(seconds=round(passed / done * (missing - done - 1)))} left" if tells else ""


def describe(record: Record | StageDone | str) -> str:
    """Return one record, or the name of what is done, in a few words, with the cause where it failed."""
    from vflsec.run.facts import StageDone

    if isinstance(record, str):
        return record
    if isinstance(record, StageDone):
        return f"{record.method} {record.stage} seed {record.seed}: {record.status}"
    what = (" ".join(record.defenses) or "no defense") if isinstance(record, Result) else "alone"
    attack = record.attack.name if record.attack else "utility"
    attack = f"without {attack}" if isinstance(record, Result) and record.control else attack
    if record.method == AUDITED:
        return (
            f"draw {record.seed + 1} {'alone ' if isinstance(record, BaselineResult) else ''}{attack}: {record.status}"
        )
    cause = f", {record.error}" if record.status in (*FAILED, "collapsed") and record.error else ""
    return f"{record.method} {what} {attack} seed {record.seed}: {record.status}{cause}"
