"""From settings to the results that they ask for: each attack on each cell, and each baseline."""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from vflsec.base.checks import describe_unknown
from vflsec.base.errors import UsageError
from vflsec.base.seeds import derive
from vflsec.core import registry
from vflsec.core.attack import ActingAttack, Attack
from vflsec.core.message import SERVER, SOURCE
from vflsec.core.view import Need
from vflsec.data import frames
from vflsec.data.dataset import VerticalDataset
from vflsec.data.description import expect_no_table
from vflsec.results.records.manifest import NO_ADVERSARY
from vflsec.results.records.schema import Record, Result, Tuning
from vflsec.run.cell import Cell, Source, Technique, digest, hash_files, list_aux, make_key
from vflsec.run.federation import get_partition
from vflsec.run.mounting import is_baseline
from vflsec.run.questions import is_about_source
from vflsec.run.spec import AttackSpec, AuxSpec, DefenseSpec, EvalSpec, MethodSpec, load_class

GROUPS = {MethodSpec: "methods", DefenseSpec: "defenses", AttackSpec: "attacks"}


def resolve(spec: MethodSpec | DefenseSpec | AttackSpec) -> Technique:
    """Return what a name in the settings stands for."""
    kind = load_class(group := GROUPS[type(spec)], spec.name)
    return Technique(
        spec=spec,
        kind=kind,
        options=registry.resolve_classes(spec.name, kind, spec.options),
        identity=[registry.identify(group, spec.name), kind.version],
        keyed={key: _identify(key, value) for key, value in spec.options.items()},
        built_in=registry.get_origin(group, spec.name) == "built in",
        resolve=resolve,
    )


def _identify(option: str, value: Any) -> Any:
    """Replace what names a class in a file, such as a boundary, or a folder, ``path``, by what is in it."""
    if option == "path" and isinstance(value, str):
        return hash_files(sorted(Path(value).glob("*")))
    return registry.identify("protocols", value) if isinstance(value, str) and registry.is_file(value) else value


def list_attacks() -> list[Technique]:
    """Return every attack that has a name."""
    return [resolve(AttackSpec(name=name)) for name in registry.list_all("attacks")]


def find_dataset(name: str) -> Source:
    """Return the source of the rows of a dataset."""
    if name.startswith(frames.PREFIX) or name.endswith(".toml"):
        return Source(name=name, loader=None, identity=name, resolve=find_dataset)
    expect_no_table(name)
    loader, identity = load_class("datasets", name), registry.identify("datasets", name)
    return Source(name=name, loader=loader, identity=identity, resolve=find_dataset)


def load_dataset(name: str, **options: Any) -> VerticalDataset:
    """Return a registered dataset, or the user's own from a TOML file or of this process.

    Raises:
        UsageError: an unknown name or option.
        DataError: a file is wrong.
    """
    return find_dataset(name).load(**options)


def build_cell(spec: EvalSpec, method: str, seed: int, swept: tuple[DefenseSpec, ...] = ()) -> Cell:
    """Return the cell of one method and seed, under the swept and the fixed defenses of positive strength."""
    chosen = spec.get_method(method)
    return make_cell(
        dataset=spec.dataset,
        data=spec.data,
        method=chosen.name,
        method_options=chosen.options,
        train=spec.train,
        model=spec.effective_model,
        defenses=tuple(defense for defense in (*swept, *spec.fixed) if defense.strength > 0),
        seed=seed,
    )


def make_cell(
    *,
    dataset: str,
    method: str,
    method_options: dict[str, Any],
    defenses: Iterable[DefenseSpec],
    malicious: tuple[str, AttackSpec] | None = None,
    **further: Any,
) -> Cell:
    """Return the cell of a dataset, a method, defenses and malicious parties by their names."""
    return Cell(
        dataset=find_dataset(dataset),
        method=resolve(MethodSpec(name=method, options=method_options)),
        defenses=tuple(map(resolve, defenses)),
        malicious=(malicious[0], resolve(malicious[1])) if malicious else None,
        **further,
    )


def draw_settings(spec: EvalSpec, label: str, seed: int) -> tuple[dict[str, float], ...]:
    """Return the settings that a method compares, by path or name of an option: those given, then random ones.

    A draw depends on seed, number and path alone: methods draw alike, and more trials go on from fewer.
    """
    if spec.tune == 1:
        return ()
    method = spec.get_method(label)
    fixed = {*spec.explicit, *method.options, *(["train.pretrain"] if spec.train.pretrain.paper else [])}
    known = load_class("methods", method.name).list_ranges()
    free = {path: ends for path, ends in known.items() if not fixed & {path, path.rpartition(".")[0]}}
    if not free:
        got = f"got {', '.join(known)}" if known else "got a method that has none"
        raise UsageError(f"expected a setting of {label} that is not given, for --tune to vary, {got}")
    drawn: list[dict[str, float]] = [{} for _ in range(spec.tune)]
    for number, (path, (low, high)) in product(range(1, spec.tune), free.items()):
        value = low * (high / low) ** np.random.default_rng(derive(seed, "tuning", number, path)).random()
        drawn[number][path] = round(value) if isinstance(low, int) else float(f"{value:.3g}")
    return tuple(drawn)


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One result, and where it belongs in the curves; without an attack if the method has no adversary.

    Attributes:
        method: its label, with its options where these are part of the name.
        swept: the defense whose strength differs from trial to trial; None at strength 0.
        control: whether the cell is the honest one to which an attack on integrity is compared.
        trainings: of the cell on the same rows, which the attack combines.
        choices: the settings to choose from, until ``tuning`` has what chose those of the cell.
    """

    method: str
    defense: str = "none"
    swept: Technique | None = None
    seed: int
    attack: Technique | None
    label: str
    cell: Cell
    adversary: str
    aux: AuxSpec
    key: str = ""
    control: bool = False
    trainings: int = 1
    choices: tuple[dict[str, float], ...] = ()
    tuning: Tuning | None = None

    @property
    def strength(self) -> float:
        """The strength of the swept defense."""
        return float(self.swept.spec.strength) if self.swept else 0.0


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """What the adversary reaches alone: a candidate attack on a view without the federation, for one seed.

    Attributes:
        pretrained: whether the adversary first pre-trains its model by itself, as in the stages of ``cell``.
        asking: the attack whose question is asked, if it is not ``attack`` itself: one on the source's rows.
    """

    method: str
    cell: Cell
    attack: Technique
    label: str
    seed: int
    adversary: str
    aux: AuxSpec
    key: str
    pretrained: bool = False
    asking: Technique | None = None


def list_trials(spec: EvalSpec) -> Iterator[Trial]:
    """Yield every (method, defense, strength, seed, attack), seeds outermost so that neighbors share their data."""
    attacks, sweep = [resolve(attack) for attack in spec.attacks], list(_list_strengths(spec))
    for seed in range(spec.seeds):
        for method in spec.methods:
            honest = build_cell(spec, method, seed)
            if not honest.method.kind.receives:  # nor does it send any message that a defense could change
                yield make_training(spec, method, msgspec.structs.replace(honest, defenses=()))
                continue
            for (defense, swept), (attack, label) in product(sweep, zip(attacks, spec.labels, strict=True)):
                cell = msgspec.structs.replace(honest, defenses=(swept, *honest.defenses)) if swept else honest
                trial = Trial(method=method, defense=defense, swept=swept, seed=seed, attack=attack, label=label,
                              cell=cell, adversary=spec.adversary, aux=spec.aux,
                              trainings=spec.trainings, choices=draw_settings(spec, method, seed))  # fmt: skip
                yield from _with_keys(trial, attack)


def make_training(spec: EvalSpec, method: str, cell: Cell) -> Trial:
    """Return the result of a training without an attack: its utility and traffic."""
    choices = draw_settings(spec, method, cell.seed)
    key = _label_key(digest(["utility", cell.key]), cell, method, choices)
    return Trial(method=method, seed=cell.seed, attack=None, label=NO_ADVERSARY, cell=cell, adversary=spec.adversary,
                 aux=spec.aux, key=key, choices=choices)  # fmt: skip


def list_contenders(row: Trial) -> list[Trial]:
    """Return the trainings, without attack or defense, by whose utility settings are chosen; none once they are."""
    cells = [row.cell.with_settings(settings) for settings in row.choices]
    bare = [msgspec.structs.replace(cell, defenses=(), malicious=None, aux=None, is_trial=True) for cell in cells]
    blank = msgspec.structs.replace(row, attack=None, label=NO_ADVERSARY, defense="none", swept=None, control=False,
                                    trainings=1, choices=())  # fmt: skip
    return [msgspec.structs.replace(blank, cell=cell, key=digest(["utility", cell.key])) for cell in bare]


def choose_settings(row: Trial, done: Mapping[str, Record]) -> Trial:
    """Return ``row`` with the settings of the best contender, the first of equals; as it is while one is missing."""
    tried = [done.get(contender.key) for contender in list_contenders(row)]
    results = [record for record in tried if isinstance(record, Result)]
    if not results or len(results) < len(tried):
        return row
    scores = [result.utility.headline if result.utility else None for result in results]  # None if it failed
    best = row.choices[int(np.argmax([-np.inf if score is None or np.isnan(score) else score for score in scores]))]
    tuning = Tuning(settings=best, scores=scores, seconds=sum(result.seconds["train"] for result in results))
    return msgspec.structs.replace(row, cell=row.cell.with_settings(best), choices=(), tuning=tuning)


def _with_keys(trial: Trial, attack: Technique) -> Iterator[Trial]:
    """Yield the trial of an attack with its key, after its honest one if it is on integrity."""
    made, cell, who = attack.make(), trial.cell, (trial.adversary, trial.aux)
    if made.target == "integrity":
        key = digest(["control", make_key(cell, attack, *who)])
        yield msgspec.structs.replace(trial, key=_label_key(key, cell, trial.method, trial.choices), control=True)
    aux = trial.aux if isinstance(made, ActingAttack) and Need.AUX_LABELS in made.needs else None
    malicious = (trial.adversary, attack) if made.acts_in_training else None
    cell = msgspec.structs.replace(cell, malicious=malicious, aux=aux)
    key = _label_key(make_key(cell, attack, *who, trial.trainings), cell, trial.method, trial.choices)
    yield msgspec.structs.replace(trial, cell=cell, key=key)


def _list_strengths(spec: EvalSpec) -> Iterator[tuple[str, Technique | None]]:
    """Yield the label of each swept defense, and the defense at each strength; None at 0."""
    if not spec.defenses:
        yield "none", None
    for defense in map(resolve, spec.defenses):
        for strength in sorted({0.0, *spec.list_strengths(defense.spec)}):
            yield defense.label, defense.with_strength(strength) if strength else None


def list_baselines(spec: EvalSpec) -> Iterator[Baseline]:
    """Yield, for each seed and method, each attack without the federation, and the baseline attacks on labels.

    A baseline takes the adversary's columns and the shape of its bottom model from the cell. If any party could have
    pre-trained by itself as the method does, the same attack on a model that the adversary pre-trained alone is one
    more (FedHSSL's A_SimSiam). The active party has the labels, so it has no baseline attacks on them. Attacks on
    integrity have no baseline: alone, there is nothing to break.
    """
    always = {attack.name: attack for attack in list_attacks() if is_baseline(attack)}
    attacks = [(resolve(attack), label) for attack, label in zip(spec.attacks, spec.labels, strict=True)]
    inferring = [(attack, label) for attack, label in attacks if attack.kind.target != "integrity"]
    candidates = [(attack, label) for attack, label in inferring if attack.name not in always]
    if spec.adversary != "active" and any(attack.kind.target == "labels" for attack, _ in attacks):
        candidates += [(attack, name) for name, attack in always.items()]
    for seed, method in product(range(spec.seeds), spec.methods):
        cell = build_cell(spec, method, seed)
        if not cell.method.kind.receives:
            continue
        pretrained, kind = _build_pretraining_cell(cell), cell.method.kind
        of_source = [a for a, _ in inferring if is_about_source(a.make(), a.spec.after, kind, spec.adversary)]
        for attack, label in candidates:
            is_base = attack.name in always
            asking = attack if attack in of_source else next(iter(of_source), None) if is_base else None
            bare = msgspec.structs.replace(attack, spec=msgspec.structs.replace(attack.spec, after=None))
            alone = make_alone_attack(bare.make())
            settings: list[Any] = [bare.settings, [alone.name, alone.version] if alone else [], spec.adversary]
            settings += [list_aux(spec.aux), *(["of the source", asking.spec.after] if asking else [])]
            key = digest(["prior", cell.data_key if is_base else cell.key, *settings])  # baselines read no model
            baseline = Baseline(method=method, cell=cell, attack=bare, label=label, seed=seed, key=key, asking=asking,
                                adversary=spec.adversary, aux=spec.aux)  # fmt: skip
            yield baseline
            if pretrained and alone and not is_base and attack.kind.target == "labels":
                stages = [pretrained.stage_key(phase) for phase in pretrained.stages]
                # Stages may be shared between splits of the data; whose labels are inferred is not.
                key = digest(["prior", stages, msgspec.to_builtins(pretrained.data), *settings])
                after = f"{label} after {pretrained.method.name}"
                yield msgspec.structs.replace(baseline, cell=pretrained, label=after, key=key, pretrained=True)


def _build_pretraining_cell(cell: Cell) -> Cell | None:
    """Return the cell whose pre-training any party could do alone, with the options that it shares with the method."""
    name = cell.method.kind.prior
    if name is None:
        return None
    kind = load_class("methods", name)
    shared = inspect.signature(kind).parameters.keys() - kind.joint - kind.last_phase_options
    options = {key: value for key, value in cell.method.spec.options.items() if key in shared}
    method = resolve(MethodSpec(name=name, options=options))
    return msgspec.structs.replace(cell, method=method, defenses=(), malicious=None)


def make_alone_attack(attack: Attack) -> Attack | None:
    """Return the attack that the same adversary could run without the federation, or None."""
    try:
        alone = attack.alone()
    except Exception as error:
        raise UsageError(f"attack {attack.name!r}: alone() failed: {type(error).__name__}: {error}") from error
    if alone is not None and not isinstance(alone, Attack):
        raise UsageError(f"attack {attack.name!r}: expected an attack or None from alone(), got {type(alone).__name__}")
    return alone


def get_question(attack: Technique) -> str:
    """Return the question of an attack: what it recovers, of whom, and which column.

    Only leaks of one question can be compared.
    """
    options = attack.spec.options
    details = [f"of {options['victim']}"] if options.get("victim") else []
    details += [str(options["column"])] if options.get("column") else []
    return " ".join([attack.kind.target, *details])


def _label_key(key: str, cell: Cell, label: str, choices: Sequence[Mapping[str, float]]) -> str:
    """Return the key of a result under ``label``: a record names its method, and so two labels have two records."""
    key = digest(["tuned", key, choices]) if choices else key
    return key if label == cell.method.name else digest(["label", key, label])


class Names(msgspec.Struct, frozen=True):
    """What the data call the dataset and each party."""

    dataset: str
    parties: Mapping[str, str] = {}

    def to_standard(self, text: str) -> str:
        """Return ``bureau+shop`` as ``passive_1+passive_2``; other words stay."""
        back = {given: name for name, given in self.parties.items()}
        return "+".join(back.get(word, word) for word in text.split("+"))

    def display_name(self, text: str) -> str:
        """Return ``passive_1+passive_2`` as the data call them."""
        return "+".join(self.parties.get(word, word) for word in text.split("+"))


def get_names(spec: EvalSpec) -> Names:
    """Return the names in the data of ``spec``."""
    split = get_partition(build_cell(spec, spec.methods[0], seed=0))
    return Names(split.dataset, split.names)


def with_standard_names(spec: EvalSpec, names: Names) -> EvalSpec:
    """Return ``spec`` with each party that it names under its standard name."""
    if not names.parties:
        return spec
    for party in spec.adversary.split("+"):
        if party not in (*names.parties, *names.parties.values(), SERVER, SOURCE):
            raise UsageError(describe_unknown("adversary", party, names.parties.values()))

    def standardize(defense: DefenseSpec) -> DefenseSpec:
        return msgspec.structs.replace(defense, by=names.to_standard(defense.by)) if defense.by else defense

    attacks = [
        msgspec.structs.replace(attack, options={**attack.options, "victim": names.to_standard(victim)})
        if isinstance(victim := attack.options.get("victim"), str)
        else attack
        for attack in spec.attacks
    ]
    return msgspec.structs.replace(
        spec,
        adversary=names.to_standard(spec.adversary),
        attacks=tuple(attacks),
        defenses=tuple(standardize(technique) for technique in spec.defenses),
        fixed=tuple(standardize(technique) for technique in spec.fixed),
    )
