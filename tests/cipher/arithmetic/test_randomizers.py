"""Randomizers are n-th residues, spread over all of them, never used twice, and made ahead by children."""

import multiprocessing
import os
import signal

import gmpy2
import pytest
from gmpy2 import mpz
from scipy import stats

from vflsec.base.errors import ProtocolError
from vflsec.cipher.arithmetic.keys import Keys
from vflsec.cipher.arithmetic.powers import FixedBase
from vflsec.cipher.arithmetic.randomizers import (
    CosetSource,
    FactorSource,
    Pool,
    PowerSource,
    SubgroupSource,
    make_source,
)

DRAWS = 800


@pytest.fixture(scope="module")
def subgroup():
    return Keys.generate(1024, "subgroup")


def sources(keys, subgroup):
    n = keys.public.modulus
    return {
        "C": (keys, FactorSource(keys, DRAWS)),
        "C, subgroup": (subgroup, FactorSource(subgroup, DRAWS)),
        "p": (keys, CosetSource(n, DRAWS)),
        "p, few": (keys, PowerSource(n)),
        "p, subgroup": (subgroup, SubgroupSource(subgroup.public, DRAWS)),
    }


@pytest.mark.parametrize("who", ["C", "C, subgroup", "p", "p, few", "p, subgroup"])
def test_every_source_draws_fresh_encryptions_of_zero(keys, subgroup, who):
    pair, source = sources(keys, subgroup)[who]
    drawn = source.draw(20) + source.draw(20)
    assert all(pair.private.raw_decrypt(int(found)) == 0 for found in drawn)
    assert len(set(drawn)) == 40


def characters(pair, drawn):
    """Count how many are squares modulo p and modulo q: the four cosets of squares among all residues."""
    p, q = (half.prime for half in pair.halves)
    counts = [0] * 4
    for found in drawn:
        counts[2 * (gmpy2.legendre(found % p, p) > 0) + (gmpy2.legendre(found % q, q) > 0)] += 1
    return counts


@pytest.mark.parametrize("who", ["C", "p"])
def test_they_spread_evenly_over_cosets(keys, subgroup, who):
    pair, source = sources(keys, subgroup)[who]
    assert stats.chisquare(characters(pair, source.draw(DRAWS))).pvalue > 1e-4


def test_powers_of_one_residue_do_not():
    """Why p multiplies in subset products: a cyclic subgroup misses half of the cosets or more."""
    pair = Keys.generate(1024)
    source = CosetSource(pair.public.modulus, DRAWS)
    source.draw(1)
    powers = source._tables[0].powers([int.from_bytes(os.urandom(128), "little") for _ in range(DRAWS)])
    assert stats.chisquare(characters(pair, powers)).pvalue < 1e-9


def test_the_exponents_of_the_key_holder_are_uniform_below_the_order(keys, monkeypatch):
    """The highest digits of a discrete logarithm are not seen; those of the exponents are."""
    source, drawn = FactorSource(keys, DRAWS), []
    monkeypatch.setattr(FixedBase, "powers", lambda _, exponents: drawn.append(exponents) or [mpz(1)] * len(exponents))
    source.draw(DRAWS)
    for half, exponents in zip(keys.halves, drawn, strict=True):
        values = [float(mpz(exponent) / half.order) for exponent in exponents]
        assert stats.kstest(values, "uniform").pvalue > 1e-4


def test_few_randomizers_need_no_table(keys, subgroup):
    assert isinstance(make_source(keys.public, 100), PowerSource)
    assert isinstance(make_source(keys.public, 1000), CosetSource)
    assert isinstance(make_source(subgroup.public, 100), SubgroupSource)


def pool(keys, uses=50, **settings):
    source = FactorSource(keys, uses)
    source.chunk = 10
    return Pool(source, keys.n**2, **settings)


@pytest.mark.parametrize("uses", [50, 200])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_pool_gives_nothing_twice(keys, workers, uses):
    stock = pool(keys, uses, workers=workers)
    taken = [found for count in (3, 0, 70, 1, 40) for found in stock.take(count)]
    assert len(set(taken)) == len(taken) == 114
    assert all(keys.private.raw_decrypt(int(found)) == 0 for found in taken[::20])
    stock.close()
    assert not stock._children


@pytest.mark.parametrize(("uses", "early"), [(25, [0, 1, 0]), (1000, [0, 1] * 8)])
def test_children_share_what_is_announced_and_what_comes_beyond(keys, monkeypatch, uses, early):
    asked, ask = [], Pool._ask

    def noted(self, link, least=0):
        waiting = len(self._asked)
        ask(self, link, least)
        asked.extend([self._links.index(link)] * (len(self._asked) - waiting))

    monkeypatch.setattr(Pool, "_ask", noted)
    stock = pool(keys, uses, workers=2)
    assert asked == early
    stock.take(uses)
    assert len(asked) == -(-uses // 10)
    asked.clear()
    assert len(stock.take(7)) == 7
    assert asked == [0, 1, 0, 1]
    stock.close()


@pytest.mark.parametrize("count", [20, 1000])
def test_a_child_that_dies_is_an_error(keys, count):
    """Whether it was to answer already, or is asked for more."""
    stock = pool(keys, workers=1)
    stock.take(1)
    os.kill(stock._children[0].pid, signal.SIGKILL)
    stock._children[0].join()
    with pytest.raises(ProtocolError, match="prepares randomizers has died"):
        stock.take(count)
    stock.close()


def test_children_end_with_their_parent(keys):
    stock = pool(keys, workers=2)
    stock.take(1)
    for link in stock._links:
        link.close()
    for child in stock._children:
        child.join(20)
        assert child.exitcode == 0


def test_a_fork_does_not_give_what_its_parent_gives(keys):
    stock = pool(keys)
    stock.take(1)
    assert stock._stock
    ours, theirs = multiprocessing.Pipe()

    def child():
        try:
            theirs.send(stock.take(1)[0] == 0)
        except ProtocolError as error:
            theirs.send(str(error))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    said = ours.recv()
    process.join()
    assert "make another after forking" in said
    stock.take(1)
