"""Pictures of the models that a recipe has trained: what matters to them, and how they represent rows."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from scipy.stats import gaussian_kde
from sklearn.decomposition import PCA
from torch import Tensor

from vflsec.core.method import Trained
from vflsec.nn.feature_groups import FeatureGroups
from vflsec.papers.attribution import exact
from vflsec.papers.attribution_pictures import importance, swarm
from vflsec.papers.domains import domain_map
from vflsec.papers.recipe import RecipeGrid
from vflsec.report.curve import COLORS, Curve, own_style

MAPPED_ROWS = 600
"""Rows of each domain, or of each class, on a map."""

GRID = 80
"""Points of a density on each axis."""


def of_models(job: RecipeGrid) -> Curve:
    """Return the recipe's picture of its models of seed 0: of the first row, or one line of diagrams for each row.

    Nothing is drawn for models that are not in the store.
    """
    recipe = job.recipe
    found = {row.name: next(job.trained(i), None) for i, row in enumerate(recipe.rows)}
    models = {name: trained for name, trained in found.items() if trained is not None}
    if not models:
        return Curve()
    if recipe.picture == "domains":
        return domain_map({name: _by_domain(trained) for name, trained in models.items()}, title=recipe.title)
    if recipe.picture == "density":
        return density_map({name: _by_class(trained) for name, trained in models.items()}, title=recipe.title)
    draw = importance if recipe.picture == "importance" else swarm
    return draw(exact(next(iter(models.values()))), recipe.title)


def _by_domain(trained: Trained) -> dict[str, tuple[Tensor, Tensor]]:
    """Return what the extractors make of rows of the source and of the target, by feature group."""
    passive = trained.federation.passive[0]
    bottom = passive.modules["bottom"].eval()
    assert isinstance(bottom, FeatureGroups)
    parts = []
    for split in ("source", "adaptation"):
        rows = torch.randperm(len(passive.features[split]), generator=torch.Generator().manual_seed(0))[:MAPPED_ROWS]
        with torch.no_grad():
            parts.append(torch.split(bottom.extract(passive.features[split][rows]), list(bottom.widths), dim=1))
    return dict(zip(bottom.names, zip(*parts, strict=True), strict=True))


def _by_class(trained: Trained) -> tuple[Tensor, Tensor]:
    """Return what the first passive party makes of the test rows of the first two classes."""
    federation = trained.federation
    passive, labels = federation.passive[0], federation.active.labels["test"]
    with torch.no_grad():
        embedded = trained.method.representation(passive).eval()(passive.features["test"])
    first, second = (embedded[labels == c][:MAPPED_ROWS] for c in (0, 1))
    return first, second


@own_style()
def density_map(maps: Mapping[str, tuple[Tensor, Tensor]], title: str = "") -> Curve:
    """Return a density of the rows of two classes for each model: two principal components, scaled to the unit circle.

    Source: SS-VFL (Castiglia et al. 2022), figure 2.

    Args:
        maps: by what was trained, representations (n, d) and (m, d) of the rows of two classes.
        title: of the figure.
    """
    figure = Curve(figsize=(2.9 * len(maps), 3.6), layout="constrained")
    for axes, (name, classes) in zip(figure.subplots(1, len(maps), squeeze=False)[0], maps.items(), strict=True):
        points = on_circle(torch.cat(classes).cpu().numpy())
        ends = np.split(points, [len(classes[0])])
        across = np.linspace(-1.7, 1.7, GRID)
        x, y = np.meshgrid(across, across)
        for own, color, style in zip(ends, (COLORS[1], COLORS[0]), ("-", "--"), strict=True):
            density = gaussian_kde(own.T)(np.stack([x.ravel(), y.ravel()])).reshape(GRID, GRID)
            levels = density.max() * np.array([0.15, 0.4, 0.7])
            axes.contourf(x, y, density, levels=[levels[0], density.max()], colors=[color], alpha=0.18)
            axes.contour(x, y, density, levels=levels, colors=[color], linestyles=[style], linewidths=1.1)
        axes.set(aspect="equal", xticks=[-1, 0, 1], yticks=[-1, 0, 1])
        axes.set_title(name, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    for name, color, style in (("class 0", COLORS[1], "-"), ("class 1", COLORS[0], "--")):
        figure.axes[0].plot([], [], style, color=color, label=name)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def on_circle(rows: np.ndarray) -> np.ndarray:
    """Return the first two principal components of rows (n, d), each row scaled to length 1."""
    flat = PCA(n_components=2, random_state=0).fit_transform(rows)
    scaled: np.ndarray = flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-12)
    return scaled
