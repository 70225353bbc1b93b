"""What an adversary was told about each row, again and again: its messages as one table, and scores of its lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from vflsec.core.errors import InsufficientView
from vflsec.core.message import Kind, Message
from vflsec.core.view import View

TURNS = (1, 3, 10)
"""How many of its last releases of a row an adversary tries to average."""


class Releases(NamedTuple):
    """One line for each time that something was said about a row of one split.

    Attributes:
        values: (R, d) what was said.
        rows: (R,) about which row.
        turn: (R,) how often something had been said about that row before: its epoch, where an epoch is one exchange.
        message: (R,) the number of the message that the line is from.
        n_rows: how many rows the split has.
    """

    values: Tensor
    rows: Tensor
    turn: Tensor
    message: Tensor
    n_rows: int

    def first(self, turns: int | None) -> Releases:
        """Return the first ``turns`` releases of each row; all of them for None."""
        return self if turns is None else self.where(self.turn < turns)

    def where(self, chosen: Tensor) -> Releases:
        """Return the lines at which ``chosen`` (R,) is true."""
        return Releases(self.values[chosen], self.rows[chosen], self.turn[chosen], self.message[chosen], self.n_rows)

    def by_turn(self) -> list[Tensor]:
        """Return the positions of the lines of each turn, turn by turn."""
        order = torch.argsort(self.turn, stable=True)
        return list(torch.split(order, torch.bincount(self.turn).tolist()))

    def by_message(self) -> list[Tensor]:
        """Return the positions of the lines of each message, in order."""
        sizes = torch.bincount(self.message)
        return list(torch.split(torch.arange(len(self.rows), device=self.rows.device), sizes[sizes > 0].tolist()))

    def steady(self) -> Releases:
        """Return the same lines, each in units of the root mean square length of its message.

        Noise that is scaled by what it hides (iso's, Marvell's) is drawn anew for each message; where it covers the
        rest, its deviation is that length. The mean of such lines weighs each message by the inverse of its noise.
        """
        square = self.values.square().sum(dim=1)
        total = square.new_zeros(int(self.message.max()) + 1).index_add_(0, self.message, square)
        count = torch.bincount(self.message).clamp_min(1)
        length = (total / count).sqrt().clamp_min(torch.finfo(square.dtype).tiny)
        return self._replace(values=self.values / length[self.message][:, None])

    def mean(self, scores: Tensor) -> Tensor:
        """Return for each row (n, k) the mean score of its lines; of rows never spoken of, that of all.

        Args:
            scores: (R, k), a score of each line.
        """
        total = scores.new_zeros(self.n_rows, scores.shape[1]).index_add_(0, self.rows, scores)
        count = torch.bincount(self.rows, minlength=self.n_rows)[:, None]
        return torch.where(count > 0, total / count.clamp_min(1), scores.mean(dim=0))


def received(
    view: View, kind: Kind, *, split: str = "train", sender: str | None = None, phase: str | None = None
) -> Releases:
    """Return all messages of ``kind`` that the adversary received about the rows of one split in one phase.

    Messages about a split in ``view.places`` count as messages about those of its rows that are training rows.

    An adversary that is not adaptive reads what was said first about each row, and nothing that came later.

    What colluding parties received about the same rows in the same step, or what several parties sent, stands side by
    side: in the order in which the adversary names them, which is that of its columns and models.

    Args:
        view: of the adversary.
        kind: of message.
        split: of the rows that they are about.
        sender: None for anybody.
        phase: None for the last phase that speaks of the split; messages of different phases can differ in width.

    Raises:
        InsufficientView: there is none.
    """
    names = view.party.split("+")
    heard: dict[tuple[str, int], list[Message]] = {}
    for m in _of_one_phase(_heard(view, kind, split, sender), phase):
        heard.setdefault((m.phase, m.step), []).append(m)
    if not heard:
        raise InsufficientView(f"expected a {kind} about {split} rows, got none in {len(view.messages)} messages")
    about = [messages[0].rows for messages in heard.values() if messages[0].rows is not None]
    for messages in heard.values():
        messages.sort(key=lambda m: names.index(m.receiver))
    values = torch.cat([torch.cat([m.payload["value"] for m in messages], dim=1) for messages in heard.values()])
    rows = torch.cat(about)
    message = torch.repeat_interleave(
        torch.arange(len(heard), device=rows.device), torch.tensor([len(r) for r in about], device=rows.device)
    )
    return Releases(values, rows, _turns(rows), message, len(view.features[split])).first(None if view.adaptive else 1)


def latest(
    view: View, kind: Kind, *, sender: str | None, turns: int = 1, phase: str | None = None
) -> dict[str, Tensor]:
    """Return, by split of the view, what ``sender`` last said of each row (n, d); a split never spoken of is left out.

    What a model says as it is at the end: of training rows in the last epoch, of test rows at prediction. Messages
    about a split in ``view.places`` count as messages about those of its rows that are training rows.

    Args:
        view: of the adversary.
        kind: of message.
        sender: None for anybody.
        turns: the mean of this many last releases of each row; of one, if the adversary is not adaptive.
        phase: None for the last phase that speaks of a split; messages of different phases can differ in width.

    Raises:
        InsufficientView: there is none of any split.
    """
    found = {}
    for split, own in view.features.items():
        heard = _of_one_phase(_heard(view, kind, split, sender), phase)
        if heard:
            found[split] = _last(heard, len(own), turns if view.adaptive else 1)
    if not found:
        raise InsufficientView(
            f"expected {kind}s from {sender or 'anybody'}, got none in {len(view.messages)} messages"
        )
    return found


def averages(
    view: View, kind: Kind, *, sender: str | None, turns: int | None = None, phase: str | None = None
) -> list[Tensor]:
    """Return what may be read of the rows among which the auxiliary ones are, each (n, d), for the attack to choose.

    Noise that is drawn anew for each release averages out over many, but then the earlier ones are of a model that was
    another one; which number of them serves best, auxiliary rows must tell. Other splits have one release, at
    prediction: what is fitted on these means does not fit there.

    Args:
        view: of the adversary.
        kind: of message.
        sender: None for anybody.
        turns: the mean of this many last releases of each row and no other; None for each number of ``TURNS``, the
            fewest first, of which equal ones are returned once: one alone if the adversary is not adaptive.
        phase: as in ``latest``.

    Raises:
        InsufficientView: there is none about these rows.
    """
    found: list[Tensor] = []
    for number in TURNS if turns is None else (turns,):
        means = latest(view, kind, sender=sender, turns=number, phase=phase)
        if view.aux_split not in means:
            raise InsufficientView(f"expected {kind}s about {view.aux_split} rows, got only {', '.join(means)}")
        if not found or not torch.equal(means[view.aux_split], found[-1]):
            found.append(means[view.aux_split])
    return found


def parameters(messages: Iterable[Message], *, sender: str, receiver: str | None = None) -> dict[str, Tensor]:
    """Return what ``sender`` last said of its model, by name; running statistics too. Empty if it said nothing.

    Args:
        messages: of an adversary that took part in them.
        sender: name of a party or of the server.
        receiver: None for anybody.
    """
    said = [m for m in messages if m.kind is Kind.PARAMETERS and m.sender == sender and receiver in (None, m.receiver)]
    last = [m for m in said if (m.phase, m.step) == (said[-1].phase, said[-1].step)]
    return {name: value for m in last for name, value in m.payload.items()}


def flattened(values: Mapping[str, Tensor]) -> Tensor:
    """Return the learned parameters (P,) among ``values`` in order, without the running statistics of BatchNorm."""
    found = [value.flatten() for name, value in values.items() if not name.rpartition(".")[2].startswith("running_")]
    return torch.cat(found) if found else torch.zeros(0)


def _of_one_phase(messages: list[Message], phase: str | None) -> list[Message]:
    """Return the messages of ``phase``; for None, of the last phase of all."""
    wanted = messages[-1].phase if phase is None and messages else phase
    return [m for m in messages if m.phase == wanted]


def _heard(view: View, kind: Kind, split: str, sender: str | None) -> list[Message]:
    """Return what the adversary received of this kind about rows of this split, from one sender or anybody."""
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
    """Return what ``message`` says of training rows, which are at ``places`` (n_train,) among the rows it speaks of."""
    assert message.rows is not None
    size = 1 + max(int(places.max()), int(message.rows.max()))
    place = torch.full((size,), -1, dtype=torch.long, device=places.device)
    place[places] = torch.arange(len(places), device=places.device)
    rows = place[message.rows]
    known = rows >= 0
    value = message.payload["value"]
    return replace(message, rows=rows[known], payload={"value": value[known]}, split="train")


def _last(messages: list[Message], n_rows: int, turns: int) -> Tensor:
    """Return the mean (n, d) of the last ``turns`` releases of each row; of rows never spoken of, that of all."""
    first = messages[0].payload["value"]
    total = first.new_zeros(n_rows, first.shape[1])
    count = torch.zeros(n_rows, dtype=torch.long, device=first.device)
    for m in reversed(messages):
        assert m.rows is not None
        wanted = count[m.rows] < turns
        total.index_add_(0, m.rows[wanted], m.payload["value"][wanted])
        count[m.rows] += wanted
        if int(count.min()) >= turns:
            break
    mean = total.sum(dim=0) / count.sum()
    return torch.where(count[:, None] > 0, total / count.clamp_min(1)[:, None], mean)


def percentiles(releases: Releases, scores: Tensor) -> Tensor:
    """Return each line's rank (R,) among the lines of its turn, between 0 and 1: scales change as training goes on."""
    ranks = torch.empty_like(scores)
    for lines in releases.by_turn():
        place = torch.argsort(torch.argsort(scores[lines], stable=True), stable=True)
        ranks[lines] = (place.to(ranks.dtype) + 0.5) / len(lines)
    return ranks


def _turns(rows: Tensor) -> Tensor:
    """Return how often each entry has occurred before."""
    order = torch.argsort(rows, stable=True)
    counts = torch.bincount(rows)
    starts = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    turns = torch.empty_like(rows)
    turns[order] = torch.arange(len(rows), device=rows.device) - starts
    return turns
