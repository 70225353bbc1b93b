"""What a batch costs is counted from what is really done."""

import gmpy2
import numpy as np
import pytest

from vflsec.cipher.arithmetic import cost
from vflsec.cipher.arithmetic.keys import Keys
from vflsec.cipher.arithmetic.layout import CipherLayout
from vflsec.cipher.arithmetic.powers import FixedBase


@pytest.mark.sampled
@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("form", ["rank1", "outer"])
@pytest.mark.parametrize("width", [1, 6])
def test_traffic_is_that_of_a_turn(make_pair, problem, outputs, form, width):
    task = problem(width, outputs)
    mu, _ = task.batch(9)
    pair = make_pair(task.weights, batch=9, delta=form)
    pair.scores(mu)
    pair.learn(task.rng.uniform(-1, 1, size=(9, outputs)), 0.1)
    features, masked, _, gradient, noised, delta = pair.said
    size = pair.c.ciphertexts.size
    found = pair.c.layout.traffic
    assert found.to_labels * size == len(features.columns + features.packs + noised.share)
    assert found.to_key * size == len(masked.ciphers + gradient.ciphers + delta.ciphers)


class Counted:
    """A number whose multiplications are counted; enough of one for the products of powers."""

    count = 0

    def __init__(self, value):
        self.value = gmpy2.mpz(value)

    def __mul__(self, other):
        Counted.count += 1
        return Counted(self.value * getattr(other, "value", other))

    __rmul__ = __mul__

    def __mod__(self, modulus):
        return Counted(self.value % modulus)


@pytest.mark.parametrize(("mode", "bits"), [("standard", 1024), ("subgroup", 256)])
def test_a_randomizer_takes_two_multiplications_for_two_digits_and_one_for_its_slope(mode, bits):
    layout, batches = CipherLayout(width=10, mode=mode), 3
    draws = sum(layout.traffic)  # modulo each of two primes
    table = FixedBase(7, gmpy2.mpz(2) ** 1024 - 1, bits, uses=batches * draws)
    pairs = cost.count_ops(layout, batches).half / (2 * draws)
    table._residues = [[Counted(residue) for residue in row] for row in table._residues]
    Counted.count = 0
    table.powers([5, 2**bits - 1])
    assert Counted.count == 2 * (2 * (pairs - 1) + 1)


@pytest.mark.parametrize("outputs", [1, 4])
def test_the_count_of_a_forward_pass_is_that_of_its_multiplications(outputs):
    from vflsec.cipher.arithmetic.powers import Straus, plan_straus

    layout = CipherLayout(width=10, outputs=outputs, batch=15)
    rng, modulus = np.random.default_rng(0), gmpy2.mpz(2**127 - 1)
    Counted.count, runs = 0, 20
    for _ in range(runs):
        bases = [Counted(int(x)) for x in rng.integers(2, 2**60, size=10)]
        powers = Straus(bases, modulus, bits=layout.ring, products=outputs)
        for _ in range(outputs):
            exponents = [int.from_bytes(rng.bytes(8), "little") for _ in range(10)]
            powers.product(plan_straus(exponents, powers.window))
    assert cost._count_forward(layout) == pytest.approx(Counted.count / runs, rel=0.03)


def test_the_modes_differ_where_they_should():
    layout = CipherLayout(width=10)
    standard, subgroup = (cost.count_ops(CipherLayout(width=10, mode=mode), 625) for mode in ("standard", "subgroup"))
    assert layout.traffic == (155, 12)
    assert standard.half > 3 * subgroup.half > 0
    assert standard.full == subgroup.full
    assert standard.digits > 3 * subgroup.digits > 0
    assert standard.powers == subgroup.powers == 24
    assert cost.count_ops(layout, 5).residues == 12
    assert standard.residues == 0 == cost.count_ops(layout, 5).digits


def test_work_grows_linearly_with_rows_and_features():
    def total(**settings):
        return np.array(cost.count_ops(CipherLayout(**{"width": 10, "batch": 120, **settings}), 625)[:4])

    *most, digits = total(batch=480) / total()
    assert np.allclose(most, 4, rtol=0.25)
    assert 2 < digits < 4  # of p's randomizers: a wider window for more of them
    assert np.allclose(total(width=20)[0] / total()[0], 2, rtol=0.15)


@pytest.mark.statistical
def test_the_estimate_is_what_decryption_takes():
    """Its unit is measured: half of a decryption, within a factor that a busy machine explains."""
    keys, layout = Keys.generate(2048), CipherLayout(width=10)
    assert 0.02 < cost.estimate(CipherLayout(width=10, mode="subgroup")) < cost.estimate(layout) < 5
    seconds = cost._time(lambda: keys.decrypt([keys.n + 1]), 1, 0.6)
    assert 0.5 < 2 * cost.time_units(2048).powers / seconds < 2
