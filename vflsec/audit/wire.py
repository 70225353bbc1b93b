"""What the messages give away by their form: exponents in clear, ciphertexts without fresh randomness."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import gmpy2
import msgspec
import numpy as np
from numpy.typing import NDArray

from vflsec.audit import figures
from vflsec.audit.audit import Audit, Figure, Recovered, Truth
from vflsec.core.errors import DataError, InsufficientView
from vflsec.paillier.codec import cut
from vflsec.paillier.layout import Layout
from vflsec.paillier.recording import Message, Recording

CIPHERTEXTS = ("columns", "packs", "ciphers", "share")
"""Fields of messages that hold ciphertexts."""

SURPLUS = 40
"""Bits that must agree before products count as bare: by accident they do once in 2^40 times."""


class Wire(Audit):
    """Reads the form of messages, without a key: a static check of an implementation on its own traffic.

    * Exponents: floats that carry their exponent in clear tell the magnitude of what is encrypted; that of delta_i
      alone ranks the labels.
    * Bare ciphertexts: modulo n a ciphertext is its randomiser. One that is 1 has none; two that are equal share one,
      and their quotient gives the difference of their plaintexts; a ciphertext sent twice tells that nothing changed.
    * Bare products: the Jacobi symbol of a product of powers follows from those of the factors and the parities of the
      exponents. If all symbols of answers are so explained by those of what was asked, the answers were not
      re-randomised, and C, who chose the randomisers, can read the exponents off them.

    What it finds is certain but for odds of 2^-40; what it does not find may still be there.

    Source: the documentation and source of common Paillier libraries, where all of these are the default.
    """

    name = "wire"
    role = "either"
    reads = "the form of all messages"
    mitigation = "one public exponent for each kind of message; one exit for each party that masks and re-randomises"
    reference = "defaults of common Paillier libraries"

    def run(self, recording: Recording) -> Recovered:
        """Return the share of messages that give something away; by step and kind, the exponents of p's messages."""
        n = int.from_bytes(recording.header.n, "little")
        if not n:
            raise InsufficientView("expected encrypted messages, got a recording without a key")
        from_p = "sent" if recording.header.role == "p" else "received"
        seen: dict[int, int] = {}
        faults: Counter[str] = Counter()
        parity = _Parity(recording.header.layout)
        steps: dict[int, dict[str, NDArray[Any]]] = {}
        messages = bad = 0
        for step in recording.steps():
            contents = [_content(message, n) for message in step.messages]
            for message, content in zip(step.messages, contents, strict=True):
                found = set(_faults(content, n, seen))
                faults.update(found)
                messages += 1
                bad += bool(found)
                if len(content.exponents) and message.direction == from_p:
                    steps.setdefault(step.number, {})[content.kind] = content.exponents
            parity.read(contents, n)
        if not messages:
            raise InsufficientView("expected messages, got a recording of notes only")
        for kind in parity.bare:
            faults[f"{kind} not re-randomised"] = parity.answers[kind]
            bad = min(messages, bad + parity.answers[kind])
        text = "; ".join(f"{fault}: {count} messages" for fault, count in sorted(faults.items())) or "no fault"
        text += f"; of {messages}, re-randomisation tested by {parity.tested} bits"
        return Recovered(text, steps, (figures.share("messages", bad, messages),))

    def score(self, recovered: Recovered, truth: Truth) -> tuple[Figure, ...]:
        """Return the share of messages with a fault, then how exponents in clear rank the labels, of the worst kind."""
        true = truth.at(list(recovered.steps))
        found = []
        for kind in sorted({kind for arrays in recovered.steps.values() for kind in arrays}):
            scores, labels = [], []
            for number, arrays in recovered.steps.items():
                known = true[number].get("labels")
                if known is not None and kind in arrays and len(arrays[kind]) % len(known) == 0:
                    scores.append(
                        arrays[kind].reshape(-1, len(known)).mean(axis=0)
                    )  # blocks of features, in each the rows
                    labels.append(known)
            if labels and len(np.unique(np.concatenate(labels))) == 2:
                found.append(figures.ranking("labels", np.concatenate(scores), np.concatenate(labels)))
        return (*recovered.own, *sorted(found, key=lambda figure: -figure.value)[:1])


class _Content(NamedTuple):
    """A message as its ciphertexts by field, and the exponents that it carries in clear."""

    kind: str
    ciphers: Mapping[str, Sequence[int]]
    exponents: NDArray[np.int64]


def _content(message: Message, n: int) -> _Content:
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
    lists = [one for one in fields.values() if isinstance(one, list) and all(isinstance(x, int) for x in one)]
    exponents = np.array([x for one in lists for x in one if abs(x) < 1 << 31], dtype=np.int64)
    return _Content(message.kind, ciphers, exponents)


def _faults(content: _Content, n: int, seen: dict[int, int]) -> Iterator[str]:
    """Yield what the form of one message gives away; ``seen`` has hashes of all randomisers and their ciphertexts."""
    if len(np.unique(content.exponents)) > 1:
        yield f"exponents in clear in {content.kind}"
    for cipher in (cipher for ciphers in content.ciphers.values() for cipher in ciphers):
        randomiser = cipher % n
        before = seen.get(hash(randomiser))
        seen[hash(randomiser)] = hash(cipher)
        if randomiser == 1:
            yield f"no randomiser in {content.kind}"
        elif before is not None:
            what = "ciphertext" if before == hash(cipher) else "randomiser"
            yield f"a {what} used before in {content.kind}"


class _Parity:
    """Whether the Jacobi symbols of answers are those of products of powers of what was asked.

    Two tests, since implementations differ in how they align exponents: factors whose symbols are all 1 have no other
    product; and where one set of powers serves many answers, their parities solve a linear system over two elements.

    Attributes:
        answers: messages of each kind.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.answers: Counter[str] = Counter()
        self._agreed: Counter[tuple[str, str]] = Counter()
        self._refuted: Counter[tuple[str, str]] = Counter()

    @property
    def bare(self) -> list[str]:
        """The kinds that were not re-randomised."""
        return sorted({test[0] for test, bits in self._agreed.items() if bits >= SURPLUS and not self._refuted[test]})

    @property
    def tested(self) -> int:
        """How many bits have been compared."""
        return self._agreed.total() + self._refuted.total()

    def read(self, contents: Sequence[_Content], n: int) -> None:
        """Compare the messages of one step."""
        symbols = {
            (content.kind, name): [gmpy2.jacobi(cipher, n) < 0 for cipher in ciphers]
            for content in contents
            for name, ciphers in content.ciphers.items()
        }
        self.answers.update(content.kind for content in contents if content.kind in ("MaskedScores", "EncryptedDelta"))
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
        for one, product in zip(factors, products, strict=True):
            row = sum(1 << i + 1 for i, factor in enumerate(one) if factor) | product
            while row > 1 and row.bit_length() in basis:
                row ^= basis[row.bit_length()]
            if row > 1:
                basis[row.bit_length()] = row
            else:
                (self._refuted if row else self._agreed)[kind, "linear"] += 1

    def _count(self, test: tuple[str, str], factors: Sequence[Sequence[bool]], products: Sequence[bool]) -> None:
        for one, product in zip(factors, products, strict=False):
            if not any(one):
                (self._refuted if product else self._agreed)[test] += 1
