"""The notebooks are short, committed with current outputs, and run."""

import importlib.util
import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "notebooks").glob("*.py"))
NAMES = ["auditing", "comparing", "privacy_utility_curve", "quickstart", "your_own_techniques"]
DEFINING = ["auditing", "your_own_techniques"]

NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)")


@pytest.fixture(scope="module")
def builder():
    """The script that runs them."""
    spec = importlib.util.spec_from_file_location("build_docs_of_notebooks", ROOT / "scripts" / "build_docs.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        spec.loader.exec_module(module)
    return module


def committed(name):
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


def outputs(cells):
    return [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]


def texts(cell):
    """What a cell printed and showed as text, with runs of spaces and lines as one."""
    found = [
        output.text if output.output_type == "stream" else output.get("data", {}).get("text/plain", "")
        for output in outputs([cell])
    ]
    return " ".join(re.sub("─+", "─", " ".join(found)).split())


def pictures(cells):
    return sum("image/png" in output.get("data", {}) for output in outputs(cells))


def test_there_are_five():
    assert [source.stem for source in SOURCES] == NAMES
    assert sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb")) == NAMES
    assert all(
        f"notebooks/{name}.ipynb" in (ROOT / "docs" / "notebooks.md").read_text(encoding="utf-8") for name in NAMES
    )


@pytest.mark.parametrize("name", NAMES)
def test_it_is_committed_with_its_outputs(name):
    found = committed(name)
    assert len(found.cells) <= 15
    assert all(cell.execution_count for cell in found.cells if cell.cell_type == "code")
    assert outputs(found.cells)
    assert pictures(found.cells) or name == "auditing"
    assert not any(output.output_type == "error" for output in outputs(found.cells))
    assert not any(output.get("name") == "stderr" for output in outputs(found.cells)), "warnings or progress"
    assert not any(re.search(r"/home/|/root/|/work/|/tmp/", str(output)) for output in outputs(found.cells))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in DEFINING])
def test_it_defines_nothing(name):
    code = [cell.source for cell in committed(name).cells if cell.cell_type == "code"]
    assert not any(re.search(r"^\s*(def|class) ", source, re.MULTILINE) for source in code)


@pytest.mark.parametrize("name", NAMES)
def test_markdown_states_no_measurement(name):
    prose = " ".join(cell.source for cell in committed(name).cells if cell.cell_type == "markdown")
    assert not re.search(r"\b0?\.\d{3}\b", prose), "numbers in prose go stale: let code print them"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the kernel's transport warns about the machine it runs on
@pytest.mark.parametrize("name", NAMES)
def test_it_runs_and_gives_what_is_committed(name, builder, tmp_path):
    cells = builder.execute(builder.notebook(ROOT / "notebooks" / f"{name}.py"), tmp_path).cells
    assert not list(tmp_path.iterdir()), "results belong in the notebook's own folder"
    for cell, before in zip(cells, committed(name).cells, strict=True):
        assert pictures([cell]) == pictures([before])
        now, then = texts(cell), texts(before)
        assert NUMBER.sub("#", now) == NUMBER.sub("#", then)
        assert [float(x) for x in NUMBER.findall(now)] == pytest.approx([*map(float, NUMBER.findall(then))], abs=0.02)
