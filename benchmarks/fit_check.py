"""How often the fit check of ``vflsec audit`` refuses correct material, and from which share of wrong ids it refuses.

Bottom models are trained by plain PyTorch on samples of bundled data, with and without a defense, and handed in through
each door: the transcript of each side, a table of embeddings, predictions, weights, and a function such as ONNX. Others
are trained by ``vflsec train``. Only the check runs, no attack:

    python benchmarks/fit_check.py
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
import pandas as pd
import torch
from click.testing import CliRunner
from torch import nn
from torch.nn import functional as F

import vflsec
from vflsec.audit import foreign, job
from vflsec.audit.fit import Finding, check_fit
from vflsec.audit.subject import Subject, collect_last
from vflsec.audit.transcript_lines import Sent
from vflsec.cli import cli
from vflsec.data.dataset import VerticalDataset
from vflsec.data.encode import densify
from vflsec.data.partition import DataSpec, Partition, split_dataset
from vflsec.run.plan import load_dataset, resolve
from vflsec.run.spec import AuxSpec, parse_defense

DATASETS = ("toy", "credit-default", "digits", "flights", "multiple-features")
ROWS = (120, 400, 1000)
DEFENSES = ("none", "iso:lambda=25", "gaussian-dp:strength=20", "iso:lambda=25@embedding")
DOORS = ("passive", "active", "table", "predictions", "weights", "function")
SHARES = (0.05, 0.1, 0.2, 0.5, 1.0)
EPOCHS, CUT = 8, 4


class Trained(NamedTuple):
    """A federation of plain PyTorch and what it sent: kind, sender, receiver, positions of rows and values."""

    dataset: VerticalDataset
    split: Partition
    bottoms: dict[str, nn.Module]
    sent: list[tuple[str, str, str, str, np.ndarray, np.ndarray]]
    logits: np.ndarray
    train: np.ndarray
    ids: np.ndarray
    defense: str


@cache
def sample(name: str, rows: int, seed: int) -> VerticalDataset:
    """Return a dataset with some of its rows, of which any may be of training or test."""
    whole = load_dataset(name)
    ids = whole.parties[0].frame.index
    for table in whole.parties[1:]:
        ids = ids[ids.isin(table.frame.index)]
    labels = whole.labels.loc[ids]
    kept = ids[np.random.default_rng(seed).permutation(len(ids))[:rows]]
    short = {label: (labels.loc[kept] == label).sum() for label in labels.unique()}
    extra = [ids[(labels == label).to_numpy()][:12] for label, n in short.items() if n < 12]
    kept = kept.append(extra).unique() if extra else kept
    tables = tuple(replace(table, frame=table.frame.loc[kept]) for table in whole.parties)
    return replace(whole, parties=tables, labels=whole.labels.loc[kept], draw=None, source=None, test_ids=None)


def train(name: str, rows: int, defense: str, seed: int) -> Trained:
    """Train the bottom models of all passive parties and a linear top model."""
    dataset = sample(name, rows, seed)
    ids = dataset.parties[0].frame.index.astype(str).to_numpy()
    order = np.random.default_rng(seed).permutation(len(ids))
    labels = dataset.labels.to_numpy()
    first = [order[labels[order] == label][k] for label in np.unique(labels) for k in (0, 1)]  # both splits have all
    train_rows = np.unique(np.concatenate([first[::2], np.setdiff1d(order[: int(0.75 * len(ids))], first[1::2])]))
    subject = Subject("x", "passive_1", "passive", "0", train=pd.Index(ids[train_rows], dtype=object))
    split = split_dataset(foreign.assign_roles(dataset, subject, None, None)[0], DataSpec(), 0)
    names = np.concatenate([split.ids["train"], split.ids["test"]]).astype(str)
    x = {
        party: torch.from_numpy(np.concatenate([densify(held.features[part]) for part in foreign.SPLITS])).float()
        for party, held in split.parties.items()
    }
    y = torch.tensor(split.labels["train"])
    torch.manual_seed(seed)
    passive = [party for party in x if party != "active"]
    bottoms = {p: nn.Sequential(nn.Linear(x[p].shape[1], 16), nn.ReLU(), nn.Linear(16, CUT)) for p in passive}
    top = nn.Linear(x["active"].shape[1] + CUT * len(passive), len(split.classes))
    optimizer = torch.optim.Adam([*top.parameters(), *(w for b in bottoms.values() for w in b.parameters())], lr=1e-2)
    guard = None if defense == "none" else vflsec.defend(defense, seed=seed, releases=EPOCHS + 1)
    sent = []

    def crossing(rows: torch.Tensor, phase: str) -> tuple[torch.Tensor, list[tuple[str, torch.Tensor]]]:
        received, kept = [x["active"][rows]], []
        for party, bottom in bottoms.items():
            h = bottom(x[party][rows])
            h = h if guard is None else guard.passive(h, phase=phase)
            sent.append(("embedding", party, "active", phase, rows.numpy(), h.detach().numpy().copy()))
            h = h.detach().requires_grad_() if not h.requires_grad else h
            kept.append((party, h))
            received.append(h if guard is None else guard.active(h, phase=phase))
        return torch.cat(received, dim=1), kept

    for _ in range(EPOCHS):
        for rows_ in torch.randperm(len(y)).split(32):
            joined, kept = crossing(rows_, "train")
            for _, h in kept:
                h.retain_grad()
            optimizer.zero_grad()
            F.cross_entropy(top(joined), y[rows_]).backward()
            for party, h in kept:
                sent.append(("gradient", "active", party, "train", rows_.numpy(), h.grad.numpy().copy()))
            optimizer.step()
    with torch.no_grad():
        logits = top(crossing(torch.arange(len(names)), "predict")[0])
    return Trained(dataset, split, bottoms, sent, logits.numpy(), np.arange(len(y)), names, defense)


def wrong(n: int, share: float, seed: int) -> np.ndarray:
    """Return positions (n,) of which a share is permuted."""
    rng = np.random.default_rng(seed)
    result, some = np.arange(n), rng.permutation(n)[: int(share * n)]
    result[some] = rng.permutation(some)
    return result


def checked(made: Trained, door: str, *, share: float = 0.0, seed: int = 0) -> list[Finding]:
    """Return what the check finds in the material of one door, a share of whose ids is permuted."""
    n, names = len(made.ids), made.ids[wrong(len(made.ids), share, seed)]
    party = "active" if door == "active" else "passive_1"
    index = pd.Index(names.astype(object))
    trained_on = pd.Index(made.ids[made.train].astype(object))
    facts = {"name": door, "adversary": party, "side": party.partition("_")[0], "fingerprint": "0", "train": trained_on}
    bottom = made.bottoms["passive_1"]
    if door in ("passive", "active"):
        messages = [
            Sent(kind, who, to, phase, "train", step, names[rows[:n]], values)
            for step, (kind, who, to, phase, rows, values) in enumerate(made.sent)
            if party in (who, to)
        ]
        held = collect_last(each for each in messages if each.kind == "embedding" and each.sender == party)
        subject = Subject(**facts, messages=messages, embeddings=held)
    elif door in ("table", "predictions"):
        last = next(v for kind, who, _, phase, _, v in made.sent[::-1] if (kind, who) == ("embedding", "passive_1"))
        wrong_table = door == "table"
        table = pd.DataFrame(last, index=index if wrong_table else pd.Index(made.ids.astype(object)))
        given = None if wrong_table else pd.DataFrame(made.logits, index=index)
        subject = Subject(**facts, embeddings=table, predictions=given)
    else:
        width = made.split.parties["passive_1"].layout.width
        order = torch.from_numpy(wrong(width, share, seed))
        model = nn.Sequential(Reordered(order), bottom).eval()
        given = {"model": model} if door == "weights" else {"function": called(model)}
        subject = Subject(**facts, **given)
    audit = job._audit_material(subject, with_split(made, subject), ("x", None), AuxSpec(), 1)
    defenses = [] if made.defense == "none" else [frozenset(resolve(parse_defense(made.defense)).defense().kinds)]
    table = next(each for each in made.dataset.parties if each.name == party)
    result = list(check_fit(audit, defenses, table.frame.index.astype(str).tolist()))
    return result[1:] if door == "predictions" else result


class Reordered(nn.Module):
    """Reads columns in another order."""

    def __init__(self, order: torch.Tensor) -> None:
        super().__init__()
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the columns of ``x`` (B, p) in that order."""
        return x[:, self.order]


def called(model: nn.Module) -> Callable[[np.ndarray], np.ndarray]:
    """Return a model as a function of arrays."""

    def function(inputs: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            result: np.ndarray = model(torch.from_numpy(inputs).float()).numpy()
        return result

    return function


def with_split(made: Trained, subject: Subject) -> VerticalDataset:
    """Return the data with the rows that ``subject`` names as those of training."""
    return foreign.assign_roles(made.dataset, subject, None, None)[0]


def checkpoints(folder: Path, seeds: int) -> Iterator[tuple[str, list[Finding] | None]]:
    """Yield what is noted of checkpoints with and without messages; None for a misfit."""
    for name, rows in (("toy", 300), ("digits", 300), ("credit-default", 400)):
        for defense in DEFENSES:
            for seed in range(seeds):
                place = folder / f"{name}-{defense.replace(':', '-')}-{seed}"
                words = ["train", "--dataset", name, "--set", "train.epochs=3", "--seed", str(seed)]
                words += [] if name == "toy" else ["--set", f"data.n_labeled={rows}"]
                words += [] if defense == "none" else ["--defense", defense]
                CliRunner().invoke(cli, [*words, "--out", f"{place}-c", "--record", f"{place}-m"])
                for messages, party in ((None, "passive_1"), (f"{place}-m", "passive_1"), (f"{place}-m", "active")):
                    _, result = job._audit_checkpoint(
                        Path(f"{place}-c"), None, {}, party, Path(messages) if messages else None, AuxSpec(), 1
                    )
                    yield f"checkpoint{', with messages' if messages else ''}", result


def outcome(result: list[Finding]) -> str:
    """Return the worst outcome of several."""
    outcomes = {each.outcome for each in result}
    return "misfit" if "misfit" in outcomes else "unverified" if "unverified" in outcomes else "fits"


@click.command()
@click.option("--seeds", default=2, show_default=True, help="Of each setting.")
@click.option("--datasets", default=",".join(DATASETS), show_default=True)
@click.option("--rows", default=",".join(map(str, ROWS)), show_default=True)
@click.option("--with-checkpoints/--without-checkpoints", default=True)
def main(seeds: int, datasets: str, rows: str, with_checkpoints: bool) -> None:
    """Print both tables."""
    began = time.perf_counter()
    correct: dict[str, Counter[str]] = defaultdict(Counter)
    noticed: dict[tuple[int, str, float], Counter[str]] = defaultdict(Counter)
    sizes = [int(each) for each in rows.split(",")]
    for name in datasets.split(","):
        for size in sizes:
            for defense in DEFENSES:
                for seed in range(seeds):
                    made = train(name, size, defense, seed)
                    for door in DOORS:
                        result = checked(made, door)
                        correct[door][outcome(result)] += 1
                        if outcome(result) == "misfit":
                            why = next(each.text for each in result if each.outcome == "misfit")
                            click.echo(
                                f"false alarm: {name}, {size} rows, {defense}, seed {seed}, {door}: {why}", err=True
                            )
                        if size > min(sizes) and defense == "none":
                            for share in SHARES:
                                noticed[size, door, share][outcome(checked(made, door, share=share, seed=seed))] += 1
        click.echo(f"{name}: {time.perf_counter() - began:.0f} s", err=True)
    if with_checkpoints:
        with tempfile.TemporaryDirectory() as folder:
            for door, each in checkpoints(Path(folder), seeds):
                correct[door][outcome(each)] += 1
    click.echo("| door | correct audits | refused | cannot be verified |\n| --- | --- | --- | --- |")
    for door, result in correct.items():
        click.echo(f"| {door} | {result.total()} | {result['misfit']} | {result['unverified']} |")
    total = sum(correct.values(), Counter())
    click.echo(f"| all | {total.total()} | {total['misfit']} | {total['unverified']} |")
    click.echo("\n| door | rows | " + " | ".join(f"{share:.0%} permuted" for share in SHARES) + " |")
    click.echo("| --- | --- |" + " --- |" * len(SHARES))
    for door in DOORS:
        for size in sizes[1:]:
            cells = [noticed[size, door, share] for share in SHARES]
            shown = [f"{each['misfit']} + {each['unverified']} of {each.total()}" for each in cells]
            click.echo(f"| {door} | {size} | " + " | ".join(shown) + " |")
    click.echo(f"{time.perf_counter() - began:.0f} s", err=True)


if __name__ == "__main__":
    main()
