"""Typical mistakes: each gets one line, exit code 2 and the right word; and names complete in shells."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from vflsec.base.checks import suggest
from vflsec.cli import SETTINGS, cli
from vflsec.run.spec import TABLES

MISTAKES = """
evl --attack mc | unknown command 'evl'. Did you mean eval?
lst | unknown command 'lst'. Did you mean list?
reprot runs/x | unknown command 'reprot'. Did you mean report?
Eval | unknown command 'Eval'. Did you mean eval?
data chek data.toml | unknown command 'chek'. Did you mean check?
list atacks | unknown kind 'atacks'. Did you mean attacks?
list attack x | Got unexpected extra argument (x); see vflsec list --help
show atack mc | unknown kind 'atack'. Did you mean attacks?
show attack mcc | unknown attack 'mcc'. Did you mean mc?
show mc | expected the kind first: vflsec show attack mc
show iso | expected the kind first: vflsec show defense iso
show attack | Missing argument 'NAME'; see vflsec show --help
eval --atack mc | no such option --atack. Did you mean --at or --attack or --track?
eval --attack mcc | unknown attack 'mcc'. Did you mean mc?
eval --attack MC | unknown attack 'MC'. Did you mean mc?
eval --attack averging,mc | unknown attack 'averging'. Did you mean averaging?
eval --attack active_mc | unknown attack 'active_mc'. Did you mean active-mc?
eval --attack mc:epoch=3 | mc: unknown option 'epoch'. Did you mean epochs?
eval --attack mc:epochs=three | mc: option epochs='three': Expected `int | null`, got `str`
eval --attack mc@pretrian --method ss-vfl-c | of ss-vfl-c after which to attack 'pretrian'. Did you mean pretrain?
eval --attack mc@pretrain | fedsplitnn has no pre-training, so mc@pretrain cannot run: choose a method that
eval --attack mc --until nan | expected a finite number, got nan
eval --attack mc --by "" | expected the name of a raw column for --by, got an empty one
eval --attack mc --audit-epsilon 100 --set data.canaries=0 | expected --audit-epsilon or --set data.canaries, got both
eval --defense isso | unknown defense 'isso'. Did you mean iso?
eval --defense gaussian_dp | unknown defense 'gaussian_dp'. Did you mean gaussian-dp?
eval --defense iso,none | got none: a run without one is always part, so leave it out
eval --defense gauss | unknown defense 'gauss'. Did you mean gaussian-dp?
eval --defense iso:lamda=1 | iso: unknown option 'lamda'. Did you mean lambda?
eval --defense iso@gradients | unknown at 'gradients'. Did you mean gradient?
eval --defense iso --lamda 1 | no such option --lamda. Did you mean --lambda?
eval --defense iso --lambda a | Invalid value for --lambda: 'a' is not a comma-separated list of numbers
eval --defense iso --lambda 1;5 | Invalid value for --lambda: '1;5' is not a comma-separated list of numbers
eval --defense iso --lambda -1 | expected strengths of 0, or above 1e-100 and below 1e+100, for iso, got [-1.0]
eval --defense gaussian-dp --epsilon 0 | epsilons: expected epsilon > 0, got 0.0
eval --lambda 5 | expected --defense with --lambda, got no defense: name one, for example --def
eval --with iso | expected a strength for the fixed defense iso, got 0: write iso:lambda=5
eval --with iso:lambda=5,10 | expected one strength for the fixed defense iso, got 5, 10: choose one
eval --method fedsplit | unknown method 'fedsplit'. Did you mean fedsplitnn?
eval --method FedHSSL | Did you mean fedhssl-byol, fedhssl-moco or fedhssl-simsiam?
eval --method fedhssl-simsiam:pmaa=false | fedhssl-simsiam: unknown option 'pmaa'. Did you mean pma?
eval --dataset credit_default | unknown dataset 'credit_default'. Did you mean credit-default?
eval --dataset missing.toml | expected a TOML file missing.toml, found none
eval --dataset bank.csv | expected a TOML file that describes bank.csv, got the table: vflsec data init
eval --dataset toy --adversary pasive_1 | unknown adversary 'pasive_1'. Did you mean passive_1?
eval --dataset data.toml --adversary bureu | unknown adversary 'bureu'. Did you mean bureau? Known: bank, bureau
eval --out "" | Invalid value for '--out': expected a path, got an empty text; see vflsec eval --help
eval --dataset data.toml --dry-run --by nope | unknown column 'nope'. Known: a, b
eval --seed 3 | no such option --seed. Did you mean --seeds or --set or --sweep?
eval --seeds 0 | Invalid value for '--seeds': 0 is not in the range x>=1; see vflsec eval --help
eval --seeds 99999999999999 | expected at most 10000 seeds, got 99999999999999
eval --epochs 3 | no such option --epochs; write --set train.epochs=...
eval --n-labeled 3 | no such option --n-labeled; write --set data.n_labeled=...
eval --set train.epoch=3 | unknown setting 'epoch' - at 'train'. Did you mean epochs?
eval --set trian.epochs=3 | unknown setting 'trian'. Did you mean train?
eval --set epochs=3 | unknown setting 'epochs'. Write train.epochs.
eval --set train.epochs=0 | expected train.epochs > 0, got 0
eval --set train.epochs=ten | Expected 'int | null', got 'str' - at 'train.epochs'
eval --set train.epochs | expected --set path.to.key=value, got 'train.epochs'
eval --set data.n_label=200 | unknown setting 'n_label' - at 'data'. Did you mean n_labeled?
eval --set aux.N=3 | unknown setting 'N' - at 'aux'. Did you mean n?
eval --dataset toy --set data.n_labeled=10000 | expected n_labeled <= 420, the aligned training rows, got 10000
eval --format jsno | Invalid value for '--format': 'jsno' is not one of 'table', 'json', 'csv', 'mark
eval --engine dask | expected --engine local or dask:ADDRESS, got 'dask'
eval --device gpu | expected --device cpu, or cuda where torch finds a GPU
eval --jobs 0 | Invalid value for '--jobs': 0 is not in the range x>=1; see vflsec eval --help
eval --max-leak 0.7 | expected NAME=LIMIT, for example mc=0.35, got '0.7'
eval --max-leak mc=70% | expected NAME=LIMIT, for example mc=0.35, got 'mc=70%'
eval --max-leak averaging=0.7 | unknown attack 'averaging'. Known: mc, worst; --attack adds another
eval --config none.toml | File 'none.toml' does not exist; see vflsec eval --help
eval --out bank.csv | expected a folder for --out, found the file bank.csv: name another
train --attack mc | no such option --attack; it is one of vflsec eval and vflsec audit
train --seeds 3 | no such option --seeds. Did you mean --seed or --set?
report nowhere | expected results in nowhere, found no manifest.json: run vflsec eval --out
audit nothing | expected a file or folder at nothing, found none: check the path
data init bank.csv | expected a file for each of two parties or more, got 1: add the others
data check bank.csv | vflsec data init drafts a description of tables
broken.toml | unknown command 'broken.toml'
data check broken.toml | broken.toml: unknown key in [parties.*] 'categoric'. Did you mean categorical?
"""
ROWS = [tuple(part.strip() for part in line.split(" | ", 1)) for line in MISTAKES.strip().splitlines()]
TOML = """\
label = "y"
id = "id"
[parties.bank]
file = "bank.csv"
[parties.bureau]
file = "bureau.csv"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    rows = range(400)
    (tmp_path / "bank.csv").write_text("id,a,y\n" + "".join(f"{k},{k % 7},{k // 3 % 2}\n" for k in rows), "utf-8")
    (tmp_path / "bureau.csv").write_text("id,b\n" + "".join(f"{k},{k % 5}\n" for k in rows), "utf-8")
    (tmp_path / "data.toml").write_text(TOML, "utf-8")
    (tmp_path / "broken.toml").write_text(TOML.replace('"bank.csv"', '"bank.csv"\ncategoric = ["a"]'), "utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_there_are_sixty_mistakes():
    assert len(ROWS) >= 60


@pytest.mark.parametrize(("words", "expected"), ROWS)
def test_a_mistake_gets_one_line_with_the_right_word(folder: Path, words: str, expected: str):
    before = sorted(path.name for path in folder.iterdir())
    result = CliRunner().invoke(cli, shlex.split(words.replace(";", "\\;")))
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("Error: ")
    assert expected in line
    assert sorted(path.name for path in folder.iterdir()) == before


def test_settings_that_are_named_for_options_exist():
    for table, names in SETTINGS.items():
        assert set(names) <= set(TABLES[table].__struct_fields__)
        assert issubclass(TABLES[table], msgspec.Struct)


@pytest.mark.parametrize(
    ("value", "known", "expected"),
    [
        ("iso", ["iso"], " Did you mean iso?"),
        ("Iso_Noise", ["iso-noise", "iso"], " Did you mean iso-noise?"),
        ("fed", ["fedb", "feda", "fedc", "fedd"], " Did you mean feda, fedb or fedc?"),
        ("epohcs", ["epochs", "batch"], " Did you mean epochs?"),
        ("zzz", ["epochs"], ""),
        ("", ["epochs"], ""),
    ],
)
def test_suggestions(value: str, known: list[str], expected: str):
    assert suggest(value, known) == expected


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("eval --attack mc,av", {"mc,averaging"}),
        ("eval --attack al", {"all"}),
        ("eval --defense gau", {"gaussian-dp"}),
        ("eval --method fedhssl-s", {"fedhssl-simsiam"}),
        ("train --dataset mul", {"multiple-features"}),
        ("show at", {"attacks"}),
        ("show attack bat", {"batch-label"}),
        ("ev", {"eval"}),
        ("data ch", {"check"}),
    ],
)
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_names_complete_in_shells(words: str, expected: set[str], shell: str):
    line = f"vflsec {words}"
    position = str(len(line.split()) - 1)
    code = "from vflsec.cli import cli; cli(prog_name='vflsec')"
    environment = {**os.environ, "_VFLSEC_COMPLETE": f"{shell}_complete", "COMP_WORDS": line, "COMP_CWORD": position}
    shown = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    lines = shown.stdout.splitlines()
    found = {line.removeprefix("plain,") for line in lines} if shell == "bash" else set(lines[1::3])
    assert found == expected


@pytest.mark.skipif(not Path("/bin/bash").exists(), reason="bash is not installed")
def test_bash_reads_the_script_that_the_documentation_names():
    code = "from vflsec.cli import cli; cli(prog_name='vflsec')"
    environment = {**os.environ, "_VFLSEC_COMPLETE": "bash_source"}
    script = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    checked = subprocess.run(["/bin/bash", "-n"], input=script.stdout, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert "complete " in script.stdout


def test_a_sweep_is_an_option_of_eval():
    result = CliRunner().invoke(cli, ["sweep"])
    assert result.exit_code == 2
    assert "eval --sweep" in result.output
