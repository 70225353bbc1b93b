"""An audit of a recording: what one role of an encrypted boundary can infer, scored by the other role's recording."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils import vector_to_parameters

from vflsec.audit.evaluation import SystemAudit
from vflsec.audit.foreign import build_federation
from vflsec.audit.subject import Subject
from vflsec.base import files
from vflsec.base.checks import count
from vflsec.base.errors import DataError, InsufficientView, UsageError
from vflsec.base.layout import Layout
from vflsec.cipher.recording import Recording, SealedHeader
from vflsec.core.attack import Attack
from vflsec.core.message import Kind, Message
from vflsec.core.method import Trained
from vflsec.core.settings import ModelSpec
from vflsec.core.view import GroundTruth, Need, View
from vflsec.data.partition import Partition, PartyData
from vflsec.inference.recordings.samples import get_ids, list_samples, list_weighed
from vflsec.nn.encoders import build_encoder
from vflsec.results.metrics import VALUES, list_metrics
from vflsec.run.adversary import draw_auxiliary
from vflsec.run.questions import Question
from vflsec.run.spec import AuxSpec


class Answers(NamedTuple):
    """What both roles know together; NaN or -1 where neither has noted it.

    Attributes:
        labels: (n,) of each sample.
        features: (n, g) of the passive party, at the last step that has the sample.
        weights: (P, 1) the entries of W at the start of each step whose share the adversary's role has noted.
    """

    labels: Tensor
    features: Tensor
    weights: Tensor


@dataclass(frozen=True, kw_only=True)
class RecordingAudit(SystemAudit):
    """What is to be measured of a recording.

    Attributes:
        recording: of the adversary's role.
        answers: by the other role's recording; None without it.
    """

    recording: Recording
    answers: Answers | None

    @property
    def attacks_alone(self) -> list[Any]:
        """None: what the role could infer alone, its recording does not tell."""
        return []

    def build_question(self, attack: Attack, trained: Trained, *, joined: bool = True) -> Question:
        """Return the question to the role that recorded.

        Raises:
            InsufficientView: a recording does not answer it.
        """
        layout, classes = self.recording.header.layout, max(2, self.recording.header.layout.outputs)
        sizes = {"labels": classes, "features": layout.width, "parameters": 1, "exposure": 1}
        if Need.RECORDING not in attack.needs or attack.target not in sizes:
            raise InsufficientView("reads no recording")
        side = self.subject.side
        if attack.side not in (side, "either", "any"):
            raise InsufficientView(f"reads a recording of role {attack.side}, and this is one of role {side}")
        splits = {"train": len(list_samples(self.recording))}
        if attack.target == "parameters" and (steps := list_weighed(self.recording)):
            splits["parameters"] = len(steps) * layout.width * layout.outputs
        rows, known, truth = self._draw_auxiliary(attack, classes, trained.federation.seed)
        view = View(
            party=self.subject.adversary,
            side=side,
            n_classes=sizes[attack.target],
            features={split: torch.zeros(n, 0) for split, n in splits.items()},
            model=None,
            aux_rows=rows,
            aux_labels=known,
            recording=self.recording,
        )
        metrics = {"labels": list_metrics(classes), "exposure": ("share",)}.get(attack.target, VALUES)
        return Question(view, GroundTruth(truth), (*dict.fromkeys([attack.metric or metrics[0], *metrics]),))

    def _draw_auxiliary(self, attack: Attack, classes: int, seed: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the auxiliary samples and what is known of them, and the truth; of W, the labels are known."""
        nothing = torch.zeros(0, dtype=torch.long)
        if self.answers is None or attack.target == "exposure":
            return nothing, nothing, {}
        labels, features, weights = self.answers
        if attack.target == "features":
            aux, strata = AuxSpec(n=self.aux.n, balanced=False), torch.zeros(len(features), dtype=torch.long)
            rows = _draw(torch.isfinite(features).all(dim=1), strata, 1, aux, seed)
            return rows, features[rows], {"train": features}
        if attack.target == "labels" or bool((labels >= 0).any()):
            rows = _draw(labels >= 0, labels, classes, self.aux, seed)
        else:
            rows = nothing
        truth = {"train": labels}
        if attack.target == "parameters":
            by_output = weights.view(-1, self.recording.header.layout.outputs)
            if getattr(attack, "relative", False) and by_output.shape[1] > 1:
                weights = (by_output - by_output.mean(dim=1, keepdim=True)).reshape(-1, 1)
            truth["parameters"] = weights
        return rows, labels[rows], truth


def _draw(has_answer: Tensor, labels: Tensor, classes: int, aux: AuxSpec, seed: int) -> Tensor:
    """Return the rows (m,) of the auxiliary samples, among those that have an answer."""
    rows = torch.nonzero(has_answer)[:, 0]
    return rows[draw_auxiliary(labels[rows], classes, aux, seed)]


def open_recording(what: Path, truth: Path | None = None, *, aux: AuxSpec, draws: int = 1) -> SystemAudit:
    """Return the audit of a recording, without attacks.

    The other role's recording of the same run, ``truth``, scores them. ``aux`` says how many samples the adversary
    knows the labels or features of, and ``draws`` how often these are drawn.

    Raises:
        UsageError: the recordings are of one role or of different runs.
        DataError: a recording is damaged.
    """
    recording, other = Recording(what), Recording(truth) if truth else None
    role = recording.first.role
    if other:
        a, b = recording.first, other.first
        if a.role == b.role:
            raise UsageError(f"expected the recording of the other role as truth, got two of role {a.role}")
        if a.agreement != b.agreement:
            raise UsageError(f"expected two recordings of one run, got {what} and {truth} of different keys")
    steps = sum(1 for _ in recording.steps())
    scored = "scored against the other role" if other else "not scored: --truth takes the other role's recording"
    digests = [files.hash_file(path) for path in (what, truth) if path]
    subject = Subject(
        name=what.name,
        adversary=role,
        side=role,
        fingerprint=hashlib.sha256(" ".join(digests).encode()).hexdigest(),
        notes=[f"recording of role {role}: {count(steps, 'step')}, {scored}"],
    )
    if isinstance(recording.first, SealedHeader):
        return _audit_sums(recording, other, subject, aux, draws)
    ids = {"train": list_samples(recording).astype(str), "test": np.zeros(0, dtype=str)}
    data = Partition("", {}, {}, ids, (), "")
    without_parties = partial(build_federation, data, subject)
    return RecordingAudit(
        subject=subject,
        data=data,
        joint=without_parties,
        apart=without_parties,
        messages=(),
        aux=aux,
        draws=draws,
        dataset=(what.name, {}),
        confirmed=True,
        recording=recording,
        answers=_read_answers(recording, other) if other else None,
    )


def _audit_sums(
    recording: Recording, other: Recording | None, subject: Subject, aux: AuxSpec, draws: int
) -> SystemAudit:
    """Return the audit of what a role of sealed training has: noised sums, or the numbers of each row."""
    header = recording.first
    assert isinstance(header, SealedHeader)
    if other is None:
        raise UsageError(
            f"expected --truth with {subject.name}, got none: the other role's recording has the labels and columns "
            f"that score an audit of sealed training"
        )
    names = {"active": "active", "passive": "passive_1"}
    tables = {each.first.role: _read_columns(each) for each in (recording, other)}
    rows = tables["active"].train, len(tables["active"].labels)
    if rows != (tables["passive"].train, len(tables["passive"].columns)):
        raise DataError(f"expected the same rows in both recordings, got others: record {subject.name} again")
    places = {
        "train": slice(0, rows[0]),
        "test": slice(*rows),
        **dict.fromkeys(("unlabeled", "val", "local"), slice(0)),
    }
    ids = {split: np.arange(rows[1])[at].astype(str) for split, at in places.items()}
    parties = {}
    for role in ("active", "passive"):
        columns = tables[role].columns
        features = {split: columns[at] for split, at in places.items()}
        parties[names[role]] = PartyData(names[role], features, Layout.numeric(columns.shape[1]), ids["train"])
    labels = {split: tables["active"].labels[at] for split, at in places.items()}
    classes = tuple(map(str, range(header.classes)))
    data = Partition("", parties, labels, ids, classes, list_metrics(header.classes)[0])
    if header.role == "passive":
        bottom = build_encoder(
            Layout.numeric(header.columns), ModelSpec(encoder="mlp", bottom=header.hidden), header.outputs
        )
        vector_to_parameters(tables["passive"].parameters, bottom.parameters())
        subject = replace(subject, model=bottom)
    subject = replace(subject, adversary=names[header.role])
    spent = {"defense": "sealed", "epsilon": header.epsilon, "delta": header.delta}
    return SystemAudit(
        subject=subject,
        data=data,
        joint=partial(build_federation, data, subject),
        apart=partial(build_federation, data, subject, alone=True),
        messages=tuple(_list_messages(recording, header, rows[0])),
        aux=aux,
        draws=draws,
        dataset=(subject.name, {}),
        spent=[spent] * (header.role == "passive"),
        confirmed=True,
        declared=True,
    )


class _Columns(NamedTuple):
    """What one role of sealed training has noted of all rows: ``train`` of them, then the test rows."""

    columns: NDArray[np.float32]
    labels: NDArray[np.int64]
    parameters: Tensor
    train: int


def _read_columns(recording: Recording) -> _Columns:
    rows, columns, labels, parameters, learned = [], [], [], np.zeros(0), 0
    for step in recording.steps():
        if step.rate is not None:
            learned = max(learned, int(step.notes["rows"].max(initial=-1)) + 1)
        elif step.has("columns"):
            rows.append(step.notes["rows"])
            columns.append(step.notes["columns"])
            labels.append(step.notes.get("labels", np.zeros(0, np.int64)))
            parameters = step.notes.get("parameters", parameters)
    everything = np.concatenate([np.zeros(0, np.int64), *rows])
    if len(everything) <= learned or (everything != np.arange(len(everything))).any():
        raise DataError(f"expected a recording of all rows, got one that ends before in {recording.path}: record again")
    flat = torch.from_numpy(parameters.astype(np.float32))
    return _Columns(np.concatenate(columns).astype(np.float32), np.concatenate(labels), flat, learned)


def _list_messages(recording: Recording, header: SealedHeader, train: int) -> Iterator[Message]:
    """Yield the noised sums that the passive party learned, or the numbers that the active party received."""
    for step in recording.steps():
        if step.has("sum", "parameters"):
            notes = {name: torch.from_numpy(step.notes[name].astype(np.float32)) for name in ("sum", "parameters")}
            known = {"noise": torch.tensor([header.noise]), "head": torch.eye(header.outputs)}  # scores are added up
            payload, rows = {**notes, **known}, torch.tensor(step.notes["rows"])
            yield Message(Kind.SUM, "active", "passive_1", step.number, "train", payload, rows, noted=True)
        if step.has("numbers"):
            split, first = ("train", 0) if step.notes["rows"][0] < train else ("test", train)
            value = {"value": torch.from_numpy(step.notes["numbers"].astype(np.float32))}
            rows, phase = torch.tensor(step.notes["rows"]) - first, "train" if split == "train" else "predict"
            yield Message(Kind.EMBEDDING, "passive_1", "active", step.number, phase, value, rows, split)


def _read_answers(recording: Recording, other: Recording) -> Answers:
    """Read what both roles have noted; the later of two notes about a sample counts."""
    ids, layout = list_samples(recording), recording.header.layout
    labels = np.full(len(ids), -1, dtype=np.int64)
    features = np.full((len(ids), layout.width), np.nan)
    weights: dict[int, list[NDArray[Any]]] = {number: [] for number in list_weighed(recording)}
    by_step = {step.number: get_ids(step) for step in recording.steps()}
    for step in (*recording.steps(), *other.steps()):
        of_step = get_ids(step) if step.has("rows") else by_step.get(step.number, get_ids(step))
        shared = np.isin(of_step, ids)
        for name, answers in (("labels", labels), ("mu", features)):
            if step.has(name) and len(of_step):
                if len(of_step) != len(step.notes[name]):
                    raise DataError(f"expected {name} of {len(of_step)} rows in step {step.number}, got others")
                answers[np.searchsorted(ids, of_step[shared])] = step.notes[name][shared]
        if step.has("share") and step.number in weights:
            weights[step.number].append(step.notes["share"])
    entries = [np.zeros((0, 1))]
    for parts in weights.values():  # NaN where only one share is known
        whole = np.ldexp(np.sum(parts, axis=0).astype(np.float64), -64)
        entries.append((whole if len(parts) == 2 else np.full_like(whole, np.nan)).reshape(-1, 1))
    return Answers(*map(torch.from_numpy, (labels, features, np.concatenate(entries))))
