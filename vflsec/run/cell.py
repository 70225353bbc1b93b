"""A cell: one training, named by a hash of everything that can change its result.

Each phase of a training but the last is a stage with a key of its own. Cells that start alike share their stages.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from vflsec.base import files
from vflsec.base.errors import UsageError
from vflsec.base.seeds import derive
from vflsec.core import hooks
from vflsec.core.defense import list_hooks
from vflsec.core.hooks import Runs
from vflsec.core.options import list_options, make
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.data import frames
from vflsec.data.dataset import VerticalDataset
from vflsec.data.description import source_files
from vflsec.data.files import load_toml
from vflsec.data.partition import DataSpec
from vflsec.run.spec import AuxSpec, put

KEY_VERSION = 1
"""Raised whenever the meaning of a setting changes, so that no stored result is taken for another."""

TUNING_VERSION = 1
"""Raised whenever an adversary that compares variants would choose others."""

VALIDATION = 0.25
"""The share of labeled rows on which settings are compared, unless others are kept for validation."""

TRAININGS_VERSION = 2
"""Raised whenever several trainings would be combined into another guess."""


class Technique(msgspec.Struct, frozen=True, kw_only=True):
    """A method, a defense or an attack: what a name of the settings stands for, as ``vflsec.run.plan`` has found it.

    Attributes:
        spec: the name, the options, and for a defense its strength, as in the settings.
        kind: the class.
        options: those of ``spec``, with the class in place of the name of a protocol.
        identity: how keys know it: by name, package or content of its file, and version.
        keyed: its options, as keys know them.
        built_in: whether it comes with vflsec.
        resolve: returns this technique for ``spec``, in a process to which it is sent.
    """

    spec: Any
    kind: Any
    options: dict[str, Any]
    identity: list[Any]
    keyed: dict[str, Any]
    built_in: bool
    resolve: Callable[[Any], Technique]

    @property
    def name(self) -> str:
        """The name, as in the settings."""
        name: str = self.spec.name
        return name

    @property
    def label(self) -> str:
        """The name with what distinguishes it, as in the settings."""
        label: str = self.spec.label
        return label

    def make(self, *arguments: Any, **further: Any) -> Any:
        """Return an instance of the class with these options."""
        return make(self.name, self.kind, *arguments, **further, **self.options)

    def with_strength(self, strength: float) -> Technique:
        """Return this defense at another strength."""
        return msgspec.structs.replace(self, spec=msgspec.structs.replace(self.spec, strength=strength, strengths=()))

    def defense(self) -> Any:
        """Return this defense at its strength."""
        at = {"at": list(self.spec.at)} if self.spec.at else {}
        return self.make(self.spec.strength, **at)

    def with_options(self, **options: Any) -> Technique:
        """Return this technique with further options, none of which names a class."""
        return self._replace_options(lambda before: {**before, **options})

    def drop_option(self, option: str) -> Technique:
        """Return this technique with the default of an option."""
        return self._replace_options(lambda before: {key: value for key, value in before.items() if key != option})

    def _replace_options(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Technique:
        spec = msgspec.structs.replace(self.spec, options=change(self.spec.options))
        return msgspec.structs.replace(self, spec=spec, options=change(self.options), keyed=change(self.keyed))

    def has_option(self, option: str) -> bool:
        """Whether the class has an option of this name."""
        return option in list_options(self.kind)

    @property
    def settings(self) -> list[Any]:
        """How keys know an attack with its options, and with what it reads if it is there."""
        wanted = sorted(map(str, self.kind.wants))
        return [*self.identity, *([wanted] if wanted else []), self.spec.options]

    def __reduce__(self) -> tuple[Any, ...]:
        """Send the settings to another process, which resolves them again."""
        return self.resolve, (self.spec,)


_LAST: dict[bytes, VerticalDataset] = {}
"""The dataset that was loaded last."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where the rows come from: a dataset of this process, the user's TOML file, or a function of a registered name.

    Attributes:
        name: as in the settings.
        loader: the function; None for the others.
        identity: how keys know the function.
        resolve: returns this source for ``name``, in a process to which it is sent.
    """

    name: str
    loader: Any
    identity: str
    resolve: Callable[[str], Source]

    @property
    def is_in_memory(self) -> bool:
        """Whether it is a dataset of this process."""
        return self.name.startswith(frames.PREFIX)

    def load(self, **options: Any) -> VerticalDataset:
        """Return the dataset.

        Raises:
            UsageError: an unknown option.
            DataError: a file is wrong.
        """
        if self.is_in_memory:
            return frames.get_kept(self.name)
        if self.loader is None:
            if options:
                raise UsageError(f"expected no data.options with the user's own {self.name}, got {', '.join(options)}")
            return load_toml(Path(self.name))
        loaded = make(self.name, self.loader, **options)
        assert isinstance(loaded, VerticalDataset)
        return loaded

    def load_once(self, data: DataSpec) -> VerticalDataset:
        """Return the dataset of some settings, which this process keeps until it needs another; do not change it."""
        wanted = msgspec.json.encode((self.name, self.key(data), data.options))
        if wanted not in _LAST:
            _LAST.clear()
            _LAST[wanted] = self.load(**data.options)
        return _LAST[wanted]

    def key(self, data: DataSpec) -> Any:
        """Return how keys identify the rows: a name, or a hash of each of the user's files that they are read from.

        The files are a TOML file and the tables that it names, or those that the dataset's ``source_files`` finds in
        ``data.options.data_dir``. A dataset of very many files has a ``fingerprint`` of that folder instead.
        """
        if self.is_in_memory:
            return self.name  # which ends in a hash
        if self.loader is None:
            return hash_files(source_files(Path(self.name)))  # the loader reports missing ones
        module, folder = inspect.getmodule(self.loader), data.options.get("data_dir")
        fingerprint, files = (getattr(module, name, None) for name in ("fingerprint", "source_files"))
        if folder is not None and fingerprint is not None:
            return [self.identity, fingerprint(folder)]
        return self.identity if folder is None or files is None else [self.identity, *hash_files(files(folder))]

    def __reduce__(self) -> tuple[Any, ...]:
        """Send the name to another process, which resolves it again."""
        return self.resolve, (self.name,)


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One training: a dataset, a method, defenses at their strengths, a seed.

    Defenses at strength 0 are the identity and are left out, so that all sweeps share one undefended cell.

    Attributes:
        malicious: the party, or colluding parties, that act in training, and their attack.
        aux: the labels that the malicious parties know before training; None if the attack uses none.
        shadow: of a shadow federation its number: it is trained as this cell, with seeds of its own and on other halves
            of the candidates, see ``vflsec.run.training``.
        training: its number among several on the same rows; all but the first, 0, have a ``run_seed`` of their own.
        is_trial: whether it only compares settings, on validation rows in the place of test rows.
    """

    dataset: Source
    data: DataSpec
    method: Technique
    train: TrainSpec
    model: ModelSpec
    defenses: tuple[Technique, ...]
    seed: int
    malicious: tuple[str, Technique] | None = None
    aux: AuxSpec | None = None
    shadow: int | None = None
    training: int = 0
    is_trial: bool = False

    @property
    def key(self) -> str:
        """Sixteen hex digits that name this cell."""
        return digest(self._list_settings())

    @property
    def run_seed(self) -> int:
        """The seed of models, batches and noise."""
        seed = derive(self.seed, "training", self.training) if self.training else self.seed
        return seed if self.shadow is None else derive(seed, "shadow", self.shadow)

    @property
    def data_key(self) -> str:
        """Sixteen hex digits that name the split data, which all methods share."""
        settings = self._list_settings()
        return digest(["data", settings["dataset"], settings["data"], self.seed])

    @property
    def stages(self) -> tuple[str, ...]:
        """All phases but the last."""
        return tuple(self.method.kind.phases[:-1])

    def stage_key(self, phase: str) -> str:
        """Sixteen hex digits that name this cell up to and including ``phase``, whatever the later phases do."""
        method, given = self.method.kind, self.method.spec.options
        until = method.phases[: method.phases.index(phase) + 1]
        acting = [defense for defense in self.defenses if can_act(defense, self.method, until)]
        unlabeled = not any(hooks.LABELS in method.runs(p, given) for p in until)
        settings = msgspec.structs.replace(self, defenses=tuple(acting))._list_settings()
        for option in method.last_phase_options & given.keys():
            del settings["method_options"][option]
        del settings["train"]["target"], settings["model"]["aggregation"], settings["model"]["head_hidden"]
        settings["model"]["head"] = self.model.head == "none"  # then embeddings are as wide as there are classes
        if unlabeled:  # the labels, and how the model learns from them, belong to later phases
            del settings["data"]["n_labeled"], settings["data"]["validation"], settings["malicious"]
            settings.pop("told", None)
            settings["data"].pop("canaries", None)
        pretrains_apart = unlabeled or set(until) <= method.source_phases  # no setting of the last phase applies
        planned = any(hooks.PLAN_RELEASES in list_hooks(defense.kind) for defense in acting)
        if pretrains_apart and not planned:  # planned noise may depend on the releases of the last phase
            settings["train"] = settings["train"]["pretrain"]
        return digest(["stage", phase, settings])

    def whole(self) -> Cell:
        """Return this cell with a pre-training that does not stop before its last iteration."""
        pretrain = msgspec.structs.replace(self.train.pretrain, until=None)
        return msgspec.structs.replace(self, train=msgspec.structs.replace(self.train, pretrain=pretrain))

    def with_settings(self, settings: Mapping[str, Any]) -> Cell:
        """Return this cell with other settings of training, by path, and options of the method, by name."""
        options = {name: value for name, value in settings.items() if "." not in name}
        tables = {"train": msgspec.to_builtins(self.train)}
        for path in settings.keys() - options.keys():
            put(tables, path, settings[path], path)
        train, method = msgspec.convert(tables["train"], TrainSpec), self.method.with_options(**options)
        return msgspec.structs.replace(self, train=train, method=method)

    def _list_settings(self) -> dict[str, Any]:
        """Everything that can change this cell's result: files by their content, plug-ins with their versions."""
        tables = {name: msgspec.to_builtins(getattr(self, name)) for name in ("data", "train", "model")}
        settings: dict[str, Any] = {
            **tables,
            "dataset": self.dataset.key(self.data),
            "method": self.method.identity,
            "method_options": dict(self.method.keyed),
            "defenses": [_list_settings(defense) for defense in self.defenses],
            "seed": self.seed,
            "malicious": [self.malicious[0], self.malicious[1].settings] if self.malicious else None,
        }
        if not self.data.canaries:
            del settings["data"]["canaries"]
        pretrain = settings["train"]["pretrain"]
        for name, default in (("until", None), ("weight_decay", None), ("paper", False)):
            if pretrain[name] is default:  # keys are those of the time before there was this setting
                del pretrain[name]
        if isinstance(settings["dataset"], list):
            settings["data"]["options"].pop("data_dir", None)  # the content of the files counts, not their folder
        if self.aux is not None:
            settings["told"] = msgspec.to_builtins(self.aux)
        if self.shadow is not None:
            settings["shadow"] = self.shadow
        if self.training:
            settings["training"] = self.training
        if self.is_trial:
            settings["trial"] = VALIDATION
        return settings


def can_act(defense: Technique, method: Technique, phases: Iterable[str]) -> bool:
    """Whether ``defense``, if it is on, changes the messages or the training of ``method`` in one of ``phases``."""
    made = defense.with_strength(defense.spec.strength or 1.0).defense()
    at_active = defense.spec.is_carried_by("active")
    return any(
        made.runs(hook, phase)
        for phase in phases
        for hook in method.kind.runs(phase, method.spec.options)
        if at_active or hook.run_by != Runs.ACTIVE
    )


def repeat_training(cell: Cell, trainings: int) -> list[Cell]:
    """Return as many trainings of ``cell`` on the same rows, itself the first."""
    return [msgspec.structs.replace(cell, training=number) for number in range(trainings)]


def make_key(cell: Cell, attack: Technique, adversary: str, aux: AuxSpec, trainings: int = 1) -> str:
    """Return the key of one attack on one cell, or on several trainings of it."""
    after = [attack.spec.after] if attack.spec.after else []
    times = [["trainings", TRAININGS_VERSION, trainings]] if trainings > 1 else []
    return digest(["result", cell.key, attack.settings, *after, adversary, list_aux(aux), *times])


def list_aux(aux: AuxSpec) -> dict[str, Any]:
    """Return how keys identify what an adversary knows, and how it chooses among variants if it does."""
    tuning = {"tuning": TUNING_VERSION} if aux.budget != "paper" else {}
    return {**msgspec.to_builtins(aux), **tuning}


def digest(settings: Any) -> str:
    """Return sixteen hex digits of SHA-256 over canonical JSON."""
    text = msgspec.json.encode([KEY_VERSION, settings], order="deterministic")
    return hashlib.sha256(text).hexdigest()[:16]


def hash_files(paths: Iterable[Path]) -> list[str]:
    """Return the SHA-256 of each of some files that is there."""
    return [_hash_file(p, p.stat().st_mtime_ns, p.stat().st_size) for p in paths if p.is_file()]


@lru_cache(maxsize=64)
def _hash_file(path: Path, modified: int, size: int) -> str:  # noqa: ARG001  (arguments of the cache)
    """SHA-256 of a file, read again only if its time or size has changed."""
    return files.hash_file(path)


def _list_settings(defense: Technique) -> dict[str, Any]:
    settings: dict[str, Any] = msgspec.to_builtins(defense.spec)
    del settings["strengths"]
    return {**settings, "name": defense.identity}
