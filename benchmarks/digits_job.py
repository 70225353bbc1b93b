"""A published side-by-side job: digits as MNIST, gradient noise in five strengths, model completion by MixMatch.

    python benchmarks/digits_job.py            user CPU seconds beside the peer's
    python benchmarks/digits_job.py --full     the full attack budget, 25 x 1024 steps

The job is one that a peer's tool (VFLAIR, snapshot of July 2024) was measured on: scikit-learn's digits enlarged to
28 x 28, 1,430 training and 360 test rows; the top half of the picture at the passive party, the bottom half and the
labels at the active one; a 392-32-10 ReLU network each, logits summed; 20 epochs, batch 128, Adam 0.005 / sqrt(epoch);
the gradient to the passive party scaled so that the batch's largest row norm is at most 0.2, plus N(0, s^2); 10
auxiliary labels per class; MixMatch with batches of 10 and Adam 0.002, 6 x 200 steps; five local steps (FedBCD) on each
exchange. Different here: five seeds that also drive the order of batches and the auxiliary draw, where the peer runs
one; the attack's last epoch, where the peer reports its best on the test rows.
"""

from __future__ import annotations

import resource
from functools import partial

import click
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

from vflsec.base.seeds import derive, make_rng
from vflsec.core import registry
from vflsec.core.defense import Defense, Release
from vflsec.core.federation import Federation
from vflsec.core.message import Channel, Kind
from vflsec.core.party import Party
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.core.view import GroundTruth, View
from vflsec.results.metrics import accuracy
from vflsec.results.statistics import Interval, bound_over_seeds
from vflsec.run.adversary import draw_auxiliary, observe
from vflsec.run.score import score
from vflsec.run.spec import AuxSpec
from vflsec.run.training import limit_threads

SEEDS = 5
PEER_CPU = 115
PEER = {  # s: main accuracy, attack accuracy with the short and with the full budget; one seed
    0.0: (0.978, 0.714, 0.756),
    0.001: (0.967, 0.692, None),
    0.01: (0.936, 0.436, 0.653),
    0.1: (0.636, 0.175, 0.497),
    1.0: (0.511, 0.158, 0.386),
}


class ClippedNoise(Defense):
    """The peer's rule: scale the batch so that its largest row norm is at most 0.2, then add N(0, s^2)."""

    name = "clipped-noise"
    points = (Kind.GRADIENT,)
    reference = "VFLAIR, GaussianDP"
    guarantee = "none as used here: strengths are raw deviations without accounting"

    def on_gradient(self, g: Tensor, release: Release) -> Tensor:
        """Return the clipped and noised gradients (B, d)."""
        factor = torch.linalg.vector_norm(g, dim=1).max().div(0.2).clamp_min(1.0)
        noise = torch.randn(g.shape, generator=release.rng, device=g.device)
        return g / factor + self.strength * noise


def load() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return pictures (n, 784) in [0, 1] and labels (n,) of the training and test rows."""
    digits = load_digits()
    pixels = np.round(digits.images / 16 * 255).repeat(3, axis=1).repeat(3, axis=2)
    pictures = np.pad(pixels, ((0, 0), (2, 2), (2, 2))).reshape(len(pixels), 784) / 255
    x_train, x_test, y_train, y_test = train_test_split(
        pictures.astype(np.float32), digits.target, test_size=0.2, random_state=0, stratify=digits.target
    )
    x = {"train": torch.from_numpy(x_train[:1430]), "test": torch.from_numpy(x_test)}
    x |= {split: x["train"][:0] for split in ("unlabeled", "local", "val")}  # the job has no such rows
    return x, {"train": torch.from_numpy(y_train[:1430]), "test": torch.from_numpy(y_test)}


def make_federation(x: dict[str, Tensor], y: dict[str, Tensor], s: float, seed: int) -> Federation:
    """Return the two parties: the top half of each picture is passive, the bottom half active."""
    channel = Channel()
    halves = {"active": slice(392, None), "passive_1": slice(392)}
    parties = {
        name: Party(
            name,
            {split: pictures[:, half].contiguous() for split, pictures in x.items()},
            channel,
            noise=partial(make_rng, seed, "noise", name),
            labels=y if name == "active" else None,
            defenses=[ClippedNoise(s)],
        )
        for name, half in halves.items()
    }
    return Federation(parties, channel, 10, "accuracy", seed, torch.device("cpu"))


def run(x: dict[str, Tensor], y: dict[str, Tensor], s: float, seed: int, *, full: bool) -> dict[str, float]:
    """Train one cell and attack it; return the accuracies of the task and of the attack."""
    federation = make_federation(x, y, s, seed)
    train = TrainSpec(epochs=20, batch=128, lr=0.005, schedule="inverse-sqrt", local_steps=5)
    model = ModelSpec(bottom=(32,), aggregation="sum", head="none")
    trained = registry.build("methods", "fedsplitnn", train, model).fit(federation)
    budget = {"epochs": 25, "steps": 1024} if full else {"epochs": 6, "steps": 200}
    attack = registry.build("attacks", "mc", mode="mixmatch", batch=10, lr=2e-3, **budget)
    aux = draw_auxiliary(y["train"], 10, AuxSpec(n=100), seed)
    guess = attack(observe(trained, federation.passive, aux), seed=derive(seed, "attack"))
    scored = score(guess, GroundTruth(federation.active.labels), headline="accuracy", exclude=aux, seed=seed)
    return {
        "main": accuracy(trained.predict("test").numpy(), y["test"].numpy()),
        **{split: block.metrics["accuracy"] for split, block in scored.items()},
    }


def run_alone(x: dict[str, Tensor], y: dict[str, Tensor], seed: int) -> dict[str, float]:
    """Return the test accuracy of logistic regression on the passive half and the same auxiliary labels."""
    federation = make_federation(x, y, 0.0, seed)
    aux = draw_auxiliary(y["train"], 10, AuxSpec(n=100), seed)
    features = {split: x[split][:, :392].contiguous() for split in ("train", "test")}
    view = View("passive_1", "passive", 10, features, None, aux, y["train"][aux])
    guess = registry.build("attacks", "logistic")(view, seed=derive(seed, "attack"))
    scored = score(guess, GroundTruth(federation.active.labels), headline="accuracy", exclude=aux, seed=seed)
    return {"test": scored["test"].metrics["accuracy"]}


@click.command()
@click.option("--full", is_flag=True, help="The full attack budget, 25 x 1024 steps.")
@click.option("--seeds", default=SEEDS, show_default=True)
def main(full: bool, seeds: int) -> None:
    """Print the table, and the user CPU seconds of the whole process beside the peer's."""
    imports = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    x, y = load()
    table = Table("s", "main", "peer", "attack, test", "peer", "attack, train rows", title="digits, accuracies")
    with limit_threads():
        for s, (peer_main, peer_short, peer_full) in PEER.items():
            found = [run(x, y, s, seed, full=full) for seed in range(seeds)]
            peer = peer_full if full else peer_short
            cells = [_mean(found, "main"), f"{peer_main:.3f}", _mean(found, "test")]
            table.add_row(f"{s:g}", *cells, "–" if peer is None else f"{peer:.3f}", _mean(found, "train"))
        used = resource.getrusage(resource.RUSAGE_SELF).ru_utime  # the sweep; the peer has no baseline
        prior = [run_alone(x, y, seed) for seed in range(seeds)]
    console = Console()
    console.print(table)
    console.print(f"adversary alone, logistic regression: test {_mean(prior, 'test')}; peer's page: 0.758")
    peer_cpu = 700 if full else PEER_CPU
    console.print(
        f"user CPU: {used:.1f} s for the sweep, {seeds} seeds, imports included ({imports:.1f} s), else "
        f"{(used - imports) / (seeds * len(PEER)):.1f} s a cell; the peer: {peer_cpu} s for one seed"
    )


def _mean(found: list[dict[str, float]], name: str) -> str:
    interval: Interval = bound_over_seeds([one[name] for one in found])
    return f"{interval.mean:.3f} ±{interval.high - interval.mean:.3f}"


if __name__ == "__main__":
    main()
