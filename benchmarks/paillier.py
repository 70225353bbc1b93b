"""What encrypting a linear layer costs: one batch of 128 x 10 under every engine, side by side in one run.

    python benchmarks/paillier.py            about a quarter of an hour; all 128 rows under every engine, a whole epoch
    python benchmarks/paillier.py --quick    at first, too, only 16 rows under phe and HEU; a tenth of the epoch

Every engine does the same: C encrypts its features, p returns masked scores and masked gradients of the weights, C
decrypts them, p returns delta W^T, C decrypts it. phe is version 1.5 with gmpy2, one EncryptedNumber for each number,
obfuscated before it leaves, as its users write it; HEU is its matrix API, masks added as ciphertexts, if sf-heu is
installed. For the ratios both run on fewer rows, scaled by their counts, before and after each of ours. Times are CPU
seconds of the process, tables apart; of ours the median of several rounds, randomizers included. The limit is the
multiplications that our layout needs, counted, times the price of one in gmpy2 beside each round.
The last table is the wall time of an epoch of 80,000 samples on two cores, its result held against float64.
"""

from __future__ import annotations

import math
import resource
import secrets
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import click
import numpy as np
from phe import PaillierPrivateKey, PaillierPublicKey
from rich.console import Console
from rich.table import Table
from threadpoolctl import threadpool_limits

from vflsec.cipher.arithmetic.cost import count_ops, time_units
from vflsec.cipher.arithmetic.keys import Keys
from vflsec.cipher.arithmetic.layout import MODES, CipherLayout, Mode
from vflsec.cipher.arithmetic.linear_sgd import PRECISION, LinearSgd
from vflsec.cipher.roles.active import ActiveRole
from vflsec.cipher.roles.passive import PassiveRole

ROWS, WIDTH, RATE = 128, 10, 5e-4
SAMPLES = 80_000
ROUNDS, BATCHES = 5, 8
SLICE, HEU_SLICE = 16, 64  # rows under phe and HEU that stand for all, beside each of ours
UNIT_SECONDS = 0.2  # that each unit of the limit is measured for, twice a round
VARIANTS: dict[str, dict[str, Any]] = {
    "delta=outer": {"delta": "outer"},
    "sigma=64": {"sigma": 64},
    "|z| < 64": {"ring": 56, "feature_precision": 20},
}
CONSOLE = Console(width=120)

try:
    from heu import numpy as heu_numpy
    from heu import phe as heu_phe
except ImportError:
    heu_numpy = None


def clock(call: Callable[[], object]) -> float:
    """Return the CPU seconds of a call, of all threads of this process."""
    began = time.process_time()
    call()
    return time.process_time() - began


class Task:
    """Random batches of a logistic regression with known weights."""

    def __init__(self, width: int = WIDTH) -> None:
        self.rng = np.random.default_rng(1)
        self.truth, self.weights = self.rng.normal(size=(width, 1)), self.rng.normal(size=(width, 1)) * 0.3

    def batch(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Return features and labels."""
        mu = self.rng.normal(size=(rows, len(self.truth))).clip(-7, 7)
        return mu, (mu @ self.truth + self.rng.normal(size=(rows, 1)) > 0).astype(float)


def logistic(z: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the loss gradient of each sample by its score."""
    return 1 / (1 + np.exp(-z)) - y


class Pair:
    """Both roles in one process.

    Args:
        keys: of C.
        layout: agreed.
        task: what is learned.
        batches: how many are to come.
        workers: processes for each role.
    """

    def __init__(self, keys: Keys, layout: CipherLayout, task: Task, batches: int, workers: int = 0) -> None:
        settings = {"optimizer": LinearSgd(), "batches": batches, "workers": workers}
        self.c = PassiveRole(keys, layout, **settings)
        self.p = ActiveRole(keys.public, layout, task.weights, **settings)

    def step(self, mu: np.ndarray, y: np.ndarray) -> None:
        """Learn from one batch."""
        delta = logistic(self.p.scores(self.c.scores(self.p.mask_scores(self.c.features(mu)))), y)
        noised = self.c.gradient(self.p.mask_gradient(delta), RATE)
        self.c.embedding_gradient(self.p.embedding_gradient(delta, noised))
        self.p.update(noised, RATE)

    def weights(self) -> np.ndarray:
        """Return W, from both shares."""
        shares = [role.state()["share"].reshape(-1, 32) for role in (self.c, self.p)]
        pairs = zip(*shares, strict=True)
        total = [sum(int.from_bytes(x.tobytes(), "little", signed=True) for x in pair) for pair in pairs]
        return np.array([[number / 2.0**PRECISION] for number in total])


class Measured(NamedTuple):
    """What one batch takes.

    Attributes:
        seconds: randomizers included, the median of the rounds.
        setup: seconds of keys and tables.
        limit: seconds of the counted multiplications over those of the batch, each round's units measured right before
            and after it: the machine is seldom quiet for long.
    """

    seconds: float
    setup: float
    limit: float


def ours(layout: CipherLayout) -> Measured:
    """Return what one batch takes."""
    task, pairs = Task(layout.width), []
    setup = clock(lambda: pairs.append(Pair(Keys.generate(layout.bits, layout.mode), layout, task, SAMPLES // ROWS)))
    pair = pairs[0]
    pools = zip((pair.c.pool, pair.p.pool), layout.traffic, strict=True)
    pools = [(pool, count) for pool, count in pools]
    setup += sum(clock(lambda pool=pool: pool.fill(1)) for pool, _ in pools)
    rounds, limits = [], [limit(layout)]
    for _ in range(ROUNDS):
        offline = sum(clock(lambda pool=pool, count=count: pool.fill(BATCHES * count)) for pool, count in pools)
        data = [task.batch(layout.batch) for _ in range(BATCHES)]
        online = sum(clock(lambda mu=mu, y=y: pair.step(mu, y)) for mu, y in data)
        rounds.append((offline + online) / BATCHES)
        limits.append(limit(layout))
    around = [(a + b) / 2 / seconds for a, b, seconds in zip(limits, limits[1:], rounds, strict=False)]
    return Measured(statistics.median(rounds), setup, statistics.median(around))


def limit(layout: CipherLayout) -> float:
    """Return the seconds that the counted multiplications of one batch take."""
    pairs = zip(count_ops(layout, SAMPLES // ROWS), time_units(layout.bits, layout.mode, UNIT_SECONDS), strict=True)
    return sum(count * seconds for count, seconds in pairs)


def naive(public: PaillierPublicKey, private: PaillierPrivateKey, rows: int) -> float:
    """Return the seconds of a batch of ``rows`` under phe, scaled to all rows where there are fewer."""
    task, rng = Task(), secrets.SystemRandom()
    mu, y = task.batch(rows)
    weights, spent = task.weights[:, 0].tolist(), {"each row": 0.0, "once": 0.0}

    def add(what: str, call: Callable[[], Any]) -> Any:
        found: list[Any] = []
        spent[what] += clock(lambda: found.append(call()))
        return found[0]

    def leave(numbers: list[Any]) -> list[float]:
        """Obfuscate each and decrypt it."""
        for number in numbers:
            number.ciphertext()
        return [private.decrypt(number) for number in numbers]

    def dot(numbers: list[Any], factors: list[float]) -> Any:
        total = numbers[0] * factors[0]
        for number, factor in zip(numbers[1:], factors[1:], strict=True):
            total = total + number * factor
        return total

    def mask() -> float:
        return rng.uniform(-(2**40), 2**40)

    encrypted = add("each row", lambda: [[public.encrypt(x) for x in row] for row in mu.tolist()])
    masks = [mask() for _ in range(rows)]
    z = add("each row", lambda: [dot(row, weights) + m for row, m in zip(encrypted, masks, strict=True)])
    z = np.array(add("each row", lambda: leave(z))) - masks
    assert np.allclose(z, (mu @ task.weights)[:, 0], atol=1e-2)
    delta = logistic(z, y[:, 0]).tolist()
    columns = list(zip(*encrypted, strict=True))
    gradient = add("each row", lambda: [dot(list(column), delta) for column in columns])
    add("once", lambda: leave([number + mask() for number in gradient]))
    share = add("once", lambda: [public.encrypt(0.0) + w for w in weights])
    outer = add("each row", lambda: [w * d for d in delta for w in share])
    down = add("each row", lambda: leave(outer))
    assert np.allclose(down, np.outer(delta, weights).ravel(), atol=1e-9)
    return spent["each row"] * ROWS / rows + spent["once"]


def heu(schema: str, bits: int, rows: int) -> float | None:
    """Return the seconds of a batch of ``rows`` in HEU's matrices, scaled to all rows; None if it is not installed."""
    if heu_numpy is None:
        return None
    kit = heu_numpy.setup(getattr(heu_phe.SchemaType, schema), bits)
    encryptor, decryptor, evaluator = kit.encryptor(), kit.decryptor(), kit.evaluator()
    one, two = kit.float_encoder(10**6), kit.float_encoder(10**12)
    task = Task()
    mu, y = task.batch(rows)

    def leave(matrix: Any, masks: np.ndarray) -> np.ndarray:
        """Add encrypted masks, which re-randomizes, and decrypt."""
        masked = evaluator.add(matrix, encryptor.encrypt(heu_numpy.array(masks, two)))
        return decryptor.decrypt(masked).to_numpy(two) - masks

    began = time.process_time()
    encrypted = encryptor.encrypt(heu_numpy.array(mu, one))
    z = leave(evaluator.matmul(encrypted, heu_numpy.array(task.weights, one)), task.rng.normal(size=(rows, 1)))
    delta = logistic(z, y)
    leave(
        evaluator.matmul(encrypted.transpose(), heu_numpy.array(delta, one)), task.rng.normal(size=task.weights.shape)
    )
    share = encryptor.encrypt(heu_numpy.array(task.weights.T, one))
    down = leave(evaluator.matmul(heu_numpy.array(delta, one), share), np.zeros((rows, WIDTH)))
    spent = time.process_time() - began
    assert np.allclose(down, delta @ task.weights.T, atol=1e-4)
    return spent * ROWS / rows


def side_by_side(bits: int, rows: int) -> Table:
    """Return the table of all engines at one size of keys.

    Ratios are to phe and HEU on fewer rows, scaled by their counts, right before and after ours.
    """
    table = Table(f"{bits} bits, {ROWS} x {WIDTH}", "CPU ms a batch", "phe / it", "ZPaillier / it", "of its limit")
    private = Keys.generate(bits).private
    phe = naive(private.public_key, private, rows)
    table.add_row("phe with gmpy2", f"{phe * 1e3:.0f}", "1", "", "")
    for schema in ("ZPaillier", "OU"):
        seconds = heu(schema, bits, max(rows, HEU_SLICE))
        found = ["not installed: pip install sf-heu", "", "", ""]
        if seconds is not None:
            found = [f"{seconds * 1e3:.0f}", f"{phe / seconds:.1f}", "", ""]
        table.add_row(f"HEU {schema}", *found)

    def others() -> tuple[float, float]:
        return naive(private.public_key, private, SLICE), heu("ZPaillier", bits, HEU_SLICE) or math.nan

    forms: list[tuple[str, dict[str, Any]]] = [(mode, {"mode": mode}) for mode in MODES]
    forms += [(f"standard, {name}", settings) for name, settings in VARIANTS.items()]
    before = others()
    for name, settings in forms:
        seconds, setup, share = ours(CipherLayout(width=WIDTH, batch=ROWS, bits=bits, **settings))
        after = others()
        ratios = [(a + b) / 2 / seconds for a, b in zip(before, after, strict=True)]
        cells = [f"{seconds * 1e3:.1f}", *(f"{ratio:.0f}" for ratio in ratios), f"{share:.0%}"]
        table.add_row(f"{name}; keys, tables {setup:.1f} s", *cells)
        before = after
    return table


def growth() -> Table:
    """Return the table of the cost by rows and by features."""
    table = Table("2048 bits, standard", "ciphertexts", "CPU ms a batch", "ms by 128 x 10")
    for rows, width in ((64, 10), (128, 10), (256, 10), (512, 10), (128, 5), (128, 20), (128, 40)):
        layout = CipherLayout(width=width, batch=rows)
        seconds = ours(layout).seconds * 1e3
        share = rows * width / (ROWS * WIDTH)
        count = " + ".join(map(str, layout.traffic))
        table.add_row(f"{rows} x {width}", count, f"{seconds:.1f}", f"{seconds / share:.1f}")
    return table


def epoch(bits: int, mode: Mode, batches: int) -> list[str]:
    """Return the row of one epoch on two cores: two processes prepare randomizers, this one does the rest."""
    layout, task = CipherLayout(width=WIDTH, batch=ROWS, bits=bits, mode=mode), Task()
    data = [task.batch(ROWS) for _ in range(batches)]
    plain = task.weights.copy()
    for mu, y in data:
        plain -= RATE * mu.T @ logistic(mu @ plain, y) / ROWS
    began, spent = time.perf_counter(), cpu()
    pair = Pair(Keys.generate(bits, mode), layout, task, batches, workers=1)
    try:
        pair.step(*data[0])
        first = time.perf_counter() - began
        for mu, y in data[1:]:
            pair.step(mu, y)
        seconds = time.perf_counter() - began
        error = np.abs(pair.weights() - plain).max()
    finally:
        pair.c.close()
        pair.p.close()
    spent = cpu() - spent
    whole = first + (seconds - first) * (SAMPLES / ROWS - 1) / (batches - 1)
    return [f"{bits} bits, {mode}", *(f"{x:.1f}" for x in (first, spent, seconds, whole)), f"{error:.0e}"]


def cpu() -> float:
    """Return the CPU seconds of this process and of the children that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(of.ru_utime + of.ru_stime for of in used)


@click.command()
@click.option("--quick", is_flag=True, help="16 rows under phe and HEU, a tenth of the epoch.")
@click.option("--bits", multiple=True, type=int, default=(2048, 3072), help="Sizes of keys.", show_default=True)
def main(quick: bool, bits: tuple[int, ...]) -> None:
    """Print the tables."""
    rows = SLICE if quick else ROWS
    with threadpool_limits(1):
        for size in bits:
            CONSOLE.print(side_by_side(size, rows))
        CONSOLE.print(growth())
        batches = SAMPLES // ROWS // (10 if quick else 1)
        heads = "first batch, s", f"{batches} batches, CPU s", "s", "epoch, s", "|W - float64|"
        table = Table("80,000 samples, two cores", *heads)
        for mode in MODES:
            table.add_row(*epoch(bits[0], mode, batches))
        CONSOLE.print(table)


if __name__ == "__main__":
    main()
