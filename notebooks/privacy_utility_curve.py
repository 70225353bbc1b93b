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
# # Privacy-utility curves, and how CAP misleads
#
# A bank knows which of its clients defaulted. A credit bureau holds other columns about the same people. They train a
# split network together. This notebook draws what noise on the gradients costs and hides, folds the curve into one
# number, CAP, and shows two ways in which this number misleads.

# %%
import os
from tempfile import TemporaryDirectory

import pandas as pd

import vflsec

folder = TemporaryDirectory()  # results go to ./runs; those of this notebook are deleted at its end
os.chdir(folder.name)

# %% [markdown]
# Who holds what:

# %%
dataset = vflsec.load_dataset("credit-default")
{party.name: list(party.frame.columns) for party in dataset.parties}

# %% [markdown]
# ## One attack is not an audit
#
# Two attacks run: `mc` reads the bureau's own bottom model, `averaging` reads the gradients that it receives. `iso` adds
# noise to these. The second call asks for `mc` alone. It computes nothing, since the folder has the results already.

# %%
settings = {
    "defense": "iso", "strengths": [5, 25], "data": {"n_labeled": 1000}, "aux": {"folds": 0}, "seeds": 3,
    "jobs": 1, "progress": False,
}  # fmt: skip
both = vflsec.evaluate(attack=["mc", "averaging"], **settings, out="runs/curve")
one = vflsec.evaluate(attack="mc", **settings, out="runs/curve")
one.plot()

# %% [markdown]
# The dashed line is what the bureau infers alone, from its own columns and the same auxiliary labels. Against `mc`, both
# strengths bring the leak down to this line. They look equally safe. Now against both attacks:

# %%
both.plot()

# %% [markdown]
# `averaging` averages the noise over all epochs, and the weaker noise hides little from it. Judge a defense by the
# headline, `worst`: at each strength the strongest of all attacks, or *alone*.

# %%
headlines = pd.DataFrame(
    {
        "worst of mc": [point.leak.mean for point in one.worst],
        "worst of mc and averaging": [point.leak.mean for point in both.worst],
        "alone": [point.leak.alone for point in one.worst],
    },
    index=pd.Index([point.strength for point in one.worst], name="strength"),
)
assert (headlines["worst of mc"][1:] < headlines["alone"][1:] + 0.02).all()
assert headlines["worst of mc and averaging"][5] > headlines["worst of mc"][5] + 0.2
headlines.round(3)

# %% [markdown]
# ## CAP rewards a destroyed model
#
# CAP is the mean of U · (1 − A) over the strengths, where U is the utility and A the leak. It does not ask whether a model
# is left. Compare moderate noise with `label-dp` of a huge strength, which replaces the labels by random ones:

# %%
destroyed = vflsec.evaluate(
    attack="averaging", **{**settings, "defense": ["iso:lambda=10", "label-dp:lambda=10000"], "strengths": []},
    out="runs/curve",
)
scores = pd.DataFrame(
    {"CAP": cap.value, "calibrated CAP": cap.calibrated} for cap in destroyed.cap if cap.attack == "averaging"
)
scores.index = ["iso", "label-dp"]
scores.insert(0, "utility", [point.utility.mean for point in destroyed.points if point.strength])
scores.round(3)

# %% [markdown]
# CAP prefers the destroyed model: half an AUC times half a leak is about .25 for nothing at all. The calibrated value
# charges only the advantage, that is the leak minus what the adversary infers alone. It prefers the model that works:

# %%
assert scores["utility"]["label-dp"] < 0.6 < 0.7 < scores["utility"]["iso"]
assert scores["CAP"].idxmax() == "label-dp"
assert scores["calibrated CAP"].idxmax() == "iso"
print("best by each score:", *scores.idxmax().items(), sep="\n")
