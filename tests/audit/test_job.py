"""``vflsec audit``: what was trained elsewhere is attacked as if vflsec had trained it."""

import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from operator import sub
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from sklearn.metrics import roc_auc_score
from torch import nn

from vflsec.audit import job
from vflsec.audit.evaluation import reset
from vflsec.audit.foreign import LastColumns, build_federation, convert_messages
from vflsec.audit.recorder import Recorder
from vflsec.base.errors import DataError, InsufficientView, MisfitError, StoreError, UsageError
from vflsec.cli import cli as command
from vflsec.core.message import Kind
from vflsec.report.report import Report
from vflsec.results.analysis.intervals import SeedValue, get_headline, make_interval, measure
from vflsec.results.records.schema import Block
from vflsec.run.job import Job
from vflsec.run.spec import AttackSpec, AuxSpec
from vflsec.run.store import Store

pytestmark = pytest.mark.usefixtures("few_trees_in_module")  # the subject is not how well trees guess

ROOT = Path(__file__).parents[2]
FAST = ("spectral-embedding", "direction", "norm")


def specs(*names):
    return [AttackSpec(name=name) for name in names]


def prepare(trained, what, *names, **options):
    if what != "transcript":
        options = {"train_ids": trained.folder / "train.txt", **options}
    data = str(trained.folder / options.pop("data", "mine.toml"))
    options.setdefault("aux", AuxSpec(n=20, folds=0))
    return job.prepare_audit(trained.folder / what, data, attacks=specs(*names), **options)


def run(audit, folder):
    store = Store(folder)
    with store.lock():
        found = list(Job(store.folder, [audit]).run(Job(store.folder, [audit]).plan()))
    return found, Report.read(folder).summary


def cli(*words):
    return CliRunner().invoke(command, ["audit", *map(str, words)], catch_exceptions=False)


WEIGHTS = {"model": "build", "encoded": True}


def doors(trained):
    """Return the arguments of each door that shows the bottom model on all rows."""
    factory = f"{trained.folder / 'factory.py'}:build"
    return {
        "transcript": {},
        "bottom.safetensors": {"model": factory, "encoded": True},
        "embeddings.csv": {},
        "embeddings.parquet": {},
    }


def test_gradients_reveal_every_label(trained, tmp_path):
    _, summary = run(prepare(trained, "transcript", *FAST, draws=2), tmp_path / "out")
    by_name = {point.attack: point for point in summary.points}
    assert by_name["direction"].leak.mean == 1.0
    assert by_name["direction"].leak.rows == "train"
    assert by_name["direction"].leak.alone < 0.9
    (worst,) = summary.worst
    assert worst.leak.mean == 1.0
    assert summary.audited == "transcript"


@pytest.mark.sampled
@pytest.mark.parametrize("what", ["bottom.safetensors", "embeddings.csv", "embeddings.parquet"])
def test_doors_with_the_same_embeddings_agree(trained, tmp_path, what):
    expected, found = (
        run(prepare(trained, door, "spectral-embedding", draws=2, **doors(trained)[door]), tmp_path / door)[1]
        for door in ("transcript", what)
    )
    for one, other in zip(expected.points, found.points, strict=True):
        for split in ("leak", "leak_train"):
            assert getattr(one, split).mean == pytest.approx(getattr(other, split).mean, abs=2e-3)


@pytest.mark.long
def test_onnx_agrees(trained, tmp_path):
    pytest.importorskip("onnxruntime")
    export(trained.bottom, trained.folder / "bottom.onnx")
    expected, found = (
        run(prepare(trained, door, "spectral-embedding", draws=2, **options), tmp_path / door)[1].points[0]
        for door, options in (("transcript", {}), ("bottom.onnx", {"encoded": True}))
    )
    assert expected.leak.mean == pytest.approx(found.leak.mean, abs=2e-3)


def export(bottom, path, *, rows=None):
    """Write a model of Linear and ReLU layers as ONNX."""
    from onnx import TensorProto, helper, numpy_helper

    nodes, weights, last = [], [], "x"
    for k, layer in enumerate(bottom):
        if isinstance(layer, nn.Linear):
            weights += [numpy_helper.from_array(layer.weight.detach().numpy(), f"w{k}")]
            weights += [numpy_helper.from_array(layer.bias.detach().numpy(), f"b{k}")]
            nodes.append(helper.make_node("Gemm", [last, f"w{k}", f"b{k}"], [f"h{k}"], transB=1))
        else:
            nodes.append(helper.make_node("Relu", [last], [f"h{k}"]))
        last = f"h{k}"
    width = bottom[0].in_features
    graph = helper.make_graph(
        nodes,
        "bottom",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, width])],
        [helper.make_tensor_value_info(last, TensorProto.FLOAT, [rows, 4])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path.write_bytes(model.SerializeToString())


def test_onnx_with_a_fixed_batch_size_gives_every_row(trained):
    pytest.importorskip("onnxruntime")
    from vflsec.audit.opening import run_onnx

    path = trained.folder / "fixed.onnx"
    export(trained.bottom, path, rows=64)
    found = run_onnx(path, path.read_bytes(), trained.other.astype(np.float32))
    assert np.allclose(found, trained.embeddings.numpy(), atol=1e-5)


def test_messages_are_those_of_the_training(trained):
    """Each embedding of the last phase is the model's own; each gradient is about the rows that it names."""
    audit = prepare(trained, "transcript", "norm")
    found = list(convert_messages(audit.data, audit.subject.messages))
    last = [one for one in found if one.phase == "predict"]
    by_id = pd.DataFrame(trained.embeddings.numpy(), index=trained.ids)
    for one in last:
        ids = audit.data.ids[one.split][one.rows.numpy()]
        assert np.allclose(one.payload["value"].numpy(), by_id.loc[ids], atol=1e-6)
    gradients = [one for one in found if one.kind is Kind.GRADIENT]
    assert len(gradients) == 12 * math.ceil(450 / 64)
    assert {one.split for one in gradients} == {"train"}


def test_rows_of_training_are_never_test_rows(trained):
    audit = prepare(trained, "transcript", "norm")
    known = set((trained.folder / "train.txt").read_text().split("\n"))
    assert set(audit.data.ids["train"]) == known
    assert not known & set(audit.data.ids["test"])
    with pytest.raises(UsageError, match="in both"):
        prepare(trained, "embeddings.csv", "mc", test_ids=trained.folder / "train.txt")


@pytest.mark.long
def test_test_ids_alone_make_all_others_training_rows(trained):
    by_test = prepare(trained, "embeddings.csv", "mc", train_ids=None, test_ids=trained.folder / "test.txt")
    by_train = prepare(trained, "embeddings.csv", "mc")
    for split in ("train", "test"):
        assert list(by_test.data.ids[split]) == list(by_train.data.ids[split])


def test_it_asks_which_rows_were_trained_on(trained):
    with pytest.raises(UsageError, match="--train-ids"):
        prepare(trained, "embeddings.csv", "mc", train_ids=None)


@pytest.mark.long
def test_it_resumes_and_reports_elsewhere(trained, tmp_path):
    audit = prepare(trained, "embeddings.csv", "spectral-embedding", draws=2)
    first, summary = run(audit, tmp_path / "out")
    assert len(first) == len([*audit.trials(), *audit.baselines()])
    again, _ = run(audit, tmp_path / "out")
    assert again == []
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    copied = Report.read(tmp_path / "copy").summary
    assert msgspec.structs.replace(copied, out="") == msgspec.structs.replace(summary, out="")


@pytest.mark.long
def test_results_of_another_audit_are_refused_and_kept(trained, tmp_path):
    words = ["--data", trained.folder / "mine.toml", "--train-ids", trained.folder / "train.txt", "--draws", 1]
    words += ["--attack", "spectral-embedding", "--set", "aux.n=20", "--set", "aux.folds=0", "--out", tmp_path / "out"]
    limited = cli(trained.folder / "embeddings.csv", *words, "--max-leak", "worst=0.01")
    assert limited.exit_code == 1
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.json*")}
    refused = cli(trained.folder / "embeddings.parquet", *words)
    assert refused.exit_code == 2
    assert "embeddings.csv (other content)" in refused.stderr
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.json*")} == before
    assert cli(trained.folder / "embeddings.csv", *words).exit_code == 1
    assert cli(trained.folder / "embeddings.parquet", *words, "--fresh").exit_code == 0, "without the limit"


def test_a_folder_belongs_to_one_system_party_data_and_kind(trained, tmp_path):
    audit = prepare(trained, "embeddings.csv", "spectral-embedding", draws=1)
    run(audit, tmp_path / "out")
    same, replaced = audit.manifest, msgspec.structs.replace
    store = Store(tmp_path / "out")
    store.expect_same(replaced(same, seeds=3, attacks=[], audited="moved.csv"))
    sources = {"dataset": {"other.toml": ["hash"]}}
    for changes, text in (
        ({"settings": same.settings | {"party": "passive_2"}}, "another party"),
        ({"settings": same.settings | {"train_rows": 1}}, "other rows"),
        ({"provenance": replaced(same.provenance, sources=sources)}, "other data"),
        ({"audited": ""}, "an audit"),
    ):
        with pytest.raises(StoreError, match=text):
            store.expect_same(replaced(same, **changes))


def test_an_evaluation_goes_on_after_its_data_were_edited_or_moved(trained, tmp_path):
    old = msgspec.structs.replace(prepare(trained, "embeddings.csv", "spectral-embedding").manifest, audited="")
    store = Store(tmp_path)
    store.write_settings("", old)

    def read_from(name, content):
        sources = {"dataset": {name: content}}
        return msgspec.structs.replace(old, provenance=msgspec.structs.replace(old.provenance, sources=sources))

    ((name, content),) = old.provenance.sources["dataset"].items()
    store.expect_same(read_from(name, ["edited"]))
    store.expect_same(read_from("moved.toml", content))
    with pytest.raises(StoreError, match="other data"):
        store.expect_same(read_from("other.toml", ["other"]))


def test_files_that_differ_in_their_suffix_have_results_of_their_own():
    assert job.name_folder(Path("a/bottom.onnx")) == Path("runs/audit-bottom.onnx")
    assert job.name_folder(Path("a/bottom.safetensors")) == Path("runs/audit-bottom.safetensors")
    assert job.name_folder(Path()).name == f"audit-{Path.cwd().name}"


def test_it_asks_for_the_data(trained):
    with pytest.raises(UsageError, match=r"add --data FILE\.toml"):
        job.prepare_audit(trained.folder / "transcript")


@pytest.mark.long
def test_it_states_what_was_not_run_and_why(trained, tmp_path):
    _, summary = run(prepare(trained, "embeddings.csv", "spectral-embedding", draws=1), tmp_path / "out")
    assert "record a transcript" in summary.left_out["direction"]
    assert "mc" in summary.not_run
    audit = prepare(trained, "transcript", draws=1)
    assert not set(audit.mountable) & set(audit.exclusions)
    assert {"direction", "mc", "fusion", "cluster"} <= set(audit.mountable)
    assert [spec.name for spec in audit.attacks] == list(audit.mountable)


def test_an_attack_by_name_must_be_possible(trained):
    with pytest.raises(InsufficientView, match="record a transcript"):
        prepare(trained, "embeddings.csv", "direction")


def test_direct_is_left_out_where_gradients_are_not_of_logits(trained):
    assert "these have 4 entries" in prepare(trained, "transcript").exclusions["direct"]


@pytest.mark.long
def test_embeddings_without_information_have_no_advantage(trained, tmp_path):
    noise = pd.DataFrame(np.random.default_rng(0).normal(size=(700, 4)), index=trained.ids)
    noise.set_axis([f"e_{k}" for k in range(4)], axis=1).to_csv(trained.folder / "noise.csv")
    _, summary = run(
        prepare(trained, "noise.csv", "mc", "spectral-embedding", draws=3, allow_misfit=True), tmp_path / "out"
    )
    (worst,) = summary.worst
    assert worst.leak.advantage_ci95[0] <= 0.0


@pytest.mark.long
def test_gates_and_exit_codes(trained, tmp_path):
    words = ["transcript", "--data", trained.folder / "mine.toml", "--attack", "direction", "--draws", 1]
    words = [trained.folder / words[0], *words[1:], "--set", "aux.n=20", "--set", "aux.folds=0", "--format", "json"]
    failed = cli(*words, "--out", tmp_path / "a", "--max-leak", "worst=0.9")
    assert failed.exit_code == 1, failed.output
    found = json.loads(failed.stdout)
    assert found["gates"][0]["holds"] is False
    assert found["left_out"]
    assert cli(*words, "--out", tmp_path / "a").exit_code == 1, "the limits of the folder still fail"
    assert cli(*words, "--out", tmp_path / "a", "--max-leak", "mc=0.9").exit_code == 2
    for limit, code in ((0.001, 1), (0.9, 0)):
        assert cli(*words, "--out", tmp_path / "a", "--max-undetected", limit).exit_code == code


@pytest.mark.long
def test_the_table_names_the_system(trained, tmp_path):
    audit = prepare(trained, "transcript", "direction", draws=2)
    run(audit, tmp_path / "out")
    text = Report.read(tmp_path / "out").table(80)
    assert "2 draws, ± 95 % over draws and rows" in text
    assert "utility" not in text
    assert all(len(line) <= 80 for line in text.splitlines())


@pytest.mark.long
def test_given_auxiliary_rows_are_the_known_ones(trained, tmp_path):
    train = (trained.folder / "train.txt").read_text().split("\n")
    (tmp_path / "aux.txt").write_text("\n".join(train[:30]))
    audit = prepare(trained, "embeddings.csv", "mc", aux_ids=tmp_path / "aux.txt")
    assert audit.draws == 1
    assert audit.aux.n == 30
    from vflsec.run.plan import resolve

    view = audit.build_question(
        resolve(AttackSpec(name="mc")).make(), build_federation(audit.data, audit.subject, 0)
    ).view
    assert set(audit.data.ids["train"][view.aux_rows.numpy()]) == set(train[:30])
    (tmp_path / "one.txt").write_text(next(i for i, y in zip(trained.ids, trained.y, strict=True) if i in train and y))
    with pytest.raises(UsageError, match="every class"):
        prepare(trained, "embeddings.csv", "mc", aux_ids=tmp_path / "one.txt")
    with pytest.raises(UsageError, match="training rows"):
        prepare(trained, "embeddings.csv", "mc", aux_ids=trained.folder / "test.txt")


class TestFiles:
    """A file is judged by its content, and each fault is one line."""

    def test_a_pickle_is_refused_whatever_its_name(self, trained, tmp_path):
        for name in ("bottom.pt", "x.safetensors", "x.csv", "x.onnx", "x.parquet", "x.bin"):
            shutil.copy(trained.folder / "bottom.pt", tmp_path / name)
            with pytest.raises((DataError, UsageError), match="pickle.*save_file"):
                job.prepare_audit(tmp_path / name, str(trained.folder / "mine.toml"), model="factory.py:build")

    def test_surplus_tensors_are_named(self, trained):
        state = load_file(trained.folder / "bottom.safetensors")
        state |= {"top.weight": torch.zeros(2, 9), "exp_avg.0.weight": torch.zeros(16, 6)}
        save_file(state, trained.folder / "more.safetensors")
        notes = " ".join(
            prepare(trained, "more.safetensors", "mc", **doors(trained)["bottom.safetensors"]).subject.notes
        )
        assert "top.weight (2, 9)" in notes
        assert "state of an optimizer, exp_avg.0.weight" in notes

    def test_surplus_columns_are_named(self, trained):
        table = pd.read_csv(trained.folder / "embeddings.csv").assign(label=1, age=2)
        table.to_csv(trained.folder / "more.csv", index=False)
        notes = " ".join(prepare(trained, "more.csv", "mc").subject.notes)
        assert "also holds label, age" in notes

    @pytest.mark.parametrize(
        ("function", "message"), [("wider", "weight of shape"), ("number", "torch.nn.Module"), ("absent", "found none")]
    )
    def test_a_factory_of_another_model(self, trained, function, message):
        save_file(nn.Linear(6, 4).state_dict(), trained.folder / "small.safetensors")
        with pytest.raises((DataError, UsageError), match=message):
            prepare(
                trained, "small.safetensors", "mc", model=f"{trained.folder / 'factory.py'}:{function}", encoded=True
            )

    def test_weights_need_their_factory(self, trained):
        with pytest.raises(UsageError, match="--model"):
            prepare(trained, "bottom.safetensors", "mc")

    def test_encoded_columns_must_be_numbers(self, trained):
        frame = pd.read_csv(trained.folder / "bureau.csv").assign(city=lambda t: np.where(t.index % 2, "Bern", "Basel"))
        frame.to_csv(trained.folder / "city.csv", index=False)
        text = trained.folder.joinpath("mine.toml").read_text().replace("bureau.csv", "city.csv")
        trained.folder.joinpath("city.toml").write_text(f'{text}categorical = ["city"]\n')
        with pytest.raises(UsageError, match="text in city"):
            prepare(trained, "bottom.safetensors", "mc", data="city.toml", **doors(trained)["bottom.safetensors"])

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("id,e_0\na,1\na,2\n", "row 2: expected each id once"),
            ("id,e_0\na,1\nb,inf\n", "row 2: expected finite"),
            ("id,e_0\na,1\nb,x\n", "row 2: expected finite"),
            ("id,e_0,e_2\na,1,2\n", "expected columns id, e_0, e_1"),
            ("e_0\n1\n", "expected columns id"),
            ("id,e_0\n,1\nb,2\n", "row 1: expected an id"),
            ("id,e_0\na,1\nb,1\n", "expected embeddings that differ"),
            ("", "cannot be read as CSV"),
            ("id,e_0\na,1\nb\x00c,2\n", "null character"),
            ('id,e_0\n"a', "CSV"),
        ],
    )
    def test_a_damaged_table(self, trained, tmp_path, content, message):
        (tmp_path / "t.csv").write_text(content)
        with pytest.raises(DataError, match=message):
            job.prepare_audit(tmp_path / "t.csv", str(trained.folder / "mine.toml"))

    def test_every_row_needs_its_embedding(self, trained):
        pd.read_csv(trained.folder / "embeddings.csv").iloc[2:].to_csv(trained.folder / "some.csv", index=False)
        with pytest.raises(UsageError, match=f"found none of '{min(trained.ids[:2])}', .* add them"):
            prepare(trained, "some.csv", "mc")

    def test_other_ids_are_named(self, trained, tmp_path):
        (tmp_path / "ids.txt").write_text("1\n2\n3\n")
        with pytest.raises(UsageError, match="none of 3 ids.*'1'.*'person"):
            prepare(trained, "embeddings.csv", "mc", train_ids=tmp_path / "ids.txt")

    def test_few_given_ids_of_the_data_are_a_misfit(self, trained, tmp_path):
        ids = (trained.folder / "train.txt").read_text().splitlines()
        (tmp_path / "ids.txt").write_text("\n".join([*ids[:10], *(f"x{i}" for i in range(290))]))
        with pytest.raises(MisfitError, match="--train-ids, found 10 of 300"):
            prepare(trained, "embeddings.csv", "mc", train_ids=tmp_path / "ids.txt")

    @pytest.mark.parametrize("what", ["embeddings.csv", "bottom.safetensors", "transcript"])
    def test_another_party_is_one_line(self, trained, what):
        with pytest.raises(UsageError, match="unknown --party 'bureu'"):
            prepare(trained, what, "mc", party="bureu", **doors(trained).get(what, {}))

    def test_nothing_and_something_else(self, trained, tmp_path):
        (tmp_path / "x.weights").write_text("x")
        for what in ("absent", "x.weights", "."):
            with pytest.raises(UsageError, match="expected a transcript"):
                job.prepare_audit(tmp_path / what, str(trained.folder / "mine.toml"))

    def test_weights_that_are_not_finite(self, trained):
        state = load_file(trained.folder / "bottom.safetensors")
        state["0.bias"][2] = math.nan
        save_file(state, trained.folder / "nan.safetensors")
        with pytest.raises(DataError, match=r"others in 0\.bias"):
            prepare(trained, "nan.safetensors", "mc", **doors(trained)["bottom.safetensors"])


class Plain(nn.Module):
    """A layer without ``reset_parameters``."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5))

    def forward(self, x):
        return x @ self.weight.T


def test_a_baseline_keeps_no_trained_weight():
    model = nn.Sequential(Plain(), nn.Linear(3, 2))
    fresh = reset(model, 1)
    for own, trained in zip(fresh.parameters(), model.parameters(), strict=True):
        assert not torch.equal(own, trained)
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), reset(model, 1).parameters(), strict=True))


def test_standardized_columns_come_back():
    values = torch.randn(50, 4) * 30 + 7
    mean, scale = values.mean(dim=0), values.std(dim=0)
    joined = torch.cat([torch.randn(50, 3), (values - mean) / scale], dim=1)
    assert torch.allclose(LastColumns(mean, scale)(joined), values, atol=1e-4)


@pytest.mark.statistical
def test_the_interval_over_draws_and_rows_has_its_coverage():
    """The truth is the mean over all draws and all rows; each draw is scored on the same rows."""
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(2000):
        rows, draws = rng.normal(scale=0.02), rng.normal(scale=0.02, size=5)
        found = make_interval([SeedValue(one, 0.02**2, 100) for one in 0.7 + rows + draws], 5, single_model=True)
        held += found["ci95"][0] <= 0.7 <= found["ci95"][1]
    assert 0.94 <= held / 2000 <= 0.99


def block(value, below, above):
    return Block(metrics={"auc": value}, ci95_rows=(value - below, value + above), chance=0.5, n=10)


def test_one_draw_has_the_interval_over_rows():
    found = make_interval([get_headline(block(0.7, 0.05, 0.04))], 1, single_model=True)
    assert (found["ci95"], found["interval"]) == (pytest.approx((0.65, 0.74)), "rows")


def test_errors_of_a_difference_add_in_quadrature():
    difference = measure(sub, block(0.8, 0.03, 0.03), block(0.7, 0.04, 0.04))
    assert make_interval([difference], 1)["ci95"] == pytest.approx((0.1 - 0.05, 0.1 + 0.05))


def test_the_job_of_the_page_runs_a_command_that_exists():
    yaml = pytest.importorskip("yaml")
    page = (ROOT / "docs" / "audit_a_trained_model.md").read_text(encoding="utf-8")
    job = yaml.safe_load(re.search(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[1])
    commands = [step["run"] for step in job["jobs"]["audit"]["steps"] if "vflsec audit" in step.get("run", "")]
    (words,) = map(shlex.split, commands)
    context = command.get_command(None, "audit").make_context("audit", words[2:])
    assert context.params["max_leak"] == ("worst=0.8",)
    assert any(step.get("if") == "always()" for step in job["jobs"]["audit"]["steps"])


@pytest.mark.long
def test_the_page_works_as_written(tmp_path, monkeypatch):
    """The commands of docs/audit_a_trained_model.md run, with two draws; all doors give the same guess."""
    pytest.importorskip("onnxruntime")
    page = (ROOT / "docs" / "audit_a_trained_model.md").read_text(encoding="utf-8")
    blocks = dict.fromkeys(("python", "toml", "bash"))
    for kind in blocks:
        blocks[kind] = re.findall(rf"^```{kind}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    for code in blocks["python"]:
        (tmp_path / code.split("\n")[0].removeprefix("# ")).write_text(code)
    (tmp_path / "mine.toml").write_text(blocks["toml"][0])
    found = {}
    monkeypatch.chdir(tmp_path)
    for line in blocks["bash"][0].splitlines():
        program, *words = shlex.split(line)
        if program == "python":
            done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
        else:
            assert (program, words[0]) == ("vflsec", "audit")
            done = cli(*words[1:], "--draws", 2, "--set", "aux.folds=0", "--format", "json")
            assert done.exit_code == 0, done.stderr
            points = json.loads(done.stdout)["points"]
            found[words[1]] = {point["attack"]: point["leak"]["mean"] for point in points}
    assert len(found) == 4
    assert found["transcript"]["direction"] == pytest.approx(1.0)
    guesses = [by_attack["mc"] for by_attack in found.values()]
    assert max(guesses) - min(guesses) < 0.01


@pytest.mark.long
def test_received_predictions_leak_what_the_joint_model_knows(trained, tmp_path):
    rng = np.random.default_rng(0)
    score = (trained.y - 0.5 + rng.normal(size=len(trained.y))).astype(np.float32)
    logits = torch.tensor(np.stack([-score, score], axis=1))
    test = slice(450, None)
    with Recorder(tmp_path / "t", parties={"bank": "active", "bureau": "passive"}, observer="bureau") as recorder:
        recorder.cut(trained.embeddings[:450], rows=trained.ids[:450].to_numpy())
        recorder.prediction(logits[test], rows=trained.ids[test].to_numpy(), receiver="bureau")
    audit = job.prepare_audit(tmp_path / "t", str(trained.folder / "mine.toml"), draws=1, attacks=specs("prediction"))
    _, summary = run(audit, tmp_path / "out")
    (point,) = summary.points
    assert point.leak.rows == "test"
    assert point.leak.mean == pytest.approx(roc_auc_score(trained.y[450:], score[450:]))
    without = prepare(trained, "transcript")
    assert "prediction" in without.exclusions


@pytest.mark.long
@pytest.mark.usefixtures("few_trees")
def test_a_table_of_predictions_is_attacked_beside_any_material(trained, tmp_path):
    table = pd.DataFrame({"id": trained.ids, "p_0": 1.0 - trained.y, "p_1": trained.y.astype(float)})
    table.to_csv(tmp_path / "predictions.csv", index=False)
    audit = prepare(
        trained, "embeddings.csv", "prediction", "fusion", predictions=tmp_path / "predictions.csv", draws=1
    )
    _, summary = run(audit, tmp_path / "out")
    assert {point.attack: point.leak.mean for point in summary.points}["prediction"] == 1.0
    assert summary.worst[0].leak.mean == pytest.approx(1.0)
    assert summary.worst[0].leak.alone < 0.95
    assert audit.subject.fingerprint != prepare(trained, "embeddings.csv").subject.fingerprint
    (tmp_path / "predictions.csv").write_text("id,e_0\na,1\n")
    with pytest.raises(DataError, match="expected columns id, p_0, p_1"):
        prepare(trained, "embeddings.csv", predictions=tmp_path / "predictions.csv")
