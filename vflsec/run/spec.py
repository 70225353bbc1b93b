"""The settings of an evaluation, read from tables and from the texts of a command line."""

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from vflsec.base import files
from vflsec.base.checks import check_positive, describe_unknown, suggest
from vflsec.base.errors import UsageError
from vflsec.core import registry
from vflsec.core.options import list_options
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.data import frames
from vflsec.data.dataset import VerticalDataset
from vflsec.data.partition import DataSpec
from vflsec.results.records.manifest import LARGEST_STRENGTH
from vflsec.results.records.schema import MAX_TEXT, is_readable, list_texts
from vflsec.run.grammar import format_reference, parse_reference, parse_value, split_list

TRAINING = ("dataset", "data", "methods", "method", "train", "model", "fixed")
"""The fields of an ``EvalSpec`` that concern training; the others concern attacks and repetitions."""


class AttackSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An attack by name, with its options, and the phase after which it attacks (None: the last)."""

    name: str
    options: dict[str, Any] = {}
    after: str | None = None

    @property
    def short_name(self) -> str:
        """The name, or the class of ``path/to/file.py:Class``."""
        return self.name.rpartition(":")[2]

    @property
    def label(self) -> str:
        """The short name with its options, as on the command line."""
        options = ",".join(f"{key}={value}" for key, value in self.options.items())
        return (f"{self.short_name}:{options}" if options else self.short_name) + self.place

    @property
    def place(self) -> str:
        """``@`` and the phase after which it attacks, or an empty text."""
        return f"@{self.after}" if self.after else ""


class DefenseSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A defense by name, with its strength, where it acts (None: its default) and its options.

    Attributes:
        by: who carries it: ``active`` (and the source), ``passive`` (every passive party), a party's name, or None for
            all parties.
        strengths: of a defense that is swept; empty for those of the evaluation.
    """

    name: str
    strength: float = 0.0
    at: tuple[str, ...] | None = None
    options: dict[str, Any] = {}
    by: str | None = None
    strengths: tuple[float, ...] = ()

    @property
    def label(self) -> str:
        """The name, with who carries it and where it acts unless these are the defaults."""
        by = f":by={self.by}" if self.by else ""
        return self.name + by + (f"@{'+'.join(self.at)}" if self.at else "")

    def is_carried_by(self, party: str) -> bool:
        """Whether the party of this name carries it."""
        role = "passive" if party.startswith("passive") else "active"
        return self.by in (None, party, role)


class MethodSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A method by name, with its options."""

    name: str
    options: dict[str, Any] = {}

    @property
    def label(self) -> str:
        """The name with the options, in the order of their names, as on the command line."""
        return format_reference(self.name, self.options)


LARGEST = {"seeds": (10_000, "seeds"), "trainings": (1000, "trainings"), "tune": (1000, "trials with tune")}


class AuxSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The auxiliary knowledge of the adversary: for some rows, the answers that it is to infer for the others.

    Attributes:
        n: number of these rows.
        balanced: the same number of each class (the papers' setting), else drawn at random.
        pick: compare all attacks on folds of these rows, and name the one that the adversary would pick. Attacks on
            numeric columns are compared without it, too, since their headline may be the pick.
        folds: of these rows, on which attacks are compared and tuned.
        adaptive: use all releases of a row, over which noise averages out, else only the first.
        budget: settings of a learned attack that the adversary tries on its folds: ``paper`` only the source's own,
            ``small`` 4, ``large`` 16, the source's own among them.
        victim_model: whether it knows the bottom model of the party that it attacks (a white box).
    """

    n: int = 80
    balanced: bool = True
    pick: bool = False
    folds: int = 5
    adaptive: bool = True
    budget: Literal["paper", "small", "large"] = "paper"
    victim_model: bool = False

    def __post_init__(self) -> None:
        """Check every number."""
        if not self.folds and (self.pick or self.budget != "paper"):
            reason = "aux.pick" if self.pick else f"aux.budget={self.budget}"
            raise UsageError(f"expected aux.folds >= 2 with {reason}, got 0: attacks are compared on folds")
        if self.n < 0 or self.folds < 0 or self.folds == 1:
            raise UsageError(f"expected aux.n >= 0 and aux.folds 0 or >= 2, got n={self.n}, folds={self.folds}")


class EvalSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One evaluation: every setting that can change a result, and no other.

    Attributes:
        dataset: a registered name, or a TOML file that describes the user's own data.
        data: settings of its split.
        methods: each gives a curve: names, with options if the same method is compared with itself.
        method: options of single methods by name, whatever options the name has in ``methods``.
        train: settings of training.
        model: the shape of the networks.
        attacks: each gives a row per strength.
        defenses: each is swept over its own strengths, or else over ``strengths``.
        strengths: in addition to 0, which is always included.
        fixed: further defenses of constant strength (``--with``).
        adversary: the attacking party.
        aux: its auxiliary knowledge.
        seeds: number of repetitions; a seed determines split, model, noise and the attacker's draw.
        trainings: on the same rows, of each seed, all of which the adversary has seen; each has models, batches and
            noise of its own.
        tune: how many settings of training each method compares with each seed, the given ones among them.
        explicit: settings that are not searched over; by default those of ``train`` that are given.
    """

    dataset: str = "credit-default"
    data: DataSpec = DataSpec()
    methods: tuple[str, ...] = ("fedsplitnn",)
    method: dict[str, dict[str, Any]] = {}
    train: TrainSpec = TrainSpec()
    model: ModelSpec = ModelSpec()
    attacks: tuple[AttackSpec, ...] = (AttackSpec(name="mc"),)
    defenses: tuple[DefenseSpec, ...] = ()
    strengths: tuple[float, ...] = ()
    fixed: tuple[DefenseSpec, ...] = ()
    adversary: str = "passive_1"
    aux: AuxSpec = AuxSpec()
    seeds: int = 5
    trainings: int = 1
    tune: int = 1
    explicit: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the fields against each other."""
        for name, (most, what) in LARGEST.items():
            check_positive(**{name: getattr(self, name)})
            if getattr(self, name) > most:
                raise UsageError(f"expected at most {most} {what}, got {getattr(self, name)}")
        for field in ("methods", "attacks"):
            if not getattr(self, field):
                raise UsageError(f"expected at least one of {field}, got none")
        msgspec.structs.force_setattr(self, "methods", tuple(parse_method(text).label for text in self.methods))
        for field, names in (("methods", self.methods), ("attacks", self.labels)):
            if len(set(names)) < len(names):
                raise UsageError(f"expected different {field}, got {', '.join(names)}: name each once")
        known = {parse_method(text).name for text in self.methods}
        for name in self.method:
            if name not in known:
                if name in list_methods():
                    raise UsageError(
                        f"expected settings for {', '.join(sorted(known))}, got method.{name}: "
                        f"write method.{min(known)}, or add --method {name}"
                    )
                raise UsageError(f"settings for {describe_unknown('method', name, known)}")
        methods = [self.get_method(label) for label in self.methods]
        if any(method in methods[:k] for k, method in enumerate(methods)):
            raise UsageError(
                f"expected different methods, got {', '.join(self.methods)} with the same options: drop one"
            )
        self._check_defenses()

    def _check_defenses(self) -> None:
        for defense in self.defenses:
            if defense.strength:
                got = f"{defense.label} with strength {defense.strength:g}"
                raise UsageError(f"expected the strengths of swept defenses in strengths, got {got}: move it there")
        for defense in self.fixed:
            self._check_fixed(defense)
        if len({d.label for d in self.defenses}) < len(self.defenses):
            raise UsageError(
                f"expected different defenses, got {', '.join(d.label for d in self.defenses)}: "
                f"give one all its strengths, as in iso:lambda=1,5,25"
            )
        if self.strengths and not self.defenses:
            raise UsageError("expected --defense with --lambda, got no defense: name one, for example --defense iso")
        if self.strengths and all(d.strengths for d in self.defenses):
            names = ", ".join(d.label for d in self.defenses)
            raise UsageError(
                f"expected the strength once, got strengths of its own for {names} and others for all (--lambda, "
                f"--epsilon): drop one"
            )
        for defense in self.defenses:
            strengths = self.list_strengths(defense)
            if any(s != 0 and not 1 / LARGEST_STRENGTH < s < LARGEST_STRENGTH for s in strengths):
                raise UsageError(
                    f"expected strengths of 0, or above {1 / LARGEST_STRENGTH:g} and below {LARGEST_STRENGTH:g}, for "
                    f"{defense.label}, got {list(strengths)}"
                )
            if not any(strengths):
                usual = ",".join(f"{strength:g}" for strength in load_class("defenses", defense.name).strengths)
                raise UsageError(f"expected a strength above 0 for {defense.label}, got none: add --lambda {usual}")

    def _check_fixed(self, defense: DefenseSpec) -> None:
        if defense.strengths:
            got = ", ".join(f"{strength:g}" for strength in defense.strengths)
            raise UsageError(f"expected one strength for the fixed defense {defense.name}, got {got}: choose one")
        if not defense.strength:
            made = load_class("defenses", defense.name)
            knob = "epsilon" if made.by_epsilon is not None else made.strength_name
            usual = 5 if made.by_epsilon is not None else min(5, max(made.strengths, default=5))
            example = f"{defense.name}:{knob}={usual:g}"
            raise UsageError(f"expected a strength for the fixed defense {defense.name}, got 0: write {example}")

    def get_method(self, label: str) -> MethodSpec:
        """Return the method that ``label`` names, with the options in ``method`` and its own."""
        named = parse_method(label)
        table = self.method.get(named.name, {})
        return MethodSpec(name=named.name, options=_merge_options(table, named.options, label, f"method.{named.name}"))

    def list_strengths(self, defense: DefenseSpec) -> tuple[float, ...]:
        """Return the strengths over which ``defense`` is swept, in addition to 0."""
        return defense.strengths or self.strengths

    @property
    def effective_model(self) -> ModelSpec:
        """The model with its encoder resolved: the same one for all methods that are compared."""
        if self.model.encoder:
            return self.model
        encoders = {load_class("methods", parse_method(label).name).encoder for label in self.methods}
        return msgspec.structs.replace(self.model, encoder="auto" if "auto" in encoders else "mlp")

    @property
    def labels(self) -> tuple[str, ...]:
        """The name of each attack in tables and gates; with options if it is on a column, or others have its name."""
        names = [attack.name for attack in self.attacks]
        whole = [names.count(attack.name) > 1 or "column" in attack.options for attack in self.attacks]
        return tuple(a.label if all_ else a.short_name + a.place for a, all_ in zip(self.attacks, whole, strict=True))

    @property
    def name(self) -> str:
        """A short name for folders and titles, without any path."""
        methods = dict.fromkeys(parse_method(label).name for label in self.methods)
        names = [self.dataset.removeprefix(frames.PREFIX), *methods, *(d.label for d in self.defenses)]
        names += [attack.name + attack.place for attack in self.attacks]
        names += ["audit-epsilon"] if self.data.canaries else []
        return "-".join(_get_stem(name) for name in names)


def load_class(group: str, name: str) -> Any:
    """Return what a name of ``group`` stands for; looked up once for each name, or content of a file."""
    return _load_class(group, name, registry.identify(group, name))


@lru_cache(maxsize=1024)
def _load_class(group: str, name: str, identity: str) -> Any:  # noqa: ARG001  (an argument of the cache)
    return registry.load(group, name)


def list_methods() -> list[str]:
    """Return the names of all methods."""
    return list(registry.list_all("methods"))


TABLES: dict[str, type[msgspec.Struct]] = {"data": DataSpec, "train": TrainSpec, "model": ModelSpec, "aux": AuxSpec}
"""The settings that are tables of settings."""


def parse_defense(text: str) -> DefenseSpec:
    """Read a defense; its strength is ``strength``, ``lambda`` or the defense's own name for it.

    A defense with differential privacy also takes ``epsilon``. Several strengths, ``lambda=1,5``, are for a sweep.
    """
    name, options, at = parse_reference(text, "defense")
    known = {*list_options(load_class("defenses", name)), *_list_names(name), "by", "at"}
    for option in options:
        if option not in known and suggest(option, _list_names(name)):
            raise UsageError(f"{name}: {describe_unknown('option', option, known - {'at', 'by'})}")
    if "at" in options:
        raise UsageError(f"expected where a defense acts after @, as in {name}@embedding, got at= in {text!r}")
    given = [key for key in _list_names(name) if key in options]
    if len(given) > 1:
        raise UsageError(f"expected the strength once, got {text!r}: drop {' or '.join(given)}")
    values = [options.pop(key) for key in given]
    several = values[0] if values and isinstance(values[0], list) else values
    strengths = tuple(_read_strength(value, given[0], text) for value in several)
    options |= _find_epsilon_options(name) if "epsilon" in given else {}
    by = options.pop("by", None)
    if len(strengths) > 1:
        return DefenseSpec(name=name, strengths=strengths, at=at, options=options, by=by)
    return DefenseSpec(name=name, strength=sum(strengths), at=at, options=options, by=by)


def parse_swept(text: str) -> DefenseSpec:
    """Read a defense that is swept: a single strength is a list of one."""
    defense = parse_defense(text)
    given = parse_reference(text, "defense")[1].keys() & set(_list_names(defense.name))
    single = given and not defense.strengths
    return msgspec.structs.replace(defense, strength=0.0, strengths=(defense.strength,)) if single else defense


def _list_names(defense: str) -> list[str]:
    return list(dict.fromkeys([load_class("defenses", defense).strength_name, "strength", "lambda", "epsilon"]))


def _read_strength(value: Any, key: str, text: str) -> float:
    if key == "epsilon":
        return _from_epsilon(text, value)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise UsageError(f"expected a number for {key} in {text!r}, got {value!r}")
    return float(value)


def parse_attack(text: str) -> AttackSpec:
    """Read an attack."""
    name, options, phases = parse_reference(text, "attack")
    if phases and len(phases) > 1:
        raise UsageError(f"expected one phase after which {name} attacks, got {text!r}")
    return AttackSpec(name=name, options=options, after=phases[0] if phases else None)


def parse_method(text: str) -> MethodSpec:
    """Read a method; a dot in the name of an option leads into a table."""
    name, given, points = parse_reference(text, "method")
    if points:
        raise UsageError(f"expected a method without a point, got {text!r}: drop @{'+'.join(points)}")
    options: dict[str, Any] = {}
    for key, value in given.items():
        *tables, last = key.split(".")
        table = options
        for inner in tables:
            table = table.setdefault(inner, {})
            if not isinstance(table, dict):
                raise UsageError(f"expected {inner} to be a value or a table in {text!r}, got both")
        table[last] = value
    return MethodSpec(name=name, options=options)


def _merge_options(table: Mapping[str, Any], options: Mapping[str, Any], label: str, path: str) -> dict[str, Any]:
    """Return the options of ``table`` and ``options``, which must agree where both have one."""
    joined = dict(table)
    for key, value in options.items():
        before = joined.get(key, value)
        if isinstance(before, dict) and isinstance(value, dict):
            joined[key] = _merge_options(before, value, label, f"{path}.{key}")
        elif before != value:
            raise UsageError(
                f"expected one value for {path}.{key}, got {before!r} there and {value!r} in {label}: drop one"
            )
        else:
            joined[key] = value
    return joined


def merge(settings: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """Return ``settings`` after each assignment ``path.to.key=value``."""
    merged: dict[str, Any] = copy.deepcopy(dict(settings))
    for assignment in assignments:
        path, equals, value = (part.strip() for part in assignment.partition("="))
        if not equals or not path or path.endswith("."):
            raise UsageError(f"expected --set path.to.key=value, got {assignment!r}")
        put(merged, path, parse_value(value), f"--set {assignment}")
        if path.startswith("train.") and isinstance(merged.get("explicit"), list | tuple):  # of a stored spec.toml
            merged["explicit"] = [*merged["explicit"], path]
    return merged


def put(settings: dict[str, Any], path: str, value: Any, given: str) -> None:
    """Set the value at ``path.to.key``; tables that are missing are made."""
    *tables, key = path.split(".")
    table = settings
    for name in tables:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise UsageError(f"expected a table at {name!r} in {given}, got {table!r}")
    table[key] = value


def read(settings: Mapping[str, Any]) -> EvalSpec:
    """Return the checked specification.

    Attacks and defenses may be texts of ``vflsec.run.grammar``, alone or in lists: ``fixed = ["iso:lambda=5"]``.
    A dataset may be one of this process. A
    swept defense without strengths of its own takes ``strengths``, or else ``epsilons``, or else its usual ones.

    Raises:
        UsageError: an unknown or ill-typed setting, with its path.
    """
    values: dict[str, Any] = {
        key: split_list(v) if key in _LISTS and isinstance(v, str) else v for key, v in settings.items()
    }
    if isinstance(values.get("dataset"), VerticalDataset):
        values["dataset"] = frames.keep(values["dataset"])
    epsilons = values.pop("epsilons", ())
    if epsilons:
        if values.get("strengths"):
            raise UsageError("expected the strength once, got strengths (--lambda) and epsilons (--epsilon): drop one")
        values["strengths"] = [_from_epsilon("epsilons", value) for value in epsilons]
    for key, parse in _PARSERS.items():
        if isinstance(values.get(key), list | tuple):
            values[key] = [msgspec.to_builtins(parse(v)) if isinstance(v, str) else v for v in values[key]]
    if isinstance(values.get("defenses"), list):
        values["defenses"] = [
            _complete(defense, shared=bool(values.get("strengths")), epsilons=bool(epsilons))
            for defense in values["defenses"]
        ]
    try:
        spec = msgspec.convert(values, EvalSpec)
    except msgspec.ValidationError as error:
        raise UsageError(f"settings: {_teach(str(error))}") from None
    if spec.tune > 1 and "explicit" not in values:
        train = values.get("train", {})
        tables = {"train": train, "train.pretrain": train.get("pretrain", {})}
        paths = [f"{table}.{name}" for table, names in tables.items() for name in names if name != "pretrain"]
        spec = msgspec.structs.replace(spec, explicit=tuple(paths))
    if unreadable := next((text for text in list_texts(msgspec.to_builtins(spec)) if not is_readable(text)), None):
        got = f"{unreadable[:100]!r} of {len(unreadable)}"
        raise UsageError(f"settings: expected texts of at most {MAX_TEXT} characters without line breaks, got {got}")
    return spec


def read_training(settings: Mapping[str, Any], *, tuned: bool = False) -> EvalSpec:
    """Return the checked specification of one training, whose settings may be ``tuned``."""
    known = (*TRAINING, "tune") if tuned else TRAINING
    for key in settings:
        if key not in known:
            raise UsageError(describe_unknown("setting of a training", key, known))
    spec = read(settings)
    if len(spec.methods) > 1:
        raise UsageError(f"expected one method to train, got {', '.join(spec.methods)}: choose with --method")
    return spec


def read_toml(path: Path) -> dict[str, Any]:
    """Return the settings in a TOML file."""
    try:
        return files.parse_toml(files.read(path).decode())
    except OSError:
        raise UsageError(f"expected a TOML file at {path}, found none") from None
    except ValueError as error:
        raise UsageError(f"{path} is not TOML: {error}") from None


def to_toml(spec: EvalSpec) -> str:
    """Return ``spec`` as TOML with all defaults; None is left out, since TOML has no null."""
    return files.dump(msgspec.to_builtins(spec))


_LISTS = ("methods", "attacks", "defenses", "fixed")
_PARSERS: dict[str, Callable[[str], Any]] = {"attacks": parse_attack, "defenses": parse_swept, "fixed": parse_defense}


def _complete(defense: Any, *, shared: bool, epsilons: bool) -> Any:
    """Return the table of a swept defense with its usual strengths, unless it has some or shares those of all."""
    if not isinstance(defense, dict) or not isinstance(defense.get("name"), str) or defense.get("strengths"):
        return defense  # complete, or not a defense: ``msgspec.convert`` reports it
    if epsilons:
        return {**defense, "options": {**defense.get("options", {}), **_find_epsilon_options(defense["name"])}}
    return defense if shared else {**defense, "strengths": load_class("defenses", defense["name"]).strengths}


def _find_epsilon_options(name: str) -> Mapping[str, Any]:
    kind = load_class("defenses", name)
    options: Mapping[str, Any] | None = kind.by_epsilon
    if options is None:
        raise UsageError(
            f"expected a defense with differential privacy for an epsilon, got {name}: set its strength with "
            f"{name}:{kind.strength_name}=... or --lambda"
        )
    return options


def _from_epsilon(what: str, epsilon: Any) -> float:
    if not isinstance(epsilon, int | float) or isinstance(epsilon, bool) or not epsilon > 0:
        raise UsageError(f"{what}: expected epsilon > 0, got {epsilon!r}")
    return 1 / epsilon


def _get_stem(name: str) -> str:
    """A name without its folders: ``own/mine.py:Mine@gradient`` is ``mine@gradient``."""
    reference, at, points = name.partition("@")
    return Path(reference).stem + at + points


def _teach(message: str) -> str:
    """Rewrite msgspec's path in the form of ``--set``, and list the known keys of that table."""
    message = message.replace("`", "'").replace("$.", "").replace("Object contains unknown field", "unknown setting")
    table = message.rpartition(" - at ")[2].strip("'") if " - at " in message else ""
    if message.startswith("unknown setting"):
        known = TABLES.get(table, EvalSpec).__struct_fields__
        named = message.split("'")[1]
        inner = [name for name, struct in TABLES.items() if named in struct.__struct_fields__] if not table else []
        way = f" Write {inner[0]}.{named}." if inner else suggest(named, known)
        return f"{message}.{way} Known: {', '.join(known)}"
    return f"{message}: write method.NAME.OPTION, with the name of the method" if table == "method[...]" else message
