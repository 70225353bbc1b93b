"""What attacks on recordings read: the samples and entries of W that they guess, known samples, masked scores."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import RidgeCV
from torch import Tensor

from vflsec.base.errors import InsufficientView
from vflsec.cipher.arithmetic.codec import cut
from vflsec.cipher.recording import Header, RecordedStep, Recording
from vflsec.cipher.roles.exchange import Scores
from vflsec.core.attack import Attack
from vflsec.core.view import Guess, Need, View

Floats = NDArray[np.float64]
Integers = NDArray[np.object_]

MAX_BATCH_SIZE = 1 << 32  # more than a batch has: samples whose rows are not noted get numbers of their own below zero
BY_ROW = ("embedding_gradient", "mu", "scores", "delta", "labels")
"""Notes with one entry for each row of a batch."""


class RecordingAttack(Attack):
    """Base class of attacks on a recording of an encrypted layer."""

    needs = frozenset({Need.RECORDING})
    differs = ("No published source has this attack on the protocol.",)


def get_recording(view: View) -> Recording:
    """Return the recording of ``view``; an attack that reads it declares ``Need.RECORDING``."""
    assert view.recording is not None
    return view.recording


def get_ids(step: RecordedStep) -> NDArray[np.int64]:
    """Return the number (B,) of each row of a step; where none are noted, each row is a sample by itself."""
    if "rows" in step.notes:
        return np.asarray(step.notes["rows"], dtype=np.int64)
    n = next((len(step.notes[name]) for name in BY_ROW if name in step.notes), 0)
    return -1 - step.number * MAX_BATCH_SIZE - np.arange(n)


@lru_cache(maxsize=2)
def list_samples(recording: Recording) -> NDArray[np.int64]:
    """Return the numbers (n,) of all samples, in ascending order: a sample's place here is its row in guesses."""
    return np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *map(get_ids, recording.steps())]))


@lru_cache(maxsize=2)
def list_weighed(recording: Recording) -> tuple[int, ...]:
    """Return the numbers of the steps at whose start the role notes its share of W."""
    return tuple(step.number for step in recording.steps() if step.has("share"))


def locate(recording: Recording, ids: NDArray[np.int64]) -> Tensor:
    """Return the rows (k,) of the samples ``ids``."""
    return torch.from_numpy(np.searchsorted(list_samples(recording), ids))


def guess_of_samples(view: View, ids: NDArray[np.int64], scores: Tensor, note: str) -> Guess:
    """Return the guess ``scores`` (k, C) of the samples ``ids``, which are all different."""
    rows = locate(get_recording(view), ids)
    if len(rows) < len(list_samples(get_recording(view))):
        return Guess({"train": scores}, rows={"train": rows}, notes=(note,))
    return Guess({"train": scores[torch.argsort(rows)]}, notes=(note,))


def get_entries(recording: Recording, number: int) -> Tensor:
    """Return the rows (g C,) of the entries of W at the start of a step; none where no share is noted."""
    size = recording.header.layout.width * recording.header.layout.outputs
    steps = list_weighed(recording)
    if number not in steps:
        return torch.zeros(0, dtype=torch.long)
    return steps.index(number) * size + torch.arange(size)


def guess_of_weights(view: View, number: int, weights: NDArray[np.float64], note: str) -> Guess:
    """Return the guess ``weights`` (g, C) of W at the start of a step; where no share is noted, the note alone."""
    rows = get_entries(get_recording(view), number)
    if not len(rows):
        return Guess(notes=(note,))
    return Guess({"parameters": torch.from_numpy(weights.reshape(-1, 1))}, rows={"parameters": rows}, notes=(note,))


def find_known(view: View, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return where the auxiliary samples are among ``ids``, and their answers (m, g).

    Raises:
        InsufficientView: fewer than two of them are.
    """
    order = {row: at for at, row in enumerate(locate(get_recording(view), ids).tolist())}
    pairs = [(order[row], k) for k, row in enumerate(view.aux_rows.tolist()) if row in order]
    if len(pairs) < 2:
        raise InsufficientView(f"expected two known samples or more among those with scores, got {len(pairs)}")
    at, known = (np.array(column) for column in zip(*pairs, strict=True))
    return at, view.aux_labels.double().numpy()[known]


def regress_on_known_rows(view: View, ids: NDArray[np.int64], inputs: NDArray[np.float64]) -> Tensor:
    """Return the answers (n, g) of the samples ``ids`` by ridge regression on ``inputs`` (n, p)."""
    at, answers = find_known(view, ids)
    fitted = RidgeCV(alphas=np.logspace(-12, 3, 31)).fit(inputs[at], answers)
    return torch.from_numpy(np.asarray(fitted.predict(inputs)).reshape(len(inputs), -1))


class Masked(NamedTuple):
    """Masked scores of one batch.

    Attributes:
        mu: (B, g) integers in units of 2^-``feature_precision``.
        scores: (B, C) integers in units of 2^-``precision``; modulo 2^L they are mu W + masks, without ``added``.
        feature_precision: the least that makes every mu an integer.
        precision: fractional bits of the scores.
        added: (g, C) the part of W that scores are without, in units of 2^-64: the passive party's share where it noted
            what it decrypts, and nothing in what it sent back.
    """

    mu: Integers
    scores: Integers
    feature_precision: int
    precision: int
    added: Integers


def get_masked_scores(step: RecordedStep, header: Header) -> Masked | None:
    """Return what the passive party decrypted in a step: its note, else what it sent back, with its share added."""
    layout = header.layout
    if not step.has("mu"):
        return None
    mu, feature_precision = _to_integers(step.notes["mu"])
    precision = layout.feature_precision + layout.weight_precision
    nothing = np.zeros((layout.width, layout.outputs), dtype=object)
    if step.has("masked_scores"):
        scores = step.notes["masked_scores"].astype(object)
        precision = precision if header.score_precision is None else header.score_precision
        return Masked(mu, scores, feature_precision, precision, step.notes.get("share", nothing))
    for message in step.messages:
        if message.kind == Scores.__name__ and message.direction == "sent":
            values = cut(message.decode(Scores).values, 8, len(mu) * layout.outputs, "recorded scores")
            scores = np.array(values, dtype=object).reshape(len(mu), layout.outputs)
            return Masked(mu, scores, feature_precision, precision, nothing)
    return None


def _to_integers(values: NDArray[np.float64]) -> tuple[Integers, int]:
    """Return floats as integers times 2^-precision, exactly."""
    ratios = [float(value).as_integer_ratio() for value in values.ravel()]
    precision = max((denominator.bit_length() - 1 for _, denominator in ratios), default=0)
    exact = [numerator * ((1 << precision) // denominator) for numerator, denominator in ratios]
    return np.array(exact, dtype=object).reshape(values.shape), precision
