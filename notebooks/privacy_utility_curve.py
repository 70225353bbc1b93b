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
# # A privacy-utility curve
#
# A bank knows which of its clients defaulted. A credit bureau holds other columns about the same people. They train a
# split network together. How much of the labels does the bureau learn, and what does noise on the gradients change?

# %%
import vflsec

SEEDS = 5

# %% [markdown]
# Who holds what:

# %%
dataset = vflsec.load_dataset("credit-default")
{party.name: list(party.frame.columns) for party in dataset.parties}

# %% [markdown]
# The same evaluation as `vflsec eval --attack mc --defense iso --lambda 1,5,25`. Results that are there already are not
# computed again.

# %%
report = vflsec.evaluate(
    attack="mc", defense="iso", strengths=[1, 5, 25], seeds=SEEDS, out="runs/privacy_utility_curve"
)
report

# %% [markdown]
# Utility is on x, leak on y: a good defense moves the points down without moving them left. The dashed line is what the
# bureau infers alone, from its own columns and the same 80 labels, and its band is the 95 % interval of that.

# %%
report.plot()

# %% [markdown]
# What the federation gave away is the leak *minus* what the bureau reaches alone, paired by seed:

# %%
{point.strength: (round(point.leak.advantage, 3), point.leak.advantage_ci95) for point in report.points}

# %% [markdown]
# CAP folds the curve into one number, and rewards a destroyed model: half an AUC times half a leak is .25 for nothing
# at all. Its calibrated value charges the advantage alone.

# %%
[(cap.attack, round(cap.value, 3), round(cap.calibrated, 3)) for cap in report.cap]
