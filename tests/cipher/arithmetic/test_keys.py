"""phe's own decryption is the oracle, in every mode; keys that are none are refused."""

import secrets

import gmpy2
import msgspec
import pytest
from gmpy2 import mpz
from phe import PaillierPrivateKey, PaillierPublicKey

from vflsec.base.errors import ProtocolError, UsageError
from vflsec.cipher.arithmetic.keys import MODES, ORDER_BITS, Keys, PublicKey, draw_generator
from vflsec.cipher.arithmetic.randomizers import FactorSource, make_source


@pytest.fixture(scope="module", params=MODES)
def pair(request):
    return Keys.generate(1024, request.param)


def test_decryption_is_phes(pair):
    n = int(pair.n)
    fresh = FactorSource(pair, 4).draw(2) + make_source(pair.public, 2).draw(2)
    for plaintext, randomizer in zip([0, 1, n - 1, secrets.randbelow(n)], fresh, strict=True):
        ciphertext = (1 + n * plaintext) * randomizer % (n * n)
        assert pair.decrypt([mpz(ciphertext)]) == [pair.private.raw_decrypt(int(ciphertext))] == [plaintext]


def test_what_phe_encrypts_is_decrypted(keys):
    public = keys.private.public_key
    for number in (0, 1, public.n - 1):
        assert keys.decrypt([mpz(public.raw_encrypt(number))]) == [number]
    encrypted = public.encrypt(-1.5)
    assert keys.decrypt([mpz(encrypted.ciphertext())]) == [keys.private.raw_decrypt(encrypted.ciphertext())]


def test_keys_have_the_bits_asked_for_and_are_fresh(pair):
    assert pair.n.bit_length() == 1024
    assert pair.public.modulus == pair.private.public_key.n
    assert Keys.generate(1024, pair.mode).n != pair.n
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(pair.public), type=PublicKey).modulus == pair.n


def test_subgroup_keys_have_a_prime_order_of_256_bits():
    pair = Keys.generate(1024, "subgroup")
    for half in pair.halves:
        assert half.order.bit_length() == ORDER_BITS
        assert gmpy2.is_prime(half.order)
        assert (half.prime - 1) % half.order == 0
        assert half.prime.bit_length() == 512
    generator = mpz(int.from_bytes(pair.public.generator, "little"))
    order = pair.halves[0].order * pair.halves[1].order
    assert gmpy2.powmod(generator, order, pair.n**2) == 1 != generator
    assert pair.private.raw_decrypt(int(generator)) == 0  # an n-th residue


def test_a_residue_generator_reaches_all_small_cosets(keys):
    for half in keys.halves:
        generator = draw_generator(half)
        assert gmpy2.powmod(generator, half.order, half.square) == 1
        for prime in (2, 3, 5, 7, 11, 13):
            if half.order % prime == 0:
                assert gmpy2.powmod(generator, half.order // prime, half.square) != 1


def test_keys_and_modes_that_do_not_go_together_are_refused(keys):
    with pytest.raises(UsageError, match="unknown mode 'fast'"):
        Keys.generate(1024, "fast")
    with pytest.raises(UsageError, match="divisors of p - 1"):
        Keys(keys.private, "subgroup")
    with pytest.raises(UsageError, match="divisors of p - 1"):
        Keys(keys.private, "subgroup", (3**100, 3**100))
    subgroup = Keys.generate(1024, "subgroup")
    with pytest.raises(UsageError, match="in no other"):
        Keys(subgroup.private, "standard", tuple(int(half.order) for half in subgroup.halves))
    ordered = PaillierPrivateKey(PaillierPublicKey(int(subgroup.n)), subgroup.private.q, subgroup.private.p)
    orders = {half.prime: int(half.order) for half in subgroup.halves}
    assert Keys(ordered, "subgroup", (orders[ordered.p], orders[ordered.q])).n == subgroup.n


@pytest.mark.parametrize(
    "public",
    [
        PublicKey((2**1023).to_bytes(128, "little")),
        PublicKey((2**1000 + 1).to_bytes(128, "little")),
    ],
)
def test_a_public_key_that_is_none_is_refused(public):
    with pytest.raises(ProtocolError, match="expected a key of 1024 bits"):
        public.check(1024)


def test_a_public_key_with_a_small_factor_is_refused(keys):
    """The powers of a number that has it in common would not be units."""
    prime = gmpy2.next_prime(2**19)
    n = gmpy2.next_prime(2**1023 // prime) * prime
    with pytest.raises(ProtocolError, match="key of two large primes"):
        PublicKey(int(n).to_bytes(128, "little")).check(1024)
    keys.public.check(1024)


@pytest.mark.parametrize("generator", [b"\1", bytes(256), b"\xff" * 257])
def test_a_generator_that_is_none_is_refused(keys, generator):
    with pytest.raises(ProtocolError, match="expected a generator"):
        PublicKey(keys.public.n, generator).check(1024, "subgroup")


def test_a_key_of_another_mode_is_refused(keys):
    with pytest.raises(ProtocolError, match="mode subgroup.*without a generator"):
        keys.public.check(1024, "subgroup")
    with pytest.raises(ProtocolError, match="mode standard.*with a generator"):
        Keys.generate(1024, "subgroup").public.check(1024)


def test_in_subgroup_mode_a_randomizer_of_another_group_is_refused():
    """Decryption by the short order would give a number that depends on the key."""
    pair = Keys.generate(1024, "subgroup")
    for _ in range(3):
        with pytest.raises(ProtocolError, match="not of its subgroup"):
            pair.decrypt([mpz(pair.private.public_key.raw_encrypt(5))])
