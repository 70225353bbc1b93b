"""Two domains before and after adaptation, on the plane."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from sklearn.manifold import TSNE
from torch import Tensor

from vflsec.report.curve import COLORS, Curve

PERPLEXITY = 30


def domain_map(maps: Mapping[str, Mapping[str, tuple[Tensor, Tensor]]], seed: int = 0, title: str = "") -> Curve:
    """Return t-SNE maps of representations, one panel each: rows by what was done, columns by group.

    Source: PrADA (Kang et al. 2022), figure 3.

    Args:
        maps: by row and column title, representations of the source's and of the target's rows, (n, d) and (m, d).
        seed: of t-SNE.
        title: of the figure.
    """
    columns = len(next(iter(maps.values())))
    figure = Curve(figsize=(2.5 * columns, 2.55 * len(maps) + 0.5), layout="constrained")
    axes = figure.subplots(len(maps), columns, squeeze=False)
    for line, (what, panels) in zip(axes, maps.items(), strict=True):
        for panel, (group, (source, target)) in zip(line, panels.items(), strict=True):
            both = np.concatenate([source.cpu().numpy(), target.cpu().numpy()])
            perplexity = min(PERPLEXITY, (len(both) - 1) / 3)
            flat = TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(both)
            drawn = np.random.default_rng(seed).permutation(len(both))  # or one domain would hide the other
            shades = np.array([COLORS[1]] * len(source) + [COLORS[0]] * len(target))
            panel.scatter(*flat[drawn].T, c=shades[drawn], s=3, linewidths=0, alpha=0.7, rasterized=True)
            panel.set_xticks([])
            panel.set_yticks([])
            panel.set_title(group, fontsize=9)
        line[0].set_ylabel(what, fontsize=9)
    for name, color in (("source", COLORS[1]), ("target", COLORS[0])):
        axes[0, 0].scatter([], [], color=color, s=14, label=name)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure
