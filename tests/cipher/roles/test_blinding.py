"""What C exponentiates is not what p has sent."""

import gmpy2
import pytest

from vflsec.cipher.arithmetic.keys import Keys


@pytest.fixture(params=["standard", "subgroup"])
def pair(request, make_pair, problem):
    keys = Keys.generate(1024, request.param)
    return make_pair(problem(5, 2).weights, keys=keys, batch=4)


@pytest.fixture
def bases(monkeypatch):
    """Every base that is exponentiated at decryption, as it comes."""
    found, original = [], gmpy2.powmod_base_list
    monkeypatch.setattr(gmpy2, "powmod_base_list", lambda b, e, m: found.extend(b) or original(b, e, m))
    return found


def test_no_base_was_received(pair, problem, bases):
    task = problem(5, 2)
    mu, y = task.batch(4)
    pair.learn(task.delta(pair.scores(mu), y), 0.1)
    size, squares = pair.c.ciphertexts.size, [half.square for half in pair.c.keys.halves]
    received = {
        int.from_bytes(message.ciphers[at : at + size], "little")
        for message in pair.said
        for at in range(0, len(getattr(message, "ciphers", b"")), size)
    }
    assert len(bases) == 2 * len(received) > 0  # each modulo the square of two primes
    for square in squares:
        assert not {base % square for base in bases} & {cipher % square for cipher in received}


def test_equal_ciphertexts_give_unlike_bases_and_one_plaintext(pair, bases):
    cipher = gmpy2.mpz(int.from_bytes(pair.c._encrypt([7]), "little"))
    assert pair.c._decrypt([cipher] * 3) == [7] * 3
    assert pair.c._decrypt([cipher]) == [7]
    assert len({base % pair.c.keys.halves[0].square for base in bases}) == 4
