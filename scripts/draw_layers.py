"""Draws packages in layers as an SVG, with arrows from each package to the packages that it imports.

A package is one layer above the highest package that it imports. An arrow that spans several layers passes each of
them at a free place between the boxes, as in the layered drawings of Sugiyama et al. 1981.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

Graph = Mapping[str, set[str]]
"""What each package imports, without cycles."""

Place = tuple[str, ...]
"""A box ``(package,)``, or ``(importer, imported, layer)`` where an arrow passes a layer."""

WIDTH, ROW, BOX_HEIGHT = 800, 82, 30
BOX_WIDTH, LETTER, GAP = 92.0, 8.0, 34.0
SWEEPS = 24


def levels(graph: Graph) -> dict[str, int]:
    """Return the layer of each package: 0 for one that imports none."""
    found: dict[str, int] = {}

    def level(package: str) -> int:
        if package not in found:
            found[package] = 1 + max((level(target) for target in graph[package]), default=-1)
        return found[package]

    for package in sorted(graph):
        level(package)
    return found


def svg(graph: Graph) -> str:
    """Return the picture of ``graph``."""
    level = levels(graph)
    arrows = [(source, target) for source in sorted(graph) for target in sorted(graph[source])]
    paths = {
        (source, target): [
            (source,),
            *((source, target, str(k)) for k in range(level[source] - 1, level[target], -1)),
            (target,),
        ]
        for source, target in arrows
    }
    rows: list[list[Place]] = [[] for _ in range(max(level.values(), default=0) + 1)]
    for package in sorted(graph):
        rows[level[package]].append((package,))
    for path in paths.values():
        for place in path[1:-1]:
            rows[int(place[2])].append(place)
    neighbors: dict[Place, list[Place]] = {place: [] for row in rows for place in row}
    for path in paths.values():
        for above, below in pairwise(path):
            neighbors[above].append(below)
            neighbors[below].append(above)
    at = _positions(rows, neighbors)
    height = ROW * len(rows)
    y = {place: height - ROW * (k + 0.5) for k, row in enumerate(rows) for place in row}
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        ' role="img" font-family="sans-serif" font-size="14">',
        "<title>Packages of vflsec and their imports</title>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#555"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for (source, target), path in paths.items():
        curve = _curve([(at[place], y[place]) for place in path])
        lines.append(
            f'<path d="{curve}" fill="none" stroke="#555" marker-end="url(#head)">'
            f"<title>{source} imports {target}</title></path>"
        )
    for package in sorted(graph):
        x, middle, width = at[package,], y[package,], _width((package,))
        lines.append(
            f'<rect x="{x - width / 2:.1f}" y="{middle - BOX_HEIGHT / 2:.1f}" width="{width:.0f}"'
            f' height="{BOX_HEIGHT}" rx="5" fill="#e8f1f8" stroke="#0072b2"/>'
        )
        lines.append(f'<text x="{x:.1f}" y="{middle + 5:.1f}" text-anchor="middle">{package}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _positions(rows: list[list[Place]], neighbors: Mapping[Place, list[Place]]) -> dict[Place, float]:
    """Return the x of each place: rows are sorted, again and again, by the mean x of their neighbors."""
    at: dict[Place, float] = {}
    for row in rows:
        at |= _spread(row)
    best = (_crossings(rows, neighbors, at), at)
    for _ in range(SWEEPS):
        for row in (*rows, *reversed(rows)):
            mean = {place: sum(at[n] for n in neighbors[place]) / max(1, len(neighbors[place])) for place in row}
            at = at | _spread(sorted(row, key=lambda place: (mean[place], place)))
        count = _crossings(rows, neighbors, at)
        if count < best[0]:
            best = count, at
    return best[1]


def _spread(row: list[Place]) -> dict[Place, float]:
    """Return the x of each place of a row, evenly spaced over the picture in this order."""
    widths = [_width(place) for place in row]
    free = (WIDTH - sum(widths)) / (len(row) + 1)
    at, x = {}, 0.0
    for place, width in zip(row, widths, strict=True):
        at[place] = x + free + width / 2
        x += free + width
    return at


def _width(place: Place) -> float:
    """Return the width of a box, in which its name has room, or of an arrow that passes."""
    return max(BOX_WIDTH, LETTER * (len(place[0]) + 2)) if len(place) == 1 else GAP / 2


def _crossings(rows: list[list[Place]], neighbors: Mapping[Place, list[Place]], at: Mapping[Place, float]) -> int:
    """Return how many pairs of arrows between neighboring rows cross."""
    count = 0
    for below, above in pairwise(rows):
        inside = set(below)
        edges = [(at[place], at[n]) for place in above for n in neighbors[place] if n in inside]
        count += sum((a - c) * (b - d) < 0 for i, (a, b) in enumerate(edges) for c, d in edges[:i])
    return count


def _curve(points: list[tuple[float, float]]) -> str:
    """Return a smooth path through ``points``, from below the first box to above the last."""
    (x, y), *between, (last_x, last_y) = points
    ends = [(x, y + BOX_HEIGHT / 2), *between, (last_x, last_y - BOX_HEIGHT / 2)]
    path = f"M{ends[0][0]:.1f} {ends[0][1]:.1f}"
    for (x1, y1), (x2, y2) in pairwise(ends):
        bend = (y2 - y1) / 2
        path += f"C{x1:.1f} {y1 + bend:.1f} {x2:.1f} {y2 - bend:.1f} {x2:.1f} {y2:.1f}"
    return path
