"""Messages about rows as tables: every release of a row, its last releases, and statistics of both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from vflsec.base.errors import InsufficientView
from vflsec.core.message import AFTERWARDS, Kind, Message
from vflsec.core.view import View

AVERAGED = (1, 3, 10)
"""Numbers of last releases of a row whose means an attack compares."""

OF_TRAINING = " of training "
"""What stands between the phase of a message and the number of its training, if that is not the last training."""


def of_training(view: View, phase: str) -> View:
    """Return the view with the messages of the training of ``phase`` only."""

    def number(name: str) -> str:
        return name.partition(OF_TRAINING)[2]

    return replace(view, messages=tuple(m for m in view.messages if number(m.phase) == number(phase)))


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

    def first(self, releases: int | None) -> Releases:
        """Return the first ``releases`` releases of each row; all of them for None."""
        return self if releases is None else self.where(self.epoch < releases)

    def where(self, mask: Tensor) -> Releases:
        """Return the observations at which ``mask`` (R,) is true."""
        return Releases(self.values[mask], self.rows[mask], self.epoch[mask], self.message[mask], self.n_rows)

    def by_epoch(self) -> list[Tensor]:
        """Return the indices of the observations of each epoch."""
        order = torch.argsort(self.epoch, stable=True)
        return list(torch.split(order, torch.bincount(self.epoch).tolist()))

    def by_message(self) -> list[Tensor]:
        """Return the indices of the observations of each message, in order."""
        sizes = torch.bincount(self.message)
        return list(torch.split(torch.arange(len(self.rows), device=self.rows.device), sizes[sizes > 0].tolist()))

    def steady(self) -> Releases:
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


def received(
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
    for m in _of_one_phase(_messages(view, kind, split, sender), phase):
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
    found = Releases(values, rows, _earlier(rows), message, len(view.features[split]))
    return found.first(None if view.adaptive else 1)


def latest(
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
    found = {}
    for split, own in view.features.items():
        messages = _of_one_phase(_messages(view, kind, split, sender), phase)
        if messages:
            found[split] = _last(messages, len(own), releases if view.adaptive else 1)
    if not found:
        raise InsufficientView(
            f"expected {kind}s from {sender or 'anybody'}, got none in {len(view.messages)} messages"
        )
    return found


def last_sent(view: View) -> Tensor | None:
    """Return the last embedding (n, d) that the adversary itself sent of each row in the split of the auxiliary rows.

    A row of which it sent none gets the mean over all of them. None if it sent none at all.
    """
    own = [m for m in _about(view, view.aux_split) if m.kind is Kind.EMBEDDING and m.sender in view.party.split("+")]
    return _last(_of_one_phase(own, None), len(view.features[view.aux_split]), 1) if own else None


def times_asked(view: View) -> Tensor | None:
    """Return how many messages of training are about each row, (n, 1), in the split of the auxiliary rows, or None.

    Sampling that depends on the label, such as weights against imbalance, shows in it.
    """
    found: dict[tuple[Kind, str, str], Tensor] = {}
    n = len(view.features[view.aux_split])
    for m in _about(view, view.aux_split):
        if m.rows is not None and m.phase not in AFTERWARDS:
            route = (m.kind, m.sender, m.receiver)
            times = torch.bincount(m.rows, minlength=n)
            found[route] = found[route] + times if route in found else times
    return next(iter(found.values()))[:, None].float() if found else None


def averages(
    view: View, kind: Kind, *, sender: str | None, releases: int | None = None, phase: str | None = None
) -> list[Tensor]:
    """Return means (n, d) of the last releases of the rows in the split of the auxiliary rows.

    Noise that is drawn anew for each release averages out, but earlier releases come from an earlier model. The attack
    chooses between the means on auxiliary rows. Other splits have one release, at prediction, so a model that is fitted
    to these means does not fit them.

    Args:
        view: of the adversary.
        kind: of message.
        sender: None for any sender.
        releases: number of last releases in the only mean; None for one mean for each number in ``AVERAGED``, the
            smallest first, without repetitions. An adversary that is not adaptive gets one mean.
        phase: as in ``latest``.

    Raises:
        InsufficientView: there is no such message about these rows.
    """
    found: list[Tensor] = []
    for number in AVERAGED if releases is None else (releases,):
        means = latest(view, kind, sender=sender, releases=number, phase=phase)
        if view.aux_split not in means:
            raise InsufficientView(f"expected {kind}s about {view.aux_split} rows, got only {', '.join(means)}")
        if not found or not torch.equal(means[view.aux_split], found[-1]):
            found.append(means[view.aux_split])
    return found


def parameters(messages: Iterable[Message], *, sender: str, receiver: str | None = None) -> dict[str, Tensor]:
    """Return the last parameters and running statistics that ``sender`` sent, by name; empty if it sent none.

    Args:
        messages: of an adversary that sent or received them.
        sender: name of a party or of the server.
        receiver: None for any receiver.
    """
    sent = [m for m in messages if m.kind is Kind.PARAMETERS and m.sender == sender and receiver in (None, m.receiver)]
    last = [m for m in sent if (m.phase, m.step) == (sent[-1].phase, sent[-1].step)]
    return {name: value for m in last for name, value in m.payload.items()}


def flattened(values: Mapping[str, Tensor]) -> Tensor:
    """Return the learned parameters (P,) among ``values`` in order, without the running statistics of BatchNorm."""
    found = [value.flatten() for name, value in values.items() if not name.rpartition(".")[2].startswith("running_")]
    return torch.cat(found) if found else torch.zeros(0)


def percentiles(releases: Releases, scores: Tensor) -> Tensor:
    """Return the rank (R,) of each observation within its epoch, between 0 and 1.

    Ranks of different epochs can be averaged, although the scale of the scores changes during training.
    """
    ranks = torch.empty_like(scores)
    for indices in releases.by_epoch():
        place = torch.argsort(torch.argsort(scores[indices], stable=True), stable=True)
        ranks[indices] = (place.to(ranks.dtype) + 0.5) / len(indices)
    return ranks


def _about(view: View, split: str) -> list[Message]:
    """Return the messages with a value for each of some rows of ``split``."""
    return [m for m in view.messages if m.split == split and m.rows is not None and "value" in m.payload]


def _of_one_phase(messages: list[Message], phase: str | None) -> list[Message]:
    """Return the messages of ``phase``; for None, of the last phase of all."""
    wanted = messages[-1].phase if phase is None and messages else phase
    return [m for m in messages if m.phase == wanted]


def _messages(view: View, kind: Kind, split: str, sender: str | None) -> list[Message]:
    """Return the messages of this kind about rows of this split that the adversary received."""
    found = []
    for m in view.messages:
        if m.kind is not kind or m.receiver not in view.party.split("+") or sender not in (None, m.sender):
            continue
        if m.rows is None or "value" not in m.payload:
            continue
        if m.split == split:
            found.append(m)
        elif split == "train" and m.split in view.places:
            placed = _placed(m, view.places[m.split])
            found += [placed] if placed.rows is not None and len(placed.rows) else []
    return found


def _placed(message: Message, places: Tensor) -> Message:
    """Return the part of ``message`` about training rows.

    Args:
        message: about rows of another split.
        places: (n_train,) positions of the training rows in that split.
    """
    assert message.rows is not None
    size = 1 + max(int(places.max()), int(message.rows.max()))
    place = torch.full((size,), -1, dtype=torch.long, device=places.device)
    place[places] = torch.arange(len(places), device=places.device)
    rows = place[message.rows]
    known = rows >= 0
    value = message.payload["value"]
    return replace(message, rows=rows[known], payload={"value": value[known]}, split="train")


def _last(messages: list[Message], n_rows: int, releases: int) -> Tensor:
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


def _earlier(rows: Tensor) -> Tensor:
    """Return how often each entry has occurred before."""
    order = torch.argsort(rows, stable=True)
    counts = torch.bincount(rows)
    starts = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    earlier = torch.empty_like(rows)
    earlier[order] = torch.arange(len(rows), device=rows.device) - starts
    return earlier
