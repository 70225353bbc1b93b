"""What both parties agree on: key size, precisions, the strength of masks, and the slot widths that follow."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Literal, NamedTuple

import msgspec

from vflsec.base.checks import check_non_negative, check_positive, expect_known
from vflsec.base.errors import UsageError

Mode = Literal["standard", "subgroup"]
MODES = ("standard", "subgroup")
MAX_BITS = 16  # that feature_bits, weight_bits and delta_bits may be
SPARE_BITS = 12  # left empty above the slots: a plaintext that fills them is not one of ours
_DECRYPTIONS = 10  # encryptions that re-randomizing a ciphertext at both parties and decrypting it cost


class Packing(NamedTuple):
    """How rows of numbers lie in ciphertexts.

    Attributes:
        slot: bits of one number.
        columns: numbers of one row in one ciphertext.
        rows: rows in one ciphertext.
        blocks: ciphertexts that a whole row spans; the last is filled up with zeros.
    """

    slot: int
    columns: int
    rows: int
    blocks: int

    def count(self, rows: int) -> int:
        """Return how many ciphertexts ``rows`` rows take."""
        return self.blocks * -(-rows // self.rows)


class Traffic(NamedTuple):
    """How many ciphertexts cross for a full batch that the model learns from.

    Attributes:
        to_labels: from the passive to the active party; the passive party encrypts them.
        to_key: from the active to the passive party; both re-randomize them, and the passive party decrypts them.
    """

    to_labels: int
    to_key: int


class CipherSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Every setting of the encrypted layer.

    ``--defense phe:...``, ``[paillier]`` of a job, the boundaries and the layout all take these fields.

    Args:
        bits: size of the key; 2048 is about 112 bits of security, 3072 about 128; 1024 is for tests.
        mode: ``standard`` (decisional composite residuosity alone) or ``subgroup`` (faster, with an assumption of its
            own: see ``vflsec.cipher.arithmetic.keys``).
        sigma: a masked value is within 2^-sigma (statistical distance) of one that depends on nothing, for each value.
        ring: scores are taken modulo 2^ring, so that |z| < 2^(ring - 2 - feature_precision - weight_precision), 2^12
            by default. A ring of 56 is a little faster; with feature_precision=20 it leaves |z| < 2^6.
        feature_precision: fractional bits of the features.
        feature_bits: features lie within 2^feature_bits of 0.
        weight_precision: fractional bits of the weights wherever they meet a ciphertext; shares have 64.
        weight_bits: weights lie within 2^weight_bits of 0.
        delta_precision: fractional bits of the loss gradients.
        delta_bits: loss gradients of single samples lie within 2^delta_bits of 0. None for what the run needs: 0 for
            cross-entropy, and more where a defense of the active party adds noise or penalties.
        delta: ``rank1`` sends as many rows of delta^C as it can have rank, and how the others depend on them, in clear;
            ``outer`` sends every row, as the paper does.
        order: ``current`` takes delta^C at the weights W_t, ``paper`` at W_{t+1} as line 22 of Algorithm 5 prints.
        noise: standard deviation of the Gaussian noise that the active party adds to every coordinate of delta^C,
            relative to the largest row of delta; needs ``delta=outer``.
        score_noise: standard deviation, in units of the scores, of the Gaussian noise that the passive party adds to
            every score before the active party sees it, in training and in prediction; at most a tenth of what a score
            can be.
        max_passes: the passive party answers at most so many passes of each sample; 0 for no limit. A batch that is
            done again after a broken connection counts once.

    Raises:
        UsageError: a number out of range, or noise without ``delta=outer``.
    """

    bits: int = 2048
    mode: Mode = "standard"
    sigma: int = 40
    ring: int = 64
    feature_precision: int = 22
    feature_bits: int = 4
    weight_precision: int = 28
    weight_bits: int = 10
    delta_precision: int = 23
    delta_bits: int | None = None
    delta: Literal["rank1", "outer"] = "rank1"
    order: Literal["current", "paper"] = "current"
    noise: float = 0.0
    score_noise: float = 0.0
    max_passes: int = 0

    def __post_init__(self) -> None:
        """Check every number."""
        expect_known(MODES, mode=self.mode)
        expect_known(("rank1", "outer"), delta=self.delta)
        expect_known(("current", "paper"), order=self.order)
        for name, least, most in _RANGES:
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise UsageError(f"expected {least} <= {name} <= {most}, got {value}")
        for name in ("noise", "score_noise"):
            if not 0 <= (deviation := getattr(self, name)) < float("inf"):
                raise UsageError(f"expected a finite {name} >= 0, got {deviation}")
        check_non_negative(max_passes=self.max_passes)
        if self.bits % 8:
            raise UsageError(f"expected bits in whole bytes, got {self.bits}")
        if self.noise and self.delta != "outer":
            raise UsageError(
                f"expected delta=outer with noise on every coordinate of delta^C, got delta={self.delta}: set it"
            )
        if self.score_bits < 1:
            raise UsageError(
                f"expected ring >= feature_precision + weight_precision + 3 = {self.ring - self.score_bits + 1}, "
                f"got {self.ring}"
            )
        if self.score_noise > (most := 2**self.score_bits / 10):
            raise UsageError(
                f"expected score_noise <= {most:g}, a tenth of the 2^{self.score_bits} that scores stay below, got "
                f"{self.score_noise:g}: lower it, or lower weight_precision or feature_precision"
            )

    @property
    def score_bits(self) -> int:
        """|z| < 2^score_bits, half of what the ring can tell apart.

        A score up to three times as large is refused. One still larger wraps, and where it wraps to cannot be told
        from a small one in half of the cases; a model that has grown so far is refused by delta W^T or by other rows.
        """
        return self.ring - 2 - self.feature_precision - self.weight_precision

    def layout(self, *, width: int, outputs: int, batch: int, delta_bits: int = 0) -> CipherLayout:
        """Return the layout for these shapes; ``delta_bits`` is what None stands for."""
        settings = msgspec.structs.asdict(self)
        if self.delta_bits is None:
            settings["delta_bits"] = delta_bits
        return CipherLayout(width=width, outputs=outputs, batch=batch, **settings)

    def allow(self, passes: int, what: str = "training samples") -> None:
        """Raise UsageError if a run needs more ``passes`` of ``what`` than ``max_passes``; called before training."""
        if 0 < self.max_passes < passes:
            raise UsageError(
                f"expected at most max_passes = {self.max_passes} passes of the {what}, got a run that takes {passes}: "
                "train for fewer epochs, or raise max_passes"
            )


MAX_SIZE = 1 << 16  # the most features, outputs, and samples in a batch: a layout of more would take minutes to compute


class CipherLayout(CipherSpec, frozen=True, kw_only=True):
    """The agreement of the two parties: the settings and the shapes; two processes compare theirs before they begin.

    Every kind of number has one public exponent, so that nothing travels but integers of a fixed range. The features
    mu, the weights W and the loss gradients delta are integers in units of 2^-precision. Masks are uniform on ranges
    2^sigma times as wide as what they hide. Slots have room for the worst case: none can overflow into another.

    Source: PrADA (Algorithms 4 and 5) for what is exchanged; packing and ring are this package's.

    Attributes:
        width: the number g of features.
        outputs: the number C of outputs, 1 for a logistic regression.
        batch: the largest number B of samples in a batch.
        delta_bits: as in ``CipherSpec``, but known.

    Raises:
        UsageError: a number out of range, or a key too small for one slot.
    """

    width: int
    outputs: int = 1
    batch: int = 128
    delta_bits: int = 0

    def __post_init__(self) -> None:
        """Check every number, and that each kind of message fits the key."""
        super().__post_init__()
        check_positive(width=self.width, outputs=self.outputs, batch=self.batch)
        if max(self.width, self.outputs, self.batch) > MAX_SIZE:
            got = f"{self.width}, {self.outputs} and {self.batch}"
            raise UsageError(f"expected at most {MAX_SIZE} features, outputs and samples in a batch, got {got}")
        for what, slot in (
            ("score", self.score_slot),
            ("weight gradient", self._gradient_slot),
            ("embedding gradient", self._delta_slot),
        ):
            if slot > self.room:
                raise UsageError(f"expected a key with room for a {what} of {slot} bits, got {self.room}; raise bits")

    @property
    def room(self) -> int:
        """Bits of a plaintext that slots may fill."""
        return self.bits - 1 - SPARE_BITS

    @property
    def feature_bound(self) -> int:
        """Largest |mu| as an integer."""
        return 1 << self.feature_precision + self.feature_bits

    @property
    def delta_bound(self) -> int:
        """Largest |delta| as an integer."""
        return 1 << self.delta_precision + self.delta_bits

    @property
    def weight_bound(self) -> int:
        """Largest |W| as an integer."""
        return 1 << self.weight_precision + self.weight_bits

    @property
    def score_bound(self) -> int:
        """Largest |mu W~| as an integer, for one sample and output, with W~ anywhere in the ring."""
        return self.width * self.feature_bound << self.ring

    @property
    def gradient_bound(self) -> int:
        """Largest |mu^T delta| as an integer, for one weight."""
        return self.batch * self.feature_bound * self.delta_bound

    @property
    def score_slot(self) -> int:
        """Bits of one masked score."""
        return (self.score_bound * (2 + (1 << self.sigma))).bit_length()

    @cached_property
    def scores(self) -> Packing:
        """Of the features as columns: one feature of as many samples as fit."""
        return Packing(self.score_slot, 1, min(self.batch, self.room // self.score_slot), 1)

    @cached_property
    def gradients(self) -> Packing:
        """Of the features as rows, chosen for the least work: encrypting packs, and decrypting a sum for each row."""
        room = self.room // self._gradient_slot
        choices = []
        for blocks in range(-(-self.width // room), self.width + 1):
            columns = -(-self.width // blocks)
            for rows in range(1, min(self.batch, room // columns) + 1):
                packs = blocks * -(-self.batch // rows)
                choices.append((packs + _DECRYPTIONS * blocks * rows * self.outputs, columns, rows, blocks))
        _, columns, rows, blocks = min(choices)
        return Packing(self._gradient_slot, columns, rows, blocks)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one gradient under masks, one for each row in a pack, and noise."""
        return (self.gradient_bound * (self.gradients.rows + 1) * (2 + (1 << self.sigma))).bit_length() // 8 + 1

    @cached_property
    def deltas(self) -> Packing:
        """Of rows of delta W^T."""
        room = self.room // self._delta_slot
        blocks = -(-self.width // room)
        columns = -(-self.width // blocks)
        return Packing(self._delta_slot, columns, min(self.batch, room // columns), blocks)

    @property
    def low_rank(self) -> bool:
        """Whether rows of delta W^T are sent for all: asked for, and W can have full column rank, C <= g.

        Then delta W^T has the rank and the column space of delta, and which rows are sent, and the coefficients of the
        others, are functions of it. With C > g they would tell of delta what it does not: every row is sent instead.
        So would they where W has a smaller rank, as zeros have: first weights like that are refused.
        """
        return self.delta == "rank1" and self.outputs <= self.width

    @property
    def traffic(self) -> Traffic:
        """The ciphertexts of a full batch."""
        features = self.width * self.scores.count(self.batch) + self.gradients.count(self.batch)
        sums = self.gradients.blocks * self.gradients.rows * self.outputs
        rows = self.deltas.count(min(self.outputs, self.batch) if self.low_rank else self.batch)
        return Traffic(
            features + self.deltas.blocks * self.outputs, self.scores.count(self.batch) * self.outputs + sums + rows
        )

    def fingerprint(self, n: int, optimizer: str = "") -> bytes:
        """Return 16 bytes for this layout, the public key ``n`` and the optimizer; every message carries them."""
        agreed = msgspec.json.encode(self) + n.to_bytes(self.bits // 8, "little") + optimizer.encode()
        return hashlib.sha256(agreed).digest()[:16]

    @property
    def _gradient_slot(self) -> int:
        return (self.gradient_bound * (2 + (1 << self.sigma))).bit_length()

    @property
    def _delta_slot(self) -> int:
        return self.delta_row_bound.bit_length() + 1  # signed; what lies above the bound is refused

    @property
    def delta_row_bound(self) -> int:
        """Largest |delta W^T| as an integer, with W the sum of two rounded shares, and with what blurs it."""
        delta = self.outputs * self.delta_bound
        return delta * (self.weight_bound + 1) + max(delta, 1 << self.weight_precision) // 2


_RANGES = (
    ("bits", 1024, 16384),
    ("sigma", 40, 128),
    ("ring", 48, 64),
    ("feature_precision", 8, 32),
    ("feature_bits", 0, MAX_BITS),
    ("weight_precision", 8, 32),
    ("weight_bits", 0, MAX_BITS),
    ("delta_precision", 8, 32),
    ("delta_bits", 0, MAX_BITS),
)
