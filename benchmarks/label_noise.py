"""What noise on every coordinate of delta^C leaves of the labels, and what it costs.

    python benchmarks/label_noise.py            compute, about a quarter of an hour on a core, and print the table
    python benchmarks/label_noise.py --write    write it into docs/audit_a_recording.md as well

Split learning under the masked linear layer (``--defense phe``, ``backend=plain``: the same numbers, unencrypted). C
trains an extractor by the gradients that it decrypts; ``delta-chain`` reads the labels out of them. Without a gradient
C trains nothing (``vertical-lr``).
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from vflsec.audit.audit import Truth
from vflsec.audit.delta_chain import DeltaChain
from vflsec.core.errors import Diverged
from vflsec.core.method import Trained
from vflsec.evaluation import spec as specs
from vflsec.evaluation.plan import training_cell
from vflsec.evaluation.score import measure
from vflsec.evaluation.statistics import over_seeds
from vflsec.evaluation.training import one_thread
from vflsec.evaluation.world import build_method, build_world
from vflsec.paillier.layout import Layout
from vflsec.paillier.recording import Header, Recorder, Recording

PAGE = Path(__file__).parents[1] / "docs" / "audit_a_recording.md"
NOISE = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0)
RATES = (0.1, 0.01)
DATASET = "credit-default"


class Notes(Recorder):
    """Records what a role computes; messages in clear are sealed and not encrypted, and left out."""

    def message(self, direction: Any, message: Any) -> None:
        """Leave it out."""

    def note(self, name: str, array: Any) -> None:
        """Add an array; a share of W as the integers that it is under encryption."""
        if name == "share":
            array = np.array([int(w) for w in np.ldexp(array.weight, 64).flat], object).reshape(array.weight.shape)
        elif not np.isfinite(array).all():
            raise Diverged(f"{name} is not finite")
        super().note(name, array)


class Found(NamedTuple):
    """One run."""

    utility: float
    labels: float | None  # AUC; None where no gradient was sent


def run(method: str, noise: float, rate: float, seed: int, **settings: Any) -> Found | None:
    """Train one federation and audit C's recording of it; None if it diverged."""
    phe = f"phe:on=1,backend=plain,noise={noise:g},delta=outer"
    train = {"optimizer": "sgd", "lr": rate, **settings}
    spec = specs.read_training(
        {"dataset": DATASET, "methods": [method], "fixed": [phe], "model": {"cut": 10}, "train": train}
    )
    cell = training_cell(spec, method, seed)
    world, learner = build_world(cell, "cpu"), build_method(cell)
    learner.build(world)
    with tempfile.TemporaryDirectory() as folder, one_thread():
        boundary = learner._boundaries["passive_1"]
        layout = Layout(
            width=learner.width(world.passive[0]),
            outputs=1 if learner.logistic else world.n_classes,
            batch=boundary.batch,
        )
        files = [Path(folder, role) for role in ("C", "p")]
        for name, file in zip(boundary.shares, files, strict=True):
            boundary.recorders[name] = Notes(file, Header(role=file.name, layout=layout))
        try:
            for phase in learner.phases:
                learner.run(phase, world)
        except Diverged:
            return None
        boundary.recorders.clear()
        scores = Trained(learner, world, {}).predict("test")
        utility = measure(scores, world.active.labels["test"], world.metric, seed)["metrics"]["auc"]
        c, p = map(Recording, files)
        figures = DeltaChain()(c, Truth(c, p)).figures
    return Found(utility, next((figure.value for figure in figures if figure.metric == "auc"), None))


def line(method: str, noise: float | None, rate: float, seeds: int) -> list[str]:
    """Return the means over seeds, with intervals."""
    found = [run(method, noise or 0.0, rate, seed) for seed in range(seeds)]
    done = [one for one in found if one]
    labels = [one.labels for one in done if one.labels is not None]
    cells = [_mean([one.utility for one in done]), _mean(labels) if labels else "nothing is sent"]
    if len(done) < seeds:
        cells = [f"{seeds - len(done)} of {seeds} runs diverge", cells[1] if labels else "–"]
    return ["no gradient" if noise is None else f"{noise:g}", f"{rate:g}", *cells]


def _mean(values: Sequence[float]) -> str:
    if not values:
        return "–"
    interval = over_seeds(values)
    return f"{interval.mean:.3f} ±{interval.high - interval.mean:.3f}"


def table(seeds: int) -> str:
    """Compute and return the table."""
    lines = [line("fedsplitnn", noise, rate, seeds) for rate in RATES for noise in NOISE]
    lines.append(line("vertical-lr", None, RATES[0], seeds))
    header = ["noise", "learning rate", "utility, AUC", "labels by `delta-chain`, AUC"]
    parts = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in parts)


@click.command()
@click.option("--seeds", default=3, show_default=True)
@click.option("--write", is_flag=True, help="Write the table into docs/audit_a_recording.md.")
def main(seeds: int, write: bool) -> None:
    """Compute and print the table."""
    text = f"{seeds} seeds of `{DATASET}`; ± is a 95 % interval over seeds.\n\n{table(seeds)}"
    if write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), text), encoding="utf-8")
    click.echo(text)


def written(page: str, text: str) -> str:
    """Return ``page`` with ``text`` between the marks."""
    pattern = r"(<!-- label-noise: .*? -->\n).*?(<!-- /label-noise -->)"
    found, count = re.subn(pattern, lambda marks: f"{marks[1]}{text}\n{marks[2]}", page, flags=re.DOTALL)
    assert count == 1, f"{PAGE} has {count} blocks called label-noise"
    return found


if __name__ == "__main__":
    main()
