"""What Marvell costs: its search and one release of 1024 x 128, and training with it against training without.

    python benchmarks/marvell.py

The networks are those of Li et al. 2022, three layers of 128 and a cut of 128, batches of 1024, on credit-default. Both
trainings run in one process, in turn, with one thread; the ratio is taken pair by pair.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from vflsec.base.seeds import make_rng
from vflsec.core.defense import Release
from vflsec.core.message import Kind
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.data.partition import DataSpec
from vflsec.defenses.iso import IsotropicNoise
from vflsec.defenses.marvell import Marvell, get_moments, solve
from vflsec.defenses.max_norm import MaxNorm
from vflsec.defenses.perp import PerpendicularNoise
from vflsec.run.federation import build_federation, build_method
from vflsec.run.plan import make_cell
from vflsec.run.spec import DefenseSpec
from vflsec.run.training import limit_threads

ROWS, WIDTH = 1024, 128
EPOCHS = 3
PAIRS = 7
REPEATS = 100
DEFENSES = {"iso": 1.0, "max-norm": 1.0, "perp": 1.0, "marvell": 4.0}


def training(name: str | None) -> float:
    """Return the milliseconds of one training step, with the defense of this name or without any."""
    defenses = (DefenseSpec(name=name, strength=DEFENSES[name]),) if name else ()
    cell = make_cell(
        dataset="credit-default",
        data=DataSpec(),
        method="fedsplitnn",
        method_options={},
        train=TrainSpec(epochs=EPOCHS, batch=ROWS),
        model=ModelSpec(bottom=(WIDTH, WIDTH, WIDTH), cut=WIDTH),
        defenses=defenses,
        seed=0,
    )
    federation, method = build_federation(cell, "cpu"), build_method(cell)
    method.build(federation)
    began = time.process_time()
    method.train("train", federation, lambda *_: None)
    steps = EPOCHS * -(-federation.n_rows("train") // ROWS)
    return (time.process_time() - began) / steps * 1e3


def calls() -> dict[str, Callable[[], object]]:
    """Return what is timed alone, on one batch of two Gaussian classes."""
    rng = make_rng(0, "benchmark")
    labels = (torch.rand(ROWS, generator=rng) < 0.2).long()
    g = torch.randn(ROWS, WIDTH, generator=rng) * (0.5 + labels[:, None]) + 0.2 * labels[:, None]
    release = Release("active", "passive_1", Kind.GRADIENT, 0, "train", "value", None, labels, rng)
    found = get_moments(g.double(), labels == 1)
    assert found is not None
    made = [Marvell(4.0), Marvell(1.0, error=0.45), IsotropicNoise(1.0), MaxNorm(1.0), PerpendicularNoise(1.0)]
    return {
        "marvell's search": lambda: solve(found.u, found.v, found.g, WIDTH, found.p, 4 * found.g),
        "marvell's moments": lambda: get_moments(g.double(), labels == 1),
        **{f"a release, {defense!r}": lambda defense=defense: defense.on_gradient(g, release) for defense in made},
    }


def once(call: Callable[[], object]) -> list[float]:
    """Return the milliseconds of each of many calls, in order of size."""
    found = []
    for _ in range(REPEATS):
        began = time.process_time()
        call()
        found.append((time.process_time() - began) * 1e3)
    return sorted(found)


def main() -> None:
    """Print both tables."""
    with limit_threads():
        table = Table("1024 x 128", "CPU ms (median)", "min", "max")
        for name, call in calls().items():
            call()  # warm up
            times = once(call)
            table.add_row(name, *(f"{ms:.2f}" for ms in (statistics.median(times), times[0], times[-1])))
        Console(width=120).print(table)
        table = Table("training", "step, CPU ms", "without, CPU ms", "ratio (median)", "min", "max")
        training("marvell"), training(None)  # warm up
        for name in DEFENSES:
            pairs = [(training(name), training(None)) for _ in range(PAIRS)]
            ratios = sorted(a / b for a, b in pairs)
            step, without = (statistics.median(column) for column in zip(*pairs, strict=True))
            row = (step, without, statistics.median(ratios), ratios[0], ratios[-1])
            table.add_row(f"{name}, {DEFENSES[name]:g}", *(f"{number:.2f}" for number in row))
        Console(width=120).print(table)


if __name__ == "__main__":
    main()
