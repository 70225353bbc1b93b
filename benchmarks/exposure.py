"""What the active party reads of the passive party's features through the scores, and what blunts it, beside utility.

    python benchmarks/exposure.py            compute and print the table
    python benchmarks/exposure.py --write    write it into docs/audit_a_recording.md as well

Toy runs of 6 features and 5 outputs on shuffled batches, recorded as both roles see them, without the ciphertexts:
audits of them read the same numbers. Utility is the accuracy on rows that were never trained on.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np
from pages import replace_table

from vflsec.attacks.score_gram import ScoreGram, recover_geometry
from vflsec.cipher.recording import Recording
from vflsec.cipher.roles.exposure import Exposure
from vflsec.testing.recordings import LinearRun, attack_recording

PAGE = Path(__file__).parents[1] / "docs" / "audit_a_recording.md"
ROWS, BATCH, VALIDATION, WIDTH, OUTPUTS, EPOCHS = 200, 25, 200, 6, 5, 4
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "frozen, 4 passes": {},
    "moving, relative rate .01": {"drift": 0.01},
    "moving, relative rate .1": {"drift": 0.1},
    "moving, relative rate 1": {"drift": 1.0},
    "score noise .01": {"score_noise": 0.01},
    "score noise .03": {"score_noise": 0.03},
    "score noise .1": {"score_noise": 0.1},
    "score noise .3": {"score_noise": 0.3},
    "max_passes = 2": {"passes": 2},
    "max_passes = 1": {"passes": 1},
    "moving 1, score noise .3": {"drift": 1.0, "score_noise": 0.3},
    "moving 1, score noise .3, max_passes = 2": {"drift": 1.0, "score_noise": 0.3, "passes": 2},
}


def measured(seed: int, passes: int = EPOCHS, **settings: Any) -> list[float]:
    """Return correlation, R2 with known rows (NaN where nothing can be read) and accuracy of one run."""
    run = LinearRun(
        rows=ROWS,
        batch=BATCH,
        validation=VALIDATION,
        steps=passes * ROWS // BATCH,
        width=WIDTH,
        outputs=OUTPUTS,
        columns=20,
        seed=seed,
        **{"rate": 0.5, **settings},
    )
    with tempfile.TemporaryDirectory() as folder:
        c, p = run.record(Path(folder))
        scores = [step.notes["scores"] for step in p.steps() if step.rate is None][-1]
        labels = [labels for rows, _, labels in run.batches() if rows[0] >= ROWS][-1]
        leak = attack_recording(ScoreGram(), p, c, n=3 * WIDTH)["leak"]
        correlation = correlation_of(c, p) if leak else np.nan
    return [
        correlation,
        leak["train"].headline if leak else np.nan,
        float((scores.argmax(axis=1) == labels).mean()),
    ]


def correlation_of(c: Recording, p: Recording) -> float:
    """Return the correlation of inner products of different samples, which needs no known row."""
    geometry, last = recover_geometry(p), {}
    for step in c.steps():
        last |= dict(zip(step.notes["rows"].tolist(), step.notes["mu"], strict=True))
    true = np.array([last[row] for row in geometry.rows.tolist()])
    above = np.triu_indices(len(true), 1)
    return float(np.corrcoef((geometry.features @ geometry.features.T)[above], (true @ true.T)[above])[0, 1])


def line(name: str, settings: Mapping[str, Any], seeds: int) -> str:
    """Return the row of the table: the mean over seeds, and the range of the leak."""
    found = np.array([measured(seed, **settings) for seed in range(seeds)])
    passes = settings.get("passes", EPOCHS)
    share = Exposure(passes=passes, outputs=OUTPUTS, width=WIDTH, rows=ROWS).share
    cells = [
        "not measured" if np.isnan(values).any() else f"{values.mean():.3f} ({values.min():.3f} to {values.max():.3f})"
        for values in found[:, :2].T
    ]
    return f"| {name} | {share:.2f} | {cells[0]} | {cells[1]} | {found[:, 2].mean():.3f} |"


@click.command()
@click.option("--seeds", default=3, show_default=True)
@click.option("--write", is_flag=True, help="Write the table into docs/audit_a_recording.md.")
def main(seeds: int, write: bool) -> None:
    """Compute and print the table."""
    lines = [
        "| setting | exposure | correlation | R², 18 rows known | accuracy |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, settings in SETTINGS.items():
        lines.append(line(name, settings, seeds))
        click.echo(lines[-1])
    if write:
        replace_table(PAGE, "exposure", "\n".join(["", *lines, ""]))


if __name__ == "__main__":
    main()
