"""The time of one evaluation on one Dask worker against two.

    python benchmarks/scale_out.py

Each worker is a process with one thread, which has imported what it needs before the clock starts. The evaluations
alternate, and the ratio is taken pair by pair; 0.5 would be perfect.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from distributed import Client, LocalCluster
from rich.console import Console
from rich.table import Table

from vflsec.run import engine
from vflsec.run import spec as specs
from vflsec.run.store import Store

PAIRS = 3
SETTINGS = {
    "dataset": "credit-default",
    "attacks": ["mc"],
    "defenses": ["iso:lambda=1,5,25"],
    "aux": {"folds": 0},
    "seeds": 2,
}


def seconds(workers: int, settings: dict[str, object] = SETTINGS) -> float:
    """Return the wall time of the evaluation on so many workers."""
    spec = specs.read(settings)
    options = {"n_workers": workers, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
    with TemporaryDirectory() as folder, LocalCluster(host="127.0.0.1", **options) as cluster:
        with Client(cluster) as client:
            client.run(__import__, "vflsec.run.runner")
        store = Store(Path(folder))
        todo = engine.plan(spec, store)
        began = time.perf_counter()
        done = list(engine.evaluate(todo, store, engine=f"dask:{cluster.scheduler_address}"))
        assert len(done) == todo.missing
        return time.perf_counter() - began


def main() -> None:
    """Measure and print."""
    pairs = [(seconds(1), seconds(2)) for _ in range(PAIRS)]
    ratios = [two / one for one, two in pairs]
    table = Table("one worker, s", "two workers, s", "ratio, median", "min", "max")
    one, two = (statistics.median(values) for values in zip(*pairs, strict=True))
    shown = [one, two, statistics.median(ratios), min(ratios), max(ratios)]
    table.add_row(*(f"{value:.2f}" for value in shown))
    Console().print(table)


if __name__ == "__main__":
    main()
