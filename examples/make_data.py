"""Writes the files of a bank, a bureau and a shop, the ids of their rows, and ``mine.toml`` for the audit."""

from pathlib import Path

import pandas as pd
from sklearn.datasets import load_breast_cancer

N_TRAIN = 400

data = load_breast_cancer(as_frame=True)
columns = data.data.set_axis([name.replace(" ", "_") for name in data.data.columns], axis=1)
columns = (columns - columns.mean()) / columns.std()
columns.index = pd.Index([f"p{k}" for k in range(len(columns))], name="id")
parties = {
    "bank": columns.iloc[:, :4].assign(label=data.target.to_numpy()),
    "bureau": columns.iloc[:, 4:17],
    "shop": columns.iloc[:, 17:],
}
for name, table in parties.items():
    table.to_csv(f"{name}.csv")
Path("train.txt").write_text("\n".join(columns.index[:N_TRAIN]) + "\n")
Path("test.txt").write_text("\n".join(columns.index[N_TRAIN:]) + "\n")
Path("mine.toml").write_text(
    """label = "label"
id = "id"

[parties.active]
file = "bank.csv"

[parties.passive_1]
file = "bureau.csv"

[parties.passive_2]
file = "shop.csv"
"""
)
