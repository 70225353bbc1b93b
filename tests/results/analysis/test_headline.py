"""The headline on a linear world, where 80 labels do not tell the strongest attack."""

import numpy as np
import pandas as pd
import pytest

import vflsec
from vflsec.data.dataset import Card, PartyTable, VerticalDataset

COLUMNS = 20


def linear_world(*, rows: int) -> VerticalDataset:
    """The class is the sign of a noisy sum of 20 columns of each party."""
    rng = np.random.default_rng(0)
    x, weights = rng.normal(size=(rows, 2 * COLUMNS)), rng.normal(size=2 * COLUMNS)
    labels = x @ weights / np.linalg.norm(weights) + 0.5 * rng.normal(size=rows) > 0
    ids = pd.Index(np.arange(rows), name="id")
    return VerticalDataset(
        name="linear",
        parties=tuple(
            PartyTable(name, pd.DataFrame(own, index=ids, columns=[f"{name}_{j}" for j in range(COLUMNS)]))
            for name, own in (("active", x[:, :COLUMNS]), ("passive_1", x[:, COLUMNS:]))
        ),
        labels=pd.Series(labels.astype(int), index=ids),
        classes=("below", "above"),
        card=Card(title="Linear", source="drawn from a seed", license="none needed", rows=rows, label="", split=""),
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return vflsec.evaluate(
        attack=["mc:epochs=30", "averaging"], defense="iso:lambda=2", dataset=f"{__file__}:linear_world",
        data={"options": {"rows": 2000}}, train={"epochs": 3}, seeds=4, jobs=1,
        out=tmp_path_factory.mktemp("linear"),
    )  # fmt: skip


@pytest.mark.statistical
def test_worst_is_at_least_the_best_listed_row_less_its_interval(report):
    headlines = {point.strength: point for point in report.worst}
    for point in report.points:
        for leak in (point.leak, point.leak_train):
            assert headlines[point.strength].leak.mean >= leak.ci95[0]
    assert headlines[2.0].leak.advantage_ci95[0] > 0, "federation gave something away"


@pytest.mark.statistical
def test_baselines_by_themselves_have_a_headline_on_training_rows_too(tmp_path):
    (worst,) = vflsec.evaluate(
        attack="logistic", dataset="toy", train={"epochs": 1}, seeds=1, jobs=1, out=tmp_path
    ).worst
    assert worst.choice == "alone"
    assert worst.leak_train.mean == worst.leak_train.alone
