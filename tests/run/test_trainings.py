"""Several trainings on the same rows: what an adversary infers from all of them, and the epsilon that they spend."""

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from games import gaussian
from sklearn.metrics import roc_auc_score

import vflsec
from vflsec.base.seeds import make_rng
from vflsec.cli import cli
from vflsec.core.message import Kind, Message, ReleaseCount
from vflsec.core.method import Trained
from vflsec.core.view import Guess, View
from vflsec.defenses.gaussian_dp import GaussianDP
from vflsec.defenses.label_dp import LabelDP
from vflsec.inference.several_trainings import join_views, pool_guesses, sum_margins, weigh_trainings
from vflsec.report.sweep import SweepReport
from vflsec.results.analysis.trainings import add_up, find_spending, note_spending
from vflsec.results.records.folder import read_manifest, read_records
from vflsec.run import engine
from vflsec.run import spec as specs
from vflsec.run.cell import make_key, repeat_training
from vflsec.run.federation import build_federation, build_method
from vflsec.run.plan import build_cell, resolve
from vflsec.run.score import compute_spending
from vflsec.run.store import Store

pytestmark = pytest.mark.usefixtures("few_trees_in_module")  # the subject is not how well trees guess

ROWS = 600
TOY = {
    "dataset": "toy", "data": {"options": {"rows": ROWS, "signal": "none"}}, "train": {"epochs": 4, "batch": 64},
    "aux": {"n": 40, "folds": 0}, "seeds": 1,
}  # fmt: skip
WORDS = ["eval", "--dataset", "toy", "--set", "data.options.signal=none", "--set", f"data.options.rows={ROWS}",
         "--set", "train.epochs=4", "--set", "train.batch=64", "--set", "aux.n=40", "--set", "aux.folds=0",
         "--seeds", "1", "--jobs", "1", "--format", "json"]  # fmt: skip


def run(*words):
    return CliRunner().invoke(cli, [*WORDS, *map(str, words)])


def cells(trainings, *defenses, method="fedsplitnn", **settings):
    spec = specs.read({**TOY, "methods": [method], "fixed": list(defenses), **settings})
    return repeat_training(build_cell(spec, method, seed=0), trainings)


def leaks(points):
    (point,) = [p for p in points if p["attack"] == "direction"]
    return point["leak_train"]["mean"]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """One command with K = 1, 2 and 5, with fresh draws and with a fixed one."""
    found = {}
    for text in ("label-dp:epsilon=1", "label-dp:epsilon=1,fixed=true"):
        out = tmp_path_factory.mktemp("swept")
        result = run("--attack", "direction,norm", "--with", text, "--trainings", "1,2,5", "--out", out)
        assert result.exit_code == 0, result.output
        found[text] = json.loads(result.stdout), out
    return found


def votes(trainings, epsilon=1.0):
    """The AUC of the number of ones among independent answers about labels 0 and 1, exactly."""
    kept = np.exp(epsilon) / (1 + np.exp(epsilon))
    counts = np.array([1.0])
    for _ in range(trainings):
        counts = np.convolve(counts, [1 - kept, kept])
    ones, zeros = counts, counts[::-1]
    return sum(p * (zeros[:k].sum() + zeros[k] / 2) for k, p in enumerate(ones))


def test_fresh_draws_add_up_and_leak_as_independent_votes_do(swept):
    found, _ = swept["label-dp:epsilon=1"]
    summaries = [point["summary"]["points"] for point in found["points"]]
    for trainings, points in zip((1, 2, 5), summaries, strict=True):
        assert {p["trainings"] for p in points} == {trainings}
        (epsilon,) = {one["epsilon"] for p in points for one in p["spent"]}
        assert epsilon == trainings
        assert leaks(points) == pytest.approx(votes(trainings), abs=0.05)


def test_a_fixed_draw_spends_once_and_several_trainings_leak_no_more(swept):
    found, _ = swept["label-dp:epsilon=1,fixed=true"]
    summaries = [point["summary"]["points"] for point in found["points"]]
    assert {one["epsilon"] for points in summaries for p in points for one in p["spent"]} == {1.0}
    assert (
        max(map(leaks, summaries))
        < votes(1) + 0.05
        < leaks(swept["label-dp:epsilon=1"][0]["points"][2]["summary"]["points"])
    )


@pytest.mark.long
def test_the_first_training_is_the_plain_one(swept, tmp_path):
    _, out = swept["label-dp:epsilon=1"]
    assert run("--attack", "direction,norm", "--with", "label-dp:epsilon=1", "--out", tmp_path).exit_code == 0
    plain, shared = read_records(tmp_path), read_records(out)
    assert plain.keys() <= shared.keys()
    for key, record in plain.items():
        other = shared[key]
        assert (record.leak, getattr(record, "utility", None)) == (other.leak, getattr(other, "utility", None))
    assert len([r for r in shared.values() if hasattr(r, "cell")]) == 3 * len(
        [r for r in plain.values() if hasattr(r, "cell")]
    )


def test_a_second_run_computes_nothing_and_a_smaller_one_starts_from_it(swept):
    _, out = swept["label-dp:epsilon=1"]
    before = (out / "records.jsonl").read_bytes()
    result = run("--attack", "direction,norm", "--with", "label-dp:epsilon=1", "--trainings", "1,2,5", "--out", out)
    assert "0 results to compute" in result.stderr
    assert (out / "records.jsonl").read_bytes() == before


def test_trainings_share_rows_and_labels_and_nothing_else():
    first, second = cells(2)
    assert first.key == cells(1)[0].key != second.key
    assert first.data_key == second.data_key
    one, other = (build_federation(cell, "cpu") for cell in (first, second))
    assert torch.equal(one.active.labels["train"], other.active.labels["train"])
    assert one.seed != other.seed
    attack = resolve(specs.parse_attack("mc"))
    aux = specs.AuxSpec()
    assert make_key(first, attack, "passive_1", aux) == make_key(first, attack, "passive_1", aux, 1)
    assert len({make_key(first, attack, "passive_1", aux, k) for k in (1, 2, 5)}) == 3


def answers(cell):
    federation = build_federation(cell, "cpu")
    own = federation.active
    rng = federation.get_label_stream("train")
    return own.defenses.training_targets(own.labels["train"], own.features["train"], n_classes=2, rng=rng)[0]


def test_fixed_answers_depend_on_data_and_strength_but_not_on_the_training():
    def flips(*texts, training=0, **settings):
        cell = cells(training + 1, *texts, **settings)[training]
        return (answers(cell) != build_federation(cell, "cpu").active.labels["train"]).double()

    fixed = flips("label-dp:epsilon=1,fixed=true")
    assert torch.equal(fixed, flips("label-dp:epsilon=1,fixed=true", training=3))
    assert torch.equal(fixed, flips("label-dp:epsilon=1,fixed=true", method="secureboost"))
    others = [
        flips("label-dp:epsilon=1", training=1),
        flips("label-dp:epsilon=0.9,fixed=true"),  # were the draws the same, it would show which answers are true
        flips("label-dp:epsilon=1,fixed=true", data={**TOY["data"], "test": 0.31}),
    ]
    for other in others:
        n = min(len(other), len(fixed))
        assert abs(np.corrcoef(fixed[:n], other[:n])[0, 1]) < 4 / n**0.5


@pytest.mark.parametrize(
    ("text", "trainings", "expected"),
    [
        *(("label-dp:epsilon=2", k, 2.0 * k) for k in (1, 4, 16)),
        ("label-dp:epsilon=2,fixed=true", 16, 2.0),
        ("laplace-dp:strength=1", 5, 15.0),
        ("gaussian-dp:strength=20", 5, GaussianDP(20.0).privacy_spent(15)["epsilon"]),
    ],
)
def test_the_accountant_composes_over_trainings(text, trainings, expected):
    (cell,) = cells(1, text)
    federation, method = build_federation(cell, "cpu"), build_method(cell)
    method.build(federation)
    heard = [ReleaseCount("train", "active", "passive_1", Kind.GRADIENT, "train", 3, 300)]
    (found,) = compute_spending(Trained(method, federation, {}), heard, "passive_1", trainings)
    assert found["epsilon"] == pytest.approx(expected, rel=1e-6)
    assert GaussianDP(20.0).privacy_spent(15)["epsilon"] >= gaussian(20.0, 15, 1e-5)
    assert found.get("releases", 15) == 15


def noisy(labels, count, deviation, rng):
    truth = torch.nn.functional.one_hot(labels, int(labels.max()) + 1).double()
    return [deviation**-2 * (truth + deviation * torch.randn(truth.shape, generator=rng)) for _ in range(count)]


@pytest.mark.parametrize("classes", [2, 3])
def test_evidence_adds_up_as_log_odds_do_whatever_the_units(classes):
    """With Gaussian errors the sum of scores is the log posterior; other units of a training must not matter."""
    rng = make_rng(0, "trainings")
    labels = torch.arange(3000) % classes
    scores = noisy(labels, 4, 1.5, rng)
    other_units = [scores[0], 1e3 * scores[1] + 7, scores[2].float(), 1e-4 * scores[3]]

    def auc(x):
        return np.mean(
            [
                roc_auc_score(labels == c, np.asarray(x)[:, c] - np.delete(np.asarray(x), c, 1).max(axis=1))
                for c in range(classes)
            ]
        )

    assert auc(sum_margins(other_units)) == pytest.approx(auc(sum(scores)), abs=0.005)
    assert auc(sum_margins(other_units)) > max(map(auc, scores)) + 0.1


def test_a_training_that_tells_nothing_or_the_opposite_does_not_spoil_the_others():
    rng = make_rng(1, "trainings")
    labels = torch.arange(4000) % 2
    good, (noise,) = noisy(labels, 3, 1.5, rng), noisy(labels[torch.randperm(4000, generator=rng)], 1, 0.1, rng)
    wrong = noisy(1 - labels, 1, 1.5, rng)[0]

    def auc(x):
        return roc_auc_score(labels, x[:, 1] - x[:, 0])

    whole = auc(sum_margins(good))
    assert auc(sum_margins([*good, noise])) > whole - 0.01 > auc(sum(good) + 3 * noise)
    assert auc(sum_margins([*good, wrong])) > whole - 0.01
    wild = good[0].clone()
    wild[:40] = 1e12 * torch.randn(40, 2, generator=rng, dtype=torch.float64)
    assert auc(sum_margins([wild, *good[1:]])) > whole - 0.02


def test_without_agreement_all_trainings_weigh_the_same():
    z = torch.randn(5, 500, 2, generator=make_rng(2, "trainings"), dtype=torch.float64)
    assert torch.equal(weigh_trainings(z), torch.ones(5, dtype=torch.float64))
    assert torch.equal(weigh_trainings(z[:2]), torch.ones(2, dtype=torch.float64))


def test_columns_are_averaged_and_only_common_splits_are_guessed():
    first = Guess({"train": torch.ones(4, 3), "test": torch.ones(2, 3)}, converged=True, budget={"fits": 2})
    second = Guess({"train": 3 * torch.ones(4, 3)}, converged=False, budget={"fits": 3})
    found = pool_guesses([first, second], values=True)
    assert found.scores.keys() == {"train"}
    assert torch.equal(found.scores["train"], torch.full((4, 3), 2.0, dtype=torch.float64))
    assert (found.converged, found.budget) == (False, {"fits": 5})


@pytest.mark.sampled
@pytest.mark.usefixtures("few_trees")
@pytest.mark.parametrize(
    "attack", ["mc:epochs=20", "membership", pytest.param("attribute-fusion", marks=pytest.mark.long), "column-fusion"]
)
def test_every_target_combines_trainings(tmp_path, attack):
    adversary = "active" if attack == "membership" else "passive_1"
    data = {"options": {"rows": 300}}
    settings = {**TOY, "data": data, "train": {"epochs": 2}, "adversary": adversary, "jobs": 1, "progress": False}
    report = vflsec.evaluate(attack=attack, trainings=3, out=tmp_path, **settings)
    (point,) = report.points
    assert (point.trainings, point.leak.n, point.status in ("ok", "unconverged")) == (3, 1, True)


@pytest.mark.long
@pytest.mark.usefixtures("few_trees")
def test_a_model_of_all_sources_reads_those_of_all_trainings_at_once(tmp_path):
    settings = {**TOY, "fixed": ["label-dp:epsilon=1"], "jobs": 1, "progress": False}
    report = vflsec.evaluate(attack="fusion", trainings=4, out=tmp_path, **settings)
    (point,) = report.points
    assert votes(3) < point.leak_train.mean < votes(4) + 0.05


def test_views_side_by_side_keep_the_last_training_and_rename_the_others():
    features = {"train": torch.zeros(4, 2), "test": torch.zeros(2, 2)}

    def view(value):
        heard = [
            Message(kind, sender, receiver, 0, phase, {"value": torch.full((4, 2), value)}, torch.arange(4), "train")
            for kind, sender, receiver, phase in (
                (Kind.GRADIENT, "active", "passive_1", "train"),
                (Kind.EMBEDDING, "passive_1", "active", "train"),
                (Kind.EMBEDDING, "active", "passive_1", "predict"),
            )
        ]
        none = torch.zeros(0, dtype=torch.long)
        drawn = {"train": torch.full((4, 1), value)}  # states of words that each training draws anew
        return View("passive_1", "passive", 2, features, torch.nn.Identity(), none, none, tuple(heard), defended=drawn)

    found = join_views([view(1.0), view(2.0), view(3.0)])
    assert [(m.phase, float(m.payload["value"][0, 0])) for m in found.messages] == [
        ("train of training 1", 1.0), ("train of training 2", 2.0), ("train", 3.0), ("train", 3.0), ("predict", 3.0),
    ]  # fmt: skip
    assert found.models.keys() == {"own embedding of training 1", "own embedding of training 2"}
    torch.testing.assert_close(found.defended["train"], torch.tensor([[1.0, 2.0, 3.0]]).expand(4, 3))


def test_trainings_are_trained_together_and_resume(tmp_path):
    spec = specs.read({**TOY, "attacks": ["mc:epochs=5"], "trainings": 4})
    store = Store(tmp_path)
    todo = engine.plan(spec, store)
    (group,) = todo.groups
    assert [cell.training for cell in group.group] == [0, 1, 2, 3]
    work = engine.evaluate(todo, store)
    next(work)  # the four trainings
    work.close()
    assert not engine.plan(spec, store).groups
    *_, record = engine.evaluate(engine.plan(spec, store), store)
    assert record.leak


def test_the_note_adds_up_what_all_trainings_would_spend(swept, tmp_path):
    _, out = swept["label-dp:epsilon=1"]
    own = add_up(report.summary.spending for report in SweepReport.read(out).reports)
    assert list(own["label-dp"].values()) == [(5.0, 5)]  # five trainings, which all points share
    assert note_spending(own, []) == []  # they are in the column of epsilon
    report = vflsec.evaluate(
        attack="mc:epochs=5", defense="label-dp", epsilons=[1, 2], out=tmp_path, progress=False, jobs=1,
        **{**TOY, "seeds": 2, "train": {"epochs": 2}},
    )  # fmt: skip
    (note,) = [note for note in report.summary.notes if "together" in note]
    assert "would spend epsilon 6 together" in note
    points = report.points
    assert "without it have no bound" in note, "that of no defense"
    assert "no bound" not in note_spending(report.summary.spending, [p for p in points if p.strength])[0]
    spending = find_spending(read_manifest(tmp_path), read_records(tmp_path))
    assert sorted(spending["label-dp"].values()) == [(1.0, 1), (1.0, 1), (2.0, 1), (2.0, 1)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--attack", "direction", "--trainings", "0"], "expected trainings > 0, got 0"),
        (["--attack", "direction", "--trainings", "many"], "trainings"),
        (["--attack", "direction", "--trainings", "2", "--set", "trainings=1,2"], "trainings once"),
        (["--attack", "backdoor", "--trainings", "2"], "one training with backdoor, on integrity, got trainings = 2"),
    ],
)
def test_mistakes_are_one_line(words, said, tmp_path):
    result = run(*words, "--out", tmp_path)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.output
    assert not (tmp_path / "records.jsonl").exists()


def test_an_audit_is_of_one_training(tmp_path):
    result = CliRunner().invoke(cli, ["audit", str(tmp_path), "--trainings", "2"])
    assert result.exit_code == 2
    assert "--trainings" in result.output


def test_randomized_response_spends_once_for_each_draw():
    assert LabelDP(1.0).privacy_spent(3) == {"epsilon": 3.0, "delta": 0.0}
    assert LabelDP(1.0, fixed=True).privacy_spent(3) == {"epsilon": 1.0, "delta": 0.0}
    assert LabelDP(0.0, fixed=True).privacy_spent(3) is None
