"""Which attacks an adversary can mount; known before anything is trained."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from vflsec.base.checks import expect_known
from vflsec.base.errors import InsufficientView, UsageError
from vflsec.core.attack import ActingAttack, Attack
from vflsec.core.federation import Federation
from vflsec.core.knowledge import KNOWLEDGE, Need
from vflsec.core.message import SERVER, SOURCE, Kind
from vflsec.core.method import Method, Trained
from vflsec.core.protocol import Boundary
from vflsec.run.adversary import get_adversary, get_side, get_victim
from vflsec.run.cell import Technique
from vflsec.run.questions import expect_held, get_column, is_about_source, list_varying
from vflsec.run.spec import AuxSpec


def mount(
    attack: Attack,
    after: str | None,
    party: str,
    aux: AuxSpec,
    method: Method,
    federation: Federation,
    options: Mapping[str, Any],
    *,
    added: Collection[Kind] = (),
    withheld: Collection[Kind] = (),
) -> None:
    """Raise InsufficientView if the adversary ``party`` cannot mount ``attack`` on ``method`` with its ``options``.

    In the last phase, passive parties receive the kinds ``added`` as well, but not those ``withheld``.
    """
    if after is not None:
        expect_phase(attack.name, after, method)
    side = get_side(method, federation, party)
    of_source = is_about_source(attack, after, method, party)
    if party == SOURCE and not of_source:
        phases = ", ".join(f"@{phase}" for phase in method.source_phases)
        raise InsufficientView(f"attack {attack.name!r} cannot be mounted by {SOURCE} but at {phases}, on columns")
    sent, receives = _list_sent(method, after, options, of_source=of_source), method.receives
    if after is None and "passive" in receives:
        passive = receives["passive"] - {*withheld} | {*added}
        sent, receives = sent | {*added}, {**receives, "passive": passive}
    attack.check(
        side,
        [
            need
            for need in {*KNOWLEDGE, *attack.needs}
            if need.select_kinds(side, receives) & sent
            or (side in need.sides and not (need.at_end and after) and (not need.setting or getattr(aux, need.setting)))
        ],
    )
    if side == "passive" and Need.EMBEDDINGS in attack.needs and attack.victim not in (None, federation.active.name):
        raise InsufficientView(
            f"attack {attack.name!r} needs {Need.EMBEDDINGS} of {attack.victim}; {party} receives only those of "
            f"{federation.active.name}: {Need.EMBEDDINGS.way_out}"
        )
    if party not in (SERVER, SOURCE):
        expect_held(attack, get_victim(attack, federation, get_adversary(federation, party)))
    if after and isinstance(attack, ActingAttack):
        raise UsageError(f"expected {attack.name} without a phase, got @{after}: it acts in training itself")
    attack.check_task(federation.n_classes if attack.target == "labels" else None, method.model_spec.head)


def list_instead(protocols: Iterable[tuple[type[Boundary], Any]]) -> frozenset[Kind]:
    """Return the kinds of messages that passive parties receive in place of gradients."""
    return frozenset[Kind]().union(*(boundary.instead for boundary, _ in protocols))


def expect_phase(attack: str, after: str, method: Method) -> None:
    """Raise UsageError unless ``method`` has the phase ``after``, and others after it."""
    if len(method.phases) == 1:
        raise UsageError(
            f"{method.name} has no pre-training, so {attack}@{after} cannot run: choose a method that pre-trains"
        )
    expect_known(method.phases[:-1], **{f"phase of {method.name} after which to attack": after})


def list_mountable(
    attacks: Iterable[Technique], party: str, aux: AuxSpec, trained: Trained, options: Mapping[str, Any]
) -> list[str]:
    """Return those of ``attacks`` that recover something and that the adversary ``party`` can mount on its method.

    An attack on one party stands there once for each party that it can be on, as in ``expand_victims``.
    """
    method, federation = trained.method, trained.federation
    labels, added = [], list_instead(federation.active.defenses.protocols())
    withheld = {Kind.GRADIENT} if added else ()
    for attack in sorted(attacks, key=lambda attack: attack.name) if method.receives else ():
        if is_baseline(attack) or attack.kind.target == "integrity":
            continue
        for on_victim in expand_victims(attack, party, federation):
            try:
                mount(on_victim.make(), None, party, aux, method, federation, options, added=added, withheld=withheld)
            except InsufficientView:
                continue
            labels.append(on_victim.spec.label)
    return labels


def is_baseline(attack: Technique) -> bool:
    """Whether an attack on labels is part of *alone*, whatever else is run."""
    return bool(attack.kind.baseline) and attack.kind.target == "labels"


def expand_victims(attack: Technique, party: str, federation: Federation) -> list[Technique]:
    """Return ``attack``, and the same attack on each party besides the first that it could be on."""
    if not attack.has_option("victim"):
        return [attack]
    others = [name for name in federation.parties if name not in party.split("+")][1:]
    return [attack, *(attack.with_options(victim=name) for name in others)]


EVERY = "all"
"""In place of a column: each one of the victim that is not the same for all training rows."""

QUICK, MAX_COLUMNS = ("attribute",), 30
"""The attacks that ``all`` mounts on every column, if these are no more than so many."""


def with_columns(
    attacks: Sequence[Technique], party: str, federation: Federation, *, of_all: Sequence[Technique] = ()
) -> list[Technique]:
    """Return attacks on a column with its name, and one for each column in place of ``column=all``.

    Those ``of_all`` were not named, since ``all`` stands for them. An attack after a phase keeps its default, since the
    phase may be about other rows.
    """
    chosen: list[Technique] = []
    for original in attacks:
        attack = original
        if not attack.has_option("column") or attack.spec.after or party in (SERVER, SOURCE):
            chosen.append(attack)
            continue
        every = attack.spec.options.get("column") == EVERY
        attack = attack.drop_option("column") if every else attack
        made = attack.make()
        victim = get_victim(made, federation, get_adversary(federation, party))
        columns = list_varying(victim) if every or (original in of_all and attack.name in QUICK) else []
        columns = columns if every or len(columns) <= MAX_COLUMNS else []
        names = [column.name for column in columns or [get_column(made, victim)]]
        chosen += [attack.with_options(column=name) for name in names]
    return [attack for k, attack in enumerate(chosen) if attack not in chosen[:k]]


def _list_sent(
    method: Method, after: str | None, options: Mapping[str, Any], *, of_source: bool = False
) -> frozenset[Kind]:
    """Return the kinds of messages in all phases, or until one, that are about the rows of an adversary's question.

    These are the active party's rows, or the source's.
    """
    until = method.phases
    if after is not None:
        until = method.phases[: method.phases.index(after) + 1]
    phases = [phase for phase in until if (phase in method.source_phases) == of_source]
    return frozenset[Kind]().union(*(method.messages_in(phase, options) for phase in phases))
