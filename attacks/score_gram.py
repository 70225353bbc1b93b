"""What the active party reads out of the scores: the geometry of the passive party's features."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vflsec.base.checks import count
from vflsec.base.errors import InsufficientView
from vflsec.cipher.recording import Header, RecordedStep, Recording
from vflsec.core.view import Fact, Guess, Need, View
from vflsec.inference.recordings.samples import (
    Floats,
    RecordingAttack,
    get_recording,
    guess_of_samples,
    regress_on_known_rows,
)
from vflsec.inference.recordings.score_fit import SWEEPS, ScoreFit, ScoreModel, Visit, fit

ABOVE_NOISE = 3  # how far a direction must stand above what rounding makes of none
HELD_OUT = 0.02  # share of the scores that is left out of the fit, to judge it
EXACT = 1e-4  # relative residual below which nothing is left that a drift of the features could explain
CLEARLY = 0.9  # a drift counts where it lowers the error on the scores that were left out to this share
PERMUTED = 20  # steps of the fit to permuted loss gradients, which cannot become exact


class ScoreGram(RecordingAttack):
    """The scores give the passive party's features up to a rotation, which refutes PrADA's Proposition 1.

    The active party knows how W moves: by its own loss gradients times the passive party's features. So every score is
    z_t(i) = M_i (kept_t W_0 - P_t), where P_t sums the features of past batches times the active party's loss gradients
    and learning rates, with momentum and weight decay. The active party fits the features M and W_0 to all scores of
    the run, in whatever batches they came; validation rows and test rows count as well. A few known rows then fix the
    rotation.

    Frozen features are determined once each sample has as many independent scores as features
    (``vflsec.cipher.roles.exposure``). Features that move are fitted as a line in time, and noise is estimated. One
    batch at all steps is solved in closed form.

    Source: derived from PrADA (arXiv 2111.10120), Algorithms 4 and 5.
    """

    name = "score-gram"
    side = "active"
    target = "features"
    wants = frozenset({Need.AUX_LABELS})
    reference = "derived from PrADA, arXiv 2111.10120, Algorithms 4 and 5; refutes its Proposition 1"
    verified = "all inner products of frozen features, with momentum, weight decay and several outputs"
    costs = "a nonlinear fit to all scores of the run: seconds for thousands of samples"
    fails = "if each sample has fewer passes x outputs than features; moving extractors and noise only weaken it"

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return features (k, g) of the samples that the scores determine, rotated by those that are known.

        Raises:
            InsufficientView: no sample was scored often enough.
        """
        geometry = recover_geometry(get_recording(view))
        if not len(view.aux_rows):
            return Guess(facts=(geometry.fact,), notes=(geometry.note,))
        features = regress_on_known_rows(view, geometry.rows, geometry.features)
        return replace(guess_of_samples(view, geometry.rows, features, geometry.note), facts=(geometry.fact,))


class Geometry(NamedTuple):
    """What the scores tell without a known sample.

    Attributes:
        rows: (n,) the numbers of the samples.
        features: (n, g) at the last step, up to one rotation.
        note: what was read.
        fact: how consistent it is.
    """

    rows: NDArray[np.int64]
    features: Floats
    note: str
    fact: Fact


@lru_cache(maxsize=1)
def recover_geometry(recording: Recording) -> Geometry:
    """Return what the active party recovers without knowing any features."""
    steps = find_repeated_batch(recording)
    return _solve_batch(steps, recording.header) if len(steps) >= 3 else _fit_all(recording)


def _solve_batch(steps: list[RecordedStep], header: Header) -> Geometry:
    """Solve in closed form what one batch shows at many steps."""
    sums, changes = accumulate_changes(steps, header)
    mu, asymmetry = factor(sums, changes, header)
    _, chance = factor(np.random.default_rng(0).permutation(sums), changes, header)
    note = f"inner products of the features of {len(mu)} samples, from {len(steps)} steps"
    if len(steps) * header.layout.outputs <= header.layout.width:
        note += f", of which {header.layout.width + 1} would give all {header.layout.width} dimensions"
    fact = Fact("features", "consistency", 1 - asymmetry, len(mu), 1 - chance)
    return Geometry(steps[0].notes["rows"], mu, note, fact)


def _fit_all(recording: Recording) -> Geometry:
    table = _Table.collect(recording)
    frozen = table.fit()
    best = frozen
    if frozen.residual > EXACT:
        drifting = table.fit(drifts=True, start=frozen)
        best = drifting if drifting.held_out < CLEARLY * frozen.held_out else frozen
    chance = table.fit(permuted=True)
    kind = "that move" if best is not frozen else "at rest"
    note = (
        f"features {kind} of {len(table.rows)} samples, up to a rotation, from {len(table.visits)} steps; "
        f"{table.equations:g} independent scores of a sample, {table.header.layout.width} features; "
        f"the fit leaves {best.residual:.1e} of the scores"
    )
    value, blind = (max(0.0, 1 - fitted.held_out**2) for fitted in (best, chance))
    features = best.features.sum(axis=1)  # the time of the last step is 1
    return Geometry(table.rows, features, note, Fact("scores", "consistency", value, len(table.rows), blind))


@dataclass(frozen=True)
class _Table:
    """The scores of a run, by sample."""

    header: Header
    rows: NDArray[np.int64]  # (n,) the samples
    visits: list[Visit]

    @classmethod
    def collect(cls, recording: Recording) -> _Table:
        """Return the scores of the longest part of the recording in which no step is missing.

        Raises:
            InsufficientView: there are too few, or momentum from before the first step is unknown.
        """
        header = recording.header
        steps = [step for step in _find_longest(recording) if step.has("rows", "scores")]
        learning = sum(step.rate is not None for step in steps)
        if learning < 3:
            raise InsufficientView(f"expected 3 consecutive steps of training or more, got {learning}")
        if header.momentum and steps[0].number:
            raise InsufficientView("expected a recording from the first step on, because W is trained with momentum")
        seen = np.concatenate([step.notes["rows"] for step in steps])
        trained = np.unique(np.concatenate([step.notes["rows"] for step in steps if step.rate is not None]))
        rows, counts = np.unique(seen, return_counts=True)
        usual = np.median(counts[np.isin(rows, trained)])
        if usual * header.layout.outputs < 2:
            single = int((counts == 1).sum())
            raise InsufficientView(
                f"needs two scores of most samples; {count(single, 'sample has', 'samples have')} only one"
            )
        rows = rows[np.isin(rows, trained) | (counts >= usual)]  # others tell little, and are not determined
        visits: list[Visit] = []
        for step in steps:
            use = np.isin(step.notes["rows"], rows)
            delta = None if step.rate is None else step.notes["delta"] / len(use)
            places = np.searchsorted(rows, step.notes["rows"][use])
            visits.append(
                Visit(places, step.notes["scores"][use], delta, step.rate or 0.0, len(visits) / (len(steps) - 1))
            )
        kept = [i for i, visit in enumerate(visits) if len(visit.rows)]
        return cls(header, rows, [visits[i] for i in kept])

    @property
    def equations(self) -> float:
        """How many independent scores the median sample has."""
        passes = float(np.median(np.bincount(np.concatenate([visit.rows for visit in self.visits]))))
        outputs = self.header.layout.outputs
        return passes if outputs == 1 else passes * (outputs - 1) + 1

    def fit(self, *, drifts: bool = False, permuted: bool = False, start: ScoreFit | None = None) -> ScoreFit:
        """Return the best fit; ``permuted`` gives each loss gradient to another row of its batch."""
        visits = self.visits
        if permuted:
            rng = np.random.default_rng(0)
            visits = [
                visit._replace(delta=None if visit.delta is None else rng.permutation(visit.delta)) for visit in visits
            ]
        model = ScoreModel(
            visits,
            len(self.rows),
            self.header.layout.width,
            momentum=self.header.momentum,
            weight_decay=self.header.weight_decay,
            drifts=drifts,
            held_out=HELD_OUT,
        )
        return fit(model, start, PERMUTED if permuted else SWEEPS)


def _find_longest(recording: Recording) -> list[RecordedStep]:
    """Return the longest run of steps in which the active party has all that moves W."""
    runs: list[list[RecordedStep]] = [[]]
    last = -1
    for step in recording.steps():
        complete = step.rate is None or step.has("rows", "scores", "delta")
        if step.number != last + 1 or not complete:
            runs.append([])
        last = step.number
        if complete:
            notes = {name: array for name, array in step.notes.items() if name in ("rows", "scores", "delta")}
            runs[-1].append(RecordedStep(step.number, step.rate, notes=notes))
    return max(runs, key=len)


def find_repeated_batch(recording: Recording) -> list[RecordedStep]:
    """Return the longest run of learning steps on one batch, all in the order of rows of the first."""
    longest: list[RecordedStep] = []
    run: list[RecordedStep] = []
    last = -1
    for step in recording.steps():
        follows, last = step.number == last + 1, step.number
        if step.rate is None:  # inference moves nothing
            run = run if follows else []
            continue
        if not step.has("rows", "scores", "delta"):
            run = []
        elif run and follows and (reordered := _reorder(step, run[0].notes["rows"])):
            run.append(reordered)
        else:
            run = [step]
        if len(run) > len(longest):
            longest = run
    return longest


def _reorder(step: RecordedStep, rows: NDArray[np.int64]) -> RecordedStep | None:
    """Return what the active party has of a step in the order of ``rows``, or None if it is of other rows."""
    numbers = step.notes["rows"]
    if not np.array_equal(np.sort(numbers), np.sort(rows)):
        return None
    order = np.argsort(numbers, kind="stable")[np.argsort(np.argsort(rows, kind="stable"))]
    notes = {name: step.notes[name][order] for name in ("rows", "scores", "delta")}
    return RecordedStep(step.number, step.rate, notes=notes)


def accumulate_changes(steps: list[RecordedStep], header: Header) -> tuple[Floats, Floats]:
    """Return (H, K H) as columns, (B, (T - 1) C) each.

    With the same batch at every step W_t = kept_t W_0 - mu^T h_t, where h_t sums the active party's past loss gradients
    times the learning rate, with momentum and weight decay; kept_t is 1 without the latter. So z_t - kept_t z_0 is
    -K h_t for the matrix K = mu mu^T of all inner products, which has rank g: after g + 1 steps the Nyström formula
    K = Y (H^T Y)^+ Y^T, with Y = K H, gives it.

    Raises:
        InsufficientView: momentum from before the first step is unknown.
    """
    if header.momentum and steps[0].number:
        raise InsufficientView("expected a recording from the first step on, because W is trained with momentum")
    first = steps[0].notes["scores"]
    h, velocity = np.zeros_like(first), np.zeros_like(first)
    kept, decay = 1.0, 0.0
    sums, changes = [], []
    for step in steps:
        if step is not steps[0]:
            sums.append(h)
            changes.append(kept * first - step.notes["scores"])
        assert step.rate is not None
        velocity = header.momentum * velocity + step.notes["delta"] / len(first) - header.weight_decay * h
        decay = header.momentum * decay + header.weight_decay * kept
        h, kept = h + step.rate * velocity, kept - step.rate * decay
    return np.concatenate(sums, axis=1), np.concatenate(changes, axis=1)


def factor(sums: Floats, changes: Floats, header: Header) -> tuple[Floats, float]:
    """Return F (B, r) with F F^T = K where Y = K H, of the largest rank r <= g that the data bear.

    The second is how asymmetric H^T K H is, from 0 to 1: not at all where mu is frozen.

    With the singular value decomposition Y = left sizes right^T also left = K (H right / sizes), on which the formula
    is well conditioned. Directions count whose size exceeds what rounding W to its unit does to scores.
    """
    left, sizes, right = np.linalg.svd(changes, full_matrices=False)
    noise = np.ldexp(np.sqrt(header.layout.width / 12), -header.layout.weight_precision) * sum(np.sqrt(changes.shape))
    rank = min(header.layout.width, int((sizes > ABOVE_NOISE * noise).sum()))
    if not rank:
        raise InsufficientView("expected scores that follow the loss gradients, got none that do")
    middle = (sums @ right[:rank].T / sizes[:rank]).T @ left[:, :rank]
    kept, axes = np.linalg.eigh(np.linalg.inv((middle + middle.T) / 2))
    asymmetry = np.linalg.norm(middle - middle.T) / (2 * np.linalg.norm(middle))
    return left[:, :rank] @ (axes * np.sqrt(np.maximum(kept, 0))), float(asymmetry)
