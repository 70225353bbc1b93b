"""Shows how far an evaluation is: a bar on a terminal, a text in a notebook, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from rich import progress as bars
from rich.console import Console

from vflsec.results.records.manifest import AUDITED
from vflsec.results.records.schema import FAILED, BaselineResult, Record, Result

if TYPE_CHECKING:
    from vflsec.run.store import StageDone

    Item = TypeVar("Item", bound=Record | StageDone | str)


def show_progress(records: Iterable[Item], missing: int) -> Iterator[Item]:
    """Yield ``records``, of which ``missing`` will come, and show each on stderr or in the notebook."""
    with display(missing) as show:
        for record in records:
            show(record)
            yield record


@contextmanager
def display(missing: int) -> Iterator[Callable[[Any], None]]:
    """Return a function that shows each of ``missing`` records on stderr or in the notebook once it is there."""
    console = Console(stderr=True)
    if not missing:
        yield lambda _: None
    elif console.is_terminal and not console.is_jupyter:
        times = (bars.BarColumn(), bars.MofNCompleteColumn(), bars.TimeElapsedColumn(), bars.TimeRemainingColumn())
        with bars.Progress(bars.TextColumn("{task.description}"), *times, console=console, transient=True) as progress:
            yield partial(_advance_bar, progress, progress.add_task("results", total=missing))
    else:
        yield (_InNotebook if console.is_jupyter else _Lines)(missing)


def _advance_bar(progress: bars.Progress, bar: bars.TaskID, record: Record | StageDone | str) -> None:
    if not isinstance(record, str) and record.status in FAILED:
        progress.console.print(describe(record), markup=False)
    progress.update(bar, advance=is_counted(record), description=describe(record))


class _Lines:
    """Writes a line for each record, with the time that is left, if there is some and enough is done to tell.

    Only results count, not the trainings before them.

    Time counts from the first record on, which may be a training of many runs and take longer than all others.
    """

    def __init__(self, missing: int) -> None:
        self.missing, self.done, self.first = missing, 0, math.inf

    def __call__(self, record: Record | StageDone | str) -> None:
        passed, results = time.monotonic() - self.first, self.done
        self.first = min(self.first, time.monotonic())
        self.done += is_counted(record)
        left = self.missing - self.done
        tells = passed >= 1 and left > 0 and results
        rest = f", {timedelta(seconds=round(passed / results * left))} left" if tells else ""
        self.write(rest, record)

    def write(self, rest: str, record: Record | StageDone | str) -> None:
        """Write one record."""
        sys.stderr.write(f"[{self.done}/{self.missing}{rest}] {describe(record)}\n")
        sys.stderr.flush()


class _InNotebook(_Lines):
    """Shows in a notebook how many records there are."""

    def __init__(self, missing: int) -> None:
        from IPython import display

        super().__init__(missing)
        self._html = display.HTML
        self._text: Any = display.display(self._html(f"<code>0/{missing} results</code>"), display_id=True)  # type: ignore[no-untyped-call]

    def write(self, rest: str, record: Record | StageDone | str) -> None:
        """Show how many there are."""
        self._text.update(self._html(f"<code>{self.done}/{self.missing} results{rest}</code>"))  # type: ignore[no-untyped-call]


def is_counted(record: Record | StageDone | str) -> bool:
    """Whether it is one of the results that are counted."""
    from vflsec.run.store import StageDone

    return not isinstance(record, StageDone)


def describe(record: Record | StageDone | str) -> str:
    """Return one record, or the name of what is done, in a few words, with the cause where it failed."""
    from vflsec.run.store import StageDone

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
