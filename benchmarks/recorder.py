"""A plain PyTorch training with ``vflsec.Recorder`` at its cut layer against the same training without.

    python benchmarks/recorder.py

Both train split networks of the default size on credit-default for 20 epochs in one process, in turn; the ratio is
taken pair by pair. Wall time, since the recorder writes in a thread of its own.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vflsec
from vflsec.data.partition import DataSpec, split_dataset

EPOCHS, PAIRS, BATCH = 20, 7, 256


def train(x: Tensor, z: Tensor, y: Tensor, folder: Path | None) -> float:
    """Return the seconds of a training, with its messages recorded in ``folder``."""
    torch.manual_seed(0)
    bottoms = [nn.Sequential(nn.Linear(own.shape[1], 32), nn.ReLU(), nn.Linear(32, 10)) for own in (x, z)]
    top = nn.Linear(20, 2)
    optimizer = torch.optim.Adam([p for module in (*bottoms, top) for p in module.parameters()])
    parties = {"bank": "active", "bureau": "passive"}
    recorder = vflsec.Recorder(folder, parties=parties) if folder else None
    began = time.perf_counter()
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(y)).split(BATCH):
            h = bottoms[1](z[rows])
            h = recorder.cut(h, rows=rows) if recorder else h
            loss = F.cross_entropy(top(torch.cat([bottoms[0](x[rows]), h], dim=1)), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if recorder:
        recorder.close()
    return time.perf_counter() - began


def main() -> None:
    """Print the ratio of each pair's times, and the size on disk."""
    torch.set_num_threads(1)
    data = split_dataset(vflsec.load_dataset("credit-default"), DataSpec(), 0)
    x, z = (torch.from_numpy(own.features["train"]) for own in data.parties.values())
    y = torch.tensor(data.labels["train"])
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        for k in range(PAIRS):
            place = Path(folder) / str(k)
            ratios.append(train(x, z, y, place) / train(x, z, y, None))
        size = sum(path.stat().st_size for path in place.iterdir())
    vectors = 2 * EPOCHS * len(y)
    print(f"ratio, median of {PAIRS} pairs: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    print(f"{size / vectors * 1e6 / 1e6:.0f} MB per million vectors of 10 numbers")


if __name__ == "__main__":
    main()
