"""The question that an attack answers: the adversary's View, the ground truth for the scorer, and the metrics."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vflsec.base.checks import describe_unknown
from vflsec.base.errors import InsufficientView, UsageError
from vflsec.base.layout import EncodedColumn
from vflsec.base.sparse_rows import find_words
from vflsec.core.attack import Attack, Target
from vflsec.core.federation import Federation
from vflsec.core.knowledge import KNOWLEDGE
from vflsec.core.message import SERVER, SOURCE, Message
from vflsec.core.method import Method, Trained
from vflsec.core.party import Party
from vflsec.core.view import GroundTruth, Need, View
from vflsec.results.metrics import MEMBERSHIP, TEXT, VALUES, list_metrics
from vflsec.run.adversary import (
    SPLITS,
    draw_auxiliary,
    draw_auxiliary_rows,
    get_adversary,
    get_victim,
    observe,
    observe_source,
)
from vflsec.run.federation import MEMBER, Candidates, query_model
from vflsec.run.spec import AuxSpec

ON_SOURCE = ("labels", "attribute", "features")
"""The targets of attacks on the source's rows."""


class Question(NamedTuple):
    """One question to one adversary.

    Attributes:
        view: what the adversary has.
        truth: the answer, for the scorer.
        metrics: of its guess; the first is the headline.
        groups: by split, the group of each row, for intervals over seeds.
        further: views of other trainings on the same rows, by which the guess is made as well.
    """

    view: View
    truth: GroundTruth
    metrics: Sequence[str]
    groups: Mapping[str, NDArray[np.integer]] = MappingProxyType({})
    further: Sequence[View] = ()


def ask(
    attack: Attack,
    trained: Trained,
    name: str,
    aux: AuxSpec,
    messages: tuple[Message, ...] = (),
    after: str | None = None,
) -> Question:
    """Return the question that ``attack`` answers.

    Args:
        attack: its target, and for features and attributes its victim and column, determine the question.
        trained: the federation.
        name: of the adversary, ``passive_1+passive_2`` for colluding parties.
        aux: of how many rows it knows the answer, and whether it knows the victim's model.
        messages: that it sent or received.
        after: the phase after which it attacks; None for the last.

    Raises:
        UsageError: no such party or column, too few rows, or an attack that recovers nothing.
        InsufficientView: an adversary that cannot mount it.
    """
    if attack.target not in ASK:
        raise UsageError(f"attack {attack.name!r} is on {attack.target}, in training: measure it with vflsec eval")
    federation, on_source = trained.federation, is_about_source(attack, after, trained.method, name)
    if name == SOURCE and not on_source:
        raise InsufficientView(f"attack {attack.name!r} cannot be mounted by {name} but in pre-training")
    parties: tuple[Party, ...] = ()
    if name == SOURCE and federation.source:
        parties = (federation.source,)
    elif name != SERVER or SERVER not in trained.method.observers():
        parties = get_adversary(federation, name)
    if not parties and attack.target != "parameters":
        raise InsufficientView(f"attack {attack.name!r} is on {attack.target}, for parties; {name} has no columns")
    question = ASK[attack.target](_Case(attack, trained, parties, aux, messages, on_source))
    names = [party.name for party in parties]
    read = {need.name: need.read(trained, names) for need in attack.needs | attack.wants if need.read and parties}
    view = replace(question.view, adaptive=aux.adaptive, further={name: x for name, x in read.items() if x is not None})
    if after:  # later phases have not been trained
        view = replace(view.drop(*(need for need in KNOWLEDGE if need.at_end)), top=None)
    groups = federation.groups
    if on_source and "source" in groups:
        groups = {"train": groups["source"]}
    return question._replace(view=view, groups=question.groups or groups)


def is_about_source(attack: Attack, after: str | None, method: Method | type[Method], name: str) -> bool:
    """Whether ``attack`` of the adversary ``name`` after a phase is on the source's rows, which that phase is about.

    That is every attack of the source itself, and each attack on labels that reads gradients: before the last phase
    there are none about other rows.
    """
    if after is None or after not in method.source_phases or attack.target not in ON_SOURCE:
        return False
    reads_gradients = Need.GRADIENTS in attack.needs | attack.wants
    return name == SOURCE or (name != "active" and attack.target == "labels" and reads_gradients)


def expect_held(attack: Attack, victim: Party) -> None:
    """Raise InsufficientView if ``attack`` recovers columns and the victim holds text, or the other way round."""
    if attack.target in ("features", "attribute", "text") and (attack.target == "text") != victim.holds_text:
        wanted, held = attack.target.replace("features", "columns"), "text" if victim.holds_text else "columns"
        raise InsufficientView(f"attack {attack.name!r} recovers {wanted}, and {victim.name} holds {held}")


class _Case(NamedTuple):
    """Who attacks what: the arguments of each question."""

    attack: Attack
    trained: Trained
    parties: Sequence[Party]
    aux: AuxSpec
    messages: tuple[Message, ...]
    on_source: bool

    @property
    def federation(self) -> Federation:
        return self.trained.federation

    def view(self, aux_rows: Tensor, splits: Sequence[str] = SPLITS) -> View:
        if self.on_source:
            return observe_source(self.trained, self.parties, aux_rows, self.messages)
        return observe(self.trained, self.parties, aux_rows, self.messages, splits)

    def victim(self) -> Party:
        others = [self.federation.active] if self.on_source else []  # whose rows these are not
        victim = get_victim(self.attack, self.federation, [*others, *self.parties])
        expect_held(self.attack, victim)
        return victim

    def columns(self, victim: Party) -> dict[str, Tensor]:
        """The victim's columns by split: training and test rows, and unlabeled ones if messages are about them."""
        if self.on_source:
            return {"train": victim.features["source"]}
        names = [party.name for party in self.parties]
        unlabeled = any(m.split == "unlabeled" and m.receiver in names for m in self.messages)
        return {split: victim.features[split] for split in (*SPLITS, *(["unlabeled"] if unlabeled else []))}


def _ask_labels(case: _Case) -> Question:
    federation = case.federation
    if case.on_source:
        assert federation.source is not None
        labels, canaries = {"train": federation.source.labels["source"]}, None
    else:
        labels = {split: federation.active.labels[split] for split in SPLITS}
        canaries = federation.canaries
    rows = draw_auxiliary(labels["train"], federation.n_classes, case.aux, federation.seed, canaries)
    truth = replace(_make_truth(labels), canaries=canaries)
    return Question(case.view(rows), truth, list_metrics(federation.n_classes))


def _ask_features(case: _Case) -> Question:
    victim = case.victim()
    return _ask_about_victim(case, victim, case.columns(victim), victim.n_features, VALUES)


def _ask_text(case: _Case) -> Question:
    victim = case.victim()
    words = {split: find_words(x, len(victim.layout.vocabulary)) for split, x in case.columns(victim).items()}
    return _ask_about_victim(case, victim, words, words["train"].shape[1], TEXT)


def _ask_attribute(case: _Case) -> Question:
    victim = case.victim()
    column = get_column(case.attack, victim, "source" if case.on_source else "train")
    truth = _to_categories(case.columns(victim), column)
    n_categories = int(truth["train"].max()) + 1
    return _ask_about_victim(case, victim, truth, n_categories, list_metrics(n_categories))


def _ask_about_victim(
    case: _Case, victim: Party, truth: Mapping[str, Tensor], n_classes: int, metrics: Sequence[str]
) -> Question:
    """Return the question about ``truth``, which the adversary knows for auxiliary rows drawn at random."""
    rows = draw_auxiliary_rows(len(truth["train"]), case.aux, case.federation.seed)
    view = case.view(rows, tuple(truth))
    view = replace(
        view,
        n_classes=n_classes,
        aux_labels=truth["train"][view.aux_rows],
        victim=victim.name,
        layout=victim.layout,
        victim_model=case.trained.method.representation(victim).eval() if case.aux.victim_model else None,
    )
    return Question(view, _make_truth(truth), metrics)


def _ask_membership(case: _Case) -> Question:
    """Training rows and as many test rows, shuffled; an active adversary may ask the joint model about them."""
    federation, active = case.federation, case.parties[0].active
    candidates = Candidates.draw(federation.seed, *(federation.n_rows(split) for split in MEMBER))
    is_member = candidates.gather(
        {s: torch.full((federation.n_rows(s),), m, device=federation.device) for s, m in MEMBER.items()}
    )
    rows = draw_auxiliary(is_member, 2, case.aux, federation.seed)
    # Auxiliary rows are positions among candidates, and messages would name the training rows: both stay out here.
    view = observe(case.trained, case.parties, rows[:0])
    view = replace(
        view,
        n_classes=2,
        features={"candidates": candidates.gather(view.features)},
        defended={"candidates": candidates.gather(view.defended)} if view.defended else {},
        places={},
        labels={"candidates": candidates.gather(federation.active.labels)} if active else {},
        predictions={"candidates": candidates.gather(query_model(case.trained))} if active else {},
        aux_rows=rows.to(federation.device),
        aux_labels=is_member[rows],
    )
    drawn = {split: torch.tensor(group) for split, group in federation.groups.items()}
    groups = {"candidates": candidates.gather(drawn).numpy()} if drawn else {}
    return Question(view, _make_truth({"candidates": is_member}), MEMBERSHIP, groups)


def _ask_parameters(case: _Case) -> Question:
    """The difference of one party's shared parameters from the mean of all; nobody knows any of it beforehand."""
    federation, method = case.federation, case.trained.method
    victim, shared = case.victim(), method.local_parameters(federation)
    if victim.name not in shared:
        needs = ", ".join(sorted(map(str, case.attack.needs)))
        raise InsufficientView(f"attack {case.attack.name!r} needs {needs}, and {method.name} has none")
    none = torch.zeros(0, dtype=torch.long, device=federation.device)
    if case.parties:
        view = replace(case.view(none), labels={}, unlabeled=None, places={})
    else:
        view = View(SERVER, SERVER, 1, {}, None, none, none, case.messages, parties=tuple(federation.parties))
    truth = {"parameters": (shared[victim.name] - torch.stack(list(shared.values())).mean(dim=0))[:, None]}  # (P, 1)
    empty = {split: values[:, :0] for split, values in truth.items()}
    view = replace(view, n_classes=1, features=empty, victim=victim.name)
    return Question(view, _make_truth(truth), VALUES)


ASK: Mapping[Target, Callable[[_Case], Question]] = {
    "labels": _ask_labels,
    "attribute": _ask_attribute,
    "text": _ask_text,
    "features": _ask_features,
    "membership": _ask_membership,
    "parameters": _ask_parameters,
}


def get_column(attack: Attack, victim: Party, split: str = "train") -> EncodedColumn:
    """Return the victim's column that ``attack`` names, or its first categorical column."""
    columns = {column.name: column for column in victim.layout.columns}
    if attack.column is not None and attack.column not in columns:
        raise UsageError(describe_unknown(f"column of {victim.name}", attack.column, columns))

    varying = list_varying(victim, split)
    if attack.column is None and varying:
        return next((column for column in varying if column.kind == "categorical"), varying[0])
    if attack.column is None or columns[attack.column] not in varying:
        raise UsageError(
            f"expected a column of {victim.name} that is not the same for all training rows, got "
            f"{attack.column or 'none'}: choose another with column=NAME"
        )
    return columns[attack.column]


def list_varying(victim: Party, split: str = "train") -> list[EncodedColumn]:
    """Return the victim's columns that are not the same for all rows of ``split``."""
    features = {"train": victim.features[split]}
    return [column for column in victim.layout.columns if int(_to_categories(features, column)["train"].max()) > 0]


def _to_categories(features: Mapping[str, Tensor], column: EncodedColumn) -> dict[str, Tensor]:
    """Return the category of each row by split; for a number, whether it is above the median of the training rows.

    Categories are numbered by their frequency in training rows, the commonest first. A row with any other category is
    -1 and is not scored.
    """
    values = {split: x[:, column.start : column.start + column.width] for split, x in features.items()}
    if column.kind == "numeric":
        median = values["train"].median()
        return {split: (x[:, 0] > median).long() for split, x in values.items()}
    counts = values["train"].sum(dim=0)
    code = torch.full_like(counts, -1, dtype=torch.long)
    order = torch.argsort(counts, descending=True, stable=True)[: int((counts > 0).sum())]
    code[order] = torch.arange(len(order), device=code.device)
    return {split: code[x.argmax(dim=1)] for split, x in values.items()}


def _make_truth(truth: Mapping[str, Tensor]) -> GroundTruth:
    return GroundTruth({split: y.cpu() for split, y in truth.items()})
