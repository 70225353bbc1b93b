"""What the passive party reads below masks that are coarser than what they hide: the low-order bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vflsec.base.checks import count
from vflsec.base.errors import InsufficientView
from vflsec.core.view import Fact, Guess, View
from vflsec.inference.recordings.samples import (
    Masked,
    RecordingAttack,
    get_masked_scores,
    get_recording,
    guess_of_weights,
)

STEPS = 16  # how many batches are tried: masks are of one kind in all
SURPLUS = 40  # bits that must agree beyond those that the unknowns take up: by accident they do once in 2^40 times


class LowBits(RecordingAttack):
    """The passive party solves for W below the granularity of float masks: they are no masks, whatever their size.

    A homomorphic sum is exact. A product of two floats reaches down to 2^-110, a float mask of 2^10 only to 2^-42, and
    what lies below it is mu W unmasked: mu W = v modulo 2^k, in integers, with mu and v known to the passive party.
    With a few rows more than features, Gaussian elimination modulo 2^k gives W, and whether it can be solved says
    whether the low k bits are bare; the largest such k is searched. A larger mask is coarser and bares more. Masks that
    are uniform integers at the unit of the message leave no bit bare, and the system has no solution modulo 2 already.

    Source: derived from PrADA (arXiv 2111.10120), Algorithm 4, line 8, with the floating-point encoding of common
    Paillier libraries; refutes its Proposition 3 for them.
    """

    name = "low-bits"
    target = "parameters"
    metric = "exact"
    reference = "derived from PrADA, arXiv 2111.10120, Algorithm 4, in floating-point encodings"
    verified = "W to the last bit under float masks of a common Paillier library; no bit under integer masks"
    costs = "Gaussian elimination modulo powers of two, on at most 16 batches"
    fails = "under masks that are integers at the unit of the message, uniform over 2^sigma times its range"

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return W (g, C) of the batch that gives most; half a unit stands for an entry that is not found.

        Raises:
            InsufficientView: no batch has more samples than features.
        """
        recording = get_recording(view)
        header = recording.header
        size, tried = (header.layout.width, header.layout.outputs), 0
        bare, rows = [], 0
        best: tuple[int, int, NDArray[np.float64]] = (-1, 0, np.zeros(size))
        for step in recording.steps():
            masked = get_masked_scores(step, header)
            if masked is None or len(masked.mu) <= header.layout.width:
                continue
            rows, tried = max(rows, len(masked.mu)), tried + 1
            solved = {c: column for c in range(size[1]) if (column := _solve(masked, c))}
            bare += [min(column.bits for column in solved.values())] if solved else []
            if len(solved) > best[0]:
                best = (len(solved), step.number, _get_weights(masked, solved, size))
            if tried == STEPS:
                break
        if not tried:
            raise InsufficientView(f"expected masked scores of more than {size[0]} samples, got none")
        note = f"low-order bits are bare in {len(bare)} of {count(tried, 'batch', 'batches')}"
        if bare:
            note += f", {min(bare)} of them, which give W"
        else:
            needed = -(-SURPLUS // (rows - size[0]))
            note += f"; {'one bare bit' if needed == 1 else f'{needed} bare bits'} would have been noticed"
        fact = Fact("weights", "share", best[0] / size[1], size[0] * size[1])
        if not best[0]:
            return Guess(facts=(fact,), notes=(note,))
        return replace(guess_of_weights(view, best[1], best[2], note), facts=(fact,))


def _get_weights(masked: Masked, solved: Mapping[int, Solution], size: tuple[int, int]) -> NDArray[np.float64]:
    """Return W (g, C) with the columns that are ``solved``."""
    units = np.full(size, 0.5, dtype=object)  # of 2^-64; no W is half a unit
    for output, column in solved.items():
        unit = masked.precision - masked.feature_precision
        units[:, output] = [w * (1 << 64) // (1 << unit) for w in column.weights]
        units[:, output] += masked.added[:, output]
    return np.ldexp(units.astype(np.float64), -64)


def _solve(masked: Masked, output: int) -> Solution | None:
    """Return the solution modulo the largest 2^k that has one; None where that can be an accident."""
    mu, scores = masked.mu.tolist(), masked.scores[:, output].tolist()
    low, high = 0, max(score.bit_length() for score in scores) + 1
    best = None
    while low < high:  # solvable modulo 2^k implies solvable modulo 2^(k - 1)
        bits = (low + high + 1) // 2
        solution = solve(mu, scores, bits)
        if solution is None:
            high = bits - 1
        else:
            low, best = bits, solution
    return best if best and (len(mu) - len(best.weights)) * best.known >= SURPLUS else None


class Solution(NamedTuple):
    """Of a linear system modulo 2^``bits``: integers nearest to zero, of which ``known`` low-order bits are certain."""

    weights: list[int]
    bits: int
    known: int


def solve(matrix: Sequence[Sequence[int]], values: Sequence[int], bits: int) -> Solution | None:
    """Solve ``matrix`` w = ``values`` modulo 2^``bits``; None if there is no solution.

    Gaussian elimination over the integers modulo 2^bits, with an entry of the fewest factors 2 as pivot, which so
    divides all that are left.
    """
    modulus, width = 1 << bits, len(matrix[0])
    rows = [[entry % modulus for entry in row] + [value % modulus] for row, value in zip(matrix, values, strict=True)]
    pivots: list[tuple[int, int, list[int]]] = []
    left = list(range(width))
    while left:
        twos, at, column = min((_count_twos(row[c], bits), i, c) for i, row in enumerate(rows) for c in left)
        if twos == bits:
            break  # all that is left is zero
        pivot = rows.pop(at)
        inverse = pow(pivot[column] >> twos, -1, modulus)
        pivot = [entry * inverse % modulus for entry in pivot]
        if pivot[-1] % (1 << twos):
            return None
        for row in rows:
            factor = row[column] >> twos
            row[:] = [(a - factor * b) % modulus for a, b in zip(row, pivot, strict=True)]
        left.remove(column)
        pivots.append((twos, column, pivot))
    if any(row[-1] for row in rows):
        return None
    known = 0 if left else bits - pivots[-1][0]
    weights = [0] * width
    for twos, column, pivot in reversed(pivots):
        rest = sum(pivot[c] * weights[c] for c in range(width) if c != column)
        weights[column] = ((pivot[-1] - rest) >> twos) % (modulus >> twos)
    half = 1 << max(known - 1, 0)
    return Solution([(w + half) % (1 << known) - half if known else 0 for w in weights], bits, known)


def _count_twos(value: int, most: int) -> int:
    """Return how many factors 2 an integer has, at most ``most``, which zero has."""
    return min((value & -value).bit_length() - 1, most) if value else most
