"""Attacks on integrity: a training each beside the honest one, damages paired by seed, and no word of a leak."""

import msgspec
import pytest

import vflsec
from tests.results.analysis.made import made_result
from vflsec.base.errors import InsufficientView, UsageError
from vflsec.results.analysis.intervals import DIFFERENCE
from vflsec.results.analysis.summary import summarize
from vflsec.results.records.manifest import RunLimits
from vflsec.results.records.schema import Block, Impact, Triggered
from vflsec.results.statistics import GROUPS, SHARE, bound_interval, bound_over_seeds
from vflsec.run import engine
from vflsec.run import spec as specs
from vflsec.run.describe import build_manifest
from vflsec.run.federation import build_federation
from vflsec.run.plan import list_baselines, list_trials
from vflsec.run.store import Store

pytestmark = pytest.mark.usefixtures("few_trees_in_module")  # the subject is not how well trees guess

PLAN = {"dataset": "toy", "defenses": [{"name": "iso"}], "strengths": [1], "seeds": 3}
BROKEN = specs.read({**PLAN, "attacks": ["backdoor", "missing-feature"]})
RUN = {
    "dataset": "toy",
    "data": {"options": {"rows": 300}},
    "train": {"epochs": 3},
    "defenses": [{"name": "iso"}],
    "strengths": [1],
    "seeds": 2,
    "aux": {"n": 20, "folds": 0},
}


def finish(folder, **changed):
    spec, store = specs.read({**RUN, **changed}), Store(folder)
    engine.check(spec)
    for _ in engine.evaluate(engine.plan(spec, store), store):
        pass
    return spec, store


def summary_of(spec, records, **limits):
    return summarize(build_manifest(spec), records, out="run", limits=RunLimits(**limits))


def test_every_cell_under_attack_has_its_honest_one_beside_it():
    found = [r for r in list_trials(BROKEN) if (r.seed, r.strength) == (0, 1.0)]
    assert [(r.label, r.control) for r in found] == [
        ("backdoor", True), ("backdoor", False), ("missing-feature", True), ("missing-feature", False),
    ]  # fmt: skip
    honest = next(r.cell for r in list_trials(specs.read(PLAN)) if (r.seed, r.strength) == (0, 1.0))
    assert {r.cell.key for r in found if r.control} == {honest.key}, "that of any other attack"
    assert len({r.cell.key for r in found}) == 3
    assert len({r.key for r in found}) == 4
    assert all(d.spec.strength == 1.0 for r in found for d in r.cell.defenses)


def test_there_is_nothing_to_infer_alone():
    assert not list(list_baselines(BROKEN))
    mixed = specs.read({**PLAN, "attacks": ["mc", "backdoor"]})
    assert {p.label for p in list_baselines(mixed)} == {"mc", "logistic", "trees", "squares", "pseudo-labels"}


def test_a_cell_depends_on_known_labels_only_if_its_attack_uses_them():
    def cells(name, **aux):
        return {r.cell.key for r in list_trials(specs.read({**PLAN, "attacks": [name], "aux": aux})) if not r.control}

    assert not cells("backdoor") & cells("backdoor", n=40)
    assert cells("missing-feature") == cells("missing-feature", n=40)
    assert cells("active-mc") == cells("active-mc", n=40)


def block(value, n=100):
    ends, without = (value - 0.05, value + 0.05), (value,) * GROUPS  # whose rows are all alike
    return Block(metrics={"auc": value, "f1": 0.1}, ci95_rows=ends, chance=0.5, n=n, without=without)


def opened(share):
    return Triggered(share=share, ci95_rows=(share - 0.01, share + 0.01), n=80)


LOST = (0.02, 0.04, 0.09)
SUCCESS = (0.9, 0.95, 1.0)


def make_records(spec=BROKEN):
    found = {}
    for row in list_trials(spec):
        utility = 0.8 + 0.05 * row.seed - (0.0 if row.control else LOST[row.seed])
        share = 0.1 if row.control else SUCCESS[row.seed]
        success = opened(share) if row.label == "backdoor" else None
        found[row.key] = made_result(damage=Impact(utility=block(utility), success=success))
    return found


def test_damages_are_paired_by_seed():
    """Utilities differ between seeds by more than the attack costs: pairing takes that out of the interval."""
    summary = summary_of(BROKEN, make_records())
    assert [(d.attack, d.strength) for d in summary.integrity] == [
        ("backdoor", 0.0), ("missing-feature", 0.0), ("backdoor", 1.0), ("missing-feature", 1.0),
    ]  # fmt: skip
    assert {d.status for d in summary.integrity} == {"ok"}
    backdoor, missing = summary.integrity[:2]
    expected = bound_over_seeds(LOST)
    assert backdoor.lost.mean == pytest.approx(expected.mean)
    assert backdoor.lost.ci95 == pytest.approx(bound_interval(expected.mean, expected.mean - expected.low, DIFFERENCE))
    assert (backdoor.utility.mean, backdoor.under_attack.mean) == (pytest.approx(0.85), pytest.approx(0.80))
    assert (backdoor.success.mean, backdoor.chance) == (pytest.approx(0.95), pytest.approx(0.1))
    assert 0.95 < backdoor.success.ci95[1] < 1, "a share"
    assert (missing.success.mean, missing.chance) == (None, None)
    assert summary.metric == "auc"
    assert (summary.points, summary.worst, summary.cap) == ([], [], [])


def test_a_seed_without_a_number_is_lost_on_both_sides():
    records = make_records()
    for row in list_trials(BROKEN):
        if (row.seed, row.strength, row.label, row.control) == (2, 1.0, "backdoor", False):
            records[row.key] = made_result(status="diverged")
        if (row.seed, row.strength, row.label, row.control) == (0, 1.0, "backdoor", True):
            del records[row.key]
    found = next(d for d in summary_of(BROKEN, records).integrity if (d.attack, d.strength) == ("backdoor", 1.0))
    assert (found.status, found.statuses) == ("diverged", {"diverged": 1, "missing": 1, "ok": 1})
    assert (found.lost.n, found.lost.mean, found.lost.ci95) == (1, pytest.approx(0.04), (None, None))
    assert (found.utility.n, found.under_attack.n) == (2, 2)
    nothing = summary_of(BROKEN, {}).integrity[0]
    assert (nothing.lost.mean, nothing.success.mean, nothing.chance) == (None, None, None)
    assert nothing.statuses == {"missing": 3}


def test_one_seed_has_an_interval_over_rows():
    spec = msgspec.structs.replace(BROKEN, seeds=1)
    found = summary_of(spec, make_records(spec)).integrity[0]
    assert found.success.ci95 == pytest.approx((0.89, 0.91))
    assert found.lost.ci95 == pytest.approx((LOST[0], LOST[0])), "the same rows, which are all alike"


def test_a_limit_on_utility_holds_under_attack_and_there_is_none_on_a_leak():
    mean, low, *_ = bound_over_seeds([0.78, 0.81, 0.81])
    low, _ = bound_interval(mean, mean - low, SHARE)
    records = make_records()
    assert [summary_of(BROKEN, records, min_utility=x).gates[0].holds for x in (low - 0.01, low + 0.01)] == [
        True,
        False,
    ]
    assert summary_of(BROKEN, records, min_utility=0.5).gates[0].at == "fedsplitnn, iso 1 under backdoor"
    for name in ("backdoor", "worst"):
        with pytest.raises(UsageError, match=f"got {name}: .*bound the utility"):
            summary_of(BROKEN, records, max_leak={name: 0.5})


@pytest.mark.long
def test_an_attack_that_does_nothing_costs_exactly_nothing(tmp_path):
    spec, store = finish(tmp_path, attacks=["missing-feature:rate=0", "noisy-sample:scale=0"])
    found = summary_of(spec, store.records()).integrity
    assert len(found) == 4
    assert all((d.lost.mean, d.lost.ci95, d.status) == (0.0, (0.0, 0.0), "ok") for d in found)


@pytest.mark.long
def test_beside_a_leak_it_is_reported_apart(tmp_path):
    spec, store = finish(tmp_path, attacks=["norm", "backdoor", "missing-feature:rate=1"], seeds=1)
    alone_spec, alone = finish(tmp_path / "norm", attacks=["norm"], seeds=1)
    summary, honest = summary_of(spec, store.records()), summary_of(alone_spec, alone.records())
    keep = {"seconds": 0.0}
    assert [msgspec.structs.replace(p, **keep) for p in summary.points] == [
        msgspec.structs.replace(p, **keep) for p in honest.points
    ]
    assert summary.cap == honest.cap
    assert {(d.attack, d.strength) for d in summary.integrity} == {
        (name, strength) for name in ("backdoor", "missing-feature") for strength in (0.0, 1.0)
    }
    assert all(d.utility.mean == p.utility.mean for d, p in zip(summary.integrity[::2], summary.points, strict=True))
    backdoor = summary.integrity[0]
    assert 0 <= backdoor.success.mean <= 1
    assert 0 <= backdoor.chance <= 1
    assert len(list((tmp_path / "cells").iterdir())) == 2 * 3, "the honest cell is trained once for all attacks"


def test_a_stored_cell_gives_the_same_damage_again(tmp_path):
    _, store = finish(tmp_path, attacks=["backdoor", "noisy-sample", "villain:warm=0"], seeds=1)
    before = {key: record.damage for key, record in store.records().items()}
    (tmp_path / "records.jsonl").unlink()
    _, store = finish(tmp_path, attacks=["backdoor", "noisy-sample", "villain:warm=0"], seeds=1)
    assert {key: record.damage for key, record in store.records().items()} == before
    assert all(before.values())


def test_the_trigger_on_the_honest_model_is_that_of_a_party_that_watched_its_training(tmp_path):
    """One that never poisons is such a party, so that both numbers are the same."""
    settings, damages = {"seeds": 1, "defenses": [], "strengths": [], "train": {"epochs": 12, "lr": 5e-3}}, []
    for name in ("villain:warm=99", "villain:warm=99,aimed=false"):
        spec, store = finish(tmp_path / name, attacks=[name], **settings)
        damages += summary_of(spec, store.records()).integrity
    assert [d.success.mean for d in damages] == [d.chance for d in damages]
    assert [d.lost.mean for d in damages] == [0.0, 0.0]
    assert damages[0].chance > 0.9 > damages[1].chance


@pytest.mark.long
def test_parties_that_collude_have_an_attack_each(tmp_path):
    data, lost = {"options": {"rows": 300, "parties": 3, "signal": "hidden"}}, {}
    for name in ("passive_1", "passive_1+passive_2"):
        spec, store = finish(tmp_path / name, attacks=["missing-feature:rate=1"], data=data, adversary=name, seeds=1)
        lost[name] = summary_of(spec, store.records()).integrity[0].lost.mean
        cell = next(r.cell for r in list_trials(spec) if not r.control)
        assert list(build_federation(cell, "cpu").malicious) == name.split("+")
    assert lost["passive_1+passive_2"] != lost["passive_1"]


def test_a_party_that_breaks_its_own_model_has_not_collapsed(tmp_path):
    """What is sent says nothing any more, and that is the damage; a status would hide it."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\nfrom vflsec.core.attack import IntegrityAttack\n"
        "class Flat(IntegrityAttack):\n"
        "    name = reference = verified = 'flat'\n"
        "    def on_gradient(self, g, step):\n        return g * 0\n"
        "    def optimizer(self, parameters, lr):\n        return torch.optim.SGD(parameters, 1.0, weight_decay=1.0)\n"
    )
    spec, store = finish(tmp_path / "run", attacks=[f"{file}:Flat"], seeds=1)
    assert [r.spread["train"]["passive_1"] for r in store.records().values()][1] == 0.0
    assert {d.status for d in summary_of(spec, store.records()).integrity} == {"ok"}


@pytest.mark.sampled
@pytest.mark.parametrize("method", ["ss-vfl-i", "fedcvt", "vflhlp"])
def test_it_acts_in_what_other_methods_say(method, tmp_path):
    train = {"epochs": 2, "pretrain": {"epochs": 1}}
    settings = {"methods": [method], "train": train, "model": {"bottom": [8, 8]}, "seeds": 1, "defenses": []}
    spec, store = finish(tmp_path, **settings, strengths=[], attacks=["missing-feature:rate=1", "noisy-sample:scale=9"])
    for found in summary_of(spec, store.records()).integrity:
        assert found.status == "ok"
        assert found.lost.mean != 0


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"adversary": "active"}, InsufficientView, "'backdoor' .*passive side"),
        ({"methods": ["ss-vfl-i"]}, InsufficientView, "'backdoor' needs received gradients"),
        ({"aux": {"n": 0}}, InsufficientView, "'backdoor' needs auxiliary labels"),
        ({"attacks": ["backdoor:aim=2"]}, UsageError, "aim < 2, .*got 2"),
        ({"attacks": ["villain:aim=2"]}, UsageError, "aim < 2, .*got 2"),
        ({"attacks": ["villain"], "methods": ["secureboost"]}, InsufficientView, "'villain' needs received gradients"),
        ({"attacks": ["villain"], "aux": {"n": 1}}, UsageError, "expected a known row of class 1, got none"),
        ({"attacks": ["backdoor:columns=70"]}, UsageError, "expected columns <= 6 of passive_1, got 70"),
        (
            {"methods": ["ss-vfl-c"], "attacks": ["missing-feature@pretrain"]},
            UsageError,
            "missing-feature .*got @pretrain",
        ),
    ],
)
def test_what_cannot_be_mounted_is_refused_before_any_training(changed, error, message):
    with pytest.raises(error, match=message):
        engine.check(specs.read({"dataset": "toy", "attacks": ["backdoor"], **changed}))


def test_all_leaves_them_out_unless_they_are_named():
    found, reasons = engine.expand_attacks(specs.read({"dataset": "toy", "attacks": ["noisy-sample", "all"]}))
    assert found.attacks[0].name == "noisy-sample"
    for name in ("backdoor", "missing-feature"):
        assert reasons[name].startswith("acts in training, and was not asked for")
    assert "noisy-sample" not in reasons


def test_a_trained_federation_cannot_be_attacked_in_training_any_more():
    trained = vflsec.train(dataset="toy", data={"options": {"rows": 300}}, train={"epochs": 1})
    with pytest.raises(UsageError, match=r"'noisy-sample' acts in training.*vflsec\.evaluate"):
        vflsec.attack(trained, "noisy-sample", n_aux=20)
