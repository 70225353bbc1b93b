"""What a batch costs: multiplications counted, and their price measured on this machine."""

import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

import gmpy2
from gmpy2 import mpz

from vflsec.cipher.arithmetic.keys import ORDER_BITS
from vflsec.cipher.arithmetic.layout import CipherLayout, Mode
from vflsec.cipher.arithmetic.powers import choose_digits, choose_window, find_fixed_base_window, find_fixed_window
from vflsec.cipher.arithmetic.randomizers import COSETS, SLACK, WITHOUT_TABLE


class Work(NamedTuple):
    """What a full batch takes of the two parties together, tables not counted.

    Attributes:
        half: multiplications by two residues modulo the square of a prime factor of n: two digits of a randomizer of C.
        powers: powers modulo such a square, two for each decryption.
        full: multiplications modulo n^2.
        digits: multiplications by two residues modulo n^2: two digits of a randomizer of p.
        residues: powers r^n modulo n^2, where the active party has no table.
    """

    half: float
    powers: float
    full: float
    digits: float
    residues: float


def count_ops(layout: CipherLayout, batches: int = 100) -> Work:
    """Return the work of a full batch that the model learns from, among ``batches`` of them: expected counts."""
    to_labels, to_key = layout.traffic
    bits, mode, drawn = layout.bits, layout.mode, to_labels + to_key  # the decrypting party draws as well
    half = 2 * drawn * count_pairs(bits, mode, batches * drawn, through_factors=True)
    full = to_labels + 3 * to_key + _count_forward(layout) + _count_gradient(layout) + _count_delta(layout)
    if mode != "subgroup" and batches * to_key <= WITHOUT_TABLE:
        return Work(half, 2 * to_key, full, 0, to_key)
    digits = to_key * count_pairs(bits, mode, batches * to_key, through_factors=False)
    return Work(half, 2 * to_key, full, digits, 0)


def time_units(bits: int, mode: Mode = "standard", seconds: float = 0.4) -> Work:
    """Return the CPU seconds of one of each on this machine, each measured for ``seconds``."""
    half, full = _draw_odd(bits), _draw_odd(2 * bits)
    exponents = mpz(secrets.randbits(_order_bits(bits, mode))), mpz(secrets.randbits(bits))
    base = mpz(secrets.randbits(bits - 1))
    return Work(
        half=_time(lambda: _multiply_halves(half), 1000, seconds),
        powers=_time(lambda: gmpy2.powmod(base, exponents[0], half), 1, seconds),
        full=_time(lambda: _multiply(full), 1000, seconds),
        digits=_time(lambda: _multiply_halves(full), 1000, seconds),
        residues=_time(lambda: gmpy2.powmod(base, exponents[1], full), 1, seconds),
    )


def estimate(layout: CipherLayout, batches: int = 100) -> float:
    """Return the CPU seconds that a full batch takes of both parties together, by a calibration of two seconds.

    Tables are not counted; they are a few seconds once. Two cores take a little more than half of it in wall time.
    """
    counts, seconds = count_ops(layout, batches), time_units(layout.bits, layout.mode)
    return sum(count * each for count, each in zip(counts, seconds, strict=True))


def count_pairs(bits: int, mode: Mode, uses: int, *, through_factors: bool) -> int:
    """Return the pairs of a randomizer's digits, plus one for its slope.

    The holder of a key of ``bits`` bits draws ``through_factors`` of n, the other party by a table modulo n^2.
    """
    if through_factors:
        exponent = _order_bits(bits, mode)
        places = -(-exponent // find_fixed_base_window(bits, exponent, uses))
    else:
        exponent = 2 * ORDER_BITS + SLACK if mode == "subgroup" else bits + SLACK
        window = find_fixed_base_window(2 * bits, exponent, uses)
        places = -(-exponent // window) + (0 if mode == "subgroup" else -(-COSETS // window))
    return -(-places // 2) + 1


def _count_forward(layout: CipherLayout) -> float:
    """Multiplications modulo n^2 of z~ = mu W~: one table of odd powers for each feature and block of samples."""
    window = choose_window(layout.ring, layout.outputs)
    product = layout.ring + layout.width * layout.ring / (window + 1)
    return layout.scores.count(layout.batch) * (layout.width * (1 << window - 1) + layout.outputs * product)


def _count_gradient(layout: CipherLayout) -> float:
    """Multiplications modulo n^2 of dW = mu^T delta."""
    packing, bits = layout.gradients, layout.delta_precision + layout.delta_bits
    bases, rows = packing.count(layout.batch) // packing.blocks, min(layout.batch, packing.rows)
    window = choose_digits(bases, bits)
    digits = -(-(bits + 2) // window)
    product = digits * (bases + (1 << window) + window) + 1
    origin = 1.25 * window * (digits + 1)
    return packing.blocks * (3 * (bases + 1) + origin + layout.outputs * rows * product)


def _count_delta(layout: CipherLayout) -> float:
    """Multiplications modulo n^2 of delta W^T."""
    rows = min(layout.outputs, layout.batch) if layout.low_rank else layout.batch
    packing, bits = layout.deltas, layout.delta_precision + layout.delta_bits
    packed = min(packing.rows, rows)
    bases, products = packed * layout.outputs, -(-rows // packed)
    window = find_fixed_window(bits, products)
    shifts = (packed - 1) * layout.outputs * packing.slot * packing.columns
    tables = bases * ((1 << window) - 1) + layout.outputs
    product = -(-(bits + 2) // window) * (window + bases)
    return packing.blocks * (shifts + tables + (products + 1) * product + products)


def _order_bits(bits: int, mode: Mode) -> int:
    return ORDER_BITS if mode == "subgroup" else bits // 2


def _draw_odd(bits: int) -> mpz:
    return mpz(secrets.randbits(bits) | 1 << bits - 1 | 1)


def _multiply(modulus: mpz) -> None:
    """Multiply a thousand times."""
    factors = _draw_numbers(modulus.bit_length())
    [a * b % modulus for a, b in zip(factors[::-1], factors, strict=True)]


def _multiply_halves(modulus: mpz) -> None:
    """Multiply a thousand times by two numbers half as long, as the tables of randomizers are used."""
    size = modulus.bit_length()
    factors = zip(_draw_numbers(size), _draw_numbers(size // 2), _draw_numbers(size // 2), strict=True)
    [a * (b * c) % modulus for a, b, c in factors]


def _draw_numbers(bits: int) -> list[mpz]:
    return [mpz(secrets.randbits(bits - 1)) for _ in range(8)] * 125


def _time(call: Callable[[], object], times: int, budget: float) -> float:
    """Return the CPU seconds of one of the ``times`` that a call does, the mean of calls for ``budget`` seconds."""
    calls, began = 0, time.process_time()
    while (spent := time.process_time() - began) < budget:
        call()
        calls += 1
    return spent / calls / times
