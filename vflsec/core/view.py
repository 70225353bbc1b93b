"""The adversary's View, the scorer's GroundTruth and the attack's Guess; the view never contains the truth."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from vflsec.base.errors import BadGuess
from vflsec.base.layout import Layout
from vflsec.core.knowledge import KNOWLEDGE, Knowledge
from vflsec.core.knowledge import Need as Need  # what a view holds, and what attacks say of it, is imported together
from vflsec.core.message import Message

if TYPE_CHECKING:
    from vflsec.cipher.recording import Recording
    from vflsec.results.canaries import Canaries

Result = TypeVar("Result")
P = ParamSpec("P")


class Shadows(NamedTuple):
    """What the joint models of S federations like the attacked one say of the candidates.

    Attributes:
        logits: (S, n, C), as in ``View.predictions``.
        members: (S, n) whether each was trained on the candidate.
    """

    logits: Tensor
    members: Tensor


@dataclass(frozen=True)
class View:
    """Everything that one adversary legitimately has. The truth is not in it.

    The target of the attack determines what is inferred of a row, and what ``aux_labels`` hold for auxiliary samples:

    ============ ============================================= ==================
    target       what is inferred of a row                     ``aux_labels``
    ============ ============================================= ==================
    labels       its class, of C                               (n,) long
    attribute    a column of the victim, of A categories       (n,) long
    features     all columns of the victim, encoded            (n, d) float
    text         the word at each of T positions, by number    (n, T) long
    membership   1 if it was trained on, else 0                (n,) long
    parameters   of each parameter, its distance to the mean   none are known
    exposure     nothing: what is exposed is counted           none are known
    ============ ============================================= ==================

    About a recording of the encrypted layer, the rows are the samples that it numbers, in ascending order; the
    parameters are the entries of W in each step, in order (``vflsec.audit.recordings``), and the labels of auxiliary
    samples are known.

    Attributes:
        party: its name.
        side: ``passive`` or ``active``; the name of an adversary that is no party.
        n_classes: C, A, d, T, 2 or 1: how many numbers are guessed of each row.
        features: its own columns by split (``train``, ``test``; or ``candidates`` for membership); each (n, p). For
            ``parameters`` p is 0.
        model: its own bottom model, (B, p) -> (B, cut), or None.
        aux_rows: (n,) positions of the auxiliary samples in the first of these splits.
        aux_labels: the known answers for them.
        messages: that it sent or received, in order.
        unlabeled: (m, p) its further rows, aligned without a label or held by it alone; none of them is scored.
        victim: name of the attacked party, if any.
        layout: of the victim's columns; parties agree on it before they train.
        victim_model: the victim's bottom model, if the threat model includes it (``aux.victim_model``).
        top: the active party's top model, on the list of all parties' embeddings, its own first.
        labels: (n,) the active party's own labels by split.
        predictions: (n, C) logits of the joint model by split, if the adversary has asked for them; in an audit (n, d),
            as it received them.
        adaptive: whether it uses all releases of a row; else only the first, as if noise were drawn once.
        places: for a split of messages that is not in ``features``, the positions (n_train,) of the training rows
            among its rows; messages of pre-training are about ``aligned`` rows.
        models: further models (B, p) -> (B, d) on its own columns that it can assemble from messages, by name.
        parties: names of all parties of the federation, the active party first; public.
        agreed: options of the training that all parties agree on, by name; empty where they are not known.
        shadows: of federations that the adversary trained itself, if the attack is on membership and asks for any.
        recording: of the adversary's role in an encrypted layer; it cannot be changed.
        defended: by split, embeddings (n, d) of own texts as defenses changed them for training; empty without any.
        further: what ``Knowledge.read`` returned, by the name of the kind.
        memo: results computed from this view, shared by ``copy_private`` and ``restrict``; they must not be changed.
            The key of a result names the auxiliary rows if it depends on them.
        common: results shared with the views of other attacks on the same samples, see ``memoize_for_all``.
    """

    party: str
    side: str
    n_classes: int
    features: Mapping[str, Tensor]
    model: nn.Module | None
    aux_rows: Tensor
    aux_labels: Tensor
    messages: tuple[Message, ...] = ()
    unlabeled: Tensor | None = None
    victim: str | None = None
    layout: Layout | None = None
    victim_model: nn.Module | None = None
    top: nn.Module | None = None
    labels: Mapping[str, Tensor] = field(default_factory=dict)
    predictions: Mapping[str, Tensor] = field(default_factory=dict)
    adaptive: bool = True
    places: Mapping[str, Tensor] = field(default_factory=dict)
    models: Mapping[str, nn.Module] = field(default_factory=dict)
    parties: tuple[str, ...] = ()
    agreed: Mapping[str, Any] = field(default_factory=dict)
    shadows: Shadows | None = None
    recording: Recording | None = None
    defended: Mapping[str, Tensor] = field(default_factory=dict)
    further: Mapping[str, Any] = field(default_factory=dict)
    memo: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    common: dict[str, Tensor | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    def memoize(self, name: str, rng: torch.Generator, compute: Callable[[], Result]) -> Result:
        """Return what ``compute`` returns for these auxiliary rows and this state of ``rng``, computed once.

        Views that share ``memo`` share the result, which must not be changed. ``rng`` ends as after the computation.
        """
        key = (name, *self.aux_rows.tolist(), rng.get_state().numpy().tobytes())
        if key not in self.memo:
            self.memo[key] = compute(), rng.get_state()
        result: Result
        result, state = self.memo[key]
        rng.set_state(state)
        return result

    @property
    def aux_split(self) -> str:
        """The split of the auxiliary samples."""
        return next(iter(self.features), "train")

    def has(self, more: Iterable[Knowledge] = ()) -> frozenset[Knowledge]:
        """Return the kinds of knowledge in this view, among those of vflsec and ``more``."""
        return frozenset(need for need in (*KNOWLEDGE, *more) if self._has(need))

    def _has(self, need: Knowledge) -> bool:
        if need.kinds:
            about = {*self.features, *self.places}
            return any(self._is_in(need, m) and (m.rows is None or m.split in about) for m in self.messages)
        if need.read or not need.held_by:
            return need.name in self.further
        return all(_is_there(getattr(self, name)) for name in need.held_by)

    def _is_in(self, need: Knowledge, message: Message) -> bool:
        """Whether what ``need`` names is in ``message``."""
        party = message.sender if need.sent else message.receiver
        return message.kind in need.kinds and party in self.party.split("+")

    def drop(self, *needs: Knowledge) -> View:
        """Return the same view without what ``needs`` name."""
        emptied = {name: _make_empty(getattr(self, name)) for need in needs for name in need.held_by}
        messages = tuple(m for m in self.messages if not any(self._is_in(need, m) for need in needs))
        further = {name: known for name, known in self.further.items() if name not in map(str, needs)}
        return replace(self, messages=messages, further=further, **emptied)

    def copy_private(self) -> View:
        """Return a copy whose tensors and models an attack may change."""
        copies = {attribute.name: _copy(getattr(self, attribute.name)) for attribute in fields(self) if attribute.init}
        return self.with_shared_memo(replace(self, **copies))

    def restrict(self, aux: Tensor) -> View:
        """Return the same view with only the auxiliary samples at positions ``aux`` of the auxiliary set."""
        return self.with_shared_memo(replace(self, aux_rows=self.aux_rows[aux], aux_labels=self.aux_labels[aux]))

    def with_shared_memo(self, other: View) -> View:
        """Return ``other``, which differs in auxiliary samples or by ``tamed`` only, with the memo of this view."""
        object.__setattr__(other, "memo", self.memo)  # a frozen dataclass
        self.share_common(other)
        return other

    def share_common(self, other: View) -> None:
        """Share ``common`` with ``other``, a view of the same samples and noised sums that may hold other messages."""
        object.__setattr__(other, "common", self.common)

    def drop_federation(self, fresh_model: nn.Module | None) -> View:
        """Return the view of the same party alone: with an untrained model of the same shape, and no messages."""
        view = self.drop(*(need for need in KNOWLEDGE if not need.is_local))
        return replace(view, model=fresh_model, messages=(), top=None, defended={}, further={})


def memoize(function: Callable[Concatenate[View, P], Result]) -> Callable[Concatenate[View, P], Result]:
    """Let ``function`` be computed once for a view and its copies: for each choice of its other arguments.

    Copies can differ in auxiliary rows, so it must not depend on these. The result must not be changed.
    """
    parameters = signature(function)

    @wraps(function)
    def compute(view: View, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        bound = parameters.bind(view, *args, **kwargs)
        bound.apply_defaults()
        key = (function.__module__, function.__qualname__, *list(bound.arguments.values())[1:])
        if key not in view.memo:
            view.memo[key] = function(view, *args, **kwargs)
        result: Result = view.memo[key]
        return result

    return compute


def memoize_for_all(function: Callable[[View], Tensor | None]) -> Callable[[View], Tensor | None]:
    """Compute ``function`` of noised sums once for all attacks that read them on the same samples.

    It must not depend on other messages or on auxiliary rows. Each attack receives a copy of the result.
    """

    @wraps(function)
    def compute(view: View) -> Tensor | None:
        if function.__qualname__ not in view.common:
            view.common[function.__qualname__] = function(view)
        result = view.common[function.__qualname__]
        return None if result is None else result.clone()

    return compute


def _is_there(value: Any) -> bool:
    """Whether an attribute of a view holds anything; a matrix without columns is nothing."""
    if isinstance(value, Mapping):
        return any(x.shape[1] for x in value.values())
    return len(value) > 0 if isinstance(value, Tensor) else value is not None


def _make_empty(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {}
    return value[:0] if isinstance(value, Tensor) else None


def _copy(value: Any) -> Any:
    """Return ``value`` with copies of the tensors and models in it."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, nn.Module):
        return copy.deepcopy(value)
    if isinstance(value, Message):
        return value.copy_private()
    if isinstance(value, Mapping):
        return {key: _copy(entry) for key, entry in value.items()}
    if isinstance(value, Shadows):
        return Shadows(*map(_copy, value))
    return tuple(map(_copy, value)) if type(value) is tuple else value


@dataclass(frozen=True)
class GroundTruth:
    """The true answers by split, as in ``View.aux_labels``; only the scorer reads them.

    Attributes:
        labels: the answers.
        canaries: the training rows whose labels were tossed, if the answers are these labels.
    """

    labels: Mapping[str, Tensor] = field(repr=False)
    canaries: Canaries | None = field(default=None, repr=False)

    def shuffle_labels(self, rng: torch.Generator) -> GroundTruth:
        """Return a ground truth with permuted labels in each split, against which every attack must be at chance."""
        return GroundTruth({s: y[torch.randperm(len(y), generator=rng)] for s, y in self.labels.items()})


class Fact(NamedTuple):
    """What an attack measures without the truth; ``consistency`` says how well all fits together, and proves nothing.

    Attributes:
        of: ``messages``, ``scores``, ``labels``...
        metric: ``share``, ``determined`` or ``consistency``, from 0 to 1.
        value: of it.
        n: how many of them there are.
        chance: what it is without any information.
    """

    of: str
    metric: str
    value: float
    n: int
    chance: float = 0.0


@dataclass(frozen=True)
class Guess:
    """The result of an attack.

    Attributes:
        scores: per split, (n, C), of which only order and argmax are used; for features the values, (n, d); for text
            the numbers of words, (n, T).
        prior: per split, what the adversary would guess without the federation, if that is to be compared word by word.
        whole: per split, the texts (n, T) that are likeliest as a whole, where the likeliest words give others.
        converged: False if a loss was still falling when the budget ended, None if nothing was fitted.
        budget: for the report (steps, trials...).
        rows: by split, the positions (k,) of the rows that are guessed, if these are not all: scores are then (k, C).
        facts: what is reported where there is no truth to score the guess by.
        notes: what the attack has read, in sentences.
        untested: what it could not test, each with the reason.
    """

    scores: Mapping[str, Tensor] = field(default_factory=dict)
    prior: Mapping[str, Tensor] = field(default_factory=dict, kw_only=True)
    whole: Mapping[str, Tensor] = field(default_factory=dict, kw_only=True)
    converged: bool | None = None
    budget: Mapping[str, float] = field(default_factory=dict)
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    facts: tuple[Fact, ...] = ()
    notes: tuple[str, ...] = ()
    untested: tuple[str, ...] = ()

    def check(self, view: View) -> Guess:
        """Return this guess detached, after checking that it fits ``view``.

        Raises:
            BadGuess: an unknown split, a wrong shape, or a score that is not finite.
        """
        if not self.scores and not self.facts:
            raise BadGuess("expected a guess for at least one split, got none")
        for name, spent in self.budget.items():
            if not isinstance(spent, int | float):
                raise BadGuess(f"expected a number for budget {name!r}, got {type(spent).__name__}")
        for split, scores in self.scores.items():
            if split not in view.features:
                raise BadGuess(f"expected a guess for {sorted(view.features)}, got one for {split!r}")
            shape = (len(self.rows.get(split, view.features[split])), view.n_classes)
            if tuple(scores.shape) != shape:
                raise BadGuess(f"expected {split} scores of shape {shape}, got {tuple(scores.shape)}")
            if not scores.is_floating_point():
                raise BadGuess(f"expected {split} scores of real numbers, got {scores.dtype}")
            if not torch.isfinite(scores).all():
                raise BadGuess(f"expected finite {split} scores, got {(~torch.isfinite(scores)).sum()} that are not")
        for split, texts in self.whole.items():
            if split not in self.scores or texts.shape != self.scores[split].shape or not torch.isfinite(texts).all():
                raise BadGuess(f"expected finite whole texts of the shape of {split} scores, got {tuple(texts.shape)}")
        detached = [{split: x.detach().cpu() for split, x in of.items()} for of in (self.scores, self.whole)]
        return replace(self, scores=detached[0], whole=detached[1])
