"""What is audited: messages, embeddings and models of one trained system, as its auditor has them."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
from torch import nn

from vflsec.audit.transcript import INDEX, TranscriptFolder
from vflsec.audit.transcript_lines import AUDITOR, HELD_OUT, Sent
from vflsec.base.checks import describe_unknown
from vflsec.base.errors import DataError, UsageError


@dataclass(frozen=True)
class Subject:
    """A trained system.

    Attributes:
        name: of the file or folder.
        adversary: the party that attacks, as the material calls it.
        side: of the adversary, ``active`` or ``passive``.
        messages: that the adversary sent or received, in order; sender and receiver as vflsec calls them.
        embeddings: the adversary's own bottom model on rows, as a table (n, d) indexed by id; None if there is none.
        model: the adversary's bottom model, (B, columns) -> (B, d); None if there is none.
        predictions: of the joint model that the adversary received, as a table (n, d) indexed by id; or None.
        function: the same as a function of arrays, of which neither weights nor gradients are known; or None.
        inputs: what ``model`` or ``function`` reads, as a table indexed by id; None for the columns as vflsec encodes
            them.
        train: ids that the model was trained on, as far as the material tells.
        test: ids that it was not trained on, likewise.
        fingerprint: a hash of all that was read.
        notes: what the auditor must know, for example what was dropped.
        classes: the number of classes of the task; None if the material does not tell.
    """

    name: str
    adversary: str
    side: str
    fingerprint: str
    messages: Sequence[Sent] = ()
    embeddings: pd.DataFrame | None = None
    predictions: pd.DataFrame | None = None
    model: nn.Module | None = None
    function: Callable[[np.ndarray], np.ndarray] | None = None
    inputs: pd.DataFrame | None = None
    train: pd.Index = field(default_factory=lambda: pd.Index([], dtype=object))
    test: pd.Index = field(default_factory=lambda: pd.Index([], dtype=object))
    notes: Sequence[str] = ()
    classes: int | None = None


def from_transcript(folder: Path, party: str | None = None, given: Mapping[str, str] | None = None) -> Subject:
    """Return the system that a transcript shows to ``party``, by default the observer, or the only passive party.

    The adversary's own embeddings are those that it sent last about each row. ``given`` is what the data call
    ``active``, ``passive_1``, ...

    Raises:
        DataError: the transcript is damaged or empty.
        UsageError: no such party, or several that it could be.
    """
    opened = TranscriptFolder(folder)
    if not opened.parts:
        raise DataError(f"expected finished files in {folder / INDEX}, found none: record the training again")
    aliases = _name_parties(opened.header.parties, given or {})
    standard = {name: alias for alias, name in (given or {}).items()}
    name = _find_adversary(opened, party if party in aliases else standard.get(party or "", party))
    messages: Sequence[Sent] = [
        sent._replace(sender=aliases[sent.sender], receiver=aliases[sent.receiver])
        for sent in opened.messages()
        if name in (sent.sender, sent.receiver)
    ]
    messages, phase_notes = _join_phases(messages)
    messages, step_notes = _number_batches(messages)
    train = _list_ids(m for m in messages if m.split not in HELD_OUT or m.kind == "gradient")
    called = {each: (given or {}).get(alias, alias) for each, alias in aliases.items()}
    renamed = {each: alias for each, alias in called.items() if each not in (alias, aliases[each])}
    return Subject(
        name=folder.name,
        adversary=aliases[name],
        side=opened.header.parties[name],
        fingerprint=opened.fingerprint,
        messages=messages,
        embeddings=collect_last(m for m in messages if m.kind == "embedding" and m.sender == aliases[name]),
        predictions=collect_last(m for m in messages if m.kind == "prediction" and m.receiver == aliases[name]),
        train=train,
        test=_list_ids(m for m in messages if m.split in HELD_OUT).difference(train),
        notes=[
            *opened.notes,
            *(f"{each} is called {alias} here" for each, alias in renamed.items()),
            *phase_notes,
            *step_notes,
        ],
        classes=opened.header.classes,
    )


def _join_phases(messages: Sequence[Sent]) -> tuple[list[Sent], list[str]]:
    """Return messages whose phases differ by a number at the end, such as one for each epoch, as of one; and notes."""
    phases: dict[str, dict[str, None]] = {}
    for m in messages:
        phases.setdefault(_get_stem(m.phase), {})[m.phase] = None
    joined = {stem: names for stem, names in phases.items() if len(names) > 1}
    notes = [f"phases {join_names(names, 2)} are read as one, {stem}" for stem, names in joined.items()]
    return [m._replace(phase=_get_stem(m.phase)) if _get_stem(m.phase) in joined else m for m in messages], notes


def _get_stem(phase: str) -> str:
    return re.sub(r"[^A-Za-z]*\d+$", "", phase) or phase


def _number_batches(messages: Sequence[Sent]) -> tuple[list[Sent], list[str]]:
    """Return messages of which all of one kind, phase and step are of one batch; and notes.

    Attacks join such messages, which several parties send or receive. Where steps begin again in each epoch, or are of
    other rows, batches are counted in their order: one ends before a sender repeats itself, or other rows come.
    """
    last: dict[tuple[str, ...], int] = {}
    rows: dict[tuple[str, str, int], np.ndarray] = {}
    unclear: dict[str, None] = {}
    for m in messages:
        if m.kind == "nodes":  # whose steps are trees, of several levels
            continue
        route = (m.kind, m.sender, m.receiver, m.phase)
        of_step = rows.setdefault((m.kind, m.phase, m.step), m.rows)
        if m.step <= last.get(route, -1) or not np.array_equal(of_step, m.rows):
            unclear[m.phase] = None
        last[route] = m.step
    batches: dict[tuple[str, str], int] = {}
    sent: dict[tuple[str, str], set[tuple[str, str]]] = {}
    current: dict[tuple[str, str], np.ndarray] = {}
    numbered = []
    for m in messages:
        step = m.step
        if m.phase in unclear and m.kind != "nodes":
            where, pair = (m.phase, m.kind), (m.sender, m.receiver)
            if pair in sent.get(where, {pair}) or not np.array_equal(current[where], m.rows):
                batches[where] = batches.get(where, -1) + 1
                sent[where], current[where] = set(), m.rows
            sent[where].add(pair)
            step = batches[where]
        numbered.append(m._replace(step=step))
    notes = [f"steps of {phase} do not tell batches apart: batches are counted in their order" for phase in unclear]
    return numbered, notes


def _find_adversary(opened: TranscriptFolder, party: str | None) -> str:
    parties = {name: side for name, side in opened.header.parties.items() if side != "server"}
    if party is not None:
        if party not in parties:
            raise UsageError(describe_unknown("--party", party, parties))
        if opened.header.observer not in (party, AUDITOR):
            raise UsageError(f"expected --party {opened.header.observer}, who saw this transcript, got {party}")
        return party
    if opened.header.observer in parties:
        return opened.header.observer
    passive = [name for name, side in parties.items() if side == "passive"]
    if len(passive) != 1:
        raise UsageError(f"expected --party to name the adversary, one of {', '.join(parties)}, got none")
    return passive[0]


def join_names(names: Iterable[str], most: int = 5) -> str:
    """Return ``a, b, c`` and how many more there are."""
    texts = list(names)
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return (", ".join(texts[:most]) or "nothing") + more


def _name_parties(parties: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Return what vflsec calls each of ``parties``, whose sides are given: ``active``, ``passive_1``, ``passive_2``...

    Passive parties that are not ``given``, as the data call them, are numbered in their order.
    """
    back = {name: standard for standard, name in given.items()}
    if all(side == "server" or back.get(name, "").startswith(side) for name, side in parties.items()):
        return {name: back.get(name, side) for name, side in parties.items()}
    passive = [name for name, side in parties.items() if side == "passive"]
    names = {name: f"passive_{k}" for k, name in enumerate(passive, start=1)}
    return {name: names.get(name, side) for name, side in parties.items()}


def collect_last(messages: Iterable[Sent]) -> pd.DataFrame | None:
    """Return the last vector about each row, indexed by id, or None without messages; all are as wide as the last."""
    every = list(messages)
    if not every:
        return None
    kept = [m for m in every if m.values.shape[1] == every[-1].values.shape[1]]
    values = np.concatenate([m.values for m in kept])
    table = pd.DataFrame(values, index=pd.Index(np.concatenate([m.rows for m in kept]).astype(object)))
    return table[~table.index.duplicated(keep="last")]


def _list_ids(messages: Iterable[Sent]) -> pd.Index:
    rows = [m.rows for m in messages]
    return pd.Index(np.unique(np.concatenate(rows)).astype(object) if rows else [], dtype=object)
