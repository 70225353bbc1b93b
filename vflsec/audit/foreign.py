"""A federation around a system that was trained elsewhere: its material takes the place of trained models."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from vflsec.audit.opening import block_exit
from vflsec.audit.subject import Subject, join_names
from vflsec.audit.transcript_lines import Sent
from vflsec.base.checks import count, describe_unknown
from vflsec.base.errors import InsufficientView, UsageError, clean
from vflsec.base.layout import EncodedColumn, Layout
from vflsec.base.seeds import make_rng
from vflsec.base.sparse_rows import to_tensor
from vflsec.core.federation import Federation
from vflsec.core.message import Channel, Kind, Message
from vflsec.core.method import Method, Progress, Trained
from vflsec.core.party import Party
from vflsec.core.scaling import Bounds
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.data.dataset import Roles, VerticalDataset
from vflsec.data.encode import densify
from vflsec.data.partition import Partition
from vflsec.results.records.manifest import AUDITED
from vflsec.run.spec import AuxSpec

SPLITS = ("train", "test")


class Foreign(Method):
    """A system that was trained elsewhere. It cannot be trained; its adversary's model is whatever was handed in."""

    name = AUDITED
    reference = "none"
    messages = {"train": frozenset({Kind.EMBEDDING, Kind.GRADIENT, Kind.NODES})}  # noqa: RUF012  (declared ClassVar in the base class)
    receives = {}  # noqa: RUF012

    def build(self, federation: Federation) -> None:
        """Leave the parties as they are."""

    def train(self, phase: str, federation: Federation, progress: Progress) -> list[float]:
        """Raise UsageError."""
        raise UsageError("expected a system that is already trained: it cannot be trained here")

    def predict(self, federation: Federation, split: str) -> Tensor:
        """Raise InsufficientView: no joint model was handed in."""
        raise InsufficientView("it needs predictions of the joint model, which were not handed in")

    def representation(self, party: Party) -> nn.Module:
        """Return the party's bottom model, or the identity if it was not handed in."""
        bottom = party.modules["bottom"] if "bottom" in party.modules else nn.Identity()
        assert isinstance(bottom, nn.Module)
        return bottom


class LastColumns(nn.Module):
    """Returns the last columns of its input, in the units that they had before they were standardized by these."""

    mean: Tensor
    scale: Tensor

    def __init__(self, mean: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, width) of (B, columns + width)."""
        return x[:, -len(self.mean) :] * self.scale + self.mean


def assign_roles(
    dataset: VerticalDataset, subject: Subject, train: pd.Index | None, test: pd.Index | None
) -> tuple[VerticalDataset, list[str]]:
    """Return ``dataset`` with the rows that the model was and was not trained on, and notes on rows left out.

    Args:
        dataset: whose ids are text or numbers.
        subject: which may know the rows.
        train: ids given by the user, besides those of the subject; None for the latter alone.
        test: likewise; if there are none at all, all rows that the model was not trained on.

    Raises:
        UsageError: nothing tells which rows the model was trained on, or none of them is in the data.
    """
    if dataset.draw is not None or dataset.source is not None:
        raise UsageError(f"expected data of which any row can be of training or test, got {dataset.name}")
    aligned = dataset.common
    by_text = pd.Series(aligned, index=aligned.astype(str))
    asked = subject.train if train is None else subject.train.union(train)
    held_out = subject.test if test is None else test
    if not len(asked) and train is None and test is not None:
        asked = by_text.index.difference(test)
    if not len(asked):
        raise UsageError(f"{subject.name} does not tell which rows the model was trained on: add --train-ids FILE")
    both = asked.intersection(held_out)
    if len(both):
        raise UsageError(
            f"expected rows either of training or of test, found {count(len(both), 'row')} in both, such as "
            f"{both[0]!r}: a row that the model was trained on is no test row"
        )
    known = by_text.index.intersection(asked)
    if not len(known):
        raise UsageError(
            f"expected rows of {dataset.name} in {subject.name}, found none of {len(asked)} ids, such as "
            f"{asked[0]!r}; the data have {by_text.index[0]!r}: use the same ids"
        )
    others = by_text.index.difference(known)
    unseen = others.intersection(held_out) if len(held_out) else others
    if not len(unseen):
        raise UsageError("expected rows that the model was not trained on, found none: add --test-ids FILE")
    notes: list[str] = []
    _check_form(asked.union(held_out).difference(by_text.index), by_text.index, subject)
    for ids, role in ((asked, "training"), (held_out, "test")):
        lacking = len(ids.difference(by_text.index))
        if lacking:
            notes.append(
                f"{count(lacking, 'row')} of {len(ids)} {role} rows of {subject.name} not in the data, left out"
            )
    nobody = aligned[:0]
    roles = Roles(pd.Index(by_text[known]), nobody, nobody, pd.Index(by_text[unseen]), nobody, nobody)
    return replace(dataset, draw=lambda seed: roles, test_ids=None), notes


def _check_form(lacking: pd.Index, known: pd.Index, subject: Subject) -> None:
    """Raise UsageError if ids that are not in the data would be as numbers: ``007`` is 7 there."""
    for text in lacking:
        number = str(int(float(text))) if re.fullmatch(r"\s*[+-]?\d{1,15}(\.0*)?\s*", text) else None
        if number in known:
            raise UsageError(
                f"expected ids as in the data, got {text!r} of {subject.name}, where the data have {number!r}: use the "
                f"same form in both"
            )


def select_known_labels(aux: AuxSpec, ids: pd.Index, data: Partition) -> AuxSpec:
    """Return ``aux`` for the rows whose labels the adversary knows.

    Raises:
        UsageError: one of them is no training row, or a class is missing among them or among the others.
    """
    train = pd.Index(data.ids["train"].astype(str).astype(object))
    lacking = ids.difference(train)
    if len(lacking):
        raise UsageError(f"expected training rows in --aux-ids, found {lacking[0]!r}, which is none")
    labels = data.labels["train"]
    among = train.isin(ids)
    for which, rows in (("", among), ("the rows outside of ", ~among)):
        missing = set(range(len(data.classes))) - set(labels[rows])
        if missing:
            name = data.classes[min(missing)]
            raise UsageError(f"expected a row of every class in {which}--aux-ids, found none of {name!r}")
    return msgspec.structs.replace(aux, n=int(among.sum()))


def check_classes(classes: int | None, data: Partition, name: str) -> None:
    """Raise UsageError if the material ``name`` states another number of classes than the data have."""
    if classes not in (None, len(data.classes)):
        raise UsageError(
            f"expected data with the {classes} classes that {name} states, found {len(data.classes)}: use the data "
            f"of the training"
        )


def build_federation(data: Partition, subject: Subject, seed: int, *, alone: bool = False) -> Trained:
    """Return the parties with their columns, and the adversary with what was handed in; a seed draws known samples.

    The inputs of the adversary's model, or its embeddings, are appended to its columns; the latter not if it is
    ``alone``, as if it had never joined.
    """
    channel, device = Channel(), torch.device("cpu")
    labels = {split: torch.tensor(y) for split, y in data.labels.items()}
    parties = {}
    for name, part in data.parties.items():
        features, layout, bottom = {s: to_tensor(x) for s, x in part.features.items()}, part.layout, None
        if name == subject.adversary:
            bottom = subject.model
            table = subject.inputs if subject.model is not None else None if alone else subject.embeddings
            if table is not None and (rows := _split_rows(table, data)):
                last, features = _append_columns(features, rows)
                extra = (EncodedColumn(f"embedding_{k}", "numeric", layout.width + k, 1) for k in range(len(last.mean)))
                layout = Layout((*layout.columns, *extra))
                bottom = nn.Sequential(last, *([bottom] if bottom is not None else []))
        noise, known = partial(make_rng, seed, "noise", name), labels if name == "active" else None
        party = Party(name, features, channel, noise=noise, layout=layout, labels=known)
        if bottom is not None:
            party.modules["bottom"] = bottom.eval()
        parties[name] = party
    federation = Federation(parties, channel, len(data.classes), data.metric, seed, device)
    federation.places = {split: torch.tensor(rows) for split, rows in data.places.items()}
    return Trained(Foreign(TrainSpec(), ModelSpec()), federation, {})


def convert_messages(data: Partition, sent: Sequence[Sent]) -> Iterator[Message]:
    """Yield messages with positions in place of ids; rows that are not in the data are left out."""
    places = {split: _to_texts(data.ids[split]) for split in SPLITS}
    for m in sent:
        for split, ids in places.items():
            positions = ids.get_indexer(pd.Index(m.rows))
            kept = positions >= 0
            if kept.any() and m.kind in (Kind.EMBEDDING, Kind.GRADIENT, Kind.NODES):
                kind, value = Kind(m.kind), torch.from_numpy(np.ascontiguousarray(m.values[kept]))
                payload = {"value": value.long() if kind is Kind.NODES else value}
                rows = torch.from_numpy(positions[kept])
                yield Message(kind, m.sender, m.receiver, m.step, m.phase, payload, rows, split)


def convert_predictions(data: Partition, table: pd.DataFrame | None) -> dict[str, Tensor]:
    """Return predictions (n, d) of each split of which some are in ``table``; other rows get the median of these."""
    predictions: dict[str, Tensor] = {}
    if table is None:
        return predictions
    for split in SPLITS:
        positions = table.index.get_indexer(_to_texts(data.ids[split]))
        if (positions >= 0).any():
            values = table.to_numpy(np.float32)[positions]
            values[positions < 0] = np.median(values[positions >= 0], axis=0)
            predictions[split] = torch.from_numpy(values)
    return predictions


def _to_texts(ids: np.ndarray) -> pd.Index:
    texts: pd.Index = pd.Index(ids.astype(str).astype(object))
    return texts


def add_embeddings(subject: Subject, data: Partition) -> Subject:
    """Return ``subject`` with the embeddings of all rows, if it has a function; check its model on one batch.

    Raises:
        UsageError: the model does not read these columns, or gives no vectors.
    """
    part = data.parties[subject.adversary]
    ids = _to_texts(np.concatenate([data.ids[split].astype(str) for split in SPLITS]))
    if subject.function is not None:
        if subject.inputs is None:
            inputs = np.concatenate([densify(part.features[split]) for split in SPLITS])
        else:
            inputs = subject.inputs.reindex(ids).to_numpy(np.float32)
        return replace(subject, embeddings=pd.DataFrame(subject.function(inputs), index=ids))
    if subject.model is None:
        return _drop_partial_embeddings(subject, ids)
    party = build_federation(data, subject, 0).federation.parties[subject.adversary]
    bottom, x = party.modules["bottom"], party.features["train"][:8]
    assert isinstance(bottom, nn.Module)
    width = part.layout.width if subject.inputs is None else subject.inputs.shape[1]
    parts = [f"{column.name} ({column.width})" if column.width > 1 else column.name for column in part.layout.columns]
    way_out = (
        f" as vflsec encodes them ({join_names(parts, 20)}); add --encoded if it reads them as they are, or write them "
        f"as it reads them into another file"
    )
    try:
        with torch.no_grad(), block_exit():
            out = bottom(x)
    except (Exception, SystemExit) as error:  # noqa: BLE001  (the user's own code)
        raise UsageError(
            f"the model of {subject.name} cannot read the {width} columns of {subject.adversary}"
            f"{way_out * (subject.inputs is None)}: "
            f"{type(error).__name__}: {clean(' '.join(str(error).split()))[:200]}"
        ) from None
    if not isinstance(out, Tensor) or out.dim() != 2 or len(out) != len(x) or not torch.isfinite(out).all():
        shape = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise UsageError(
            f"expected the model of {subject.name} to return finite embeddings (B, d), got {shape} of {len(x)} rows"
        )
    return subject


def _drop_partial_embeddings(subject: Subject, ids: pd.Index) -> Subject:
    """Return ``subject``, without embeddings if a transcript has them of some rows only.

    Raises:
        UsageError: a table has them of some rows only.
    """
    if subject.embeddings is None:
        return subject
    lacking = ids.difference(subject.embeddings.index)
    if not len(lacking):
        return subject
    if not subject.messages:
        raise UsageError(
            f"expected an embedding of every row of training and test in {subject.name}, found none of "
            f"{join_names(map(repr, lacking), 2)}: add them, or leave these rows out of --train-ids and --test-ids"
        )
    note = (
        f"{subject.name} has no embedding of {count(len(lacking), 'row')}, so that attacks that need the bottom model "
        f"cannot run: record all rows once after training"
    )
    return replace(subject, embeddings=None, notes=(*subject.notes, note))


def list_inputs(dataset: VerticalDataset, party: str) -> pd.DataFrame:
    """Return the columns of ``party`` as they are, indexed by id as text.

    Raises:
        UsageError: no such party, or a column that holds no numbers.
    """
    tables = {table.name: table for table in dataset.parties}
    if party not in tables:
        raise UsageError(describe_unknown("--party", party, tables))
    frame = tables[party].frame
    texts = [str(name) for name in frame.columns if not pd.api.types.is_numeric_dtype(frame[name].dtype)]
    if texts:
        raise UsageError(
            f"expected numbers in all columns of {party} with --encoded, found text in {join_names(texts)}"
        )
    return frame.set_axis(pd.Index(frame.index.astype(str).astype(object))).astype(np.float32)


def _split_rows(table: pd.DataFrame, data: Partition) -> dict[str, Tensor] | None:
    """Return the vectors (n, d) of each split; None if some row of training or test has none."""
    positions = {split: table.index.get_indexer(_to_texts(ids)) for split, ids in data.ids.items()}
    if any((positions[split] < 0).any() for split in SPLITS):
        return None
    return {split: torch.from_numpy(table.to_numpy(np.float32)[at]) for split, at in positions.items()}


def _append_columns(features: dict[str, Tensor], rows: dict[str, Tensor]) -> tuple[LastColumns, dict[str, Tensor]]:
    """Return features with standardized ``rows`` appended, and the module that undoes the standardizing."""
    middle, scale = Bounds.from_columns(rows["train"])
    middle, scale = middle.float(), torch.where(torch.isinf(scale), 1.0, scale).float()
    nothing = torch.zeros(0, len(middle))
    joined = {
        split: torch.cat([x, ((rows.get(split, nothing) - middle) / scale)], dim=1) for split, x in features.items()
    }
    return LastColumns(middle, scale), joined
