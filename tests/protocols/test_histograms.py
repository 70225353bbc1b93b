"""Exchanges of histograms: exact sums, the same in all of them, and nothing that the passive party could read."""

import re
import time
from functools import partial

import gmpy2
import numpy as np
import pytest
import torch

from vflsec.base.errors import ProtocolError, UsageError
from vflsec.base.seeds import make_rng
from vflsec.cipher.arithmetic import histograms
from vflsec.cipher.arithmetic.cost import Work
from vflsec.cipher.arithmetic.histograms import PairPacking, count_products, multiply_bins
from vflsec.cipher.arithmetic.keys import Keys
from vflsec.core import registry
from vflsec.core.message import Channel, Kind
from vflsec.core.options import list_options
from vflsec.core.party import Party
from vflsec.protocols.histograms_paillier import PaillierHistograms, _KeySide, _Randomizers, _SumSide
from vflsec.trees.histograms import FRACTION_BITS, Histograms, sum_bins

NAMES = ("histograms-plain", "histograms-masked", "histograms-paillier")
UNIT = 1 << FRACTION_BITS


class Case:
    """Random derivatives, bins and nodes, and the messages of one exchange."""

    def __init__(self, seed=0, rows=40, outputs=1, widths=(3, 5, 2), nodes=(4, 5, 6)):
        rng = np.random.default_rng(seed)
        self.derivatives = np.concatenate(
            [rng.integers(-UNIT, UNIT + 1, (rows, outputs)), rng.integers(0, UNIT // 4, (rows, outputs))], axis=1
        )
        starts = np.cumsum([0, *widths[:-1]])
        self.bins = (rng.integers(0, widths, (rows, len(widths))) + starts).astype(np.int32)
        self.n_bins = sum(widths)
        self.nodes = rng.integers(-1, len(nodes), rows)
        self.numbers = np.array(nodes)
        self.rows = torch.from_numpy(rng.permutation(10 * rows)[:rows])

    def exchange(self, name, **options):
        self.channel, self.heard = Channel(), []
        self.channel.taps.append(self.heard.append)
        passive, active = (
            Party(who, {}, self.channel, noise=partial(make_rng, 0, who)) for who in ("passive_1", "active")
        )
        options = {"bits": 1024} | options if name == "histograms-paillier" else options
        return registry.build("protocols", name, passive, active, **options)

    def place(self, output=0):
        return Histograms(tree=7 + output, phase="train", output=output, numbers=self.numbers)

    def sums(self, exchange, output=0):
        return exchange.sums(self.bins, self.nodes, self.n_bins, self.place(output))

    def share(self, exchange):
        exchange.share(self.derivatives, self.rows, step=7, phase="train")
        return exchange

    def expected(self, output=0):
        """A double loop over rows and columns."""
        outputs = self.derivatives.shape[1] // 2
        found = np.zeros((len(self.numbers), self.n_bins, 3), np.int64)
        for row, node in enumerate(self.nodes):
            for place in self.bins[row] if node >= 0 else ():
                found[node, place] += (self.derivatives[row, output], self.derivatives[row, outputs + output], 1)
        return found


@pytest.fixture(scope="module")
def keys():
    return Keys.generate(1024)


@pytest.mark.parametrize("name", NAMES)
def test_sums_are_those_of_a_double_loop_for_every_output(name):
    case = Case(outputs=3)
    exchange = case.share(case.exchange(name))
    for output in range(3):
        assert np.array_equal(case.sums(exchange, output), case.expected(output))
    assert case.sums(exchange).dtype == np.int64


@pytest.mark.sampled
@pytest.mark.parametrize("mode", ["standard", "subgroup"])
@pytest.mark.parametrize("seed", range(2))
def test_all_exchanges_find_the_same_sums(seed, mode):
    rng = np.random.default_rng(seed)
    case = Case(seed, rows=int(rng.integers(1, 200)), widths=tuple(rng.integers(1, 30, 4)), nodes=(8, 9, 12, 13, 14))
    case.nodes[case.nodes == 3] = -1  # a node without a row
    found = [
        case.sums(case.share(case.exchange(name, **({"mode": mode} if name == NAMES[2] else {})))) for name in NAMES
    ]
    assert all(np.array_equal(case.expected(), one) for one in found)
    assert not found[0][3].any()


def test_a_round_replaces_the_one_before():
    case = Case()
    for name in NAMES:
        exchange = case.share(case.exchange(name))
        case.derivatives = -case.derivatives
        assert np.array_equal(case.sums(case.share(exchange)), case.expected())


@pytest.mark.parametrize("name", NAMES)
def test_no_row_in_any_node_gives_zeros(name):
    case = Case()
    case.nodes[:] = -1
    assert not case.sums(case.share(case.exchange(name))).any()


@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_sums_fit_their_slots(sign):
    case = Case(rows=64, widths=(1, 2), nodes=(1,))
    case.nodes[:] = 0
    case.derivatives[:] = sign * 4 * UNIT
    exchange = case.share(case.exchange("histograms-paillier"))
    assert np.array_equal(case.sums(exchange), case.expected())
    assert case.expected()[0, 0, 0] == sign * 256 * UNIT


@pytest.mark.parametrize("name", NAMES)
def test_messages_are_those_that_attacks_read(name):
    case = Case()
    case.sums(case.share(case.exchange(name)))
    first, *rest = case.heard
    assert (first.kind is Kind.GRADIENT) == (name == "histograms-plain")
    assert (first.sender, first.receiver, first.step, first.phase) == ("active", "passive_1", 7, "train")
    assert torch.equal(first.rows, case.rows)
    if name == "histograms-plain":
        assert torch.equal(first.payload["value"] * UNIT, torch.from_numpy(case.derivatives).double())
    else:
        assert [message.kind for message in case.heard] == [Kind.CIPHERTEXT, Kind.CIPHERTEXT, Kind.HISTOGRAM]
    learned = rest[-1]
    assert (learned.kind, learned.sender, learned.receiver) == (Kind.HISTOGRAM, "passive_1", "active")
    assert (learned.step, learned.rows) == (7, None)
    assert torch.equal(learned.payload["nodes"], torch.from_numpy(case.numbers))
    in_units = torch.from_numpy(case.expected() / np.array([UNIT, UNIT, 1]))
    assert torch.equal(learned.payload["value"], in_units)


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_counted_in_both_directions(name):
    case = Case()
    case.sums(case.share(case.exchange(name)))
    traffic = {route.sender: size for route, size in case.channel.traffic.items()}
    sent = next(message for message in case.heard if message.sender == "active")
    assert traffic["active"] == sent.nbytes
    if name == "histograms-paillier":
        filled = int((case.expected()[..., 2] > 0).sum())
        packed = PairPacking.from_sizes(1024, 40, FRACTION_BITS + 2).ciphertexts(filled)
        assert packed < filled
        assert traffic["active"] == 40 * 256 + 128
        assert traffic["passive_1"] == packed * 256 + 3 * 10 * 4 + 3 * 8
    else:
        assert traffic["active"] == 40 * 2 * 8
        assert traffic["passive_1"] > 0


def test_sealed_numbers_open_with_the_key_alone():
    case = Case()
    exchange = case.share(case.exchange("histograms-masked"))
    case.sums(exchange)
    for message in case.heard[:2]:
        with pytest.raises(PermissionError, match="the key"):
            message.payload["value"].open(object())
    case.share(exchange)
    with pytest.raises(PermissionError):  # each round has a key of its own
        exchange.decrypt_sums(case.heard[1].payload["value"], case.expected()[..., 2])


def test_the_passive_party_gets_the_modulus_and_ciphertexts_that_another_key_does_not_read(keys):
    case = Case()
    exchange = case.share(case.exchange("histograms-paillier"))
    first = case.heard[0].payload
    assert set(first) == {"value", "key"}
    assert int.from_bytes(first["key"].numpy().tobytes(), "little") == exchange._key_side.keys.n
    side = exchange._sum_side
    assert not any(isinstance(value, Keys | _KeySide) for value in vars(side).values())
    case.share(exchange)
    assert set(case.heard[1].payload) == {"value"}, "the key is sent once"
    case.sums(exchange)
    answer, counts = case.heard[2].payload["value"], case.expected()[..., 2]
    with pytest.raises(ProtocolError):
        _KeySide(keys, 1).decrypt(answer, counts, 4 * UNIT)


def test_ciphertexts_of_equal_derivatives_differ():
    case = Case()
    case.derivatives[:] = case.derivatives[0]
    exchange = case.share(case.exchange("histograms-paillier"))
    kept = exchange._sum_side._kept[0]
    again = case.share(exchange)._sum_side._kept[0]
    assert len({*kept, *again}) == 2 * len(kept)


def test_answers_are_randomized_anew():
    """Randomizers of rows alone would tell the key's owner which rows were added up."""
    case = Case()
    exchange = case.share(case.exchange("histograms-paillier"))
    case.sums(exchange)
    case.sums(exchange)
    one, other = (
        message.payload["value"].data
        for message in case.heard
        if "nodes" in message.payload and message.kind is Kind.CIPHERTEXT
    )
    assert len(one) == len(other)
    assert not {one[i : i + 256] for i in range(0, len(one), 256)} & {
        other[i : i + 256] for i in range(0, len(one), 256)
    }
    n = exchange._key_side.keys.n
    packing, side = exchange._sum_side._packing, exchange._sum_side
    inside = np.flatnonzero(case.nodes >= 0)
    products = multiply_bins(
        [side._kept[0][row] for row in inside], case.nodes[inside, None] * case.n_bins + case.bins[inside], n * n
    )
    bare = packing.pack_ciphertexts([products[place] for place in sorted(products)], n * n)
    sent = [int.from_bytes(one[i : i + 256], "little") for i in range(0, len(one), 256)]
    assert all(a % n != b % n for a, b in zip(bare, sent, strict=True)), "a randomizer changes the residue modulo n"


@pytest.mark.parametrize("mode", ["standard", "subgroup"])
def test_new_randomizers_encrypt_zero_and_never_repeat(mode, monkeypatch):
    monkeypatch.setattr("vflsec.protocols.histograms_paillier.WITHOUT_TABLE", 3)
    keys = Keys.generate(1024, mode)
    randomizers = _Randomizers(keys.public)
    found = [one for count in (2, 2, 300) for one in randomizers.draw(count)]
    assert len(set(found)) == 304
    assert keys.decrypt(found) == [0] * 304


def test_what_is_no_ciphertext_is_refused(keys):
    side = _SumSide(keys.public)
    message = _KeySide(keys, 1).encrypt(np.array([[1, 2]]), PairPacking.from_sizes(1024, 1, 26))
    for data in (bytes(256), b"\xff" * 256, message.data[:-1]):
        with pytest.raises(ProtocolError):
            side.keep(message._replace(data=data))


def test_sums_out_of_range_are_refused(keys):
    side, packing = _KeySide(keys, 1), PairPacking.from_sizes(1024, 1, 26)
    message = side.encrypt(np.array([[5 * UNIT, 0]]), packing)
    with pytest.raises(ProtocolError, match="within their range"):
        side.decrypt(message, np.array([[1]]), 4 * UNIT)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"bits": 512}, "bits"),
        ({"bits": 8192}, "bits"),
        ({"bits": 1025}, "bits"),
        ({"range_bits": 17}, "range_bits"),
        ({"mode": "fast"}, "mode"),
    ],
)
def test_impossible_options_are_refused(options, named):
    with pytest.raises(UsageError, match=named):
        Case().exchange("histograms-paillier", **options)


@pytest.mark.parametrize("value", [4 * UNIT + 1, -4 * UNIT - 1])
def test_a_derivative_out_of_range_is_refused_and_not_sent(value):
    case = Case()
    case.derivatives[3, 0] = value
    exchange = case.exchange("histograms-paillier")
    with pytest.raises(UsageError, match=re.escape("expected |derivatives| <= 4, got 4.00000006")):
        case.share(exchange)
    assert not case.heard
    exchange = case.share(case.exchange("histograms-paillier", range_bits=3))
    assert np.array_equal(case.sums(exchange), case.expected())


def test_noise_on_gradients_widens_the_range():
    case = Case()
    exchange = case.exchange("histograms-paillier")
    assert exchange.range_bits == 2
    exchange.active.defenses = [registry.build("defenses", "iso", 1.0)]
    assert exchange.range_bits == 10


def test_weights_whose_sums_may_be_inexact_are_refused():
    bins, nodes = np.zeros((4, 1), np.int32), np.zeros(4, np.int64)
    most = 2**51 - 1
    assert sum_bins(bins, nodes, np.full((4, 1), most), 1, 1).tolist() == [[[4 * most, 4]]]
    with pytest.raises(UsageError, match="exact sums over 4 rows"):
        sum_bins(bins, nodes, np.full((4, 1), -(2**51)), 1, 1)


@pytest.mark.parametrize(("rows", "columns", "weights"), [(0, 3, 2), (5, 0, 2), (5, 3, 0), (30, 3, 4)])
def test_histograms_of_any_shape(rows, columns, weights):
    rng = np.random.default_rng(0)
    bins = (rng.integers(0, 4, (rows, columns)) + 4 * np.arange(columns)).astype(np.int32)
    nodes, values = rng.integers(-1, 3, rows), rng.integers(-9, 9, (rows, weights))
    expected = np.zeros((3, 12, weights + 1), np.int64)
    for row in range(rows):
        for place in bins[row] if nodes[row] >= 0 else ():
            expected[nodes[row], place] += [*values[row], 1]
    assert np.array_equal(sum_bins(bins, nodes, values, 3, 12), expected)


@pytest.mark.parametrize("widths", [(2, 2, 2, 2, 2), (3, 40, 2), (60, 60), (4,)])
def test_columns_added_up_together_give_each_columns_products(widths):
    rng = np.random.default_rng(1)
    modulus, rows = gmpy2.mpz(2**61 - 1), 200
    values = [gmpy2.mpz(int(value)) for value in rng.integers(2, 2**60, rows)]
    places = rng.integers(0, widths, (rows, len(widths))) + np.cumsum([0, *widths[:-1]])
    expected = {}
    for row in range(rows):
        for place in places[row].tolist():
            expected[place] = expected.get(place, 1) * values[row] % modulus
    assert multiply_bins(values, places, modulus) == expected
    assert multiply_bins([], places[:0], modulus) == {}
    assert count_products(rows, widths) <= rows * len(widths) + 1e-6


def test_small_columns_together_take_few_products(monkeypatch):
    taken = []
    original = histograms._multiply_groups

    def counting(values, groups, count, modulus):
        taken.append(len(values) - count)
        return original(values, groups, count, modulus)

    monkeypatch.setattr(histograms, "_multiply_groups", counting)
    rng = np.random.default_rng(0)
    places = rng.integers(0, 4, (5000, 6)) + 4 * np.arange(6)
    multiply_bins([gmpy2.mpz(3)] * 5000, places, gmpy2.mpz(101))
    assert sum(taken) < 5000 * 6 / 2
    assert sum(taken) == pytest.approx(count_products(5000, [4] * 6), rel=0.05)


def test_pairs_come_back_from_packed_sums(keys):
    packing, side = PairPacking.from_sizes(1024, 3, 26), _KeySide(keys, 1)
    assert packing.slot == 29
    assert packing.pairs == (1024 - 1 - 12) // 58
    pairs = np.array([[(-1) ** k * k, -(k % 13) * UNIT] for k in range(2 * packing.pairs + 1)])
    message = side.encrypt(pairs, packing)
    ciphertexts = side._wire.read(message.data, len(pairs), "")
    joined = packing.pack_ciphertexts(ciphertexts, keys.n**2)
    assert len(joined) == 3
    assert np.array_equal(packing.unpack_sums(keys.decrypt(joined), len(pairs), int(keys.n)), pairs)
    with pytest.raises(ProtocolError, match="expected 3 ciphertexts"):
        packing.unpack_sums([0], len(pairs), int(keys.n))
    with pytest.raises(UsageError, match="raise bits"):
        PairPacking.from_sizes(64, 3, 26)


def test_seconds_grow_with_rows_and_rounds_and_are_zero_without_cryptography(monkeypatch):
    case, units = Case(), Work(1, 1000, 2, 3, 9000)
    monkeypatch.setattr("vflsec.protocols.histograms_paillier.time_units", lambda *_: units)
    seconds = case.exchange("histograms-paillier").seconds
    base = seconds(10, 1, 1000, 5, 100, 2)
    assert 1.5 * base < seconds(20, 1, 1000, 5, 100, 2) < 2.5 * base
    assert 1.2 * base < seconds(10, 1, 2000, 5, 100, 2) < 2.5 * base, "bins do not double with rows"
    assert seconds(0, 1, 1000, 5, 100, 2) == 0
    assert case.exchange("histograms-plain").seconds(10, 1, 1000, 5, 100, 2) == 0
    assert case.exchange("histograms-masked").seconds(10, 1, 1000, 5, 100, 2) == 0


@pytest.mark.long
@pytest.mark.parametrize("mode", ["standard", "subgroup"])
def test_a_key_of_full_size_gives_the_same_sums_in_about_the_estimated_time(mode):
    case = Case(rows=1000, outputs=2, widths=(32,) * 6, nodes=(1,))
    exchange = case.exchange("histograms-paillier", bits=2048, mode=mode)
    case.share(exchange)  # builds its tables
    case.nodes[:] = 0
    began = time.process_time()
    case.share(exchange)
    for output in range(2):
        assert np.array_equal(case.sums(exchange, output), case.expected(output))
    spent = time.process_time() - began
    assert spent / 3 < exchange.seconds(1, 2, 1000, 6, 192, 1) < spent * 3


def test_options_are_on_the_card():
    assert list_options(PaillierHistograms) == {"bits", "mode", "range_bits"}
