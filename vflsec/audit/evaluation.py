"""Attacks a system that was trained elsewhere, once for each draw of auxiliary labels, and writes records."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, cast

import msgspec
import numpy as np
import pandas as pd
import tomli_w
import torch
from torch import nn

from vflsec.audit.subject import Subject
from vflsec.base.errors import InsufficientView, UsageError, clean
from vflsec.base.seeds import derive
from vflsec.core.attack import Attack
from vflsec.core.message import Kind, Message
from vflsec.core.method import Trained
from vflsec.core.view import Need
from vflsec.data.partition import Partition
from vflsec.nn.encoders import reinitialize
from vflsec.results.records.manifest import AUDITED, Manifest
from vflsec.results.records.schema import BaselineResult, Result
from vflsec.run.cell import Technique, digest
from vflsec.run.describe import describe_attack, describe_data, describe_provenance, list_baselines, list_rows
from vflsec.run.engine import list_reasons
from vflsec.run.mounting import expand_victims, is_baseline, with_columns
from vflsec.run.plan import Baseline, Trial, list_attacks, make_alone_attack, resolve
from vflsec.run.questions import Question, ask
from vflsec.run.runner import Task, describe_run, try_attack
from vflsec.run.spec import AttackSpec, AuxSpec

VERSION = 1  # of what an audit makes of its material: part of every key
# the way out where an attack reads messages and there are none
RECORD = "record a transcript while it is trained; of a checkpoint, name it with --messages"


@dataclass(frozen=True)
class SystemAudit:
    """What is to be measured.

    Attributes:
        subject: the system.
        data: the auditor's data, split into the rows that it was and was not trained on.
        joint: returns the federation with what was trained, for a draw of auxiliary labels.
        apart: returns it without, as if the adversary had never joined.
        messages: that the adversary sent or received.
        head: what is above the cut layer (``model.head``); None if it is not known.
        attacks: that are run.
        mountable: the names of all attacks that can be run.
        exclusions: why each other attack cannot be run.
        aux: the auxiliary labels.
        draws: how often these are drawn.
        dataset: the name of the data, and a hash of it.
        predictions: (n, d) of the joint model that the adversary received, by split.
        aux_ids: the rows whose labels the adversary knows, if they are given; there is one draw then.
        spent: the privacy that each defense of the training has spent, as in a result.
        misfit: why no gate holds: what does not belong to the data, or may not; empty if all does.
        confirmed: whether the user has checked that it does.
        declared: whether a defense was on in the training.
        command: the words of the command line.
        values: none, since an audit is no point of a sweep.
    """

    subject: Subject
    data: Partition
    joint: Callable[[int], Trained]
    apart: Callable[[int], Trained]
    messages: tuple[Message, ...]
    aux: AuxSpec
    draws: int
    dataset: tuple[str, Any]
    head: str | None = None
    predictions: Mapping[str, torch.Tensor] = field(default_factory=dict)
    aux_ids: pd.Index | None = None
    spent: Sequence[dict[str, Any]] = ()
    attacks: Sequence[Technique] = ()
    mountable: Sequence[str] = ()
    exclusions: Mapping[str, str] = field(default_factory=dict)
    misfit: Sequence[str] = ()
    confirmed: bool = False
    declared: bool = False
    command: Sequence[str] = ()
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def manifest(self) -> Manifest:
        """What a report must know about this audit."""
        name, identity = self.dataset
        return Manifest(
            dataset=name,
            adversary=self.subject.adversary,
            seeds=self.draws,
            target=None,
            selected_on_test=False,
            attacks=[describe_attack(a, a.label, self.subject.adversary, self.data) for a in self.attacks],
            rows=list_rows(self.trials()),
            baselines=list_baselines(self.baselines()),
            settings={"audit": self.subject.name, **self.settings},
            provenance=describe_provenance({"attacks": self.attacks}, {name: identity}, self.command),
            audited=clean(self.subject.name),
            left_out=dict(self.exclusions),
            title=self.data.dataset,
            names=dict(self.data.names),
            misfit=list(self.misfit),
            confirmed=self.confirmed,
            declared=self.declared,
            **describe_data(self.data),
        )

    def to_toml(self) -> str:
        """Return what was audited as the text of ``spec.toml``."""
        return tomli_w.dumps({"audit": self.subject.name, **self.settings})

    def trials(self) -> Iterator[Trial]:
        """Yield each attack with each draw of auxiliary labels."""
        for draw, attack in product(map(self.draw, range(self.draws)), self.attacks):
            yield Trial(method=AUDITED, seed=draw.number, attack=attack, label=attack.label, cell=cast(Any, draw),
                        adversary=self.subject.adversary, aux=self.aux, key=self.key(attack, draw.number))  # fmt: skip

    def baselines(self) -> Iterator[Baseline]:
        """Yield each attack of which the version without the federation is part of *alone*, with each draw."""
        for draw, attack in product(map(self.draw, range(self.draws)), self.attacks_alone):
            yield Baseline(method=AUDITED, seed=draw.number, attack=attack, label=attack.label, cell=cast(Any, draw),
                           adversary=self.subject.adversary, aux=self.aux,
                           key=self.key(attack, draw.number, "alone"))  # fmt: skip

    def draw(self, number: int) -> AuditedDraw:
        """Return a draw of auxiliary labels."""
        return AuditedDraw(self, number)

    @property
    def settings(self) -> dict[str, Any]:
        """What determines the records, besides the attacks."""
        return {
            "sha256": self.subject.fingerprint,
            "party": self.subject.adversary,
            "aux": msgspec.to_builtins(self.aux),
            "draws": self.draws,
            **({"spent": list(self.spent)} if self.spent else {}),
            "train_rows": len(self.data.ids["train"]),
            "test_rows": len(self.data.ids["test"]),
        }

    @property
    def attacks_alone(self) -> list[Technique]:
        """The attacks of which the version without the federation is part of *alone*."""
        named = [attack for attack in self.attacks if not is_baseline(attack)]
        on_labels = any(attack.kind.target == "labels" for attack in self.attacks) and self.subject.side == "passive"
        always = [attack for attack in list_attacks() if is_baseline(attack)] if on_labels else []
        return [*named, *always]

    def key(self, attack: Technique, draw: int, *kind: str) -> str:
        """Return the key of one record."""
        rows = [digest([str(row) for row in self.data.ids[split]]) for split in ("train", "test")]
        who = [self.subject.fingerprint, self.subject.adversary, self.dataset, rows]
        aux = [msgspec.to_builtins(self.aux), None if self.aux_ids is None else digest(sorted(map(str, self.aux_ids)))]
        spent = [list(self.spent)] if self.spent else []
        return digest(["audit", VERSION, *kind, who, attack.identity, attack.spec.options, aux, draw, *spent])

    def build_question(self, attack: Attack, trained: Trained, *, joined: bool = True) -> Question:
        """Return the question to the adversary, without a model if none was handed in; alone, without what it got."""
        messages = self.messages if joined else ()
        question = ask(attack, trained, self.subject.adversary, self.aux, messages)
        view = question.view
        if self.aux_ids is not None and attack.target == "labels":
            ids = pd.Index(self.data.ids["train"].astype(str).astype(object))
            rows = torch.from_numpy(np.flatnonzero(ids.isin(self.aux_ids)))
            view = replace(view, aux_rows=rows, aux_labels=question.truth.labels["train"][rows])
        if joined and attack.target != "membership":
            view = replace(view, predictions={**view.predictions, **self.predictions})
        if self.head is None and isinstance(view.model, nn.Identity):  # stands for a model that was not handed in
            view = replace(view, model=None)
        return question._replace(view=view)


def add_attacks(audit: SystemAudit, wanted: Sequence[AttackSpec]) -> SystemAudit:
    """Return ``audit`` with the attacks that its adversary can mount, and the reason why each other one is left out.

    Args:
        audit: without attacks.
        wanted: attacks by name, which must be possible; empty for all.

    Raises:
        InsufficientView: an attack that was asked for by name cannot be mounted, or none can.
    """
    subject, trained = audit.subject, audit.joint(0)
    others = sorted(list_attacks(), key=lambda attack: (attack.kind.target != "labels", attack.name))
    every = [
        on_victim
        for attack in others
        if not is_baseline(attack)
        for on_victim in expand_victims(attack, subject.adversary, trained.federation)
    ]
    chosen = with_columns([resolve(spec) for spec in wanted], subject.adversary, trained.federation)
    specs = [*chosen, *(attack for attack in every if attack not in chosen)]
    reasons_by_spec = [(spec, _find_obstacle(spec.make(), audit, trained)) for spec in specs]
    for spec, reason in reasons_by_spec[: len(chosen)]:
        if reason is not None:
            cause = next((f"; {note}" for note in subject.notes if Need.MODEL.name in reason and "bottom" in note), "")
            raise InsufficientView(f"attack {spec.name!r} cannot be run on {subject.name}: {reason}{cause}")
    possible = [spec for spec, reason in reasons_by_spec if reason is None]
    exclusions = {spec.label: reason for spec, reason in reasons_by_spec if reason is not None}
    if not possible:
        raise InsufficientView(
            f"expected material for an attack in {subject.name}, found none: {'; '.join(list_reasons(exclusions))}"
        )
    mountable = [spec.label for spec in possible if spec in every]
    attacks = chosen or with_columns(possible, subject.adversary, trained.federation, of_all=possible)
    return replace(audit, attacks=attacks, mountable=mountable, exclusions=exclusions)


def _find_obstacle(attack: Attack, audit: SystemAudit, trained: Trained) -> str | None:
    """Return why an attack cannot be mounted; None if it can."""
    if attack.target == "integrity" or attack.acts_in_training:
        return "acts in training, which is over"
    try:
        view, side = audit.build_question(attack, trained).view, audit.subject.side
        attack.check(view.side, attack.needs)
        missing = sorted(attack.needs - view.has(attack.needs))
        if missing:
            record = any(need.kinds for need in missing) and not audit.messages
            ways = ["choose --party active, which receives them"] * (Need.EMBEDDINGS in missing and side == "passive")
            ways += [RECORD] * record
            way_out = f": {'; '.join(ways)}" if ways else ""
            way_out = f": {Need.SHADOWS.way_out}" if Need.SHADOWS in missing else way_out
            return f"needs {', '.join(map(str, missing))}, which {audit.subject.name} does not show{way_out}"
        attack.check_task(view.n_classes if attack.target == "labels" else None, audit.head)
    except (InsufficientView, UsageError) as error:
        return str(error).replace("--adversary", "--party")
    widths = {m.payload["value"].shape[1] for m in audit.messages if m.kind is Kind.GRADIENT}
    if attack.head == "none" and view.n_classes not in widths:
        sizes = ", ".join(map(str, sorted(widths)))
        return f"needs gradients of {view.n_classes} logits, one for each class; these have {sizes} entries"
    return None


@dataclass(frozen=True)
class AuditedDraw:
    """What the trials of an audit attack: the system, and a draw of auxiliary labels.

    Attributes:
        audit: of the system.
        number: of the draw.
    """

    audit: SystemAudit
    number: int

    @property
    def key(self) -> str:
        """What tells it from other draws."""
        return f"{self.audit.subject.fingerprint}-{self.number}"

    def results(self, task: Task) -> Iterator[Result | BaselineResult]:
        """Yield the records of some trials or baselines of this draw."""
        if task.baselines:
            alone = self.audit.apart(self.number)
            yield from (_score_alone(baseline, alone, self.audit) for baseline in task.baselines)
        if task.rows:
            yield from _make_results(self.audit, task.rows, self.audit.joint(self.number))


def _make_results(audit: SystemAudit, rows: Sequence[Trial], trained: Trained) -> Iterator[Result]:
    questions: dict[tuple[object, ...], Question] = {}  # attacks share what views remember
    for row in rows:
        assert row.attack is not None
        attack, began = row.attack.make(), time.process_time()
        about = (attack.target, attack.metric, getattr(attack, "relative", False), attack.victim, attack.column)
        if about not in questions:
            questions[about] = audit.build_question(attack, trained)
        changes = try_attack(attack, questions[about], trained.federation, audit.aux)
        yield Result(
            key=row.key,
            cell=audit.subject.fingerprint[:16],
            method=AUDITED,
            defenses=[],
            seed=row.seed,
            adversary=row.adversary,
            attack=describe_run(row.attack, attack),
            seconds={"attack": time.process_time() - began},
            notes=[*audit.subject.notes, *(f"{row.label}: {note}" for note in changes.pop("notes", ()))],
            mountable=list(audit.mountable),
            spent=list(audit.spent),
            **changes,
        )


def _score_alone(baseline: Baseline, alone: Trained, audit: SystemAudit) -> BaselineResult:
    attack, began = baseline.attack.make(), time.process_time()
    bare = attack if attack.baseline else make_alone_attack(attack)
    changes: dict[str, Any] = {}
    if bare is not None and audit.aux.n:
        question = audit.build_question(attack, alone, joined=False)
        model, view = question.view.model, question.view
        fresh = reset(model, derive(alone.federation.seed, "alone", view.party)) if model else None
        view = view.drop_federation(fresh)
        if bare.needs <= view.has():
            changes = try_attack(bare, question._replace(view=view), alone.federation, audit.aux)
    return BaselineResult(
        key=baseline.key,
        method=AUDITED,
        seed=baseline.seed,
        adversary=baseline.adversary,
        attack=describe_run(baseline.attack, bare),
        seconds={"attack": time.process_time() - began},
        **changes,
    )


def reset(model: nn.Module, seed: int) -> nn.Module:
    """Return ``model`` with new weights, also where its layers have no ``reset_parameters``.

    A baseline that kept trained weights would look as strong as the attack.
    """
    fresh = reinitialize(model, seed)
    rng = torch.Generator().manual_seed(seed)
    for weights, trained in zip(fresh.parameters(), model.parameters(), strict=True):
        if weights.dim() > 1 and torch.equal(weights, trained):
            with torch.no_grad():
                weights.copy_(torch.randn(weights.shape, generator=rng) / weights[0].numel() ** 0.5)
    return fresh
