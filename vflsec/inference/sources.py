"""Everything that a view contains about each row, as tables: one or more for each source of information."""

from collections.abc import Iterator, Mapping, Sequence
from pkgutil import resolve_name
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vflsec.core.knowledge import KNOWLEDGE
from vflsec.core.message import Kind
from vflsec.core.view import View, memoize
from vflsec.inference.releases import (
    AVERAGED,
    Releases,
    count_messages,
    get_sent_embedding,
    rank_releases,
    read_last_values,
    read_releases,
    restrict_to_training,
)
from vflsec.inference.trajectories import CURVED, LINEAR, fit_trajectories
from vflsec.inference.trees.bounds import find_bounds
from vflsec.inference.trees.nodes import POWERS, get_components, list_partners, weigh_components
from vflsec.inference.trees.values import solve_bins

Table = Mapping[str, Tensor]
"""Numbers (n, k) about each row, by split of the view."""

COLUMNS = "columns"
"""Name of the table of own columns."""

LOCAL_EMBEDDING, DEFENDED_EMBEDDING, LOCAL_LABELS = "own embedding", "own embedding of defended text", "own labels"

LOCAL = frozenset({COLUMNS, LOCAL_EMBEDDING, DEFENDED_EMBEDDING, LOCAL_LABELS})
"""Names of the tables that the adversary has without any release of another party."""

EVERYTHING = frozenset(need for need in KNOWLEDGE if need.tables)
"""Parts of a view that become tables where they are present."""


class SourceTable(NamedTuple):
    """A table with the ways in which a model should use it.

    Attributes:
        table: the numbers.
        distances: whether a kernel of distances between rows is worth trying as well. It is where rows of one class can
            form several clusters.
        derived: whether another table holds the same messages in at least the same detail. A model of the joint density
            of all tables leaves this one out.
        rescaled: whether another table has the same columns up to a linear map. Only models with a penalty can tell the
            two apart.
        linear: whether a linear kernel is worth trying.
    """

    table: Table
    distances: bool = False
    derived: bool = False
    rescaled: bool = False
    linear: bool = True


@memoize
def list_sources(view: View) -> dict[str, SourceTable]:
    """Return every table of ``view`` by a readable name, without duplicates: what ``Knowledge.tables`` yield.

    Every table covers the split of the auxiliary rows, so that a model can be fitted to it. It covers each other split
    for which the adversary has the same information. The tables must not be changed.
    """
    tables: dict[str, SourceTable] = {}
    for function in dict.fromkeys(need.tables for need in KNOWLEDGE if need.tables):
        yielded = resolve_name(function)(view)
        tables |= {name: x if isinstance(x, SourceTable) else SourceTable(x) for name, x in yielded}
    return _drop_copies(tables, view.aux_split)


def tabulate_local(view: View) -> Iterator[tuple[str, SourceTable]]:
    """Yield own columns, their embeddings by each of the adversary's models, own labels, and predictions of the model.

    Without its own model, these are the embeddings that it sent last. In how many messages of training each row is
    stands there too, if these numbers differ.
    """
    yield COLUMNS, SourceTable(view.features, distances=True)
    if view.defended:
        yield DEFENDED_EMBEDDING, SourceTable({view.aux_split: view.defended[view.aux_split]}, distances=True)
    models = {} if view.model is None else {LOCAL_EMBEDDING: view.model}
    with torch.no_grad():
        for name, model in {**models, **view.models}.items():
            yield name, SourceTable({split: model(x) for split, x in view.features.items()}, distances=True)
    if view.model is None and (sent := get_sent_embedding(view)) is not None:
        yield LOCAL_EMBEDDING, SourceTable({view.aux_split: sent}, distances=True)
    if (times := count_messages(view)) is not None:
        yield "times asked", SourceTable({view.aux_split: times})
    if view.labels:
        n_classes = 1 + max(int(y.max()) for y in view.labels.values())
        yield LOCAL_LABELS, SourceTable({split: F.one_hot(y, n_classes) for split, y in view.labels.items()})
    if view.aux_split in view.predictions:
        yield "predictions", SourceTable(view.predictions)


def tabulate_releases(view: View) -> Iterator[tuple[str, SourceTable]]:
    """Yield tables of received gradients and embeddings by sender and phase, and of all embeddings together.

    Gradients: ``_list_stats``. Embeddings: the last release, the means of the last few, and functions of all releases
    (``vflsec.inference.trajectories``).
    """
    routes, split = _list_routes(view), view.aux_split
    for kind, sender, phase in routes:
        name = f"{kind} from {sender} in {phase}"
        if kind is Kind.GRADIENT:
            statistics = dict(_list_stats(read_releases(view, kind, split=split, sender=sender, phase=phase)))
            finest = "mean" if torch.equal(statistics["mean"], statistics["thirds"]) else "thirds"
            for how, x in statistics.items():
                yield f"{name}: {how}", SourceTable({split: x}, distances=how == "direction", derived=how != finest)
        else:
            later = [p for k, s, p in _list_routes(restrict_to_training(view, phase)) if (k, s) == (kind, sender)]
            for n in AVERAGED if view.adaptive else (1,):
                table = read_last_values(view, kind, sender=sender, releases=n, phase=phase)
                if n == 1 and phase == later[-1]:  # other splits have one release, at prediction
                    at_prediction = read_last_values(restrict_to_training(view, phase), kind, sender=sender)
                    table = {**at_prediction, split: table[split]}
                yield f"{name}: last {n}", SourceTable(table)
            yield from _release_tables(view, [(sender, phase)], name)
    embeddings = [(sender, phase) for kind, sender, phase in routes if kind is Kind.EMBEDDING]
    if len(embeddings) > 1:
        yield from _release_tables(view, embeddings, "all embeddings")


def tabulate_trees(view: View) -> Iterator[tuple[str, SourceTable]]:
    """Yield tables of what the messages of each other party say about trees, with their names.

    These are components of the nodes that rows share, and of those that are also known at prediction; and the quantile
    of each column between its bounds, where the sender says to which side of bins rows go.

    About labels, components of shared nodes have a table for each of ``POWERS``: the first component follows the logit
    for which trees are grown, as it is the largest thing that nodes have in common. Of other columns it need not say
    most.
    """
    device, split = view.features[view.aux_split].device, view.aux_split
    powers, active = POWERS if view.victim is None else (1,), view.side == "active"
    for other in list_partners(view):
        for phase in ("predict",) if active else ("train", "predict"):
            name = f"nodes from {other} in {phase}"
            components = get_components(view, other, everywhere=phase == "predict")
            for power in powers if components else ():
                weighed = {s: weigh_components(*parts, power).to(device) for s, parts in components.items()}
                yield f"{name}: power {power}" if len(powers) > 1 else name, SourceTable(weighed, rescaled=power != 1)
        if active and (known := find_bounds(view, other)) is not None:
            expected = {s: torch.from_numpy(x).to(device) for s, x in known.expected.items()}
            yield f"bounds from {other}", SourceTable(expected)
            solution = {split: torch.from_numpy(solve_bins(view, other)).to(device)}
            yield f"bounds from {other}: solved", SourceTable(solution)


def _list_routes(view: View) -> list[tuple[Kind, str, str]]:
    """Return kind, sender and phase of the received gradients and embeddings about the rows to infer, in order.

    What the adversary notes of its own is no release of another party.
    """
    splits = {view.aux_split, *view.places} if view.aux_split == "train" else {view.aux_split}
    names = view.party.split("+")
    routes = {
        (m.kind, m.sender, m.phase): None
        for m in view.messages
        if m.kind in (Kind.GRADIENT, Kind.EMBEDDING)
        and m.receiver in names
        and m.sender not in names
        and m.split in splits
    }
    return list(routes)


def _list_stats(releases: Releases) -> Iterator[tuple[str, Tensor]]:
    """Yield statistics (n, k) of the gradients of each row, with their names."""
    steady = releases.to_steady()
    length = torch.linalg.vector_norm(releases.values, dim=1)
    mean = steady.mean(steady.values)
    yield "mean", mean
    yield "whitened mean", _whiten(mean)
    yield "direction", releases.mean(F.normalize(releases.values, dim=1))
    thirds = 3 * releases.epoch // (int(releases.epoch.max()) + 1)
    parts = [steady.select(thirds == k) for k in range(3) if (thirds == k).any()]
    yield "thirds", torch.cat([part.mean(part.values) for part in parts], dim=1)
    typical = releases.mean(length[:, None]).clamp_min(torch.finfo(length.dtype).tiny).log()
    yield "length", torch.cat([typical, releases.mean(rank_releases(releases, length)[:, None])], dim=1)


def _whiten(x: Tensor) -> Tensor:
    """Return the principal components of ``x`` (n, k) with variance, each scaled to variance one."""
    centered = x.double() - x.double().mean(dim=0)
    variances, axes = torch.linalg.eigh(centered.T @ centered / len(x))
    kept = variances > 1e-9 * variances[-1].clamp_min(torch.finfo(x.dtype).tiny)
    return torch.as_tensor(centered @ axes[:, kept] / variances[kept].sqrt())


def _release_tables(
    view: View, routes: Sequence[tuple[str | None, str | None]], name: str
) -> Iterator[tuple[str, SourceTable]]:
    results = fit_trajectories(view, routes)
    for how, functions in zip(("all", "all, aligned"), results, strict=False):
        yield f"{name}: {how}", SourceTable({view.aux_split: functions.every}, rescaled=True)
        for linear, numbers in ((True, LINEAR), (False, CURVED)):
            for number, x in functions.take_first(numbers).items():
                table = SourceTable({view.aux_split: x}, rescaled=True, linear=linear, distances=not linear)
                yield f"{name}: {number} components of {how}", table
        for (number, order), x in functions.completed.items():
            yield (
                f"{name}: {number} completed, order {order}",
                SourceTable({view.aux_split: x}, rescaled=True, distances=True),
            )


def _drop_copies(sources: Mapping[str, SourceTable], split: str) -> dict[str, SourceTable]:
    """Return the sources that cover ``split``, without duplicates and without those that are constant over rows."""
    distinct: dict[str, SourceTable] = {}
    for name, source in sources.items():
        x = source.table.get(split)
        if x is None or not x.shape[1] or bool((x == x[0]).all()):
            continue
        if not any(torch.equal(x, other.table[split]) for other in distinct.values()):
            distinct[name] = source
    return distinct
