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
# # Your own attack, defense and method
#
# A technique is one file with one class. Nothing is registered: `path.py:Class` names it wherever a name of vflsec can
# stand. This notebook writes one of each kind, tests them with the conformance suites, and evaluates them together.

# %%
import os
import sys
from tempfile import TemporaryDirectory

import vflsec

folder = TemporaryDirectory()  # files and results of this notebook are deleted at its end
os.chdir(folder.name)
sys.path.insert(0, "")

# %% [markdown]
# ## An attack
#
# An attack turns what the adversary holds, a `View`, into a `Guess`. It declares what it needs, and never sees the truth.
# This one gives every row the label of the nearest auxiliary rows in the passive party's embedding.

# %%
# %%writefile nearest.py
import torch

from vflsec.core.attack import Attack
from vflsec.core.view import Guess, Need


class Nearest(Attack):
    """Label inference by the auxiliary rows that are nearest in one's own embedding.

    Args:
        k: how many neighbors vote.
    """

    name = "nearest"
    needs = frozenset({Need.FEATURES, Need.MODEL, Need.AUX_LABELS})
    reference = "none: an example"
    verified = "unverified"

    def __init__(self, *, k=9):
        self.k = k

    def run(self, view, *, rng):
        scores = {}
        with torch.no_grad():
            known = view.model(view.features["train"][view.aux_rows])  # (n, d)
            votes = torch.nn.functional.one_hot(view.aux_labels, view.n_classes).float()  # (n, C)
            for split, own in view.features.items():
                near = torch.cdist(view.model(own), known).topk(min(self.k, len(known)), largest=False).indices
                scores[split] = votes[near].mean(dim=1)  # (N, C)
        return Guess(scores)

# %% [markdown]
# ## A defense
#
# A defense overrides the hooks that it needs. Strength 0 changes nothing. All randomness comes from `release.rng`. This
# one adds uniform noise to gradients.

# %%
# %%writefile uniform.py
import torch

from vflsec.core.defense import Defense
from vflsec.core.message import Kind


class Uniform(Defense):
    """Uniform noise on every entry, at most ``strength`` times the largest entry of the batch."""

    name = "uniform"
    points = (Kind.GRADIENT,)
    reference = "none: an example"
    guarantee = "none, empirical only"

    def on_gradient(self, g, release):
        if not g.numel():
            return g
        noise = 2 * torch.rand(g.shape, generator=release.rng, dtype=g.dtype, device=g.device) - 1
        return g + self.strength * g.abs().max() * noise

# %% [markdown]
# ## A method
#
# A method of split learning says what each party has below the cut layer. This one has a single linear layer.

# %%
# %%writefile linear.py
from torch import nn

from vflsec.methods.split_method import SPLIT, SplitMethod


class Linear(SplitMethod):
    """Split learning with linear bottom models."""

    name = "linear"
    reference = "none: an example"
    messages = {"train": SPLIT}

    def build_party(self, party, federation):
        party.modules["bottom"] = nn.Linear(party.n_features, 4)

    def width(self, party):
        return 4

# %% [markdown]
# ## Conformance
#
# A suite checks what every technique of its kind must do: refuse what it cannot serve, be reproducible, leave others
# alone, and find a leak that is there. In your project, call the classes `Test...`, and pytest runs them.

# %%
from linear import Linear
from nearest import Nearest
from uniform import Uniform

from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.testing.conformance import AttackConformance, DefenseConformance, MethodConformance


class NearestSuite(AttackConformance):
    def make(self):
        return Nearest()


class UniformSuite(DefenseConformance):
    def make(self, strength, **options):
        return Uniform(strength, **options)


class LinearSuite(MethodConformance):
    def make(self):
        return Linear(TrainSpec(epochs=2), ModelSpec())


for suite in (NearestSuite(), UniformSuite(), LinearSuite()):
    checks = [name for name in dir(suite) if name.startswith("test_")]
    for name in checks:
        getattr(suite, name)()
    print(f"{type(suite).__name__}: {len(checks)} checks passed")

# %% [markdown]
# ## Evaluation
#
# Options follow the name, as for techniques of vflsec: `nearest.py:Nearest:k=15`.

# %%
report = vflsec.evaluate(
    attack=["mc", "averaging", "nearest.py:Nearest:k=15"], defense="uniform.py:Uniform", strengths=[10],
    methods=["fedsplitnn", "linear.py:Linear"], data={"n_labeled": 600}, aux={"folds": 0}, seeds=3, jobs=1,
    progress=False,
)  # fmt: skip
frame = report.to_frame()
leaks = frame.pivot_table(index=["method", "strength"], columns="attack", values="leak")
leaks.round(2)

# %% [markdown]
# `Nearest` infers about as much as `mc`, from the same material. The noise lowers what `averaging` infers, but not to what
# the party infers alone:

# %%
alone = report.worst[0].leak.alone
assert (abs(leaks["Nearest"] - leaks["mc"]) < 0.05).all()
defended = leaks.xs(10, level="strength")["averaging"]
assert (defended < leaks.xs(0, level="strength")["averaging"]).all()
assert (defended > alone).all()
print(f"averaging against the defense: {defended.min():.2f} or more, alone: {alone:.2f}")

# %%
report.plot()
