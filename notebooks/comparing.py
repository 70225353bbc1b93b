# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Compare methods and defenses on two datasets
#
# Two defenses of gradients, `iso` and `compress`, and three methods of training meet attacks on labels on two
# datasets. All results end in one pandas table and one figure. The settings are small, so that this runs in seconds. With
# one seed, intervals are over rows and do not cover how much trainings differ: use five seeds for results that you
# publish.

# %%
import os
from tempfile import TemporaryDirectory

import pandas as pd

import vflsec

folder = TemporaryDirectory()  # results go to ./runs; those of this notebook are deleted at its end
os.chdir(folder.name)

# %% [markdown]
# ## Defenses
#
# One evaluation for each dataset. `compress` keeps the largest entries of each gradient, and replaces the share λ of all
# entries by zeros.

# %%
settings = {"data": {"n_labeled": 600}, "aux": {"folds": 0}, "seeds": 1, "jobs": 1, "progress": False}
reports = [
    vflsec.evaluate(dataset=name, attack="averaging", defense=["iso:lambda=2,20", "compress:lambda=0.9"], **settings)
    for name in ("credit-default", "multiple-features")
]

# %% [markdown]
# `to_frame` names the dataset, so that the tables of several reports can be joined. The rows `worst` are the headlines.

# %%
results = pd.concat([report.to_frame() for report in reports], ignore_index=True)
worst = results.query("attack == 'worst'")
worst.pivot_table(index=["defense", "strength"], columns="dataset", values=["utility", "leak", "alone"]).round(2)

# %% [markdown]
# `vflsec.plot` draws several reports side by side.

# %%
vflsec.plot(reports)

# %% [markdown]
# Leaks are compared at equal utility. Of all settings that cost at most two points of utility, this is the one that leaks
# least on each dataset:

# %%
undefended = worst.query("strength == 0").groupby("dataset")["utility"].first()
cheap = worst[worst["utility"] >= worst["dataset"].map(undefended) - 0.02]
cheap.loc[cheap.groupby("dataset")["leak"].idxmin(), ["dataset", "defense", "strength", "utility", "leak", "alone"]].round(2)

# %% [markdown]
# ## Methods
#
# Methods train the passive party's bottom model in different ways: `fedsplitnn` by split learning alone, `ss-vfl-c` after
# contrastive pre-training. In `vertical-lr`, parties send their columns as they are. `mc` reads the bottom model:

# %%
methods = vflsec.evaluate(
    dataset="multiple-features", methods=["fedsplitnn", "ss-vfl-c", "vertical-lr"], attack="mc",
    train={"pretrain": {"epochs": 2}}, **settings,
)
methods.to_frame().query("attack == 'mc'")[["method", "utility", "leak", "alone"]].round(2)
