"""Toy federations whose leak is known: planted, absent, and with a chosen number of parties."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import torch

from vflsec.core.checks import one_of, positive
from vflsec.core.errors import UsageError
from vflsec.core.federation import Federation
from vflsec.core.message import Channel
from vflsec.core.party import Party
from vflsec.core.seeds import derive, generator
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.data.dataset import Card, PartyTable, VerticalDataset
from vflsec.data.partition import DataSpec
from vflsec.experiment.cell import Cell
from vflsec.experiment.federation import build_federation

SIGNALS = ("planted", "hidden", "none")
SPLITS = ("train", "unlabeled", "aligned", "local", "val", "test")


def toy(
    *,
    rows: int = 600,
    parties: int = 2,
    classes: int = 2,
    columns: int = 6,
    signal: str = "planted",
    seed: int = 0,
    source: int = 0,
) -> VerticalDataset:
    """Make data of which it is known what can be recovered.

    Args:
        rows: number of samples, the same ids at every party, each party in its own order.
        parties: K >= 2.
        classes: C >= 2, equally frequent.
        columns: per party.
        signal: ``planted``: each party's columns give the class away to whoever has some labels, and all of them in
            plain sight. ``hidden``: the class is the sign of a product of two columns, so that few labels do not
            reveal it but a model trained on many does. ``none``: no column has anything to do with the class.
        seed: of the draw.
        source: rows of another active party, of which passive parties hold columns as well; 0 for no such party. Their
            columns are shifted by one.

    Raises:
        UsageError: an unknown signal, or numbers too small.
    """
    one_of(SIGNALS, signal=signal)
    positive(rows=rows, columns=columns)
    if parties < 2 or classes < 2:
        raise UsageError(f"expected parties >= 2 and classes >= 2, got {parties} and {classes}")
    if signal == "hidden" and (classes != 2 or columns < 2):
        raise UsageError(f"expected classes=2 and columns >= 2 for signal=hidden, got {classes} and {columns}")
    rng = np.random.default_rng(derive(seed, "toy"))
    labels = rng.permutation(np.arange(rows) % classes)
    ids = pd.Index(np.arange(rows) + 1000, name="id")
    other = np.random.default_rng(derive(seed, "toy", "source"))
    others_labels = other.permutation(np.arange(source) % classes)
    others_ids = pd.Index(np.arange(source) + 1000 + rows, name="id")
    tables, others = [], None
    for k in range(parties):
        name = "active" if k == 0 else f"passive_{k}"
        names = [f"{name}_x{j}" for j in range(columns)]
        x, shifted = rng.normal(size=(rows, columns)), other.normal(size=(source, columns))
        if signal == "planted":
            means = 4.0 * rng.normal(size=(classes, columns))
            x, shifted = x + means[labels], shifted + means[others_labels]
        elif signal == "hidden":
            for own, y in ((x, labels), (shifted, others_labels)):
                own[:, 0] = np.abs(own[:, 0]) * np.sign(own[:, 1]) * (2 * y - 1)
        frame = pd.DataFrame(x, index=ids, columns=names).iloc[rng.permutation(rows)]
        foreign = pd.DataFrame(shifted + 1, index=others_ids, columns=names)
        if k == 0:
            others = PartyTable("source", foreign)
        elif source:
            frame = pd.concat([frame, foreign])
        tables.append(PartyTable(name, frame))
    return VerticalDataset(
        name="toy",
        parties=tuple(tables),
        labels=pd.Series(np.concatenate([labels, others_labels]), index=ids.append(others_ids)),
        classes=tuple(f"class_{c}" for c in range(classes)),
        card=Card(
            title=f"Toy federation, signal {signal}",
            source="drawn from a seed",
            licence="none needed",
            rows=rows,
            label=f"{classes} classes, equally frequent",
            split="the same number of columns for each party",
        ),
        source=others if source else None,
    )


def toy_federation(*, seed: int = 0, data: DataSpec | None = None, **options: Any) -> Federation:
    """Split ``toy(**options)`` and put its parties on a wire, without models; ``seed`` draws both data and split."""
    cell = Cell(
        dataset="toy",
        data=msgspec.structs.replace(data or DataSpec(), options={"seed": seed, **options}),
        method="fedsplitnn",
        method_options={},
        train=TrainSpec(),
        model=ModelSpec(),
        defenses=(),
        seed=seed,
    )
    return build_federation(cell, "cpu")


def tiny_federation(
    *, parties: int = 2, rows: int = 8, columns: int = 3, classes: int = 2, seed: int = 0
) -> Federation:
    """Make bare parties on a bare wire, with random features and no models: enough to send messages."""
    rng = generator(seed, "tiny world")
    channel = Channel()
    made = {}
    for k in range(parties):
        name = "active" if k == 0 else f"passive_{k}"
        features = {split: torch.randn(rows, columns, generator=rng) for split in SPLITS}
        y = torch.arange(rows) % classes
        labels = {split: y for split in ("train", "local", "val", "test")} if k == 0 else None
        made[name] = Party(name, features, channel, noise=partial(generator, seed, "noise", name), labels=labels)
    metric = "auc" if classes == 2 else "accuracy"
    return Federation(made, channel, classes, metric, seed, torch.device("cpu"))
