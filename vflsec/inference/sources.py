"""What an adversary holds about each row, as tables: one for each way of reading each thing that it saw."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vflsec.core.message import Kind
from vflsec.core.view import View
from vflsec.inference.releases import TURNS, Releases, latest, percentiles, received

Table = Mapping[str, Tensor]
"""By split of the view, numbers about each row, (n, k)."""


COLUMNS = "columns"
"""The table of own columns."""


class Source(NamedTuple):
    """One table.

    Attributes:
        table: the numbers.
        distances: whether it is also worth reading by the distances between rows, as it is where rows of one class can
            form several clusters, or rows of several classes many.
        derived: whether another table reads the same messages in more detail, or as much: a model of all tables' joint
            density leaves it out.
    """

    table: Table
    distances: bool = False
    derived: bool = False


def sources(view: View) -> dict[str, Source]:
    """Return every table that ``view`` gives, by a readable name; equal tables are returned once.

    =============== =================================================================================================
    source          tables
    =============== =================================================================================================
    own columns     as they are
    own model       embeddings of the own columns
    other models    that the adversary assembled from received parameters: likewise
    own labels      of an active party, one-hot
    predictions     logits of the joint model
    gradients       by sender and phase: the mean of a row's releases in units of each message's noise, the same
                    whitened, the mean direction, the mean of each third of training, and the length
    embeddings      by sender and phase: the last release, and the mean of the last few
    =============== =================================================================================================

    Every table covers the split of the auxiliary rows, so that a model can be fitted to it, and each other split for
    which the adversary holds the same. Tables are computed once for a view and its copies; they must not be changed.
    """
    if "sources" not in view.memo:
        view.memo["sources"] = _sources(view)
    found: dict[str, Source] = view.memo["sources"]
    return found


def _sources(view: View) -> dict[str, Source]:
    found = {COLUMNS: Source(view.features, distances=True)}
    models = {} if view.model is None else {"own embedding": view.model}
    with torch.no_grad():
        for name, model in {**models, **view.models}.items():
            found[name] = Source({split: model(own) for split, own in view.features.items()}, distances=True)
    if view.labels:
        n_classes = 1 + max(int(y.max()) for y in view.labels.values())
        found["own labels"] = Source({split: F.one_hot(y, n_classes) for split, y in view.labels.items()})
    if view.predictions:
        found["predictions"] = Source(view.predictions)
    routes = _routes(view)
    for kind, sender, phase in routes:
        name = f"{kind} from {sender} in {phase}"
        if kind is Kind.GRADIENT:
            releases = received(view, kind, split=view.aux_split, sender=sender, phase=phase)
            readings = dict(_readings(releases))
            finest = "mean" if torch.equal(readings["mean"], readings["thirds"]) else "thirds"
            found |= {
                f"{name}: {how}": Source({view.aux_split: x}, distances=how == "direction", derived=how != finest)
                for how, x in readings.items()
            }
        else:
            last = phase == [p for k, s, p in routes if (k, s) == (kind, sender)][-1]
            found |= {f"{name}: last {n}": Source(x) for n, x in _averages(view, sender, phase, with_other_splits=last)}
    return _distinct(found, view.aux_split)


def _routes(view: View) -> list[tuple[Kind, str, str]]:
    """Return kind, sender and phase of the gradients and embeddings received about the rows to infer, in order."""
    about = {view.aux_split, *view.places} if view.aux_split == "train" else {view.aux_split}
    names = view.party.split("+")
    found = {
        (m.kind, m.sender, m.phase): None
        for m in view.messages
        if m.kind in (Kind.GRADIENT, Kind.EMBEDDING) and m.receiver in names and m.split in about
    }
    return list(found)


def _readings(releases: Releases) -> Iterator[tuple[str, Tensor]]:
    """Yield what may be read of the gradients of each row, (n, k)."""
    steady = releases.steady()
    length = torch.linalg.vector_norm(releases.values, dim=1)
    mean = steady.mean(steady.values)
    yield "mean", mean
    yield "whitened mean", _whitened(mean)
    yield "direction", releases.mean(F.normalize(releases.values, dim=1))
    thirds = 3 * releases.turn // (int(releases.turn.max()) + 1)
    parts = [steady.where(thirds == k) for k in range(3) if (thirds == k).any()]
    yield "thirds", torch.cat([part.mean(part.values) for part in parts], dim=1)
    typical = releases.mean(length[:, None]).clamp_min(torch.finfo(length.dtype).tiny).log()
    yield "length", torch.cat([typical, releases.mean(percentiles(releases, length)[:, None])], dim=1)


def _whitened(x: Tensor) -> Tensor:
    """Return ``x`` (n, k) with the identity as covariance, in as many directions as it has."""
    centered = x.double() - x.double().mean(dim=0)
    variances, axes = torch.linalg.eigh(centered.T @ centered / len(x))
    kept = variances > 1e-9 * variances[-1].clamp_min(torch.finfo(x.dtype).tiny)
    found: Tensor = centered @ axes[:, kept] / variances[kept].sqrt()
    return found


def _averages(view: View, sender: str, phase: str, *, with_other_splits: bool) -> Iterator[tuple[int, Table]]:
    """Yield the mean of the last few embeddings of each row of the auxiliary rows' split, by how many.

    Other splits have one release, at prediction: they go with the last release alone.
    """
    for turns in TURNS if view.adaptive else (1,):
        table = latest(view, Kind.EMBEDDING, sender=sender, turns=turns, phase=phase)
        if turns == 1 and with_other_splits:
            at_prediction = latest(view, Kind.EMBEDDING, sender=sender)
            table = {**at_prediction, view.aux_split: table[view.aux_split]}
        yield turns, table


def _distinct(sources: Mapping[str, Source], split: str) -> dict[str, Source]:
    """Return the sources that cover ``split``, without those that equal an earlier one or are the same for all rows."""
    found: dict[str, Source] = {}
    for name, source in sources.items():
        x = source.table.get(split)
        if x is None or not x.shape[1] or bool((x == x[0]).all()):
            continue
        if not any(torch.equal(x, seen.table[split]) for seen in found.values()):
            found[name] = source
    return found
