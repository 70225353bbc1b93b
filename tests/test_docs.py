"""Documents agree with the code: commands parse, generated parts are current, the worked example works."""

import importlib
import importlib.util
import inspect
import re
import shlex
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import click
import pytest
from click.testing import CliRunner

from vflsec.cli import cli, list_all
from vflsec.core import registry

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(page for page in sorted((ROOT / "docs").glob("**/*.md")) if not page.is_relative_to(REFERENCE)),
    ROOT / "benchmarks/README.md",
]


def documented_commands():
    """Every ``vflsec ...`` in a code block or between backticks, as (page, command)."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        blocks = re.findall(r"^```(?:bash|text)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        lines = [line for block in blocks for line in block.splitlines()]
        shown = [match for line in lines for match in re.findall(r"(?:^|/bin/)(vflsec [a-z].*)", line)]
        shown += re.findall(r"`(vflsec [a-z][^`]*)`", text)
        found += [(page.name, re.sub(r"\s{3,}.*", "", command)) for command in shown]
    return found


def test_the_pages_show_commands():
    assert len(documented_commands()) >= 12
    assert {command.split()[1] for _, command in documented_commands()} >= set(list_all())


@pytest.mark.parametrize(("page", "command"), documented_commands())
def test_documented_commands_parse(page, command):
    words = shlex.split(command)[1:]
    chosen = cli.get_command(None, words[0])
    assert chosen is not None, f"{page} shows {command}"
    chosen.make_context(words[0], words[1:], parent=click.Context(cli, **cli.context_settings))


@pytest.mark.sampled
@pytest.mark.parametrize(("page", "command"), [c for c in documented_commands() if " eval " in c[1]])
def test_documented_evaluations_are_plans_that_can_run(page, command, tmp_path, monkeypatch):
    for name, example in EXAMPLES.items():
        example.write(tmp_path)
        assert (tmp_path / name).exists()
    for name, content in {**OWN_DATA, "data.toml": OWN_DATA["mine.toml"]}.items():
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, [*shlex.split(command)[1:], "--dry-run"])
    if "cuda" in command and result.exit_code:
        assert "--device cpu, or cuda" in result.output
        return
    if "path=MODEL" in command:  # a model that the user has on disk; tests/language/test_pretrained.py runs one
        assert "MODEL: expected a folder with" in result.output
        return
    assert result.exit_code == 0, f"{page} shows {command}: {result.output}"


def test_the_readme_has_the_two_commands_of_a_fresh_machine():
    blocks = re.findall(
        r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    assert "vflsec eval --attack mc --defense iso --lambda 1,5,25" in blocks[0]
    assert "pytest" in blocks[1]
    assert all(len(block.strip().splitlines()) == 1 for block in blocks)


def test_make_setup_installs_as_the_readme_does():
    rule = re.search(r"^setup:\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    command = " && ".join(line.strip() for line in rule[1].splitlines())
    assert f"\n{command.replace('[dev]', '[test]')} && .venv/bin/pytest\n" in (ROOT / "README.md").read_text("utf-8")


def script(name):
    """The module of a script."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def builder():
    """The script that writes the generated parts."""
    return script("build_docs")


@pytest.fixture(scope="module")
def reference():
    """The script that writes the pages of the reference."""
    return script("build_reference")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_generated_table_is_empty(page):
    assert not re.search(r"<!-- table: .*? -->\s*<!-- /table -->", page.read_text("utf-8"), re.DOTALL)


def test_generated_parts_are_current(builder):
    assert builder.is_stale() == []


def test_the_map_has_every_folder_of_code(builder):
    folders = {file.parent for file in (ROOT / "vflsec").rglob("*.py")}
    folders |= {ROOT / name for name in ("attacks", "defenses", "protocols")}
    assert set(builder.packages(ROOT).values()) == folders


def test_no_package_imports_a_plug_in(builder):
    """Methods alone import protocols: their default at the cut layer is a class."""
    arrows = builder.by_layer(builder.imports(ROOT))
    assert {target for targets in arrows.values() for target in targets}.isdisjoint({"attacks", "defenses"})
    assert {layer for layer, targets in arrows.items() if "protocols" in targets} <= {"methods", "defenses"}


CODE = {  # an import of each form, and one cycle that needs a lazy import and one for type checkers
    "pyproject.toml": (
        '[tool.setuptools]\npackages = ["vflsec", "vflsec.core", "vflsec.nn", "vflsec.nn.losses", "vflsec.attacks"]\n'
        '[tool.setuptools.package-dir]\n"vflsec.attacks" = "attacks"\n'
    ),
    "vflsec/__init__.py": '"""All."""\n',
    "vflsec/api.py": "import os\nimport vflsec.nn.losses.mean\nfrom vflsec.core import a\n",
    "vflsec/core/__init__.py": '"""Base.\n\nMore."""\n',
    "vflsec/core/a.py": "from vflsec.core.b import name\n",
    "vflsec/core/b.py": "def late():\n    from . import c\n",
    "vflsec/core/c.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import Name\n",
    "vflsec/nn/__init__.py": '"""Networks."""\n',
    "vflsec/nn/losses/__init__.py": '"""Losses."""\n',
    "vflsec/nn/losses/mean.py": "import vflsec.core.a\n",
    "attacks/__init__.py": '"""Attacks."""\n',
    "attacks/one.py": "from vflsec.nn.losses.mean import Mean\nfrom vflsec.core import name\n",
}


def test_arrows_and_cycles_of_known_code(builder, tmp_path):
    for name, text in CODE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert builder.imports(tmp_path) == {
        "vflsec": set(),
        "vflsec.api": {"vflsec.nn.losses.mean", "vflsec.core.a"},
        "vflsec.core": set(),
        "vflsec.core.a": {"vflsec.core.b"},
        "vflsec.core.b": {"vflsec.core.c"},
        "vflsec.core.c": {"vflsec.core.a"},
        "vflsec.nn": set(),
        "vflsec.nn.losses": set(),
        "vflsec.nn.losses.mean": {"vflsec.core.a"},
        "vflsec.attacks": set(),
        "vflsec.attacks.one": {"vflsec.nn.losses.mean", "vflsec.core"},
    }
    arrows = builder.arrows(tmp_path)
    assert arrows == {"api": {"nn"}, "attacks": {"nn"}, "nn": {"core"}, "core": set()}  # vflsec has no arrow
    assert builder.table_of_layers(tmp_path).splitlines()[2:] == [
        "| `vflsec/core` | Base. | nothing |",
        "| `vflsec/nn` | Networks. | `core` |",
        "| `attacks` | Attacks. | `core`, `nn` |",
    ]
    (cycle,) = builder.cycles(builder.imports(tmp_path))
    assert cycle == ["vflsec.core.a", "vflsec.core.b", "vflsec.core.c", "vflsec.core.a"]
    assert "cycles: **1**" in builder.list_of_cycles(tmp_path)

    (tmp_path / "vflsec/core/c.py").write_text("")
    assert builder.list_of_cycles(tmp_path) == "Number of import cycles: **0**"
    (tmp_path / "vflsec/core/c.py").write_text("def late():\n    import vflsec.api\n")
    with pytest.raises(AssertionError, match="packages import each other"):
        builder.arrows(tmp_path)


def test_the_picture_has_each_package_above_those_that_it_imports(builder):
    graph = {"top": {"middle", "base"}, "middle": {"base"}, "other": {"base"}, "base": set()}
    picture = builder.svg(graph)
    arrows = re.findall(r"<title>(\w+) imports (\w+)</title>", picture)
    assert sorted(arrows) == sorted((source, target) for source, targets in graph.items() for target in targets)
    boxes = re.findall(r'<text x="(.*?)" y="(.*?)" text-anchor="middle">(\w+)</text>', picture)
    at = {name: (float(x), float(y)) for x, y, name in boxes}
    assert at.keys() == graph.keys()
    assert all(at[source][1] < at[target][1] for source, target in arrows)
    assert abs(at["middle"][0] - at["other"][0]) > 92, "boxes of one layer overlap"
    assert all(46 <= x <= 800 - 46 for x, _ in at.values())
    assert builder.svg(graph) == picture


@pytest.mark.long
def test_a_stale_picture_is_noticed(builder, monkeypatch, tmp_path):
    monkeypatch.setattr(builder, "LAYERS", tmp_path / "architecture.svg")
    monkeypatch.setattr(builder, "FROM_THE_CODE", {})  # blocks of pages, which are current
    assert builder.is_stale() == ["architecture.svg"]
    (tmp_path / "architecture.svg").write_text(builder.svg({"core": set()}))
    assert builder.is_stale() == ["architecture.svg"]


def test_cycles_are_counted_by_group(builder):
    two = {"a": {"b"}, "b": {"a", "c"}, "c": {"d"}, "d": {"e", "c"}, "e": {"c"}, "f": {"a"}}
    assert builder.cycles(two) == [["a", "b", "a"], ["c", "d", "c"]]
    assert builder.cycles({"a": {"b"}, "b": set(), "c": {"b"}}) == []


@pytest.mark.parametrize("kind", registry.PACKAGES)
def test_every_registered_name_is_in_the_catalogue_and_has_a_page(reference, kind):
    catalogue, pages = reference.catalogue(), reference.pages()
    names = [name for name, entry in registry.list_all(kind).items() if entry.origin == "built in"]
    assert all(f"[`{name}`]({kind}/{name}.md)" in catalogue and f"{kind}/{name}.md" in pages for name in names)
    assert f"# {names[0]}" in pages[f"{kind}/{names[0]}.md"]()


def test_the_catalogue_orders_attacks_by_target_with_their_requirements(reference):
    sections = re.split(r"^## ", reference.catalogue(), flags=re.MULTILINE)
    (labels,) = (text for text in sections if text.startswith("Attacks on labels"))
    assert "| [`norm`](attacks/norm.md) | passive | received gradients |" in labels
    assert "column-fusion" not in labels


def anchors(text):
    """The anchors of the headings of a page, as code hosts and the site make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    plain = (re.sub(r"[`*]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(reference, page):
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", text)):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if file.is_relative_to(REFERENCE):
            assert file.relative_to(REFERENCE).as_posix() in reference.pages(), f"{page.name} links to {target}"
            continue
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file.read_text("utf-8")), f"{page.name} links to {target}"


def test_every_page_is_on_the_site_and_the_first_page_leads_to_it():
    config = (ROOT / "mkdocs.yml").read_text("utf-8")
    index = (ROOT / "docs" / "index.md").read_text("utf-8")
    for page in (ROOT / "docs").glob("**/*.md"):
        if page.is_relative_to(REFERENCE):  # written with the site, and found from the catalogue
            continue
        name = page.relative_to(ROOT / "docs").as_posix()
        assert f": {name}\n" in config, f"{name} is not in mkdocs.yml"
        assert name == "index.md" or f"({name})" in index, f"docs/index.md does not link to {name}"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 80


def test_no_page_loads_anything_from_elsewhere():
    for page in PAGES:
        text = page.read_text("utf-8")
        assert not re.search(r"!\[[^\]]*\]\(https?:|<(?:img|script|link|iframe)\b", text), page.name


CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| an? ([\w ]+) \| `(\S+)` \| `(\S+)` \| `(\w+)` \| `(.*)` \|$", CONTRIBUTING, re.MULTILINE)


def load(path):
    """What the dotted ``path`` names."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_contributing_names_every_suite():
    from vflsec.testing import conformance

    assert sorted(suite for _, _, _, suite, _ in ROWS) == sorted(conformance.__all__)


@pytest.mark.parametrize(("what", "base", "folder", "suite", "command"), ROWS)
def test_contributing_names_base_class_and_suite_of_a_technique(what, base, folder, suite, command):
    program, path, _, expression = shlex.split(command)
    assert program == ".venv/bin/pytest"
    spec = importlib.util.spec_from_file_location("conformance", ROOT / path)
    tests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tests)
    (chosen,) = [test for name, test in vars(tests).items() if name.startswith("Test") and expression in name]
    assert issubclass(chosen, load(f"vflsec.testing.conformance.{suite}"))

    kind = Path(folder).name
    technique = registry.load(kind, expression.removeprefix(f"{suite}_"))
    assert issubclass(technique, load(base)), what
    assert Path(inspect.getfile(technique)).parent == ROOT / folder
    assert load(f"{registry.PACKAGES[kind]}.CATALOGUE")


@pytest.mark.parametrize(
    ("title", "base"),
    [
        ("Attack", "vflsec.core.attack.Attack"),
        ("Attack", "vflsec.core.attack.IntegrityAttack"),
        ("Defense", "vflsec.core.defense.Defense"),
        ("Method", "vflsec.core.method.Method"),
        ("Method", "vflsec.methods.split_method.SplitMethod"),
        ("Protocol", "vflsec.core.protocol.Protocol"),
        ("Protocol", "vflsec.core.protocol.Boundary"),
        ("Protocol", "vflsec.core.protocol.Averaging"),
    ],
)
def test_contributing_names_all_that_a_base_class_asks_for(title, base):
    (section,) = re.findall(rf"^### {title}\n(.*?)^##", CONTRIBUTING, re.DOTALL | re.MULTILINE)
    declared = {name for parent in load(base).__mro__ for name in inspect.get_annotations(parent)}
    unset = {name for name in declared if not hasattr(load(base), name)}
    missing = {name for name in unset | load(base).__abstractmethods__ if f"`{name}`" not in section}
    assert not missing


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(vflsec\.[a-z_.]+(?:[A-Z]\w*)?)`", CONTRIBUTING))))
def test_contributing_names_what_exists(path):
    module = path if path.rpartition(".")[2].islower() else path.rpartition(".")[0]
    assert importlib.import_module(module)
    assert module == path or load(path)


class Example(NamedTuple):
    """A technique that a page builds in its first block of Python, and tests in its second."""

    page: str
    file: str

    def blocks(self):
        text = (ROOT / "docs" / self.page).read_text(encoding="utf-8")
        return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)

    def write(self, folder):
        (folder / self.file).write_text(self.blocks()[0])


EXAMPLES = {
    "nearest.py": Example("write_your_own_attack.md", "nearest.py"),
    "uniform.py": Example("write_your_own_defense.md", "uniform.py"),
    "linear.py": Example("write_your_own_method.md", "linear.py"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_worked_examples_pass_their_suites_as_their_pages_show(name, tmp_path, monkeypatch):
    example = EXAMPLES[name]
    example.write(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, Path(name).stem, raising=False)
    found = {}
    exec(example.blocks()[1], found)  # noqa: S102  (the page's own code)
    (suite,) = (one() for key, one in found.items() if key.startswith("Test"))
    ran = [getattr(suite, check)() for check in dir(suite) if check.startswith("test_")]
    assert len(ran) >= 5
    del sys.modules[Path(name).stem]


def test_the_example_of_the_encrypted_layer_runs(capsys):
    page = (ROOT / "docs" / "encrypted_layer.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len([line for line in code.splitlines() if line]) <= 20
    found = {}
    exec(code, found)  # noqa: S102  (the page's own code)
    off_scores, off_gradient = map(float, capsys.readouterr().out.split())
    assert off_scores < 1e-5
    assert off_gradient < 1e-5
    before, x, delta = found["weights"], found["x"], found["delta"]
    after = (found["passive"].share + found["active"].share).astype(float) / 2**64
    assert after == pytest.approx(before - 0.1 * x.T @ delta / len(x), abs=1e-5)


def test_the_python_of_the_readme_is_the_api():
    import vflsec

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    compile(code, "README.md", "exec")
    assert set(re.findall(r"vflsec\.(\w+)", code)) <= set(vflsec.__all__)


def test_exported_names_exist():
    import vflsec

    assert all(getattr(vflsec, name) for name in vflsec.__all__)
    with pytest.raises(AttributeError, match="no attribute 'evaluat'"):
        vflsec.evaluat  # noqa: B018


def test_the_changelog_knows_the_version():
    import vflsec

    assert f"## {vflsec.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_repository_speaks_of_vflsec_alone():
    forbidden = re.compile(r"/work/|/tmp/|/root/|\bsession\b|files\.pythonhosted", re.IGNORECASE)
    for page in [*PAGES, ROOT / "CHANGELOG.md", ROOT / "Makefile", ROOT / ".ci" / "run", ROOT / "constraints.txt"]:
        assert not forbidden.search(page.read_text(encoding="utf-8")), page


def test_constraints_allow_what_pyproject_asks():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "torch>=2.6" in project["dependencies"]
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()


OWN_DATA = {
    "mine.toml": (
        'label = "defaulted"\nid = "customer_id"\n[parties.bank]\nfile = "bank.csv"\ncategorical = ["job"]\n'
        '[parties.bureau]\nfile = "bureau.csv"\n'
    ),
    "bank.csv": "customer_id,job,income,defaulted\n"
    + "".join(f"{i},{'ab'[i % 2]},{i},{(i // 3) % 2}\n" for i in range(300)),
    "notes.toml": (ROOT / "docs/language.md").read_text("utf-8").split("```toml\n")[1].split("```")[0],
    "insurer.csv": "id,age,claimed\n" + "".join(f"{i},{i % 60},{(i // 3) % 2}\n" for i in range(300)),
    "notes.jsonl": "".join(f'{{"id": {i}, "note": "visit {i % 7} and {i % 5}"}}\n' for i in range(300)),
    "bureau.csv": "customer_id,score\n" + "".join(f"{i},{(i * 7) % 11}\n" for i in range(300)),
}
