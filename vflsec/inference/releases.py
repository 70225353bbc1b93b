"""Messages about rows as tables: every release of a row, its last releases, and statistics of both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from scipy.linalg import eigh
from torch import Tensor
from torch.nn import functional as F

from vflsec.base.checks import check_positive_or_none
from vflsec.base.errors import InsufficientView
from vflsec.core.attack import Attack
from vflsec.core.message import AFTERWARDS, Kind, Message
from vflsec.core.view import View

AVERAGED = (1, 3, 10)
"""Numbers of last releases of a row whose means an attack compares."""

OF_TRAINING = " of training "
"""What stands between the phase of a message and the number of its training, if that is not the last training."""


def restrict_to_training(view: View, phase: str) -> View:
    """Return the view with the messages of the training of ``phase`` only."""

    def number(name: str) -> str:
        return name.partition(OF_TRAINING)[2]

    return replace(view, messages=tuple(m for m in view.messages if number(m.phase) == number(phase)))


class OnReleases(Attack):
    """An attack whose only option is how many releases of each row it uses, from the first; None for all."""

    def __init__(self, *, releases: int | None = None) -> None:
        check_positive_or_none(releases=releases)
        self.releases = releases


class Releases(NamedTuple):
    """Observations: one for each time that a message contained a value for a row of one split.

    Attributes:
        values: (R, d) the values.
        rows: (R,) positions of the rows in the split.
        epoch: (R,) how many earlier releases of the same row there are. This is the epoch if each row is released once
            an epoch.
        message: (R,) number of the message that contains the observation.
        n_rows: number of rows of the split.
    """

    values: Tensor
    rows: Tensor
    epoch: Tensor
    message: Tensor
    n_rows: int

    def take_first(self, releases: int | None) -> Releases:
        """Return the first ``releases`` releases of each row; all of them for None."""
        return self if releases is None else self.select(self.epoch < releases)

    def select(self, mask: Tensor) -> Releases:
        """Return the observations at which ``mask`` (R,) is true."""
        return Releases(self.values[mask], self.rows[mask], self.epoch[mask], self.message[mask], self.n_rows)

    def group_by_epoch(self) -> list[Tensor]:
        """Return the indices of the observations of each epoch."""
        order = torch.argsort(self.epoch, stable=True)
        return list(torch.split(order, torch.bincount(self.epoch).tolist()))

    def group_by_message(self) -> list[Tensor]:
        """Return the indices of the observations of each message, in order."""
        sizes = torch.bincount(self.message)
        return list(torch.split(torch.arange(len(self.rows), device=self.rows.device), sizes[sizes > 0].tolist()))

    def to_steady(self) -> Releases:
        """Return the observations divided by the root mean square length of their message.

        Defenses such as iso and Marvell scale their noise anew for each message. Where the noise dominates, its
        standard deviation is that length. The mean of the scaled observations then weighs each message by the inverse
        of its noise.
        """
        square = self.values.square().sum(dim=1)
        total = square.new_zeros(int(self.message.max()) + 1).index_add_(0, self.message, square)
        count = torch.bincount(self.message).clamp_min(1)
        length = (total / count).sqrt().clamp_min(torch.finfo(square.dtype).tiny)
        return self._replace(values=self.values / length[self.message][:, None])

    def mean(self, scores: Tensor) -> Tensor:
        """Return the mean score (n, k) of each row; a row without an observation gets the mean over all observations.

        Args:
            scores: (R, k) of each observation.
        """
        total = scores.new_zeros(self.n_rows, scores.shape[1]).index_add_(0, self.rows, scores)
        count = torch.bincount(self.rows, minlength=self.n_rows)[:, None]
        return torch.where(count > 0, total / count.clamp_min(1), scores.mean(dim=0))


def read_releases(
    view: View, kind: Kind, *, split: str = "train", sender: str | None = None, phase: str | None = None
) -> Releases:
    """Return every observation that the adversary received about the rows of one split in one phase.

    Messages about a split in ``view.places`` count for those of its rows that are training rows. An adversary that is
    not adaptive gets the first release of each row only.

    Values that colluding parties received about the same rows in the same step, or that several parties sent, are
    concatenated, in the order of the names in ``view.party``.

    Args:
        view: of the adversary.
        kind: of message.
        split: of the rows.
        sender: None for any sender.
        phase: None for the last phase with such a message; messages of different phases can differ in width.

    Raises:
        InsufficientView: there is no such message.
    """
    names = view.party.split("+")
    by_step: dict[tuple[str, int, int], list[Message]] = {}
    earlier: Counter[tuple[str, int, str, str]] = Counter()  # a foreign transcript may count steps anew in each epoch
    for m in _select_phase(_list_messages(view, kind, split, sender), phase):
        route = (m.phase, m.step, m.sender, m.receiver)
        by_step.setdefault((m.phase, m.step, earlier[route]), []).append(m)
        earlier[route] += 1
    if not by_step:
        raise InsufficientView(f"expected a {kind} about {split} rows, got none in {len(view.messages)} messages")
    rows_of = [messages[0].rows for messages in by_step.values() if messages[0].rows is not None]
    for messages in by_step.values():
        messages.sort(key=lambda m: names.index(m.receiver))
    values = torch.cat([torch.cat([m.payload["value"] for m in messages], dim=1) for messages in by_step.values()])
    rows = torch.cat(rows_of)
    message = torch.repeat_interleave(
        torch.arange(len(by_step), device=rows.device), torch.tensor([len(r) for r in rows_of], device=rows.device)
    )
    releases = Releases(values, rows, _count_earlier(rows), message, len(view.features[split]))
    return releases.take_first(None if view.adaptive else 1)


def read_last_values(
    view: View, kind: Kind, *, sender: str | None, releases: int = 1, phase: str | None = None
) -> dict[str, Tensor]:
    """Return the last value (n, d) that ``sender`` sent for each row, by split; splits without a message are left out.

    For training rows these are values of the last epoch, for test rows those at prediction. Messages about a split in
    ``view.places`` count for those of its rows that are training rows.

    Args:
        view: of the adversary.
        kind: of message.
        sender: None for any sender.
        releases: number of last releases of each row whose mean is returned; 1 if the adversary is not adaptive.
        phase: None for the last phase with such a message; messages of different phases can differ in width.

    Raises:
        InsufficientView: there is no such message about any split.
    """
    values = {}
    for split, x in view.features.items():
        messages = _select_phase(_list_messages(view, kind, split, sender), phase)
        if messages:
            values[split] = _average_last(messages, len(x), releases if view.adaptive else 1)
    if not values:
        raise InsufficientView(
            f"expected {kind}s from {sender or 'anybody'}, got none in {len(view.messages)} messages"
        )
    return values


def get_sent_embedding(view: View) -> Tensor | None:
    """Return the last embedding (n, d) that the adversary itself sent of each row in the split of the auxiliary rows.

    A row of which it sent none gets the mean over all of them. None if it sent none at all.
    """
    sent = [m for m in _select_row_messages(view) if m.kind is Kind.EMBEDDING and m.sender in view.party.split("+")]
    return _average_last(_select_phase(sent, None), len(view.features[view.aux_split]), 1) if sent else None


def count_messages(view: View) -> Tensor | None:
    """Return how many messages of training are about each row, (n, 1), in the split of the auxiliary rows, or None.

    Sampling that depends on the label, such as weights against imbalance, shows in it.
    """
    counts: dict[tuple[Kind, str, str], Tensor] = {}
    n = len(view.features[view.aux_split])
    for m in _select_row_messages(view):
        if m.rows is not None and m.phase not in AFTERWARDS:
            route = (m.kind, m.sender, m.receiver)
            times = torch.bincount(m.rows, minlength=n)
            counts[route] = counts[route] + times if route in counts else times
    return next(iter(counts.values()))[:, None].float() if counts else None


def average(
    view: View, kind: Kind, *, sender: str | None, releases: int | None = None, phase: str | None = None
) -> list[Tensor]:
    """Return means (n, d) of the last releases of the rows in the split of the auxiliary rows.

    Noise that is drawn anew for each release averages out, but earlier releases come from an earlier model. The attack
    chooses between the means on auxiliary rows. Other splits have one release, at prediction, so a model that is fitted
    to these means does not fit them.

    Their number is ``releases``, or each of ``AVERAGED`` for None, the smallest first, without repetitions. An
    adversary that is not adaptive gets one mean. ``kind``, ``sender`` and ``phase`` are as in ``read_last_values``.

    Raises:
        InsufficientView: there is no such message about these rows.
    """
    distinct: list[Tensor] = []
    for number in AVERAGED if releases is None else (releases,):
        means = read_last_values(view, kind, sender=sender, releases=number, phase=phase)
        if view.aux_split not in means:
            raise InsufficientView(f"expected {kind}s about {view.aux_split} rows, got only {', '.join(means)}")
        if not distinct or not torch.equal(means[view.aux_split], distinct[-1]):
            distinct.append(means[view.aux_split])
    return distinct


def get_parameters(messages: Iterable[Message], *, sender: str, receiver: str | None = None) -> dict[str, Tensor]:
    """Return the last parameters and running statistics that ``sender`` sent, by name; empty if it sent none.

    They were sent to ``receiver``; None for any.
    """
    sent = [m for m in messages if m.kind is Kind.PARAMETERS and m.sender == sender and receiver in (None, m.receiver)]
    last = [m for m in sent if (m.phase, m.step) == (sent[-1].phase, sent[-1].step)]
    return {name: value for m in last for name, value in m.payload.items()}


def flatten_parameters(values: Mapping[str, Tensor]) -> Tensor:
    """Return the learned parameters (P,) among ``values`` in order, without the running statistics of BatchNorm."""
    parts = [value.flatten() for name, value in values.items() if not name.rpartition(".")[2].startswith("running_")]
    return torch.cat(parts) if parts else torch.zeros(0)


def rank_releases(releases: Releases, scores: Tensor) -> Tensor:
    """Return the rank (R,) of each observation within its epoch, between 0 and 1.

    Ranks of different epochs can be averaged, although the scale of the scores changes during training.
    """
    ranks = torch.empty_like(scores)
    for indices in releases.group_by_epoch():
        place = torch.argsort(torch.argsort(scores[indices], stable=True), stable=True)
        ranks[indices] = (place.to(ranks.dtype) + 0.5) / len(indices)
    return ranks


def _select_row_messages(view: View) -> list[Message]:
    """Return the messages with a value for each of some rows of ``view.aux_split``."""
    return [m for m in view.messages if m.split == view.aux_split and m.rows is not None and "value" in m.payload]


def _select_phase(messages: list[Message], phase: str | None) -> list[Message]:
    """Return the messages of ``phase``; for None, of the last phase of all."""
    wanted = messages[-1].phase if phase is None and messages else phase
    return [m for m in messages if m.phase == wanted]


def _list_messages(view: View, kind: Kind, split: str, sender: str | None) -> list[Message]:
    """Return the messages of this kind about rows of this split that the adversary received."""
    messages = []
    for m in view.messages:
        if m.kind is not kind or m.receiver not in view.party.split("+") or sender not in (None, m.sender):
            continue
        if m.rows is None or "value" not in m.payload:
            continue
        if m.split == split:
            messages.append(m)
        elif split == "train" and m.split in view.places:
            placed = _select_training_rows(m, view.places[m.split])
            messages += [placed] if placed.rows is not None and len(placed.rows) else []
    return messages


def _select_training_rows(message: Message, places: Tensor) -> Message:
    """Return the part of ``message`` about training rows, whose positions in its split are ``places`` (n_train,)."""
    assert message.rows is not None
    size = 1 + max(int(places.max()), int(message.rows.max()))
    place = torch.full((size,), -1, dtype=torch.long, device=places.device)
    place[places] = torch.arange(len(places), device=places.device)
    rows = place[message.rows]
    known = rows >= 0
    value = message.payload["value"]
    return replace(message, rows=rows[known], payload={"value": value[known]}, split="train")


def _average_last(messages: list[Message], n_rows: int, releases: int) -> Tensor:
    """Return the mean (n, d) of the last releases of each row; a row without any gets the mean over all of them."""
    first = messages[0].payload["value"]
    total = first.new_zeros(n_rows, first.shape[1])
    count = torch.zeros(n_rows, dtype=torch.long, device=first.device)
    for m in reversed(messages):
        assert m.rows is not None
        wanted = count[m.rows] < releases
        total.index_add_(0, m.rows[wanted], m.payload["value"][wanted])
        count.index_add_(0, m.rows, wanted.long())  # a batch may hold a row twice
        if int(count.min()) >= releases:
            break
    mean = total.sum(dim=0) / count.sum()
    return torch.where(count[:, None] > 0, total / count.clamp_min(1)[:, None], mean)


def _count_earlier(rows: Tensor) -> Tensor:
    """Return how often each entry has occurred before."""
    order = torch.argsort(rows, stable=True)
    counts = torch.bincount(rows)
    starts = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    earlier = torch.empty_like(rows)
    earlier[order] = torch.arange(len(rows), device=rows.device) - starts
    return earlier


def find_component(values: Tensor) -> Tensor:
    """Return the first principal component (n,) of ``values`` (n, d), with the sign of positive skewness."""
    centered = values - values.mean(dim=0)
    scores: Tensor = centered @ _find_axis(centered)
    return scores if scores.pow(3).sum() >= 0 else -scores


def _find_axis(values: Tensor) -> Tensor:
    """Return the principal axis (d,) of ``values`` (n, d), of length one."""
    wide = values.shape[1] > len(values)
    products = (values @ values.T if wide else values.T @ values).cpu().numpy()
    last = len(products) - 1
    axis = torch.from_numpy(eigh(products, subset_by_index=(last, last))[1][:, 0]).to(values)
    return F.normalize(axis @ values, dim=0) if wide else axis


def project_batches(values: Tensor, batches: Iterable[Tensor]) -> Tensor:
    """Return the projection (R,) of each of ``values`` (R, d) on the principal axis of its batch, over its mean length.

    The sign of an axis is chosen so that it agrees with that of the batch before.
    """
    scores = torch.zeros_like(values[:, 0])
    before = torch.zeros_like(values[0])
    for indices in batches:
        batch = values[indices]
        axis = _find_axis(batch)
        before = axis if axis @ before >= 0 else -axis
        projected = batch @ before
        scores[indices] = projected / projected.abs().mean().clamp_min(torch.finfo(values.dtype).tiny)
    return scores


def find_span(inputs: Tensor) -> Tensor:
    """Return an orthonormal basis (B, r) of the column space of ``inputs`` (B, k), whose rank is r."""
    x = inputs.double()
    wide = x.shape[1] > x.shape[0]
    squares, directions = torch.linalg.eigh(x @ x.T if wide else x.T @ x)  # much faster than an SVD of X
    kept = squares > 1e-9 * squares[-1].clamp_min(torch.finfo(torch.double).tiny)
    basis: Tensor = directions[:, kept] if wide else x @ directions[:, kept] / squares[kept].sqrt()
    return basis.to(inputs.dtype)
