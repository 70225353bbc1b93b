"""Which inputs matter and in which direction: the figures of an attribution."""

from __future__ import annotations

import numpy as np
from matplotlib.colors import LinearSegmentedColormap

from vflsec.papers.attribution import Attribution
from vflsec.report.curve import COLORS, Curve

SCALE = LinearSegmentedColormap.from_list("value", [COLORS[0], "#c8c8c8", COLORS[1]])
SHOWN = 1500
"""Rows that are drawn, at most."""


def importance(found: Attribution, title: str = "") -> Curve:
    """Return the mean absolute contribution of each input as bars, the most important on top.

    Source: PrADA (Kang et al. 2022), figure 4.
    """
    mean = found.phi.abs().mean(dim=0).cpu().numpy()
    order = np.argsort(mean)
    figure = Curve(figsize=(6.4, 0.9 + 0.27 * len(order)), layout="constrained")
    axes = figure.add_subplot()
    axes.barh(range(len(order)), mean[order], color=COLORS[0], height=0.7)
    axes.set_yticks(range(len(order)), [found.names[j] for j in order])
    axes.set_xlabel("mean absolute contribution to the log odds")
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.margins(y=0.02)
    return figure


def swarm(found: Attribution, title: str = "") -> Curve:
    """Return each row's contribution of each input as points, colored by the input's value.

    Source: PrADA (Kang et al. 2022), figure 5; Lundberg and Lee's summary plot.
    """
    phi, values = found.phi.cpu().numpy()[:SHOWN], found.values.cpu().numpy()[:SHOWN]
    order = np.argsort(np.abs(phi).mean(axis=0))
    figure = Curve(figsize=(6.8, 1.1 + 0.34 * len(order)), layout="constrained")
    axes = figure.add_subplot()
    axes.axvline(0, color="#999999", linewidth=0.8, zorder=1)
    for line, j in enumerate(order):
        points = axes.scatter(
            phi[:, j], line + _spread(phi[:, j]), c=_shade(values[:, j]), cmap=SCALE, vmin=0, vmax=1, s=5,
            linewidths=0, rasterized=True, zorder=2,
        )  # fmt: skip
    axes.set_yticks(range(len(order)), [found.names[j] for j in order])
    axes.set_ylim(-0.7, len(order) - 0.3)
    axes.set_xlabel("contribution to the log odds")
    axes.set_title(title, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    bar = figure.colorbar(points, ax=axes, aspect=40, pad=0.02, ticks=[0, 1])
    bar.ax.set_yticklabels(["low", "high"])
    bar.set_label("value of the input", labelpad=-14)
    bar.outline.set_visible(False)
    return figure


def _shade(values: np.ndarray) -> np.ndarray:
    """Return each value's place (n,) between the 2nd and the 98th percentile, 0 to 1."""
    low, high = np.percentile(values, [2, 98])
    if low == high:
        low, high = values.min(), values.max()
    return np.full(len(values), 0.5) if low == high else np.clip((values - low) / (high - low), 0, 1)


def _spread(x: np.ndarray, bins: int = 80, height: float = 0.38) -> np.ndarray:
    """Return offsets (n,) that lay points of equal ``x`` above and below each other, as a histogram lying down."""
    edges = np.linspace(x.min(), x.max() + 1e-9, bins + 1)
    place = np.digitize(x, edges)
    offsets = np.zeros(len(x))
    most = np.bincount(place).max()
    for one in np.unique(place):
        members = np.flatnonzero(place == one)
        levels = (np.arange(len(members)) + 1) // 2 * np.where(np.arange(len(members)) % 2, 1, -1)
        offsets[members] = levels * 2 * height / max(most, 12)
    return offsets
