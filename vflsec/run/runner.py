"""One cell, from settings to records: train or reload, build the View, attack it, score the Guess."""

import logging
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import msgspec
from torch import Tensor

from vflsec.base import files
from vflsec.base.errors import TRACEBACK, Diverged, InsufficientView, NotStackable, VflsecError, clean
from vflsec.base.seeds import derive
from vflsec.core.attack import Attack, IntegrityAttack, list_integrity
from vflsec.core.federation import Federation
from vflsec.core.message import OF_TREES, Kind, Message, Step, Transcript
from vflsec.core.method import Trained
from vflsec.core.view import GroundTruth, Guess, Need, View
from vflsec.inference.auxiliary import measure_sureness
from vflsec.inference.several_trainings import join_guesses, join_views, pool_guesses
from vflsec.inference.sources import EVERYTHING
from vflsec.methods.checkpoint import load_states, save_states
from vflsec.results.records.schema import AttackRun, BaselineResult, Guessed, Record, Result, Status
from vflsec.run import training
from vflsec.run.adversary import isolate, tune
from vflsec.run.cell import Cell, Technique, repeat_training
from vflsec.run.federation import build_models, make_malicious
from vflsec.run.guesses import is_kept, keep
from vflsec.run.mounting import list_instead, list_mountable
from vflsec.run.plan import Baseline, Trial, make_alone_attack
from vflsec.run.questions import Question, ask
from vflsec.run.score import compute_spending, is_scored, measure_impact, score, score_facts
from vflsec.run.spec import AuxSpec
from vflsec.run.store import CellFacts, StageDone, StageFacts, Store

LONGEST_ERROR = 300
"""Characters of an error that a record keeps; some errors print whole arrays."""

_LOG = logging.getLogger(__name__)

_TRAINING_LOCK = Lock()
"""Layers draw their first weights from torch's global stream, which threads of a process must not share."""

Keep = Callable[[Mapping[str, Tensor]], None]
"""Keeps the scores of each split."""

Questions = dict[tuple[object, ...], Question]
"""The questions that attacks on one cell answer; several attacks share one, and what is computed from its view."""

QuestionsAlone = dict[tuple[object, ...], tuple[Question, Federation]]
"""Those of an adversary alone, each with its untrained federation."""


class Task(NamedTuple):
    """Work for one process: a stage, cells or shadows that train together, or missing results or baselines of one cell.

    Its trials and baselines have one adversary with the same auxiliary knowledge.

    Attributes:
        group: cells that train together.
        shadows: the numbers of shadow federations of the cell, which train together; None for none.
        registered: the attacks of which a record names those that could have been mounted.
        keep: whether guesses on single rows are kept, see ``vflsec.run.guesses``.
    """

    cell: Cell
    rows: Sequence[Trial]
    baselines: Sequence[Baseline]
    registered: Sequence[Technique] = ()
    stage: str | None = None
    group: tuple[Cell, ...] = ()
    shadows: range | None = None
    keep: bool = False

    @property
    def cells(self) -> list[Cell]:
        """All trainings of the cell that the rows combine."""
        return repeat_training(self.cell, max((row.trainings for row in self.rows), default=1))


class Run(NamedTuple):
    """One training: the federation, None if it failed, its facts, and what the adversary sent or received."""

    trained: Trained | None
    facts: CellFacts
    messages: tuple[Message, ...] = ()


def run(task: Task, folder: Path, device: str) -> Iterator[Record | StageDone]:
    """Yield a record for each row or baseline of ``task`` when it is computed; for a stage, that it is done.

    A failure within a cell becomes the status of its records. Wrong settings are raised.
    """
    records = _compute(task, Store(folder), device) if isinstance(task.cell, Cell) else task.cell.results(task)
    while True:
        with _TRAINING_LOCK, training.limit_threads():  # not for as long as the caller keeps a record
            record = next(records, None)
        if record is None:
            return
        yield record


def _compute(task: Task, store: Store, device: str) -> Iterator[Record | StageDone]:
    if task.stage or task.group or task.shadows:
        return (_prepare(only, store, device) for only in [task])
    if task.baselines:
        questions: QuestionsAlone = {}
        return (_run_baseline(baseline, questions, store, device) for baseline in task.baselines)
    return _run_rows(task, store, device)


def _prepare(task: Task, store: Store, device: str) -> StageDone:
    """Run a stage, cells or shadows that results start from; these report its failures."""
    status: Status = "ok"
    try:
        if task.shadows:
            name = f"shadows {task.shadows.start + 1} to {task.shadows.stop}"
            training.train_shadows(task.cell, task.shadows, device, store)
        elif task.group:
            name = f"{len(task.group)} runs"
            _train_group(task, store, device)
        else:
            name = task.stage or ""
            federation, method = build_models(task.cell, device)
            for phase in method.phases[: method.phases.index(name) + 1]:
                training.advance(task.cell, phase, method, federation, store=store)
    except Diverged:
        status = "diverged"
    except Exception as error:
        if task.stage and isinstance(error, VflsecError):
            raise
        status = "error"
    return StageDone(method=task.cell.method.name, seed=task.cell.seed, stage=name, status=status)


def _train_group(task: Task, store: Store, device: str) -> None:
    """Train cells as one and store each; cells that cannot be are left to train by themselves."""
    most = training.limit_stack(task.cell, device)
    for cells in (task.group[start : start + most] for start in range(0, len(task.group), most)):
        try:
            for cell, (trained, facts) in zip(cells, training.train_together(cells, device, store=store), strict=True):
                _keep(cell, trained, facts, store)
        except Exception as error:  # noqa: BLE001  (a run that fails reports it when it trains by itself)
            reason = error if isinstance(error, NotStackable) else _format_error(error)
            _LOG.info("%s: runs train one after the other: %s", task.cell.method.name, reason)


def _run_rows(task: Task, store: Store, device: str) -> Iterator[Result]:
    attacks = [row.attack.make() if row.attack else None for row in task.rows]
    questions: Questions = {}
    runs: list[Run] = []
    for cell in task.cells:  # not a comprehension, which is a frame more above each step of training
        runs += [_run(cell, task, list_kinds([attack for attack in attacks if attack]), store, device)]
    for row, attack in zip(task.rows, attacks, strict=True):
        yield _run_row(row, attack, task, runs[: row.trainings], questions, store, device)


def _run(cell: Cell, task: Task, kinds: frozenset[Kind], store: Store, device: str) -> Run:
    """Reload a cell; train it if it is not stored, or if an attack reads messages, which are never stored."""
    stored = store.cell(cell.key)
    try:
        facts, transcript = stored.read(), Transcript(frozenset(task.rows[0].adversary.split("+")), kinds)
        if not isinstance(facts, CellFacts) or kinds:
            phases = {row.attack.spec.after for row in task.rows if row.attack}
            with_source = bool(phases & cell.method.kind.source_phases)
            began = time.process_time()
            trained, facts = training.train(cell, device, store=store, tap=transcript, with_source=with_source)
            facts.seconds = time.process_time() - began if cell.is_trial else facts.seconds
            _keep(cell, trained, facts, store)
        else:
            trained = None if facts.status == "diverged" else load_cell(cell, stored.path, facts.history, device)
    except VflsecError:
        raise
    except Exception as error:  # noqa: BLE001  (a failure in one cell must not cost the others)
        return Run(None, CellFacts(status="error", error=_format_error(error)))
    if trained:  # what an adversary knows is drawn once, however often the same rows are trained on
        trained.federation.seed = cell.seed
    return Run(trained, facts, tuple(transcript.messages))


def list_kinds(attacks: Sequence[Attack]) -> frozenset[Kind]:
    """Return the kinds of messages that attacks read; a training whose messages are read is never reloaded."""
    kinds = {kind for attack in attacks for need in attack.needs | attack.wants for kind in need.kinds}
    beside_trees = {Kind.CONTROL, Kind.GRADIENT, Kind.CIPHERTEXT}  # bins and splits, and the derivatives of each round
    return frozenset(kinds | beside_trees if kinds & OF_TREES else kinds)


def _keep(cell: Cell, trained: Trained | None, facts: CellFacts, store: Store) -> None:
    """Store a trained cell; without defenses, also what quick models of the columns reach."""
    if trained and not (cell.defenses or cell.malicious or cell.training or cell.is_trial):
        facts.active_alone = training.score_columns(trained.federation, [trained.federation.active])
        if cell.seed == 0:  # only for a note
            facts.quick_joint = training.score_columns(trained.federation, list(trained.federation.parties.values()))
    stored = store.cell(cell.key)
    if not cell.is_trial:  # whose record says all
        stored.write(facts, lambda folder: save_states(trained.federation, folder) if trained else folder.mkdir())
    files.discard(stored.partial)


def load_cell(cell: Cell, folder: Path, history: Mapping[str, Sequence[float | None]], device: str) -> Trained:
    """Return the federation of ``cell`` with the models in ``folder``."""
    federation, method = build_models(cell, device)
    load_states(federation, folder)
    return Trained(method, federation, history)


def _restore_stage(run: Run, cell: Cell, phase: str, store: Store, device: str) -> tuple[Run, StageFacts]:
    """Return a training as it was after a stage, and the facts of that stage."""
    federation, method = build_models(cell, device)
    for stage in cell.stages[: cell.stages.index(phase) + 1]:
        facts = training.advance(cell, stage, method, federation, store=store)
    federation.seed, until = cell.seed, method.phases[: method.phases.index(phase) + 1]
    messages = tuple(message for message in run.messages if message.phase in until)
    return Run(Trained(method, federation, {phase: facts.history}), run.facts, messages), facts


def _run_row(
    row: Trial,
    attack: Attack | None,
    task: Task,
    runs: Sequence[Run],
    questions: Questions,
    store: Store,
    device: str,
) -> Result:
    after, options = row.attack.spec.after if row.attack else None, row.cell.method.spec.options
    trained, facts, messages = next((run for run in runs if run.facts.status != "ok"), runs[0])
    record = Result(
        key=row.key,
        cell=row.cell.key,
        method=row.method,
        defenses=[f"{d.label}:{d.strength:g}" for d in (carried.spec for carried in row.cell.defenses)],
        seed=row.seed,
        adversary=row.adversary,
        attack=describe_run(row.attack, attack) if row.attack else None,
        status=facts.status,
        error=facts.error,
        utility=facts.utility if facts.status == "ok" else None,
        control=row.control,
        mountable=list_mountable(task.registered, row.adversary, row.aux, trained, options) if trained else [],
        device=device,
        nbytes=sum(nbytes for phase, *_, nbytes in facts.traffic if phase != "predict"),
        traffic=facts.traffic,
        reached=facts.reached,
        spread=facts.spread,
        notes=facts.notes,
        active_alone=facts.active_alone,
        quick_joint=facts.quick_joint,
        tuning=row.tuning,
        spent=compute_spending(trained, facts.releases, row.adversary, len(runs)) if trained else [],
        seconds={"train": sum(run.facts.seconds for run in runs)},
    )
    changes: dict[str, Any] = {}
    if trained and isinstance(attack, IntegrityAttack) and facts.status == "ok":
        changes = _measure_impact(row, trained, record, messages)
    elif trained and attack and facts.status == "ok":
        if after:
            cells = repeat_training(row.cell, row.trainings)
            then = [_restore_stage(run, cell, after, store, device) for run, cell in zip(runs, cells, strict=True)]
            collapsed = next(filter(None, (training.collapse(stage.spread) for _, stage in then)), None)
            if collapsed:
                return msgspec.structs.replace(record, status="collapsed", error=collapsed)
            runs = [run for run, _ in then]
        changes = _attack_trial(attack, row, task, runs, questions, record, store)
    return msgspec.structs.replace(record, **changes)


def describe_run(technique: Technique, attack: Attack | None) -> AttackRun:
    """Return how an attack was run, for its record."""
    return AttackRun(name=technique.name, options=technique.spec.options, repr=repr(attack), after=technique.spec.after)


def _attack_trial(
    attack: Attack,
    row: Trial,
    task: Task,
    runs: Sequence[Run],
    questions: Questions,
    record: Result,
    store: Store,
) -> dict[str, Any]:
    """Run ``attack`` on the messages of the kinds that it reads, and return the changes to its record."""
    assert row.attack is not None
    began, seconds = time.process_time(), dict(record.seconds)
    asked = [_find_question(attack, row, run, number, questions) for number, run in enumerate(runs)]
    kept = partial(keep, store.folder, row.key) if task.keep and is_kept(row) else None
    if attack.shadows:
        try:
            shadows = training.get_shadows(row.cell, attack.shadows, record.device, store)
        except Exception as error:  # noqa: BLE001  (a failure of one attack must not cost the others)
            return {"status": "error", "error": _format_error(error)}
        asked = [question._replace(view=replace(question.view, shadows=shadows)) for question in asked]
        seconds["shadows"], began = training.get_seconds(row.cell, attack.shadows, store), time.process_time()
    question = asked[0]._replace(further=[other.view for other in asked[1:]])
    changes = try_attack(attack, question, runs[0].trained.federation, row.aux, kept)  # type: ignore[union-attr]
    return {**changes, "seconds": {**seconds, "attack": time.process_time() - began}}


def _find_question(attack: Attack, row: Trial, run: Run, number: int, questions: Questions) -> Question:
    """Return the question about one of several trainings, the same to all attacks that read the same."""
    assert run.trained, "its status is ok"
    assert row.attack is not None
    after = row.attack.spec.after
    kinds = list_kinds([attack])
    about = (attack.target, attack.victim, attack.column, after, number, Kind.SUM in kinds)
    key = (*about, attack.needs | attack.wants)
    if key not in questions:
        messages = tuple(message for message in run.messages if message.kind in kinds)
        questions[key] = ask(attack, run.trained, row.adversary, row.aux, messages, after)
        first = next(question for other, question in questions.items() if other[: len(about)] == about)
        first.view.share_common(questions[key].view)
    return questions[key]


def _measure_impact(row: Trial, trained: Trained, record: Result, messages: Sequence[Message]) -> dict[str, Any]:
    """Return what an attack does to its cell, or the trigger of one that only watched gradients to the honest one."""
    began, federation = time.process_time(), trained.federation
    assert row.attack is not None
    assert record.utility is not None, "the status of its cell is ok"
    try:
        malicious = (
            make_malicious(federation, row.adversary, row.attack, row.aux) if row.control else federation.malicious
        )
        attacks = list_integrity(malicious)
        for m in messages if row.control else ():
            if m.kind is Kind.GRADIENT and m.receiver in attacks and m.rows is not None:
                attacks[m.receiver].on_gradient(m.payload["value"], Step(m.step, m.phase, m.rows, split=m.split))
        changes: dict[str, Any] = {"damage": measure_impact(trained, attacks, record.utility)}
    except VflsecError as error:
        if not isinstance(error, Diverged):
            raise
        changes = {"status": "diverged", "error": str(error), "utility": None}
    except Exception as error:  # noqa: BLE001  (a failure of one attack must not cost the others)
        changes = {"status": "error", "error": _format_error(error)}
    return {**changes, "seconds": {**record.seconds, "attack": time.process_time() - began}}


def try_attack(
    attack: Attack, question: Question, federation: Federation, aux: AuxSpec, kept: Keep | None = None
) -> dict[str, Any]:
    """Attack and score; a failure of one attack becomes its status and must not cost the others."""
    try:
        return _attack_and_score(attack, question, federation, aux, kept)
    except (Exception, SystemExit) as error:  # noqa: BLE001
        if isinstance(error, InsufficientView) and Need.RECORDING in attack.needs:  # what it has, only reading tells
            return {"status": "unmeasured", "notes": [str(error)]}
        if isinstance(error, InsufficientView) and _is_unseen(attack, question.view, federation):
            return {"status": "unseen", "notes": [str(error)]}
        return {"status": "error", "error": _format_error(error)}


def _is_unseen(attack: Attack, view: View, federation: Federation) -> bool:
    """Whether all that ``attack`` lacks is what the protocol at the cut layer does not send; else it has failed."""
    sums = list_instead(federation.active.defenses.protocols())
    missing = attack.needs - view.has(attack.needs)
    return bool(missing) and missing <= {Need.GRADIENTS if sums else Need.SUMS}


def _attack_and_score(
    attack: Attack, question: Question, federation: Federation, aux: AuxSpec, kept: Keep | None = None
) -> dict[str, Any]:
    view, (headline, *_) = question.view, question.metrics
    seed = derive(federation.seed, "attack", attack.stream or attack.name)
    made = ("tuned", type(attack), repr(attack), seed, *view.aux_rows.tolist())
    if made not in view.memo:  # as results with another number of trainings begin with the same one
        view.memo[made] = tune(attack, view, headline, aux, seed)
    chosen, fold, trials = view.memo[made]
    guess = _guess(chosen, view, seed)
    if question.further:
        each = [guess, *(_guess(chosen, other, seed) for other in question.further)]
        guess = chosen.check_guess(pool_guesses(each, values=attack.target == "features"), view)
        if chosen.needs | chosen.wants >= EVERYTHING and not view.has() & {Need.NODES, Need.HISTOGRAMS}:
            whole = chosen(join_views([view, *question.further]), seed=seed)
            guess = chosen.check_guess(join_guesses(guess, whole, view), view)
    if kept:
        kept(_mask_unscored_rows(guess, question))
    leak = {}
    if guess.scores.keys() <= question.truth.labels.keys():
        leak = score(
            guess,
            question.truth,
            headline=headline,
            exclude=view.aux_rows,
            seed=derive(federation.seed, "bootstrap"),
            known=view.aux_split,
            names=question.metrics,
            groups=question.groups,
        )
    leak = leak or score_facts(guess)
    unproven = guess.untested or any(block.metric == "consistency" for block in leak.values())
    # of an attack on two classes that needs no label and fits nothing, labels fix the sign alone
    is_signed = attack.classes == 2 and Need.AUX_LABELS not in attack.needs and guess.converged is None
    notes = [*guess.notes, *(f"not measured: {part}" for part in guess.untested)]
    return {
        "status": "unmeasured" if unproven else "unconverged" if guess.converged is False else "ok",
        "leak": leak,
        **({"notes": notes} if notes else {}),
        "guessed": _count_canaries(guess, question.truth),
        "fold": fold,
        "budget": {**guess.budget, **({"trials": trials} if trials > 1 else {})},
        "sureness": measure_sureness(view, guess) if is_signed else None,
        "tuned": repr(chosen) if repr(chosen) != repr(attack) else None,
    }


def _guess(attack: Attack, view: View, seed: int) -> Guess:
    """Return the guess of an attack, which is made once for a view."""
    key = ("guess", type(attack), repr(attack), seed, *view.aux_rows.tolist())
    if key not in view.memo:
        view.memo[key] = attack(view, seed=seed)
    guess: Guess = view.memo[key]
    return guess


def _count_canaries(guess: Guess, truth: GroundTruth) -> Guessed | None:
    """Return how many labels of canaries are guessed; None if there are none, or no guess of training rows."""
    if truth.canaries is None or "train" not in guess.scores:
        return None
    return Guessed(*truth.canaries.count_guesses(guess.scores["train"].double().numpy(), truth.labels["train"].numpy()))


def _mask_unscored_rows(guess: Guess, question: Question) -> dict[str, Tensor]:
    """Return the scores of each split, NaN for rows that are not scored."""
    kept = {}
    for split, scores in guess.scores.items():
        is_known = split == question.view.aux_split
        rows = is_scored(question.truth.labels[split], question.view.aux_rows if is_known else None)
        kept[split] = scores.masked_fill(~rows[:, None], float("nan"))
    return kept


def attack_once(attack: Attack, trained: Trained, party: str, aux: AuxSpec) -> dict[str, Any]:
    """Return the scores of one attack on a federation that was trained elsewhere, without its messages."""
    return _attack_and_score(attack, ask(attack, trained, party, aux), trained.federation, aux)


def _run_baseline(baseline: Baseline, questions: QuestionsAlone, store: Store, device: str) -> BaselineResult:
    """Run an attack without the federation: on an untrained model, or on one that the adversary pre-trained itself."""
    began = time.process_time()
    attack = baseline.attack.make()
    bare = attack if baseline.pretrained or attack.baseline else make_alone_attack(attack)
    changes: dict[str, Any] = {}
    if bare and baseline.aux.n:
        try:
            changes = try_attack(bare, *_find_question_alone(baseline, questions, store, device), baseline.aux)
        except Diverged as error:
            changes = {"status": "diverged", "error": str(error)}
    return BaselineResult(
        key=baseline.key,
        method=baseline.cell.method.name if baseline.pretrained else baseline.method,
        seed=baseline.seed,
        adversary=baseline.adversary,
        attack=describe_run(baseline.attack, bare),
        seconds={"attack": time.process_time() - began},
        **changes,
    )


def _find_question_alone(
    baseline: Baseline, questions: QuestionsAlone, store: Store, device: str
) -> tuple[Question, Federation]:
    """Return the question to an adversary alone, the same to all attacks that ask for the same."""
    asking = baseline.asking or baseline.attack
    made, after = asking.make(), asking.spec.after
    key = (made.target, made.victim, made.column, made.needs | made.wants, after, baseline.pretrained)
    if key not in questions:
        federation, method = build_models(baseline.cell, device)
        for phase in baseline.cell.stages if baseline.pretrained else ():
            training.advance(baseline.cell, phase, method, federation, store=store)
        question = ask(made, Trained(method, federation, {}), baseline.adversary, baseline.aux, after=after)
        view, model = question.view, question.view.model
        view = view.drop_federation(model) if baseline.pretrained and model else isolate(view, federation.seed)
        questions[key] = question._replace(view=view), federation
    return questions[key]


def _format_error(error: BaseException) -> str:
    """Return the cause of a failure in one line, with its place in the user's code; print the traceback if asked."""
    if os.environ.get(TRACEBACK):
        traceback.print_exception(error)
    frames = traceback.extract_tb(error.__traceback__)
    libraries = ("site-packages", f"{os.sep}lib{os.sep}python")
    user_frames = [frame for frame in frames if not any(part in frame.filename for part in libraries)] or frames
    place = f" ({Path(user_frames[-1].filename).name}, line {user_frames[-1].lineno})" if user_frames else ""
    return clean(f"{type(error).__name__}: {' '.join(str(error).split())[:LONGEST_ERROR]}{place}")
