"""What the messages give away by their form: exponents in clear, ciphertexts without fresh randomness."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import gmpy2
import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from vflsec.base.checks import count
from vflsec.base.errors import DataError, InsufficientView
from vflsec.cipher.arithmetic.codec import cut
from vflsec.cipher.arithmetic.layout import CipherLayout
from vflsec.cipher.recording import RecordedMessage, Recording
from vflsec.core.view import Fact, Guess, Need, View
from vflsec.inference.auxiliary import measure_sureness, separate
from vflsec.inference.recordings.samples import RecordingAttack, get_ids, get_recording, locate

CIPHERTEXTS = ("columns", "packs", "ciphers", "share")
"""Fields of messages that hold ciphertexts."""

SURPLUS = 40  # bits that must agree before products count as bare: by accident they do once in 2^40 times
COMPUTED = 4  # answers of each kind that are computed anew: what is not re-randomized is so in every step
MAX_EXPONENT_BITS = 34  # bits of the largest exponent that is searched, in 2^(bits / 2) multiplications
ANSWERS = ("MaskedScores", "MaskedGradient", "EncryptedDelta")
"""Kinds of messages whose re-randomization is tested."""


class Wire(RecordingAttack):
    """Reads the form of messages, without a key: a static check of an implementation on its own traffic.

    * Exponents: floats that carry their exponent in clear tell the magnitude of what is encrypted; that of delta_i
      alone ranks the labels.
    * Bare ciphertexts: modulo n a ciphertext is its randomizer. One that is 1 has none; two that are equal share one,
      and their quotient gives the difference of their plaintexts; a ciphertext sent twice tells that nothing changed.
    * Bare products: the Jacobi symbol of a product of powers follows from those of the factors and the parities of the
      exponents. If all symbols of answers are so explained by those of what was asked, the answers were not
      re-randomized, and C, who chose the randomizers, can read the exponents off them. Under subgroup keys all symbols
      are 1, and so is every other character of small order, as the group's order has no small factor: the symbols then
      say nothing.
    * Known or small exponents, under any key: the active party's own recording has the weights that made its masked
      scores, and the loss gradients that made its masked gradients, so that the bare product is computed and compared.
      A row of delta^C of one output is a power of one ciphertext; its exponent, a loss gradient of some 24 bits, is
      searched by baby steps and giant steps.

    What it finds is certain but for odds of 2^-40; what it does not find may still be there. It says which kinds of
    answers could not be tested.

    Source: the documentation and source of common Paillier libraries, where all of these are the default.
    """

    name = "wire"
    side = "either"
    target = "exposure"
    reference = "defaults of common Paillier libraries"
    verified = "messages of a common Paillier library, and of roles that forget to mask, encrypt or re-randomize"
    costs = "one pass over the messages, and a few modular powers"
    fails = "where what was not re-randomized is not tested: it says which answers these are"

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return the proportion of faulty messages.

        Raises:
            InsufficientView: nothing is encrypted, or no message was recorded.
        """
        recording = get_recording(view)
        n = _get_modulus(recording)
        seen: dict[int, int] = {}
        faults: Counter[str] = Counter()
        layout = recording.header.layout
        parity, powers = _Parity(layout), _Powers(layout, n)
        messages = bad = 0
        for step in recording.steps():
            contents = [_read(message, n) for message in step.messages]
            for content in contents:
                kinds = set(_list_faults(content, n, seen))
                faults.update(kinds)
                messages += 1
                bad += bool(kinds)
            parity.read(contents, n)
            powers.read(contents, step.notes if recording.header.role == "active" else {})
        if not messages:
            raise InsufficientView("expected messages, got a recording of notes only")
        for kind in sorted({*parity.bare, *powers.bare}):
            faults[f"{kind} not re-randomized"] = parity.answers[kind]
            bad = min(messages, bad + parity.answers[kind])
        text = "; ".join(f"{fault}: {count(n_bad, 'message')}" for fault, n_bad in sorted(faults.items()))
        text = f"{text}; of {messages} in all" if faults else f"no fault in {count(messages, 'message')}"
        untested = []
        for kind in (kind for kind in ANSWERS if parity.answers[kind]):
            if ways := _list_ways(kind, parity, powers):
                text += f"; re-randomization of {kind} tested by {ways}"
            else:
                untested.append(f"re-randomization of {kind}: {_explain_gap(kind, parity)}")
        fact = Fact("messages", "share", bad / messages, messages)  # a full count
        return Guess(facts=(fact,), notes=(text,), untested=tuple(untested))


class WireExponents(RecordingAttack):
    """The exponents that messages of the passive party's loss gradients carry in clear rank the labels. Two classes.

    The rarer class 1, the larger are its loss gradients, and so are the exponents of their floats.

    Source: the documentation and source of common Paillier libraries, where exponents are sent in clear.
    """

    name = "wire-exponents"
    side = "either"
    wants = frozenset({Need.AUX_LABELS})
    classes = 2
    reference = Wire.reference
    verified = "exponents of loss gradients as a common Paillier library chooses them"
    costs = "one pass over the messages"
    fails = "if all numbers of one kind of message have one public exponent, as in the protocol of this package"

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return scores (k, 2) by the mean exponent of each sample in the kind of message that ranks known labels best.

        Raises:
            InsufficientView: no message carries an exponent for each row.
        """
        recording = get_recording(view)
        n, sides = _get_modulus(recording), {"active": "sent", "passive": "received"}
        kinds: dict[str, dict[int, list[float]]] = {}
        for step in recording.steps():
            ids = get_ids(step).tolist()
            for message in step.messages:
                exponents = _read(message, n).exponents
                from_active = message.direction == sides[recording.header.role]
                if from_active and ids and len(exponents) and len(exponents) % len(ids) == 0:
                    means = exponents.reshape(-1, len(ids)).mean(axis=0)  # blocks of features, in each the rows
                    for row, mean in zip(ids, means.tolist(), strict=True):
                        kinds.setdefault(message.kind, {}).setdefault(row, []).append(mean)
        if not kinds:
            raise InsufficientView("expected messages with an exponent for each row, got none")
        guesses = [_rank(view, kind, exponents) for kind, exponents in sorted(kinds.items())]
        return max(guesses, key=lambda guess: measure_sureness(view, guess) or 0.0)


def _rank(view: View, kind: str, exponents: Mapping[int, list[float]]) -> Guess:
    means = torch.tensor([np.mean(numbers) for numbers in exponents.values()], dtype=torch.float64)
    rows = locate(get_recording(view), np.array(list(exponents)))
    scores = torch.full((len(view.features["train"]),), float(means.mean()), dtype=torch.float64)
    return Guess({"train": separate(view, scores.index_copy(0, rows, means))}, notes=(f"exponents in clear in {kind}",))


def _get_modulus(recording: Recording) -> int:
    n = int.from_bytes(recording.header.n, "little")
    if not n:
        raise InsufficientView("expected encrypted messages, got a recording without a key")
    return n


class _Content(NamedTuple):
    """A message as its ciphertexts by field, the exponents that it carries in clear, and its number of rows."""

    kind: str
    ciphers: Mapping[str, Sequence[int]]
    exponents: NDArray[np.int64]
    rank: int


def _read(message: RecordedMessage, n: int) -> _Content:
    """Read a message by its form alone, whatever implementation wrote it: integers in lists are exponents."""
    try:
        fields = msgspec.msgpack.decode(message.body)
    except msgspec.DecodeError as error:
        raise DataError(f"expected a recorded {message.kind} in msgpack, got other bytes: {error}") from None
    fields = fields if isinstance(fields, dict) else {}
    size = 2 * (n.bit_length() // 8)
    ciphers = {
        name: cut(data, size, len(data) // size, f"ciphertexts in a recorded {message.kind}")
        for name, data in fields.items()
        if name in CIPHERTEXTS and isinstance(data, bytes)
    }
    lists = [field for field in fields.values() if isinstance(field, list) and all(isinstance(x, int) for x in field)]
    exponents = np.array([x for field in lists for x in field if abs(x) < 1 << 31], dtype=np.int64)
    rank = fields.get("rank", 0)
    return _Content(message.kind, ciphers, exponents, rank if isinstance(rank, int) else 0)


def _list_faults(content: _Content, n: int, seen: dict[int, int]) -> Iterator[str]:
    """Yield what the form of one message gives away; ``seen`` has hashes of all randomizers and their ciphertexts."""
    if len(np.unique(content.exponents)) > 1:
        yield f"exponents in clear in {content.kind}"
    for cipher in (cipher for ciphers in content.ciphers.values() for cipher in ciphers):
        randomizer = cipher % n
        before = seen.get(hash(randomizer))
        seen[hash(randomizer)] = hash(cipher)
        if randomizer == 1:
            yield f"no randomizer in {content.kind}"
        elif before is not None:
            what = "ciphertext" if before == hash(cipher) else "randomizer"
            yield f"a {what} used before in {content.kind}"


class _Parity:
    """Whether the Jacobi symbols of answers are those of products of powers of what was asked.

    Two tests, since implementations differ in how they align exponents: factors whose symbols are all 1 have no other
    product; and where one set of powers serves many answers, their parities solve a linear system over two elements.

    Attributes:
        answers: messages of each kind.
        varies: whether any symbol of what was asked is not 1; else the symbols say nothing.
    """

    def __init__(self, layout: CipherLayout) -> None:
        self.layout = layout
        self.answers: Counter[str] = Counter()
        self.varies = False
        self._agreed: Counter[tuple[str, str]] = Counter()
        self._refuted: Counter[tuple[str, str]] = Counter()

    @property
    def bare(self) -> list[str]:
        """The kinds that were not re-randomized."""
        kinds = {test[0] for test, bits in self._agreed.items() if bits >= SURPLUS and not self._refuted[test]}
        return sorted(kinds) if self.varies else []

    def bits(self, kind: str) -> int:
        """Return how many bits of this kind have been compared; 0 where all symbols are 1."""
        counts = (n for tests in (self._agreed, self._refuted) for test, n in tests.items() if test[0] == kind)
        return sum(counts) if self.varies else 0

    def read(self, contents: Sequence[_Content], n: int) -> None:
        """Compare the messages of one step."""
        symbols = {
            (content.kind, name): [gmpy2.jacobi(cipher, n) < 0 for cipher in ciphers]
            for content in contents
            for name, ciphers in content.ciphers.items()
        }
        self.answers.update(content.kind for content in contents if content.kind in ANSWERS)
        of_c = ("Features", "columns"), ("Features", "packs"), ("NoisedGradient", "share")
        self.varies = self.varies or any(any(symbols.get(asked_of_c, [])) for asked_of_c in of_c)
        width, outputs = self.layout.width, self.layout.outputs
        asked, answered = symbols.get(("Features", "columns"), []), symbols.get(("MaskedScores", "ciphers"), [])
        blocks = len(asked) // width
        for output in range(outputs if len(answered) == blocks * outputs else 0):
            factors = [asked[block * width : (block + 1) * width] for block in range(blocks)]
            self._compare("MaskedScores", factors, answered[output::outputs])
        asked, answered = symbols.get(("NoisedGradient", "share"), []), symbols.get(("EncryptedDelta", "ciphers"), [])
        blocks = len(asked) // outputs
        chunks = len(answered) // blocks if blocks else 0
        shares = [asked[i // chunks * outputs : (i // chunks + 1) * outputs] for i in range(blocks * chunks)]
        self._count(("EncryptedDelta", "ones"), shares, answered)  # each has powers of its own

    def _compare(self, kind: str, factors: Sequence[Sequence[bool]], products: Sequence[bool]) -> None:
        self._count((kind, "ones"), factors, products)
        basis: dict[int, int] = {}
        for signs, product in zip(factors, products, strict=True):
            row = sum(1 << i + 1 for i, factor in enumerate(signs) if factor) | product
            while row > 1 and row.bit_length() in basis:
                row ^= basis[row.bit_length()]
            if row > 1:
                basis[row.bit_length()] = row
            else:
                (self._refuted if row else self._agreed)[kind, "linear"] += 1

    def _count(self, test: tuple[str, str], factors: Sequence[Sequence[bool]], products: Sequence[bool]) -> None:
        for signs, product in zip(factors, products, strict=False):
            if not any(signs):
                (self._refuted if product else self._agreed)[test] += 1


class _Powers:
    """Whether answers are the bare powers of what was asked, where the exponents are known or small: under any key.

    Attributes:
        tested: how many answers of each kind were computed.
        bare: the kinds that were not re-randomized.
    """

    def __init__(self, layout: CipherLayout, n: int) -> None:
        self.layout, self.n = layout, gmpy2.mpz(n)
        self.tested: Counter[str] = Counter()
        self.bare: set[str] = set()

    def read(self, contents: Sequence[_Content], notes: Mapping[str, NDArray[Any]]) -> None:
        """Test the first answers of one step; ``notes`` are the active party's, or empty."""
        share, delta = notes.get("share"), notes.get("delta")  # (g, C) in units of 2^-64; (B, C)
        by_kind = {content.kind: content for content in contents}
        layout = self.layout
        asked, answered = _pick(by_kind, "Features", "columns"), _pick(by_kind, "MaskedScores", "ciphers")
        if share is not None and len(share) == layout.width <= len(asked) and answered:
            unit = 64 - layout.weight_precision
            exponents = [(int(w) + (1 << unit - 1) >> unit) % (1 << layout.ring) for w in share[:, 0]]
            self._note("MaskedScores", lambda: self._multiply(asked, exponents) == answered[0] % self.n)
        asked, answered = _pick(by_kind, "Features", "packs"), _pick(by_kind, "MaskedGradient", "ciphers")
        if delta is not None and len(delta) and asked and answered:
            every = min(len(delta), layout.gradients.rows)  # the first ciphertext sums the first row of each pack
            units = np.rint(np.ldexp(delta[::every, 0], layout.delta_precision)).astype(np.int64).tolist()
            self._note("MaskedGradient", lambda: self._multiply(asked, units) == answered[0] % self.n)
        asked, answered = _pick(by_kind, "NoisedGradient", "share"), _pick(by_kind, "EncryptedDelta", "ciphers")
        bits = layout.delta_precision + layout.delta_bits + 1
        rank = by_kind["EncryptedDelta"].rank if answered else 0
        if (
            asked
            and layout.outputs == 1
            and bits <= MAX_EXPONENT_BITS
            and 0 < rank <= len(answered) * layout.deltas.rows
        ):
            packed = min(layout.deltas.rows, rank)
            last = -(-rank // packed) - 1  # of the first block of features
            if rank - last * packed == 1 and last < len(answered):  # this one holds a single row
                self._note("EncryptedDelta", lambda: self._is_small_power(asked[0], answered[last], bits))

    def _note(self, kind: str, test: Callable[[], bool]) -> None:
        if self.tested[kind] < COMPUTED:
            self.tested[kind] += 1
            if test():
                self.bare.add(kind)

    def _multiply(self, bases: Sequence[int], exponents: Sequence[int]) -> gmpy2.mpz:
        product = gmpy2.mpz(1)
        for base, exponent in zip(bases, exponents, strict=False):
            product = product * gmpy2.powmod(base, exponent, self.n) % self.n
        return product

    def _is_small_power(self, base: int, power: int, bits: int) -> bool:
        """Return whether ``power`` is ``base``^x modulo n for some |x| <= 2^bits."""
        if gmpy2.gcd(base, self.n) != 1:
            return False
        step = 1 << (bits + 2) // 2
        baby, small = gmpy2.mpz(1), {}
        for x in range(step):
            small[baby] = x
            baby = baby * base % self.n
        giant = gmpy2.invert(baby, self.n)
        at = power * gmpy2.powmod(base, 1 << bits, self.n) % self.n
        for _ in range((2 << bits) // step + 1):
            if at in small:
                return True
            at = at * giant % self.n
        return False


def _pick(by_kind: Mapping[str, _Content], kind: str, name: str) -> Sequence[int]:
    return by_kind[kind].ciphers.get(name, ()) if kind in by_kind else ()


def _list_ways(kind: str, parity: _Parity, powers: _Powers) -> str:
    """Return how the re-randomization of one kind of message was tested; empty where it was not."""
    ways = [f"{bits} bits"] if (bits := parity.bits(kind)) >= SURPLUS else []
    ways += [count(tested, "product")] if (tested := powers.tested[kind]) else []
    return " and ".join(ways)


def _explain_gap(kind: str, parity: _Parity) -> str:
    if kind == "MaskedGradient":
        return "it takes the loss gradients, which the active party's recording has"
    if not parity.varies:
        return "all Jacobi symbols are 1, as under subgroup keys"
    return f"{count(parity.bits(kind), 'bit')} could be compared, and {SURPLUS} are needed"
