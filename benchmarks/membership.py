"""What attacks with shadow federations find of who was trained on, beside the loss, and their CPU time.

    python benchmarks/membership.py [--seeds 3] [--shadows 64]

Trains the README's split learning on all labels, and on few labels for long, on one thread.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from vflsec.results.metrics import RARE
from vflsec.results.records.schema import Result
from vflsec.run import engine
from vflsec.run import spec as specs
from vflsec.run.store import Store
from vflsec.run.training import split_shadows

JOBS: dict[str, dict[str, Any]] = {
    "21,000 labels, 20 epochs": {},
    "2,000 labels, 100 epochs": {"data": {"n_labeled": 2000}, "train": {"epochs": 100}},
}


def evaluated(dataset: str, seeds: int, attacks: Iterable[str], **job: Any) -> tuple[list[Result], float]:
    """Return the results of attacks on one job, and the CPU seconds that they took."""
    settings = {"dataset": dataset, "adversary": "active", "attacks": list(attacks), "seeds": seeds, **job}
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        found = [
            one for one in engine.evaluate(engine.plan(specs.read(settings), store), store) if isinstance(one, Result)
        ]
    return found, time.process_time() - began


@click.command()
@click.option("--dataset", default="credit-default", show_default=True)
@click.option("--seeds", default=3, show_default=True)
@click.option("--shadows", default=64, show_default=True)
def main(dataset: str, seeds: int, shadows: int) -> None:
    """Print the table."""
    few = len(split_shadows(shadows)[0])
    attacks = ["membership", f"lira:shadows={few}"]
    attacks += [f"{name}:shadows={shadows}{mode}" for name in ("lira", "rmia") for mode in ("", ",mode=offline")]
    attacks.append(f"shadow-classifier:shadows={shadows}")
    attacks = list(dict.fromkeys(attacks))
    table = Table("job", "attack", "AUC", *RARE, "a training, s", "all shadows of a seed, s", "all, CPU s")
    for name, job in JOBS.items():
        found, seconds = evaluated(dataset, seeds, attacks, **job)
        for attack in attacks:
            label = specs.parse_attack(attack)
            own = [
                one
                for one in found
                if one.attack and (one.attack.name, one.attack.options) == (label.name, label.options)
            ]
            means = [np.mean([one.leak["candidates"].metrics.get(m, np.nan) for one in own]) for m in ("auc", *RARE)]
            spent = [np.mean([one.seconds.get(part, 0.0) for one in own]) for part in ("train", "shadows")]
            table.add_row(
                name, attack, *(f"{mean:.3f}" for mean in means), *(f"{s:.1f}" for s in spent), f"{seconds:.0f}"
            )
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
