"""The package as a whole: guests can be deleted, and the budget of lines and files holds."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from vflsec.cli import list_all
from vflsec.core import registry
from vflsec.core.attack import Attack, IntegrityAttack
from vflsec.core.defense import Defense

ROOT = Path(__file__).parents[1]
GUESTS = ("companies", "language", "papers")
PLUGINS = ("attacks", "defenses", "protocols")

HOUSE_LINES, HOUSE_FILES, GUEST_LINES = 57_187, 298, 11_175
"""The most lines and files without the guests, and the most lines of guests. Lower them; a rise names its reason."""

COMMANDS = """
import json, sys
sys.meta_path = [f for f in sys.meta_path if not getattr(f, "__module__", "").startswith("__editable__")]
import vflsec
from click.testing import CliRunner
from vflsec.cli import cli

results = {}
few = ["--set", "train.epochs=2", "--set", "data.options.rows=400"]
for name, words in {
    "help": ["--help"],
    "list": ["list", "datasets"],
    "show": ["show", "attack", "norm"],
    "train": ["train", "--dataset", "toy", *few, "--out", "trained"],
    "audit": ["audit", "trained", "--attack", "logistic", "--draws", "1", "--out", "audited"],
    "eval": ["eval", "--dataset", "toy", "--attack", "norm", "--seeds", "1", "--jobs", "1", *few, "--out", "evaluated"],
    "report": ["report", "evaluated"],
    "party": ["party", "--help"],
    "avazu": ["show", "dataset", "avazu"],
}.items():
    done = CliRunner().invoke(cli, words)
    results[name] = [done.exit_code, done.output]
guests = ("vflsec.papers", "vflsec.companies", "vflsec.language")
results["imported"] = [vflsec.__file__, [name for name in sys.modules if name.startswith(guests)]]
print(json.dumps(results))
"""


def modules(*folders: str) -> list[Path]:
    return [path for folder in folders for path in (ROOT / folder).rglob("*.py")]


def count_lines(paths: list[Path]) -> int:
    return sum(len(path.read_text("utf-8").splitlines()) for path in paths)


def test_the_budget_of_lines_and_files_holds():
    guests = modules(*(f"vflsec/{name}" for name in GUESTS))
    house = [path for path in modules("vflsec", *PLUGINS) if path not in guests]
    assert count_lines(guests) <= GUEST_LINES
    assert count_lines(house) <= HOUSE_LINES
    assert len(house) <= HOUSE_FILES


VAGUE = {"found", "one", "own", "told"}
"""Words that name a value by what happened to it, where a noun of the field says what it is."""


def identifiers(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name


def test_identifiers_are_no_vague_words():
    for path in modules("vflsec", *PLUGINS):
        names = set(identifiers(ast.parse(path.read_text("utf-8")))) - {"one_hot"}  # PyTorch's name
        assert not [name for name in names if VAGUE & set(name.lower().split("_"))], path


PREPOSITION = (
    "about|after|at|before|besides?|between|beyond|by|down|during|except|for|in|into|near|of|off|on|once|over|per|than|"
    "through|under|until|up|upon|versus|via|where|why|within|without|every|no|not|others|several|some"
)
PARTICIPLE = (
    "begun|borne|bought|broken|built|chosen|dealt|done|drawn|fed|found|given|gone|grown|heard|held|hidden|kept|known|"
    "left|lost|made|meant|met|paid|seen|sent|shown|sold|spent|taken|thought|told|torn|won|worn|written"
)
NO_VERB = re.compile(rf"_*({PREPOSITION}|{PARTICIPLE}|(?!(embed|feed|need|red|seed|shed|speed)(_|$))[a-z]+ed)(_|$)")
"""Names that say where or in what state something is, not what is done; verbs and nouns that end in "ed" are none."""

HOOKS = {name for kind in (Attack, IntegrityAttack, Defense) for name in vars(kind) if name.startswith("on_")}
"""What attacks and defenses override, named by the event as callbacks of PyTorch Lightning are."""


def test_functions_begin_with_no_participle_or_preposition():
    for name in ("of", "spent", "asked", "attacked_once", "_in_worker", "masked_scores", "_why_not", "on_terminal"):
        assert NO_VERB.match(name), name
    for name in ("from_columns", "to_toml", "with_options", "as_text", "bound_interval", "seed", "is_frozen"):
        assert not NO_VERB.match(name), name
    for path in modules("vflsec", *PLUGINS):
        tree = ast.parse(path.read_text("utf-8"))
        functions = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        assert not [name for name in functions if name not in HOOKS and NO_VERB.match(name)], path


VERBS = """
access accumulate acquire add advance advise aggregate agree align allow alternate announce append apply are arrange
as ask assemble assign attack attend attribute audit average belong bin blend block bootstrap bound break build
calibrate can center chain change check choose classify clean clip clone cluster collapse collect combine compare
complete compute concatenate connect constrain contrast convert copy correct correlate count create cut damage deal
decay decode decrypt defend densify derive descend describe differ digest discard display divide draft draw drop dump
encode end escape estimate evaluate examine exchange exit expand expect explain export expose extend factor fill find
fingerprint finish fit fix flatten fold forecast format from fuse get group grow guard guess handle hang has hash
hook identify import index infer inspect interpolate invert is isolate jackknife join judge keep label learn leave
limit list load locate lock log make map mark mask match measure memoize merge minimize mount move multiply name
normalize note number observe open order orient pack pad pair parse peel pick place plan plot pool predict prefix
prepare print project put query rank reach read recover reduce refine refuse regress reinitialize reject release
remove render reorder repeat replace replay report require reset resize resolve restore restrict reverse review
round run save say scale score seal search secure seed select send separate serve set shade share sharpen shorten
show shuffle size skip slice smooth solve sort span specialize split spread stack standardize start state step strip
subtract suggest sum summarize sweep sync tabulate take tame teach time title to toss train truncate try tune turn
unpack unseal unstack update verify warn watch weigh whiten with withhold wrap write
"""
"""First words of functions: each is a verb, begins a predicate, or converts (as, from, to, with)."""

STANDARD = """
accuracy affine affine_batch auc backward backward_of_several cap cat cli command cross_entropy dataset dcs exact f1
getitem hypervolume info_nce init keys ks linear main mse negative_cosine nt_xent psnr r2 regression scarf_loss
source_files top5 tpr_at
"""
"""Scores, losses and operations by the names that the field and PyTorch give them; commands; contracts of plug-ins."""


def test_functions_of_modules_begin_with_a_verb():
    for path in modules("vflsec", *PLUGINS):
        functions = [node for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.FunctionDef)]
        names = {node.name.lstrip("_") for node in functions if not node.name.endswith("__")} - set(STANDARD.split())
        assert not [name for name in names if name.split("_")[0] not in VERBS.split()], path


def test_no_two_classes_have_the_same_name():
    trees = [ast.parse(path.read_text("utf-8")) for path in modules("vflsec", *PLUGINS)]
    names = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert [name for name, times in names.items() if times > 1] == []


def test_the_house_imports_nothing_that_the_extra_of_a_guest_brings():
    guests = modules(*(f"vflsec/{name}" for name in GUESTS))
    importing = [
        path for path in modules("vflsec", *PLUGINS) if re.search(r"(from|import) PIL\b", path.read_text("utf-8"))
    ]
    assert importing
    assert set(importing) <= set(guests)


@pytest.fixture(scope="module")
def without_guests(tmp_path_factory):
    """What the commands print in a copy of the package, from which the guests were deleted."""
    site = tmp_path_factory.mktemp("site")
    left_out = shutil.ignore_patterns("__pycache__", *GUESTS)
    shutil.copytree(ROOT / "vflsec", site / "vflsec", ignore=left_out)
    for name in PLUGINS:
        shutil.copytree(ROOT / name, site / "vflsec" / name, ignore=left_out)
    env = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "VFLSEC_CACHE": str(site / "cache")}
    words = [sys.executable, "-c", COMMANDS]
    printed = subprocess.run(words, cwd=site, env=env, capture_output=True, text=True, check=True).stdout
    results = json.loads(printed.splitlines()[-1])
    path, imported = results.pop("imported")
    assert Path(path).is_relative_to(site)
    assert imported == []
    return results


@pytest.mark.long
@pytest.mark.parametrize("name", ["help", "list", "show", "train", "eval", "report", "audit"])
def test_the_house_works_without_its_guests(without_guests, name):
    code, output = without_guests[name]
    assert code == 0, output
    assert output


@pytest.mark.long
def test_deleted_guests_leave_neither_commands_nor_datasets(without_guests):
    assert {"judge", "party", "reproduce"} <= set(list_all())
    assert {"avazu", "census-text", "ppdai"} <= set(registry.list_all("datasets"))
    assert "reproduce" not in without_guests["help"][1]
    assert "avazu" not in without_guests["list"][1]
    assert without_guests["party"][0] == without_guests["avazu"][0] == 2


@pytest.mark.parametrize("folder", GUESTS)
def test_a_guest_has_no_torch_in_what_help_imports(folder):
    code = f"import sys, vflsec.{folder}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
