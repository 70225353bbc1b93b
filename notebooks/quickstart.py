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
# # Quickstart: measure a leak in your own data
#
# A bank and a credit bureau hold different columns about the same clients. The bank is the active party: it has the
# labels. The bureau is the passive party. They train a split network. This notebook measures how well the bureau infers
# the labels, with and without a defense.

# %%
import os
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd

import vflsec

folder = TemporaryDirectory()  # results go to ./runs; those of this notebook are deleted at its end
os.chdir(folder.name)

# %% [markdown]
# ## Data
#
# Each party has one data frame. The index identifies a client. The frames need not have the same clients in the same
# order. Put your own frames here.

# %%
rng = np.random.default_rng(0)
income, debt, late = rng.normal(size=(3, 1500))
risk = debt + late - 1.5 * income + rng.normal(size=1500)

bank = pd.DataFrame({"income": income, "job": rng.choice(["baker", "cook", "nurse"], 1500)})
bank["defaulted"] = np.where(risk > 1.5, "yes", "no")
bureau = pd.DataFrame({"debt": debt, "late": late}).sample(n=1400, random_state=0)

loans = vflsec.dataset(active={"bank": bank}, passive={"bureau": bureau}, label="defaulted", name="loans")
loans

# %% [markdown]
# ## Evaluation
#
# `evaluate` trains the system without a defense and with noise of two strengths, mounts two attacks on each, and repeats
# this with three seeds. `mc` reads the bureau's own bottom model. `averaging` reads the gradients that the bureau
# receives. Both know the labels of 40 clients.

# %%
report = vflsec.evaluate(
    dataset=loans, adversary="bureau", attack=["mc", "averaging"], defense="iso", strengths=[2, 15], seeds=3,
    aux={"n": 40, "folds": 0}, jobs=1, progress=False,
)  # fmt: skip
report

# %% [markdown]
# *leak* is the AUC with which the bureau tells who defaulted, *alone* the AUC without joining the federation. The row
# `worst` is the headline: the strongest of all attacks and of *alone*.
#
# Without a defense, the bureau infers almost every label from the gradients, and far more than it can infer alone:

# %%
undefended = report.worst[0]
print(f"leak {undefended.leak.mean:.2f}, alone {undefended.leak.alone:.2f}, from {undefended.choice}")
assert undefended.leak.mean > 0.95 > undefended.leak.alone + 0.1

# %% [markdown]
# ## Picture
#
# A good defense moves the points down without moving them left.

# %%
report.plot()

# %% [markdown]
# ## Numbers and words
#
# `to_frame` returns a pandas table of all numbers, with the intervals. `to_csv`, `to_json`, `to_markdown` and `to_latex`
# return texts.

# %%
report.to_frame()[["defense", "strength", "attack", "utility", "leak", "leak_low", "leak_high", "alone"]].round(3)

# %% [markdown]
# The verdict says the same in two sentences. Attacks that were not run may leak more: `attack="all"` runs every attack
# that the adversary can mount.

# %%
print(*report.summary.verdict, sep="\n")
