"""Truth and knowledge travel apart: the adversary's View, the scorer's Secret, the attack's Guess."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vflsec.core.errors import BadGuess
from vflsec.core.message import Kind, Message


class Need(StrEnum):
    """What an attack may require of a view."""

    OWN_FEATURES = "own features"
    OWN_MODEL = "own model"
    AUX_LABELS = "auxiliary labels"
    GRADIENTS = "received gradients"
    EMBEDDINGS = "received embeddings"


@dataclass(frozen=True)
class View:
    """All that one adversary legitimately has. It cannot reach the truth, because the truth is not in it.

    Attributes:
        party: its name.
        side: ``passive`` or ``active``.
        n_classes: C.
        features: its own columns by split (``train``, ``test``); each (n, d).
        model: its own bottom model, (B, d) -> (B, cut), or None.
        aux_rows: (n,) positions among the training rows of the samples whose label it knows.
        aux_labels: (n,) those labels.
        messages: what it sent or received, in order.
        unlabeled: (m, d) its further rows, aligned without a label or held by it alone; none of them is scored.
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

    def has(self) -> frozenset[Need]:
        """Return which needs this view meets."""
        received = {message.kind for message in self.messages if message.receiver in self.party.split("+")}
        met = {
            Need.OWN_FEATURES: bool(self.features),
            Need.OWN_MODEL: self.model is not None,
            Need.AUX_LABELS: len(self.aux_rows) > 0,
            Need.GRADIENTS: Kind.GRADIENT in received,
            Need.EMBEDDINGS: Kind.EMBEDDING in received,
        }
        return frozenset(need for need, is_met in met.items() if is_met)

    def private_copy(self) -> View:
        """Return a copy whose tensors and model an attack may change without leaving a trace."""
        return replace(
            self,
            features={split: x.clone() for split, x in self.features.items()},
            model=copy.deepcopy(self.model),
            unlabeled=None if self.unlabeled is None else self.unlabeled.clone(),
            aux_rows=self.aux_rows.clone(),
            aux_labels=self.aux_labels.clone(),
            messages=tuple(message.private_copy() for message in self.messages),
        )

    def knowing(self, aux: Tensor) -> View:
        """Return the same view with only the auxiliary samples at positions ``aux`` of the auxiliary set."""
        return replace(self, aux_rows=self.aux_rows[aux], aux_labels=self.aux_labels[aux])

    def without_federation(self, fresh_model: nn.Module) -> View:
        """Return what the same party would have alone: an untrained model of the same shape, and no messages."""
        return replace(self, model=fresh_model, messages=())


@dataclass(frozen=True)
class Secret:
    """The true labels by split; made by the runner, read by the scorer, shown to nobody."""

    labels: Mapping[str, Tensor] = field(repr=False)

    def shuffled(self, rng: torch.Generator) -> Secret:
        """Return a secret with the labels of each split permuted: every attack must be at chance against it."""
        return Secret({s: y[torch.randperm(len(y), generator=rng)] for s, y in self.labels.items()})


@dataclass(frozen=True)
class Guess:
    """What an attack proposes.

    Attributes:
        scores: per split, (n, C); the larger the likelier. Only their order and their argmax are used.
        converged: False if a loss was still falling when the budget ended, None if nothing was fitted.
        budget: what was spent, for the report (steps, trials...).
    """

    scores: Mapping[str, Tensor]
    converged: bool | None = None
    budget: Mapping[str, float] = field(default_factory=dict)

    def checked(self, view: View) -> Guess:
        """Return this guess detached, after checking that it fits ``view``; we do not trust what an attack says.

        Raises:
            BadGuess: an unknown split, a wrong shape, or a score that is not finite.
        """
        if not self.scores:
            raise BadGuess("expected a guess for at least one split, got none")
        for split, scores in self.scores.items():
            if split not in view.features:
                raise BadGuess(f"expected a guess for {sorted(view.features)}, got one for {split!r}")
            shape = (len(view.features[split]), view.n_classes)
            if tuple(scores.shape) != shape:
                raise BadGuess(f"expected {split} scores of shape {shape}, got {tuple(scores.shape)}")
            if not torch.isfinite(scores).all():
                raise BadGuess(f"expected finite {split} scores, got {(~torch.isfinite(scores)).sum()} that are not")
        return replace(self, scores={split: s.detach().cpu() for split, s in self.scores.items()})


class ThreatModel(NamedTuple):
    """Who attacks and with what; prints itself for the report."""

    adversary: str
    side: str
    behavior: str
    n_aux: int

    def __str__(self) -> str:
        """Return the sentence that heads a table."""
        return f"{self.adversary}, {self.behavior}, {self.n_aux} labeled rows"
