"""Runs the missing results of an evaluation, in this process or in several, and stores each before it is shown."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain, product
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from queue import SimpleQueue
from subprocess import PIPE, Popen
from tempfile import gettempdir
from threading import Thread
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

import msgspec
import torch

from vflsec.base.checks import group
from vflsec.base.errors import InsufficientView, UsageError
from vflsec.core import hooks
from vflsec.core.attack import ActingAttack, IntegrityAttack
from vflsec.core.defense import Defense
from vflsec.core.federation import Federation
from vflsec.core.message import SERVER, SOURCE
from vflsec.core.method import Method, Trained
from vflsec.data import frames
from vflsec.data.dataset import VerticalDataset
from vflsec.results.records.manifest import ACTS_UNASKED, TOO_DEAR, UNASKED
from vflsec.results.records.schema import Record, decode, encode
from vflsec.run import mounting, runner
from vflsec.run import plan as plans
from vflsec.run.adversary import get_side
from vflsec.run.cell import Cell, Technique, can_act
from vflsec.run.federation import build_federation, build_method, build_models, make_malicious
from vflsec.run.guesses import list_lacking
from vflsec.run.plan import Baseline, Trial, build_cell, list_attacks, list_contenders, make_training, resolve
from vflsec.run.questions import ask, is_about_source
from vflsec.run.runner import Task, list_kinds
from vflsec.run.spec import EvalSpec
from vflsec.run.store import StageDone, Store
from vflsec.run.training import is_stackable, make_batch_key, split_shadows

Item = TypeVar("Item", Trial, Baseline)
Datasets = Mapping[str, VerticalDataset]
Engine = str | Executor

ALL = "all"
"""Stands for every attack that can be mounted."""

SINGLE_TRAINING = ("integrity", "parameters", "text")
"""Targets that belong to one training, so that there is no combining several."""

MAX_JOINT_CELLS = 20
"""The most cells that train as one: with more, the work that is saved for each hardly grows."""


class Plan(NamedTuple):
    """The results of an evaluation, and the work that is left.

    Attributes:
        rows: all results.
        baselines: all results without the federation.
        trials: the plan of the missing trials of settings, after which the rest is planned again; None without any.
        stages: missing stages that several missing results start from, as tasks for processes; they run first.
        groups: missing cells or shadows that train as one, as tasks for processes; they run before the results.
        tasks: the missing results, as tasks for processes.
        cached: the number of results that the store already has.
        missing: the number of results that it lacks.
    """

    rows: list[Trial]
    baselines: list[Baseline]
    trials: Plan | None
    stages: list[Task]
    groups: list[Task]
    tasks: list[Task]
    cached: int
    missing: int


def plan(spec: EvalSpec, store: Store | None, *, keep: bool = False) -> Plan:
    """Return the plan of ``spec``, which has passed ``check``, less the results in ``store``."""
    return plan_trials(plans.list_trials(spec), plans.list_baselines(spec), store, keep=keep)


def plan_trials(wanted: Iterable[Trial], alone: Iterable[Baseline], store: Store | None, *, keep: bool = False) -> Plan:
    """Return the plan of trials and baselines, each once, less the results in ``store``.

    Their order is kept: trials of one seed, which share their split, are neighbors. If guesses are to be kept
    (``keep``), a result with numbers counts as done only if its guesses were kept.
    """
    done = store.records() if store else {}
    rows, baselines = {row.key: row for row in wanted}, {baseline.key: baseline for baseline in alone}
    lost = list_lacking(rows.values(), done, store.folder) if keep and store else []
    open_rows = [plans.choose_settings(row, done) for key, row in rows.items() if key not in done or row in lost]
    contenders = [contender for row in open_rows for contender in list_contenders(row)]
    trials = plan_trials(contenders, (), store)._replace(stages=[]) if contenders else None  # each does all by itself
    open_baselines = [baseline for key, baseline in baselines.items() if key not in done]
    registered = tuple(list_attacks())
    tasks = [Task(same[0].cell, (), same) for same in _group_by_cell(open_baselines)]
    tasks += [Task(same[0].cell, same, (), registered, keep=keep) for same in _group_by_cell(open_rows)]
    trained = [task for task in tasks if isinstance(task.cell, Cell)]
    stages, groups = _open_stages(trained, store), _open_groups(trained, store) + _open_shadows(trained, store)
    missing = len(open_rows) + len(open_baselines)
    cached = len(rows) + len(baselines) - missing
    return Plan([*rows.values()], [*baselines.values()], trials, stages, groups, tasks, cached, missing)


def _group_by_cell(items: Iterable[Item]) -> list[list[Item]]:
    """Return trials or baselines of the same cell and adversary together."""
    return list(group(items, lambda item: (item.cell.key, item.adversary, item.aux)).values())


def _open_stages(tasks: list[Task], store: Store | None) -> list[Task]:
    """Return one task for the last stage of each missing cell, and of each pre-training of an adversary alone."""
    stages = {}
    for task in tasks:
        if task.cell.stages and (task.rows or task.baselines[0].pretrained):
            stage = task.cell.stages[-1]
            for cell in task.cells:
                key = cell.stage_key(stage)
                if key not in stages and not (store and store.cell(key).read()):
                    stages[key] = task._replace(cell=cell, rows=(), baselines=(), stage=stage)
    return list(stages.values())


def _open_groups(tasks: list[Task], store: Store | None) -> list[Task]:
    """Return tasks for the missing cells that differ from each other in seed, training and defenses alone.

    A cell whose attack reads messages trains by itself, since its messages are not stored. So does one without an
    attack, whose time is measured, and one of a method that is a plug-in, which may keep what belongs to one run.
    """
    alike: dict[str, list[Task]] = {}
    for task in tasks:
        attacks = [row.attack.make() for row in task.rows if row.attack]
        if not attacks or list_kinds(attacks) or task.cell.malicious or not is_stackable(task.cell.method):
            continue
        common = msgspec.structs.replace(task.cell, seed=0, defenses=()).key
        missing = [cell for cell in task.cells if not (store and store.cell(cell.key).read())]
        alike.setdefault(common, []).extend(task._replace(cell=cell) for cell in missing)
    chunks = [chunk[k : k + MAX_JOINT_CELLS] for chunk in alike.values() for k in range(0, len(chunk), MAX_JOINT_CELLS)]
    return [chunk[0]._replace(rows=(), group=tuple(t.cell for t in chunk)) for chunk in chunks if len(chunk) > 1]


def _open_shadows(tasks: list[Task], store: Store | None) -> list[Task]:
    """Return one task for each missing batch of shadow federations."""
    batches_by_key = {}
    for task in tasks:
        for row in task.rows:
            for batch in split_shadows(row.attack.make().shadows if row.attack else 0):
                key = make_batch_key(task.cell, batch)
                if key not in batches_by_key and not (store and store.cell(key).read()):
                    batches_by_key[key] = task._replace(rows=(), shadows=batch)
    return list(batches_by_key.values())


def check(spec: EvalSpec) -> None:
    """Raise unless every name, option and need of ``spec`` can be met; trains nothing and writes nothing.

    The data are split and the models built as for seed 0, so that too few rows are noticed here.

    Raises:
        UsageError: an unknown name or option, or settings that the data cannot serve.
        DataError: the dataset cannot be read.
        InsufficientView: an attack that its adversary cannot mount.
    """
    wanted = [resolve(attack) for attack in spec.attacks]
    attacks = [(attack.make(), attack.spec.after) for attack in wanted]
    for attack, _ in attacks:
        plans.make_alone_attack(attack)
        if spec.trainings > 1 and (attack.target in SINGLE_TRAINING or isinstance(attack, ActingAttack)):
            raise UsageError(
                f"expected one training with {attack.name}, on {attack.target}, got trainings = {spec.trainings}: "
                f"drop --trainings, or leave the attack out"
            )
    if spec.data.canaries and not any(attack.target == "labels" for attack, _ in attacks):
        raise UsageError(
            f"expected an attack on labels with --audit-epsilon (data.canaries), got {', '.join(spec.labels)}: "
            f"add one, for example --attack direction"
        )
    check_tuning(spec)
    added = mounting.list_instead(_list_protocols(spec))
    for label, method, federation in _build(spec):
        if method.receives or spec.adversary not in (SERVER, SOURCE):
            get_side(method, federation, spec.adversary)
        if not method.receives:
            continue
        if len({is_about_source(a, after, method, spec.adversary) for a, after in attacks if a.target == "labels"}) > 1:
            raise UsageError(
                f"expected attacks on one party's labels, got some on the source's and some on the active party's: "
                f"evaluate those on gradients after a phase of {method.name} separately"
            )
        for attack, after in attacks:
            mounting.mount(
                attack, after, spec.adversary, spec.aux, method, federation, spec.get_method(label).options, added=added
            )
            if not isinstance(attack, IntegrityAttack):
                ask(attack, Trained(method, federation, {}), spec.adversary, spec.aux, after=after)
        for malicious in (attack for attack in wanted if attack.kind.target == "integrity"):
            make_malicious(federation, spec.adversary, malicious, spec.aux)


def check_tuning(spec: EvalSpec) -> None:
    """Raise unless labels can be held out to choose settings, and no epsilon leaves that choice out."""
    defenses = (resolve(defense) for defense in (*spec.defenses, *spec.fixed))
    private = [defense.name for defense in defenses if defense.kind.privacy_spent is not Defense.privacy_spent]
    private += ["--audit-epsilon"] if spec.data.canaries else []
    if private and spec.tune > 1:
        raise UsageError(
            f"expected no --tune with {private[0]}: a choice of settings by labels is not part of its epsilon; drop "
            f"--tune, and set what was chosen on other data"
        )
    for label in spec.methods:
        row = make_training(spec, label, build_cell(spec, label, seed=0))
        for first in list_contenders(row)[:1]:
            federation, method = build_models(first.cell, "cpu")
            method.check(federation)


def expand_attacks(spec: EvalSpec) -> tuple[EvalSpec, dict[str, str]]:
    """Return ``spec`` with ``all`` replaced by every attack that can be mounted, and why each other one cannot.

    Raises:
        UsageError: something else is wrong with ``spec``, or no attack can be mounted.
    """
    phases = [attack.after for attack in spec.attacks if attack.name == ALL]
    if not phases:
        return _with_columns(spec), {}
    built = [candidate for candidate in _build(spec) if candidate[1].receives]
    named = [resolve(attack) for attack in spec.attacks if attack.name != ALL]
    chosen, known = [*named], list_attacks()
    always = [attack.name for attack in known if mounting.is_baseline(attack)]
    left_out = dict.fromkeys(always, "part of *alone*, which is always computed")
    for (_, method, _), after in product(built, phases):
        if after is not None:
            mounting.expect_phase(ALL, after, method)
    others = sorted((attack for attack in known if attack.name not in always), key=lambda attack: attack.name)
    for attack, after in product(others, phases):
        at = msgspec.structs.replace(attack, spec=msgspec.structs.replace(attack.spec, after=after))
        for wanted in mounting.expand_victims(at, spec.adversary, built[0][2]):
            if wanted in chosen:
                continue
            reason = _find_obstacle(wanted, spec, built)
            if reason:
                left_out[wanted.spec.label.removesuffix(wanted.spec.place)] = reason
            else:
                chosen.append(wanted)
    if not chosen:
        raise UsageError(
            f"expected an attack that {spec.adversary} can mount, got none: {'; '.join(list_reasons(left_out))}"
        )
    spec = msgspec.structs.replace(spec, attacks=tuple(attack.spec for attack in chosen))
    return _with_columns(spec, named), left_out


def _with_columns(spec: EvalSpec, named: Sequence[Technique] | None = None) -> EvalSpec:
    """Return ``spec`` with the names of the columns that its attacks are on; ``named`` are not those of ``all``."""
    attacks = [resolve(attack) for attack in spec.attacks]
    if not any(attack.has_option("column") for attack in attacks):
        return spec
    federation = build_federation(build_cell(spec, spec.methods[0], seed=0), "cpu")
    of_all = [] if named is None else [attack for attack in attacks if attack not in named]
    on_columns = mounting.with_columns(attacks, spec.adversary, federation, of_all=of_all)
    return msgspec.structs.replace(spec, attacks=tuple(attack.spec for attack in on_columns))


def _find_obstacle(wanted: Technique, spec: EvalSpec, built: Sequence[tuple[str, Method, Federation]]) -> str | None:
    """Return why ``all`` does not stand for this attack; None if it does."""
    attack, after = wanted.make(), wanted.spec.after
    acts = isinstance(attack, ActingAttack)
    added = mounting.list_instead(_list_protocols(spec))
    try:
        for label, method, federation in built:
            mounting.mount(
                attack, None if acts else after, spec.adversary, spec.aux, method, federation,
                spec.get_method(label).options, added=added,
            )  # fmt: skip
    except InsufficientView as error:
        return str(error)
    if acts:
        return f"{ACTS_UNASKED}: name it in --attack"
    if attack.shadows:
        return f"{TOO_DEAR}: trains {attack.shadows} shadow federations for each training: name it in --attack"
    if spec.trainings > 1 and attack.target in SINGLE_TRAINING:
        return f"is on {attack.target}, which several trainings do not share"
    with_source = [method for _, method, _ in built if after in method.source_phases]
    on_source = all(is_about_source(attack, after, method, spec.adversary) for method in with_source)
    if attack.target == "labels" and not on_source:
        return f"{UNASKED}: is on the labels of the active party, where others are on those of the source: name it"
    return None


def list_reasons(left_out: Mapping[str, str]) -> list[str]:
    """Return a line for each reason why ``expand_attacks`` left attacks out, with their names."""
    names = group(left_out, lambda name: left_out[name].removeprefix(f"attack {name.partition(':')[0]!r} "))
    return [f"{', '.join(alike)}: {reason}" for reason, alike in names.items()]


def check_training(spec: EvalSpec) -> Trained:
    """Check as ``check`` does, but for what concerns attacks; return the last federation that was built, untrained.

    Raises:
        UsageError: an unknown name or option, settings that the data cannot serve, or a defense that never acts.
        DataError: the dataset cannot be read.
    """
    for _, method, federation in _build(spec):  # which keeps one federation in memory
        untrained = Trained(method, federation, {})
    return untrained


def list_costs(spec: EvalSpec) -> Iterator[str]:
    """Yield what protocols at the cut layer take in one training of each method on this machine, estimated now."""
    for label, method, federation in _build(spec):
        if seconds := method.cryptography(federation):
            yield f"encryption takes about {seconds:.0f} CPU s of each training of {label} here"
        if sent := method.count_sums_bytes(federation):
            yield f"sealed numbers and their sums are {sent / 1e6:.1f} MB of each training of {label}"


def list_exposures(spec: EvalSpec) -> list[tuple[str, float]]:
    """Return, for each passive party behind an encrypted layer, a sentence and the share of features it exposes."""
    if not _list_protocols(spec):
        return []
    return list(
        dict.fromkeys(exposure for _, method, federation in _build(spec) for exposure in method.exposures(federation))
    )


def _list_protocols(spec: EvalSpec) -> list[Any]:
    """Return the protocols that defenses put at the cut layer."""
    defenses = (resolve(defense).with_strength(defense.strength or 1.0) for defense in (*spec.defenses, *spec.fixed))
    return [protocol for defense in defenses if (protocol := defense.defense().protocol())]


def _build(spec: EvalSpec) -> Iterator[tuple[str, Method, Federation]]:
    """Yield each label, its checked method and federation for seed 0, built, not trained; one per swept defense."""
    defenses, fixed = [resolve(defense) for defense in spec.defenses], [resolve(defense) for defense in spec.fixed]
    for defense in defenses:
        for strength in (0.0, *spec.list_strengths(defense.spec)):
            defense.with_strength(strength).defense()
    swept_or_none: list[Technique | None] = [*defenses] or [None]
    cells = [build_cell(spec, label, seed=0) for label in spec.methods]
    _check_points([*defenses, *fixed], [cell.method for cell in cells if cell.method.kind.receives])
    for label, cell in zip(spec.methods, cells, strict=True):
        for swept in swept_or_none:
            at = [swept.with_strength(s) for s in spec.list_strengths(swept.spec) if s] if swept else []
            method = build_method(cell)
            strongest = at[-1:]  # refuses whatever no strength could do
            federation = build_federation(msgspec.structs.replace(cell, defenses=(*cell.defenses, *strongest)), "cpu")
            for carried in federation.active.defenses:
                carried.check_task(federation.n_classes)
            method.build(federation)
            method.check(federation)
            if method.receives:  # others are trained without defenses
                for defense in (*at, *fixed):
                    _check_serves(defense, method, federation)
                if swept and not can_act(swept, cell.method, method.phases):
                    raise UsageError(
                        f"defense {swept.spec.label} changes nothing that {method.name} sends or learns, and its curve "
                        f"would be flat: choose another --at or by=, or fix the defense with --with"
                    )
            yield label, method, federation


def _check_serves(carried: Technique, method: Method, federation: Federation) -> None:
    """Raise UsageError if a defense cannot serve ``method``, or its epsilon is out of reach."""
    defense = carried.defense()
    defense.plan_releases(method.releases(defense, federation))
    for party in federation.parties.values():
        if carried.spec.is_carried_by(party.name):
            with defense.training_hooks(party.modules, party.penalties):
                pass


def _check_points(defenses: Sequence[Technique], methods: Sequence[Technique]) -> None:
    """Raise UsageError if no method sends the messages that a defense is to act on."""
    run = [(m.kind, m.spec.options, phase) for m in methods for phase in (*m.kind.phases, "predict")]
    for defense in defenses:
        made = defense.with_strength(defense.spec.strength or 1.0).defense()
        for kind in made.kinds:
            if any(made.acts(kind, p) and hooks.OF_KIND[kind] in m.runs(p, options) for m, options, p in run):
                continue
            sent = {f"{p}.{message}" for m, options, p in run if p in m.phases for message in m.messages_in(p, options)}
            names = ", ".join(method.name for method in methods) or "no method"
            raise UsageError(
                f"defense {defense.spec.label} acts at {kind}, where {names} sends nothing: "
                f"choose another --at among {', '.join(sorted(sent))}"
            )


def evaluate(
    todo: Plan, store: Store, *, jobs: int = 1, device: str = "cpu", engine: Engine = "local"
) -> Iterator[Record | StageDone]:
    """Compute the missing results, and yield each once it is on the disk, which is when it is computed.

    All but the order and the timings is the same for any ``jobs`` and ``engine``, and after an interruption.

    Args:
        todo: the plan.
        store: where results go.
        jobs: processes of the local engine.
        device: ``cpu`` or ``cuda``.
        engine: ``local``, or ``dask:ADDRESS`` or an executor, whose workers have vflsec and the same data.

    Raises:
        UsageError: no scheduler at that address, dask is not installed, or a worker of another engine has died.
    """
    if todo.trials:
        yield from evaluate(todo.trials, store, jobs=jobs, device=device, engine=engine)
        todo = plan_trials(todo.rows, todo.baselines, store, keep=any(task.keep for task in todo.tasks))
    rows, alone = ([task for task in todo.tasks if bool(task.rows) == has_rows] for has_rows in (True, False))
    fill = [*todo.groups, *alone] if todo.groups else []  # the time of groups, for which all rows wait
    ordered = todo.stages, fill, rows if todo.groups else [*alone, *rows]
    count = min(jobs, max(map(len, ordered))) if engine == "local" else 0
    if count > 1:
        records = _run_in_parallel(ordered, store.folder, count, device)
    elif engine == "local":
        records = chain.from_iterable(runner.run(task, store.folder, device) for task in chain(*ordered))
    else:
        records = chain.from_iterable(_run_elsewhere(engine, tasks, store.folder, device) for tasks in ordered if tasks)
    for record in records:
        if not isinstance(record, StageDone):
            store.append(record)
        yield record


def check_engine(engine: Engine) -> None:
    """Raise UsageError unless ``engine`` is ``local``, ``dask:ADDRESS`` or an executor."""
    is_known = isinstance(engine, str) and (engine == "local" or (engine.startswith("dask:") and engine != "dask:"))
    if not is_known and not isinstance(engine, Executor):
        others = "" if isinstance(engine, str) else " or a concurrent.futures.Executor"
        raise UsageError(f"expected --engine local or dask:ADDRESS{others}, got {engine!r}")


def check_device(device: str, *, here: bool = True) -> None:
    """Raise UsageError unless ``device`` is ``cpu`` or ``cuda``; if ``here``, also unless this machine has it."""
    kind, _, index = device.partition(":")
    gpus = torch.cuda.device_count()
    if device == "cpu" or (kind == "cuda" and (index or "0").isdigit() and (not here or int(index or 0) < gpus)):
        return
    raise UsageError(f"expected --device cpu, or cuda where torch finds a GPU ({gpus} here), got {device!r}")


def _run_elsewhere(engine: Engine, tasks: list[Task], folder: Path, device: str) -> Iterator[Record | StageDone]:
    """Run on the workers of a scheduler or an executor, with trained models where the workers can write.

    A record comes back with its task. From dask it comes as an event before, when it is computed; there, a task whose
    worker dies is run by another, and data frames of this process are sent to each worker once.
    """
    data, topic, news, seen = _load_memory_datasets(tasks), f"vflsec-{uuid4()}", SimpleQueue[Any](), set[str]()
    with ExitStack() as stack:
        if isinstance(engine, str):
            client = stack.enter_context(_connect(engine.removeprefix("dask:")))
            client.subscribe_topic(topic, lambda event: news.put([decode(event[1])]))
            data = client.scatter(data, broadcast=True) if data else {}  # dask scatters no empty mapping
        submit = partial(client.submit, pure=False) if isinstance(engine, str) else engine.submit
        try:
            futures = [submit(_run_on_worker, data, task, folder.resolve(), device, topic) for task in tasks]
            for future in futures:
                future.add_done_callback(news.put)
                stack.callback(future.cancel)
            running = len(futures)
            while running:
                new = news.get()
                if not isinstance(new, list):
                    new, running = new.result(), running - 1
                fresh = [record for record in new if isinstance(record, StageDone) or record.key not in seen]
                seen.update(record.key for record in fresh if not isinstance(record, StageDone))
                yield from fresh
        except BrokenExecutor:
            raise UsageError(
                "a worker of the executor has died: results of finished tasks are kept; start again"
            ) from None


def _connect(address: str) -> Any:
    try:
        from distributed import Client
    except ImportError:
        raise UsageError("--engine dask:ADDRESS needs distributed: pip install 'vflsec[dask]'") from None
    try:
        return Client(address, timeout=10)  # type: ignore[no-untyped-call]
    except (OSError, ValueError) as error:
        raise UsageError(f"expected a dask scheduler at {address}, found none: {error}") from None


def _load_memory_datasets(tasks: Iterable[Task]) -> Datasets:
    """Return the datasets of this process by name, which workers do not have."""
    sources = {task.cell.dataset.name: task.cell.dataset for task in tasks if task.cell.dataset.is_in_memory}
    return {name: source.load() for name, source in sources.items()}


def _keep_all(data: Datasets) -> None:
    for name, dataset in data.items():
        if not frames.has(name):
            frames.keep(dataset)


def _run_on_worker(data: Datasets, task: Task, folder: Path, device: str, topic: str) -> list[Record | StageDone]:
    """Run ``task`` on a worker, with its models in ``folder``, or in a place of its own if it cannot write there."""
    _keep_all(data)
    worker: Any = None
    with suppress(KeyError, ValueError):  # it is not one of dask
        worker = sys.modules["distributed"].get_worker()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(worker.local_directory if worker else gettempdir()) / "vflsec" / folder.name
    records = []
    for record in runner.run(task, folder, device):
        records.append(record)
        if worker and not isinstance(record, StageDone):
            worker.log_event(topic, encode(record))
    return records


_START = """import sys
sys.path += [folder for folder in sys.argv[2:] if folder not in sys.path]
from vflsec.run import engine
engine.serve(sys.argv[1])"""
"""What workers run. Folders of the parent's path come last on theirs, so that no file in them hides a package."""


def _run_in_parallel(
    ordered: Sequence[list[Task]], folder: Path, count: int, device: str
) -> Iterator[Record | StageDone]:
    """Run lists of tasks one after the other, in processes that start without the current folder on their path.

    Frames and tasks go out, and records come in, through a pipe of each process: nothing stays in shared memory if this
    process is killed. A worker goes on when the next record is asked for.
    """
    setup, at = (_load_memory_datasets(chain(*ordered)), folder, device), ""
    pipes, ends = zip(*(Pipe() for _ in range(count)), strict=True)
    processes = [_start_workers(group) for group in ([ends] if sys.platform == "linux" else [[end] for end in ends])]
    try:
        for pipe in pipes:
            pipe.send(setup)
        for waiting in map(iter, ordered):
            busy: dict[Any, Task] = dict(zip(pipes, waiting, strict=False))
            for pipe, task in busy.items():
                pipe.send(task)
            while busy:
                for pipe in busy.keys() & wait(list(busy)):
                    at = f" at {busy[pipe].cell.method.name}, seed {busy[pipe].cell.seed}"
                    record = pipe.recv()
                    if isinstance(record, Exception):
                        raise record
                    if record is not None:
                        yield record
                        pipe.send(None)
                    elif following := next(waiting, None):
                        busy[pipe] = following
                        pipe.send(following)
                    else:
                        del busy[pipe]
    except (EOFError, ConnectionError):
        raise UsageError(
            f"a worker process has died{at}: it was killed, ran out of memory, or an attack ended it. Finished results "
            f"are kept; start again, with fewer --jobs to save memory"
        ) from None
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _start_workers(ends: Sequence[Any]) -> Popen[bytes]:
    """Start a process group with a worker at the end of each pipe; only of one on macOS, where forks may crash."""
    isolated, descriptors = "-I" if sys.flags.isolated else "-P", [end.fileno() for end in ends]
    command = [sys.executable, isolated, "-c", _START, ",".join(map(str, descriptors)), *filter(None, sys.path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = Popen(command, stdin=PIPE, pass_fds=descriptors, process_group=0, env=environment)  # noqa: S603
    for end in ends:
        end.close()
    return started


def _end_with_parent() -> None:
    sys.stdin.buffer.read()  # which ends when the parent has, however that was
    os._exit(1)


def serve(descriptors: str) -> None:
    """Run the tasks that come through each pipe, in processes that share what is imported by now."""
    pipes: list[Any] = [Connection(int(descriptor)) for descriptor in descriptors.split(",")]
    while len(pipes) > 1 and os.fork():
        pipes.pop().close()
    pipe = pipes.pop()
    pipes.clear()  # which closes those of other workers
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which a scheduler sends to all: the parent then ends this process
    Thread(target=_end_with_parent, daemon=True).start()
    data, folder, device = pipe.recv()
    _keep_all(data)
    while True:
        task, end = pipe.recv(), None
        try:
            for record in runner.run(task, folder, device):
                pipe.send(record)
                pipe.recv()  # until it is stored
        except Exception as error:  # noqa: BLE001  (it is raised by the process that sent the task)
            error.add_note(traceback.format_exc())
            end = error
        pipe.send(end)
