"""Pictures of the models that a recipe has trained: what matters to them, and how they represent rows."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.colors import LinearSegmentedColormap
from scipy.stats import gaussian_kde
from sklearn.decomposition import PCA
from sklearn.manifold import TSNE
from torch import Tensor, nn

from vflsec.base.errors import UsageError
from vflsec.core.method import Trained
from vflsec.core.party import Party
from vflsec.methods.split_method import SplitMethod
from vflsec.methods.split_training import SplitTraining
from vflsec.nn.feature_groups import FeatureGroups
from vflsec.nn.top import Top
from vflsec.papers.recipe_grid import RecipeGrid
from vflsec.report.curve import COLORS, Curve, fix_style

MAPPED_ROWS = 600
"""Rows of each domain, or of each class, on a map."""

GRID = 80
"""Points of a density on each axis."""

SCALE = LinearSegmentedColormap.from_list("value", [COLORS[0], "#c8c8c8", COLORS[1]])
SHOWN = 1500
"""Rows that are drawn, at most."""

PERPLEXITY = 30


def draw_models(job: RecipeGrid) -> Curve:
    """Return the recipe's picture of its models of seed 0: of the first row, or one line of diagrams for each row.

    Nothing is drawn for models that are not in the store.
    """
    recipe = job.recipe
    first = {row.name: next(iter(job.parts[i, 0][0].trials())) for i, row in enumerate(recipe.rows)}
    models = {name: trained for name, trial in first.items() if (trained := job.load(trial.cell)) is not None}
    if not models:
        return Curve()
    if recipe.picture == "domains":
        return draw_domains({name: _split_domains(trained) for name, trained in models.items()}, title=recipe.title)
    if recipe.picture == "density":
        return draw_density({name: _split_classes(trained) for name, trained in models.items()}, title=recipe.title)
    draw = draw_importance if recipe.picture == "importance" else draw_swarm
    return draw(attribute(next(iter(models.values()))), recipe.title)


def _split_domains(trained: Trained) -> dict[str, tuple[Tensor, Tensor]]:
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


def _split_classes(trained: Trained) -> tuple[Tensor, Tensor]:
    """Return what the first passive party makes of the test rows of the first two classes."""
    federation = trained.federation
    passive, labels = federation.passive[0], federation.active.labels["test"]
    with torch.no_grad():
        embedded = trained.method.representation(passive).eval()(passive.features["test"])
    first, second = (embedded[labels == c][:MAPPED_ROWS] for c in (0, 1))
    return first, second


class Attribution(NamedTuple):
    """The contribution of each input to a prediction of class 1, in log odds.

    Attributes:
        names: of the J inputs, the active party's first.
        phi: (n, J); the sum over inputs is a row's log odds minus those of the background.
        values: (n, J), the inputs themselves.
    """

    names: tuple[str, ...]
    phi: Tensor
    values: Tensor


def attribute(trained: Trained, split: str = "test", *, background: str = "train") -> Attribution:
    """Return phi_j = w_j (x_j - E x_j), the Shapley values of a linear model of independent inputs.

    Source: Lundberg and Lee 2017, "A unified approach to interpreting model predictions", corollary 1.

    Args:
        trained: by split learning, with a linear head of two classes whose weights the active party holds.
        split: rows to explain.
        background: split over which the expectation is taken.

    Raises:
        UsageError: the head is another.
    """
    training = _get_training(trained)
    inputs, mean = (torch.cat(list(_get_inputs(training, rows).values()), dim=1) for rows in (split, background))
    top = training.top
    assert isinstance(top, Top)
    if not isinstance(top.head, nn.Linear) or top.aggregation != "concat" or top.head.in_features != inputs.shape[1]:
        raise UsageError(
            "expected a linear head whose weights the active party holds, got another: name a method that has one"
        )
    weight = top.head.weight.detach()
    weight = weight[0] if len(weight) == 1 else weight[1] - weight[0]
    return Attribution(_list_names(training), weight * (inputs - mean.mean(dim=0)), inputs)


def _get_training(trained: Trained) -> SplitTraining:
    method, federation = trained.method, trained.federation
    if not isinstance(method, SplitMethod) or federation.n_classes != 2:
        got = f"{method.name} and {federation.n_classes} classes"
        raise UsageError(f"expected a method of split learning and two classes to attribute predictions, got {got}")
    training = method.split(federation)
    for module in (*training.bottoms.values(), training.top):
        module.eval()
    return training


@torch.no_grad()
def _get_inputs(training: SplitTraining, split: str) -> dict[str, Tensor]:
    """Return each party's embeddings of the rows of ``split`` before its defenses, the active party's first."""
    parties = training.federation.parties.items()
    return {name: training.bottoms[name](party.features[split]) for name, party in parties}


def _list_names(training: SplitTraining) -> tuple[str, ...]:
    several = len(training.federation.passive) > 1
    return tuple(
        name for party in training.federation.parties.values() for name in _name_inputs(training, party, several)
    )


def _name_inputs(training: SplitTraining, party: Party, several: bool) -> Iterator[str]:
    bottom = training.bottoms[party.name]
    width = bottom.width
    assert isinstance(width, int)
    prefix = f"{party.name} " if several and not party.active else ""
    columns = [column.name for column in party.layout.columns]
    if isinstance(bottom, FeatureGroups) and width == len(bottom.names):
        yield from (prefix + name for name in bottom.names)
    elif party.active and width == len(columns):
        yield from columns
    else:
        yield from (f"{party.name} {k + 1}" for k in range(width))


def draw_importance(attribution: Attribution, title: str = "") -> Curve:
    """Return the mean absolute contribution of each input as bars, the most important on top.

    Source: PrADA (Kang et al. 2022), figure 4.
    """
    mean = attribution.phi.abs().mean(dim=0).cpu().numpy()
    order = np.argsort(mean)
    figure = Curve(figsize=(6.4, 0.9 + 0.27 * len(order)), layout="constrained")
    axes = figure.add_subplot()
    axes.barh(range(len(order)), mean[order], color=COLORS[0], height=0.7)
    axes.set_yticks(range(len(order)), [attribution.names[j] for j in order])
    axes.set_xlabel("mean absolute contribution to the log odds")
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.margins(y=0.02)
    return figure


def draw_swarm(attribution: Attribution, title: str = "") -> Curve:
    """Return each row's contribution of each input as points, colored by the input's value.

    Source: PrADA (Kang et al. 2022), figure 5; Lundberg and Lee's summary plot.
    """
    phi, values = attribution.phi.cpu().numpy()[:SHOWN], attribution.values.cpu().numpy()[:SHOWN]
    order = np.argsort(np.abs(phi).mean(axis=0))
    figure = Curve(figsize=(6.8, 1.1 + 0.34 * len(order)), layout="constrained")
    axes = figure.add_subplot()
    axes.axvline(0, color="#999999", linewidth=0.8, zorder=1)
    for line, j in enumerate(order):
        points = axes.scatter(
            phi[:, j], line + _spread(phi[:, j]), c=_shade(values[:, j]), cmap=SCALE, vmin=0, vmax=1, s=5,
            linewidths=0, rasterized=True, zorder=2,
        )  # fmt: skip
    axes.set_yticks(range(len(order)), [attribution.names[j] for j in order])
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
    for bin in np.unique(place):
        members = np.flatnonzero(place == bin)
        levels = (np.arange(len(members)) + 1) // 2 * np.where(np.arange(len(members)) % 2, 1, -1)
        offsets[members] = levels * 2 * height / max(most, 12)
    return offsets


def draw_domains(maps: Mapping[str, Mapping[str, tuple[Tensor, Tensor]]], seed: int = 0, title: str = "") -> Curve:
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


@fix_style()
def draw_density(maps: Mapping[str, tuple[Tensor, Tensor]], title: str = "") -> Curve:
    """Return a density of the rows of two classes for each model: two principal components, scaled to the unit circle.

    Source: SS-VFL (Castiglia et al. 2022), figure 2.

    Args:
        maps: by what was trained, representations (n, d) and (m, d) of the rows of two classes.
        title: of the figure.
    """
    figure = Curve(figsize=(2.9 * len(maps), 3.6), layout="constrained")
    for axes, (name, classes) in zip(figure.subplots(1, len(maps), squeeze=False)[0], maps.items(), strict=True):
        points = project_on_circle(torch.cat(classes).cpu().numpy())
        ends = np.split(points, [len(classes[0])])
        across = np.linspace(-1.7, 1.7, GRID)
        x, y = np.meshgrid(across, across)
        for points_of_class, color, style in zip(ends, (COLORS[1], COLORS[0]), ("-", "--"), strict=True):
            density = gaussian_kde(points_of_class.T)(np.stack([x.ravel(), y.ravel()])).reshape(GRID, GRID)
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


def project_on_circle(rows: np.ndarray) -> np.ndarray:
    """Return the first two principal components of rows (n, d), each row scaled to length 1."""
    flat = PCA(n_components=2, random_state=0).fit_transform(rows)
    scaled: np.ndarray = flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-12)
    return scaled
