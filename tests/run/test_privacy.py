"""What was spent is reckoned from what was heard: by whom, how often, and in which phases."""

import json

import pytest

import vflsec
from vflsec.base.errors import UsageError
from vflsec.core.message import Kind, ReleaseCount
from vflsec.core.method import Trained
from vflsec.core.settings import ModelSpec, PretrainSpec, TrainSpec
from vflsec.data.partition import DataSpec
from vflsec.defenses.laplace_dp import LaplaceDP
from vflsec.report import table
from vflsec.run import training
from vflsec.run.federation import build_federation, build_method
from vflsec.run.plan import make_cell
from vflsec.run.score import compute_spending, count_most
from vflsec.run.spec import parse_defense
from vflsec.run.store import Store

pytestmark = pytest.mark.usefixtures("few_trees_in_module")  # the subject is not how well trees guess


def releases(phase="train", receiver="passive_1", split="train", most=3, total=300, sender="active", kind="gradient"):
    return ReleaseCount(phase, sender, receiver, Kind(kind), split, most, total)


@pytest.mark.parametrize(
    ("heard", "most"),
    [
        ([releases()], 3),
        ([releases(), releases(split="local", most=5)], 5),  # a row is of one split
        ([releases(), releases(phase="pretrain", split="aligned", most=5)], 8),  # and may be in any, under another name
        ([releases(), releases(receiver="passive_2")], 6),  # colluding
        ([releases(), releases("validate", split="val", most=7)], 7),
        ([releases(), releases("predict", split="test", most=1)], 3),
        ([releases(), releases("predict", split="train", most=1)], 4),
    ],
)
def test_the_row_that_was_heard_of_most(heard, most):
    assert count_most(heard) == most


def cell(*texts, method="fedsplitnn", parties=3, **options):
    return make_cell(
        dataset="toy",
        data=DataSpec(options={"rows": 200, "parties": parties}, **options),
        method=method,
        method_options={},
        train=TrainSpec(epochs=2, batch=32, pretrain=PretrainSpec(epochs=3, batch=32)),
        model=ModelSpec(bottom=(8, 8)),
        defenses=tuple(parse_defense(text) for text in texts),
        seed=0,
    )


def account(made, adversary, heard):
    federation, method = build_federation(made, "cpu"), build_method(made)
    method.build(federation)
    return compute_spending(Trained(method, federation, {}), heard, adversary)


GRADIENTS = [releases(), releases(receiver="passive_2")]
EMBEDDINGS = [releases(sender=f"passive_{k}", receiver="active", kind="embedding", most=k) for k in (1, 2)]


def test_colluding_receivers_add_up():
    made = cell("laplace-dp:strength=1")
    (one,) = account(made, "passive_1", GRADIENTS)
    (both,) = account(made, "passive_1+passive_2", GRADIENTS)
    assert (one["epsilon"], one["releases"], one["epsilon_transcript"], one["delta"]) == (3.0, 3, 300.0, 0.0)
    assert (both["epsilon"], both["releases"], both["epsilon_transcript"]) == (6.0, 6, 600.0)
    assert one["defense"] == repr(LaplaceDP(1.0))


def test_an_adversary_spends_nothing_on_what_it_does_not_hear_or_says_itself():
    assert account(cell("laplace-dp:strength=1"), "active", GRADIENTS + EMBEDDINGS) == []
    assert account(cell("label-dp:epsilon=2"), "active", GRADIENTS) == []
    assert account(cell("iso:lambda=2"), "passive_1", GRADIENTS) == []
    assert account(cell("laplace-dp:strength=1,by=passive"), "passive_1", GRADIENTS) == []


def test_of_several_senders_the_one_that_spent_most_is_told():
    (one,) = account(cell("laplace-dp:strength=1@embedding"), "active", EMBEDDINGS)
    assert one["releases"] == 2


def test_several_defenses_are_told_apart():
    both = account(cell("label-dp:epsilon=2@labels", "laplace-dp:strength=1"), "passive_1", GRADIENTS)
    assert [one["epsilon"] for one in both] == [2.0, 3.0]
    assert "releases" not in both[0]  # however often


def test_a_stage_from_the_store_has_spent_what_it_spent_when_it_was_run(tmp_path):
    made = cell("laplace-dp:strength=1@embedding", method="fedcssl-simsiam", parties=2)
    told = [training.train(made, "cpu", store=Store(tmp_path))[1].releases for _ in range(2)]
    assert sorted(told[0]) == sorted(told[1])
    assert {found[0] for found in told[0]} >= {"pretrain", "finetune", "predict"}


def quick(folder, **settings):
    return vflsec.evaluate(
        attack="mc:epochs=5", dataset="toy", data={"options": {"rows": 300}}, train={"epochs": 3}, seeds=1, jobs=1,
        aux={"n": 20, "folds": 0}, out=folder, **settings,
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("defense", ["gaussian-dp", "laplace-dp", "label-dp"])
def test_epsilon_is_asked_for_met_and_told(tmp_path, defense):
    report = quick(tmp_path, defense=defense, epsilons=[2, 8])
    points = {point.strength: point for point in report.points}
    assert points[0.0].spent == []
    for epsilon in (2, 8):
        (one,) = points[1 / epsilon].spent
        assert one["epsilon"] == pytest.approx(epsilon, rel=1e-3)
        assert one["delta"] == (1e-5 if defense == "gaussian-dp" else 0.0)
        assert one.get("releases", 3) == 3
    shown = table.list_points(report.summary)[0]
    column = list(shown.header).index("ε")
    assert {row[column] for row in shown.rows} == {"∞", "2", "8"}
    data = json.loads(report.to_json())
    assert {one["epsilon"] for point in data["points"] for one in point["spent"]} == {
        points[1 / epsilon].spent[0]["epsilon"] for epsilon in (2, 8)
    }
    last = report.to_csv().splitlines()
    assert ",epsilon,delta,epsilon_of,budget," in last[0]
    assert all(len(line.split(",")) == len(last[0].split(",")) for line in last)


@pytest.mark.long
def test_there_is_no_column_where_nothing_is_private(tmp_path):
    report = quick(tmp_path, defense="iso", strengths=[1])
    assert "ε" not in table.list_points(report.summary)[0].header


@pytest.mark.long
def test_a_fixed_defense_of_labels_has_its_epsilon_at_every_strength(tmp_path):
    report = quick(tmp_path, defense="iso", strengths=[1], fixed=["label-dp:epsilon=2@labels"])
    assert [point.spent[0]["epsilon"] for point in report.points] == [2.0, 2.0]


def test_an_epsilon_out_of_reach_is_refused_before_anything_is_trained(tmp_path):
    with pytest.raises(UsageError, match="larger epsilon"):
        quick(tmp_path / "a", defense="gaussian-dp:accountant=prv", epsilons=[1e-9])
    with pytest.raises(UsageError, match="how often it releases"):
        quick(tmp_path / "b", defense="gaussian-dp", epsilons=[1], methods=["fedcvt"])
    assert not list(tmp_path.iterdir())
