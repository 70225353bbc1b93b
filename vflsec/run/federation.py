"""Builds the federation of a cell: parties, channel and defenses."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from vflsec.base.checks import unknown
from vflsec.base.errors import UsageError
from vflsec.base.seeds import derive, generator
from vflsec.core import registry
from vflsec.core.attack import Attack
from vflsec.core.defense import Defense
from vflsec.core.federation import Federation
from vflsec.core.integrity import IntegrityAttack
from vflsec.core.message import Channel
from vflsec.core.method import Method
from vflsec.core.party import Party
from vflsec.core.sparse_rows import tensor_of
from vflsec.core.view import Need
from vflsec.data import memory
from vflsec.data.dataset import VerticalDataset
from vflsec.data.description import expect_no_table
from vflsec.data.exchange import exchanged
from vflsec.data.files import load_toml
from vflsec.data.partition import DataSpec, Partition, PartyData, partition
from vflsec.run.adversary import adversary, view_before
from vflsec.run.candidates import MEMBER, Candidates
from vflsec.run.cell import Cell, dataset_identity
from vflsec.run.plan import build_attack
from vflsec.run.spec import AttackSpec, AuxSpec, DefenseSpec


def load_dataset(name: str, **options: Any) -> VerticalDataset:
    """Return a registered dataset, or the user's own from a TOML file or of this process.

    Raises:
        UsageError: an unknown name or option.
        DataError: a file is wrong.
    """
    if name.startswith(memory.PREFIX):
        return memory.kept(name)
    if name.endswith(".toml"):
        if options:
            raise UsageError(f"expected no data.options with the user's own {name}, got {', '.join(options)}")
        return load_toml(Path(name))
    expect_no_table(name)
    loaded = registry.call(name, registry.load("datasets", name), **options)
    assert isinstance(loaded, VerticalDataset)
    return loaded


def partition_of(cell: Cell) -> Partition:
    """Return the cell's split data; the last one is cached, because neighboring cells share it."""
    identity = str(dataset_identity(cell.dataset, cell.data))  # a changed file is another dataset
    data = _partition(msgspec.json.encode((cell.dataset, cell.data, cell.seed)), identity)
    if cell.shadow is None:
        return data
    n_train, n_test = (len(data.ids[split]) for split in MEMBER)
    return exchanged(data, Candidates.draw(cell.seed, n_train, n_test).dealt(cell.shadow).rows.numpy())


def build_federation(cell: Cell, device: str) -> Federation:
    """Return the federation of ``cell``; every party carries its defenses."""
    data, where = partition_of(cell), torch.device(device)
    for defense in cell.defenses:
        if defense.by and defense.by not in ("passive", *data.parties):
            raise UsageError(f"{defense.name}: {unknown('by', defense.by, ('passive', *data.parties))}")
    channel = Channel()
    labels = {split: torch.tensor(y, device=where) for split, y in data.labels.items()}
    of_source = {split: labels.pop(split) for split in ("source",) if split in labels}

    def party(own: PartyData, labels: Mapping[str, Tensor] | None = None) -> Party:
        return Party(
            own.name,
            {split: tensor_of(x, where) for split, x in own.features.items()},
            channel,
            noise=partial(generator, cell.run_seed, "noise", own.name, device=where),
            layout=own.layout,
            labels=labels,
            defenses=[build_defense(defense) for defense in cell.defenses if defense.carried_by(own.name)],
        )

    active, *passive = data.parties.values()
    parties = {active.name: party(active, labels), **{own.name: party(own) for own in passive}}
    federation = Federation(parties, channel, len(data.classes), data.metric, cell.run_seed, where)
    federation.source = party(data.source, of_source) if data.source else None
    federation.names, federation.canaries, federation.groups = data.names, data.canaries, data.groups
    federation.places = {split: torch.tensor(rows, device=where) for split, rows in data.places.items()}
    if any(defense.fixed for defense in federation.active.defenses) and cell.shadow is None:
        federation.label_seed = derive(cell.seed, cell.data_key)
    if cell.malicious:
        federation.malicious = malicious_attacks(federation, *cell.malicious, cell.aux)
    return federation


def build_defense(spec: DefenseSpec) -> Defense:
    """Return the defense that ``spec`` names."""
    at = {"at": list(spec.at)} if spec.at else {}
    defense = registry.build("defenses", spec.name, spec.strength, **at, **spec.options)
    assert isinstance(defense, Defense)
    return defense


def build_method(cell: Cell) -> Method:
    """Return the cell's method."""
    method = registry.build("methods", cell.method, cell.train, cell.model, **cell.method_options)
    assert isinstance(method, Method)
    return method


def malicious_attacks(federation: Federation, name: str, spec: AttackSpec, aux: AuxSpec | None) -> dict[str, Attack]:
    """Return the attack of each malicious party; an attack on integrity gets the view of its party.

    Args:
        federation: parties with their columns, trained or not.
        name: of the adversary, ``passive_1+passive_2`` for colluding parties.
        spec: the attack.
        aux: the labels that they know, or None.

    Raises:
        UsageError: no such party, or the adversary knows too little.
    """
    attacks: dict[str, Attack] = {}
    for party in adversary(federation, name):
        attacks[party.name] = attack = build_attack(spec)
        if isinstance(attack, IntegrityAttack):
            known = aux if aux and Need.AUX_LABELS in attack.needs else AuxSpec(n=0)
            attack.join(view_before(federation, party, known), seed=derive(federation.seed, "sabotage", attack.name))
    return attacks


@lru_cache(maxsize=1)
def _partition(settings: bytes, identity: str) -> Partition:  # noqa: ARG001  (an argument of the cache)
    dataset, data, seed = msgspec.json.decode(settings, type=tuple[str, DataSpec, int])
    return partition(load_dataset(dataset, **data.options), data, seed)
