"""The epsilon of an audit is that of the mechanism, over the releases that the adversary got."""

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from vflsec.audit.job import count_releases, measure_spending
from vflsec.audit.recorder import Recorder
from vflsec.audit.subject import from_transcript
from vflsec.base.errors import UsageError
from vflsec.cli import cli
from vflsec.run.plan import resolve
from vflsec.run.spec import parse_defense

pytestmark = pytest.mark.usefixtures("few_trees_in_module")  # the subject is not how well trees guess

PARTIES = ["active", "passive_1"]


@pytest.fixture
def subject(tmp_path):
    """Row a crosses three times and is returned twice, row b once less."""
    with Recorder(tmp_path / "t", parties={"bank": "active", "bureau": "passive"}, observer="bureau") as recorder:
        for rows in (["a", "b"], ["a", "a"], ["b", "c"]):
            h = recorder.cut(torch.ones(len(rows), 2, requires_grad=True), rows=rows)
            h.sum().backward()
        recorder.cut(torch.ones(1, 2), rows=["z"], split="test")
    return from_transcript(tmp_path / "t")


def test_releases_are_counted_by_row_and_receiver(subject):
    (gradients,) = count_releases(subject.messages, "passive_1")
    assert (gradients.kind.value, gradients.most, gradients.total) == ("gradient", 3, 6)
    by_split = {one.split: (one.most, one.total) for one in count_releases(subject.messages, "active")}
    assert by_split == {"train": (3, 6), "test": (1, 1)}


def test_declared_noise_gives_the_epsilon_of_as_many_gaussians(subject):
    defense = resolve(parse_defense("gaussian-dp:strength=20")).defense()
    (found,) = measure_spending(["gaussian-dp:strength=20"], subject, PARTIES)
    assert found["releases"] == 3
    assert found["epsilon"] == defense.privacy_spent(3)["epsilon"]
    assert found["epsilon_transcript"] == defense.privacy_spent(6)["epsilon"] > found["epsilon"]
    (planned,) = measure_spending(["gaussian-dp:epsilon=2"], subject, PARTIES)
    assert planned["epsilon"] == pytest.approx(2, abs=1e-4)


def test_epsilons_of_updates_are_refused(subject):
    with pytest.raises(UsageError, match="its epsilon counts updates"):
        measure_spending(["dp-sgd:strength=1"], subject, PARTIES)


def test_a_defense_of_what_was_not_sent_is_refused(tmp_path):
    with Recorder(tmp_path / "t", parties={"bank": "active", "bureau": "passive"}, observer="bureau") as recorder:
        recorder.embedding(torch.ones(2, 2), rows=["a", "b"])
    with pytest.raises(UsageError, match="shows no gradient"):
        measure_spending(["iso:lambda=5"], from_transcript(tmp_path / "t"), PARTIES)


@pytest.mark.parametrize("text", ["iso:lambda=5", "gaussian-dp:epsilon=2@embedding"])
def test_a_defense_without_epsilon_may_be_declared(subject, text):
    assert measure_spending([text], subject, PARTIES) == []


@pytest.mark.long
def test_a_checkpoint_and_its_transcript_spend_what_eval_reports(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*words):
        done = CliRunner().invoke(cli, list(words), catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    common = ["--dataset", "toy", "--set", "train.epochs=2", "--defense", "gaussian-dp:epsilon=2"]
    run("train", *common, "--out", "ckpt", "--record", "messages")
    audit = ("--attack", "norm", "--draws", "1", "--format", "json")
    found = [
        json.loads(run("audit", *words, *audit))["points"][0]["spent"]
        for words in (
            ["ckpt", "--messages", "messages"],
            ["messages", "--data", "toy", "--party", "passive_1", "--defense", "gaussian-dp:epsilon=2"],
        )
    ]
    points = json.loads(run("eval", *common, "--attack", "norm", "--seeds", "1", "--jobs", "1", "--format", "json"))[
        "points"
    ]
    (expected,) = [one for point in points for one in point["spent"]]
    assert found[0] == [expected]
    assert found[1][0]["releases"] == expected["releases"]
    assert np.isclose(found[1][0]["epsilon"], expected["epsilon"])
