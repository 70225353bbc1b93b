"""What the passive party reads below masks that are coarser than what they hide: the low-order bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vflsec.base.checks import count
from vflsec.base.errors import InsufficientView
from vflsec.cipher.recording import Recording
from vflsec.inference.recordings.masked import Masked, masked_scores
from vflsec.secure.transcripts.audit import Audit, Figure, Recovered, Truth

STEPS = 16
"""How many batches are tried: masks are of one kind in all."""

SURPLUS = 40
"""Bits that must agree beyond those that the unknowns take up: by accident they do once in 2^40 times."""


class LowBits(Audit):
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
    role = "passive"
    reads = "masked scores of one batch, and mu"
    mitigation = "masks that are integers at the unit of the message, uniform over 2^sigma times its range"
    reference = "derived from PrADA, Algorithm 4, in floating-point encodings"

    def run(self, recording: Recording) -> Recovered:
        """Return ``share`` (g, C), integers in units of 2^-64, of each batch tried; None where no bit is bare."""
        header = recording.header
        steps: dict[int, dict[str, NDArray[Any]]] = {}
        bare, rows, most = [], 0, 0
        for step in recording.steps():
            masked = masked_scores(step, header)
            if masked is None or len(masked.mu) <= header.layout.width:
                continue
            rows = max(rows, len(masked.mu))
            unit = masked.precision - masked.feature_precision
            share = np.full((header.layout.width, header.layout.outputs), None, dtype=object)
            solved = {c: column for c in range(header.layout.outputs) if (column := _bare(masked, c))}
            for output, column in solved.items():
                share[:, output] = [w * (1 << 64) // (1 << unit) for w in column.weights]
            steps[step.number] = {"share": share}
            bare += [min(column.bits for column in solved.values())] if solved else []
            most = max(most, len(solved))
            if len(steps) == STEPS:
                break
        if not steps:
            raise InsufficientView(f"expected masked scores of more than {header.layout.width} samples, got none")
        found = f"low-order bits are bare in {len(bare)} of {count(len(steps), 'batch', 'batches')}"
        if bare:
            found += f", {min(bare)} of them, which give the active party's share of W"
        else:
            needed = -(-SURPLUS // (rows - header.layout.width))
            found += f"; {'one bare bit' if needed == 1 else f'{needed} bare bits'} would have been noticed"
        size = header.layout.width * header.layout.outputs
        own = Figure(of="weights", metric="share", value=most / header.layout.outputs, chance=0.0, n=size)
        return Recovered(found, steps, (own,))

    def score(self, recovered: Recovered, truth: Truth) -> tuple[Figure, ...]:
        """Return the proportion of exact weights from one batch, of the active party's share or of all of W."""
        true = truth.at(list(recovered.steps))
        hits = [
            int((arrays["share"] == true[number][name]).sum())
            for number, arrays in recovered.steps.items()
            for name in ("active share", "sum")
            if name in true[number]
        ]
        if not hits:
            return ()
        size = truth.header.layout.width * truth.header.layout.outputs
        return (Figure(of="weights", metric="share", value=max(hits) / size, chance=0.0, n=size),)


def _bare(masked: Masked, output: int) -> Solution | None:
    """Return the solution modulo the largest 2^k that has one; None where that can be an accident."""
    mu, scores = masked.mu.tolist(), masked.scores[:, output].tolist()
    low, high = 0, max(score.bit_length() for score in scores) + 1
    best = None
    while low < high:  # solvable modulo 2^k implies solvable modulo 2^(k - 1)
        bits = (low + high + 1) // 2
        found = solve(mu, scores, bits)
        if found is None:
            high = bits - 1
        else:
            low, best = bits, found
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
        twos, at, column = min((_twos(row[c], bits), i, c) for i, row in enumerate(rows) for c in left)
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


def _twos(value: int, most: int) -> int:
    """Return how many factors 2 an integer has, at most ``most``, which zero has."""
    return min((value & -value).bit_length() - 1, most) if value else most
