"""An attack that reads something new takes its own file and one declaration, and nothing else."""

import importlib.util
import json

import pytest
from click.testing import CliRunner

from vflsec.base.errors import InsufficientView
from vflsec.cli import cli
from vflsec.core.knowledge import KNOWLEDGE
from vflsec.core.view import Need
from vflsec.inference.sources import EVERYTHING
from vflsec.testing.conformance import AttackConformance

pytestmark = pytest.mark.usefixtures("few_trees_in_module")  # the subject is not how well trees guess

FILE = """
from dataclasses import replace
import torch
from vflsec.core.attack import Attack
from vflsec.core.knowledge import Knowledge
from vflsec.core.message import Kind
from vflsec.core.view import Need
from vflsec.inference.regression import regress_classes

KINDS = frozenset({Kind.EMBEDDING})
SENT = Knowledge("sent embeddings", "choose a method that sends embeddings", kinds=KINDS, sent=True)
LOSSES = Knowledge("losses", "ask", read=lambda trained, parties: trained.history or None, sides=("passive",))

class Sent(Attack):
    name = "sent"
    needs = frozenset({SENT, LOSSES, Need.AUX_LABELS})
    reference = verified = "test"

    def run(self, view, *, rng):
        assert view.further["losses"]["train"]
        sent = [m for m in view.messages if m.kind is Kind.EMBEDDING and m.sender == view.party and m.split == "train"]
        last = torch.zeros(len(view.features["train"]), sent[0].payload["value"].shape[1])
        for m in sent:
            last[m.rows] = m.payload["value"]
        return regress_classes(replace(view, features={"train": last}), folds=2, rng=rng)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("attack") / "sent.py"
    path.write_text(FILE)
    return path


@pytest.fixture(scope="module")
def module(file):
    spec = importlib.util.spec_from_file_location("sent", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def suite(module):
    class Conformance(AttackConformance):
        def make(self):
            return module.Sent()

    return Conformance()


def evaluate(file, tmp_path, *more):
    small = ("--set", "train.epochs=2", "--seeds", "1", "--jobs", "1", "--format", "json", "--out", str(tmp_path))
    return CliRunner().invoke(cli, ["eval", "--attack", f"{file}:Sent", "--dataset", "toy", *small, *more])


def test_it_is_evaluated_where_its_side_sends_such_messages(file, tmp_path):
    (point,) = [p for p in json.loads(evaluate(file, tmp_path).stdout)["points"] if p["attack"].endswith("Sent")]
    assert point["status"] == "ok"
    assert point["leak"]["mean"] > 0.8


def test_it_is_refused_where_nobody_sends_them(file, tmp_path):
    result = evaluate(file, tmp_path, "--method", "secureboost")
    assert result.exit_code == 2
    assert "needs sent embeddings" in result.stderr
    assert "choose a method that sends embeddings" in result.stderr


@pytest.mark.parametrize("check", [name for name in vars(AttackConformance) if name.startswith("test_")])
def test_it_passes_the_suite(suite, check):
    getattr(suite, check)()


def test_alone_has_nothing_that_a_federation_gives(module, suite):
    view = suite._get_scene("planted", 0).view
    both = {module.SENT, module.LOSSES}
    assert view.has(both) >= both
    alone = view.drop_federation(None)
    assert alone.has(both) == {Need.FEATURES, Need.AUX_LABELS}
    with pytest.raises(InsufficientView, match="needs losses, sent embeddings"):
        module.Sent()(alone, seed=0)


def test_fusion_reads_all_that_has_a_table():
    assert {Need.GRADIENTS, Need.PREDICTIONS} < EVERYTHING < set(KNOWLEDGE) - {Need.FEATURES}
