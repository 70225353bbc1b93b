"""Which samples a recording is about, and which entries of W: the rows that attacks on it guess."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vflsec.cipher.recording import RecordedStep, Recording
from vflsec.core.attack import Attack
from vflsec.core.view import Guess, Need, View

MOST_ROWS = 1 << 32
"""More than a batch has: samples whose rows are not noted get numbers of their own below zero."""

BY_ROW = ("embedding_gradient", "mu", "scores", "delta", "labels")
"""Notes with one entry for each row of a batch."""


class RecordingAttack(Attack):
    """Base class of attacks on a recording of an encrypted layer."""

    needs = frozenset({Need.RECORDING})
    differs = ("No published source has this attack on the protocol.",)


def recording_of(view: View) -> Recording:
    """Return the recording of ``view``; an attack that reads it declares ``Need.RECORDING``."""
    assert view.recording is not None
    return view.recording


def ids_of(step: RecordedStep) -> NDArray[np.int64]:
    """Return the number (B,) of each row of a step; where none are noted, each row is a sample by itself."""
    if "rows" in step.notes:
        return np.asarray(step.notes["rows"], dtype=np.int64)
    n = next((len(step.notes[name]) for name in BY_ROW if name in step.notes), 0)
    return -1 - step.number * MOST_ROWS - np.arange(n)


@lru_cache(maxsize=2)
def samples(recording: Recording) -> NDArray[np.int64]:
    """Return the numbers (n,) of all samples, in ascending order: a sample's place here is its row in guesses."""
    return np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *map(ids_of, recording.steps())]))


@lru_cache(maxsize=2)
def steps_with_weights(recording: Recording) -> tuple[int, ...]:
    """Return the numbers of the steps at whose start the role notes its share of W."""
    return tuple(step.number for step in recording.steps() if step.has("share"))


def places(recording: Recording, ids: NDArray[np.int64]) -> Tensor:
    """Return the rows (k,) of the samples ``ids``."""
    return torch.from_numpy(np.searchsorted(samples(recording), ids))


def guess_of_samples(view: View, ids: NDArray[np.int64], scores: Tensor, note: str) -> Guess:
    """Return the guess ``scores`` (k, C) of the samples ``ids``, which are all different."""
    rows = places(recording_of(view), ids)
    if len(rows) < len(samples(recording_of(view))):
        return Guess({"train": scores}, rows={"train": rows}, notes=(note,))
    return Guess({"train": scores[torch.argsort(rows)]}, notes=(note,))


def entries(recording: Recording, number: int) -> Tensor:
    """Return the rows (g C,) of the entries of W at the start of a step; none where no share is noted."""
    size = recording.header.layout.width * recording.header.layout.outputs
    steps = steps_with_weights(recording)
    if number not in steps:
        return torch.zeros(0, dtype=torch.long)
    return steps.index(number) * size + torch.arange(size)


def guess_of_weights(view: View, number: int, weights: NDArray[np.float64], note: str) -> Guess:
    """Return the guess ``weights`` (g, C) of W at the start of a step; where no share is noted, the note alone."""
    rows = entries(recording_of(view), number)
    if not len(rows):
        return Guess(notes=(note,))
    return Guess({"parameters": torch.from_numpy(weights.reshape(-1, 1))}, rows={"parameters": rows}, notes=(note,))
