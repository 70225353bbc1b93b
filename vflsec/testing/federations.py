"""Toy federations with a known leak, for tests, and trees grown on them."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pandas as pd
import torch
from torch import Tensor

from vflsec.base.checks import check_positive, expect_known
from vflsec.base.errors import UsageError
from vflsec.base.seeds import derive, make_rng
from vflsec.core.federation import Federation
from vflsec.core.message import Channel, Kind, Message, Transcript
from vflsec.core.method import Trained
from vflsec.core.party import Party
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.data.bundle import name_passive
from vflsec.data.dataset import Card, PartyTable, VerticalDataset
from vflsec.data.partition import DataSpec
from vflsec.methods.secureboost import SecureBoost
from vflsec.run.cell import Cell
from vflsec.run.federation import build_federation
from vflsec.run.plan import make_cell

SIGNALS = ("planted", "hidden", "none")
SPLITS = ("train", "unlabeled", "aligned", "local", "val", "test")


def make_toy(
    *,
    rows: int = 600,
    parties: int = 2,
    classes: int = 2,
    columns: int = 6,
    signal: str = "planted",
    seed: int = 0,
    source: int = 0,
) -> VerticalDataset:
    """Make data with a known leak.

    Args:
        rows: number of samples, the same ids at every party, each party in its own order.
        parties: K >= 2.
        classes: C >= 2, equally frequent.
        columns: per party.
        signal: ``planted``: each party's columns reveal the class to whoever has some labels. ``hidden``: the class is
            the sign of a product of two columns, which a model trained on many labels learns, but not on few.
            ``none``: the columns are independent of the class.
        seed: of the draw.
        source: rows of a second active party, with columns shifted by one, which passive parties hold as well; or 0.

    Raises:
        UsageError: an unknown signal, or numbers too small.
    """
    expect_known(SIGNALS, signal=signal)
    check_positive(rows=rows, columns=columns)
    if parties < 2 or classes < 2:
        raise UsageError(f"expected parties >= 2 and classes >= 2, got {parties} and {classes}")
    if signal == "hidden" and (classes != 2 or columns < 2):
        raise UsageError(f"expected classes=2 and columns >= 2 for signal=hidden, got {classes} and {columns}")
    rng, other = (np.random.default_rng(derive(seed, *stream)) for stream in (("toy",), ("toy", "source")))
    labels, source_labels = (r.permutation(np.arange(n) % classes) for r, n in ((rng, rows), (other, source)))
    everyone = pd.Index(np.arange(rows + source) + 1000, name="id")
    tables, source_table = [], None
    for name in ["active", *name_passive(parties - 1)]:
        names = [f"{name}_x{j}" for j in range(columns)]
        x, shifted = rng.normal(size=(rows, columns)), other.normal(size=(source, columns))
        means = 4.0 * rng.normal(size=(classes, columns)) if signal == "planted" else None
        frame = pd.DataFrame(_with_signal(x, labels, signal, means), everyone[:rows], names)
        frame = frame.iloc[rng.permutation(rows)]
        foreign = pd.DataFrame(_with_signal(shifted, source_labels, signal, means) + 1, everyone[rows:], names)
        if source and name == "active":
            source_table = PartyTable("source", foreign)
        tables.append(PartyTable(name, pd.concat([frame, foreign]) if source and name != "active" else frame))
    all_labels = pd.Series(np.concatenate([labels, source_labels]), index=everyone)
    named = tuple(f"class_{c}" for c in range(classes))
    card = Card(
        title=f"Toy federation, signal {signal}",
        source="drawn from a seed",
        license="none needed",
        rows=rows,
        label=f"{classes} classes, equally frequent",
        split="the same number of columns for each party",
    )
    return VerticalDataset("toy", tuple(tables), all_labels, named, card=card, source=source_table)


def _with_signal(x: np.ndarray, labels: np.ndarray, signal: str, means: np.ndarray | None) -> np.ndarray:
    if means is not None:
        return np.asarray(x + means[labels])
    if signal == "hidden":
        x[:, 0] = np.abs(x[:, 0]) * np.sign(x[:, 1]) * (2 * labels - 1)
    return x


def make_toy_federation(*, seed: int = 0, data: DataSpec | None = None, **options: Any) -> Federation:
    """Return the federation of ``make_toy(**options)``, without models; ``seed`` draws both data and split."""
    return build_federation(make_toy_cell(seed=seed, data=data, **options), "cpu")


def make_toy_cell(
    *,
    seed: int = 0,
    data: DataSpec | None = None,
    train: TrainSpec | None = None,
    model: ModelSpec | None = None,
    **options: Any,
) -> Cell:
    """Return the cell of split learning on ``make_toy(**options)``; ``seed`` draws both data and split."""
    return make_cell(
        dataset="toy",
        data=msgspec.structs.replace(data or DataSpec(), options={"seed": seed, **options}),
        method="fedsplitnn",
        method_options={},
        train=train or TrainSpec(),
        model=model or ModelSpec(),
        defenses=(),
        seed=seed,
    )


def build_from_numbers(
    columns: Mapping[str, Mapping[str, Tensor]], labels: Mapping[str, Tensor], *, n_classes: int = 2, seed: int = 0
) -> Federation:
    """Return the federation of parties that hold given numbers, without models.

    Columns (n, d) are by party and split, labels (n,) by split; the active party is the first. Splits that are not
    given have no rows.
    """
    channel = Channel()
    made: dict[str, Party] = {}
    for name, by_split in columns.items():
        empty = next(iter(by_split.values()))[:0]
        features = {split: by_split.get(split, empty) for split in SPLITS}
        y = {split: labels.get(split, torch.zeros(len(x), dtype=torch.long)) for split, x in features.items()}
        noise = partial(make_rng, seed, "noise", name)
        made[name] = Party(name, features, channel, noise=noise, labels=None if made else y)
    metric = "auc" if n_classes == 2 else "accuracy"
    return Federation(made, channel, n_classes, metric, seed, torch.device("cpu"))


def make_tiny_federation(
    *, parties: int = 2, rows: int = 8, columns: int = 3, classes: int = 2, seed: int = 0
) -> Federation:
    """Return parties with random features and no models, which can send messages."""
    rng = make_rng(seed, "tiny world")
    features = {
        name: {split: torch.randn(rows, columns, generator=rng) for split in SPLITS}
        for name in ["active", *name_passive(parties - 1)]
    }
    labels = dict.fromkeys(SPLITS, torch.arange(rows) % classes)
    return build_from_numbers(features, labels, n_classes=classes, seed=seed)


SMALL = {"exchange": "plain", "rounds": 10, "depth": 3, "bins": 16, "leaf_rows": 5}
"""Options of ``secureboost`` for tests: few trees, derivatives in clear."""


class Grown(NamedTuple):
    """A federation with trees.

    Attributes:
        trained: the method and the parties.
        messages: of training and of the prediction of test rows, of all parties in order.
    """

    trained: Trained
    messages: tuple[Message, ...]

    def get_messages(self, name: str) -> tuple[Message, ...]:
        """Return the messages that a party, or those of ``passive_1+passive_2``, sent or received."""
        names = set(name.split("+"))
        return tuple(m for m in self.messages if m.readers & names)


def grow_trees(federation: Federation, **options: Any) -> Grown:
    """Train ``secureboost`` on a federation without models, with ``options`` beside ``SMALL``; predict test rows."""
    tap = Transcript(frozenset(federation.parties), frozenset(Kind))
    federation.channel.taps.append(tap)
    trained = SecureBoost(TrainSpec(), ModelSpec(), **{**SMALL, **options}).fit(federation)
    trained.predict("test")
    return Grown(trained, tuple(tap.messages))
