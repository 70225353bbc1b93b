"""Writes the CSV files of a bank and a bureau as companies export them: gaps, dates, booleans, many categories.

    python tests/data/dirty.py FOLDER

20,000 rows each, of which 16,000 are about the same customers.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

ROWS, SHARED, MERCHANTS = 20_000, 16_000, 6_000


def write(folder: Path) -> None:
    """Write ``bank.csv``, which has the label ``defaulted``, and ``bureau.csv``; their key is ``customer``."""
    rng = np.random.default_rng(3)
    people = 2 * ROWS - SHARED
    popularity = 1 / np.arange(1, MERCHANTS + 1) ** 0.7
    merchant = rng.choice(MERCHANTS, people, p=popularity / popularity.sum())
    opened = pd.Timestamp("2010-01-01") + pd.to_timedelta(rng.integers(0, 5_000, people), unit="D")
    owner, checked = rng.random(people) < 0.6, rng.random(people) < 0.3
    age, late = rng.integers(18, 80, people).astype(float), rng.poisson(1.2, people)
    income, debt = np.exp(rng.normal(10, 1.2, people)), np.exp(rng.normal(5, 1.5, people))
    score = rng.normal(size=people)
    risk = 0.5 * (age - 50) / 18 - 0.4 * (np.log(income) - 10) + 0.5 * owner + 0.9 * score + 0.5 * late - 2
    risk += 0.35 * (np.log(debt) - 5) + 0.6 * rng.normal(size=MERCHANTS)[merchant] + rng.normal(size=people)
    risk -= 0.0003 * np.asarray((opened - pd.Timestamp("2016-01-01")).days)
    ids = [f"c{k:05d}" for k in range(people)]
    bank = pd.DataFrame(
        {
            "customer": ids,
            "age": np.where(rng.random(people) < 0.08, np.nan, age),
            "income": [f"{x:,.2f}" for x in income],
            "job": rng.choice(["cook", "baker", "pilot", "nurse", ""], people),
            "owner": owner,
            "opened": opened.strftime("%d.%m.%Y"),
            "defaulted": np.where(risk > 0, "yes", "no"),
        }
    )
    bank.loc[rng.random(people) < 0.1, "income"] = "NA"
    hidden = (rng.random(people) < 0.12) | (score > 1.5)
    bureau = pd.DataFrame(
        {
            "customer": ids,
            "score": np.where(hidden, np.nan, score.round(4)),
            "debt": debt.round(2),
            "late": late,
            "merchant": [f"m{k:04d}" for k in merchant],
            "checked": checked,
        }
    )
    bank[:ROWS].sample(frac=1, random_state=1).to_csv(folder / "bank.csv", index=False)
    bureau[-ROWS:].sample(frac=1, random_state=2).to_csv(folder / "bureau.csv", index=False)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
