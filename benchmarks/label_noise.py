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

from vflsec.attacks.delta_chain import DeltaChain
from vflsec.base.errors import Diverged
from vflsec.cipher.arithmetic.layout import CipherLayout
from vflsec.cipher.recording import Header, Recording, RecordingWriter
from vflsec.core.method import Trained
from vflsec.results.statistics import bound_over_seeds
from vflsec.run import spec as specs
from vflsec.run.federation import build_federation, build_method
from vflsec.run.plan import build_cell
from vflsec.run.score import measure
from vflsec.run.training import limit_threads
from vflsec.testing.recordings import attack_recording

PAGE = Path(__file__).parents[1] / "docs" / "audit_a_recording.md"
NOISE = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0)
RATES = (0.1, 0.01)
DATASET = "credit-default"
HIDDEN = 0.6
"""Labels that are guessed with a smaller AUC than this count as hidden."""


class Notes(RecordingWriter):
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
    cell = build_cell(spec, method, seed)
    federation, learner = build_federation(cell, "cpu"), build_method(cell)
    learner.build(federation)
    with tempfile.TemporaryDirectory() as folder, limit_threads():
        boundary = learner._boundaries["passive_1"]
        layout = CipherLayout(
            width=learner.width(federation.passive[0]),
            outputs=1 if learner.logistic else federation.n_classes,
            batch=boundary.batch,
        )
        files = [Path(folder, role) for role in ("passive", "active")]
        for name, file in zip(boundary.shares, files, strict=True):
            boundary.recorders[name] = Notes(file, Header(role=file.name, layout=layout))
        try:
            for phase in learner.phases:
                learner.run(phase, federation)
        except Diverged:
            return None
        finally:
            for recorder in boundary.recorders.values():
                recorder.close()
            boundary.recorders.clear()
        scores = Trained(learner, federation, {}).predict("test")
        utility = measure(scores, federation.active.labels["test"], federation.metric, seed).metrics["auc"]
        c, p = map(Recording, files)
        leak = attack_recording(DeltaChain(), c, p, n=80).get("leak", {})
    return Found(utility, leak["train"].metrics["auc"] if leak else None)


class Line(NamedTuple):
    """One setting, over seeds; ``noise`` is None where no gradient is sent."""

    noise: float | None
    rate: float
    runs: list[Found | None]

    @property
    def utility(self) -> float:
        """The mean; NaN where a run diverged."""
        return float(np.mean([run.utility if run else np.nan for run in self.runs]))

    @property
    def labels(self) -> float:
        """The mean AUC; chance where nothing is sent."""
        return float(np.mean([run.labels or 0.5 if run else np.nan for run in self.runs]))

    def cells(self) -> list[str]:
        """Return the row of the table."""
        name = ["no gradient" if self.noise is None else f"{self.noise:g}", f"{self.rate:g}"]
        done = [run for run in self.runs if run]
        if len(done) < len(self.runs):
            return [*name, f"{len(self.runs) - len(done)} of {len(self.runs)} runs diverge", "–"]
        labels = [run.labels for run in done if run.labels is not None]
        return [*name, _mean([run.utility for run in done]), _mean(labels) if labels else "nothing is sent"]


def _mean(values: Sequence[float]) -> str:
    interval = bound_over_seeds(values)
    return f"{interval.mean:.3f} ±{interval.high - interval.mean:.3f}"


def page(lines: Sequence[Line], seeds: int) -> str:
    """Return the table and what follows from it; the last line is the one without a gradient."""
    header = ["noise", "learning rate", "utility, AUC", "labels by `delta-chain`, AUC"]
    parts = [header, ["---"] * len(header), *(line.cells() for line in lines)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in parts)
    intro = f"{seeds} seeds of `{DATASET}`; ± is a 95 % interval over seeds."
    return f"{intro}\n\n{table}\n\n{conclusion(lines)}"


def conclusion(lines: Sequence[Line]) -> str:
    """Return which noise hides labels and is worth more than no gradient at all."""
    *noised, without = lines
    good = [line for line in noised if line.labels < HIDDEN and line.utility > without.utility]
    if good:
        found = ", ".join(f"{line.noise:g} at a learning rate of {line.rate:g}" for line in good)
        return (
            f"Labels stay below an AUC of {HIDDEN:g}, at a higher utility than without a gradient, with noise {found}."
        )
    return (
        f"No noise is worth it here: none leaves an AUC of the labels below {HIDDEN:g} and a higher utility than an "
        f"extractor that does not train and is sent no gradient ({without.utility:.3f})."
    )


@click.command()
@click.option("--seeds", default=3, show_default=True)
@click.option("--write", is_flag=True, help="Write the table into docs/audit_a_recording.md.")
def main(seeds: int, write: bool) -> None:
    """Compute and print the table."""
    settings = [("fedsplitnn", noise, rate) for rate in RATES for noise in NOISE] + [("vertical-lr", None, RATES[0])]
    lines = [
        Line(noise, rate, [run(method, noise or 0.0, rate, seed) for seed in range(seeds)])
        for method, noise, rate in settings
    ]
    text = page(lines, seeds)
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
