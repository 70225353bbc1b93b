"""A cell: one training, named by a hash of everything that can change its result.

Each phase of a training but the last is a stage with a key of its own. Cells that start alike share their stages.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from vflsec.base.seeds import derive
from vflsec.core import hooks, registry
from vflsec.core.defense import touches
from vflsec.core.hooks import Runs
from vflsec.core.method import Method
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.data import memory
from vflsec.data.description import expect_no_table, source_files
from vflsec.data.partition import DataSpec
from vflsec.run.spec import AttackSpec, AuxSpec, DefenseSpec, EvalSpec

KEY_VERSION = 1
"""Raised whenever the meaning of a setting changes, so that no stored result is taken for another."""

TUNING_VERSION = 1
"""Raised whenever an adversary that compares variants would choose others."""


TRAININGS_VERSION = 1
"""Raised whenever several trainings would be combined into another guess."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One training: a dataset, a method, defenses at their strengths, a seed.

    Defenses at strength 0 are the identity and are left out, so that all sweeps share one undefended cell.

    Attributes:
        malicious: the party, or colluding parties, that act in training, and their attack.
        aux: the labels that the malicious parties know before training; None if the attack uses none.
        shadow: of a shadow federation its number: it is trained as this cell, with seeds of its own and on other halves
            of the candidates, see ``vflsec.run.shadows``.
        training: its number among several on the same rows; all but the first, 0, have a ``run_seed`` of their own.
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
    aux: AuxSpec | None = msgspec.field(default=None, name="told")  # the name that keys know it by
    shadow: int | None = None
    training: int = 0

    @property
    def key(self) -> str:
        """Sixteen hex digits that name this cell."""
        return digest(self._settings())

    @property
    def run_seed(self) -> int:
        """The seed of models, batches and noise."""
        seed = derive(self.seed, "training", self.training) if self.training else self.seed
        return seed if self.shadow is None else derive(seed, "shadow", self.shadow)

    @property
    def data_key(self) -> str:
        """Sixteen hex digits that name the split data, which all methods share."""
        settings = self._settings()
        return digest(["data", settings["dataset"], settings["data"], self.seed])

    @property
    def stages(self) -> tuple[str, ...]:
        """All phases but the last."""
        return tuple(registry.load("methods", self.method).phases[:-1])

    def stage_key(self, phase: str) -> str:
        """Sixteen hex digits that name this cell up to and including ``phase``, whatever the later phases do."""
        method = registry.load("methods", self.method)
        until = method.phases[: method.phases.index(phase) + 1]
        acting = [d for d in self.defenses if acts_in(d, method, self.method_options, until)]
        unlabeled = not any(hooks.LABELS in method.runs(p, self.method_options) for p in until)
        options = {key: value for key, value in self.method_options.items() if key not in method.last_phase_options}
        settings = msgspec.structs.replace(self, defenses=tuple(acting), method_options=options)._settings()
        del settings["train"]["target"], settings["model"]["aggregation"], settings["model"]["head_hidden"]
        settings["model"]["head"] = self.model.head == "none"  # then embeddings are as wide as there are classes
        if unlabeled:  # the labels, and how the model learns from them, belong to later phases
            del settings["data"]["n_labeled"], settings["data"]["validation"], settings["malicious"]
            settings.pop("told", None)
            settings["data"].pop("canaries", None)
        pretrains_apart = unlabeled or set(until) <= method.source_phases  # no setting of the last phase applies
        planned = any(hooks.PLAN_RELEASES in touches(registry.load("defenses", d.name)) for d in acting)
        if pretrains_apart and not planned:  # planned noise may depend on the releases of the last phase
            settings["train"] = settings["train"]["pretrain"]
        return digest(["stage", phase, settings])

    def whole(self) -> Cell:
        """Return this cell with a pre-training that does not stop before its last iteration."""
        pretrain = msgspec.structs.replace(self.train.pretrain, until=None)
        return msgspec.structs.replace(self, train=msgspec.structs.replace(self.train, pretrain=pretrain))

    def _settings(self) -> dict[str, Any]:
        """Everything that can change this cell's result: files by their content, plug-ins with their versions."""
        settings: dict[str, Any] = msgspec.to_builtins(self)
        settings["dataset"] = dataset_identity(self.dataset, self.data)
        if not self.data.canaries:
            del settings["data"]["canaries"]
        if settings["train"]["pretrain"]["until"] is None:  # keys are those of the time before there was this setting
            del settings["train"]["pretrain"]["until"]
        if isinstance(settings["dataset"], list):
            settings["data"]["options"].pop("data_dir", None)  # the content of the files counts, not their folder
        settings["method"] = versioned("methods", self.method)
        settings["method_options"] = {key: _file_option(value) for key, value in self.method_options.items()}
        for defense in settings["defenses"]:
            del defense["strengths"]
            defense["name"] = versioned("defenses", defense["name"])
        if self.malicious:
            settings["malicious"] = [self.malicious[0], attack_settings(self.malicious[1])]
        if self.aux is None:
            del settings["told"]
        if self.shadow is None:
            del settings["shadow"]
        if not self.training:
            del settings["training"]
        return settings


def training_cell(
    spec: EvalSpec,
    method: str,
    seed: int,
    swept: tuple[DefenseSpec, ...] = (),
    malicious: tuple[str, AttackSpec] | None = None,
    aux: AuxSpec | None = None,
) -> Cell:
    """Return the cell of one method and seed, under the swept and the fixed defenses of positive strength."""
    chosen = spec.method_of(method)
    return Cell(
        dataset=spec.dataset,
        data=spec.data,
        method=chosen.name,
        method_options=chosen.options,
        train=spec.train,
        model=spec.resolved_model,
        defenses=tuple(d for d in (*swept, *spec.fixed) if d.strength > 0),
        seed=seed,
        malicious=malicious,
        aux=aux,
    )


def acts_in(defense: DefenseSpec, method: type[Method], options: Mapping[str, Any], phases: Iterable[str]) -> bool:
    """Whether ``defense``, if it is on, changes the messages or the training of ``method`` in one of ``phases``."""
    made = registry.build("defenses", defense.name, defense.strength or 1.0, at=defense.at, **defense.options)
    at_active = defense.carried_by("active")
    return any(
        made.runs(hook, phase)
        for phase in phases
        for hook in method.runs(phase, options)
        if at_active or hook.run_by != Runs.ACTIVE
    )


def several(cell: Cell, trainings: int) -> list[Cell]:
    """Return as many trainings of ``cell`` on the same rows, itself the first."""
    return [msgspec.structs.replace(cell, training=number) for number in range(trainings)]


def result_key(cell: Cell, attack: AttackSpec, adversary: str, aux: AuxSpec, trainings: int = 1) -> str:
    """Return the key of one attack on one cell, or on several trainings of it."""
    after = [attack.after] if attack.after else []
    times = [["trainings", TRAININGS_VERSION, trainings]] if trainings > 1 else []
    return digest(["result", cell.key, attack_settings(attack), *after, adversary, aux_settings(aux), *times])


def aux_settings(aux: AuxSpec) -> dict[str, Any]:
    """Return how keys identify what an adversary knows, and how it chooses among variants if it does."""
    tuning = {"tuning": TUNING_VERSION} if aux.budget != "paper" else {}
    return {**msgspec.to_builtins(aux), **tuning}


def digest(settings: Any) -> str:
    """Return sixteen hex digits of SHA-256 over canonical JSON."""
    text = msgspec.json.encode([KEY_VERSION, settings], order="deterministic")
    return hashlib.sha256(text).hexdigest()[:16]


def dataset_identity(dataset: str, data: DataSpec) -> Any:
    """Return how keys identify a dataset: its name, or a hash of each of the user's files that it is read from.

    The files are a TOML file and the tables that it names, or those that the dataset's ``source_files`` finds in
    ``data.options.data_dir``. A dataset of very many files has a ``fingerprint`` of that folder instead.
    """
    if dataset.startswith(memory.PREFIX):
        return dataset  # its name ends in a hash
    if dataset.endswith(".toml"):
        return _hashes(path for path in source_files(Path(dataset)) if path.is_file())  # the loader reports others
    expect_no_table(dataset)
    name = registry.identity("datasets", dataset)
    module, folder = inspect.getmodule(registry.load("datasets", dataset)), data.options.get("data_dir")
    fingerprint = getattr(module, "fingerprint", None)
    if folder is not None and fingerprint is not None:
        return [name, fingerprint(folder)]
    files = getattr(module, "source_files", None)
    return name if folder is None or files is None else [name, *_hashes(files(folder))]


def versioned(kind: str, name: str) -> list[Any]:
    """Return how keys identify a class: its identity and its version."""
    return [registry.identity(kind, name), registry.load(kind, name).version]


def attack_settings(attack: AttackSpec) -> list[Any]:
    """Return how keys identify an attack with its options."""
    return [*versioned("attacks", attack.name), attack.options]


def _hashes(paths: Iterable[Path]) -> list[str]:
    return [_file_hash(path, path.stat().st_mtime_ns, path.stat().st_size) for path in paths]


@lru_cache(maxsize=64)
def _file_hash(path: Path, modified: int, size: int) -> str:  # noqa: ARG001  (arguments of the cache)
    """SHA-256 of a file, read again only if its time or size has changed."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _file_option(value: Any) -> Any:
    """Replace an option that names a class in a file, such as a boundary, by the identity of its content."""
    is_file = isinstance(value, str) and registry.is_file(value)
    return registry.identity("protocols", value) if is_file else value
