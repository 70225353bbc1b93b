"""What an attack is asked, by its target: the adversary's View, the truth for the scorer, the measures of a guess."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vflsec.core.attack import Attack, Target
from vflsec.core.checks import unknown
from vflsec.core.errors import InsufficientView, UsageError
from vflsec.core.federation import Federation
from vflsec.core.layout import Column
from vflsec.core.message import SERVER, SOURCE, Message
from vflsec.core.method import Method, Trained
from vflsec.core.metrics import MEMBERSHIP, VALUES, applicable
from vflsec.core.party import Party
from vflsec.core.seeds import generator
from vflsec.core.view import GroundTruth, Need, View
from vflsec.experiment.adversary import SPLITS, adversary, draw_auxiliary, ground_truth_of, view_of, view_of_source
from vflsec.experiment.spec import AuxSpec


class Question(NamedTuple):
    """One question to one adversary.

    Attributes:
        view: what it has.
        truth: the answer, for the scorer.
        metrics: of its guess; the first is the headline.
    """

    view: View
    truth: GroundTruth
    metrics: Sequence[str]


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
        attack: its target, and for features and attributes its victim and column, say what is asked.
        trained: the federation.
        name: of the adversary, ``passive_1+passive_2`` for colluding parties.
        aux: of how many rows it knows the answer, and whether it knows the victim's model.
        messages: what it heard.
        after: the phase after which it strikes; None for the last.

    Raises:
        UsageError: no such party or column, too few rows, or an attack that asks nothing.
    """
    if attack.target not in ASK:
        raise UsageError(f"attack {attack.name!r} is on {attack.target}, in training: measure it with vflsec eval")
    federation, of_source = trained.federation, about_source(attack, after, trained.method, name)
    if name == SOURCE and not of_source:
        raise InsufficientView(f"attack {attack.name!r} cannot be mounted by {name} but in pre-training")
    if name == SERVER and SERVER in trained.method.observers():
        parties: tuple[Party, ...] = ()
    else:
        parties = (
            (federation.source,) if of_source and name == SOURCE and federation.source else adversary(federation, name)
        )
    if not parties and attack.target != "parameters":
        raise InsufficientView(f"attack {attack.name!r} is on {attack.target}, for parties; {name} has no columns")
    question = (OF_SOURCE if of_source else ASK)[attack.target](attack, trained, parties, aux, messages)
    view = replace(question.view, adaptive=aux.adaptive)
    if after:  # what follows has not been trained
        view = replace(view, top=None, predictions={})
    return question._replace(view=view)


def _labels(
    attack: Attack,  # noqa: ARG001  (one signature for all questions)
    trained: Trained,
    parties: Sequence[Party],
    aux: AuxSpec,
    messages: tuple[Message, ...],
) -> Question:
    federation = trained.federation
    rows = draw_auxiliary(federation.active.labels["train"], federation.n_classes, aux, federation.seed)
    return Question(view_of(trained, parties, rows, messages), ground_truth_of(federation), _class_metrics(federation))


def _features(
    attack: Attack, trained: Trained, parties: Sequence[Party], aux: AuxSpec, messages: tuple[Message, ...]
) -> Question:
    federation, victim = trained.federation, victim_of(attack, trained.federation, parties)
    truth = {split: victim.features[split] for split in _splits(parties, messages)}
    rows = _some(len(truth["train"]), aux, federation.seed)
    return _columns_asked(truth, victim, view_of(trained, parties, rows, messages, tuple(truth)), trained, aux)


def _attribute(
    attack: Attack, trained: Trained, parties: Sequence[Party], aux: AuxSpec, messages: tuple[Message, ...]
) -> Question:
    federation, victim = trained.federation, victim_of(attack, trained.federation, parties)
    column = column_of(attack, victim)
    truth = _categories({split: victim.features[split] for split in _splits(parties, messages)}, column)
    rows = _some(len(truth["train"]), aux, federation.seed)
    return _attribute_asked(truth, victim, view_of(trained, parties, rows, messages, tuple(truth)), trained, aux)


def _splits(parties: Sequence[Party], messages: tuple[Message, ...]) -> tuple[str, ...]:
    """Return whose columns are asked for: training and test rows, and unlabeled ones if messages speak of them."""
    told = {m.split for m in messages if m.receiver in [party.name for party in parties]}
    return (*SPLITS, *(["unlabeled"] if "unlabeled" in told else []))


def _labels_of_source(
    attack: Attack,  # noqa: ARG001
    trained: Trained,
    parties: Sequence[Party],
    aux: AuxSpec,
    messages: tuple[Message, ...],
) -> Question:
    federation = trained.federation
    assert federation.source is not None
    labels = federation.source.labels["source"]
    rows = draw_auxiliary(labels, federation.n_classes, aux, federation.seed)
    view = view_of_source(trained, parties, rows, messages)
    return Question(view, _ground_truth({"train": labels}), _class_metrics(federation))


def _features_of_source(
    attack: Attack, trained: Trained, parties: Sequence[Party], aux: AuxSpec, messages: tuple[Message, ...]
) -> Question:
    victim = victim_of(attack, trained.federation, [trained.federation.active, *parties])
    truth = {"train": victim.features["source"]}
    rows = _some(len(truth["train"]), aux, trained.federation.seed)
    return _columns_asked(truth, victim, view_of_source(trained, parties, rows, messages), trained, aux)


def _attribute_of_source(
    attack: Attack, trained: Trained, parties: Sequence[Party], aux: AuxSpec, messages: tuple[Message, ...]
) -> Question:
    victim = victim_of(attack, trained.federation, [trained.federation.active, *parties])
    truth = _categories({"train": victim.features["source"]}, column_of(attack, victim, "source"))
    rows = _some(len(truth["train"]), aux, trained.federation.seed)
    return _attribute_asked(truth, victim, view_of_source(trained, parties, rows, messages), trained, aux)


def _class_metrics(federation: Federation) -> tuple[str, ...]:
    """Return the metrics of guessed classes, that of the task first."""
    return (federation.metric, *(name for name in applicable(federation.n_classes) if name != federation.metric))


def _columns_asked(truth: Mapping[str, Tensor], victim: Party, view: View, trained: Trained, aux: AuxSpec) -> Question:
    view = replace(_against(victim, view, trained, aux), n_classes=victim.n_features)
    return Question(replace(view, aux_labels=truth["train"][view.aux_rows]), _ground_truth(truth), VALUES)


def _attribute_asked(
    truth: Mapping[str, Tensor], victim: Party, view: View, trained: Trained, aux: AuxSpec
) -> Question:
    n_categories = int(truth["train"].max()) + 1
    view = replace(_against(victim, view, trained, aux), n_classes=n_categories)
    return Question(
        replace(view, aux_labels=truth["train"][view.aux_rows]), _ground_truth(truth), applicable(n_categories)
    )


def _membership(
    attack: Attack,  # noqa: ARG001
    trained: Trained,
    parties: Sequence[Party],
    aux: AuxSpec,
    messages: tuple[Message, ...],  # noqa: ARG001  (they name the rows that were trained on)
) -> Question:
    """Training rows and as many test rows, shuffled; an active adversary may ask the joint model about them."""
    federation = trained.federation
    rng = generator(federation.seed, "candidates")
    n = min(federation.n_rows("train"), federation.n_rows("test"))
    chosen = {
        split: torch.randperm(federation.n_rows(split), generator=rng)[:n].to(federation.device) for split in _MEMBER
    }
    order = torch.randperm(2 * n, generator=rng).to(federation.device)

    def mixed(by_split: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"candidates": torch.cat([by_split[split][chosen[split]] for split in _MEMBER])[order]}

    is_member = mixed({s: torch.full((federation.n_rows(s),), m, device=federation.device) for s, m in _MEMBER.items()})
    rows = draw_auxiliary(is_member["candidates"], 2, aux, federation.seed)
    view = view_of(trained, parties, rows[:0])  # these are positions among candidates, not among training rows
    asked = {}
    if parties[0].active:
        with federation.without_recording(), torch.no_grad():
            asked = mixed({split: trained.method.predict(federation, split) for split in _MEMBER})
    view = replace(
        view,
        n_classes=2,
        features=mixed(view.features),
        places={},
        labels=mixed(federation.active.labels) if parties[0].active else {},
        predictions=asked,
        aux_rows=rows.to(federation.device),
        aux_labels=is_member["candidates"][rows],
    )
    return Question(view, _ground_truth(is_member), MEMBERSHIP)


def _parameters(
    attack: Attack,
    trained: Trained,
    parties: Sequence[Party],
    aux: AuxSpec,  # noqa: ARG001  (nobody knows a part of them beforehand)
    messages: tuple[Message, ...],
) -> Question:
    """How the shared parameters of one party differ from the mean of all parties; a server has messages alone."""
    federation = trained.federation
    victim, shared = victim_of(attack, federation, parties), trained.method.shared(federation)
    if victim.name not in shared:
        raise InsufficientView(f"attack {attack.name!r} is on averaged models, and {trained.method.name} averages none")
    none = torch.zeros(0, dtype=torch.long, device=federation.device)
    if parties:
        view = replace(view_of(trained, parties, none, messages), labels={}, unlabeled=None, places={})
    else:
        view = View(SERVER, SERVER, 1, {}, None, none, none, messages, parties=tuple(federation.parties))
    truth = {"parameters": (shared[victim.name] - torch.stack(list(shared.values())).mean(dim=0))[:, None]}  # (P, 1)
    asked = {split: values[:, :0] for split, values in truth.items()}
    return Question(replace(view, n_classes=1, features=asked, victim=victim.name), _ground_truth(truth), VALUES)


ASK: Mapping[Target, Callable[[Attack, Trained, Sequence[Party], AuxSpec, tuple[Message, ...]], Question]] = {
    "labels": _labels,
    "attribute": _attribute,
    "features": _features,
    "membership": _membership,
    "parameters": _parameters,
}

OF_SOURCE: Mapping[Target, Callable[[Attack, Trained, Sequence[Party], AuxSpec, tuple[Message, ...]], Question]] = {
    "labels": _labels_of_source,
    "attribute": _attribute_of_source,
    "features": _features_of_source,
}
"""The questions about the source's people."""


def about_source(attack: Attack, after: str | None, method: Method | type[Method], name: str) -> bool:
    """Whether ``attack`` of the adversary ``name`` after a phase is on the source's people, of whom that phase speaks.

    That is every attack of the source itself, and one on labels that reads gradients: there are none about others yet.
    """
    if after is None or after not in method.source_phases or attack.target not in OF_SOURCE:
        return False
    reads_gradients = Need.GRADIENTS in attack.needs | attack.wants
    return name == SOURCE or (name != "active" and attack.target == "labels" and reads_gradients)


_MEMBER = {"train": 1, "test": 0}


def victim_of(attack: Attack, federation: Federation, parties: Sequence[Party]) -> Party:
    """Return the party that ``attack`` is on: the one that it names, or the first that is not of the adversary.

    Of a passive adversary that is the active party, the only one whose messages it receives.

    Raises:
        UsageError: no such party, or the adversary itself.
    """
    others = {party.name: party for party in federation.parties.values() if party not in parties}
    name = attack.victim or next(iter(others), "")
    if name not in others:
        raise UsageError(unknown("victim", name, others))
    return others[name]


def column_of(attack: Attack, victim: Party, split: str = "train") -> Column:
    """Return the victim's column that ``attack`` recovers: the one that it names, or the first of categories.

    Raises:
        UsageError: the victim has no such column, or it is the same for everybody.
    """
    columns = {column.name: column for column in victim.layout.columns}
    if attack.column is not None and attack.column not in columns:
        raise UsageError(unknown(f"column of {victim.name}", attack.column, columns))

    def tells_apart(column: Column) -> bool:
        return int(_categories({"train": victim.features[split]}, column)["train"].max()) > 0

    telling = [column for column in columns.values() if tells_apart(column)]
    if attack.column is None and telling:
        return next((column for column in telling if column.kind == "categorical"), telling[0])
    if attack.column is None or columns[attack.column] not in telling:
        raise UsageError(
            f"expected a column of {victim.name} that is not the same for all training rows, got "
            f"{attack.column or 'none'}: choose another with column=NAME"
        )
    return columns[attack.column]


def _categories(features: Mapping[str, Tensor], column: Column) -> dict[str, Tensor]:
    """Return the category of each row by split; of a number, whether it is above the median of the training rows.

    Categories are those of training rows, the commonest first; a row with any other is -1, and is not scored.
    """
    own = {split: x[:, column.start : column.start + column.width] for split, x in features.items()}
    if column.kind == "numeric":
        median = own["train"].median()
        return {split: (x[:, 0] > median).long() for split, x in own.items()}
    counts = own["train"].sum(dim=0)
    code = torch.full_like(counts, -1, dtype=torch.long)
    order = torch.argsort(counts, descending=True, stable=True)[: int((counts > 0).sum())]
    code[order] = torch.arange(len(order), device=code.device)
    return {split: code[x.argmax(dim=1)] for split, x in own.items()}


def _some(n_rows: int, aux: AuxSpec, seed: int) -> Tensor:
    """Return the sorted positions of the auxiliary samples, drawn as they come."""
    everybody = torch.zeros(n_rows, dtype=torch.long)
    return draw_auxiliary(everybody, 1, AuxSpec(n=aux.n, balanced=False), seed)


def _against(victim: Party, view: View, trained: Trained, aux: AuxSpec) -> View:
    """Return ``view`` with what its party knows of ``victim``."""
    own: nn.Module = trained.method.representation(victim)
    return replace(
        view,
        victim=victim.name,
        layout=victim.layout,
        victim_model=own.eval() if aux.victim_model else None,
    )


def _ground_truth(truth: Mapping[str, Tensor]) -> GroundTruth:
    return GroundTruth({split: y.cpu() for split, y in truth.items()})
