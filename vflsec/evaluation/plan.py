"""From settings to cells: one cell is one training, named by a hash of everything that can change its result."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from vflsec.core import registry
from vflsec.core.method import ModelSpec, TrainSpec
from vflsec.data.files import source_files
from vflsec.data.partition import DataSpec
from vflsec.evaluation.spec import AttackSpec, AuxSpec, DefenseSpec, EvalSpec

KEY_VERSION = 1
"""Raised whenever the meaning of a setting changes, so that no stored result is taken for another."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One training: a dataset, a method, defences at their strengths, a seed.

    Defences at strength 0 are left out: there they are the identity, so that all sweeps share one undefended cell.
    """

    dataset: str
    data: DataSpec
    method: str
    method_options: dict[str, Any]
    train: TrainSpec
    model: ModelSpec
    defenses: tuple[DefenseSpec, ...]
    seed: int
    malicious: tuple[str, AttackSpec] | None = None

    @property
    def key(self) -> str:
        """Sixteen hex digits that name this cell."""
        settings = msgspec.to_builtins(self)
        settings["dataset"] = dataset_identity(self.dataset)
        settings["method"] = _versioned("methods", self.method)
        settings["method_options"] = {key: _file_option(value) for key, value in self.method_options.items()}
        settings["defenses"] = [
            {**msgspec.to_builtins(d), "name": _versioned("defenses", d.name)} for d in self.defenses
        ]
        if self.malicious:
            settings["malicious"] = [self.malicious[0], _attack_settings(self.malicious[1])]
        return digest(settings)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Where a cell's result belongs in the curves."""

    method: str
    defense: str
    strength: float
    seed: int
    attack: AttackSpec
    label: str
    cell: Cell
    key: str


class Prior(msgspec.Struct, frozen=True, kw_only=True):
    """What the adversary could do alone: a candidate attack on a view without the federation, for one seed."""

    cell: Cell
    attack: AttackSpec
    label: str
    seed: int
    key: str


def rows(spec: EvalSpec) -> Iterator[Row]:
    """Yield every (method, defence, strength, seed, attack), seeds outermost so that neighbours share their data."""
    for seed in range(spec.seeds):
        for method in spec.methods:
            for sweep, strength in _sweep(spec):
                for attack, label in zip(spec.attacks, spec.labels, strict=True):
                    cell = _cell(spec, method, sweep, strength, seed, attack)
                    yield Row(
                        method=method,
                        defense=sweep.label if sweep else "none",
                        strength=strength,
                        seed=seed,
                        attack=attack,
                        label=label,
                        cell=cell,
                        key=result_key(cell, attack, spec.adversary, spec.aux),
                    )


def priors(spec: EvalSpec) -> Iterator[Prior]:
    """Yield, for each seed, method and attack, the attack's own *alone*; and the logistic regression.

    A prior needs no training: it takes the adversary's columns and the shape of its bottom model from the cell. The
    active party needs no logistic regression: it holds the labels.
    """
    logistic = AttackSpec(name="logistic")
    candidates = [pair for pair in zip(spec.attacks, spec.labels, strict=True) if pair[0].name != "logistic"]
    if spec.adversary != "active":
        candidates.append((logistic, "logistic"))
    for seed in range(spec.seeds):
        for method in spec.methods:
            cell = _cell(spec, method, None, 0.0, seed, logistic)
            for attack, label in candidates:
                key = digest(
                    ["prior", cell.key, _attack_settings(attack), spec.adversary, msgspec.to_builtins(spec.aux)]
                )
                yield Prior(cell=cell, attack=attack, label=label, seed=seed, key=key)


def result_key(cell: Cell, attack: AttackSpec, adversary: str, aux: AuxSpec) -> str:
    """Return the key of one attack on one cell."""
    return digest(["result", cell.key, _attack_settings(attack), adversary, msgspec.to_builtins(aux)])


def digest(settings: Any) -> str:
    """Return sixteen hex digits of SHA-256 over canonical JSON."""
    text = msgspec.json.encode([KEY_VERSION, settings], order="deterministic")
    return hashlib.sha256(text).hexdigest()[:16]


def dataset_identity(dataset: str) -> Any:
    """Return what keys call a dataset: its name; for a user's TOML, a hash of it and of the files beside it."""
    if not dataset.endswith(".toml"):
        return registry.identity("datasets", dataset)
    found = [path for path in source_files(Path(dataset)) if path.is_file()]  # the loader tells of one that is missing
    facts = [(path, path.stat().st_mtime_ns, path.stat().st_size) for path in found]
    return [_file_hash(*fact) for fact in facts]


@lru_cache(maxsize=64)
def _file_hash(path: Path, modified: int, size: int) -> str:  # noqa: ARG001  (arguments of the cache)
    """SHA-256 of a file, read again only if its time or size has changed."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _sweep(spec: EvalSpec) -> Iterator[tuple[DefenseSpec | None, float]]:
    if not spec.defenses:
        yield None, 0.0
    for defense in spec.defenses:
        for strength in sorted({0.0, *spec.strengths}):
            yield defense, strength


def training_cell(
    spec: EvalSpec,
    method: str,
    seed: int,
    swept: tuple[DefenseSpec, ...] = (),
    malicious: tuple[str, AttackSpec] | None = None,
) -> Cell:
    """Return the cell of one method and seed, under the swept defences and the fixed ones, those at 0 left out."""
    return Cell(
        dataset=spec.dataset,
        data=spec.data,
        method=method,
        method_options=spec.method.get(method, {}),
        train=spec.train,
        model=spec.model,
        defenses=tuple(d for d in (*swept, *spec.fixed) if d.strength > 0),
        seed=seed,
        malicious=malicious,
    )


def _cell(
    spec: EvalSpec, method: str, sweep: DefenseSpec | None, strength: float, seed: int, attack: AttackSpec
) -> Cell:
    swept = (msgspec.structs.replace(sweep, strength=strength),) if sweep else ()
    acts = registry.build("attacks", attack.name, **attack.options).acts_in_training
    return training_cell(spec, method, seed, swept, (spec.adversary, attack) if acts else None)


def _attack_settings(attack: AttackSpec) -> list[Any]:
    return [*_versioned("attacks", attack.name), attack.options]


def _versioned(kind: str, name: str) -> list[Any]:
    """What keys call a class: its identity and its version."""
    return [registry.identity(kind, name), registry.load(kind, name).version]


def _file_option(value: Any) -> Any:
    """An option that names a class in a file (a boundary, say) stands for that file's content."""
    is_file = isinstance(value, str) and registry.is_file(value)
    return registry.identity("protocols", value) if is_file else value
