"""The Python API: the main commands as functions, for notebooks and scripts."""

import functools
import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgspec
import numpy as np
import torch

from vflsec.audit.checkpoint import TranscriptTap
from vflsec.base import files
from vflsec.base.checks import describe_unknown
from vflsec.base.errors import Diverged, InsufficientView, StoreError, UsageError, VflsecError
from vflsec.core.method import Progress, Trained
from vflsec.data.dataset import VerticalDataset
from vflsec.data.frames import keep
from vflsec.report.progress import show_progress
from vflsec.report.report import Report
from vflsec.report.sweep import SweepReport
from vflsec.run import engine as engines
from vflsec.run import plan, runner, training
from vflsec.run import spec as specs
from vflsec.run.grammar import split_list
from vflsec.run.job import Job, name_sweep, prepare, prepare_sweep
from vflsec.run.plan import build_cell, resolve
from vflsec.run.spec import EvalSpec
from vflsec.run.store import CellFacts, guard_writing

P = ParamSpec("P")
R = TypeVar("R")
Printed = TypeVar("Printed", Report, SweepReport)

_OPTION = re.compile(r"--set (?P<table>\w+)\.(?P<key>\w+)=(?P<value>[\w.]+)|--(?P<flag>[a-z][a-z-]+)")
_RENAMED = {"lambda": "strengths", "with": "fixed"}
"""Options of the command line whose argument has another name."""


def _name_as_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function`` with plain arguments, and errors that say what options are called in Python."""
    known = inspect.signature(function).parameters

    def argument(option: re.Match[str]) -> str | None:
        if option["table"]:
            return f'{option["table"]}={{"{option["key"]}": {option["value"]}}}' if option["table"] in known else None
        name = _RENAMED.get(option["flag"], option["flag"].replace("-", "_"))
        return next((f"{spelling}=" for spelling in (name, f"{name}s") if spelling in known), None)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*map(_to_plain, args), **{name: _to_plain(value) for name, value in kwargs.items()})
        except VflsecError as error:
            named = {option[0]: argument(option) for option in _OPTION.finditer(str(error))}
            renamed = [f"{option} is {name}" for option, name in named.items() if name]
            if renamed:
                error.args = (f"{error} (in Python, {', '.join(renamed)})",)
            raise

    return call


@_name_as_arguments
def evaluate(
    *,
    attack: str | Iterable[str] = "mc",
    defense: str | Iterable[str] = (),
    strengths: float | Iterable[float] = (),
    epsilons: float | Iterable[float] = (),
    dataset: str | VerticalDataset = "credit-default",
    methods: str | Iterable[str] = "fedsplitnn",
    adversary: str = "passive_1",
    seeds: int = 5,
    fixed: str | Iterable[str] = (),
    data: Mapping[str, Any] | None = None,
    train: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    aux: Mapping[str, Any] | None = None,
    out: Path | str | None = None,
    jobs: int | None = None,
    device: str = "cpu",
    engine: engines.Engine = "local",
    progress: bool = True,
    **settings: Any,
) -> Report:
    """Train, defend, attack and score; return the report. Results that are in ``out`` already are not computed again.

    Example:
        >>> report = evaluate(attack="mc", defense="iso", strengths=[1, 5, 25])  # doctest: +SKIP

    Args:
        attack: one or several, as on the command line (``mc:mode=mixmatch``).
        defense: none, one or several, as on the command line, with or without strengths (``iso:lambda=1,5``).
        strengths: for defenses without their own; 0 is always added. By default, the usual ones of each defense.
        epsilons: instead of strengths, for defenses with differential privacy.
        dataset: a registered name, a TOML file, or what ``vflsec.dataset`` returns.
        methods: one or several, as on the command line (``fedhssl-simsiam:pma=false``).
        adversary: the attacking party; ``a+b`` for parties that collude.
        seeds: number of repetitions, each with its own split, models, noise and auxiliary labels.
        fixed: defenses of constant strength, in addition (``iso:lambda=5``).
        data: settings of the split, for example ``{"n_labeled": 200}``; see ``DataSpec``.
        train: settings of training, for example ``{"epochs": 50}``; see ``TrainSpec``.
        model: the shape of the networks; see ``ModelSpec``.
        aux: what the adversary knows, for example ``{"n": 40}``; see ``AuxSpec``.
        out: results folder; by default ``runs/<name>``.
        jobs: number of worker processes; by default the number of cores.
        device: ``cpu`` or ``cuda``.
        engine: ``local``, ``dask:ADDRESS`` of a running scheduler, or a ``concurrent.futures.Executor``.
        progress: whether to show how far it is: a bar in notebooks and terminals, lines elsewhere.
        settings: further fields of ``EvalSpec``.

    Raises:
        UsageError: a setting or a name is wrong.
        InsufficientView: the adversary lacks what an attack needs.
    """
    given = {name: value for name, value in locals().items() if name != "settings"}
    engines.check_engine(engine)
    engines.check_device(device, here=engine == "local")
    evaluation = prepare(specs.read(_collect_fields(given, settings)))
    job = Job(Path("runs") / evaluation.spec.name if out is None else files.make_path(out), [evaluation])
    if job.exclusions:
        warnings.warn(f"left out of all attacks: {'; '.join(job.exclusions)}", stacklevel=3)
    compute(job, progress=progress, jobs=jobs or count_cores(), device=device, engine=engine)
    return _save(Report.read(job.store.folder), job.store.folder)


@_name_as_arguments
def sweep(
    axes: Mapping[str, Iterable[Any]],
    *,
    paired: bool = False,
    out: Path | str | None = None,
    jobs: int | None = None,
    device: str = "cpu",
    engine: engines.Engine = "local",
    progress: bool = True,
    **arguments: Any,
) -> SweepReport:
    """Evaluate at every combination of values of some settings; return the report.

    Example:
        >>> report = sweep({"data.n_labeled": [200, 1000]}, attack="mc", defense="iso:lambda=5")  # doctest: +SKIP

    Args:
        axes: the values of each setting by its path, as for ``--set``: ``data.n_labeled``, ``model.cut``, ``dataset``.
        paired: whether the first values belong together, the second, and so on; else every combination is evaluated.
        out: results folder; by default ``runs/<name>-by-<settings>``.
        jobs: number of worker processes; by default the number of cores.
        device: ``cpu`` or ``cuda``.
        engine: as of ``evaluate``.
        progress: whether to show how far it is.
        arguments: as of ``evaluate``, for example ``attack="mc"``.

    Raises:
        UsageError: a setting or a name is wrong at one of the points.
        InsufficientView: the adversary lacks what an attack needs.
    """
    engines.check_engine(engine)
    engines.check_device(device, here=engine == "local")
    parameters = inspect.signature(evaluate).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items() if name != "settings"}
    known = {name: value for name, value in arguments.items() if name in defaults}
    others = {name: value for name, value in arguments.items() if name not in defaults}
    if not isinstance(axes, Mapping) or not all(isinstance(path, str) for path in axes):
        example = "{'aux.n': [20, 40]}"
        raise UsageError(f"expected axes such as {example}, got {type(axes).__name__}")
    for path, several in axes.items():
        if isinstance(several, str) or not isinstance(several, Iterable):
            raise UsageError(f"expected a list of values for {path}, got {several!r}")
    values = {path: _to_plain(list(several)) for path, several in axes.items()}
    if not values:
        raise UsageError("expected a setting with several values in axes, got none: name one, such as data.n_labeled")
    parts = prepare_sweep(_collect_fields(defaults | known, others), values, paired=paired)
    folder = Path("runs") / name_sweep(parts[0], values) if out is None else files.make_path(out)
    job = Job(folder, parts, values, paired=paired)
    compute(job, progress=progress, jobs=jobs or count_cores(), device=device, engine=engine)
    return _save(SweepReport.read(job.store.folder), job.store.folder)


def compute(
    job: Job[Any], *, progress: bool, jobs: int = 1, device: str = "cpu", engine: engines.Engine = "local"
) -> None:
    """Compute the results of ``job`` that its folder lacks."""
    job.check()
    with job.open():
        todo = job.plan()
        records = job.run(todo, jobs=jobs, device=device, engine=engine)
        for _ in show_progress(records, todo, jobs) if progress else records:
            pass


def _save(report: Printed, folder: Path) -> Printed:
    """Return a report after it has drawn itself in its folder."""
    with guard_writing(folder):
        report.save(folder)
    return report


@_name_as_arguments
def train(
    *,
    dataset: str | VerticalDataset = "credit-default",
    method: str = "fedsplitnn",
    options: Mapping[str, Any] | None = None,
    defense: str | Iterable[str] = (),
    seed: int = 0,
    data: Mapping[str, Any] | None = None,
    train: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    device: str = "cpu",
    progress: Progress = lambda *_: None,
    **settings: Any,
) -> Trained:
    """Train one federation and return it.

    Example:
        >>> trained = train(dataset="digits", defense="iso:lambda=5")
        >>> trained.predict("test").shape
        torch.Size([539, 10])

    Args:
        dataset: a registered name, a TOML file, or what ``vflsec.dataset`` returns.
        method: a registered name, with or without options, as on the command line (``fedhssl-simsiam:pma=false``).
        options: further options of the method, for example ``{"boundary": "plain"}``.
        defense: none, one or several, with their strengths.
        seed: drives split, model and noise.
        data: settings of the split, as of ``evaluate``.
        train: settings of training, for example ``{"epochs": 50}``.
        model: the shape of the networks.
        device: ``cpu`` or ``cuda``.
        progress: called with the phase, the number of finished epochs and the number of all epochs.
        settings: ``fixed``, defenses that come before ``defense``.

    Raises:
        UsageError: a setting or a name is wrong.
        Diverged: the loss is not finite, or the model predicts the same for all rows.
    """
    _expect_known(settings, globals()["train"])
    if not isinstance(seed, int) or seed < 0:
        raise UsageError(f"expected a whole number of at least 0 as seed, got {seed!r}")
    if not isinstance(options, Mapping | None):
        raise UsageError(f"expected a table of options such as {{'boundary': 'plain'}}, got {options!r}")
    tables = {"data": data, "train": train, "model": model}
    settings |= {name: table for name, table in tables.items() if table is not None}
    by_method = {specs.parse_method(method).name: dict(options)} if options else {}
    fixed = [*_split_names(settings.pop("fixed", ())), *_split_names(defense)]
    spec = specs.read_training(
        {"dataset": dataset, "methods": [method], "method": by_method, "fixed": fixed, **settings}
    )
    engines.check_device(device)
    spec = plan.with_standard_names(spec, plan.get_names(spec))
    engines.check_training(spec)
    return fit(spec, seed, device, progress)[0]


def fit(
    spec: EvalSpec, seed: int, device: str, progress: Progress, record: Path | None = None
) -> tuple[Trained, CellFacts, StoreError | None]:
    """Train the federation of ``spec``, which is already checked; return it with its facts.

    The last value says why a transcript could not be written whole, on a full disk, for example.

    Messages are recorded in the folder ``record``: what both roles of an encrypted layer see, or else the embeddings
    and gradients of all parties as a transcript.

    Raises:
        UsageError: ``record`` is no new folder, or the method sends no messages that it could record.
        Diverged: the loss is not finite, or the model predicts the same for all rows.
    """
    cell = build_cell(spec, spec.methods[0], seed)
    encrypted = bool(record and engines.list_exposures(spec))
    tap = TranscriptTap(record, spec, seed) if record and not encrypted else None
    with training.limit_threads():
        trained, facts = training.train(cell, device, progress, tap=tap, record=record if encrypted else None)
    if tap:
        tap.close()
        if tap.empty and tap.lost is None:
            facts.notes.append(f"no party sent anything in training or prediction: the recording {record} is empty")
    if trained is None or facts.status != "ok":
        raise Diverged(f"{facts.status}: {facts.error}")
    return trained, facts, tap.lost if tap else None


@_name_as_arguments
def attack(
    trained: Trained,
    name: str = "mc",
    *,
    adversary: str = "passive_1",
    n_aux: int = 80,
    victim_model: bool = False,
    **options: Any,
) -> dict[str, dict[str, Any]]:
    """Attack a trained federation and score the guess; return metrics, interval over rows and chance for each split.

    ``train`` keeps no messages, so attacks that read messages or act in training need ``evaluate``. Warns if the
    attack's loss was still falling when its budget ended: the leak is then a lower bound.

    Example:
        >>> leak = attack(train(dataset="digits"), "mc", epochs=1500)
        >>> leak["test"]["metrics"]["accuracy"] > leak["test"]["chance"]
        True

    Args:
        trained: a trained federation.
        name: a registered attack, or ``path/to/file.py:Class``.
        adversary: the attacking party.
        n_aux: number of auxiliary labels, balanced over classes.
        victim_model: whether the adversary knows the bottom model of the attacked party.
        options: of the attack.

    Raises:
        UsageError: an unknown name or option, too few rows for the auxiliary labels, an attack that acts in training.
        InsufficientView: the adversary lacks what the attack needs.
    """
    mounted = resolve(specs.AttackSpec(name=name, options=options)).make()
    if mounted.acts_in_training:
        raise UsageError(f"attack {name!r} acts in training, which is over: use vflsec.evaluate(attack={name!r})")
    if any(need.kinds for need in mounted.needs):
        raise InsufficientView(f"attack {name!r} reads messages, which train() does not keep: use vflsec.evaluate")
    with training.limit_threads():
        aux = specs.AuxSpec(n=n_aux, folds=0, victim_model=victim_model)
        party = plan.Names("", trained.federation.names).to_standard(adversary)
        result = runner.attack_once(mounted, trained, party, aux)
    if result["status"] != "ok":
        warnings.warn(f"attack {name!r} is {result['status']}: the leak is a lower bound", stacklevel=2)
    leak: dict[str, dict[str, Any]] = msgspec.to_builtins(result["leak"])
    return leak


@_name_as_arguments
def audit_system(
    what: Path | str,
    data: Path | str | VerticalDataset | None = None,
    *,
    attack: str | Iterable[str] = "all",
    party: str | None = None,
    model: str | None = None,
    messages: Path | str | None = None,
    predictions: Path | str | None = None,
    encoded: bool = False,
    train_ids: Path | str | None = None,
    test_ids: Path | str | None = None,
    aux: Mapping[str, Any] | None = None,
    aux_ids: Path | str | None = None,
    draws: int = 5,
    defense: str | Iterable[str] = (),
    allow_misfit: bool = False,
    confirm_fit: bool = False,
    out: Path | str | None = None,
    progress: bool = True,
) -> Report:
    """Attack a system that others trained, as the command ``audit`` does; return the report.

    Results that are in ``out`` already are not computed again. Nothing in ``what`` is executed.

    Example:
        >>> report = audit_system("transcript", "mine.toml", attack="direction")  # doctest: +SKIP

    Args:
        what: a transcript, a checkpoint of ``vflsec train``, weights of a bottom model (``.safetensors``), an ONNX
            model, or a table of embeddings (``.csv`` or ``.parquet``).
        data: the columns of all parties and the labels: a TOML file, or what ``vflsec.dataset`` returns. A checkpoint
            names its own.
        attack: one or several, as on the command line; by default, all that the adversary can mount.
        party: the adversary; by default, who recorded the transcript, or ``passive_1``.
        model: ``FILE.py:FUNCTION`` that builds the bottom model of weights; it is executed.
        messages: the transcript of a checkpoint's training.
        predictions: a table of the joint model's predictions that the adversary receives.
        encoded: whether the model reads the columns as they are, not as vflsec encodes them.
        train_ids: a file with the ids of the training rows, one a line.
        test_ids: a file with the ids of other rows; by default, all others.
        aux: what the adversary knows, for example ``{"n": 40}``; see ``AuxSpec``.
        aux_ids: a file with the ids of the rows whose labels the adversary knows; by default, they are drawn.
        draws: of the auxiliary labels.
        defense: those that were active in the training; their epsilon is reported.
        allow_misfit: whether to attack what does not belong to the data.
        confirm_fit: whether you have checked that it does, where that cannot be verified.
        out: results folder; by default ``runs/audit-<file name>``.
        progress: whether to show how far it is.

    Raises:
        UsageError: the arguments contradict each other, or the data do not fit.
        MisfitError: what is audited does not belong to the data.
        DataError: a file is damaged.
        StoreError: a checkpoint is damaged.
        InsufficientView: the adversary lacks what an attack needs.
    """
    from vflsec.audit.job import name_folder, prepare_audit

    attacks = [] if _split_names(attack) == ["all"] else [specs.parse_attack(text) for text in _split_names(attack)]
    what = files.make_path(what)
    audit = prepare_audit(
        what,
        keep(data) if isinstance(data, VerticalDataset) else str(data) if data else None,
        attacks=attacks,
        aux=specs.read({"aux": dict(aux)}).aux if aux else None,
        messages=_to_path(messages),
        predictions=_to_path(predictions),
        train_ids=_to_path(train_ids),
        test_ids=_to_path(test_ids),
        aux_ids=_to_path(aux_ids),
        party=party,
        model=model,
        encoded=encoded,
        draws=draws,
        defenses=_split_names(defense),
        allow_misfit=allow_misfit,
        confirm_fit=confirm_fit,
    )
    job = Job(Path(out) if out else name_folder(what), [audit])
    compute(job, progress=progress)
    return _save(Report.read(job.store.folder), job.store.folder)


def count_cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _collect_fields(given: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    _expect_known(settings, evaluate)
    if isinstance(settings.get("method"), str):
        raise UsageError(f"expected a table of options for method, got {settings['method']!r}: name methods= instead")
    strengths, epsilons = _list_numbers(given["strengths"]), _list_numbers(given["epsilons"])
    defenses = _split_names(given["defense"])
    if (strengths or epsilons) and not defenses:
        raise UsageError("expected defense= with strengths=, got no defense: name one, for example defense='iso'")
    return {
        "dataset": given["dataset"],
        "methods": _split_names(given["methods"]),
        "attacks": _split_names(given["attack"]),
        "defenses": defenses,
        "strengths": strengths,
        "epsilons": epsilons,
        "adversary": given["adversary"],
        "seeds": given["seeds"],
        "fixed": _split_names(given["fixed"]),
        **{name: given[name] for name in specs.TABLES if given[name] is not None},
        **settings,
    }


def _expect_known(settings: Mapping[str, Any], function: Callable[..., Any]) -> None:
    """Raise UsageError for an unknown argument, with the table that has a setting of this name."""
    known = [name for name in inspect.signature(function).parameters if name != "settings"]
    for key in settings:
        tables = [name for name, struct in specs.TABLES.items() if key in struct.__struct_fields__ and name in known]
        if key in (*known, *EvalSpec.__struct_fields__):
            continue
        if tables:
            raise UsageError(f"expected {tables[0]}={{{key!r}: ...}} for {key}, got {key}= as an argument")
        raise UsageError(describe_unknown("setting", key, known))


def _to_path(name: Path | str | None) -> Path | None:
    return Path(name) if name else None


def _split_names(names: str | Iterable[str]) -> list[str]:
    if not isinstance(names, Iterable):
        raise UsageError(f"expected a name or several, got {names!r}: leave the argument out for its default")
    return split_list(names) if isinstance(names, str) else list(names)


def _list_numbers(numbers: float | Iterable[float]) -> list[float]:
    if not isinstance(numbers, Iterable | int | float):
        raise UsageError(f"expected a number or several as strengths and epsilons, got {numbers!r}")
    return _to_plain(list(numbers) if isinstance(numbers, Iterable) else [numbers])  # type: ignore[no-any-return]


def _to_plain(value: Any) -> Any:
    """Return an argument without the types of NumPy and PyTorch that settings do not have."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, torch.device):
        return str(value)
    if type(value) is dict:
        return {key: _to_plain(item) for key, item in value.items()}
    return list(map(_to_plain, value)) if type(value) in (list, tuple) else value
