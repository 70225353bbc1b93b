"""Federated trees against LightGBM, and what encrypting their histograms costs.

    python benchmarks/trees.py                utility and time, a few minutes
    python benchmarks/trees.py --encrypted    the cost of encryption, a few minutes
    python benchmarks/trees.py --columns      the order of a passive party's columns, a few minutes

LightGBM gets the same encoded columns of all parties in one table, and the same number of trees, bins, depth and
penalty. Times are CPU seconds on one thread; ratios are taken pair by pair. The cost of encryption is measured with
three numbers of rows and of bins each, by a key of 2048 bits, and extrapolated to credit-default's rows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import click
import lightgbm
import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score

from vflsec.base.layout import Layout
from vflsec.base.seeds import make_rng
from vflsec.core import registry
from vflsec.core.federation import Federation
from vflsec.core.message import Channel, Kind, Transcript
from vflsec.core.party import Party
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.inference.trees.bounds import find_bounds
from vflsec.inference.trees.values import solve_bins
from vflsec.methods.secureboost import SecureBoost
from vflsec.run import spec as specs
from vflsec.run.adversary import observe
from vflsec.run.federation import build_federation
from vflsec.run.plan import build_cell
from vflsec.run.training import limit_threads

DATASETS = ("credit-default", "census-income", "flights")
ORDERED = ("credit-default", "flights")  # whose columns are put in order
ROUNDS, DEPTH, BINS, RATE, L2, LEAF_ROWS, LEAF_HESSIAN = 20, 4, 32, 0.3, 1.0, 20, 0.001
PAIRS = 7
ROWS, COLUMNS = 21_000, 10  # that the cost of encryption is extrapolated to, and of the passive party
SIZES, WIDTHS, MEASURED = (1000, 2000, 4000), (8, 16, 32), 5


def federation_of(dataset: str, seed: int) -> Federation:
    """Return the parties with the data of one seed."""
    spec = specs.read_training({"dataset": dataset, "methods": ["secureboost"]})
    return build_federation(build_cell(spec, "secureboost", seed), "cpu")


def method(exchange: str = "masked", **options: Any) -> SecureBoost:
    """Return the method with the settings of this benchmark."""
    settings = {
        "rounds": ROUNDS, "depth": DEPTH, "bins": BINS, "learning_rate": RATE, "l2": L2, "leaf_rows": LEAF_ROWS,
        "leaf_hessian": LEAF_HESSIAN,
    }  # fmt: skip
    made = registry.build("methods", "secureboost", TrainSpec(), ModelSpec(), exchange=exchange, **settings | options)
    assert isinstance(made, SecureBoost)
    return made


def pooled(federation: Federation, split: str) -> NDArray[np.floating]:
    """Return the encoded columns of all parties, side by side."""
    return torch.cat([party.features[split] for party in federation.parties.values()], dim=1).numpy()


def boosted(x: NDArray[np.floating], y: NDArray[np.integer]) -> lightgbm.Booster:
    """Return LightGBM's trees."""
    parameters = {
        "objective": "binary", "learning_rate": RATE, "max_bin": BINS, "max_depth": DEPTH, "num_leaves": 2**DEPTH,
        "min_data_in_leaf": LEAF_ROWS, "lambda_l2": L2, "min_sum_hessian_in_leaf": LEAF_HESSIAN, "num_threads": 1,
        "verbosity": -1, "deterministic": True, "seed": 0,
    }  # fmt: skip
    return lightgbm.train(parameters, lightgbm.Dataset(x, y, params=parameters), ROUNDS)


def utility(seeds: int) -> Iterable[list[str]]:
    """Yield a row of AUC on test rows for each data set."""
    for dataset in DATASETS:
        found = []
        for seed in range(seeds):
            federation = federation_of(dataset, seed)
            labels = {split: federation.active.labels[split].numpy() for split in ("train", "test")}
            trained = method().fit(federation)
            booster = boosted(pooled(federation, "train"), labels["train"])
            scores = trained.predict("test")[:, 1].numpy(), booster.predict(pooled(federation, "test"), raw_score=True)
            found.append([roc_auc_score(labels["test"], score) for score in scores])
        ours, theirs = np.array(found).T
        difference = ours - theirs
        yield [
            dataset,
            f"{ours.mean():.4f}",
            f"{theirs.mean():.4f}",
            f"{difference.mean():+.4f}",
            f"{difference.min():+.4f}",
            f"{difference.max():+.4f}",
            "yes" if abs(difference.mean()) <= 0.005 else "no",
        ]


def timed(run: Callable[[], object]) -> float:
    """Return the CPU seconds of ``run``."""
    began = time.process_time()
    run()
    return time.process_time() - began


def training(federation: Federation, exchange: str) -> float:
    """Return the CPU seconds of growing the trees."""
    made = method(exchange)
    made.build(federation)
    return timed(lambda: made.run("train", federation))


def speed(pairs: int) -> Iterable[list[str]]:
    """Yield a row of times for each exchange."""
    federation = federation_of("credit-default", 0)
    x, y = pooled(federation, "train"), federation.active.labels["train"].numpy()
    for exchange in ("plain", "masked"):
        training(federation, exchange), boosted(x, y)  # warm up
        found = [(training(federation, exchange), timed(lambda: boosted(x, y))) for _ in range(pairs)]
        ours, theirs = (statistics.median(column) for column in zip(*found, strict=True))
        ratios = sorted(a / b for a, b in found)
        yield [exchange, f"{ours:.2f}", f"{theirs:.2f}", *_spread(ratios)]


def _spread(ratios: Sequence[float]) -> list[str]:
    return [f"{x:.2f}" for x in (statistics.median(ratios), ratios[0], ratios[-1])]


def orders(dataset: str, seeds: int) -> Iterable[list[str]]:
    """Yield a row for each number of passive_1: how well the active party orders rows by it."""
    found: dict[str, list[list[float]]] = {}
    for seed in range(seeds):
        federation = federation_of(dataset, seed)
        tap = Transcript(frozenset(federation.parties), frozenset(Kind))
        federation.channel.taps.append(tap)
        trained = method().fit(federation)
        trained.predict("test")
        messages = tuple(m for m in tap.messages if "active" in (m.sender, m.receiver))
        view = observe(trained, [federation.active], torch.zeros(0, dtype=torch.long), messages)
        victim, known = federation.parties["passive_1"], find_bounds(view, "passive_1")
        assert known is not None
        numbers = {"train": solve_bins(view, "passive_1"), "test": known.expected["test"]}
        for unit in (u for u, unit in enumerate(known.units) if unit.ordered):
            column = victim.layout.columns[known.units[unit].column]
            pairs = [(numbers[s][:, unit], victim.features[s][:, column.start].numpy()) for s in numbers]
            told = [spearmanr(*pair).statistic if np.ptp(pair[0]) > 0 else 0.0 for pair in pairs]
            found.setdefault(column.name, []).append(told)
    for name, by_seed in found.items():
        yield [dataset, name, *(f"{x:.2f}" for x in np.mean(by_seed, axis=0))]


class Cost(NamedTuple):
    """What trees under encryption take.

    Attributes:
        rows: of training.
        bins: of each column.
        tree: CPU seconds of one, the median.
        whole: of MEASURED of them, with keys and tables.
    """

    rows: int
    bins: int
    tree: float
    whole: float


def encrypted(rows: int, bins: int, bits: int) -> Cost:
    """Return the cost of trees whose passive party has COLUMNS columns of normal numbers."""
    rng, channel, parties = make_rng(rows, "columns"), Channel(), {}
    x = torch.randn(rows, COLUMNS + 1, generator=rng)
    y = (x.sum(dim=1) + torch.randn(rows, generator=rng) > 0).long()
    for name, columns in (("active", x[:, :1]), ("passive_1", x[:, 1:])):
        parties[name] = Party(
            name,
            {"train": columns},
            channel,
            noise=partial(make_rng, 0, "noise", name),
            layout=Layout.numeric(columns.shape[1]),
            labels={"train": y} if name == "active" else None,
        )
    federation = Federation(parties, channel, 2, "auc", 0, torch.device("cpu"))
    made = method("paillier", rounds=MEASURED, bins=bins, key_bits=bits)
    made.build(federation)
    times = [time.process_time()]
    made.run("train", federation, lambda *_: times.append(time.process_time()))
    tree = statistics.median(np.diff(times))
    return Cost(rows, bins, float(tree), times[-1] - times[0])


class Line(NamedTuple):
    """A straight line through times.

    Attributes:
        start: at 0.
        slope: for each one more.
        r2: the share of the variance that it explains.
    """

    start: float
    slope: float
    r2: float

    @classmethod
    def through(cls, x: Sequence[float], y: Sequence[float]) -> Line:
        """Return the line of least squares."""
        slope, start = np.polyfit(x, y, 1)
        rest = np.array(y) - (start + slope * np.array(x))
        return cls(float(start), float(slope), float(1 - rest.var() / np.var(y)))


def cryptography(bits: int) -> str:
    """Return the table of encryption, and what follows from it."""
    by_rows = [encrypted(rows, BINS, bits) for rows in SIZES]
    by_bins = [encrypted(SIZES[-1], bins, bits) for bins in WIDTHS[:-1]] + [by_rows[-1]]
    whole = encrypted(ROWS, BINS, bits)
    rows = Line.through([one.rows for one in by_rows], [one.tree for one in by_rows])
    bins = Line.through([one.bins for one in by_bins], [one.tree for one in by_bins])
    lines = [*dict.fromkeys([*by_rows, *by_bins]), whole]
    table = markdown(
        ["rows", "bins of a column", "a tree, CPU s", f"{MEASURED} trees and keys, CPU s"],
        [[f"{one.rows:,}", str(one.bins), f"{one.tree:.2f}", f"{one.whole:.1f}"] for one in lines],
    )
    tree = rows.start + rows.slope * ROWS
    return (
        f"{table}\n\nR² of lines: {rows.r2:.3f} in rows, {bins.r2:.3f} in bins. By the line in rows a tree of {ROWS:,} "
        f"rows takes {tree:.1f} CPU s, measured {whole.tree:.1f}; {ROUNDS} trees {ROUNDS * tree / 60:.1f} CPU minutes."
    )


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))


@click.command()
@click.option("--seeds", default=5, show_default=True, help="Of the comparison of utility, and of columns.")
@click.option("--encrypted", "costly", is_flag=True, help="Measure the cost of encryption instead.")
@click.option("--columns", is_flag=True, help="Measure the order of columns instead.")
@click.option("--bits", default=2048, show_default=True, help="Size of the key.")
def main(seeds: int, costly: bool, columns: bool, bits: int) -> None:
    """Print the tables."""
    with limit_threads():
        if costly:
            click.echo(cryptography(bits))
            return
        if columns:
            header = ["data set", "column of passive_1", "rank correlation, training rows", "test rows"]
            click.echo(markdown(header, chain.from_iterable(orders(dataset, seeds) for dataset in ORDERED)))
            return
        header = ["data set", "secureboost, AUC", "LightGBM, AUC", "difference, mean", "min", "max", "within .005"]
        click.echo(markdown(header, utility(seeds)))
        header = ["exchange", "secureboost, CPU s", "LightGBM, CPU s", f"ratio, median of {PAIRS} pairs", "min", "max"]
        click.echo(f"\n{markdown(header, speed(PAIRS))}")


if __name__ == "__main__":
    main()
