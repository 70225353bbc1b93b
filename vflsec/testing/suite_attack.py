"""Conformance of attacks, also of those on integrity and on recordings; see ``vflsec.testing.conformance``."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from unittest import SkipTest

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from vflsec.audit.recordings import open_recording
from vflsec.base.errors import DataError, InsufficientView, VflsecError
from vflsec.base.seeds import make_rng
from vflsec.cipher.recording import NOTES, Note, Recording, RecordingWriter
from vflsec.cipher.roles.exchange import ROLES
from vflsec.core import registry
from vflsec.core.attack import Attack, HijackingAttack, IntegrityAttack
from vflsec.core.federation import Federation
from vflsec.core.message import OF_TREES, Kind, Message, Step, Transcript
from vflsec.core.method import Trained
from vflsec.core.party import Party
from vflsec.core.settings import ModelSpec, PretrainSpec, TrainSpec
from vflsec.core.view import Guess, Need, Shadows, View
from vflsec.data.partition import DataSpec
from vflsec.methods.fedsplitnn import FedSplitNN
from vflsec.results.metrics import METRICS
from vflsec.run.adversary import get_victim, observe_before, observe_victim_before
from vflsec.run.cell import Cell
from vflsec.run.federation import build_federation
from vflsec.run.questions import ASK, Question, ask
from vflsec.run.score import score
from vflsec.run.spec import AuxSpec
from vflsec.run.training import get_shadows
from vflsec.testing import suite
from vflsec.testing.federations import Grown, grow_trees, make_toy_cell, make_toy_federation
from vflsec.testing.recordings import LinearRun

SEEDS = (0, 1, 2)
ADVERSARY = {"passive": "passive_1", "active": "active"}
ASKED = ("train", "test", "candidates", "parameters")

WILD_VALUES = (1e30, 1e6, -1e12)
"""Values of wild rows, in turn."""

MOVED = 0.02
"""By which wild rows may move the score on the others."""


class AttackConformance(suite.Suite):
    """Checks of one attack, against a small split network in toy federations of two parties and two classes.

    An attack on federated trees meets ``secureboost`` instead (``vflsec.testing.federations.grow_trees``).

    Class attributes:
        method_options: of FedSplitNN's ``ModelSpec``, for an attack that works at some boundaries only.
        aux: of how many rows the adversary knows the answer.
        side: of the adversary, for an attack that either side can mount.
        wild_scenes: over which the effect of wild rows is averaged, more where the fit of an attack moves by chance.
    """

    method_options: ClassVar[Mapping[str, Any]] = {}
    aux: ClassVar[int] = 40
    side: ClassVar[str] = "passive"
    wild_scenes: ClassVar[int] = 1
    _scenes: ClassVar[dict[tuple[str, int], Scene]] = {}
    _first_guesses: ClassVar[dict[tuple[str, int], tuple[Attack, Guess]]] = {}

    def __init_subclass__(cls) -> None:
        """Give each suite scenes and guesses of its own, which its checks share."""
        super().__init_subclass__()
        cls._scenes, cls._first_guesses = {}, {}

    def make(self) -> Attack:
        """Return the attack, with a budget small enough for tests."""
        raise NotImplementedError

    def test_states_what_it_is(self) -> None:
        """The card is complete, and an earlier version cannot be zero."""
        attack = self.make()
        suite.check_stated(attack, ("name", "side", "target", "needs", "reference", "verified", "version"))
        assert attack.side in {*ADVERSARY, "either", "any"}
        assert attack.target in ASK
        assert attack.name in repr(attack)

    def test_refuses_a_poor_view(self) -> None:
        """Each missing need is named, and so is the wrong side."""
        attack, scene = self.make(), self._get_scene("planted", 0)
        for need in attack.needs:
            with suite.expect_refusal(InsufficientView, naming=need.name):
                attack(scene.view.drop(need), seed=0)
        if attack.side in ("either", "any"):
            return
        other = "active" if attack.side == "passive" else "passive"
        with suite.expect_refusal(InsufficientView, naming=other):
            attack(replace(scene.view, side=other), seed=0)

    def test_guesses_for_the_rows_it_was_given(self) -> None:
        """Finite scores (n, C), detached, for splits of the view."""
        view, (_, guess) = self._get_scene("planted", 0).view, self._compute_guess("planted", 0)
        for split, scores in guess.scores.items():
            assert tuple(scores.shape) == (len(view.features[split]), view.n_classes)
            assert torch.isfinite(scores).all()
            assert not scores.requires_grad

    def test_equal_seeds_give_equal_guesses(self) -> None:
        """Bit for bit, from one instance used twice: no state stays in it, no randomness comes from elsewhere."""
        view, (attack, first) = self._get_scene("planted", 0).view, self._compute_guess("planted", 0)
        assert are_equal(first, attack(view, seed=0)), f"{attack!r} is not reproducible"

    def test_leaves_no_trace(self) -> None:
        """The view, its model and its messages stay as they were, and so do all global generators."""
        view = self._get_scene("planted", 0).view.copy_private()  # an attack that fails here must not taint the scene
        before = copy_all(view)
        self.make()(view, seed=0)
        traces = suite.list_changed(before, copy_all(view))
        assert not traces, f"the attack changed {', '.join(traces)}"

    def test_guess_does_not_depend_on_the_truth(self) -> None:
        """Answers changed after the view was built change nothing: nothing in the view reaches them."""
        scene, (_, honest) = self._get_scene("planted", 0), self._compute_guess("planted", 0)
        kept = [y.clone() for y in scene.answers]
        try:
            for y in scene.answers:
                y.neg_().add_(1)
            assert are_equal(honest, self.make()(scene.view, seed=0)), (
                "the guess follows labels that the adversary cannot see"
            )
        finally:
            for y, before in zip(scene.answers, kept, strict=True):
                y.copy_(before)

    def test_beats_chance_on_a_planted_leak(self) -> None:
        """On rows whose answer it did not know, where what parties say, or their columns, give it away.

        Every party's columns give the class away; a federation whose members are to be told has learned few rows by
        heart.
        """
        leak = self._rate("planted")
        assert leak.mean > leak.chance + suite.SIGMAS * leak.error, f"{leak}: not above chance where a leak is planted"

    def test_is_at_chance_against_shuffled_labels(self) -> None:
        """The scorer's null: a guess cannot know an order that was drawn after it."""
        leak = self._rate("planted", shuffled=True)
        assert leak.mean - leak.chance < suite.SIGMAS * leak.error, f"{leak} against shuffled answers"
        if leak.metric == "auc":  # of values, a guess for another row is worse than none
            assert leak.chance - leak.mean < suite.SIGMAS * leak.error, f"{leak} against shuffled answers"

    def test_is_at_chance_without_a_signal(self) -> None:
        """Where columns have to do with nothing, features and models tell nothing of rows not trained on.

        Messages do tell: gradients carry the label whatever the features say, and embeddings the columns, so attacks on
        them are left out. Of who was trained on, a model tells nothing that has learned nothing.
        """
        attack = self.make()
        if not all(need.is_local for need in attack.needs):
            raise SkipTest("reads messages, which carry labels and columns even where these have to do with nothing")
        leak = self._rate("none", splits=("candidates",) if attack.target == "membership" else ("test",))
        assert leak.mean - leak.chance < suite.SIGMAS * leak.error, f"{leak} where there is nothing to learn"

    def test_a_few_wild_rows_decide_nothing(self) -> None:
        """One percent of the rows at up to 1e30 moves the score on the others by ``MOVED`` at most, or it is refused.

        The rows are wild in everything that the adversary holds or receives. None of them is auxiliary.
        """
        self._is_robust(lambda view: {split: select_rows(view, split) for split in view.features})

    def test_a_wild_auxiliary_row_decides_nothing(self) -> None:
        """Nor does one row whose answer the adversary knows, and which may be wild itself, beyond what it told."""
        if not len(self._get_scene("planted", 0).view.aux_rows):
            raise SkipTest("there are no auxiliary rows")
        self._is_robust(
            lambda view: (
                {split: select_rows(view, split) for split in view.features} | {view.aux_split: view.aux_rows[:1]}
            )
        )

    def _is_robust(self, wild: Callable[[View], Mapping[str, Tensor]]) -> None:
        """Check the mean of the score over scenes, with wild rows and without what they tell of the others."""
        moved: dict[str, list[tuple[float, float]]] = {}
        for seed in range(self.wild_scenes):
            view, truth, (metric, *_), *_ = self._get_scene("planted", seed).question
            rows, (attack, clean) = wild(view), self._compute_guess("planted", seed)
            rest = torch.nonzero(~torch.isin(view.aux_rows, rows[view.aux_split]))[:, 0]
            try:
                after = attack(with_wild(view, rows), seed=seed)
            except VflsecError:
                return
            controls = [clean] if len(rest) == len(view.aux_rows) else [clean, attack(view.restrict(rest), seed=seed)]
            for split, scores in after.scores.items():
                kept = torch.ones(len(scores), dtype=torch.bool).index_fill(0, rows[split], False)
                if split == view.aux_split:
                    kept[view.aux_rows] = False
                answers = truth.labels[split].cpu()[kept].numpy()
                values = [METRICS[metric](guess.scores[split][kept].numpy(), answers) for guess in (after, *controls)]
                moved.setdefault(split, []).append((values[0] - values[1], values[0] - values[-1]))
        for split, differences in moved.items():
            means = [abs(sum(each) / len(each)) for each in zip(*differences, strict=True)]
            assert min(means) <= MOVED, f"the score of other {split} rows moves by {min(means):.3f}"

    def _get_scene(self, signal: str, seed: int) -> Scene:
        if (signal, seed) not in self._scenes:
            self._scenes[signal, seed] = self._make_scene(signal, seed)
        return self._scenes[signal, seed]

    def _compute_guess(self, signal: str, seed: int) -> tuple[Attack, Guess]:
        if (signal, seed) not in self._first_guesses:
            attack = self.make()
            self._first_guesses[signal, seed] = attack, attack(self._get_scene(signal, seed).view, seed=seed)
        return self._first_guesses[signal, seed]

    def _make_scene(self, signal: str, seed: int) -> Scene:
        attack = self.make()
        side = self.side if attack.side in ("either", "any") else attack.side
        settings = (side, _make_task(attack, signal), seed, tuple(sorted(self.method_options.items())))
        trained = _train(*settings, attack, self.aux) if attack.acts_in_training else _get_federation(*settings)
        aux = AuxSpec(n=self.aux, victim_model=Need.VICTIM_MODEL in attack.needs)
        federation = trained.trained.federation
        question = ask(attack, trained.trained, ADVERSARY[side], aux, trained.messages)
        if side == "passive" and Need.PREDICTIONS in attack.needs:  # which nobody sends it here
            predictions = {split: trained.trained.method.predict(federation, split) for split in question.view.features}
            question = question._replace(view=replace(question.view, predictions=predictions))
        if attack.shadows:
            shadows = _get_shadows(*settings[1:], attack.shadows)
            question = question._replace(view=replace(question.view, shadows=shadows))
        return Scene(trained.trained, question, _get_truth(attack, question, federation, side))

    def _rate(self, signal: str, *, shuffled: bool = False, splits: tuple[str, ...] = ASKED) -> MeanLeak:
        """Return the headline, mean over seeds, on the first of ``splits`` that the attack guesses."""
        values, errors, chances = [], [], []
        for seed in SEEDS:
            view, truth, names, *_ = self._get_scene(signal, seed).question
            _, guess = self._compute_guess(signal, seed)
            split = next((split for split in splits if split in guess.scores), None)
            if split is None:
                raise SkipTest(f"guesses nothing of {splits[0]} rows")
            truth = truth.shuffle_labels(make_rng(seed, "shuffle")) if shuffled else truth
            leaks = score(
                guess, truth, headline=names[0], exclude=view.aux_rows, seed=0, known=view.aux_split, names=names
            )
            leak = leaks[split]
            values.append(leak.headline)
            chances.append(leak.chance)
            errors.append(_estimate_error(names[0], truth.labels[split]))
        return MeanLeak(float(np.mean(values)), max(errors), float(np.mean(chances)), names[0])


class MeanLeak(NamedTuple):
    """A mean headline, the standard error it would have if the guess knew nothing, and what it would then be."""

    mean: float
    error: float
    chance: float
    metric: str

    def __str__(self) -> str:
        """Return the numbers."""
        return f"{self.metric.upper()} {self.mean:.3f} (standard error {self.error:.3f}, chance {self.chance:.3f})"


class Scene(NamedTuple):
    """A trained toy federation, what its adversary is asked, and the tensors that hold the answers."""

    trained: Trained
    question: Question
    answers: list[Tensor]

    @property
    def view(self) -> View:
        """What the adversary has."""
        return self.question.view


def _get_truth(attack: Attack, question: Question, federation: Federation, side: str) -> list[Tensor]:
    if attack.target in ("membership", "parameters"):
        return list(question.truth.labels.values())
    if attack.target == "labels":
        return list(federation.active.labels.values())
    return list(get_victim(attack, federation, [federation.parties[ADVERSARY[side]]]).features.values())


class ToyTask(NamedTuple):
    """What a toy federation learns: from which signal, from how many rows (None: most), and how often it sees them.

    One whose models are averaged pre-trains for an epoch.
    """

    signal: str
    n_labeled: int | None = None
    epochs: int = 15
    lr: float = 5e-3
    averaged: bool = False
    trees: bool = False
    boundary: str = "plain"


def _make_task(attack: Attack, signal: str) -> ToyTask:
    if any(need.kinds & OF_TREES for need in attack.needs):
        return ToyTask(signal, trees=True)
    if attack.target == "parameters":
        return ToyTask(signal, epochs=1, averaged=True)
    if Need.SUMS in attack.needs:
        return ToyTask(signal, boundary="sealed-plain")
    if attack.target != "membership":
        return ToyTask(signal)
    return ToyTask("none", n_labeled=100, epochs=200) if signal == "planted" else ToyTask("none", epochs=1, lr=1e-9)


def _estimate_error(metric: str, truth: Tensor) -> float:
    """Return the standard error over all seeds of a guess that knows nothing."""
    if metric == "auc":
        return suite.estimate_auc_error(truth, len(SEEDS))
    return float(1 / np.sqrt(len(SEEDS) * len(truth)))  # of R2: the correlation of independent values


@lru_cache(maxsize=16)
def _get_federation(side: str, task: ToyTask, seed: int, model: tuple[tuple[str, Any], ...]) -> Grown:
    return _train(side, task, seed, model)


def _train(
    side: str,
    task: ToyTask,
    seed: int,
    model: tuple[tuple[str, Any], ...],
    attack: Attack | None = None,
    aux: int = 0,
) -> Grown:
    cell, name = _make_cell(task, seed, model), ADVERSARY[side]
    federation = build_federation(cell, "cpu")
    if task.trees:
        grown = grow_trees(federation)
        return grown._replace(messages=grown.get_messages(name))
    if attack:
        federation.malicious = {name: attack}
    if isinstance(attack, HijackingAttack):
        attack.join(observe_victim_before(federation, federation.parties[name], AuxSpec(n=aux), attack), seed=7)
    transcript = Transcript(frozenset({name}), frozenset(Kind))
    federation.channel.taps.append(transcript)
    if task.averaged:
        averaging = msgspec.structs.replace(cell.model, bottom=(16, 16), encoder="tabular")
        method = registry.build("methods", "fedhssl-simsiam", cell.train, averaging, projector=16, predictor=8)
        trained = method.fit(federation)
    else:
        trained = FedSplitNN(cell.train, cell.model, boundary=registry.load("protocols", task.boundary)).fit(federation)
    trained.predict("test")
    return Grown(trained, tuple(transcript.messages))


def _make_cell(task: ToyTask, seed: int, model: tuple[tuple[str, Any], ...]) -> Cell:
    data = DataSpec() if task.n_labeled is None else DataSpec(n_labeled=task.n_labeled)
    spec = ModelSpec(**{"bottom": (16,), **dict(model)})
    train = TrainSpec(epochs=task.epochs, batch=64, lr=task.lr, pretrain=PretrainSpec(epochs=1, batch=64))
    return make_toy_cell(seed=seed, data=data, train=train, model=spec, signal=task.signal)


@lru_cache(maxsize=16)
def _get_shadows(task: ToyTask, seed: int, model: tuple[tuple[str, Any], ...], count: int) -> Shadows:
    return get_shadows(_make_cell(task, seed, model), count, "cpu")


def select_rows(view: View, split: str) -> Tensor:
    """Return the first rows of ``split`` that are not auxiliary, one percent of all and at least three."""
    n = len(view.features[split])
    rows = torch.arange(n)
    others = rows[~torch.isin(rows, view.aux_rows)] if split == view.aux_split else rows
    return others[: max(3, n // 100)]


def with_wild(view: View, rows: Mapping[str, Tensor], values: Sequence[float] = WILD_VALUES) -> View:
    """Return ``view`` with ``values`` in turn at ``rows`` of each split, in all that has real numbers about them."""

    def spoil(x: Tensor, wild: Tensor, places: Tensor | None = None) -> Tensor:
        if not x.is_floating_point():
            return x
        at = torch.nonzero(torch.isin(torch.arange(len(x)) if places is None else places, wild))[:, 0]
        numbers = torch.tensor([values[k % len(values)] for k in range(len(at))], dtype=x.dtype)
        return x.index_copy(0, at, numbers[:, None].expand(-1, x.shape[1]))

    messages = [
        replace(m, payload={**m.payload, "value": spoil(m.payload["value"], rows[m.split], m.rows)})
        if m.kind in (Kind.EMBEDDING, Kind.GRADIENT) and m.rows is not None and m.split in rows
        else m
        for m in view.messages
    ]
    return replace(
        view,
        features={split: spoil(x, rows[split]) for split, x in view.features.items()},
        predictions={split: spoil(x, rows[split]) for split, x in view.predictions.items()},
        aux_labels=spoil(view.aux_labels, rows[view.aux_split], view.aux_rows),
        messages=tuple(messages),
    )


def copy_all(view: View) -> dict[str, Any]:
    """Return copies of everything that an attack might change, by what it is called."""
    kept = (_keep(attribute.name, getattr(view, attribute.name)) for attribute in fields(view) if attribute.init)
    return {**suite.get_generators(), **dict(chain.from_iterable(kept))}


def _keep(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor):
        yield name, value.clone()
    elif isinstance(value, nn.Module):
        yield f"the {name}'s mode", [module.training for module in value.modules()]
        yield f"what the {name} trains", [parameter.requires_grad for parameter in value.parameters()]
    parts = value.payload if isinstance(value, Message) else value
    parts = value.state_dict() if isinstance(value, nn.Module) else parts
    parts = dict(enumerate(parts)) if isinstance(parts, tuple) else parts
    for key, part in parts.items() if isinstance(parts, Mapping) else ():
        yield from _keep(f"{name}[{key!r}]", part)


class IntegrityConformance(suite.Suite):
    """Checks of one attack on integrity, in a toy federation of two parties and two classes.

    Class attributes:
        aux: how many labels the adversary knows.
    """

    aux: ClassVar[int] = 40

    def make(self) -> IntegrityAttack:
        """Return the attack."""
        raise NotImplementedError

    def test_states_what_it_is(self) -> None:
        """The card is complete, and an earlier version cannot be zero."""
        attack = self.make()
        suite.check_stated(attack, ("name", "side", "target", "needs", "reference", "verified", "version"))
        assert (attack.side, attack.target) == ("passive", "integrity")
        assert attack.name in repr(attack)

    def test_keeps_shape_and_dtype(self) -> None:
        """Whatever it feeds, sends and learns from is of the kind that it stands for, and finite."""
        for hook, value, step in _list_calls(*self._join()):
            result = hook(value.clone(), step)
            assert result.shape == value.shape, f"{hook.__name__} made {tuple(value.shape)} {tuple(result.shape)}"
            assert result.dtype == value.dtype
            assert torch.isfinite(result).all()

    def test_leaves_its_input_untouched(self) -> None:
        """What a hook is given stays as it was: it may be the party's own columns."""
        for hook, value, step in _list_calls(*self._join()):
            given = value.clone()
            hook(given, step)
            assert suite.are_same(given, value), f"{hook.__name__} changed what it was given"

    def test_equal_seeds_give_equal_models(self) -> None:
        """Bit for bit, and the same predictions when asked twice."""
        first, again = (self._train(self.make()) for _ in range(2))
        models, others = (suite.get_parameters(trained.federation) for trained in (first, again))
        assert not suite.list_changed(models, others), "not reproducible"
        assert suite.are_same(first.predict("test"), again.predict("test"))
        assert suite.are_same(first.predict("test"), first.predict("test")), "a prediction depends on those before it"

    def test_leaves_no_trace(self) -> None:
        """The party's columns stay as they were, and so do all global generators."""
        attack, party = self._join()
        before = _copy_all(party)
        for hook, value, step in _list_calls(attack, party):
            hook(value.clone(), step)
        traces = suite.list_changed(before, _copy_all(party))
        assert not traces, f"the attack changed {', '.join(traces)}"

    def test_makes_a_difference(self) -> None:
        """With its defaults, predictions on test rows are others than those of an honest federation."""
        honest, attacked = self._train(None), self._train(self.make())
        assert not suite.are_same(honest.predict("test"), attacked.predict("test")), "the attack changes nothing"

    def test_a_trigger_has_an_aim(self) -> None:
        """An attack with an aim has a trigger in columns or embeddings of every row, and one without has none."""
        attack, party = self._join()
        x = party.features["test"]
        step = Step(0, "predict", torch.arange(len(x)), split="test")
        before, attack.triggered = attack.on_embedding(x.clone(), step), True
        changed = (attack.trigger(x.clone()) != x) | (attack.on_embedding(x.clone(), step) != before)
        assert bool(changed.any(dim=1).float().mean() > 0.5) is (attack.aim is not None)

    def _join(self) -> tuple[IntegrityAttack, Party]:
        attack, federation = self.make(), make_toy_federation(seed=0)
        return attack, self._prepare(attack, federation)

    def _prepare(self, attack: IntegrityAttack, federation: Federation) -> Party:
        party = federation.parties[ADVERSARY["passive"]]
        attack.join(observe_before(federation, party, AuxSpec(n=self.aux)), seed=7)
        return party

    def _train(self, attack: IntegrityAttack | None) -> Trained:
        federation = make_toy_federation(seed=0)
        if attack:
            federation.malicious = {self._prepare(attack, federation).name: attack}
        return FedSplitNN(TrainSpec(epochs=2, batch=64, lr=5e-3), ModelSpec(bottom=(8,))).fit(federation)


def _list_calls(attack: IntegrityAttack, party: Party) -> Iterator[tuple[Any, Tensor, Step]]:
    rows = torch.arange(100)
    for step in (Step(0, "train", rows), Step(1, "train", rows), Step(0, "predict", rows, split="test")):
        h = torch.randn(len(rows), 3, generator=torch.Generator().manual_seed(step.number))
        yield attack.on_features, party.features[step.split][rows], step
        yield attack.on_embedding, h, step
        if step.learns:
            yield attack.on_gradient, h, step


def _copy_all(party: Party) -> dict[str, Any]:
    return suite.get_generators() | {f"the {split} columns": x.clone() for split, x in party.features.items()}


class RecordingConformance(suite.Suite):
    """Checks of one attack on recordings of an encrypted layer.

    Class attributes:
        aux: of how many samples the adversary knows the answer.
        side: of the adversary, for an attack that either side can mount.
    """

    aux: ClassVar[int] = 8
    side: ClassVar[str] = "passive"
    _contents: ClassVar[Sequence[bytes]] = ()

    def make(self) -> Attack:
        """Return the attack."""
        raise NotImplementedError

    def record(self, folder: Path) -> tuple[Recording, Recording]:
        """Return the recordings of the passive and the active party, from which the attack infers something.

        By default without messages, as a linear layer in clear would have made them.
        """
        return LinearRun(rows=72, steps=12, width=3, batch=24, rounding=2.0**-51).record(folder)

    def test_refuses_a_poor_view(self) -> None:
        """The recording that is missing is named, and so is the wrong role."""
        attack = self.make()
        with self._get_scene() as (question, _):
            with suite.expect_refusal(InsufficientView, naming=Need.RECORDING.name):
                attack(replace(question.view, recording=None), seed=0)
            if attack.side != "either":
                other = "active" if attack.side == "passive" else "passive"
                with suite.expect_refusal(InsufficientView, naming=other):
                    attack(replace(question.view, side=other), seed=0)

    def test_equal_seeds_give_equal_guesses(self) -> None:
        """Bit for bit, also where the same recording is opened anew, so that nothing is remembered of the first."""
        attack = self.make()
        with self._get_scene() as (question, path):
            first, again = (attack(replace(question.view, recording=Recording(path)), seed=0) for _ in range(2))
        assert are_equal(first, again), f"{attack!r} is not reproducible"

    def test_leaves_no_trace(self) -> None:
        """The view, the recording and all global generators stay as they were."""
        with self._get_scene() as (question, path):
            before, content = copy_all(question.view), path.read_bytes()
            self.make()(question.view, seed=0)
            traces = suite.list_changed(before, copy_all(question.view))
            assert not traces, f"the attack changed {', '.join(traces)}"
            assert path.read_bytes() == content, "the attack changed the recording"

    def test_reads_only_what_its_party_has(self) -> None:
        """The guess is the same where the other role's recording is not there and the answers are others."""
        attack = self.make()
        with self._get_scene() as (question, path):
            beside = attack(replace(question.view, recording=Recording(path)), seed=0)
            for answers in question.truth.labels.values():
                answers.neg_().add_(1)
            with tempfile.TemporaryDirectory() as folder:
                alone = Path(folder) / path.name
                alone.write_bytes(path.read_bytes())
                for other in path.parent.iterdir():
                    other.unlink()
                apart = attack(replace(question.view, recording=Recording(alone)), seed=0)
        assert are_equal(beside, apart), "the guess follows what the adversary cannot see"

    def test_refuses_damaged_rows(self) -> None:
        """Rows that a note lacks, numbers that are not finite and changed bytes end in an error, not in a guess."""
        attack = self.make()
        with self._get_scene() as (question, path):
            for damage, named in (("missing", "other notes"), ("not finite", "finite"), ("bytes", "checksum")):
                damaged = path.with_name("damaged.recording")
                _damage(path, damaged, damage)
                with suite.expect_refusal(DataError, naming=named):
                    attack(replace(question.view, recording=Recording(damaged)), seed=0)
                damaged.unlink()

    @contextmanager
    def _get_scene(self) -> Iterator[tuple[Question, Path]]:
        """Give the question to the attack's role, and its recording beside that of the other role; recorded once."""
        attack, cls = self.make(), type(self)
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder) / f"{role}.recording" for role in ROLES]
            if not cls._contents:
                with tempfile.TemporaryDirectory() as made:
                    cls._contents = [recording.path.read_bytes() for recording in self.record(Path(made))]
            for path, content in zip(paths, cls._contents, strict=True):
                path.write_bytes(content)
            side = self.side if attack.side == "either" else attack.side
            path, other = paths[::-1] if side == "active" else paths
            audit = open_recording(path, other, aux=AuxSpec(n=self.aux))
            yield audit.build_question(attack, audit.joint(0)), path


def are_equal(a: Guess, b: Guess) -> bool:
    """Whether two guesses are equal bit for bit, with their rows, facts and notes."""
    tensors = all(
        first.keys() == second.keys() and all(suite.are_same(value, second[split]) for split, value in first.items())
        for first, second in ((a.scores, b.scores), (a.rows, b.rows))
    )
    return tensors and (a.facts, a.notes, a.untested) == (b.facts, b.notes, b.untested)


def _damage(path: Path, damaged: Path, damage: str) -> None:
    if damage == "bytes":
        content = bytearray(path.read_bytes())
        content[len(content) // 8] ^= 1
        damaged.write_bytes(content)
        return
    recording = Recording(path)
    with RecordingWriter(damaged, recording.header) as writer:
        for step in recording.steps():
            writer.begin(step.number, rate=step.rate)
            for message in step.messages:
                writer._write(message)
            spoiled = [name for name in step.notes if NOTES[name][0] == "B"][-1] if step.number == 1 else None
            for name, array in step.notes.items():
                if name != spoiled:
                    writer.note(name, array)
                elif damage == "missing":
                    writer.note(name, array[:-1])
                else:
                    writer._write(Note(name, "<f8", array.shape, np.full(array.shape, np.nan).tobytes()))
