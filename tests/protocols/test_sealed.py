"""Sealed sums are the same integers with and without encryption, and so are their messages but for their bytes."""

import pytest
import torch

from vflsec.cipher.lattice import MODULUS
from vflsec.cipher.noise import SealedPlan
from vflsec.core.message import Kind, Step, Transcript
from vflsec.protocols.sealed_bfv import EncryptedSums
from vflsec.protocols.sealed_plain import SealedIntegers, SealedSums
from vflsec.testing.federations import make_toy_federation

UNIT = 2**16


def exchange(boundary, values, blocks, noise):
    """Return the noised sums as integers, and the messages."""
    federation = make_toy_federation(rows=20, columns=4)
    made = boundary(federation.passive[0], federation.active, plan=SealedPlan(bits=16))
    mask = made.draw_mask(noise)
    made.draw_mask = lambda _: mask
    seen = Transcript(frozenset({"passive_1", "active"}), frozenset(Kind))
    federation.channel.taps.append(seen)
    sums = [made.sum(values, blocks, noise, {}, Step(number, "train", torch.arange(3))) for number in range(2)]
    sent = sum(m.nbytes for m in seen.messages if not m.noted)
    assert sent == made.count_bytes([values.numel()] * 2, len(noise))
    assert torch.equal(sums[0], sums[1])
    answer = next(m for m in seen.messages if m.sender == "active" and "sums" in m.payload).payload["sums"]
    integers = (answer - mask + MODULUS // 2) % MODULUS - MODULUS // 2
    assert torch.equal(sums[0], integers * 4.0**-16)
    return integers, [(m.kind, m.sender, m.receiver, tuple(m.payload), m.noted) for m in seen.messages]


def draw(*shape, seed):
    return torch.randint(-UNIT, UNIT + 1, shape, generator=torch.Generator().manual_seed(seed))


CASES = {
    "one class": (draw(50, 1, seed=0), [draw(30, 1, 6, seed=1), draw(20, 1, 6, seed=2)], draw(6, seed=3)),
    "classes": (draw(9, 10, seed=0), [draw(9, 10, 100, seed=1)], draw(100, seed=3) * UNIT),
    "largest": (torch.full((9000, 1), -UNIT), [torch.full((9000, 1, 3), UNIT)], torch.tensor([-(2**40), 0, 2**40])),
    "cancels": (
        torch.full((9000, 1), UNIT),
        [torch.full((4500, 1, 2), UNIT), torch.full((4500, 1, 2), -UNIT)],
        torch.tensor([0, 7]),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_encrypted_sums_are_those_in_clear_and_so_are_the_messages(case):
    values, blocks, noise = CASES[case]
    expected = values.flatten() @ torch.cat(blocks).flatten(0, 1) + noise
    plain, said = exchange(SealedSums, values, blocks, noise)
    encrypted, heard = exchange(EncryptedSums, values, blocks, noise)
    assert torch.equal(plain, expected)
    assert torch.equal(encrypted, plain)
    assert said == heard


def test_nobody_but_the_active_party_reads_what_is_sealed():
    federation = make_toy_federation(rows=20, columns=4)
    ends = federation.passive[0], federation.active
    sealed = EncryptedSums(*ends).seal(torch.arange(8), 2)
    assert not isinstance(sealed, SealedIntegers)
    assert b"\x07\0\0\0\0\0\0\0" not in sealed.tobytes()
    assert EncryptedSums(*ends).seal(torch.arange(8), 2).tobytes() != sealed.tobytes()
