"""Shows how far an evaluation is: a bar on a terminal, a text in a notebook, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from rich import progress as bars
from rich.console import Console

from vflsec.results.records.manifest import AUDITED
from vflsec.results.records.schema import FAILED, BaselineResult, Record, Result

if TYPE_CHECKING:
    from vflsec.run.engine import Plan
    from vflsec.run.store import StageDone


def show_progress(records: Iterable[Any], todo: Plan, jobs: int = 1) -> Iterator[Any]:
    """Yield ``records``, which are those of ``todo``, and show each on stderr or in the notebook."""
    with display(todo, jobs) as show:
        for record in records:
            show(record)
            yield record


@contextmanager
def display(todo: Plan, jobs: int = 1) -> Iterator[Callable[[Any], None]]:
    """Return a function that shows each record of ``todo`` on stderr or in the notebook once it is there."""
    console, missing, countdown = Console(stderr=True), todo.missing, Countdown(todo, jobs)
    if not missing:
        yield lambda _: None
    elif console.is_terminal and not console.is_jupyter:
        texts = (bars.TextColumn("{task.description}"), bars.TextColumn("{task.fields[rest]}"))
        columns = (texts[0], bars.BarColumn(), bars.MofNCompleteColumn(), bars.TimeElapsedColumn(), texts[1])
        with bars.Progress(*columns, console=console, transient=True) as progress:
            yield partial(_advance_bar, progress, progress.add_task("results", total=missing, rest=""), countdown)
    else:
        yield (_InNotebook if console.is_jupyter else _Lines)(missing, countdown)


class Countdown:
    """The time that is left on ``jobs`` processes, by medians of results of each kind; a bound until all kinds came."""

    def __init__(self, todo: Plan, jobs: int) -> None:
        self.jobs, self.came, self.times = jobs, 0, defaultdict[Any, list[float]](list)
        self.left = {
            item.key: (item.attack.name if item.attack else "", item.method if task.rows else None, task.cell.key)
            for task in todo.tasks
            for item in list[Any]([*task.rows, *task.baselines])
        }
        self.open = {task.cell.key: task.rows[0].method for task in todo.tasks if task.rows}

    def __call__(self, record: Record | StageDone) -> str:
        """Return in words what is left after ``record``."""
        if isinstance(record, Result | BaselineResult):
            attack, method, cell = self.left.pop(record.key, ("", None, ""))  # a forecast never ends a run
            self.came += bool(attack or method)  # not for a trial of settings
            self.times[attack, method].append(record.seconds.get("attack", 0.0))
            if method and self.open.pop(cell, None):
                self.times[method].append(record.seconds.get("train", 0.0))
        typical = {kind: median(times) for kind, times in self.times.items()}
        kinds = [*(kind[:2] for kind in self.left.values()), *self.open.values()]
        busy = min(self.jobs, len({cell for *_, cell in self.left.values()}))
        seconds = sum(typical.get(kind, 0.0) for kind in kinds) / max(1, busy)
        least = "about" if typical.keys() >= set(kinds) else "at least"
        return f", {least} {timedelta(seconds=round(seconds))} left" if self.came and kinds else ""


def _advance_bar(progress: bars.Progress, bar: bars.TaskID, countdown: Countdown, record: Record | StageDone) -> None:
    if record.status in FAILED:
        progress.console.print(describe(record), markup=False)
    progress.update(bar, rest=countdown(record)[2:], completed=countdown.came, description=describe(record))


class _Lines:
    """Writes a line for each record, with the time that is left. Only results count, not the trainings before them."""

    def __init__(self, missing: int, countdown: Countdown) -> None:
        self.missing, self.countdown = missing, countdown

    def __call__(self, record: Record | StageDone) -> None:
        rest = self.countdown(record)
        self.write(f"{self.countdown.came}/{self.missing}", rest, record)

    def write(self, done: str, rest: str, record: Record | StageDone) -> None:
        """Write one record."""
        sys.stderr.write(f"[{done}{rest}] {describe(record)}\n")
        sys.stderr.flush()


class _InNotebook(_Lines):
    """Shows in a notebook how many records there are."""

    def __init__(self, missing: int, countdown: Countdown) -> None:
        from IPython import display

        super().__init__(missing, countdown)
        self._html = display.HTML
        self._text: Any = display.display(self._html(f"<code>0/{missing} results</code>"), display_id=True)  # type: ignore[no-untyped-call]

    def write(self, done: str, rest: str, record: Record | StageDone) -> None:
        """Show how many there are."""
        self._text.update(self._html(f"<code>{done} results{rest}</code>"))  # type: ignore[no-untyped-call]


def describe(record: Record | StageDone) -> str:
    """Return one record in a few words, with the cause where it failed."""
    from vflsec.run.store import StageDone

    if isinstance(record, StageDone):
        return f"{record.method} {record.stage} seed {record.seed}: {record.status}"
    what = (" ".join(record.defenses) or "no defense") if isinstance(record, Result) else "alone"
    attack = record.attack.name if record.attack else "utility"
    attack = f"without {attack}" if isinstance(record, Result) and record.control else attack
    if record.method == AUDITED:
        return f"draw {record.seed + 1} {'' if isinstance(record, Result) else 'alone '}{attack}: {record.status}"
    cause = f", {record.error}" if record.status in (*FAILED, "collapsed") and record.error else ""
    return f"{record.method} {what} {attack} seed {record.seed}: {record.status}{cause}"
