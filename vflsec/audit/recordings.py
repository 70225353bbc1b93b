"""An audit of a recording: what one role of an encrypted layer can infer, scored by the other role's recording."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vflsec.audit.evaluation import SystemAudit
from vflsec.audit.subject import Subject
from vflsec.base.checks import count
from vflsec.base.errors import DataError, InsufficientView, UsageError
from vflsec.cipher.recording import Recording
from vflsec.core.attack import Attack
from vflsec.core.method import Trained
from vflsec.core.view import GroundTruth, Need, View
from vflsec.data.partition import Partition
from vflsec.inference.recordings.samples import ids_of, samples, steps_with_weights
from vflsec.results.metrics import VALUES, applicable_metrics
from vflsec.run.adversary import draw_auxiliary
from vflsec.run.questions import Question
from vflsec.run.spec import AuxSpec

NO_LABELS = torch.zeros(0, dtype=torch.long)


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


class Draw(NamedTuple):
    """Stands for a federation: a draw of auxiliary samples has a seed, and no party to name as a victim."""

    seed: int
    parties: Mapping[str, Any] = {}


class Drawn(NamedTuple):
    """Stands for a trained federation."""

    federation: Draw


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

    def asked(self, attack: Attack, trained: Trained, *, joined: bool = True) -> Question:
        """Return the question to the role that recorded.

        Raises:
            InsufficientView: a recording does not answer it.
        """
        if Need.RECORDING not in attack.needs or attack.target not in ASK:
            raise InsufficientView("reads no recording")
        if attack.side not in (self.subject.side, "either", "any"):
            raise InsufficientView(
                f"reads a recording of role {attack.side}, and this is one of role {self.subject.side}"
            )
        question = ASK[attack.target](self, trained.federation.seed)
        if getattr(attack, "relative", False) and "parameters" in question.truth.labels:
            question = question._replace(truth=self._without_common_part(question.truth))
        return question._replace(metrics=(*dict.fromkeys([attack.metric or question.metrics[0], *question.metrics]),))

    def _without_common_part(self, truth: GroundTruth) -> GroundTruth:
        """Return the ground truth with the entries of W less their mean over several outputs."""
        weights = truth.labels["parameters"].view(-1, self.recording.header.layout.outputs)
        centered = weights - weights.mean(dim=1, keepdim=True) if weights.shape[1] > 1 else weights
        return GroundTruth({**truth.labels, "parameters": centered.reshape(-1, 1)})

    def view(self, n_classes: int, rows: Tensor = NO_LABELS, answers: Tensor = NO_LABELS, entries: int = 0) -> View:
        """Return the view of the role, which guesses ``n_classes`` numbers for each sample, or for each entry of W."""
        splits = {"train": len(samples(self.recording)), **({"parameters": entries} if entries else {})}
        return View(
            party=self.subject.adversary,
            side=self.subject.side,
            n_classes=n_classes,
            features={split: torch.zeros(n, 0) for split, n in splits.items()},
            model=None,
            aux_rows=rows,
            aux_labels=answers,
            recording=self.recording,
        )


def _labels(audit: RecordingAudit, seed: int) -> Question:
    classes = max(2, audit.recording.header.layout.outputs)
    if audit.answers is None:
        return Question(audit.view(classes), GroundTruth({}), applicable_metrics(classes))
    labels = audit.answers.labels
    rows = _drawn(labels >= 0, labels, classes, audit.aux, seed)
    return Question(
        audit.view(classes, rows, labels[rows]), GroundTruth({"train": labels}), applicable_metrics(classes)
    )


def _features(audit: RecordingAudit, seed: int) -> Question:
    width = audit.recording.header.layout.width
    if audit.answers is None:
        return Question(audit.view(width), GroundTruth({}), VALUES)
    features = audit.answers.features
    aux = AuxSpec(n=audit.aux.n, balanced=False)
    rows = _drawn(torch.isfinite(features).all(dim=1), torch.zeros(len(features), dtype=torch.long), 1, aux, seed)
    return Question(audit.view(width, rows, features[rows]), GroundTruth({"train": features}), VALUES)


def _weights(audit: RecordingAudit, seed: int) -> Question:
    """Ask for W; the labels of auxiliary samples are known."""
    layout = audit.recording.header.layout
    entries = len(steps_with_weights(audit.recording)) * layout.width * layout.outputs
    if audit.answers is None:
        return Question(audit.view(1, entries=entries), GroundTruth({}), VALUES)
    known = _labels(audit, seed).view if bool((audit.answers.labels >= 0).any()) else audit.view(1)
    view = audit.view(1, known.aux_rows, known.aux_labels, entries)
    return Question(view, GroundTruth({"train": audit.answers.labels, "parameters": audit.answers.weights}), VALUES)


ASK: Mapping[str, Callable[[RecordingAudit, int], Question]] = {
    "labels": _labels,
    "features": _features,
    "parameters": _weights,
    "exposure": lambda audit, _: Question(audit.view(1), GroundTruth({}), ("share",)),
}


def _drawn(has_answer: Tensor, labels: Tensor, classes: int, aux: AuxSpec, seed: int) -> Tensor:
    """Return the rows (m,) of the auxiliary samples, among those that have an answer."""
    rows = torch.nonzero(has_answer)[:, 0]
    return rows[draw_auxiliary(labels[rows], classes, aux, seed)]


def open_recording(what: Path, truth: Path | None = None, *, aux: AuxSpec, draws: int = 1) -> RecordingAudit:
    """Return the audit of a recording, without attacks.

    Args:
        what: the adversary's recording.
        truth: the other role's recording of the same run; without it nothing is scored.
        aux: the samples whose labels or features the adversary knows.
        draws: of these.

    Raises:
        UsageError: the recordings are of one role or of different runs.
        DataError: a recording is damaged.
    """
    recording, other = Recording(what), Recording(truth) if truth else None
    role = recording.header.role
    if other:
        _expect_other_role(recording, other)
    steps = sum(1 for _ in recording.steps())
    scored = "scored against the other role" if other else "not scored: --truth takes the other role's recording"
    ids = {"train": samples(recording).astype(str), "test": np.zeros(0, dtype=str)}
    return RecordingAudit(
        subject=Subject(
            name=what.name,
            adversary=role,
            side=role,
            fingerprint=_fingerprint(what, truth),
            notes=[f"recording of role {role}: {count(steps, 'step')}, {scored}"],
        ),
        data=Partition("", {}, {}, ids, (), ""),
        joint=lambda draw: Drawn(Draw(draw)),  # type: ignore[arg-type, return-value]
        apart=lambda draw: Drawn(Draw(draw)),  # type: ignore[arg-type, return-value]
        messages=(),
        aux=aux,
        draws=draws,
        dataset=(what.name, {}),
        confirmed=True,
        recording=recording,
        answers=_answers(recording, other) if other else None,
    )


def _expect_other_role(recording: Recording, other: Recording) -> None:
    a, b = recording.header, other.header
    if a.role == b.role:
        raise UsageError(f"expected the recording of the other role as truth, got two of role {a.role}")
    if (a.layout, a.n) != (b.layout, b.n):
        raise UsageError(f"expected two recordings of one run, got {recording.path} and {other.path} of different keys")


def _fingerprint(*paths: Path | None) -> str:
    digests = []
    for path in paths:
        if path is not None:
            with path.open("rb") as file:
                digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def _answers(recording: Recording, other: Recording) -> Answers:
    """Read what both roles have noted; the later of two notes about a sample counts."""
    ids, layout = samples(recording), recording.header.layout
    labels = np.full(len(ids), -1, dtype=np.int64)
    features = np.full((len(ids), layout.width), np.nan)
    weights: dict[int, list[NDArray[Any]]] = {number: [] for number in steps_with_weights(recording)}
    by_step = {step.number: ids_of(step) for step in recording.steps()}
    for step in (*recording.steps(), *other.steps()):
        of_step = ids_of(step) if step.has("rows") else by_step.get(step.number, ids_of(step))
        shared = np.isin(of_step, ids)
        for name, answers in (("labels", labels), ("mu", features)):
            if step.has(name) and len(of_step):
                if len(of_step) != len(step.notes[name]):
                    raise DataError(f"expected {name} of {len(of_step)} rows in step {step.number}, got others")
                answers[np.searchsorted(ids, of_step[shared])] = step.notes[name][shared]
        if step.has("share") and step.number in weights:
            weights[step.number].append(step.notes["share"])
    return Answers(torch.from_numpy(labels), torch.from_numpy(features), torch.from_numpy(_sums(weights)))


def _sums(shares: Mapping[int, Sequence[NDArray[Any]]]) -> NDArray[np.float64]:
    """Return the entries (P, 1) of W, NaN at steps of which only one share is known."""

    def entries() -> Iterator[NDArray[np.float64]]:
        for own in shares.values():
            whole = np.ldexp(sum(own).astype(np.float64), -64)  # type: ignore[union-attr]
            yield (whole if len(own) == 2 else np.full_like(whole, np.nan)).reshape(-1, 1)

    return np.concatenate([np.zeros((0, 1)), *entries()])
