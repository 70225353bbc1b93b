"""What the active party reads out of the scores: the geometry of the passive party's features."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vflsec.base.checks import count
from vflsec.base.errors import InsufficientView
from vflsec.cipher.recording import Header, RecordedStep, Recording
from vflsec.inference.recordings.same_batch import factor, moved, same_batch
from vflsec.inference.recordings.score_fit import SWEEPS, ScoreFit, fit
from vflsec.inference.recordings.score_model import ScoreModel, Visit
from vflsec.secure.transcripts import figures
from vflsec.secure.transcripts.audit import Audit, Figure, Floats, Recovered, Truth

HELD_OUT = 0.02
"""Share of the scores that is left out of the fit, to judge it."""
EXACT = 1e-4
"""Relative residual below which nothing is left that a drift of the features could explain."""
CLEARLY = 0.9
"""A drift counts where it lowers the error on the scores that were left out to this share."""
PERMUTED = 20
"""Steps of the fit to permuted loss gradients, which cannot become exact."""
SCORED = 2000
"""Rows whose pairs are compared with the truth, at most."""


class ScoreGram(Audit):
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
    role = "active"
    reads = "the scores of each sample at several steps, and the active party's own loss gradients"
    mitigation = "fewer passes x outputs of each sample than it has features; moving extractors and noise only blunt it"
    reference = "derived from PrADA, Algorithms 4 and 5; refutes its Proposition 1"

    def run(self, recording: Recording) -> Recovered:
        """Return ``mu``, up to one rotation of all rows, and ``rows``, at each sample's first visit."""
        steps = same_batch(recording)
        return self._of_one_batch(steps, recording.header) if len(steps) >= 3 else self._of_all(recording)

    def _of_one_batch(self, steps: list[RecordedStep], header: Header) -> Recovered:
        """Solve in closed form what one batch shows at many steps."""
        sums, changes = moved(steps, header)
        mu, asymmetry = factor(sums, changes, header)
        _, chance = factor(np.random.default_rng(figures.SEED).permutation(sums), changes, header)
        own = Figure(of="features", metric="consistency", value=1 - asymmetry, chance=1 - chance, n=len(mu))
        found = f"inner products of the features of {len(mu)} samples, from {len(steps)} steps"
        if len(steps) * header.layout.outputs <= header.layout.width:
            found += f", of which {header.layout.width + 1} would give all {header.layout.width} dimensions"
        return Recovered(found, {steps[0].number: {"rows": steps[0].notes["rows"], "mu": mu}}, (own,))

    def _of_all(self, recording: Recording) -> Recovered:
        """Fit all scores of the run."""
        table = _Table.of(recording)
        frozen = table.fit()
        best = frozen
        if frozen.residual > EXACT:
            drifting = table.fit(drifts=True, start=frozen)
            best = drifting if drifting.held_out < CLEARLY * frozen.held_out else frozen
        chance = table.fit(permuted=True)
        own = Figure(
            of="scores",
            metric="consistency",
            value=max(0.0, 1 - best.held_out**2),
            chance=max(0.0, 1 - chance.held_out**2),
            n=len(table.rows),
        )
        kind = "that move" if best is not frozen else "at rest"
        found = (
            f"features {kind} of {len(table.rows)} samples, up to a rotation, from {len(table.visits)} steps; "
            f"{table.equations:g} independent scores of a sample, {table.header.layout.width} features; "
            f"the fit leaves {best.residual:.1e} of the scores"
        )
        return Recovered(found, table.recovered(best), (own,))

    def score(self, recovered: Recovered, truth: Truth) -> tuple[Figure, ...]:
        """Return the correlation of inner products, their share that was recovered, and R2 with known rows."""
        true = truth.at(list(recovered.steps))
        pairs = []
        for number, notes in recovered.steps.items():
            if {"mu", "rows"} <= true[number].keys():
                place = {int(row): i for i, row in enumerate(true[number]["rows"])}
                pairs.append((notes["mu"], true[number]["mu"][[place[int(row)] for row in notes["rows"]]]))
        if not pairs:
            return ()
        guess, mu = (np.concatenate(both) for both in zip(*pairs, strict=True))
        if len(mu) > SCORED:
            pick = np.sort(np.random.default_rng(figures.SEED).choice(len(mu), SCORED, replace=False))
            guess, mu = guess[pick], mu[pick]
        return (
            figures.geometry("features", guess, mu),
            figures.vectors("inner products", guess @ guess.T, mu @ mu.T),
            *figures.with_known_rows("features", guess, mu),
        )


@dataclass(frozen=True)
class _Table:
    """The scores of a run, by sample."""

    header: Header
    rows: NDArray[np.int64]  # (n,) the samples
    visits: list[Visit]
    numbers: list[int]

    @classmethod
    def of(cls, recording: Recording) -> _Table:
        """Return the scores of the longest part of the recording in which no step is missing.

        Raises:
            InsufficientView: there are too few, or momentum from before the first step is unknown.
        """
        header = recording.header
        steps = [step for step in _unbroken(recording) if step.has("rows", "scores")]
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
            own = np.searchsorted(rows, step.notes["rows"][use])
            visits.append(
                Visit(own, step.notes["scores"][use], delta, step.rate or 0.0, len(visits) / (len(steps) - 1))
            )
        kept = [i for i, visit in enumerate(visits) if len(visit.rows)]
        return cls(header, rows, [visits[i] for i in kept], [steps[i].number for i in kept])

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
            rng = np.random.default_rng(figures.SEED)
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

    def recovered(self, fitted: ScoreFit) -> dict[int, dict[str, Floats | NDArray[np.int64]]]:
        """Return rows and features of each sample at the step of its first visit."""
        found: dict[int, dict[str, Floats | NDArray[np.int64]]] = {}
        new = np.ones(len(self.rows), dtype=bool)
        for number, visit in zip(self.numbers, self.visits, strict=True):
            own = visit.rows[new[visit.rows]]
            if len(own):
                powers = visit.time ** np.arange(fitted.features.shape[1])
                found[number] = {"rows": self.rows[own], "mu": np.tensordot(powers, fitted.features[own], (0, 1))}
                new[own] = False
        return found


def _unbroken(recording: Recording) -> list[RecordedStep]:
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
