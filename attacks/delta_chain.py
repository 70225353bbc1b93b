"""What the passive party reads out of delta^C: W, the loss gradients and every label, with or without noise."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from vflsec.base.errors import InsufficientView
from vflsec.cipher.recording import Header, RecordedStep, Recording
from vflsec.core.view import Fact, Guess, Need, View
from vflsec.inference.recordings.pooled import MAX_ENTRIES, GradientBatch, find_orientation, find_rotation, pool
from vflsec.inference.recordings.samples import (
    Floats,
    RecordingAttack,
    get_entries,
    get_ids,
    get_recording,
    guess_of_samples,
    locate,
)

# steps solved together: the farther W moves, the better is its size known; the cost grows with the third power
WINDOW = 32
# largest ratio of the first singular value that should vanish to the last that should not; above, there is noise
CONSISTENT = 0.01
RANK = 1e-9  # a delta^C whose last singular value lies below this, relative to the first, is not of full rank


class GradientFactors(NamedTuple):
    """The gradient of one step, delta W^T = ``rows`` ``axis``^T, of rank r."""

    number: int
    rate: float
    ids: NDArray[np.int64]  # (B,)
    rows: Floats  # (B, r)
    axis: Floats  # (g, r), orthonormal
    pull: Floats  # (g, r), mu^T rows / B
    blind: Floats  # (g, r), the same of another order of mu's rows: what a wrong mu would give


class Solved(NamedTuple):
    """What a window gives, by step, up to one rotation (r, r) for all; ``residual`` is a ratio of singular values."""

    weights: dict[int, Floats]  # (g, r)
    delta: dict[int, Floats]  # (B, r)
    residual: float
    chance: float


class DeltaChain(RecordingAttack):
    """Delta^C of consecutive batches gives W, delta and the labels, which refutes PrADA's Proposition 3.

    delta^C has rank r = 1 (of C outputs under a softmax, C - 1), so its singular vectors give W_t = axis_t x_t and
    delta_t = rows_t y_t up to an r × r matrix x_t, with y_t = x_t^-T. The update W_{t+1} = W_t - (rate / B) mu_t^T
    delta_t, with momentum and weight decay if there are, is then linear in all x_t and y_t: its null space gives them
    up to one matrix for all steps, and x_t^T y_t = 1 fixes that up to a rotation, for one output a sign. Known are
    delta^C, mu, the rate and the optimizer, all of which the passive party has by right. The rotation is found too,
    since a row of softmax(z) - y has one negative entry; what remains open is the names of the classes.

    Two consecutive batches are enough for r = 1. Where noise on delta^C, or too few features, spoil the updates,
    ``vflsec.inference.recordings.pooled`` pools the batches of the whole run instead: W moves little from one to the
    next, and a sample's label is the same at every visit. Averages over batches and visits then cancel the noise.

    Source: derived from PrADA (arXiv 2111.10120), Algorithm 5, lines 15 to 22; the extension to many batches,
    momentum and several outputs is this package's.
    """

    name = "delta-chain"
    wants = frozenset({Need.AUX_LABELS})
    reference = "derived from PrADA, arXiv 2111.10120, Algorithm 5; refutes its Proposition 3"
    verified = "all labels and W of runs whose truth is known, with momentum, weight decay, several outputs and noise"
    costs = "a singular value decomposition for each batch, of 32 batches together for each window"
    fails = "if the extractor does not train, so that no delta^C is sent; noise only slows it down"

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return scores (k, C) of the samples by their loss gradients; known labels name the classes.

        Raises:
            InsufficientView: there are fewer features than outputs, or no delta^C.
        """
        chain = recover_chain(get_recording(view))
        ids, delta = chain.collect_last_visits()
        scores = compute_scores(delta)
        guess = guess_of_samples(view, ids, scores[:, name_columns(view, ids, scores)], chain.note)
        return replace(guess, facts=chain.facts)


class DeltaChainWeights(RecordingAttack):
    """W as ``delta-chain`` reads it from the gradients of all batches, up to what all outputs have in common.

    A softmax does not depend on what all outputs have in common, and neither does a label: W is scored without it.

    Source: derived from PrADA (arXiv 2111.10120), Algorithm 5, lines 15 to 22.
    """

    name = "delta-chain-weights"
    target = "parameters"
    wants = frozenset({Need.AUX_LABELS})
    reference = DeltaChain.reference
    verified = DeltaChain.verified
    costs = DeltaChain.costs
    fails = "as delta-chain; of several outputs what they have in common is not determined"
    relative: ClassVar[bool] = True
    """Whether the guess is of W without the mean over its outputs."""

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return the entries (P, 1) of W at all steps that are used; known labels name the outputs.

        Raises:
            InsufficientView: as ``delta-chain``, or the recording has no share of W.
        """
        recording = get_recording(view)
        chain = recover_chain(recording)
        after = recording.header.layout.order == "paper"  # delta^C of a step then tells W of the next
        ids, delta = chain.collect_last_visits()
        order = name_columns(view, ids, compute_scores(delta)).numpy()
        parts = [(get_entries(recording, number + after), read.weights) for number, read in chain.steps.items()]
        parts = [(rows, weights) for rows, weights in parts if len(rows)]
        if not parts:
            raise InsufficientView("expected the role's share of W at the steps that are used, got none")
        stacked = np.stack([weights for _, weights in parts])
        stacked = stacked[:, :, order] if delta.shape[1] > 1 else stacked * (1 - 2 * int(order[0]))
        guess = torch.from_numpy(np.ascontiguousarray(stacked).reshape(-1, 1))
        rows = torch.cat([rows for rows, _ in parts])
        return Guess({"parameters": guess}, rows={"parameters": rows}, facts=chain.facts, notes=(chain.note,))


def compute_scores(delta: Floats) -> Tensor:
    """Return the score (B, 2 or C) of each class, by the loss gradients (B, C); that of one output is of class 1."""
    scores = torch.from_numpy(-delta)
    return torch.cat([-scores, scores], dim=1) / 2 if delta.shape[1] == 1 else scores


class ReadStep(NamedTuple):
    """What one step tells: of which samples, their loss gradients (B, C), and W (g, C), outputs in any order."""

    ids: NDArray[np.int64]
    delta: Floats
    weights: Floats


class Chain(NamedTuple):
    """What all steps tell, by number."""

    steps: Mapping[int, ReadStep]
    note: str
    facts: tuple[Fact, ...] = ()

    def collect_last_visits(self) -> tuple[NDArray[np.int64], Floats]:
        """Return the samples (n,) and the loss gradient (n, C) of the last visit of each."""
        ids = np.concatenate([read.ids for read in self.steps.values()])
        delta = np.concatenate([read.delta for read in self.steps.values()])
        different, last = np.unique(ids[::-1], return_index=True)
        return different, delta[len(ids) - 1 - last]


@lru_cache(maxsize=1)
def recover_chain(recording: Recording) -> Chain:
    """Return what the passive party recovers without knowing any label."""
    outputs, width = recording.header.layout.outputs, recording.header.layout.width
    rank = max(1, outputs - 1)
    if width < rank:
        raise InsufficientView(f"expected at least {rank} features for {outputs} outputs, got {width}")
    chained = _chain(recording, outputs, rank) if width >= 2 * rank else None
    return chained or _pool_batches(recording, outputs)


def name_columns(view: View, ids: NDArray[np.int64], scores: Tensor) -> Tensor:
    """Return the order (C,) of the columns of ``scores`` in which most auxiliary labels are the largest."""
    classes = scores.shape[1]
    place = {row: at for at, row in enumerate(locate(get_recording(view), ids).tolist())}
    counts = np.zeros((classes, classes))
    for row, label in zip(view.aux_rows.tolist(), view.aux_labels.tolist(), strict=True):
        if row in place and label < classes:
            counts[int(label), int(scores[place[row]].argmax())] += 1
    return torch.from_numpy(linear_sum_assignment(-counts - 0.1 * np.eye(classes))[1])


def _chain(recording: Recording, outputs: int, rank: int) -> Chain | None:
    """Return what the updates of consecutive batches give; None where there are none, or noise spoils them."""
    rng = np.random.default_rng(0)
    steps: dict[int, ReadStep] = {}
    solved: list[Solved] = []
    turn = np.eye(rank)
    for window in _list_windows(recording, rank, rng):
        now = _solve(window, recording.header)
        shared = window[0].number
        if solved and shared in solved[-1].weights:
            turn = find_rotation(now.weights[shared], solved[-1].weights[shared]) @ turn
        else:
            turn = find_orientation(np.concatenate(list(now.delta.values())), outputs, rng)
        for release in window:
            delta, weights = now.delta[release.number], now.weights[release.number]
            steps[release.number] = ReadStep(release.ids, delta @ turn, weights @ turn)
        solved.append(now)
    if not solved:
        return None
    residual, chance = (float(np.median(side)) for side in zip(*(part[2:] for part in solved), strict=True))
    if residual > CONSISTENT:
        return None
    note = f"W, delta and labels of {len(steps)} batches; the updates fit them up to {residual:.0e}"
    return Chain(steps, note, (Fact("weights", "consistency", 1 - residual, len(steps), 1 - chance),))


def _pool_batches(recording: Recording, outputs: int) -> Chain:
    """Return what the gradients of all batches give together."""
    width = recording.header.layout.width
    each = (batch for step in recording.steps() if (batch := _get_batch(step)))
    batches = deque(each, maxlen=max(1, MAX_ENTRIES // width**2))
    if not batches:
        raise InsufficientView("expected delta^C of a step that learns, and not all zero, got none")
    labels = pool(batches, outputs, np.random.default_rng(0))
    steps = {
        batch.number: ReadStep(batch.rows, labels.delta[samples], labels.weights[batch.number])
        for batch, samples in zip(batches, labels.samples, strict=True)
    }
    note = f"labels of {len(labels.delta)} samples from delta^C of {len(batches)} batches, pooled"
    note += f"; noise of deviation {labels.noise:.2g} on every coordinate" if labels.noise else ""
    return Chain(steps, note)


def _get_batch(step: RecordedStep) -> GradientBatch | None:
    """Return what the passive party has of a step; where no rows are noted, each is taken to be a sample of its own."""
    if step.rate is None or not step.has("embedding_gradient") or not step.notes["embedding_gradient"].any():
        return None
    return GradientBatch(step.number, get_ids(step), step.notes.get("mu"), step.notes["embedding_gradient"])


def _list_windows(recording: Recording, rank: int, rng: np.random.Generator) -> Iterator[list[GradientFactors]]:
    """Yield runs of two to WINDOW consecutive learning steps; each goes on with the last step of the one before."""
    window: list[GradientFactors] = []
    last = -1
    for step in recording.steps():
        if step.rate is None and last == step.number - 1:  # inference moves nothing
            last = step.number
            continue
        release = _release(step, rank, window[-1].axis if window else None, rng)
        if window and (release is None or step.number != last + 1):
            if len(window) > 1:
                yield window
            window = []
        if release:
            window.append(release)
            if len(window) == WINDOW:
                yield window
                window = window[-1:]
        last = step.number
    if len(window) > 1:
        yield window


def _release(step: RecordedStep, rank: int, before: Floats | None, rng: np.random.Generator) -> GradientFactors | None:
    """Return the factors of delta^C, the axes turned to agree with ``before``; None where it is not of this rank."""
    if step.rate is None or not step.has("embedding_gradient", "mu"):
        return None
    left, sizes, right = np.linalg.svd(step.notes["embedding_gradient"], full_matrices=False)
    if len(sizes) < rank or not sizes[rank - 1] > RANK * sizes[0]:
        return None
    axis, mu = right[:rank].T, step.notes["mu"]
    turn = np.eye(rank) if before is None else find_rotation(axis, before)
    rows = (left[:, :rank] * sizes[:rank]) @ turn
    blind = rng.permutation(mu).T @ rows / len(mu)
    return GradientFactors(step.number, step.rate, get_ids(step), rows, axis @ turn, mu.T @ rows / len(mu), blind)


def _solve(window: Sequence[GradientFactors], header: Header) -> Solved:
    """Solve the updates of a window for x_t and y_t; where they do not fit, take the axes as they are."""
    rank = window[0].rows.shape[1]
    x, residual = _solve_chain(_join_updates(window, header, [release.pull for release in window]), len(window), rank)
    _, chance = _solve_chain(_join_updates(window, header, [release.blind for release in window]), len(window), rank)
    if residual > CONSISTENT:
        x = np.broadcast_to(np.eye(rank), x.shape)
    weights = {release.number: release.axis @ map_ for release, map_ in zip(window, x, strict=True)}
    delta = {release.number: release.rows @ np.linalg.inv(map_).T for release, map_ in zip(window, x, strict=True)}
    return Solved(weights, delta, residual, chance)


def _join_updates(window: Sequence[GradientFactors], header: Header, pulls: Sequence[Floats]) -> Floats:
    """Return the updates as a system (equations, 2 T r) in x_0, ..., x_{T-1}, y_0, ..., y_{T-1}.

    W_{t+1} - W_t = -rate_t V_t with V_t = momentum V_{t-1} + mu_t^T delta_t / B + weight_decay W_t, and V_{t-1} is what
    the step before has moved.
    """
    rank, shift = window[0].rows.shape[1], int(header.layout.order == "paper")  # then the axis is that of W_{t+1}
    rows = []
    for t, (release, pull) in enumerate(zip(window, pulls, strict=True)):
        after, now, before = t + 1 - shift, t - shift, t - 1 - shift
        moves = header.momentum > 0 and release.number > 0
        if after >= len(window) or now < 0 or (moves and before < 0):
            continue
        parts = {after: 1.0, now: release.rate * header.weight_decay - 1}
        if moves:
            kept = header.momentum * release.rate / window[t - 1].rate
            parts |= {now: parts[now] - kept, before: kept}
        row = np.zeros((len(pull), 2, len(window), rank))
        for index, factor in parts.items():
            row[:, 0, index] = factor * window[index].axis
        row[:, 1, t] = release.rate * pull
        rows.append(row.reshape(len(pull), -1))
    return np.concatenate(rows) if rows else np.zeros((0, 2 * len(window) * rank))


def _solve_chain(system: Floats, steps: int, rank: int) -> tuple[Floats, float]:
    """Return x (T, r, r), scaled so that x_t^T y_t = 1 on average, and the ratio of singular values; 1 if it has none.

    Unknowns that no equation holds stand for steps of which only one of x and y is determined; y = x^-T anyway.
    """
    used = np.abs(system).max(axis=0, initial=0) > 0
    scale = np.linalg.norm(system, axis=0)
    scale[: steps * rank] = 1  # axes are of length 1
    scale[~used] = 1
    if not used[: steps * rank].all():
        return np.broadcast_to(np.eye(rank), (steps, rank, rank)), 1.0
    _, sizes, right = np.linalg.svd((system / scale)[:, used])
    sizes = np.append(sizes, np.zeros(used.sum() - len(sizes)))
    unknowns = np.zeros((2 * steps * rank, rank))
    unknowns[used] = right[-rank:].T / scale[used, None]
    x, y = unknowns.reshape(2, steps, rank, rank)
    both = used[steps * rank :].reshape(steps, rank).all(axis=1)
    product = np.mean(x[both].transpose(0, 2, 1) @ y[both], axis=0)  # R^T R, of the unknown R
    values, vectors = np.linalg.eigh((product + product.T) / 2)
    if not sizes[-rank - 1] > 0 or not values[0] > 0:
        return np.broadcast_to(np.eye(rank), (steps, rank, rank)), 1.0
    return x @ (vectors / np.sqrt(values)), float(sizes[-rank] / sizes[-rank - 1])
