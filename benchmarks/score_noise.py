"""What noise on the scores costs and hides in the job that docs/two_companies.md recommends.

    python benchmarks/score_noise.py            compute, some minutes on two cores, and print the text
    python benchmarks/score_noise.py --write    write it into docs/two_companies.md as well

Both parties are processes that exchange messages over TCP. Keys are smaller than the job's, which changes no number
that is measured here.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

import vflsec
from vflsec.results.statistics import bound_over_seeds

PAGE = Path(__file__).parents[1] / "docs" / "two_companies.md"
NOISE = (0.0, 0.3, 1.0, 3.0)


class Found(NamedTuple):
    """One run."""

    auc: float
    accuracy: float
    features: float  # R2 by score-regression


def documented_job(page: str) -> str:
    """Return the job of the page."""
    found = re.search(r"```toml\n(name = .*?)```", page, flags=re.DOTALL)
    assert found
    return found[1]


def command(words: str) -> list[str]:
    """Return a command of vflsec."""
    return [sys.executable, "-m", "vflsec", *words.split()]


def run(job: str, noise: float, seed: int) -> Found:
    """Train in two processes and audit p's recording."""
    small = f'bits = 1024\nmode = "subgroup"\nscore_noise = {noise}'
    job = job.replace("seed = 0", f"seed = {seed}").replace("bits = 2048", small)
    settings = tomllib.loads(job)
    assert (settings["seed"], settings["paillier"]["score_noise"]) == (seed, noise)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.toml").write_text(job, encoding="utf-8")
        subprocess.run(command("party keys KEYS"), cwd=folder, check=True, capture_output=True)  # noqa: S603
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        both = []
        for role, where in (("passive", f"--listen {address}"), ("active", f"--connect {address}")):
            words = f"party --role {role} {where} --job job.toml --keys KEYS --out {role} --record {role}.recording"
            both.append(subprocess.Popen(command(words), cwd=folder, stdout=subprocess.DEVNULL))  # noqa: S603
        if any([process.wait() for process in both]):
            raise click.ClickException("expected both parties to end well")
        words = (
            "audit active.recording --truth passive.recording --attack score-regression --set aux.n=30 --format json"
        )
        audit = subprocess.run(command(words), cwd=folder, check=True, capture_output=True)  # noqa: S603
        utility = json.loads((folder / "active" / "result.json").read_text(encoding="utf-8"))["utility"]
    points = json.loads(audit.stdout)["points"]
    leak = next(point["leak"]["mean"] for point in points if point["attack"] == "score-regression")
    return Found(utility["auc"], utility["accuracy"], leak)


def text(lines: Sequence[tuple[float, Sequence[Found]]], alone: float) -> str:
    """Return the table and what follows from it; ``alone`` is the AUC of p's model of its own columns."""
    table = ["| `score_noise` | utility, AUC | accuracy | features, 30 known rows, R² |", "| --- | --- | --- | --- |"]
    table += [
        f"| {noise:g} | {' | '.join(_mean([run[i] for run in runs]) for i in range(3))} |" for noise, runs in lines
    ]
    seeds = f"{len(lines[0][1])} seeds; ± is a 95 % interval over seeds."
    return "\n\n".join([seeds, "\n".join(table), follows(lines, alone)])


def follows(lines: Sequence[tuple[float, Sequence[Found]]], alone: float) -> str:
    """Return how little of the features stays readable where the run beats the active party alone."""
    means = [np.mean([(run.auc, run.features) for run in runs], axis=0) for _, runs in lines]
    readable = [features for auc, features in means if auc > alone]
    found = f"A model of the active party's own columns alone (`--method local`) has an AUC of {alone:.3f}: "
    if not readable:
        return found + "no setting is worth the run."
    return (
        found + f"where a run is worth more, that party reads the features with an R² of {min(readable):.2f} or more."
    )


def _mean(values: Sequence[float]) -> str:
    interval = bound_over_seeds(values)
    return f"{interval.mean:.3f} ±{interval.high - interval.mean:.3f}"


def written(page: str, text: str) -> str:
    """Return ``page`` with ``text`` between the marks."""
    pattern = r"(<!-- score-noise: .*? -->\n).*?(<!-- /score-noise -->)"
    found, count = re.subn(pattern, lambda marks: f"{marks[1]}{text}\n{marks[2]}", page, flags=re.DOTALL)
    assert count == 1, f"{PAGE} has {count} blocks called score-noise"
    return found


@click.command()
@click.option("--seeds", default=3, show_default=True)
@click.option("--write", is_flag=True, help="Write the text into docs/two_companies.md.")
def main(seeds: int, write: bool) -> None:
    """Compute and print the text."""
    page = PAGE.read_text(encoding="utf-8")
    job = documented_job(page)
    lines = [(noise, [run(job, noise, seed) for seed in range(seeds)]) for noise in NOISE]
    alone = vflsec.evaluate(methods=["local"], seeds=seeds, out="runs/score-noise-local").points[0].utility.mean
    assert alone is not None
    found = text(lines, alone)
    if write:
        PAGE.write_text(written(page, found), encoding="utf-8")
    click.echo(found)


if __name__ == "__main__":
    main()
