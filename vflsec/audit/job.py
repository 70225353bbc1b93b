"""An audit from start to end: open what was trained, join it with the data, attack it, store the records."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from vflsec.audit import checkpoint, foreign
from vflsec.audit.evaluation import SystemAudit, add_attacks
from vflsec.audit.fit import Finding, check_fit, check_share, check_training, check_utility
from vflsec.audit.opening import add_predictions, open_subject, read_ids
from vflsec.audit.recordings import open_recording
from vflsec.audit.subject import Subject
from vflsec.audit.transcript_lines import Sent
from vflsec.base.checks import describe_unknown
from vflsec.base.errors import MisfitError, UsageError
from vflsec.cipher.recording import is_recording
from vflsec.core import hooks
from vflsec.core.defense import list_hooks
from vflsec.core.message import Kind, ReleaseCount
from vflsec.data.dataset import VerticalDataset
from vflsec.data.partition import DataSpec, split_dataset
from vflsec.run.adversary import get_adversary
from vflsec.run.federation import get_partition
from vflsec.run.plan import Names, find_dataset, resolve
from vflsec.run.score import compute_account, compute_spending, count_most
from vflsec.run.spec import AttackSpec, AuxSpec, parse_defense


def prepare_audit(
    what: Path,
    data: str | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    party: str | None = None,
    model: str | None = None,
    messages: Path | None = None,
    encoded: bool = False,
    train_ids: Path | None = None,
    test_ids: Path | None = None,
    aux_ids: Path | None = None,
    aux: AuxSpec | None = None,
    draws: int = 5,
    attacks: Sequence[AttackSpec] = (),
    defenses: Sequence[str] = (),
    predictions: Path | None = None,
    allow_misfit: bool = False,
    confirm_fit: bool = False,
    truth: Path | None = None,
    command: Sequence[str] = (),
) -> SystemAudit:
    """Return what is to be measured, after a check that it belongs to the data; nothing is attacked yet.

    Arguments and errors are those of ``vflsec.audit_system``. With them, ``data`` is the name of a TOML file or of a
    registered dataset with ``options``, and ``what`` may be a recording of an encrypted layer, which ``truth``, the
    other role's recording of the same run, scores.
    """
    if what.is_file() and is_recording(what):
        given: dict[str, object] = {"data": data, "party": party, "model": model, "messages": messages}
        given |= {"train-ids": train_ids, "test-ids": test_ids, "aux-ids": aux_ids, "predictions": predictions}
        given |= {"defense": defenses, "encoded": encoded, "allow-misfit": allow_misfit, "confirm-fit": confirm_fit}
        if refused := [f"--{name}" for name, value in given.items() if value]:
            raise UsageError(f"expected no {', '.join(refused)} with {what}: a recording states what it is about")
        recorded = open_recording(what, truth, aux=aux or AuxSpec(), draws=draws)
        return add_attacks(replace(recorded, command=command), attacks)
    if truth:
        raise UsageError(f"expected a recording of an encrypted layer with --truth, got {what}")
    known = read_ids(aux_ids) if aux_ids else None
    aux, draws = aux or AuxSpec(), draws if known is None else 1
    if (what / "cell.json").is_file() and (what / checkpoint.SETTINGS).is_file():
        if model or encoded or train_ids or test_ids or defenses or predictions:
            raise UsageError(
                f"expected no --model, --encoded, --train-ids, --test-ids, --defense or --predictions with {what}: it "
                f"states them"
            )
        audit, findings = _audit_checkpoint(what, data, options or {}, party or "passive_1", messages, aux, draws)
    elif messages:
        raise UsageError(f"expected --messages with a checkpoint of vflsec train, got {what}")
    elif data is None:
        raise UsageError(
            f"expected the columns of all parties and the labels of {what}, got none: add --data FILE.toml, or "
            f"--data NAME for a registered dataset"
        )
    else:
        source = find_dataset(data)
        loaded = source.load(**(options or {}))
        subject = open_subject(what, party, model, loaded.names)
        if predictions:
            subject = add_predictions(subject, predictions)
        if encoded:
            subject = replace(subject, inputs=foreign.list_inputs(loaded, subject.adversary))
        train, test = (read_ids(path) if path else None for path in (train_ids, test_ids))
        tables = {table.name: table.frame.index.astype(str) for table in loaded.parties}
        findings = [*check_share(tables, subject, train, test)]
        if train_ids or test_ids:  # before too few rows are left for the auxiliary labels
            _refuse_misfits(findings, allow_misfit=allow_misfit, confirm_fit=confirm_fit)
        loaded, notes = foreign.assign_roles(loaded, subject, train, test)
        identity = source.key(DataSpec(options=dict(options or {})))
        audit = _audit_material(replace(subject, notes=(*subject.notes, *notes)), loaded, (data, identity), aux, draws)
        audit = replace(audit, spent=measure_spending(defenses, subject, audit.data.parties), declared=bool(defenses))
        silent = [text for text in defenses if not measure_spending([text], subject, audit.data.parties)]
        findings += [Finding("fits", f"{text} is declared, for which no epsilon is computed") for text in silent]
        kinds = [frozenset(resolve(parse_defense(text)).defense().kinds) for text in defenses]
        findings += check_fit(audit, kinds, tables.get(subject.adversary, pd.Index([])).tolist())
    audit = _add_findings(audit, findings, allow_misfit=allow_misfit, confirm_fit=confirm_fit)
    if known is not None:
        audit = replace(audit, aux=foreign.select_known_labels(aux, known, audit.data), aux_ids=known)
    return add_attacks(replace(audit, command=command), attacks)


def _add_findings(
    audit: SystemAudit, findings: Sequence[Finding], *, allow_misfit: bool, confirm_fit: bool
) -> SystemAudit:
    """Return ``audit`` with notes on what the fit check has shown.

    Raises:
        MisfitError: the material does not belong to the data, and the user has not allowed that.
    """
    misfits = _refuse_misfits(findings, allow_misfit=allow_misfit, confirm_fit=confirm_fit)
    unclear = [] if confirm_fit else [finding.text for finding in findings if finding.outcome == "unverified"]
    confirmed = ["the user confirms that rows and columns belong together"] * (confirm_fit and not misfits)
    notes = [finding.text for finding in findings]
    subject = replace(audit.subject, notes=(*audit.subject.notes, *notes, *confirmed))
    return replace(audit, subject=subject, misfit=[*misfits, *unclear], confirmed=confirm_fit)


def _refuse_misfits(findings: Sequence[Finding], *, allow_misfit: bool, confirm_fit: bool) -> list[str]:
    """Return what does not fit, which the user has allowed.

    Raises:
        MisfitError: the user has not.
    """
    misfits = [finding.text for finding in findings if finding.outcome == "misfit"]
    if misfits and not allow_misfit:
        only = "--confirm-fit is only for what cannot be verified; " if confirm_fit else ""
        raise MisfitError(f"{'; '.join(misfits)} ({only}--allow-misfit audits it nevertheless, and then no gate holds)")
    return misfits


def _audit_material(
    subject: Subject, dataset: VerticalDataset, named: tuple[str, Any], aux: AuxSpec, draws: int
) -> SystemAudit:
    """Return the audit of messages, models or embeddings of a system that vflsec has not trained."""
    split = split_dataset(dataset, DataSpec(), 0)
    if subject.adversary not in split.parties:
        raise UsageError(describe_unknown("--party", subject.adversary, split.parties))
    foreign.check_classes(subject.classes, split, subject.name)
    subject = foreign.add_embeddings(subject, split)
    return SystemAudit(
        subject,
        split,
        joint=partial(foreign.build_federation, split, subject),
        apart=partial(foreign.build_federation, split, subject, alone=True),
        messages=tuple(foreign.convert_messages(split, subject.messages)),
        predictions=foreign.convert_predictions(split, subject.predictions),
        aux=aux,
        draws=draws,
        dataset=named,
    )


def _audit_checkpoint(
    folder: Path,
    data: str | None,
    options: Mapping[str, Any],
    party: str,
    messages: Path | None,
    aux: AuxSpec,
    draws: int,
) -> tuple[SystemAudit, list[Finding]]:
    """Return the audit of a checkpoint, whose first draw of auxiliary labels is that of ``eval``, and its fit."""
    restored = checkpoint.restore(folder, data, options)
    cell, notes = restored.cell, list(restored.facts.notes)
    party = Names("", get_partition(cell).names).to_standard(party)
    get_adversary(restored.load_trained(0).federation, party)  # raises an error if there is no such party
    if messages:
        notes.append(f"messages of its training from {messages}")
    subject = Subject(
        name=folder.name,
        adversary=party,
        side="active" if party == "active" else "passive",
        fingerprint=restored.fingerprint,
        notes=notes,
    )
    audit = SystemAudit(
        subject,
        get_partition(cell),
        joint=restored.load_trained,
        apart=restored.build_untrained,
        messages=tuple(checkpoint.list_messages(restored, messages, party)) if messages else (),
        aux=aux,
        draws=draws,
        dataset=(cell.dataset.name, cell.dataset.key(cell.data)),
        head=cell.model.head,
        spent=compute_spending(restored.load_trained(0), restored.facts.releases, party),
        declared=bool(cell.defenses),
    )
    kinds = [frozenset(carried.defense().kinds) for carried in cell.defenses]
    findings = [check_utility(restored.load_trained(0), restored.facts), *check_fit(audit, kinds)]
    if messages:
        noisy = any(Kind.EMBEDDING in changed for changed in kinds)
        findings.append(check_training(restored.load_trained(0), restored.facts, audit.messages, noisy=noisy))
    return audit, findings


def name_folder(what: Path) -> Path:
    """Return the results folder of an audit; files that differ in their suffix alone have folders of their own."""
    return Path("runs") / f"audit-{what.name or what.resolve().name}"


def measure_spending(defenses: Sequence[str], subject: Subject, parties: Iterable[str]) -> list[dict[str, Any]]:
    """Return the privacy that each defense has spent against the adversary, if it spends any: the most of all senders.

    The releases are those in the transcript: a transcript of a part of the training gives too small an epsilon.

    Raises:
        UsageError: a defense of updates, or no message on which it acts.
    """
    releases = count_releases(subject.messages, subject.adversary)
    ledger = []
    for text in defenses:
        defense = resolve(parse_defense(text)).defense()
        if hooks.UPDATE in list_hooks(defense):
            raise UsageError(f"expected a defense of messages, got {text}: its epsilon counts updates, not messages")
        acted_on = [count for count in releases if defense.acts(Kind(count.kind), count.phase)]
        if hooks.PLAN_RELEASES in list_hooks(defense) and acted_on:
            defense.plan_releases(count_most(acted_on))
        senders = [name for name in parties if name != subject.adversary and (acted_on or not defense.kinds)]
        by_sender = [entry for name in senders if (entry := compute_account(defense, name, releases)) is not None]
        sent = not subject.messages or not defense.kinds or any(m.kind in defense.kinds for m in subject.messages)
        if not by_sender and not sent:
            kinds = " or ".join(sorted(defense.kinds)) or "labels"
            raise UsageError(f"expected a defense of what was sent, got {text}: {subject.name} shows no {kinds}")
        if by_sender:
            ledger.append({"defense": repr(defense), **max(by_sender, key=lambda entry: float(entry["epsilon"]))})
    return ledger


def count_releases(messages: Iterable[Sent], receiver: str) -> list[ReleaseCount]:
    """Return how often ``receiver`` got a message about a row, by route and split."""
    counts: dict[tuple[str, str, Kind, str], Counter[str]] = {}
    for m in messages:
        if m.receiver == receiver and m.kind in (Kind.EMBEDDING, Kind.GRADIENT):
            counts.setdefault((m.phase, m.sender, Kind(m.kind), m.split), Counter()).update(m.rows.tolist())
    return [
        ReleaseCount(phase, sender, receiver, kind, split, max(rows.values()), rows.total())
        for (phase, sender, kind, split), rows in counts.items()
    ]
