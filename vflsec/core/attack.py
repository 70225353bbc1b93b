"""Base class of attacks: a subclass turns a View into a Guess; everything that must not vary is final here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn

from vflsec.base.errors import BadGuess, InsufficientView, UsageError, clean
from vflsec.base.seeds import make_rng, seed_torch
from vflsec.core.knowledge import Knowledge, Need
from vflsec.core.message import Step
from vflsec.core.scaling import tame
from vflsec.core.view import Guess, View

Target = Literal["labels", "features", "attribute", "text", "membership", "parameters", "exposure", "integrity"]

SURE = 2.0
"""A new threshold must gain more auxiliary labels than it loses by this many standard deviations."""

THRESHOLD = "Two classes: if argmax separates the auxiliary labels badly, a threshold that they support replaces it."
"""How ``apply_threshold`` makes an attack differ from its source."""


class Attack(ABC):
    """An adversary's procedure. It never sees the truth and never computes its own success.

    Class attributes:
        name: short, as in the papers.
        side: who can mount it, ``passive``, ``active`` or ``either`` of them; ``any`` includes those who hear messages
            and are no party, a server that averages.
        target: what it recovers, ``labels``, ``features``, ``attribute``, ``text``, ``membership`` or ``parameters``;
            ``exposure``, where it counts what lies open without guessing; or ``integrity``, where it recovers nothing
            and spoils the joint model.
        metric: of its leak; empty for the usual one of its target.
        needs: what the view must hold.
        wants: what the attack also reads where the view holds it.
        baseline: whether it reads nothing but own columns, so that it is part of *alone* and always run.
        by_row: whether the guess of a row depends on that row's columns and the auxiliary samples alone.
        classes: how many classes there must be; None for any number.
        head: what there must be above the cut layer (``model.head``); None for anything.
        reference: paper and section.
        differs: in what the attack differs from that paper, one sentence each; empty where nothing is known.
        verified: against what the implementation was checked, or "unverified".
        costs: what it takes to run, in words or as O(...); empty where its author does not say.
        fails: where it recovers little; empty where its author does not say.
        contrib: whether it is not verified against a source, or was made for this project.
        stream: name of its random stream; empty for ``name``. An attack that starts from the guess of another one has
            that attack's stream, so that the guess is made once.
        version: raised whenever results change; part of every cache key.

    Attributes:
        victim: the party whose features, attribute or parameters are recovered; None for the first other party.
        column: the attribute that is recovered, by its name; None for the victim's first categorical column.
        shadows: how many federations are trained for ``Need.SHADOWS``, an even number; 0 for none.
    """

    name: ClassVar[str]
    side: ClassVar[Literal["passive", "active", "either", "any"]] = "passive"
    target: ClassVar[Target] = "labels"
    metric: ClassVar[str] = ""
    needs: ClassVar[frozenset[Knowledge]]
    wants: ClassVar[frozenset[Knowledge]] = frozenset()
    baseline: ClassVar[bool] = False
    by_row: ClassVar[bool] = False
    classes: ClassVar[int | None] = None
    head: ClassVar[str | None] = None
    reference: ClassVar[str]
    differs: ClassVar[tuple[str, ...]] = ()
    verified: ClassVar[str]
    costs: ClassVar[str] = ""
    fails: ClassVar[str] = ""
    contrib: ClassVar[bool] = False
    stream: ClassVar[str] = ""
    version: ClassVar[int] = 1
    victim: str | None = None
    column: str | None = None
    shadows: int = 0

    @property
    def search(self) -> Mapping[str, Sequence[Any]]:
        """The options that a search for a stronger attack varies, with the values worth trying; none unless learned."""
        return {}

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Check what a subclass declares.

        Raises:
            TypeError: its needs are no set of ``Need``, or its name would not be printed as it is.
        """
        super().__init_subclass__(**arguments)
        for fact in ("needs", "wants"):
            needs = vars(cls).get(fact, frozenset())
            if not isinstance(needs, property) and not (
                isinstance(needs, set | frozenset) and all(isinstance(need, Knowledge) for need in needs)
            ):
                raise TypeError(f"expected {fact} of {cls.__name__} to be a set of Need, got {needs!r}")
        name = vars(cls).get("name", "")
        if not isinstance(name, property) and clean(str(name)) != name:
            raise TypeError(f"expected a name without control characters for {cls.__name__}, got {name!r}")

    @abstractmethod
    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return a guess for every row of ``view.features``.

        Args:
            view: a private copy; changing it leaves no trace.
            rng: the attacker's own randomness, on the CPU.
        """

    def run_each(self, views: Sequence[View], *, seed: int) -> list[Guess]:
        """Return what ``run`` returns for each view, with the random streams that ``seed`` gives.

        An attack that trains may override this to train on all views at once.
        """
        guesses = []
        for view in views:
            seed_torch(seed)
            guesses.append(self.run(view, rng=torch.Generator().manual_seed(seed)))
        return guesses

    @final
    def __call__(self, view: View, *, seed: int) -> Guess:
        """Check the view, seed, run on a private copy without wild values (``scaling.tame``), check the guess.

        Scores of two classes get a threshold that the auxiliary labels support (``apply_threshold``), if the
        attack reads these labels.

        Raises:
            InsufficientView: the view lacks a need.
            BadGuess: the guess does not fit the view.
        """
        return self.on_each([view], seed=seed)[0]

    @final
    def on_each(self, views: Sequence[View], *, seed: int) -> list[Guess]:
        """Return what the attack returns when it is called with each view."""
        for view in views:
            self.check(view.side, view.has(self.needs))
            self.check_task(view.n_classes)
        devices = {x.device for view in views for x in view.features.values() if x.is_cuda}
        with torch.random.fork_rng(sorted(devices, key=str)), torch.enable_grad():
            guesses = self.run_each([tame(view).copy_private() for view in views], seed=seed)
        return [self.check_guess(guess, view) for guess, view in zip(guesses, views, strict=True)]

    @final
    def check_guess(self, guess: Guess, view: View) -> Guess:
        """Return a guess of this attack, detached and with a threshold that the auxiliary labels support.

        Raises:
            BadGuess: it does not fit the view.
        """
        if not isinstance(guess, Guess):
            raise BadGuess(f"expected attack {self.name!r} to return a Guess, got {type(guess).__name__}")
        guess = guess.check(view)
        binary = view.n_classes == 2 and self.target in ("labels", "attribute")
        return apply_threshold(view, guess) if binary and Need.AUX_LABELS in self.needs | self.wants else guess

    @final
    def check(self, side: str, shown: Iterable[Knowledge]) -> None:
        """Raise InsufficientView if an adversary on ``side`` who sees ``shown`` cannot mount this attack."""
        if self.side not in (side, "any", *(["either"] if side in ("passive", "active") else [])):
            wanted = f"is for the {self.side} side, got an adversary on the {side} side"
            if self.side == "either":
                wanted = f"can be run by a passive or the active party, not by the {side}"
            way_out = "choose --adversary active" if self.side == "active" else "choose another --adversary"
            raise InsufficientView(f"attack {self.name!r} {wanted}: {way_out}")
        missing = sorted(self.needs.difference(shown))
        if missing:
            ways_out = "; ".join(dict.fromkeys(need.way_out for need in missing))
            raise InsufficientView(
                f"attack {self.name!r} needs {', '.join(map(str, missing))}; this adversary has only "
                f"{', '.join(sorted(map(str, shown))) or 'nothing'}: {ways_out}"
            )

    @final
    def check_task(self, n_classes: int | None, head: str | None = None) -> None:
        """Raise InsufficientView if this attack cannot be mounted on a task of C classes, or below a ``model.head``."""
        name = f"attack {self.name!r}"
        if n_classes is not None and self.classes not in (None, n_classes):
            raise InsufficientView(f"{name} is for {self.classes} classes, got {n_classes}: choose another")
        if head is not None and self.head not in (None, head):
            raise InsufficientView(f"{name} needs model.head={self.head}, got {head}: set it, or leave the attack out")

    def alone(self) -> Attack | None:
        """Return the same attacker without the federation, run on ``View.drop_federation``, or None.

        Its leak is the prior: what the adversary could do had it never joined.
        """
        return None

    def optimizer(self, parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer | None:
        """Return the optimizer that a malicious adversary trains its own bottom with, or None to play by the rules."""
        return None

    @property
    def acts_in_training(self) -> bool:
        """Whether this attack changes the adversary's own training, so that it needs a training of its own."""
        return type(self).optimizer is not Attack.optimizer

    def __repr__(self) -> str:
        """Show every option: the label in tables and the id in tests."""
        shown = {key: value for key, value in vars(self).items() if key[0] != "_" and key != "needs"}
        options = ", ".join(f"{key}={value!r}" for key, value in sorted(shown.items()))
        return f"{self.name}({options})"


def apply_threshold(view: View, guess: Guess) -> Guess:
    """Return a guess of two classes with the threshold that the auxiliary labels support; the order of scores is kept.

    The candidate is the threshold with the highest accuracy on the auxiliary labels. It replaces zero if it gains more
    labels than it loses by ``SURE`` standard deviations (a sign test), so that a good threshold is kept, bit for bit.
    Each label counts once: labels drawn evenly from uneven classes weigh the classes alike, and labels drawn at random
    have the base rate of the task. Scores of the auxiliary samples flatter an attack that was fitted on them, but show
    on which side of zero it puts them. Without labels of both classes the guess is unchanged.
    """
    if view.aux_split not in guess.scores or view.aux_split in guess.rows:
        return guess
    margins = {split: s[:, 1].double() - s[:, 0].double() for split, s in guess.scores.items()}
    known, labels = select_known(view, margins[view.aux_split])
    if known is None:
        return guess
    ones = labels == 1
    zero = find_threshold(known, ones, balanced=False)
    before, after = (known > 0) == ones, (known > zero) == ones
    gained, lost = int((after & ~before).sum()), int((before & ~after).sum())
    if gained - lost < SURE * max(1, gained + lost) ** 0.5:
        return guess
    return replace(guess, scores={s: torch.stack([zero - m, m - zero], dim=1) / 2 for s, m in margins.items()})


def find_threshold(known: Tensor, ones: Tensor, *, balanced: bool) -> Tensor:
    """Return the midpoint between two neighboring scores with the highest accuracy, or balanced accuracy.

    ``known`` (n,) are scores, and ``ones`` (n,) says which are of class 1.
    """
    order = torch.argsort(known)
    zeros_below, ones_below = (~ones[order]).cumsum(0), ones[order].cumsum(0)  # with everything up to here as class 0
    n_zeros, n_ones = ((~ones).sum(), ones.sum()) if balanced else (1, 1)
    right = zeros_below / n_zeros + 1 - ones_below / n_ones  # up to a constant
    best = int(right[:-1].argmax())
    return (known[order[best]] + known[order[best + 1]]) / 2


def select_known(view: View, train: Tensor) -> tuple[Tensor | None, Tensor]:
    """Return the scores and labels of the auxiliary samples; no scores if they are of one class."""
    labels = view.aux_labels.cpu()
    return (train.cpu()[view.aux_rows.cpu()] if len(set(labels.tolist())) == 2 else None), labels


When = Literal["train", "predict", "both"]
"""The part of a run in which an attack acts."""


def list_integrity(malicious: Mapping[str, Attack]) -> dict[str, IntegrityAttack]:
    """Return the attacks on integrity among those that parties mount in training, by party."""
    return {name: attack for name, attack in malicious.items() if isinstance(attack, IntegrityAttack)}


class ActingAttack(Attack):
    """An attack by a malicious party that has prepared before training and acts in it; each party has an instance."""

    _seed: int = 0
    _party: str = ""

    @final
    def join(self, view: View, *, seed: int) -> None:
        """Start with the view of the party before training.

        Args:
            view: without models and messages.
            seed: shared by colluding parties.

        Raises:
            UsageError: the party knows too little for this attack.
        """
        self._seed, self._party = seed, view.party
        self.prepare(view.copy_private())

    def prepare(self, view: View) -> None:
        """Prepare the attack before training, for example choose rows."""

    @property
    def acts_in_training(self) -> bool:
        """True, since each cell under attack is a training of its own."""
        return True


class HijackingAttack(ActingAttack):
    """A malicious active party that sends a passive party other gradients than those of the joint model's loss.

    Its own models learn from that loss as agreed, and its own defenses still act on what it sends. It has learned from
    all auxiliary rows when training ends, so that no fold of them can test it.
    """

    side: ClassVar[Literal["active"]] = "active"
    target: ClassVar[Target] = "features"

    @abstractmethod
    def replace_gradient(self, victim: str, h: Tensor, g: Tensor, step: Step) -> Tensor:
        """Return the gradient (B, d) that is sent in place of ``g`` for the received embeddings ``h`` (B, d)."""


class IntegrityAttack(ActingAttack):
    """A malicious passive party that degrades the joint model, or plants a backdoor in it; it infers nothing.

    It acts whenever it sends embeddings for a supervised loss or a prediction, and never in pre-training. Each hook is
    honest unless overridden. The party's own defenses still act on its messages. The ``step`` that a hook receives has
    no labels. Each colluding party has an instance of its own.

    Attributes:
        aim: the class that a trigger causes; None for an attack without a trigger.
        triggered: whether the trigger of ``on_embedding`` is on, in predictions that measure it.
    """

    side: ClassVar[Literal["passive", "active", "either"]] = "passive"
    target: ClassVar[Target] = "integrity"
    needs: ClassVar[frozenset[Knowledge]] = frozenset({Need.FEATURES})
    aim: int | None = None
    triggered: bool = False

    def on_features(self, x: Tensor, step: Step) -> Tensor:
        """Return the input of the party's bottom model in place of its columns ``x`` (B, p)."""
        return x

    def on_embedding(self, h: Tensor, step: Step) -> Tensor:
        """Return the embedding that is sent in place of ``h`` (B, d)."""
        return h

    def on_gradient(self, g: Tensor, step: Step) -> Tensor:
        """Return the gradient that the bottom model learns from in place of the received ``g`` (B, d)."""
        return g

    def trigger(self, x: Tensor) -> Tensor:
        """Return the columns ``x`` (B, p) with the trigger, for an attack with an ``aim``."""
        return x

    @final
    def noise(self, step: Step, device: torch.device) -> torch.Generator:
        """Return a generator of this party in ``step``; every call returns the same stream."""
        return make_rng(self._seed, self._party, step.phase, step.split, step.number, device=device)

    @final
    def joint_noise(self, step: Step, device: torch.device) -> torch.Generator:
        """Return a generator that colluding parties share in ``step``; every call returns the same stream."""
        return make_rng(self._seed, step.phase, step.split, step.number, device=device)

    @final
    def draw_rows(self, rate: float, step: Step) -> Tensor:
        """Return the rows of ``step`` that colluding parties choose, (B,) bool, each with probability ``rate``."""
        device = step.rows.device
        return torch.rand(len(step.rows), generator=self.joint_noise(step, device), device=device) < rate

    @final
    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Raise UsageError, since there is nothing to guess."""
        raise UsageError(f"attack {self.name!r} is on integrity and guesses nothing: measure it with vflsec eval")
