"""Shadow federations are the attacked one on other halves of its candidates, shared by attacks and trained once."""

import json

import msgspec
import numpy as np
import pandas as pd
import pytest
import torch
from scipy.sparse import issparse

import vflsec
from vflsec.base.errors import InsufficientView
from vflsec.base.seeds import derive
from vflsec.core.settings import TrainSpec
from vflsec.data import encode
from vflsec.data.partition import DataSpec, exchange_rows, split_dataset
from vflsec.results.records.schema import Result
from vflsec.run import engine, plan, runner, training
from vflsec.run import spec as specs
from vflsec.run.federation import MEMBER, Candidates, build_federation, build_method, get_partition, query_model
from vflsec.run.forecast import forecast_time
from vflsec.run.questions import ask
from vflsec.run.spec import AuxSpec
from vflsec.run.store import StageDone, Store
from vflsec.testing.federations import make_toy, make_toy_cell

pytestmark = pytest.mark.usefixtures("few_trees_in_module")  # the subject is not how well trees guess

SETTINGS = {
    "dataset": "toy",
    "data": {"options": {"rows": 300}},
    "train": {"epochs": 2},
    "adversary": "active",
    "aux": {"n": 20, "folds": 0},
    "seeds": 1,
}
PRETRAINED = {"methods": ["ss-vfl-c"], "data": {"options": {"rows": 300}, "n_labeled": 60}}
LIRA, RMIA = "lira:shadows=20", "rmia:shadows=20"


def evaluated(folder, *attacks, **changed):
    """The results in a folder, and the stages that were run for them."""
    spec, store = specs.read({**SETTINGS, "attacks": list(attacks), **changed}), Store(folder)
    engine.check(spec)
    stages = [one.stage for one in engine.evaluate(engine.plan(spec, store), store) if isinstance(one, StageDone)]
    return [one for one in store.records().values() if isinstance(one, Result)], stages


@pytest.mark.parametrize(("n_train", "n_test"), [(40, 25), (25, 40), (30, 30)])
def test_a_shadow_trains_on_half_of_the_candidates_and_the_other_training_rows(n_train, n_test):
    target = Candidates.draw(0, n_train, n_test)
    n = min(n_train, n_test)
    assert len(target.places.unique()) == 2 * n
    assert (target.places < n_train).sum() == n
    others = set(range(n_train)) - set(target.places.tolist())
    for k in range(6):
        rows = target.deal(k).rows
        assert torch.equal(rows.sort().values, torch.arange(n_train + n_test))
        own = set(rows[:n_train].tolist())
        assert others <= own
        assert len(own & set(target.places.tolist())) == n
        assert torch.equal(rows[target.deal(k).places], target.places), "each candidate is where it is said to be"


def test_every_candidate_is_in_half_of_the_shadows_and_these_know_nothing_of_the_members():
    n, count = 400, 64
    target = Candidates.draw(0, n, n)
    split = {name: torch.full((n,), float(member)) for name, member in MEMBER.items()}
    inside, member = torch.stack([target.deal(k).gather(split) for k in range(count)]), target.gather(split)
    assert (inside.sum(dim=0) == count / 2).all()
    assert torch.equal(inside[::2], 1 - inside[1::2])
    shared = inside[::2] @ member - n / 2  # hypergeometric: half of the members, with variance n / 8
    assert abs(shared.mean()) < 4 * np.sqrt(n / 8 / len(shared))
    assert shared.square().mean() == pytest.approx(n / 8, rel=4 * np.sqrt(2 / len(shared)))


@pytest.mark.parametrize(
    ("data", "source", "wide"),
    [({}, 0, False), ({"n_labeled": 60, "validation": 0.2, "overlap": 0.8}, 0, False), ({}, 80, False), ({}, 0, True)],
)
def test_exchanged_rows_are_the_rows_of_their_ids(data, source, wide, monkeypatch):
    monkeypatch.setattr(encode, "WIDE", 3 if wide else encode.WIDE)
    before = split_dataset(make_toy(rows=200, source=source), DataSpec(**data), seed=0)
    n = len(before.ids["train"]) + len(before.ids["test"])
    after = exchange_rows(before, np.random.default_rng(0).permutation(n))
    assert issparse(before.parties["active"].features["train"]) == wide
    assert not np.array_equal(before.ids["train"], after.ids["train"])
    pool = [set(one.ids["train"]) | set(one.ids["test"]) for one in (before, after)]
    assert pool[0] == pool[1]
    held = set(before.ids["aligned"]) - set(before.ids["train"])
    assert set(after.ids["aligned"]) == held | set(after.ids["train"])
    for name, own in before.parties.items():
        known = {}
        for split, ids in before.ids.items():
            if split in own.features:
                known |= dict(zip(ids, encode.densify(own.features[split]).tolist(), strict=True))
        for split, ids in after.ids.items():
            if split in own.features:
                found = encode.densify(after.parties[name].features[split])
                assert found.tolist() == [known[one] for one in ids], (name, split)
    labels = pd.concat([pd.Series(y, before.ids[s]) for s, y in before.labels.items() if s in before.ids])
    for split in after.labels.keys() & after.ids.keys():
        assert after.labels[split].tolist() == labels[after.ids[split]].tolist()
    assert np.array_equal(before.ids["aligned"][before.places["aligned"]], before.ids["train"])
    assert np.array_equal(after.ids["aligned"][after.places["aligned"]], after.ids["train"])


def test_a_shadow_has_the_same_candidates_and_seeds_of_its_own():
    cell = make_toy_cell(data=DataSpec(n_labeled=60))
    shadow = msgspec.structs.replace(cell, shadow=3)
    own, other = build_federation(cell, "cpu"), build_federation(shadow, "cpu")
    assert (own.seed, other.seed) == (0, derive(0, "shadow", 3))
    target = Candidates.draw(0, own.n_rows("train"), own.n_rows("test"))
    for name, party in own.parties.items():
        assert torch.equal(target.gather(party.features), target.deal(3).gather(other.parties[name].features))
        assert not torch.equal(party.features["train"], other.parties[name].features["train"])
    assert torch.equal(target.gather(own.active.labels), target.deal(3).gather(other.active.labels))
    assert cell.key != shadow.key
    assert get_partition(cell).ids["train"].tolist() != get_partition(shadow).ids["train"].tolist()


def test_what_a_shadow_says_is_what_it_says_when_trained_by_itself():
    cell = make_toy_cell(train=TrainSpec(epochs=3))
    found = training.get_shadows(cell, 4, "cpu")
    trained = build_method(cell).fit(build_federation(msgspec.structs.replace(cell, shadow=2), "cpu"))
    own = trained.federation
    target = Candidates.draw(0, own.n_rows("train"), own.n_rows("test"))
    torch.testing.assert_close(found.logits[2], target.deal(2).gather(query_model(trained)), rtol=0, atol=1e-5)
    view = ask(plan.resolve(specs.parse_attack("lira")).make(), trained, "active", AuxSpec(n=20)).view
    assert found.logits.shape == (4, *view.predictions["candidates"].shape)
    assert found.members.dtype == torch.bool


def test_attacks_share_shadows_and_an_interrupted_run_trains_what_is_missing(tmp_path):
    both, stages = evaluated(tmp_path / "once", LIRA, RMIA)
    assert stages == ["shadows 1 to 16", "shadows 17 to 20"]
    assert [one.budget["shadows"] for one in both] == [20, 20]
    assert all(one.seconds["shadows"] > 0 for one in both)
    (first,), stages = evaluated(tmp_path / "later", LIRA)
    assert len(stages) == 2
    (lost,) = {path.parent for path in (tmp_path / "later").glob("cells/*/cell.json") if "17 to 20" in path.read_text()}
    lost.rename(tmp_path / "lost")
    found, stages = evaluated(tmp_path / "later", LIRA, RMIA)
    assert stages == ["shadows 17 to 20"]
    assert [one.leak for one in found] == [first.leak, both[1].leak] == [one.leak for one in both]
    found, stages = evaluated(tmp_path / "later", "rmia:shadows=20,gamma=2")
    assert found[-1].budget == {"shadows": 20}
    assert stages == []


def test_each_strength_has_shadows_with_its_defense(tmp_path):
    found, stages = evaluated(tmp_path, "lira:shadows=4", defenses=[{"name": "iso", "strengths": [25]}])
    assert stages.count("shadows 1 to 4") == 2
    assert len({json.dumps(msgspec.to_builtins(one.leak)) for one in found}) == 2


@pytest.mark.parametrize(
    "changed",
    [
        {**PRETRAINED, "train": {"epochs": 2, "pretrain": {"epochs": 1}}},
        {"fixed": ["dp-sgd:epsilon=8"]},
        {"train": {"epochs": 2, "clip": 1.0}},
    ],
    ids=["pre-training", "a defense of updates", "a setting of each run"],
)
def test_shadows_train_one_after_the_other_where_they_must(changed, tmp_path):
    (found,), _ = evaluated(tmp_path, "lira:shadows=4", **changed)
    assert found.status == "ok"
    assert found.leak["candidates"].n > 40


@pytest.mark.parametrize(("diverged", "status"), [({1}, "ok"), (set(range(6)), "error")])
def test_shadows_that_diverge_are_left_out(diverged, status, tmp_path, monkeypatch):
    in_turn = training.train_in_turn

    def some(cells, device):
        for number, trained in enumerate(in_turn(cells, device)):
            yield None if number in diverged else trained

    monkeypatch.setattr(training, "train_in_turn", some)
    (found,), _ = evaluated(tmp_path, "lira:shadows=6")
    assert found.status == status
    if status == "ok":
        assert found.budget == {"shadows": 5}
    else:
        assert "all 6 shadow federations diverged" in found.error


def test_a_failure_of_shadows_is_that_of_the_attack_alone(tmp_path, monkeypatch):
    def failing(*_):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(training, "train_in_turn", failing)
    found, _ = evaluated(tmp_path, "lira:shadows=4", "membership")
    assert [one.status for one in found] == ["error", "ok"]
    assert "out of luck" in found[0].error


def test_they_are_trained_by_name_alone():
    spec = specs.read({**SETTINGS, "attacks": ["all"]})
    found, left_out = engine.expand_attacks(spec)
    assert not {"lira", "rmia"} & {attack.name for attack in found.attacks}
    assert left_out["lira"] == left_out["rmia"]
    assert left_out["lira"].startswith("too dear: trains 64 shadow federations for each")
    _, of_passive = engine.expand_attacks(specs.read({**SETTINGS, "attacks": ["all"], "adversary": "passive_1"}))
    assert "is for the active side" in of_passive["lira"]  # who cannot mount it is told so, and not what it costs
    named, left_out = engine.expand_attacks(specs.read({**SETTINGS, "attacks": ["lira", "all"]}))
    assert "lira" in {attack.name for attack in named.attacks}
    assert "lira" not in left_out


def test_who_cannot_query_the_joint_model_is_refused():
    with pytest.raises(InsufficientView, match="is for the active side"):
        engine.check(specs.read({**SETTINGS, "attacks": ["lira"], "adversary": "passive_1"}))
    with pytest.raises(InsufficientView, match="needs predictions, shadow federations"):
        engine.check(specs.read({**SETTINGS, **PRETRAINED, "attacks": ["lira@pretrain"]}))


def test_a_federation_that_is_trained_already_has_no_shadows():
    trained = vflsec.train(dataset="toy", train={"epochs": 1})
    with pytest.raises(InsufficientView, match="shadow federations.*vflsec eval"):
        vflsec.attack(trained, "lira", adversary="active", n_aux=20)


def test_a_plan_counts_and_forecasts_missing_shadows(tmp_path):
    spec = specs.read({**SETTINGS, "attacks": [LIRA]})
    before = engine.plan(spec, None)
    assert [len(task.shadows) for task in before.groups] == [16, 4]
    evaluated(tmp_path, LIRA)
    records = Store(tmp_path).records().values()
    (each,) = (one.seconds["shadows"] / 20 for one in records if isinstance(one, Result))
    without = forecast_time(before._replace(groups=[]), records).seconds
    assert forecast_time(before, records).seconds - without == pytest.approx(20 * each)
    assert engine.plan(spec, Store(tmp_path)).groups == []


def test_memory_bounds_how_many_train_at_once(monkeypatch):
    cells = [msgspec.structs.replace(make_toy_cell(train=TrainSpec(epochs=1)), shadow=k) for k in range(4)]
    sizes, as_one = [], training._train_stacked
    monkeypatch.setattr(training, "_train_stacked", lambda some, *rest: sizes.append(len(some)) or as_one(some, *rest))
    monkeypatch.setattr(training, "MEMORY", 3 * 2 * 600 * 12 * 4)
    assert len(list(training.train_in_turn(cells, "cpu"))) == 4
    assert sizes[0] < 4
    assert sum(sizes) == 4


def test_the_runner_stores_batches_for_other_processes(tmp_path):
    spec = specs.read({**SETTINGS, "attacks": ["lira:shadows=4"]})
    (task,) = engine.plan(spec, None).groups
    (done,) = runner.run(task, tmp_path, "cpu")
    assert (done.stage, done.status) == ("shadows 1 to 4", "ok")
    assert Store(tmp_path).cell(training.make_batch_key(task.cell, range(4))).read().seconds > 0


@pytest.mark.long
def test_shadows_of_trees_tell_who_trees_were_fitted_to(tmp_path):
    fitted = {"secureboost": {"rounds": 20, "depth": 6, "leaf_rows": 1}}
    changed = {"dataset": "credit-default", "data": {"n_labeled": 300}, "train": {}, "method": fitted}
    (found,), _ = evaluated(tmp_path, "lira:shadows=4", methods=["secureboost"], **changed)
    assert found.leak["candidates"].metrics["auc"] > 0.7
