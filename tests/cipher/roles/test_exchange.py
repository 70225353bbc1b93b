"""One exchange: the same messages in the same order, whether the two roles share a process or not."""

import queue
import threading
from collections import deque

import numpy as np
import pytest

from vflsec.cipher.roles.exchange import (
    EncryptedDelta,
    Exchange,
    Features,
    MaskedGradient,
    MaskedScores,
    NoisedGradient,
    Scores,
    Seat,
)

ORDER = [
    ("passive", Features),
    ("active", MaskedScores),
    ("passive", Scores),
    ("active", MaskedGradient),
    ("passive", NoisedGradient),
    ("active", EncryptedDelta),
]


class Line:
    """A port that keeps who sent what, and what was noted."""

    def __init__(self, name, sent, out, into):
        self.name, self.sent, self.out, self.into, self.notes = name, sent, out, into, {}

    def send(self, message):
        self.sent.append((self.name, type(message)))
        self.out.put(message)

    def receive(self, expected):
        message = self.into.get(timeout=60)
        assert type(message) is expected
        return message

    def note(self, name, values):
        self.notes[name] = values


def ports():
    sent, there, back = [], queue.SimpleQueue(), queue.SimpleQueue()
    return Line("passive", sent, there, back), Line("active", sent, back, there), sent


@pytest.fixture
def task(make_pair, problem):
    task = problem(4, 1)
    return make_pair(task.weights, batch=6, seed=3), task, *task.batch(6)


def test_two_roles_in_one_process(task):
    pair, problem, mu, y = task
    (c, p, sent), weights = ports(), pair.weights
    exchange = Exchange(passive=Seat(pair.c, c), active=Seat(pair.p, p))
    z = exchange.scores(mu)
    assert z == pytest.approx(mu @ weights, abs=1e-5)
    delta = problem.delta(z, y)
    noised = exchange.weights(delta, rate=0.5)
    assert pair.weights == pytest.approx(weights - 0.5 * mu.T @ delta / 6, abs=1e-5)
    assert exchange.embedding_gradient(noised, delta) == pytest.approx(delta @ weights.T, abs=1e-5)
    assert sent == ORDER
    assert set(c.notes) == {"mu", "share", "embedding_gradient"}
    assert set(p.notes) == {"share", "scores", "delta"}


def test_one_role_in_each_of_two_processes(task):
    pair, problem, mu, y = task
    (c, p, sent), weights, found = ports(), pair.weights, deque()

    def passive():
        exchange = Exchange(passive=Seat(pair.c, c))
        assert exchange.scores(mu) is None
        found.append(exchange.embedding_gradient(exchange.weights(rate=0.5)))

    other = threading.Thread(target=passive)
    other.start()
    exchange = Exchange(active=Seat(pair.p, p))
    delta = problem.delta(exchange.scores(), y)
    noised = exchange.weights(delta, rate=0.5)
    assert exchange.embedding_gradient(noised, delta, before_sending=lambda: sent.append("kept")) is None
    other.join()
    assert sent == [*ORDER[:-1], "kept", ORDER[-1]]
    assert found.pop() == pytest.approx(delta @ weights.T, abs=1e-5)
    assert pair.weights == pytest.approx(weights - 0.5 * mu.T @ delta / 6, abs=1e-5)


def test_features_are_noted_as_they_are_encrypted(task):
    pair, _, mu, _ = task
    c, p, _ = ports()
    Exchange(passive=Seat(pair.c, c), active=Seat(pair.p, p)).scores(mu, learns=False)
    units = np.ldexp(c.notes["mu"], pair.c.layout.feature_precision)
    assert np.array_equal(units, np.rint(np.ldexp(mu, pair.c.layout.feature_precision)))
