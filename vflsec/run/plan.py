"""From settings to the results that they ask for: each attack on each cell, and each baseline."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import msgspec

from vflsec.base.errors import UsageError
from vflsec.core import registry
from vflsec.core.attack import Attack, Target
from vflsec.core.view import Need
from vflsec.results.records.manifest import NO_ADVERSARY
from vflsec.run.cell import Cell, attack_settings, aux_settings, digest, result_key, training_cell
from vflsec.run.questions import about_source
from vflsec.run.spec import AttackSpec, DefenseSpec, EvalSpec


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Where a cell's result belongs in the curves; without an attack if the method has no adversary.

    Attributes:
        method: its label, with its options where these are part of the name.
        control: whether the cell is the honest one to which an attack on integrity is compared.
        trainings: of the cell on the same rows, which the attack combines.
    """

    method: str
    defense: str
    strength: float
    seed: int
    attack: AttackSpec | None
    label: str
    cell: Cell
    key: str
    control: bool = False
    trainings: int = 1


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """What the adversary reaches alone: a candidate attack on a view without the federation, for one seed.

    Attributes:
        pretrained: whether the adversary first pre-trains its model by itself, as in the stages of ``cell``.
        asking: the attack whose question is asked, if it is not ``attack`` itself: one on the source's rows.
    """

    method: str
    cell: Cell
    attack: AttackSpec
    label: str
    seed: int
    key: str
    pretrained: bool = False
    asking: AttackSpec | None = None


def rows(spec: EvalSpec) -> Iterator[Row]:
    """Yield every (method, defense, strength, seed, attack), seeds outermost so that neighbors share their data."""
    for seed in range(spec.seeds):
        for method in spec.methods:
            if not attacked(spec.method_of(method).name):  # nor does it send any message that a defense could change
                cell = msgspec.structs.replace(training_cell(spec, method, seed), defenses=())
                yield Row(method=method, defense="none", strength=0.0, seed=seed, attack=None, label=NO_ADVERSARY,
                          cell=cell, key=_labeled(digest(["utility", cell.key]), cell, method))  # fmt: skip
                continue
            for sweep, strength in _sweep(spec):
                for attack, label in zip(spec.attacks, spec.labels, strict=True):
                    cell = _attacked_cell(spec, method, sweep, strength, seed, attack)
                    defense = sweep.label if sweep else "none"
                    key = _labeled(result_key(cell, attack, spec.adversary, spec.aux, spec.trainings), cell, method)
                    row = Row(method=method, defense=defense, strength=strength, seed=seed, attack=attack, label=label,
                              cell=cell, key=key, trainings=spec.trainings)  # fmt: skip
                    if target_of(attack) == "integrity":
                        honest = msgspec.structs.replace(cell, malicious=None, aux=None)
                        key = digest(["control", result_key(honest, attack, spec.adversary, spec.aux)])
                        yield msgspec.structs.replace(row, cell=honest, key=_labeled(key, cell, method), control=True)
                    yield row


def _sweep(spec: EvalSpec) -> Iterator[tuple[DefenseSpec | None, float]]:
    if not spec.defenses:
        yield None, 0.0
    for defense in spec.defenses:
        for strength in sorted({0.0, *spec.strengths_of(defense)}):
            yield defense, strength


def _attacked_cell(
    spec: EvalSpec, method: str, sweep: DefenseSpec | None, strength: float, seed: int, attack: AttackSpec
) -> Cell:
    swept = (msgspec.structs.replace(sweep, strength=strength, strengths=()),) if sweep else ()
    made = build_attack(attack)
    malicious = (spec.adversary, attack) if made.acts_in_training else None
    aux = spec.aux if made.target == "integrity" and Need.AUX_LABELS in made.needs else None
    return training_cell(spec, method, seed, swept, malicious, aux)


def baselines(spec: EvalSpec) -> Iterator[Baseline]:
    """Yield, for each seed and method, each attack without the federation, and the baseline attacks on labels.

    A baseline takes the adversary's columns and the shape of its bottom model from the cell. If any party could have
    pre-trained by itself as the method does, the same attack on a model that the adversary pre-trained alone is one
    more (FedHSSL's A_SimSiam). The active party has the labels, so it has no baseline attacks on them. Attacks on
    integrity have no baseline: alone, there is nothing to break.
    """
    on_labels = [name for name in registry.entries("attacks") if is_baseline(name)]
    inferring = [pair for pair in zip(spec.attacks, spec.labels, strict=True) if target_of(pair[0]) != "integrity"]
    candidates = [pair for pair in inferring if pair[0].name not in on_labels]
    if spec.adversary != "active" and "labels" in {target_of(attack) for attack in spec.attacks}:
        candidates += [(AttackSpec(name=name), name) for name in on_labels]
    for seed in range(spec.seeds):
        for method in spec.methods:
            cell = training_cell(spec, method, seed)
            if not attacked(cell.method):
                continue
            own, kind = _pretrained_alone(cell), registry.load("methods", cell.method)
            of_source = [a for a, _ in inferring if about_source(build_attack(a), a.after, kind, spec.adversary)]
            for attack, label in candidates:
                is_base = attack.name in on_labels
                asking = attack if attack in of_source else next(iter(of_source), None) if is_base else None
                bare = msgspec.structs.replace(attack, after=None)
                alone = without_federation(build_attack(bare))
                settings: list[Any] = [
                    attack_settings(bare),
                    [alone.name, alone.version] if alone else [],
                    spec.adversary,
                ]
                settings += [aux_settings(spec.aux), *(["of the source", asking.after] if asking else [])]
                key = digest(["prior", cell.data_key if is_base else cell.key, *settings])  # baselines read no model
                baseline = Baseline(
                    method=method, cell=cell, attack=bare, label=label, seed=seed, key=key, asking=asking
                )
                yield baseline
                if own and alone and not is_base and target_of(attack) == "labels":
                    stages = [own.stage_key(phase) for phase in own.stages]
                    # Stages may be shared between splits of the data; whose labels are inferred is not.
                    key = digest(["prior", stages, msgspec.to_builtins(own.data), *settings])
                    after = f"{label} after {own.method}"
                    yield msgspec.structs.replace(baseline, cell=own, label=after, key=key, pretrained=True)


def _pretrained_alone(cell: Cell) -> Cell | None:
    """Return the cell whose pre-training any party could do alone, with the options that it shares with the method."""
    name = registry.load("methods", cell.method).prior
    if name is None:
        return None
    own = registry.load("methods", name)
    shared = inspect.signature(own).parameters.keys() - own.joint - own.last_phase_options
    options = {key: value for key, value in cell.method_options.items() if key in shared}
    return msgspec.structs.replace(cell, method=name, method_options=options, defenses=(), malicious=None)


def is_baseline(attack: str) -> bool:
    """Whether an attack on labels is part of *alone*, whatever else is run."""
    kind = registry.load("attacks", attack)
    return bool(kind.baseline) and kind.target == "labels"


def attacked(method: str) -> bool:
    """Whether a method has an adversary; one party alone, or pooled columns, have none."""
    return bool(registry.load("methods", method).visible_to)


def build_attack(spec: AttackSpec) -> Attack:
    """Return the attack that ``spec`` names."""
    attack = registry.build("attacks", spec.name, **spec.options)
    assert isinstance(attack, Attack)
    return attack


def without_federation(attack: Attack) -> Attack | None:
    """Return the attack that the same adversary could run without the federation, or None.

    Raises:
        UsageError: its ``alone`` fails, or returns something else.
    """
    try:
        own = attack.alone()
    except Exception as error:
        raise UsageError(f"attack {attack.name!r}: alone() failed: {type(error).__name__}: {error}") from error
    if own is not None and not isinstance(own, Attack):
        raise UsageError(f"attack {attack.name!r}: expected an attack or None from alone(), got {type(own).__name__}")
    return own


def target_of(spec: AttackSpec) -> Target:
    """Return what the attack that ``spec`` names recovers."""
    return registry.load("attacks", spec.name).target  # type: ignore[no-any-return]


def asked_of(spec: AttackSpec) -> str:
    """Return the question of an attack: what it recovers, of whom, and which column.

    Only leaks of one question can be compared.
    """
    details = [f"of {spec.options['victim']}"] if spec.options.get("victim") else []
    details += [str(spec.options["column"])] if spec.options.get("column") else []
    return " ".join([target_of(spec), *details])


def _labeled(key: str, cell: Cell, label: str) -> str:
    """Return the key of a result under ``label``: a record names its method, and so two labels have two records."""
    return key if label == cell.method else digest(["label", key, label])
