"""The seeded split of a dataset into training, validation and test rows of all parties.

    rows that all parties hold
    ├── test                            official, or drawn first: it depends on the seed and on ``test`` alone
    └── training rows, in one random order, of which each setting takes a prefix
        ├── held by all (overlap)
        │   ├── alignment known (aligned)       aligned, which is split into
        │   │   ├── label used (n_labeled)      train, and val at the end of the prefix
        │   │   └── label not used              unlabeled
        │   └── alignment not known             local, to every party
        └── dealt out                           local, to one party each

A dataset whose task defines the roles draws them itself; of DataSpec it reads only its options. Rows of another active
party, the source, have a role of their own.

With the same seed, fewer labels or a smaller overlap are a subset of more. ``aligned``, ``local`` and the encoding do
not depend on which labels are used, so that pre-training is shared between label budgets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.sparse import issparse, vstack

from vflsec.base.checks import check_fraction, check_inside, check_non_negative, check_positive
from vflsec.base.errors import DataError, UsageError
from vflsec.base.layout import Layout
from vflsec.base.seeds import derive
from vflsec.data.columns_split import ColumnSplit, deal_again
from vflsec.data.dataset import Card, PartyTable, VerticalDataset, align
from vflsec.data.encode import ColumnEncoder, Matrix
from vflsec.results.canaries import Canaries, toss
from vflsec.results.statistics import draw_groups


class DataSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the split of a dataset.

    Attributes:
        n_labeled: aligned training rows whose label the active party knows, including validation; None for the labels
            of all rows that it holds, aligned or not.
        aligned: fraction of the common training rows whose alignment the parties know, or how many if above 1.
        overlap: fraction of the training rows that every party holds, or how many if above 1; each other row is dealt
            to one party.
        test: fraction held out; ignored where the dataset has an official test set.
        validation: fraction of the labeled rows moved to validation.
        stratify: keep the class shares in test, validation and labeled rows.
        columns: how the columns are dealt to the parties: ``given``, ``even``, ``random``, ``dirichlet``, ``together``
            or ``apart``, see ``vflsec.data.columns_split``.
        parties: how many parties hold them; None for as many as the data have. Not with ``given``.
        concentration: of ``dirichlet``; small values give one party most columns.
        canaries: labeled training rows whose label is tossed between its own and another one, for an empirical epsilon
            (``--audit-epsilon``); utility and leaks are then of such labels.
        options: the dataset's own options.
    """

    n_labeled: int | None = None
    aligned: float = 1.0
    overlap: float = 1.0
    test: float = 0.3
    validation: float = 0.0
    stratify: bool = True
    columns: ColumnSplit = "given"
    parties: int | None = None
    concentration: float = 1.0
    canaries: int = 0
    options: dict[str, Any] = {}

    def __post_init__(self) -> None:
        """Raise UsageError unless every number is in its range."""
        if self.n_labeled is not None:
            check_positive(**{"data.n_labeled": self.n_labeled})
        for name, share in (("data.aligned", self.aligned), ("data.overlap", self.overlap)):
            if share <= 1:
                check_fraction(**{name: share})
            elif share % 1:
                raise UsageError(f"expected {name} as a fraction up to 1 or a whole number of rows, got {share}")
        check_inside(**{"data.test": self.test})
        if not 0 <= self.validation < 1:
            raise UsageError(f"expected 0 <= data.validation < 1, got {self.validation}")
        if self.parties is not None and self.columns == "given":
            raise UsageError("expected data.columns=even, random, dirichlet, together or apart with data.parties")
        check_non_negative(**{"data.canaries": self.canaries})
        if not 0 < self.concentration < 1e6:
            raise UsageError(f"expected 0 < data.concentration < 1e6, got {self.concentration}")


@dataclass(frozen=True)
class PartyData:
    """What one party feeds its network.

    Attributes:
        features: encoded rows (n, d) for ``train``, ``unlabeled``, ``val``, ``test`` and ``aligned`` (the first three
            together), row by row the same people at every party, and ``local``, the party's other training rows in its
            own order. Where there is a source, a passive party has also ``source``, row by row the same people as at
            the source, and ``adaptation``, rows of the active party's people; and the source has ``source`` alone.
        layout: which encoded columns stem from which raw column.
        local_ids: the ids of ``local``.
        encoder: what the encoder has learned of each column.
    """

    name: str
    features: dict[str, Matrix]
    layout: Layout
    local_ids: np.ndarray
    encoder: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Partition:
    """A split dataset.

    Attributes:
        parties: by name, the active party first.
        labels: int64 (n,) for ``train``, ``val``, ``test``, and for the active party's ``local`` rows, of which none
            has one where labels are scarce (``n_labeled``); nobody is to use those of ``unlabeled``. Those of
            ``source`` are the source's.
        ids: (n,) for all splits but ``local``, sorted: row order tells nothing of the draw.
        source: what the other active party holds, or None.
        places: by split, the positions (n_train,) of the training rows among its rows: of ``aligned``.
        names: what tables and pictures call a party, by its name here.
        canaries: the training rows whose labels were tossed, or None.
        groups: by split but ``local``, the group of each row, the same with each seed.
        used: the share of the smallest party's rows that all parties hold.
        warnings: what looks wrong in the data.
        card: the source of the data and their terms of use, or None.
    """

    dataset: str
    parties: dict[str, PartyData]
    labels: dict[str, np.ndarray]
    ids: dict[str, np.ndarray]
    classes: tuple[str, ...]
    metric: str
    source: PartyData | None = None
    places: dict[str, np.ndarray] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    canaries: Canaries | None = None
    groups: Mapping[str, NDArray[np.integer]] = field(default_factory=dict)
    used: float = 1.0
    warnings: tuple[str, ...] = ()
    card: Card | None = None


def split_dataset(dataset: VerticalDataset, spec: DataSpec, seed: int) -> Partition:
    """Split ``dataset`` by rows and encode every party's columns.

    Raises:
        UsageError: more labeled rows asked for than there are aligned ones, more canaries than labeled rows, or a split
            where the dataset has its own.
        DataError: the parties share no id, or a class is missing in the training, the test or the source's rows.
    """
    if spec.columns != "given":
        dataset = deal_again(dataset, spec.columns, spec.parties, spec.concentration, seed)
    shared, dealt = _draw_roles(dataset, spec, seed) if dataset.draw else draw_rows(dataset, spec, seed)
    ids = {split: index.sort_values() for split, index in shared.items()}
    foreign = _take_foreign(dataset, ids)
    every = {**ids, **foreign}
    labeled: tuple[str, ...] = ("train", "val", "test", *(["source"] if dataset.source else []))
    labels = {split: dataset.labels.loc[every[split]].to_numpy(np.int64) for split in labeled}
    for split, way_out in (
        ("train", "raise n_labeled, aligned or overlap, or drop the class"),
        ("test", "raise test, keep stratify on, or drop the class"),
        ("source", "give the source rows of it"),
    ):
        if split in labels and not (counts := np.bincount(labels[split], minlength=len(dataset.classes))).all():
            got = f"no {dataset.classes[int(counts.argmin())]!r}"
            rows = f"the {len(labels[split])} {split} rows"
            raise DataError(f"expected every class among {rows}, got {got}: {way_out}")
    canaries = None
    if spec.canaries:
        if spec.canaries > len(labels["train"]):
            raise UsageError(
                f"expected at most the {len(labels['train'])} labeled training rows for data.canaries, got "
                f"{spec.canaries}: lower it (--audit-epsilon), or raise data.n_labeled"
            )
        rng = np.random.default_rng(derive(seed, "canaries"))
        labels["train"], canaries = toss(labels["train"], spec.canaries, len(dataset.classes), rng)
    active, *passive = dataset.parties
    parties = {active.name: _encode_party(active, dataset, ids, dealt)}
    parties |= {table.name: _encode_party(table, dataset, ids, dealt, foreign) for table in passive}
    local = pd.Index(parties[active.name].local_ids)
    labels["local"] = dataset.labels.loc[local[:0] if spec.n_labeled else local].to_numpy(np.int64)
    arrays = {split: index.to_numpy() for split, index in every.items()}
    source = None
    if dataset.source:
        frame = dataset.source.frame.loc[foreign["source"]]
        encoder = ColumnEncoder(dataset.source, frame)
        nobody = foreign["source"][:0].to_numpy()
        source = PartyData(dataset.source.name, {"source": encoder(frame)}, encoder.layout, nobody)
    places = {"aligned": ids["aligned"].get_indexer(ids["train"])}
    facts = dataset.classes, dataset.metric
    drawn = draw_groups(len(dataset.labels))
    groups = {split: drawn[dataset.labels.index.get_indexer(index)] for split, index in every.items()}
    used = len(dataset.common) / min(len(table.frame) for table in dataset.parties)
    return Partition(
        dataset.name, parties, labels, arrays, *facts, source, places, names=dataset.names, canaries=canaries,
        groups=groups, used=used, warnings=dataset.warnings, card=dataset.card,
    )  # fmt: skip


def _draw_roles(dataset: VerticalDataset, spec: DataSpec, seed: int) -> tuple[dict[str, pd.Index], dict[str, pd.Index]]:
    """Return the ids of each role in the dataset's task; nothing is dealt out."""
    assert dataset.draw is not None
    if msgspec.structs.replace(spec, options={}, canaries=0) != DataSpec():
        raise UsageError(
            f"expected no setting in data but options with {dataset.name}, whose task defines the role of each row: "
            f"see vflsec show dataset {dataset.name}"
        )
    roles = dataset.draw(seed)._asdict()
    if dataset.source is None:  # the source's rows are the active party's own
        del roles["source"], roles["adaptation"]
    return {**roles, "aligned": roles["train"].append([roles["unlabeled"], roles["val"]])}, {}


def _take_foreign(dataset: VerticalDataset, ids: dict[str, pd.Index]) -> dict[str, pd.Index]:
    """Remove from ``ids``, and return, the source's rows and the rows for adaptation."""
    if dataset.source is None:
        return {}
    if dataset.draw:
        return {split: ids.pop(split) for split in ("source", "adaptation")}
    held = dataset.source.frame.index.intersection(align(dataset.parties[1:]))
    return {"source": held.sort_values(), "adaptation": ids["aligned"]}


def draw_rows(dataset: VerticalDataset, spec: DataSpec, seed: int) -> tuple[dict[str, pd.Index], dict[str, pd.Index]]:
    """Return the ids of each shared split, and those dealt to each party."""
    labels = dataset.labels.loc[dataset.common]
    if dataset.test_ids is None:
        order = _order(labels, derive(seed, "split", "test"), spec.stratify)
        test, rest = _cut(order, spec.test)
        pool = labels.loc[rest.sort_values()]
    else:
        official = labels.index.isin(dataset.test_ids)
        test, pool = labels.index[official], labels[~official]

    order = _order(pool, derive(seed, "split", "rows"), spec.stratify)
    held, rest = _cut(order, spec.overlap)
    aligned, _ = _cut(held, spec.aligned)
    n_labeled = len(aligned) if spec.n_labeled is None else spec.n_labeled
    if n_labeled > len(aligned):
        raise UsageError(f"expected n_labeled <= {len(aligned)}, the aligned training rows, got {n_labeled}")
    train, val = _cut(aligned[:n_labeled], 1 - spec.validation)

    # A row is dealt by its position in the order, so that a larger overlap moves no row between parties.
    owner = np.arange(len(held), len(order)) % len(dataset.parties)
    dealt = {table.name: rest[owner == k] for k, table in enumerate(dataset.parties)}
    return {"train": train, "unlabeled": aligned[n_labeled:], "val": val, "test": test, "aligned": aligned}, dealt


def _order(labels: pd.Series, seed: int, stratify: bool) -> pd.Index:
    """Return the ids in a random order; if stratified, each prefix holds each class's share to within a row."""
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(len(labels))
    if not stratify:
        return labels.index[shuffled]
    classes, place = labels.to_numpy()[shuffled], np.empty(len(labels))
    for label in np.unique(classes):
        members = classes == label
        count = members.sum()
        place[members] = (np.arange(count) + rng.random()) / count  # evenly spaced between 0 and 1
    return labels.index[shuffled[np.argsort(place, kind="stable")]]


def _cut(ids: pd.Index, share: float) -> tuple[pd.Index, pd.Index]:
    count = round(share * len(ids)) if share <= 1 else int(share)
    if count > len(ids):
        raise UsageError(
            f"expected at most the {len(ids)} rows there are for data.overlap or data.aligned, got {count}"
        )
    return ids[:count], ids[count:]


def _encode_party(
    table: PartyTable,
    dataset: VerticalDataset,
    ids: dict[str, pd.Index],
    dealt: dict[str, pd.Index],
    foreign: dict[str, pd.Index] | None = None,
) -> PartyData:
    frame, foreign = table.frame, foreign or {}
    elsewhere = [*ids.values(), *(rows for name, rows in dealt.items() if name != table.name)]
    if dataset.test_ids is not None:
        elsewhere.append(dataset.test_ids)  # also those test rows that not all parties hold
    if dataset.source is not None:
        elsewhere.append(dataset.source.frame.index)
    # If the task defines the roles, rows without a role are unused.
    local = frame.index[:0] if dataset.draw else frame.index[~frame.index.isin(elsewhere[0].append(elsewhere[1:]))]

    encoder = ColumnEncoder(table, frame.loc[ids["aligned"].append([local, foreign.get("source", local[:0])])])
    features = {split: encoder(frame.loc[rows]) for split, rows in {**ids, **foreign, "local": local}.items()}
    if len(ids["train"]) == len(ids["aligned"]):  # the same rows need no second copy
        features["aligned"] = features["train"]
    return PartyData(table.name, features, encoder.layout, local.to_numpy(), encoder.describe())


def exchange_rows(data: Partition, rows: NDArray[np.integer]) -> Partition:
    """Return ``data`` with other training and test rows, encoded as before.

    ``rows`` (n_train + n_test,) are their positions in the old training and test rows together, a permutation. All
    splits that hold training rows, such as ``aligned``, hold the new ones in their place. The result has no canaries.
    """
    n_train = len(data.ids["train"])
    of_training = {
        split: pd.Index(data.ids["train"]).get_indexer(pd.Index(ids))
        for split, ids in data.ids.items()
        if split not in ("train", "test")
    }

    def exchange(by_split: dict[str, Any]) -> dict[str, Any]:
        pool = stack_rows([by_split[split] for split in ("train", "test")])
        result = {**by_split, "train": pool[rows[:n_train]], "test": pool[rows[n_train:]]}
        for split in by_split.keys() & of_training.keys():
            at, values = of_training[split], by_split[split]
            if values is by_split["train"]:  # the same rows need no second copy
                result[split] = result["train"]
            elif (at >= 0).any():
                result[split] = stack_rows([values, pool])[np.where(at >= 0, len(at) + rows[at], np.arange(len(at)))]
        return result

    parties = {name: replace(party, features=exchange(party.features)) for name, party in data.parties.items()}
    labels, ids, groups = (exchange(dict(part)) if part else {} for part in (data.labels, data.ids, data.groups))
    return replace(data, parties=parties, labels=labels, ids=ids, groups=groups, canaries=None)


def replace_test(data: Partition, *, keep: bool) -> Partition:
    """Return ``data`` with the validation rows in the place of the test rows; with ``keep``, in their own as well."""
    if len(np.unique(held_out := data.labels["val"])) < 2:
        raise DataError(f"expected two classes to validate on, got {len(held_out)} rows of one: raise data.n_labeled")

    def exchange(by_split: Mapping[str, Any]) -> dict[str, Any]:
        return {**by_split, "test": by_split["val"], "val": by_split["val"][: None if keep else 0]}

    parties = {name: replace(party, features=exchange(party.features)) for name, party in data.parties.items()}
    tables: dict[str, Any] = {name: exchange(getattr(data, name)) for name in ("labels", "ids", "groups")}
    return replace(data, parties=parties, **tables)


def stack_rows(parts: Sequence[Any]) -> Any:
    """Return the rows of several arrays, or of several sparse matrices, below each other."""
    return vstack(parts, format="csr") if issparse(parts[0]) else np.concatenate(parts)
