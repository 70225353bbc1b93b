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
# # Audit a model that was trained elsewhere
#
# An audit attacks a system that vflsec has not trained. This notebook trains a small split model with plain PyTorch,
# records what crosses the cut layer, saves the bottom model, and audits both.

# %%
import os
import sys
from tempfile import TemporaryDirectory

import pandas as pd
import torch
from safetensors.torch import save_file
from sklearn.datasets import load_breast_cancer
from torch import nn

import vflsec

folder = TemporaryDirectory()  # files and results of this notebook are deleted at its end
os.chdir(folder.name)

# %% [markdown]
# ## Data
#
# A clinic has the labels and most columns, a laboratory has three columns. A TOML file describes their files.

# %%
data = load_breast_cancer(as_frame=True)
columns = data.data.set_axis([name.replace(" ", "_") for name in data.data.columns], axis=1)
columns = ((columns - columns.mean()) / columns.std()).rename_axis("id")
laboratory = columns[["mean_texture", "mean_smoothness", "mean_symmetry"]]
clinic = columns.drop(columns=laboratory.columns)
clinic.assign(label=data.target).to_csv("clinic.csv")
laboratory.to_csv("laboratory.csv")

with open("mine.toml", "w") as file:
    file.write("""
label = "label"
id = "id"
active = "clinic"

[parties.clinic]
file = "clinic.csv"

[parties.laboratory]
file = "laboratory.csv"
""")

# %% [markdown]
# ## Training
#
# The laboratory's bottom model is built by a function in a file of its own, which the audit needs as well.

# %%
# %%writefile factory.py
from torch import nn


def build():
    return nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 8))

# %% [markdown]
# A loop as in any split learning. `recorder.cut` passes the embedding on, and records it and its gradient.

# %%
sys.path.insert(0, "")
from factory import build

x, z = (torch.tensor(table.to_numpy()).float() for table in (clinic, laboratory))
y, ids = torch.tensor(data.target.to_numpy()), columns.index.to_numpy()
torch.manual_seed(0)
bottom, top = build(), nn.Linear(27 + 8, 2)
optimizer = torch.optim.Adam([*bottom.parameters(), *top.parameters()], lr=1e-3)

with vflsec.Recorder(
    "transcript", parties={"clinic": "active", "laboratory": "passive"}, observer="laboratory"
) as recorder:
    for epoch in range(20):
        for rows in torch.randperm(400).split(32):
            h = recorder.cut(bottom(z[rows]), rows=ids[rows])  # the line
            loss = nn.functional.cross_entropy(top(torch.cat([x[rows], h], dim=1)), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        recorder.cut(bottom(z[:400]), rows=ids[:400], phase="predict")
        recorder.cut(bottom(z[400:]), rows=ids[400:], split="test")

with torch.no_grad():
    right = top(torch.cat([x[400:], bottom(z[400:])], dim=1)).argmax(dim=1) == y[400:]
save_file(bottom.state_dict(), "bottom.safetensors")
pd.Series(ids[:400]).to_csv("train.txt", index=False, header=False)
print(f"accuracy on test rows: {right.float().mean():.2f}")

# %% [markdown]
# ## Audit of the transcript
#
# For a real audit, leave out `attack` and `draws`: then it runs all attacks, with five draws of the auxiliary labels.
# `vflsec audit` does the same on the command line.

# %%
report = vflsec.audit_system("transcript", "mine.toml", attack="direction", aux={"n": 20}, draws=1, progress=False)
report

# %% [markdown]
# The laboratory receives a gradient for each row, and the gradient points to the label. `alone` is what it infers from its
# own columns and the same auxiliary labels.

# %%
headline = report.worst[0]
print(f"{headline.choice}: leak {headline.leak.mean:.3f} on {headline.leak.rows} rows, alone {headline.leak.alone:.3f}")
assert headline.choice == "direction"
assert headline.leak.mean > headline.leak.alone + 0.1

# %% [markdown]
# ## Audit of the weights
#
# The weights alone show no gradients. The audit names what it cannot measure. The system is the same, but an auditor sees
# less of its leak:

# %%
weights = vflsec.audit_system(
    "bottom.safetensors",
    "mine.toml",
    model="factory.py:build",
    encoded=True,
    train_ids="train.txt",
    attack="mc",
    draws=1,
    progress=False,
)
print("direction:", weights.summary.left_out["direction"])

shown = ["audited", "attack", "leak", "leak_low", "leak_high", "alone", "advantage"]
found = {"transcript": report, "weights": weights}
frame = pd.concat([one.to_frame().assign(audited=name) for name, one in found.items()])
assert weights.worst[0].leak.mean < report.worst[0].leak.mean - 0.1
frame[shown].round(3)
