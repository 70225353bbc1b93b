"""CPU time of trainings that run as one, against the same one after the other.

    python benchmarks/together.py [--seeds 5] [--pairs 3]
    python benchmarks/together.py --command --seeds 20 --pairs 1

Trains the README's split learning with and without noise, as ``vflsec eval --defense iso --lambda 1,5,25`` does, in
both ways in turn and on one thread; attacks are left out. It also compares the models, bit by bit.

With ``--command`` it runs the whole command, with the attack ``mc`` and what the adversary reaches alone, and compares
the leaks. One by one, trainings are not grouped, and attacks and regressions are fitted to one fold after the other.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from rich.console import Console
from rich.table import Table

import vflsec
from vflsec.attacks.model_completion import ModelCompletion
from vflsec.core.attack import Attack
from vflsec.inference import regression
from vflsec.inference.regression import fit_many
from vflsec.run import engine, plan, training
from vflsec.run import spec as specs
from vflsec.run.cell import Cell
from vflsec.run.engine import MAX_JOINT_CELLS
from vflsec.run.store import Store


def cells(dataset: str, seeds: int) -> list[Cell]:
    """Return the different trainings, the seeds of one strength after the other."""
    defenses = [{"name": "iso", "strengths": [0, 1, 5, 25]}]
    spec = specs.read({"dataset": dataset, "attacks": ["mc"], "seeds": seeds, "defenses": defenses})
    return list({row.cell.key: row.cell for row in plan.list_trials(spec)}.values())


def states(trained: training.Trained | None) -> list[torch.Tensor]:
    """Return all tensors of a trained federation."""
    assert trained is not None
    return [x for party in trained.federation.parties.values() for x in party.modules.state_dict().values()]


def regressions_apart(x: Any, y: Any, sampled: Any, penalties: Any) -> tuple[Any, bool]:
    """Return what ``regression.fit_many`` does, from one regression after the other."""
    each = [fit_many(x, y, rows[None], c[None]) for rows, c in zip(sampled, penalties, strict=True)]
    return np.concatenate([b for b, _ in each]), all(converged for _, converged in each)


def evaluated(dataset: str, seeds: int, *, one_by_one: bool) -> tuple[float, list[float | None]]:
    """Return the CPU seconds of the whole command, and its leaks."""
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if one_by_one:
            patch.setattr(engine, "MAX_JOINT_CELLS", 1)
            patch.setattr(ModelCompletion, "run_each", Attack.run_each)
            patch.setattr(regression, "fit_many", regressions_apart)
        report = vflsec.evaluate(
            attack="mc", defense="iso", strengths=[1, 5, 25], dataset=dataset, seeds=seeds, jobs=1, out=folder
        )
    return time.process_time() - began, [point.leak.mean for point in (*report.points, *report.worst)]


def compare_commands(dataset: str, seeds: int, pairs: int) -> None:
    """Print CPU times and the largest difference of a leak."""
    evaluated(dataset, 1, one_by_one=False)  # imports what the first evaluation imports
    both = [[evaluated(dataset, seeds, one_by_one=way) for way in (True, False)] for _ in range(pairs)]
    apart, as_one = ([pair[way][0] for pair in both] for way in (0, 1))
    ratio = statistics.median(a / b for a, b in zip(apart, as_one, strict=True))
    (_, first), (_, second) = both[0]
    most = max(abs((a or 0.0) - (b or 0.0)) for a, b in zip(first, second, strict=True))
    table = Table("seeds", "one by one, CPU s", "as one, CPU s", "ratio (median)", "largest difference of a leak")
    medians = [f"{statistics.median(times):.1f}" for times in (apart, as_one)]
    table.add_row(str(seeds), *medians, f"{ratio:.2f}", f"{most:.1e}")
    Console().print(table)


@click.command()
@click.option("--command", "whole", is_flag=True, help="Run the whole command, not the trainings alone.")
@click.option("--dataset", default="credit-default", show_default=True)
@click.option("--seeds", default=5, show_default=True)
@click.option("--pairs", default=3, show_default=True)
def main(whole: bool, dataset: str, seeds: int, pairs: int) -> None:
    """Print the table."""
    if whole:
        compare_commands(dataset, seeds, pairs)
        return
    own = cells(dataset, seeds)
    table = Table("runs", "one by one, CPU s", "as one, CPU s", "ratio (median)", "models with equal bits")
    ratios, apart_times, together_times, equal = [], [], [], 0
    with training.limit_threads(), tempfile.TemporaryDirectory() as folder:
        training.train(own[0], "cpu")  # imports what the first training imports
        for _ in range(pairs):
            began = time.process_time()
            apart = [states(training.train(cell, "cpu")[0]) for cell in own]
            between, as_one = time.process_time(), []
            for start in range(0, len(own), MAX_JOINT_CELLS):
                group = own[start : start + MAX_JOINT_CELLS]
                as_one += [states(one) for one, _ in training.train_together(group, "cpu", store=Store(Path(folder)))]
            apart_times.append(between - began)
            together_times.append(time.process_time() - between)
            ratios.append(apart_times[-1] / together_times[-1])
            equal = sum(all(map(torch.equal, a, b)) for a, b in zip(apart, as_one, strict=True))
    medians = [f"{statistics.median(times):.1f}" for times in (apart_times, together_times)]
    table.add_row(str(len(own)), *medians, f"{statistics.median(ratios):.2f}", f"{equal} of {len(own)}")
    Console().print(table)


if __name__ == "__main__":
    main()
