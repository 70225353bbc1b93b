"""Every method wins in the world that is made for it."""

import json
import re

import numpy as np
import pytest
from click.testing import CliRunner

from vflsec.cli import cli
from vflsec.papers.datasets.controls import load_domains, load_views
from vflsec.papers.recipe import FOLDER


def columns(table, labels):
    """The rows of a party in the order of ``labels``."""
    return table.frame.loc[labels.index].to_numpy(copy=True)


def test_two_views_have_nothing_but_the_class_in_common():
    made = load_views(rows=6000, classes=3, columns=8)
    labels = made.labels
    views = [columns(table, labels) for table in made.parties]
    across = np.corrcoef(*[view.T for view in views])[:8, 8:]
    for view in views:
        for label in range(3):
            view[labels == label] -= view[labels == label].mean(axis=0)
    within = np.corrcoef(*[view.T for view in views])[:8, 8:]
    assert abs(across).max() > 0.2
    assert abs(within).max() < 4 / np.sqrt(6000)


def test_half_of_the_columns_tell_the_class_in_the_source_alone():
    made = load_domains(rows=4000, source=4000, invariant=0.3, spurious=0.6)
    for table, spurious in ((made.parties[0], 0.0), (made.source, 0.6)):
        labels = made.labels.loc[table.frame.index]
        values = columns(made.parties[1], labels)
        distance = (values[labels == 1].mean(axis=0) - values[labels == 0].mean(axis=0)) / 2
        assert distance[::2] == pytest.approx(0.3, abs=0.08)
        assert distance[1::2] == pytest.approx(spurious, abs=0.08)


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """The cells of ``vflsec reproduce controls --quick`` by world and method, after two fifths of the pre-training."""
    folder = tmp_path_factory.mktemp("controls")
    text, count = re.subn(
        r"pretrain\.epochs = 20\b", "pretrain.epochs = 8", (FOLDER / "controls.toml").read_text("utf-8")
    )
    assert count == 1
    (folder / "controls.toml").write_text(text, "utf-8")
    words = ["reproduce", str(folder / "controls.toml"), "--quick", "--jobs", "1", "--format", "json"]
    done = CliRunner().invoke(cli, [*words, "--out", str(folder / "run")])
    assert done.exit_code == 0, done.output
    return {(cell["group"], cell["row"]): cell for cell in json.loads(done.stdout)["cells"]}


@pytest.mark.statistical
def test_every_method_wins_its_control(cells):
    """In each of two seeds, and in their mean by half of what is expected or more."""
    judged = {name: cell for name, cell in cells.items() if cell["printed"] is not None}
    assert len(judged) == 8
    for name, cell in judged.items():
        changes = cells[name]["by_seed"].values()
        assert len(changes) == 2, name
        assert min(changes) > 0, name
        assert cell["measured"] > cell["printed"] / 2, name


@pytest.mark.statistical
def test_every_step_of_fedhssl_adds_to_the_one_before(cells):
    local, cross, hybrid = (
        cells["two views", name]["measured"] for name in ("FedLocalSimSiam", "FedCSSL-SimSiam", "FedHSSL-SimSiam")
    )
    assert hybrid > cross > local
