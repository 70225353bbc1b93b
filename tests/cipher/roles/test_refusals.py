"""Nothing wrong is computed with: it is refused before anything is sent, and the turn can go on with what is right."""

import msgspec
import numpy as np
import pytest

from vflsec.base.errors import ProtocolError, UsageError
from vflsec.cipher.arithmetic.codec import cut, join
from vflsec.cipher.arithmetic.keys import Keys
from vflsec.cipher.arithmetic.layout import CipherLayout
from vflsec.cipher.arithmetic.linear_sgd import LinearSgd
from vflsec.cipher.roles.active import ActiveRole
from vflsec.cipher.roles.exchange import Message, Scores
from vflsec.cipher.roles.passive import PassiveRole

RATE = 0.1
SIZE = 256  # bytes of a ciphertext


@pytest.fixture
def turn(make_pair, problem):
    """A pair, its task and a batch."""
    task = problem(6, 1)
    return make_pair(task.weights, batch=7), task, *task.batch(7)


def changed(message, **fields):
    return msgspec.structs.replace(message, **fields)


def with_cipher(data, value, position=0):
    values = cut(data, SIZE, len(data) // SIZE, "ciphertexts")
    values[position] = value
    return join(values, SIZE)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (np.nan, "expected finite features, got nan"),
        (np.inf, "expected finite features, got inf"),
        (-16.5, r"16\.5.*column \d.*feature_bits = 5"),
    ],
)
def test_features_without_an_integer(turn, value, why):
    pair, _, mu, _ = turn
    mu[3, 2] = value
    with pytest.raises(UsageError, match=why):
        pair.c.features(mu)
    assert pair.c.turn == 0
    assert not pair.c.pool._stock  # nothing was encrypted


@pytest.mark.parametrize("shape", [(8, 6), (0, 6), (7, 5), (7,)])
def test_features_of_another_shape(turn, shape):
    with pytest.raises(UsageError, match=r"expected features \(B <= 7, 6\)"):
        turn[0].c.features(np.zeros(shape))


@pytest.mark.parametrize(
    ("value", "why"),
    [(np.nan, "finite delta, got nan"), (np.inf, "finite delta, got inf"), (1.01, r"\|delta\| <= 1, got 1.01")],
)
def test_gradients_without_an_integer(turn, value, why):
    pair, task, mu, y = turn
    good = task.delta(pair.scores(mu), y)
    bad = good.copy()
    bad[2] = value
    with pytest.raises(UsageError, match=why):
        pair.p.mask_gradient(bad)
    noised = pair.c.gradient(pair.p.mask_gradient(good), RATE)
    with pytest.raises(UsageError, match=why):
        pair.p.embedding_gradient(bad, noised)
    pair.c.embedding_gradient(pair.p.embedding_gradient(good, noised))


def test_weights_out_of_range_and_of_another_shape(keys):
    layout = CipherLayout(width=6, batch=7, bits=1024)
    for weights, why in (
        (np.full((6, 1), 1025.0), r"expected \|weights\| <= 1024, got 1025"),
        (np.full((6, 1), np.nan), "expected finite weights"),
        (np.zeros((5, 1)), r"expected weights \(6, 1\), got \(5, 1\)"),
    ):
        with pytest.raises(UsageError, match=why):
            ActiveRole(keys.public, layout, weights, optimizer=LinearSgd())
        with pytest.raises(UsageError, match=why):
            PassiveRole(keys, layout, share0=weights, optimizer=LinearSgd())


@pytest.mark.parametrize(("weights", "rank"), [(np.zeros((6, 1)), 0), (np.ones((6, 3)), 1)])
def test_first_weights_under_which_coefficients_tell_more_than_the_gradient(make_pair, weights, rank):
    """With W = 0 delta W^T is zero, and the ratios of delta would tell the labels."""
    with pytest.raises(UsageError, match=f"rank {weights.shape[1]} .*rank {rank}"):
        make_pair(weights, batch=7)
    pair = make_pair(weights, batch=7, delta="outer")
    pair.scores(np.ones((7, 6)))
    delta = np.linspace(-1, 1, 7)[:, None] * np.ones(weights.shape[1])
    assert np.allclose(pair.learn(delta, RATE), delta @ weights.T, atol=1e-6)
    assert pair.said[-1].coefficients == b""


def test_a_key_of_another_size(keys):
    layout = CipherLayout(width=6, batch=7, bits=1536)
    with pytest.raises(UsageError, match="1536 bits.*layout.*1024"):
        PassiveRole(keys, layout, optimizer=LinearSgd())
    with pytest.raises(ProtocolError, match="1536 bits, got .*1024"):
        ActiveRole(keys.public, layout, np.zeros((6, 1)), optimizer=LinearSgd())


def broken_ciphers(keys, data):
    n = keys.private.public_key.n
    yield with_cipher(data, 0), "expected units modulo n"
    yield with_cipher(data, keys.private.p), "expected units modulo n"
    yield with_cipher(data, n * 12345), "expected units modulo n"
    yield with_cipher(data, n * n), "below n"
    yield with_cipher(data, (1 << 8 * SIZE) - 1), "below n"
    yield data[:-1], "bytes"
    yield data + bytes(SIZE), "bytes"
    yield b"", "bytes"


def test_numbers_that_are_no_ciphertexts(keys, turn):
    """At every step; afterwards the same turn goes on with the right message."""
    pair, task, mu, y = turn
    features = pair.c.features(mu)
    for data, why in broken_ciphers(keys, features.columns):
        with pytest.raises(ProtocolError, match=why):
            pair.p.mask_scores(changed(features, columns=data))
    for data, why in list(broken_ciphers(keys, features.packs))[:-1]:  # none at all is inference
        with pytest.raises(ProtocolError, match=why):
            pair.p.mask_scores(changed(features, packs=data))
    masked = pair.p.mask_scores(features)
    for data, why in broken_ciphers(keys, masked.ciphers):
        with pytest.raises(ProtocolError, match=why):
            pair.c.scores(changed(masked, ciphers=data))
    delta = task.delta(pair.p.scores(pair.c.scores(masked)), y)
    gradient = pair.p.mask_gradient(delta)
    for data, why in broken_ciphers(keys, gradient.ciphers):
        with pytest.raises(ProtocolError, match=why):
            pair.c.gradient(changed(gradient, ciphers=data), RATE)
    noised = pair.c.gradient(gradient, RATE)
    for data, why in broken_ciphers(keys, noised.share):
        with pytest.raises(ProtocolError, match=why):
            pair.p.embedding_gradient(delta, changed(noised, share=data))
    encrypted = pair.p.embedding_gradient(delta, noised)
    for data, why in broken_ciphers(keys, encrypted.ciphers):
        with pytest.raises(ProtocolError, match=why):
            pair.c.embedding_gradient(changed(encrypted, ciphers=data))
    assert np.allclose(pair.c.embedding_gradient(encrypted), delta @ task.weights.T, atol=1e-6)
    pair.p.update(noised, RATE)
    assert np.allclose(pair.weights, task.weights - RATE * mu.T @ delta / 7, atol=1e-7)


def test_a_foreign_key_by_its_name_and_by_its_ciphertexts(turn, make_pair):
    pair, task, mu, _ = turn
    foreign = make_pair(task.weights, keys=Keys.generate(1024), batch=7)
    features, theirs = pair.c.features(mu), foreign.c.features(mu)
    with pytest.raises(ProtocolError, match="another key or layout"):
        pair.p.mask_scores(theirs)
    masked = pair.p.mask_scores(features)
    wrong = foreign.p.mask_scores(theirs)
    with pytest.raises(ProtocolError, match="another key or layout"):
        pair.c.scores(wrong)
    # under the right name: what decrypts is noise, and fills the bits above the slots
    small = join((value % int(pair.c.ciphertexts.square) for value in cut(wrong.ciphers, SIZE, 1, "")), SIZE)
    with pytest.raises(ProtocolError, match="overflows its slots"):
        pair.c.scores(changed(wrong, agreement=pair.c.agreement, ciphers=small))
    pair.c.scores(masked)


def test_another_layout(make_pair, problem, turn):
    pair, task, mu, _ = turn
    other = make_pair(task.weights, batch=7, sigma=41)
    with pytest.raises(ProtocolError, match="another key or layout"):
        other.p.mask_scores(pair.c.features(mu))


def encrypt(pair, plaintext):
    n = int(pair.c.keys.n)
    return join([pair.c.keys.private.public_key.raw_encrypt(plaintext % n)], SIZE)


def test_plaintexts_beyond_their_slots(turn):
    pair, task, mu, y = turn
    features = pair.c.features(mu)
    masked = pair.p.mask_scores(features)
    slot = pair.c.layout.scores.slot
    for plaintext in (1 << 7 * slot, -1):
        with pytest.raises(ProtocolError, match="overflows its slots"):
            pair.c.scores(changed(masked, ciphers=encrypt(pair, plaintext)))
    delta = task.delta(pair.p.scores(pair.c.scores(masked)), y)
    gradient = pair.p.mask_gradient(delta)
    full = with_cipher(gradient.ciphers, int.from_bytes(encrypt(pair, -1), "little"))
    with pytest.raises(ProtocolError, match="overflows its slots"):
        pair.c.gradient(changed(gradient, ciphers=full), RATE)
    noised = pair.c.gradient(gradient, RATE)
    encrypted = pair.p.embedding_gradient(delta, noised)
    bound = pair.c.layout.delta_row_bound
    for plaintext, why in ((bound + 1, "weights have grown"), (1 << 6 * 63 + 10, "overflows its slots")):
        with pytest.raises(ProtocolError, match=why):
            pair.c.embedding_gradient(changed(encrypted, ciphers=encrypt(pair, plaintext)))
    pair.c.embedding_gradient(encrypted)


def test_weights_that_grow_beyond_what_was_agreed(make_pair):
    """A run that diverges ends with an error, not with numbers that have wrapped."""
    pair = make_pair(np.zeros((6, 1)), batch=7, weight_bits=2, delta="outer")
    mu, delta = np.ones((7, 6)), -np.ones((7, 1))
    for step in range(9):  # the weights grow by a half each time, and are 4 in the last step
        pair.scores(mu)
        assert np.allclose(pair.learn(delta, 0.5), -0.5 * step, atol=1e-6)
    pair.scores(mu)
    with pytest.raises(ProtocolError, match="weights have grown beyond"):
        pair.learn(delta, 0.5)


def test_scores_beyond_the_ring(make_pair):
    pair = make_pair(np.full((6, 1), 800.0), batch=7)
    with pytest.raises(ProtocolError, match="expected scores below 4096, got 7"):
        pair.scores(np.full((7, 6), 15.5))


@pytest.mark.parametrize("values", [b"", bytes(55), bytes(57)])
def test_scores_of_another_length(turn, values):
    pair, _, mu, _ = turn
    good = pair.c.scores(pair.p.mask_scores(pair.c.features(mu)))
    with pytest.raises(ProtocolError, match="expected 7 scores of 8 bytes"):
        pair.p.scores(changed(good, values=values))
    pair.p.scores(good)


def test_messages_out_of_turn(turn):
    pair, task, mu, y = turn
    features = pair.c.features(mu)
    masked = pair.p.mask_scores(features)
    with pytest.raises(ProtocolError, match="after 1, got turn 1"):
        pair.p.mask_scores(features)
    with pytest.raises(ProtocolError, match="expected a message MaskedScores, got Features"):
        pair.c.scores(features)
    with pytest.raises(ProtocolError, match="turn 1, .*turn 2"):
        pair.c.scores(changed(masked, turn=2))
    with pytest.raises(UsageError, match="expected mask_gradient after the scores"):
        pair.p.mask_gradient(np.zeros((7, 1)))
    scores = pair.c.scores(masked)
    with pytest.raises(ProtocolError, match="MaskedGradient, got MaskedScores"):
        pair.c.scores(masked)  # a second time it would tell the same sample under other masks
    delta = task.delta(pair.p.scores(scores), y)
    with pytest.raises(ProtocolError, match="next turn.*got Scores"):
        pair.p.scores(scores)
    gradient = pair.p.mask_gradient(delta)
    with pytest.raises(UsageError, match="expected mask_gradient after the scores"):
        pair.p.mask_gradient(delta)
    noised = pair.c.gradient(gradient, RATE)
    with pytest.raises(ProtocolError, match="EncryptedDelta, got MaskedGradient"):
        pair.c.gradient(gradient, RATE)
    encrypted = pair.p.embedding_gradient(delta, noised)
    with pytest.raises(UsageError, match="embedding_gradient once"):
        pair.p.embedding_gradient(delta, noised)
    pair.p.update(noised, RATE)
    with pytest.raises(UsageError, match="update in a turn"):
        pair.p.update(noised, RATE)
    pair.c.embedding_gradient(encrypted)
    with pytest.raises(ProtocolError, match="next turn.*EncryptedDelta"):
        pair.c.embedding_gradient(encrypted)


def test_a_gradient_in_inference(turn):
    pair, task, mu, y = turn
    good = pair.c.features(mu)
    masked = pair.p.mask_scores(good)
    scores = pair.c.scores(masked)
    gradient = pair.p.mask_gradient(task.delta(pair.p.scores(scores), y))
    pair.c.features(mu, learns=False)
    masked = pair.p.mask_scores(pair.c.features(mu, learns=False))
    pair.c.scores(masked)
    with pytest.raises(ProtocolError, match="next turn.*MaskedGradient"):
        pair.c.gradient(changed(gradient, turn=pair.c.turn), RATE)


def test_learning_rates_that_differ_or_are_none(turn):
    pair, task, mu, y = turn
    gradient = pair.p.mask_gradient(task.delta(pair.scores(mu), y))
    with pytest.raises(UsageError, match="expected a finite learning rate"):
        pair.c.gradient(gradient, float("nan"))
    noised = pair.c.gradient(gradient, RATE)
    with pytest.raises(ProtocolError, match=r"learning rate 0\.2, got 0\.1"):
        pair.p.update(noised, 0.2)
    with pytest.raises(ProtocolError, match="noised gradients of"):
        pair.p.update(changed(noised, values=noised.values[:-1]), RATE)
    pair.p.update(noised, RATE)


def test_shares_that_have_parted(turn):
    """C has moved and p has not: their sum is no model's weights."""
    pair, task, mu, y = turn
    states = pair.c.state(), pair.p.state()
    gradient = pair.p.mask_gradient(task.delta(pair.scores(mu), y))
    pair.c.gradient(gradient, RATE)
    with pytest.raises(ProtocolError, match="moved 0 times.*got 1"):
        pair.scores(mu)
    pair.c.load(states[0]), pair.p.load(states[1])
    assert np.allclose(pair.scores(mu), mu @ task.weights, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"rank": 2}, "1 rows.*got 2"),
        ({"rank": 0}, "expected 1 rows"),
        ({"rank": -1}, "expected 1 rows"),
        ({"coefficients": bytes(27)}, "expected 28 bytes of coefficients, got 27"),
        ({"coefficients": np.full(7, np.nan, "<f4").tobytes()}, "expected finite coefficients"),
    ],
)
def test_coefficients_that_are_none(turn, fields, why):
    pair, task, mu, y = turn
    delta = task.delta(pair.scores(mu), y)
    noised = pair.c.gradient(pair.p.mask_gradient(delta), RATE)
    encrypted = pair.p.embedding_gradient(delta, noised)
    with pytest.raises(ProtocolError, match=why):
        pair.c.embedding_gradient(changed(encrypted, **fields))
    pair.c.embedding_gradient(encrypted)


@pytest.mark.parametrize("rows", [0, -1, 8])
def test_features_of_too_many_samples(turn, rows):
    pair, _, mu, _ = turn
    with pytest.raises(ProtocolError, match=f"1 to 7 .*got {rows}"):
        pair.p.mask_scores(changed(pair.c.features(mu), rows=rows))


def test_messages_know_their_size_and_survive_the_wire(turn):
    pair, task, mu, y = turn
    pair.learn(task.delta(pair.scores(mu), y), RATE)
    assert len(pair.said) == 6
    for message in pair.said:
        wire = msgspec.msgpack.encode(message)
        assert msgspec.msgpack.decode(wire, type=Message) == message
        assert 0 < len(wire) - sum(len(v) for v in msgspec.structs.astuple(message) if isinstance(v, bytes)) < 150
        assert abs(message.nbytes - len(wire)) < 150
    assert isinstance(pair.said[2], Scores)
    assert pair.said[2].nbytes == 16 + 8 + 7 * 8


def test_another_optimizer(make_pair, problem, turn):
    """Shares that two optimizers move add up to nothing."""
    pair, task, mu, _ = turn
    for other in (LinearSgd(0.9), LinearSgd(0.0, 1e-3)):
        with pytest.raises(ProtocolError, match="another optimizer"):
            make_pair(task.weights, batch=7, optimizer=other).p.mask_scores(pair.c.features(mu))


def test_a_turn_that_could_not_be_saved(turn):
    pair, _, mu, _ = turn
    with pytest.raises(ProtocolError, match="features of a turn after 0"):
        pair.p.mask_scores(changed(pair.c.features(mu), turn=1 << 63))
    pair.p.state()


def test_coefficients_that_blow_a_gradient_up(turn):
    pair, task, mu, y = turn
    delta = task.delta(pair.scores(mu), y)
    noised = pair.c.gradient(pair.p.mask_gradient(delta), RATE)
    encrypted = pair.p.embedding_gradient(delta, noised)
    with pytest.raises(ProtocolError, match="coefficients beyond what was agreed"):
        pair.c.embedding_gradient(changed(encrypted, coefficients=np.full(7, 1e30, "<f4").tobytes()))
    pair.c.embedding_gradient(encrypted)


def test_masks_that_grow_beyond_what_a_state_holds(make_pair):
    """They grow with the learning rate, whatever the gradient."""
    pair = make_pair(np.ones((6, 1)), batch=7)
    pair.scores(np.ones((7, 6)))
    gradient = pair.p.mask_gradient(np.zeros((7, 1)))
    with pytest.raises(UsageError, match="masks grow without end"):
        pair.c.gradient(gradient, 2.0**160)
    pair.c.state()
    pair.c.gradient(gradient, RATE)


def test_a_turn_before_a_saved_state_is_forgotten(turn):
    pair, task, mu, y = turn
    saved = pair.p.state()
    delta = task.delta(pair.scores(mu), y)
    pair.p.load(saved)
    with pytest.raises(UsageError, match="expected mask_gradient after the scores"):
        pair.p.mask_gradient(delta)
