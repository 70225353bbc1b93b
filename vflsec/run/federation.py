"""Builds the federation of a cell: parties, channel and defenses."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from vflsec.base.checks import describe_unknown
from vflsec.base.errors import UsageError
from vflsec.base.seeds import derive, make_rng
from vflsec.base.sparse_rows import to_tensor
from vflsec.core.attack import ActingAttack, Attack, IntegrityAttack
from vflsec.core.federation import Federation
from vflsec.core.message import Channel
from vflsec.core.method import Method, Trained
from vflsec.core.party import Party
from vflsec.core.view import Need
from vflsec.data.partition import Partition, PartyData, exchange_rows, replace_test, split_dataset
from vflsec.run.adversary import get_adversary, observe_before, observe_victim_before
from vflsec.run.cell import VALIDATION, Cell, Technique
from vflsec.run.spec import AuxSpec

MEMBER = {"train": 1, "test": 0}


class Candidates(NamedTuple):
    """Where the candidates are, in the attacked federation or in a shadow of it.

    Attributes:
        rows: (n_train + n_test,) the training and test rows of this federation, by their positions in the training and
            test rows of the attacked one together; only candidates are elsewhere.
        places: (2 n,) the position of each candidate in ``rows``.
        seed: of the draw.
    """

    rows: Tensor
    places: Tensor
    seed: int

    @classmethod
    def draw(cls, seed: int, n_train: int, n_test: int) -> Candidates:
        """Draw the candidates of an attacked federation: all rows of the smaller split, and as many of the other."""
        rng, n = make_rng(seed, "candidates"), min(n_train, n_test)
        members, others = torch.randperm(n_train, generator=rng)[:n], torch.randperm(n_test, generator=rng)[:n]
        order = torch.randperm(2 * n, generator=rng)
        return cls(torch.arange(n_train + n_test), torch.cat([members, n_train + others])[order], seed)

    def deal(self, shadow: int) -> Candidates:
        """Return where the candidates are in a shadow, which trains on a random half of them.

        Shadows 2k and 2k + 1 train on complementary halves, so that each candidate is in one half of all shadows.
        The draw does not depend on where the candidates are now.
        """
        n = len(self.places) // 2
        order = torch.randperm(2 * n, generator=make_rng(self.seed, "halves", shadow // 2))
        order = order.roll(n) if shadow % 2 else order
        slots = self.places.sort().values  # as many among training rows as among test rows
        rows, places = self.rows.clone(), torch.empty_like(self.places)
        rows[slots], places[order] = self.places[order], slots
        return Candidates(rows, places, self.seed)

    def gather(self, by_split: Mapping[str, Tensor]) -> Tensor:
        """Return the values (2 n, ...) of the candidates, given those of training and test rows."""
        values = torch.cat([by_split[split] for split in MEMBER])
        return values[self.places.to(values.device)]


def query_model(trained: Trained) -> dict[str, Tensor]:
    """Return the logits (n, C) of the joint model for training and test rows, without leaving a trace."""
    with trained.federation.pause_recording(), torch.no_grad():
        return {split: trained.method.predict(trained.federation, split) for split in MEMBER}


_LAST: dict[tuple[str, bytes], Partition] = {}
"""The splits that were made last."""

MOST_KEPT = 2**25
"""Entries of their matrices."""


def get_partition(cell: Cell) -> Partition:
    """Return the cell's split data; the last ones are kept, as cells of several seeds are trained, then attacked."""
    spec = cell.data
    if cell.is_trial and not spec.validation and not cell.dataset.load_once(spec).draw:
        spec = msgspec.structs.replace(spec, validation=VALIDATION)
    wanted = str(cell.dataset.key(spec)), msgspec.json.encode((cell.dataset.name, spec, cell.seed))
    if wanted not in _LAST:  # a changed file is another dataset
        split = split_dataset(cell.dataset.load_once(spec), spec, cell.seed)
        kept = (party for data in (split, *_LAST.values()) for party in data.parties.values())
        if sum(x.size for party in kept for x in party.features.values()) > MOST_KEPT:
            _LAST.clear()
        _LAST[wanted] = split
    data = _LAST[wanted]
    if cell.is_trial:
        return replace_test(data, keep=spec is cell.data)
    if cell.shadow is None:
        return data
    n_train, n_test = (len(data.ids[split]) for split in MEMBER)
    return exchange_rows(data, Candidates.draw(cell.seed, n_train, n_test).deal(cell.shadow).rows.numpy())


def build_federation(cell: Cell, device: str) -> Federation:
    """Return the federation of ``cell``; every party carries its defenses."""
    data, where = get_partition(cell), torch.device(device)
    for defense in cell.defenses:
        if (by := defense.spec.by) and by not in ("passive", *data.parties):
            raise UsageError(f"{defense.name}: {describe_unknown('by', by, ('passive', *data.parties))}")
    channel = Channel()
    labels = {split: torch.tensor(y, device=where) for split, y in data.labels.items()}
    of_source = {split: labels.pop(split) for split in ("source",) if split in labels}

    def party(columns: PartyData, labels: Mapping[str, Tensor] | None = None) -> Party:
        return Party(
            columns.name,
            {split: to_tensor(x, where) for split, x in columns.features.items()},
            channel,
            noise=partial(make_rng, cell.run_seed, "noise", columns.name, device=where),
            layout=columns.layout,
            labels=labels,
            defenses=[defense.defense() for defense in cell.defenses if defense.spec.is_carried_by(columns.name)],
        )

    active, *passive = data.parties.values()
    parties = {active.name: party(active, labels), **{columns.name: party(columns) for columns in passive}}
    federation = Federation(parties, channel, len(data.classes), data.metric, cell.run_seed, where)
    federation.source = party(data.source, of_source) if data.source else None
    federation.names, federation.canaries, federation.groups = data.names, data.canaries, data.groups
    federation.places = {split: torch.tensor(rows, device=where) for split, rows in data.places.items()}
    if any(defense.fixed for defense in federation.active.defenses) and cell.shadow is None:
        federation.label_seed = derive(cell.seed, cell.data_key)
    if cell.malicious:
        federation.malicious = make_malicious(federation, *cell.malicious, cell.aux)
    return federation


def build_method(cell: Cell) -> Method:
    """Return the cell's method."""
    method = cell.method.make(cell.train, cell.model)
    assert isinstance(method, Method)
    return method


def build_models(cell: Cell, device: str) -> tuple[Federation, Method]:
    """Return the cell's federation with untrained models, and its method."""
    federation, method = build_federation(cell, device), build_method(cell)
    method.build(federation)
    return federation, method


def make_malicious(federation: Federation, name: str, wanted: Technique, aux: AuxSpec | None) -> dict[str, Attack]:
    """Return the attack of each malicious party; one that prepares gets the view of its party."""
    attacks: dict[str, Attack] = {}
    for party in get_adversary(federation, name):
        attacks[party.name] = attack = wanted.make()
        if isinstance(attack, ActingAttack):
            known = aux if aux and Need.AUX_LABELS in attack.needs else AuxSpec(n=0)
            if isinstance(attack, IntegrityAttack):
                view = observe_before(federation, party, known)
            else:
                view = observe_victim_before(federation, party, known, attack)
            attack.join(view, seed=derive(federation.seed, "sabotage", attack.name))
    return attacks
