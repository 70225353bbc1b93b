"""Stages: what several cells share is run once, kept under a key of its own, and attacked where that is asked for."""

import msgspec
import pytest
import torch

from vflsec.base.errors import UsageError
from vflsec.report.report import Report
from vflsec.results.records.schema import BaselineResult, Result
from vflsec.run import engine
from vflsec.run import spec as specs
from vflsec.run.describe import build_manifest
from vflsec.run.plan import NO_ADVERSARY, build_cell, list_trials
from vflsec.run.store import StageDone, Store
from vflsec.run.training import limit_threads, train

pytestmark = pytest.mark.usefixtures("few_trees_in_module")  # the subject is not how well trees guess

SMALL = {"projector": 16, "predictor": 8}
SETTINGS = {
    "dataset": "toy",
    "data": {"n_labeled": 60, "aligned": 0.5, "options": {"rows": 240, "columns": 4}},
    "methods": ["fedhssl-simsiam"],
    "method": {"fedhssl-simsiam": SMALL},
    "train": {"epochs": 5, "pretrain": {"epochs": 2, "batch": 64}},
    "model": {"bottom": (8, 8)},
    "attacks": ["mc:epochs=20"],
    "aux": {"n": 10, "folds": 0},
    "seeds": 1,
}


def read(**changes):
    return specs.read({**SETTINGS, **changes})


def stage(of="fedhssl-simsiam", **changes):
    return build_cell(read(**changes), of, 0).stage_key("pretrain")


def run(spec, folder):
    engine.check(spec)
    store = Store(folder)
    todo = engine.plan(spec, store)
    return todo, list(engine.evaluate(todo, store))


@pytest.mark.parametrize(
    "changes",
    [
        {"data": {**SETTINGS["data"], "n_labeled": 40}},
        {"data": {**SETTINGS["data"], "validation": 0.2}},
        {"train": {**SETTINGS["train"], "epochs": 9, "lr": 0.1, "target": 0.5}},
        {"model": {"bottom": (8, 8), "head": "mlp"}},
        {"method": {"fedhssl-simsiam": {**SMALL, "encoders": "local", "pool": "concat"}}},
        {"fixed": ["iso:lambda=5@gradient"]},
        {"fixed": ["iso:lambda=5@finetune.embedding"]},
        {"aux": {"n": 20, "folds": 0}},
        {"attacks": ["mc:epochs=20,mode=mixmatch"]},
    ],
)
def test_what_comes_later_shares_the_pre_training(changes):
    assert stage(**changes) == stage()
    cells = [build_cell(read(**c), "fedhssl-simsiam", 0).key for c in ({}, changes)]
    assert (cells[0] == cells[1]) == (set(changes) <= {"aux", "attacks"})


@pytest.mark.parametrize(
    "changes",
    [
        {"data": {**SETTINGS["data"], "aligned": 0.4}},
        {"train": {**SETTINGS["train"], "pretrain": {"epochs": 3, "batch": 64}}},
        {"model": {"bottom": (8, 9)}},
        {"model": {"bottom": (8, 8), "head": "none", "aggregation": "mean"}},
        {"method": {"fedhssl-simsiam": {**SMALL, "gamma": 0.25}}},
        {"fixed": ["iso:lambda=0.4@pretrain.embedding"]},
        {"fixed": ["iso:lambda=0.4@embedding"]},
        {"fixed": ["iso:lambda=0.4,by=active@parameters"]},
    ],
)
def test_what_acts_in_pre_training_has_a_pre_training_of_its_own(changes):
    assert stage(**changes) != stage()


def test_a_stage_that_reads_labels_depends_on_them():
    of = {"methods": ["vflhlp"], "method": {}}
    assert stage("vflhlp", **of) != stage("vflhlp", **of, data={**SETTINGS["data"], "n_labeled": 40})


def test_one_pre_training_serves_every_strength_attack_and_label_budget(tmp_path):
    spec = read(defenses=["iso"], strengths=[1.0, 5.0])
    todo, records = run(spec, tmp_path)
    stages = [(r.method, r.stage, r.status) for r in records if isinstance(r, StageDone)]
    of_pretraining = [(name, "pretrain", "ok") for name in ("fedlocal-simsiam", "fedhssl-simsiam")]
    of_groups = [(task.cell.method.name, f"{len(task.group)} runs", "ok") for task in todo.groups]
    assert stages == of_pretraining + of_groups
    assert len(todo.stages) == 2
    more = read(defenses=["iso"], strengths=[1.0, 5.0, 25.0], data={**SETTINGS["data"], "n_labeled": 40})
    again, records = run(more, tmp_path)
    assert again.stages == []
    assert {record.status for record in records} <= {"ok", "unconverged"}
    assert not any(isinstance(record, StageDone) for record in Store(tmp_path).records().values())


@pytest.mark.long
def test_a_stored_stage_gives_the_same_records_as_one_that_is_run(tmp_path):
    spec = read()
    run(spec, tmp_path / "a")
    run(read(defenses=["iso"], strengths=[5.0]), tmp_path / "b")
    _, second = run(spec, tmp_path / "b")
    assert second == []  # the undefended cell is the same
    a, b = ({k: msgspec.structs.replace(v, seconds={}) for k, v in Store(tmp_path / n).records().items()} for n in "ab")
    assert all(b[key] == record for key, record in a.items())


@pytest.mark.long
@pytest.mark.parametrize(("defense", "ciphertexts"), [("phe:backend=plain,strength=1", 29_520), ("mixup:alpha=5", 0)])
def test_a_stage_under_a_defense_is_not_the_undefended_one(defense, ciphertexts, tmp_path):
    """In a folder with the undefended run, the defended one records what it records in a folder of its own."""
    spec = read(
        methods=["prada"],
        method={},
        data={"options": {"rows": 400, "source": 300}},
        train={"epochs": 2, "optimizer": "sgd", "lr": 0.05, "pretrain": {"batch": 32}},
        model={},
        defenses=[defense],
    )
    _, records = run(spec, tmp_path / "shared")
    assert sum(isinstance(record, StageDone) and record.stage == "pretrain" for record in records) == 2
    (defended,) = {row.cell.key: row.cell for row in list_trials(spec) if row.strength}.values()
    shared = Store(tmp_path / "shared").cell(defended.key).read()
    with limit_threads():
        _, alone = train(defended, "cpu", store=Store(tmp_path / "alone"))
        _, undefended = train(msgspec.structs.replace(defended, defenses=()), "cpu")
    for facts in (shared, alone, undefended):
        facts.seconds, facts.phase_seconds, facts.traffic = 0.0, {}, sorted(facts.traffic)
    assert shared == alone
    if not ciphertexts:  # sealed and not encrypted, the layer learns what it does in clear
        assert shared.history["pretrain"] != undefended.history["pretrain"]
    counted = sum(n for phase, *_, kind, n in shared.traffic if (phase, kind) == ("pretrain", "ciphertext"))
    assert counted == ciphertexts


def test_traffic_of_pre_training_is_counted_where_it_was_loaded(tmp_path):
    _, records = run(read(defenses=["iso"], strengths=[5.0]), tmp_path)
    results = [record for record in records if isinstance(record, Result)]
    phases = [{phase for phase, *_ in record.traffic} for record in results]
    assert phases == [{"pretrain", "finetune", "predict"}] * 2
    assert len({record.nbytes for record in results}) == 1


@pytest.mark.long
def test_an_attack_can_strike_after_pre_training(tmp_path):
    spec = read(attacks=["mc:epochs=20", "mc:epochs=20@pretrain"], defenses=["iso"], strengths=[25.0])
    _, records = run(spec, tmp_path)
    found = [r for r in records if isinstance(r, Result)]
    after = {tuple(r.defenses): r for r in found if r.attack.after == "pretrain"}
    (clean, defended) = after[()], after[("iso:25",)]
    assert clean.leak == defended.leak  # noise on fine-tuning's gradients comes later
    last = {tuple(r.defenses): r for r in found if not r.attack.after}
    assert clean.leak != last[()].leak
    assert clean.utility == last[()].utility


def test_alone_includes_a_model_that_the_adversary_pre_trained_by_itself(tmp_path):
    spec = read()
    _, records = run(spec, tmp_path)
    baselines = [record for record in records if isinstance(record, BaselineResult)]
    assert sorted(p.method for p in baselines) == [*5 * ["fedhssl-simsiam"], "fedlocal-simsiam"]
    assert all(p.leak for p in baselines)


def test_an_unknown_phase_is_refused():
    with pytest.raises(UsageError, match="pretrian"):
        engine.check(read(attacks=["mc@pretrian"]))


def test_a_swept_defense_that_never_acts_on_a_method_is_refused():
    spec = read(methods=["fedsplitnn", "fedhssl-simsiam"], defenses=["iso@pretrain.embedding"], strengths=[1.0])
    with pytest.raises(UsageError, match="changes nothing that fedsplitnn sends"):
        engine.check(spec)
    engine.check(
        msgspec.structs.replace(
            spec, defenses=(), strengths=(), fixed=read(fixed=["iso:lambda=1@pretrain.embedding"]).fixed
        )
    )


@pytest.mark.parametrize("defense", ["mixup:alpha=1,by=passive", "label-dp:strength=1,by=passive"])
def test_a_swept_defense_whose_carrier_runs_none_of_its_hooks_is_refused(defense):
    with pytest.raises(UsageError, match="nothing that fedsplitnn sends or"):
        engine.check(read(methods=["fedsplitnn"], method={}, defenses=[defense]))


def test_noise_that_depends_on_all_releases_keeps_the_settings_of_the_last_phase_in_the_key():
    """An epsilon is met over all phases, so that the noise of an earlier one depends on how long the last one is."""
    longer = {**SETTINGS["train"], "epochs": 9}
    for defense, same in (("gaussian-dp:strength=1@embedding", False), ("iso:lambda=1@embedding", True)):
        assert (stage(fixed=[defense]) == stage(fixed=[defense], train=longer)) == same


def test_who_carries_a_defense_is_checked():
    with pytest.raises(UsageError, match="'pasive'. Did you mean passive"):
        engine.check(read(fixed=["iso:lambda=1,by=pasive@embedding"]))


@pytest.mark.long
def test_a_method_without_an_adversary_has_a_utility_and_no_leak(tmp_path):
    spec = read(methods=["local", "fedsplitnn"], method={}, defenses=["iso"], strengths=[5.0])
    _, records = run(spec, tmp_path)
    (alone,) = [r for r in records if isinstance(r, Result) and r.method == "local"]
    assert alone.leak == {}
    assert alone.nbytes == 0
    Store(tmp_path).write_settings(specs.to_toml(spec), build_manifest(spec))
    report = Report.read(tmp_path)
    (point,) = [p for p in report.points if p.method == "local"]
    assert (point.attack, point.defense, point.status) == (NO_ADVERSARY, "none", "ok")
    assert point.utility.mean is not None
    assert point.leak.mean is None
    assert not [p for p in report.worst if p.method == "local"]
    assert NO_ADVERSARY in report.table()
    report.save_curve(tmp_path)


def test_compared_methods_have_one_encoder():
    together = read(methods=["fedsplitnn", "fedlocal-simsiam"], method={})
    assert {build_cell(together, m, 0).model.encoder for m in together.methods} == {"auto"}
    assert build_cell(read(methods=["fedsplitnn"], method={}), "fedsplitnn", 0).model.encoder == "mlp"


@pytest.mark.parametrize("of", ["fedhssl-simsiam", "fedlocal-byol", "ss-vfl-c"])
def test_a_longer_pre_training_goes_on_from_a_shorter_one(of, tmp_path):
    """Stopping after two iterations and going on to four gives, bit for bit, what four give at once."""

    def trained(until, store):
        options = SMALL if of.startswith("fed") else {}
        pretrain = {"epochs": 5, "batch": 64, **({"until": until} if until else {})}
        spec = read(methods=[of], method={of: options}, train={"epochs": 2, "pretrain": pretrain})
        with limit_threads():
            done, facts = train(build_cell(spec, of, 0), "cpu", store=store)
        return facts.history["pretrain"], done.predict("test")

    store = Store(tmp_path)
    losses, _ = trained(2, store)
    assert len(losses) == 2
    (snapshot,) = tmp_path.glob("cells/*.partial")
    before = snapshot.read_bytes()
    longer, predicted = trained(4, store)
    assert snapshot.read_bytes() != before
    alone, expected = trained(4, None)
    assert longer == alone
    assert longer[:2] == losses
    assert torch.equal(predicted, expected)
    assert trained(3, store)[0] == alone[:3]  # the snapshot is after four
    assert torch.equal(trained(5, store)[1], trained(None, None)[1])


def test_a_method_that_pre_trains_as_a_whole_does_not_stop():
    spec = read(methods=["vflhlp"], method={}, train={"pretrain": {"until": 2}})
    with pytest.raises(UsageError, match=r"expected no train.pretrain.until with vflhlp"):
        engine.check_training(spec)
