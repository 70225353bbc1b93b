"""Write the generated parts of the documents.

python scripts/build_docs.py            runs the main command, also with a stronger attack, and the notebooks (minutes)
python scripts/build_docs.py --notebooks    runs and writes the notebooks alone, or only those whose names are given
python scripts/build_docs.py --quick    runs nothing and writes what is read from the code: tables and map
python scripts/build_docs.py --check    changes nothing; exits 1 if something that is read from the code is stale
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib.util import resolve_name
from pathlib import Path

import click
import jupytext
import msgspec
import nbformat
from draw_layers import svg
from nbclient import NotebookClient

import vflsec
from vflsec.papers import recipe
from vflsec.papers.recipe_grid import CellValues
from vflsec.papers.reproduction import Reproduction
from vflsec.report import formats, table
from vflsec.report.report import Report

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "reading_the_table.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
REPRODUCE = ROOT / "docs" / "reproduce.md"
CROSS_RISK = ROOT / "docs" / "cross_risk.md"
TREES = ROOT / "docs" / "trees.md"
LAYERS = ROOT / "docs" / "architecture.svg"
PICTURE = ROOT / "docs" / "privacy_utility_curve.png"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))

Graph = Mapping[str, set[str]]
"""What each module, or each package, imports."""


def block(text: str, name: str, content: str) -> str:
    """Return ``text`` with what stands between the marks of ``name`` replaced."""
    pattern = rf"(<!-- {name}: .*? -->\n).*?(\n<!-- /{name} -->)"
    found, n = re.subn(pattern, lambda match: match[1] + content + match[2], text, flags=re.DOTALL)
    assert n == 1, f"found {n} blocks called {name}, expected 1"
    return found


def recipes() -> str:
    """Return a table of the recipes that come with vflsec."""
    lines = ["| recipe | of | measures | data | hours |", "|---|---|---|---|---|"]
    for name in recipe.list_recipes():
        read = recipe.read_recipe(name)
        asked = [read.get_question(row, column) for row in read.rows for column in read.columns]
        measures = ", ".join(dict.fromkeys(one.measure for one in asked)) + (
            f"; {read.picture}" if read.picture else ""
        )
        of_paper = "bundled" if name in ("controls", "cross-risk", "trees") else "the paper's, bundled"
        data = "stand-ins" if any(group.original for group in read.groups) else of_paper
        lines.append(f"| `{name}` | {read.title} | {measures} | {data} | {f'{read.hours:g}' if read.hours else '–'} |")
    return "\n".join(lines)


def measured(name: str, page: Path) -> str:
    """Return the table of a recipe, from a result of ``vflsec reproduce`` that is stored beside its page."""
    read, found = recipe.read_recipe(name), json.loads(page.with_suffix(".json").read_text())
    rows, columns = ([one.name for one in parts] for parts in (read.rows, read.columns))
    cells = [
        CellValues(
            row=rows.index(cell["row"]),
            column=columns.index(cell["column"]),
            by_seed={int(seed): value for seed, value in cell["by_seed"].items()},
        )
        for cell in found["cells"]
    ]
    made = Reproduction(name, read, cells)
    return "\n\n".join([made.cells().title, formats.as_markdown(made.cells()), *made.remarks()])


def packages(root: Path) -> dict[str, Path]:
    """Return the folder of each package that is installed, by its name."""
    setuptools = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    places = setuptools["package-dir"]
    folders = {name: root / places.get(name, name.replace(".", "/")) for name in setuptools["packages"]}
    return {name: folder for name, folder in folders.items() if any(folder.glob("*.py"))}


def imports(root: Path) -> dict[str, set[str]]:
    """Return the modules of this project that each of its modules imports.

    Imports inside functions and those for type checkers count. Names that are resolved from strings do not.
    """
    files = {
        package if file.stem == "__init__" else f"{package}.{file.stem}": file
        for package, folder in packages(root).items()
        for file in folder.glob("*.py")
    }
    graph = {}
    for module, file in files.items():
        package = module if file.stem == "__init__" else module.rpartition(".")[0]
        found = set(_imported(ast.parse(file.read_text(encoding="utf-8")), package, files))
        graph[module] = found & files.keys() - {module}
    return graph


def _imported(tree: ast.AST, package: str, files: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            home = resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                name = f"{home}.{alias.name}"
                yield name if name in files else home


def by_layer(graph: Graph) -> dict[str, set[str]]:
    """Return ``graph`` between packages: ``vflsec.nn.siamese`` is part of ``nn``, and ``vflsec.api`` is ``api``."""
    layers: dict[str, set[str]] = {}
    for module, targets in graph.items():
        layers.setdefault(_layer(module), set()).update(map(_layer, targets))
    return {layer: targets - {layer} for layer, targets in layers.items()}


def _layer(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else module


def reach(graph: Graph) -> dict[str, set[str]]:
    """Return what each node imports directly or through others."""
    return {node: {target for path in _paths(graph, node) for target in graph[path[-1]]} for node in graph}


def cycles(graph: Graph) -> list[list[str]]:
    """Return a shortest path back to its start for each group of modules that import each other."""
    reached = reach(graph)
    groups = {tuple(sorted(n for n in reached[m] if m in reached[n])) for m in graph if m in reached[m]}
    return [
        next([*path, start] for path in _paths(graph, start) if start in graph[path[-1]])
        for start, *_ in sorted(groups)
    ]


def _paths(graph: Graph, start: str) -> Iterator[list[str]]:
    """Yield a shortest path from ``start`` to everything that it reaches, the shortest first."""
    seen, paths = {start}, [[start]]
    for path in paths:
        yield path
        for target in sorted(graph[path[-1]] - seen):
            seen.add(target)
            paths.append([*path, target])


def arrows(root: Path) -> dict[str, set[str]]:
    """Return what each package imports, without the imports that follow from others."""
    layers = by_layer(imports(root))
    reached = reach(layers)
    assert not cycles(layers), f"packages import each other: {cycles(layers)}"
    return {
        layer: {target for target in targets if not any(target in reached[other] for other in targets)}
        for layer, targets in layers.items()
        if targets or any(layer in others for others in layers.values())  # else it only holds other packages
    }


def list_of_cycles(root: Path) -> str:
    """Return the number of import cycles, and each of them."""
    found = cycles(imports(root))
    count = f"Number of import cycles: **{len(found)}**"
    return "\n".join([count, "", *(f"* `{' -> '.join(path)}`" for path in found)]).strip()


def table_of_layers(root: Path) -> str:
    """Return one table of the packages, with the first line of their docstrings and what they import."""
    graph = by_layer(imports(root))
    lines = ["| folder | what it is for | imports |", "|---|---|---|"]
    for name, folder in packages(root).items():
        if name.count(".") == _layer(name).count(".") + 1:
            arrows = ", ".join(f"`{target}`" for target in sorted(graph[_layer(name)])) or "nothing"
            lines.append(f"| `{folder.relative_to(root).as_posix()}` | {purpose(folder)} | {arrows} |")
    return "\n".join(lines)


def table_of_folders(root: Path) -> str:
    """Return one table of the folders of packages, with the first line of their docstrings."""
    rows = [f"| `{f.relative_to(root).as_posix()}` | {purpose(f)} |" for f in packages(root).values()]
    return "\n".join(["| folder | what it is for |", "|---|---|", *rows])


def purpose(folder: Path) -> str:
    """Return the first line of the docstring of the package in ``folder``."""
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
    assert docstring, f"{folder}/__init__.py has no docstring"
    return docstring.splitlines()[0]


FROM_THE_CODE: dict[Path, dict[str, Callable[[], str]]] = {
    REPRODUCE: {"recipes": recipes},
    CROSS_RISK: {"matrix": lambda: measured("cross-risk", CROSS_RISK)},
    TREES: {"table": lambda: measured("trees", TREES)},
    CONTRIBUTING: {"map": lambda: table_of_folders(ROOT)},
    ARCHITECTURE: {
        "layers": lambda: table_of_layers(ROOT),
        "cycles": lambda: list_of_cycles(ROOT),
    },
}
"""Blocks that are written without running anything, by page and mark."""


def notebook(source: Path) -> nbformat.NotebookNode:
    """Return the notebook as its source says, without outputs."""
    found = jupytext.read(source)
    for i, cell in enumerate(found.cells):
        cell["id"] = f"cell-{i}"
    found.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return found


def execute(found: nbformat.NotebookNode, folder: Path) -> nbformat.NotebookNode:
    """Run a notebook in ``folder``, each cell on one core, and return it with outputs and without times."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    NotebookClient(found, timeout=600, resources={"metadata": {"path": str(folder)}}).execute(env=env)
    for cell in found.cells:
        cell["metadata"].pop("execution", None)  # timestamps
    return found


def is_stale() -> list[str]:
    """Return what is not as it would be written now, numbers aside."""
    stale = []
    for page, blocks in FROM_THE_CODE.items():
        text = page.read_text(encoding="utf-8")
        stale += [
            f"the block {name!r} in {page.name}" for name, make in blocks.items() if block(text, name, make()) != text
        ]
    if not LAYERS.is_file() or LAYERS.read_text(encoding="utf-8") != svg(arrows(ROOT)):
        stale.append(LAYERS.name)
    stale += [source.with_suffix(".ipynb").name for source in NOTEBOOKS if not _is_written(source)]
    return stale


def _is_written(source: Path) -> bool:
    """Whether the notebook beside ``source`` has its cells."""
    path = source.with_suffix(".ipynb")
    if not path.is_file():
        return False
    written, wanted = (
        [(cell.cell_type, cell.source) for cell in found.cells]
        for found in (nbformat.read(path, as_version=4), notebook(source))
    )
    return written == wanted


def write_from_the_code() -> None:
    """Write the blocks and the picture that are read from the code."""
    for page, blocks in FROM_THE_CODE.items():
        text = page.read_text(encoding="utf-8")
        for name, make in blocks.items():
            text = block(text, name, make())
        page.write_text(text, encoding="utf-8")
    LAYERS.write_text(svg(arrows(ROOT)), encoding="utf-8")


def write() -> None:
    """Run the main command and write everything."""
    write_from_the_code()
    report, stronger = (
        vflsec.evaluate(
            attack=attacks, defense="iso", strengths=[1, 5, 25], out=ROOT / "runs" / f"readme-{attacks[-1]}"
        )
        for attacks in (["mc"], ["mc", "fusion"])
    )
    draw_beside(report, stronger, PICTURE)
    shown = "\n".join(line.rstrip() for line in report.table().splitlines())
    text = block(TABLE.read_text(encoding="utf-8"), "table", f"```text\n{shown.strip()}\n```")
    TABLE.write_text(text, encoding="utf-8")
    readme = ROOT / "README.md"
    brief = (
        f"```text\n{shown[shown.index(' defense ') : shown.index('CAP over')].rstrip()}\n{state_fusion(stronger)}\n```"
    )
    readme.write_text(block(readme.read_text(encoding="utf-8"), "table", brief), encoding="utf-8")
    write_notebooks()


def state_fusion(stronger: Report) -> str:
    """Return a line of what the attack of the picture on the right leaks at each strength, where it gains most."""
    points = [table.show_most(point) for point in stronger.points if point.attack == "fusion"]
    leaks = [f"{formats.write_number(point.leak.mean)} at λ={point.strength:g}" for point in points]
    start = next(point for point in points if not point.strength)
    alone = formats.write_number((start.utility.mean or 0.0) - (start.gain or 0.0))
    return f" fusion, on the same models: leak {', '.join(leaks)}\n The bank alone, by a quick model: utility {alone}"


def draw_beside(report: Report, stronger: Report, path: Path) -> None:
    """Draw the curve of the main command beside that of a stronger attack, on the same axes."""
    only = [point for point in stronger.points if point.attack == "fusion"]
    second = Report(msgspec.structs.replace(stronger.summary, points=only, notes=[], not_run=[]), stronger.manifest)
    first = Report(msgspec.structs.replace(report.summary, notes=[], not_run=[]), report.manifest)
    figure = vflsec.plot([first, second])
    titles = ("the first command: one attack, mc", "a stronger attack, fusion, on the same models")
    for axes, title in zip(figure.axes, titles, strict=True):
        axes.set_title(title, loc="left", fontsize=11)
        axes.set(ylim=(0.45, 1.05), xlabel="utility: AUC of the joint model")
    figure.axes[1].set_ylabel("")
    figure.savefig(path, dpi=130, metadata={"Software": None})


def write_notebooks(names: Collection[str] = ()) -> None:
    """Run and write all notebooks, or those that are named."""
    for source in NOTEBOOKS:
        if not names or source.stem in names:
            nbformat.write(execute(notebook(source), source.parent), source.with_suffix(".ipynb"))


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; exit 1 if something is stale.")
@click.option("--quick", is_flag=True, help="Write only what is read from the code.")
@click.option("--notebooks", is_flag=True, help="Run and write only the notebooks, or those that are named.")
@click.argument("names", nargs=-1, type=click.Choice([source.stem for source in NOTEBOOKS]))
def main(check: bool, quick: bool, notebooks: bool, names: tuple[str, ...]) -> None:
    """Write or check the generated parts of the documents."""
    if notebooks:
        write_notebooks(names)
        return
    if not check:
        write_from_the_code() if quick else write()
        return
    stale = is_stale()
    for name in stale:
        click.echo(f"stale: {name}; run make docs", err=True)
    sys.exit(bool(stale))


if __name__ == "__main__":
    main()
