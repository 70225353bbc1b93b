"""CPU time and memory of training on wide tables, sparse rows against dense one-hot rows in one run.

    python benchmarks/wide_tables.py            # 70,000 training rows, 2,700 categories, 20 epochs, both ways
    python benchmarks/wide_tables.py --many     # 500,000 categories in 20 columns, one epoch, sparse rows alone

Each training runs in a process of its own, on one thread. Beside it, a bare loop of PyTorch does the same updates with
embedding bags: no messages, no defenses, no records.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.data import encode
from vflsec.data.dataset import PartyTable, VerticalDataset
from vflsec.data.partition import DataSpec, Partition, split_dataset
from vflsec.run import federation as federations
from vflsec.run import spec as specs
from vflsec.run.plan import build_cell

BATCH = TrainSpec().batch
CUT = 2


def clicks(rows: int, categories: int, columns: int) -> VerticalDataset:
    """Return two parties with half of the categorical columns each, and a label that all of them tell."""
    rng = np.random.default_rng(0)
    each = categories // columns
    codes = rng.integers(0, each, (rows, columns))
    score = rng.normal(size=(columns, each))[np.arange(columns), codes].sum(axis=1)
    ids = pd.Index([f"r{i}" for i in range(rows)])

    def table(name: str, own: np.ndarray) -> PartyTable:
        frame = pd.DataFrame({f"c{j}": pd.Categorical(own[:, j]) for j in range(own.shape[1])}, index=ids)
        return PartyTable(name, frame, frozenset(frame.columns))

    half = columns // 2
    parties = table("active", codes[:, :half]), table("passive_1", codes[:, half:])
    return VerticalDataset("clicks", parties, pd.Series((score > 0).astype(int), ids), ("no", "yes"))


def measure(kind: str, rows: int, categories: int, columns: int, epochs: int, answer: Any) -> None:
    """Train in this process, and send CPU seconds, seconds of the last epoch, GB at the peak and AUC."""
    torch.set_num_threads(1)
    if kind == "dense":
        encode.WIDE = 10**9
    data = split_dataset(clicks(rows, categories, columns), DataSpec(), 0)
    start = time.process_time()
    ends = [start, *(bare if kind == "bare" else vflsec)(data, epochs)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    answer.send((ends[-1] - start, ends[-1] - ends[-2], peak))


def vflsec(data: Partition, epochs: int) -> list[float]:
    """Train split learning; return when each epoch ended."""
    federations.get_partition = lambda cell: data
    spec = specs.read_training({"dataset": "digits", "methods": ["fedsplitnn"], "train": {"epochs": epochs}})
    cell = build_cell(spec, spec.methods[0], 0)
    federation, method, ends = federations.build_federation(cell, "cpu"), federations.build_method(cell), []
    method.fit(federation, lambda *_: ends.append(time.process_time()))
    return ends


def bare(data: Partition, epochs: int) -> list[float]:
    """Train the same network in a loop of its own; return when each epoch ended."""
    hidden = 64 if ModelSpec().bottom is None else ModelSpec().bottom[0]
    parts = [own.features["train"] for own in data.parties.values()]
    places = [torch.from_numpy(part.indices.reshape(part.shape[0], -1)).long() for part in parts]
    many = parts[0].shape[1] >= 20_000
    tables = [nn.EmbeddingBag(part.shape[1], hidden, mode="sum", sparse=many) for part in parts]
    tops = [nn.Sequential(nn.ReLU(), nn.Linear(hidden, CUT)) for _ in parts]
    head, labels, ends = nn.Linear(CUT * len(parts), 2), torch.tensor(data.labels["train"]), []
    dense = [p for model in (*tops, head, *([] if many else tables)) for p in model.parameters()]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam(dense, fused=True)]
    optimizers += [torch.optim.SparseAdam([p for table in tables for p in table.parameters()])] if many else []
    for _ in range(epochs):
        for rows in torch.randperm(len(labels)).split(BATCH):
            for optimizer in optimizers:
                optimizer.zero_grad()
            cut = [top(table(place[rows])) for top, table, place in zip(tops, tables, places, strict=True)]
            nn.functional.cross_entropy(head(torch.cat(cut, dim=1)), labels[rows]).backward()
            for optimizer in optimizers:
                optimizer.step()
        ends.append(time.process_time())
    return ends


def main() -> None:
    """Print one line for each way to train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--many", action="store_true", help="500,000 categories in 20 columns, one epoch")
    many = parser.parse_args().many
    size = (100_000, 500_000, 20, 2) if many else (100_000, 2_700, 10, 20)
    print("rows categories columns epochs:", *size)
    for kind in ("bare", "sparse") if many else ("bare", "sparse", "dense"):
        theirs, ours = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=measure, args=(kind, *size, ours))
        process.start()
        seconds, last, peak = theirs.recv()
        process.join()
        print(f"{kind:>6}: {seconds:6.1f} CPU s, last epoch {last:5.2f}, peak {peak:.2f} GB")


if __name__ == "__main__":
    main()
