"""From settings to cells: one cell is one training, named by a hash of everything that can change its result.

The phases of a training but the last are stages, with keys of their own, so that all cells that start alike share them.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from vflsec.core import hooks, registry
from vflsec.core.attack import Attack, Target
from vflsec.core.defense import touches
from vflsec.core.errors import UsageError
from vflsec.core.hooks import Runs
from vflsec.core.method import Method
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.core.view import Need
from vflsec.data.files import source_files
from vflsec.data.partition import DataSpec
from vflsec.experiment.questions import about_source
from vflsec.experiment.spec import AttackSpec, AuxSpec, DefenseSpec, EvalSpec
from vflsec.records.manifest import NO_ADVERSARY

KEY_VERSION = 5
"""Raised whenever the meaning of a setting changes, so that no stored result is taken for another."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One training: a dataset, a method, defenses at their strengths, a seed.

    Defenses at strength 0 are left out: there they are the identity, so that all sweeps share one undefended cell.

    Attributes:
        malicious: the party, or colluding parties, that act in training, and their attack.
        told: the labels that they know before, where the attack uses any in training.
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
    told: AuxSpec | None = None

    @property
    def key(self) -> str:
        """Sixteen hex digits that name this cell."""
        return digest(self._settings())

    @property
    def data_key(self) -> str:
        """Sixteen hex digits that name the split data, which methods have in common."""
        settings = self._settings()
        return digest(["data", settings["dataset"], settings["data"], self.seed])

    @property
    def stages(self) -> tuple[str, ...]:
        """All phases but the last."""
        return tuple(registry.load("methods", self.method).phases[:-1])

    def stage_key(self, phase: str) -> str:
        """Sixteen hex digits that name this cell up to and with ``phase``; what acts later does not change them."""
        method = registry.load("methods", self.method)
        until = method.phases[: method.phases.index(phase) + 1]
        acting = [d for d in self.defenses if acts_in(d, method, self.method_options, until)]
        unlabeled = not any(hooks.LABELS in method.runs(p, self.method_options) for p in until)
        apart = (
            unlabeled or set(until) <= method.source_phases
        )  # no setting of the last phase tells how these phases learn
        options = {key: value for key, value in self.method_options.items() if key not in method.last_phase_options}
        settings = msgspec.structs.replace(self, defenses=tuple(acting), method_options=options)._settings()
        del settings["train"]["target"]
        for name in ("aggregation", "head_hidden"):
            del settings["model"][name]
        settings["model"]["head"] = self.model.head == "none"  # then embeddings are as wide as there are classes
        if unlabeled:  # what labels there are, and how they are learned from, is of later phases
            del settings["data"]["n_labeled"], settings["data"]["validation"], settings["malicious"]
            settings.pop("told", None)
        if apart and not any(hooks.PLAN_RELEASES in touches(registry.load("defenses", d.name)) for d in acting):
            settings["train"] = settings["train"]["pretrain"]  # else noise may depend on releases of the last phase
        return digest(["stage", phase, settings])

    def _settings(self) -> dict[str, Any]:
        """Everything that can change this cell's result, files by their content, plug-ins with their versions."""
        settings: dict[str, Any] = msgspec.to_builtins(self)
        settings["dataset"] = dataset_identity(self.dataset, self.data)
        if isinstance(settings["dataset"], list):
            settings["data"]["options"].pop("data_dir", None)  # the files count, and not where they lie
        settings["method"] = versioned("methods", self.method)
        settings["method_options"] = {key: _file_option(value) for key, value in self.method_options.items()}
        settings["defenses"] = [
            {k: v for k, v in msgspec.to_builtins(d).items() if k != "strengths"}
            | {"name": versioned("defenses", d.name)}
            for d in self.defenses
        ]
        if self.malicious:
            settings["malicious"] = [self.malicious[0], _attack_settings(self.malicious[1])]
        if self.told is None:
            del settings["told"]
        return settings


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Where a cell's result belongs in the curves; without an attack where the method has no adversary.

    Attributes:
        control: whether the cell is the honest one that an attack on integrity is held against.
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


class Prior(msgspec.Struct, frozen=True, kw_only=True):
    """What the adversary could do alone: a candidate attack on a view without the federation, for one seed.

    Attributes:
        pretrained: whether the adversary first pre-trains its model by itself, as in the stages of ``cell``.
        asking: the attack whose question is asked, where it is not ``attack`` itself: one on the source's people.
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
            if not attacked(method):
                cell = training_cell(spec, method, seed)
                cell = msgspec.structs.replace(cell, defenses=())  # it says nothing that a defense could change
                yield Row(method=method, defense="none", strength=0.0, seed=seed, attack=None, label=NO_ADVERSARY,
                          cell=cell, key=digest(["utility", cell.key]))  # fmt: skip
                continue
            for sweep, strength in _sweep(spec):
                for attack, label in zip(spec.attacks, spec.labels, strict=True):
                    cell = _cell(spec, method, sweep, strength, seed, attack)
                    row = Row(
                        method=method,
                        defense=sweep.label if sweep else "none",
                        strength=strength,
                        seed=seed,
                        attack=attack,
                        label=label,
                        cell=cell,
                        key=result_key(cell, attack, spec.adversary, spec.aux),
                    )
                    if target_of(attack) == "integrity":
                        honest = msgspec.structs.replace(cell, malicious=None, told=None)
                        key = digest(["control", result_key(honest, attack, spec.adversary, spec.aux)])
                        yield msgspec.structs.replace(row, cell=honest, key=key, control=True)
                    yield row


def priors(spec: EvalSpec) -> Iterator[Prior]:
    """Yield, for each seed, method and attack, the attack's own *alone*; and the baselines.

    A prior needs no federation: it takes the adversary's columns and the shape of its bottom model from the cell. Where
    a method pre-trains as any party could have done by itself, that is one more: the same attack on a model that the
    adversary pre-trained alone (FedHSSL's A_SimSiam). Baselines are for attacks on labels, which the active party has.
    Attacks on integrity have none: alone, there is nothing to break.
    """
    baselines = [name for name in registry.entries("attacks") if is_baseline(name)]
    inferring = [pair for pair in zip(spec.attacks, spec.labels, strict=True) if target_of(pair[0]) != "integrity"]
    candidates = [pair for pair in inferring if pair[0].name not in baselines]
    if spec.adversary != "active" and "labels" in {target_of(attack) for attack in spec.attacks}:
        candidates += [(AttackSpec(name=name), name) for name in baselines]
    for seed in range(spec.seeds):
        for method in filter(attacked, spec.methods):
            cell = training_cell(spec, method, seed)
            own = _pretrained_alone(spec, method, seed)
            known = registry.load("methods", method)
            of_source = [a for a, _ in inferring if about_source(build_attack(a), a.after, known, spec.adversary)]
            for attack, label in candidates:
                asked = of_source[:1] if attack.name in baselines else []
                asking = attack if attack in of_source else next(iter(asked), None)
                struck = msgspec.structs.replace(attack, after=None)
                own_way = without_federation(build_attack(struck))  # whose version counts as well
                alone = [own_way.name, own_way.version] if own_way else []
                who = [_attack_settings(struck), alone, spec.adversary, msgspec.to_builtins(spec.aux)]
                who += ["of the source", asking.after] if asking else []
                fitted = cell.data_key if attack.name in baselines else cell.key  # baselines read no model
                key = digest(["prior", fitted, *who])
                prior = Prior(method=method, cell=cell, attack=struck, label=label, seed=seed, key=key, asking=asking)
                yield prior
                on_labels = attack.name not in baselines and target_of(attack) == "labels"
                if own and on_labels and own_way:
                    told = msgspec.to_builtins(own.data)  # the pre-training may be shared; who is guessed is not
                    key = digest(["prior", [own.stage_key(phase) for phase in own.stages], told, *who])
                    after = f"{label} after {own.method}"
                    yield msgspec.structs.replace(prior, cell=own, label=after, key=key, pretrained=True)


def is_baseline(attack: str) -> bool:
    """Whether an attack on labels is part of *alone*, whatever else is run."""
    found = registry.load("attacks", attack)
    return bool(found.baseline) and found.target == "labels"


def attacked(method: str) -> bool:
    """Whether a method has an adversary at all: one party alone, or pooled columns, have none."""
    return bool(registry.load("methods", method).visible_to)


def build_attack(spec: AttackSpec) -> Attack:
    """Return the attack that ``spec`` names."""
    attack = registry.build("attacks", spec.name, **spec.options)
    assert isinstance(attack, Attack)
    return attack


def without_federation(attack: Attack) -> Attack | None:
    """Return what ``attack`` says that its adversary could have done alone.

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
    """Return the question that the attack which ``spec`` names answers: what it recovers, of whom, and which column.

    Only leaks of one question can be compared.
    """
    details = [f"of {spec.options['victim']}"] if spec.options.get("victim") else []
    details += [str(spec.options["column"])] if spec.options.get("column") else []
    return " ".join([target_of(spec), *details])


def acts_in(defense: DefenseSpec, method: type[Method], options: Mapping[str, Any], phases: Iterable[str]) -> bool:
    """Whether ``defense`` changes anything that ``method`` says or learns in one of ``phases``, if it is on."""
    made = registry.build("defenses", defense.name, defense.strength or 1.0, at=defense.at, **defense.options)
    at_active = defense.carried_by("active")
    return any(
        made.runs(hook, phase)
        for phase in phases
        for hook in method.runs(phase, options)
        if at_active or hook.run_by != Runs.ACTIVE
    )


def _pretrained_alone(spec: EvalSpec, method: str, seed: int) -> Cell | None:
    """The cell whose pre-training any party could do alone, with those options of ``method`` that it shares."""
    name = registry.load("methods", method).prior
    if name is None:
        return None
    prior = registry.load("methods", name)
    known = inspect.signature(prior).parameters
    options = {
        k: v
        for k, v in spec.method.get(method, {}).items()
        if k in known and k not in prior.joint | prior.last_phase_options
    }
    return msgspec.structs.replace(
        training_cell(spec, method, seed), method=name, method_options=options, defenses=(), malicious=None
    )


def result_key(cell: Cell, attack: AttackSpec, adversary: str, aux: AuxSpec) -> str:
    """Return the key of one attack on one cell."""
    if attack.after:
        return digest(["result", cell.key, _attack_settings(attack), attack.after, adversary, msgspec.to_builtins(aux)])
    return digest(["result", cell.key, _attack_settings(attack), adversary, msgspec.to_builtins(aux)])


def digest(settings: Any) -> str:
    """Return sixteen hex digits of SHA-256 over canonical JSON."""
    text = msgspec.json.encode([KEY_VERSION, settings], order="deterministic")
    return hashlib.sha256(text).hexdigest()[:16]


def dataset_identity(dataset: str, data: DataSpec) -> Any:
    """Return what keys call a dataset: its name, and a hash of each file of the user's that it is read from.

    These are a TOML file and what it names; or what the dataset's ``source_files`` finds in ``data.options.data_dir``.
    """
    if dataset.endswith(".toml"):
        found = [path for path in source_files(Path(dataset)) if path.is_file()]  # the loader tells of a missing one
        return _hashes(found)
    name = registry.identity("datasets", dataset)
    files = getattr(inspect.getmodule(registry.load("datasets", dataset)), "source_files", None)
    folder = data.options.get("data_dir")
    return name if folder is None or files is None else [name, *_hashes(files(folder))]


def _hashes(paths: Iterable[Path]) -> list[str]:
    return [_file_hash(path, path.stat().st_mtime_ns, path.stat().st_size) for path in paths]


@lru_cache(maxsize=64)
def _file_hash(path: Path, modified: int, size: int) -> str:  # noqa: ARG001  (arguments of the cache)
    """SHA-256 of a file, read again only if its time or size has changed."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _sweep(spec: EvalSpec) -> Iterator[tuple[DefenseSpec | None, float]]:
    if not spec.defenses:
        yield None, 0.0
    for defense in spec.defenses:
        for strength in sorted({0.0, *spec.strengths_of(defense)}):
            yield defense, strength


def training_cell(
    spec: EvalSpec,
    method: str,
    seed: int,
    swept: tuple[DefenseSpec, ...] = (),
    malicious: tuple[str, AttackSpec] | None = None,
    told: AuxSpec | None = None,
) -> Cell:
    """Return the cell of one method and seed, under the swept defenses and the fixed ones, those at 0 left out."""
    return Cell(
        dataset=spec.dataset,
        data=spec.data,
        method=method,
        method_options=spec.method.get(method, {}),
        train=spec.train,
        model=spec.resolved_model,
        defenses=tuple(d for d in (*swept, *spec.fixed) if d.strength > 0),
        seed=seed,
        malicious=malicious,
        told=told,
    )


def _cell(
    spec: EvalSpec, method: str, sweep: DefenseSpec | None, strength: float, seed: int, attack: AttackSpec
) -> Cell:
    swept = (msgspec.structs.replace(sweep, strength=strength, strengths=()),) if sweep else ()
    made = build_attack(attack)
    malicious = (spec.adversary, attack) if made.acts_in_training else None
    told = spec.aux if made.target == "integrity" and Need.AUX_LABELS in made.needs else None
    return training_cell(spec, method, seed, swept, malicious, told)


def _attack_settings(attack: AttackSpec) -> list[Any]:
    return [*versioned("attacks", attack.name), attack.options]


def versioned(kind: str, name: str) -> list[Any]:
    """Return what keys call a class: its identity and its version."""
    return [registry.identity(kind, name), registry.load(kind, name).version]


def _file_option(value: Any) -> Any:
    """An option that names a class in a file (a boundary, say) stands for that file's content."""
    is_file = isinstance(value, str) and registry.is_file(value)
    return registry.identity("protocols", value) if is_file else value
