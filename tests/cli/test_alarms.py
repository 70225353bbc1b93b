"""Alarms on the command line: a NOTE in the verdict, exit code 3 for gates that would hold, 1 for one that fails."""

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from vflsec.cli import cli

pytestmark = pytest.mark.usefixtures("few_trees_in_module")  # the subject is not how well trees guess

FAST = ["--seeds", 1, "--jobs", 1, "--attack", "mc:epochs=5", "--set", "train.epochs=1", "--set", "aux.folds=0"]


def run(*arguments):
    return CliRunner().invoke(cli, [str(a) for a in arguments])


def expect_undecided(words, folder, note):
    """Expect a limit that nothing exceeds to be undecided, and one that all exceed to fail."""
    for limit, code, line in (("mc=1", 3, "UNDECIDED: see the NOTEs"), ("mc=0.01", 1, "FAILED")):
        found = run(*words, "--out", folder, "--max-leak", limit)
        assert (found.exit_code, line in found.stdout) == (code, True), found.output
        assert "VERDICT NOTE" in found.stdout
        assert note in " ".join(found.stdout.split())
    assert note in (folder / "report.html").read_text()


@pytest.mark.long
def test_a_class_of_which_the_adversary_knows_much(tmp_path):
    """The toy federation has 420 training rows: 80 balanced labels are 19 % of each class, 40 are 9.5 %."""
    expect_undecided(["eval", "--dataset", "toy", *FAST], tmp_path / "run", "the labels of 19 % of the training")
    words = ["--set", "aux.n=40", "--set", "train.epochs=20", "--max-leak", "mc=1", "--out", tmp_path / "b"]
    less = run("eval", "--dataset", "toy", *FAST, *words)
    assert (less.exit_code, "VERDICT NOTE" in less.stdout) == (0, False), less.output


@pytest.fixture
def half(tmp_path):
    """Two tables of 400 rows, of which 180 have an id that both write in the same way."""
    rng = np.random.default_rng(0)
    ids, y = np.arange(400), rng.permutation(np.arange(400) % 2)
    for name, own in (("bank", ids), ("bureau", np.where(ids < 180, ids, ids + 1000))):
        x = {f"{name}_{k}": rng.normal(size=400) + y for k in range(3)}
        label = {"bad": y} if name == "bank" else {}
        pd.DataFrame({"id": [f"c{i}" for i in own], **x, **label}).to_csv(tmp_path / f"{name}.csv", index=False)
    (tmp_path / "d.toml").write_text(
        'label = "bad"\nid = "id"\nactive = "bank"\n[parties.bank]\nfile = "bank.csv"\n[parties.bureau]\n'
        'file = "bureau.csv"\n'
    )
    return tmp_path


@pytest.mark.long
def test_few_rows_in_common(half):
    words = ["eval", "--dataset", half / "d.toml", "--adversary", "bureau", *FAST, "--set", "aux.n=8"]
    expect_undecided(words, half / "run", "all parties hold only 45% of the rows of the smallest one")
