"""Write the generated parts of the documents: the README's table, catalogue and picture, and the notebook.

python scripts/build_docs.py            runs the main command (a minute), rewrites all of them
python scripts/build_docs.py --check    changes nothing; exits 1 if the catalogue or the notebook's source is stale
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import click
import jupytext
import nbformat
from nbclient import NotebookClient

import vflsec
from vflsec.core import registry

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PICTURE = ROOT / "docs" / "privacy_utility_curve.png"
NOTEBOOK = ROOT / "notebooks" / "privacy_utility_curve.py"


def block(text: str, name: str, content: str) -> str:
    """Return ``text`` with what stands between the marks of ``name`` replaced."""
    pattern = rf"(<!-- {name}: .*? -->\n).*?(\n<!-- /{name} -->)"
    found, n = re.subn(pattern, lambda match: match[1] + content + match[2], text, flags=re.DOTALL)
    assert n == 1, f"README.md has {n} blocks called {name}"
    return found


def catalogue() -> str:
    """Return one table of everything registered, with the first line of its docstring."""
    lines = ["| | name | what |", "|---|---|---|"]
    for kind in registry.PACKAGES:
        for name, entry in registry.entries(kind).items():
            if entry.origin == "built in":
                lines.append(f"| {kind.removesuffix('s')} | `{name}` | {registry.summary(entry)} |")
    return "\n".join(lines)


def notebook() -> nbformat.NotebookNode:
    """Return the notebook as its source says, without outputs."""
    found = jupytext.read(NOTEBOOK)
    for i, cell in enumerate(found.cells):
        cell["id"] = f"cell-{i}"
    found.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return found


def is_stale() -> list[str]:
    """Return what is not as it would be written now, numbers aside."""
    stale = []
    text = README.read_text(encoding="utf-8")
    if block(text, "catalogue", catalogue()) != text:
        stale.append("the catalogue in README.md")
    written = nbformat.read(NOTEBOOK.with_suffix(".ipynb"), as_version=4)
    if [(c.cell_type, c.source) for c in written.cells] != [(c.cell_type, c.source) for c in notebook().cells]:
        stale.append(f"{NOTEBOOK.with_suffix('.ipynb').name}")
    return stale


def write() -> None:
    """Run the main command and write everything."""
    report = vflsec.evaluate(attack="mc", defense="iso", strengths=[1, 5, 25], out=ROOT / "runs" / "readme")
    shutil.copy(report.save_curve(ROOT / "runs" / "readme")[1], PICTURE)
    table = "\n".join(line.rstrip() for line in report.table().splitlines())
    text = block(README.read_text(encoding="utf-8"), "table", f"```text\n{table.strip()}\n```")
    README.write_text(block(text, "catalogue", catalogue()), encoding="utf-8")
    executed = notebook()
    NotebookClient(executed, timeout=600, resources={"metadata": {"path": str(ROOT / "notebooks")}}).execute()
    for cell in executed.cells:
        cell["metadata"].pop("execution", None)  # timestamps
    nbformat.write(executed, NOTEBOOK.with_suffix(".ipynb"))


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; exit 1 if something is stale.")
def main(check: bool) -> None:
    """Write or check the generated parts of the documents."""
    if not check:
        write()
        return
    stale = is_stale()
    for name in stale:
        click.echo(f"stale: {name}; run make docs", err=True)
    sys.exit(bool(stale))


if __name__ == "__main__":
    main()
