"""A checkpoint of ``vflsec train`` is audited as ``vflsec eval`` would attack that seed, to the last digit."""

import errno
import hashlib
import json
import os
import shutil

import msgspec
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from vflsec.audit import checkpoint, job
from vflsec.base.errors import DataError, InsufficientView, StoreError, UsageError
from vflsec.cli import cli
from vflsec.inference.trees import guesses as module
from vflsec.results.records.folder import read_manifest, read_records
from vflsec.results.records.schema import seal, unseal
from vflsec.run.job import Job
from vflsec.run.spec import AttackSpec, parse_attack
from vflsec.run.store import Store, _Stored, lock_folder

SETTINGS = ["--dataset", "digits", "--set", "train.epochs=2", "--set", "data.n_labeled=200"]
ATTACKS = ("mc:epochs=5", "fusion", "averaging")


def run(*words):
    result = CliRunner().invoke(cli, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a checkpoint of seed 1 and its transcript."""
    folder = tmp_path_factory.mktemp("ckpt")
    run("train", *SETTINGS, "--defense", "iso:lambda=1", "--seed", 1, "--out", folder / "ck", "--record", folder / "tr")
    return folder


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory, few_trees_in_module):
    """Return the folder of the evaluation of two seeds."""
    folder = tmp_path_factory.mktemp("evaluated")
    run("eval", *SETTINGS, "--with", "iso:lambda=1", "--seeds", 2, "--jobs", 1, "--set", "aux.folds=0",
        "--attack", ",".join(ATTACKS), "--out", folder)  # fmt: skip
    return folder


def audited(folder, *attacks, messages=True, **options):
    audit = job.prepare_audit(
        folder / "ck",
        messages=folder / "tr" if messages else None,
        attacks=[parse_attack(text) for text in attacks],
        aux=options.pop("aux", None) or checkpoint.specs.AuxSpec(folds=0),
        draws=1,
        **options,
    )
    return audit


def leaks(folder, seed=0):
    """Return the leak of each attack and baseline by name, without its options."""
    manifest, records = read_manifest(folder), read_records(folder)
    found = {row.attack.partition(":")[0]: records[row.key].leak for row in manifest.rows if row.seed == seed}
    baselines = [one for one in manifest.baselines if one.seed == seed]
    return found | {f"alone {one.label.partition(':')[0]}": records[one.key].leak for one in baselines}


@pytest.mark.long
def test_it_equals_the_evaluation_of_its_seed(folder, evaluated, tmp_path):
    audit = audited(folder, *ATTACKS)
    store = Store(tmp_path / "out")
    with store.lock():
        list(Job(store.folder, [audit]).run(Job(store.folder, [audit]).plan()))
    found, expected = leaks(tmp_path / "out"), leaks(evaluated, seed=1)
    assert {"mc", "fusion", "averaging"} < set(found)
    assert found == expected


def test_without_its_messages_the_attacks_on_them_are_left_out(folder):
    audit = audited(folder, messages=False)
    assert "record a transcript" in audit.exclusions["averaging"]
    assert "mc" in audit.mountable


@pytest.mark.long
def test_the_way_out_names_the_side_and_the_messages(folder):
    for messages in (False, True):
        with pytest.raises(InsufficientView, match="choose --party active") as found:
            audited(folder, "attribute", messages=messages)
        assert ("--messages" in str(found.value)) is not messages
    with pytest.raises(InsufficientView, match="name it with --messages") as found:
        audited(folder, "attribute", messages=False, party="active")
    assert "--party" not in str(found.value)
    assert audited(folder, "attribute", party="active").attacks


def test_an_audit_trains_no_shadows(folder):
    with pytest.raises(InsufficientView, match="shadow federations.*vflsec eval"):
        audited(folder, "lira", messages=False, party="active")
    exclusions = audited(folder, messages=False, party="active").exclusions
    assert exclusions["lira"] == exclusions["rmia"]


def test_a_checkpoint_may_be_moved_and_has_no_raw_ids(folder, tmp_path):
    shutil.copytree(folder / "ck", tmp_path / "elsewhere")
    assert checkpoint.restore(tmp_path / "elsewhere").cell.seed == 1
    rows = json.loads((tmp_path / "elsewhere" / "rows.json").read_text())
    assert all(len(one) == 16 for one in rows["splits"]["train"])


@pytest.mark.parametrize("name", ["active.safetensors", "training.toml", "rows.json", "encoders.json", "cell.json"])
def test_every_change_is_noticed(folder, tmp_path, name):
    for k in range(4):
        copied = tmp_path / f"ck{k}"
        shutil.copytree(folder / "ck", copied)
        content = bytearray((copied / name).read_bytes())
        content[(k * 37 + 11) % len(content)] ^= 1
        (copied / name).write_bytes(content)
        with pytest.raises(StoreError):
            checkpoint.restore(copied)


def test_other_data_are_refused(folder):
    with pytest.raises(UsageError, match="use the files.*trained on"):
        checkpoint.restore(folder / "ck", "credit-default")


def test_a_transcript_of_another_training_is_refused(folder, tmp_path):
    run("train", *SETTINGS, "--seed", 2, "--record", tmp_path / "tr")
    with pytest.raises(UsageError, match="found other rows"):
        job.prepare_audit(folder / "ck", messages=tmp_path / "tr")


@pytest.mark.parametrize("damage", [lambda raw: raw[:300], lambda raw: b"\xff" * 7 + raw[7:], lambda raw: b""])
def test_models_that_were_sealed_after_they_were_damaged_are_refused(folder, tmp_path, damage):
    """The hashes in a checkpoint find accidents. Who recomputes them still gets one line, and no number."""
    moved = shutil.copytree(folder / "ck", tmp_path / "moved")
    path = moved / "active.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    restored = checkpoint.restore(folder / "ck")._replace(folder=moved)
    with pytest.raises(StoreError, match=r"active\.safetensors is damaged \(.*\)"):
        restored.load_trained(0)


def test_a_transcript_of_other_classes_is_refused(folder, tmp_path):
    other = shutil.copytree(folder / "tr", tmp_path / "tr")
    header = other / "transcript.toml"
    header.write_text(header.read_text().replace("classes = 10", "classes = 9"))
    with pytest.raises(UsageError, match="9 classes that tr states.*10"):
        list(checkpoint.list_messages(checkpoint.restore(folder / "ck"), other, "passive_1"))
    with pytest.raises(UsageError, match="9 classes that tr states.*10"):
        job.prepare_audit(other, "digits", party="passive_1", attacks=[AttackSpec(name="fusion")])


def test_nodes_of_trees_that_the_training_did_not_grow_are_refused(tmp_path):
    run("train", "--dataset", "toy", "--method", "secureboost:rounds=2,depth=2", "--out", tmp_path / "ck")
    run("train", "--dataset", "toy", "--method", "secureboost:rounds=3,depth=2", "--out", tmp_path / "other",
        "--record", tmp_path / "tr")  # fmt: skip
    with pytest.raises(UsageError, match="tree 2.*2 trees"):
        job.prepare_audit(tmp_path / "ck", messages=tmp_path / "tr", attacks=[AttackSpec(name="instance-space")])


@pytest.mark.parametrize("inside", ["tr", "ck", "tr/results"])
def test_results_do_not_go_into_what_is_audited(folder, inside):
    words = ["audit", folder / "ck", "--messages", folder / "tr", "--attack", "mc", "--out", folder / inside]
    result = CliRunner().invoke(cli, [str(word) for word in words])
    assert result.exit_code == 2
    assert f"is audited, got {folder / inside}" in " ".join(result.output.split())
    assert not (folder / "tr" / "results").exists()


def test_a_transcript_without_a_finished_file_is_refused(tmp_path):
    from_nothing = checkpoint.TranscriptHeader(observer="a", parties={"a": "active", "b": "passive"})
    checkpoint.TranscriptWriter(tmp_path / "tr", from_nothing)
    with pytest.raises(DataError, match=r"finished files in .*parts\.jsonl"):
        job.prepare_audit(tmp_path / "tr", "digits", party="b")


def test_options_that_a_checkpoint_states_are_refused(folder):
    with pytest.raises(UsageError, match="it states them"):
        job.prepare_audit(folder / "ck", encoded=True)
    with pytest.raises(UsageError, match="--messages with a checkpoint"):
        job.prepare_audit(folder / "tr", "mine.toml", messages=folder / "tr")


@pytest.mark.long
def test_the_command_audits_a_checkpoint(folder, evaluated, tmp_path):
    words = ["audit", folder / "ck", "--attack", ATTACKS[0], "--draws", 1, "--out", tmp_path / "o", "--format", "json"]
    found = json.loads(run(*words, "--set", "aux.folds=0").stdout)
    assert found["audited"] == "ck"
    assert found["points"][0]["leak"]["by_seed"]["0"] == leaks(evaluated, 1)["mc"]["test"].headline


@pytest.mark.sampled
@pytest.mark.parametrize("place", ["tr", "file", "file/below"])
def test_a_recording_is_of_one_training_in_a_folder_of_its_own(tmp_path, place):
    run("train", *SETTINGS, "--record", tmp_path / "tr")
    (tmp_path / "file").write_text("mine")
    before = {path.name: path.read_bytes() for path in (tmp_path / "tr").iterdir()}
    found = CliRunner().invoke(cli, list(map(str, ["train", *SETTINGS, "--seed", 3, "--record", tmp_path / place])))
    assert found.exit_code == 2
    assert found.stderr.splitlines()[-1].startswith(
        ("Error: expected a ", f"Error: cannot write to {tmp_path / place}")
    )
    assert {path.name: path.read_bytes() for path in (tmp_path / "tr").iterdir()} == before
    assert (tmp_path / "file").read_text() == "mine"


def test_a_recording_in_which_nothing_crosses_is_named(tmp_path):
    options = ["--method", "secureboost:rounds=2,alone=2", "--record", tmp_path / "tr"]
    found = run("train", "--dataset", "digits", "--set", "data.n_labeled=200", *options)
    assert (
        f"NOTE no party sent anything in training or prediction: the recording {tmp_path / 'tr'} is empty"
        in found.stderr
    )


@pytest.mark.long
@pytest.mark.usefixtures("few_trees")
def test_attacks_on_one_target_share_what_they_compute(tmp_path, monkeypatch):
    words = ["--dataset", "toy", "--set", "data.options.rows=300", "--method", "secureboost:rounds=1,leaf_rows=5"]
    run("train", *words, "--out", tmp_path / "ck", "--record", tmp_path / "tr")
    begun, guesses = [], module._guess
    monkeypatch.setattr(module, "_guess", lambda *args: begun.append(args) or guesses(*args))
    run("audit", tmp_path / "ck", "--messages", tmp_path / "tr", "--attack", "fusion,boosting-replay", "--draws", 1,
        "--set", "aux.n=20", "--set", "aux.folds=0", "--out", tmp_path / "o")  # fmt: skip
    assert len(begun) == 1


def sealed(folder, name, **changed):
    """Seal the files of a checkpoint anew, with the tensors of one party changed."""
    path = folder / f"{name}.safetensors"
    tensors = {**load_file(path), **changed}
    # Tensors may be maps of the file that is written.
    save_file({key: x.clone() for key, x in tensors.items() if x is not None}, path)
    stored = unseal((folder / "cell.json").read_bytes(), _Stored)
    models = {one: hashlib.sha256((folder / one).read_bytes()).hexdigest() for one in stored.models}
    (folder / "cell.json").write_bytes(seal(msgspec.structs.replace(stored, models=models)))


@pytest.fixture
def copied(folder, tmp_path):
    shutil.copytree(folder / "ck", tmp_path / "ck")
    return tmp_path / "ck"


def refused(*words):
    result = CliRunner().invoke(cli, [str(word) for word in words])
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


def test_models_without_a_tensor_or_with_another_or_of_another_type_are_refused(copied, tmp_path):
    whole = load_file(copied / "passive_1.safetensors")
    first = sorted(whole)[0]
    for changed, said in (
        ({first: None}, f"expected {first}"),
        (dict.fromkeys(whole), "expected "),
        ({"x.y": torch.ones(1)}, "expected no x.y"),
        ({first: whole[first].double()}, f"expected {first} as torch.float32, found torch.float64"),
    ):
        sealed(copied, "passive_1", **changed)
        told = refused("audit", copied, "--attack", "mc", "--draws", 1, "--set", "aux.folds=0", "--out", tmp_path / "o")
        assert f"passive_1.safetensors is damaged ({said}" in told
        sealed(copied, "passive_1", **{key: None for key in changed if key not in whole}, **whole)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("training.toml", "seed = 1", 'seed = "x"'),
        ("training.toml", "seed = 1", "seed = true"),
        ("training.toml", "seed = 1", ""),
        ("rows.json", '"salt":"', '"salt":"zz'),
        ("rows.json", '"salt":"', '"salt":"' + 65 * "00"),
        ("encoders.json", "{", "[" * 100_000 + "{"),
    ],
)
def test_damaged_descriptions_are_refused_in_one_line(copied, tmp_path, name, old, new):
    text = (copied / name).read_text()
    assert old in text
    (copied / name).write_text(text.replace(old, new, 1))
    sealed(copied, "active")
    told = refused("audit", copied, "--attack", "mc", "--out", tmp_path / "o")
    assert "ck is damaged (" in told
    assert len(told) < 1000


def test_a_pipe_in_the_place_of_models_is_refused(copied, tmp_path):
    sealed(copied, "active")
    stored = unseal((copied / "cell.json").read_bytes(), _Stored)
    (copied / "cell.json").write_bytes(seal(msgspec.structs.replace(stored, models={})))
    (copied / "passive_1.safetensors").unlink()
    os.mkfifo(copied / "passive_1.safetensors")
    told = refused("audit", copied, "--attack", "mc", "--draws", 1, "--set", "aux.folds=0", "--out", tmp_path / "o")
    assert "found something else" in told


@pytest.mark.parametrize(("out", "record"), [("a", "a"), ("a", "a/tr"), ("tr/a", "tr")])
def test_a_checkpoint_and_a_recording_are_apart(tmp_path, out, record):
    told = refused("train", *SETTINGS, "--out", tmp_path / out, "--record", tmp_path / record)
    assert "--out and --record apart" in told
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["--out", "--record"])
def test_two_trainings_do_not_write_into_one_folder(tmp_path, option):
    with lock_folder(tmp_path / "one"):
        told = refused("train", *SETTINGS, option, tmp_path / "one")
    assert f"another vflsec is writing to {tmp_path / 'one'}" in told
    assert not list(tmp_path.iterdir())


def test_a_recording_that_the_disk_has_no_place_for_costs_no_models(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint.TranscriptWriter, "write", full)
    words = ["train", *SETTINGS, "--out", tmp_path / "ck", "--record", tmp_path / "tr"]
    result = CliRunner().invoke(cli, [str(word) for word in words])
    assert result.exit_code == 2
    assert "tr is not complete: No space left on device; remove it and train again" in " ".join(result.output.split())
    assert "accuracy" in result.output
    assert checkpoint.restore(tmp_path / "ck").facts.status == "ok"
    assert {one.name for one in tmp_path.iterdir()} == {"ck", "tr"}


def test_a_name_that_is_too_long_is_refused_in_one_line(tmp_path):
    assert "File name too long" in refused("train", *SETTINGS, "--record", tmp_path / ("a" * 300))
