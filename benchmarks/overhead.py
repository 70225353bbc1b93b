"""Split training through party, defenses and channel against a plain joint torch loop of the same network.

    python benchmarks/overhead.py

Both train the same layers on the same batches of credit-default in one process, in turn, with one thread; the ratio is
taken pair by pair, so that a machine whose speed drifts does not change it.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F

from vflsec.base.seeds import make_rng
from vflsec.core.federation import Federation
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.data.partition import DataSpec
from vflsec.run.cell import Cell
from vflsec.run.federation import build_federation, build_method
from vflsec.run.plan import make_cell
from vflsec.run.spec import DefenseSpec
from vflsec.run.training import limit_threads

EPOCHS = 5
PAIRS = 7
DEFENSES = {
    "no defense": None,
    "iso, λ = 5, at the gradient": DefenseSpec(name="iso", strength=5.0),
    "dp-sgd, σ = 1, all parties": DefenseSpec(name="dp-sgd", strength=1.0),
}


def cell(defense: DefenseSpec | None = None) -> Cell:
    """Return the default setting, shorter."""
    return make_cell(
        dataset="credit-default",
        data=DataSpec(),
        method="fedsplitnn",
        method_options={},
        train=TrainSpec(epochs=EPOCHS),
        model=ModelSpec(),
        defenses=(defense,) if defense else (),
        seed=0,
    )


def split(defense: DefenseSpec | None = None) -> float:
    """Return the seconds that split training takes."""
    federation, method = build_federation(cell(defense), "cpu"), build_method(cell(defense))
    method.build(federation)
    return timed(lambda: method.run("train", federation))


def joint() -> float:
    """Return the seconds that the same network takes as one module with one optimizer."""
    federation, method = build_federation(cell(), "cpu"), build_method(cell())
    method.build(federation)
    return timed(lambda: joint_loop(federation))


def joint_loop(federation: Federation) -> None:
    """Train bottoms and top end to end, as anybody would without a federation."""
    parties = list(federation.parties.values())
    bottoms = [copy.deepcopy(party.modules["bottom"]) for party in parties]
    top = copy.deepcopy(federation.active.modules["top"])
    parameters = [p for module in (*bottoms, top) for p in module.parameters()]
    optimizer = torch.optim.Adam(parameters, 1e-3, fused=True)
    features, labels = [party.features["train"] for party in parties], federation.active.labels["train"]
    order = make_rng(federation.seed, "batches", "train")
    for _ in range(EPOCHS):
        total = torch.zeros(())
        for rows in torch.split(torch.randperm(len(labels), generator=order), 256):
            loss = F.cross_entropy(top([b(x[rows]) for b, x in zip(bottoms, features, strict=True)]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(rows)


def timed(run: Callable[[], object]) -> float:
    """Return the processor seconds of ``run``."""
    began = time.process_time()
    run()
    return time.process_time() - began


def main() -> None:
    """Print the table."""
    table = Table("training", "split s", "joint s", "ratio (median)", "min", "max")
    with limit_threads():
        for name, defense in DEFENSES.items():
            joint(), split(defense)  # warm up
            pairs = [(split(defense), joint()) for _ in range(PAIRS)]
            ratios = sorted(a / b for a, b in pairs)
            times = [statistics.median(column) for column in zip(*pairs, strict=True)]
            table.add_row(
                name,
                *(f"{seconds:.2f}" for seconds in times),
                f"{statistics.median(ratios):.2f}",
                f"{ratios[0]:.2f}",
                f"{ratios[-1]:.2f}",
            )
    Console().print(table)


if __name__ == "__main__":
    main()
