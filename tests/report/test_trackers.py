"""Experiment trackers get the numbers of JSON; those that are not installed are skipped."""

import json
import struct
import sys
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from tests.report.test_comparison import evaluated
from vflsec.base.errors import UsageError
from vflsec.cli import cli, options
from vflsec.report import trackers
from vflsec.results.analysis.results import name_defense

pytestmark = pytest.mark.usefixtures("few_trees_in_module")  # the subject is not how well trees guess


FOREIGN = pytest.mark.filterwarnings("ignore")
"""Trackers may use what their own libraries call deprecated."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tracked") / "run 1"
    evaluated(folder, defenses=["iso:lambda=1,5"])
    return folder


@pytest.fixture(scope="module")
def shown(folder):
    return json.loads(CliRunner().invoke(cli, ["report", str(folder), "--format", "json"]).stdout)


def track(name, folder):
    result = CliRunner().invoke(cli, ["report", str(folder), "--track", name, "--format", "json"])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def expect(shown):
    """The numbers of the default table, from JSON."""
    numbers = {}
    for row in shown["worst"]:
        place = f"labels/fedsplitnn/{name_defense(SimpleNamespace(**row), 'no defense')}"
        for name in ("utility", "leak"):
            low, high = row[name]["ci95"]
            numbers |= {f"{place}/{name}": row[name]["mean"], f"{place}/{name}_low": low, f"{place}/{name}_high": high}
        low, high = row["leak"]["advantage_ci95"]
        numbers |= {f"{place}/advantage_low": low, f"{place}/advantage_high": high, f"{place}/cost": row["cost"]}
        numbers |= {f"{place}/{name}": row["leak"][name] for name in ("alone", "advantage")}
    (cap,) = (cap for cap in shown["cap"] if cap["attack"] == "worst")
    place = "labels/fedsplitnn/iso"
    for name, score in (("CAP", ""), ("calibrated CAP", "calibrated_"), ("hypervolume", "hypervolume_")):
        low, high = cap[f"{score}ci95"]
        mean = cap[score.rstrip("_") or "value"]
        numbers |= {f"{place}/{name}": mean, f"{place}/{name}_low": low, f"{place}/{name}_high": high}
    return {name: value for name, value in numbers.items() if value is not None}


def test_numbers_are_those_of_json(folder, shown):
    """Each number of the table and the ends of its interval, for each row, and the row without a defense once."""
    numbers = trackers.list_numbers(trackers.Report.read(folder).summary)
    assert numbers == expect(shown)
    assert len([name for name in numbers if name.endswith("/leak")]) == 3


def test_an_audit_has_each_attack_and_names_have_letters_that_all_trackers_take(folder):
    summary = replace(trackers.Report.read(folder).summary, audited="model.onnx")
    first = replace(summary.points[0], attack="a/b,c@d:x=1")
    numbers = trackers.list_numbers(replace(summary, points=[first]))
    assert numbers["labels/fedsplitnn/no defense/a_b_c_d:x_1/leak"] == first.leak.mean


@pytest.mark.parametrize("command", [["eval", "--dataset", "toy"], ["audit", "nowhere"], ["report", "nowhere"]])
def test_a_missing_package_is_one_line_before_anything_is_computed(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(options, "find_spec", lambda name: None if name == "wandb" else name)
    result = CliRunner().invoke(cli, [*command, "--track", "mlflow", "--track", "wandb"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "expected the package wandb for --track, found none: pip install 'vflsec[wandb]'" in result.stderr
    assert not [*tmp_path.iterdir()]


def test_a_tracker_that_fails_loses_nothing(folder, monkeypatch):
    def fail(**_):
        raise ConnectionError("no route\nto host")

    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(start_run=fail))
    report = trackers.Report.read(folder)
    with pytest.raises(UsageError, match=r"cannot send to mlflow \(ConnectionError: no route\): vflsec report .*run 1"):
        trackers.send("mlflow", report, folder)


@FOREIGN
def test_mlflow_has_settings_numbers_and_files(folder, shown, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    assert track("mlflow", folder) == shown
    client = mlflow.MlflowClient()
    (run,) = client.search_runs(["0"])
    assert run.data.metrics == expect(shown)
    assert (run.info.run_name, run.data.params["adversary"]) == ("run 1", "passive_1")
    names = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert names == {"report.html", "curve.svg", "curve.png", "attacks.png"}


def list_blocks(content):
    """The records of a file of wandb, which has LevelDB's format of logs behind a header of seven bytes."""
    at, record = 7, b""
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        at += 7 + length
        record += content[at - length : at]
        if kind in (1, 4):  # whole, or its last part
            yield record
            record = b""


@FOREIGN
def test_wandb_has_settings_numbers_and_files(folder, shown, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert track("wandb", folder) == shown
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    logged = {}
    for record in map(Record.FromString, list_blocks(path.read_bytes())):
        logged |= {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
    numbers = {name: float(value) for name, value in logged.items() if name.startswith("labels/")}
    assert numbers == expect(shown)
    assert {"report", "curve", "attacks"} <= {name.partition("/")[0] for name in logged}


@FOREIGN
def test_tensorboard_has_settings_numbers_and_pictures(folder, shown):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    for _ in range(2):  # the second call replaces what the first has written
        assert track("tensorboard", folder) == shown
    (path,) = (folder / "tensorboard" / "run 1").iterdir()
    values = [value for event in EventFileLoader(str(path)).Load() for value in event.summary.value]
    numbers = {value.tag: make_ndarray(value.tensor).item() for value in values if value.tag.startswith("labels/")}
    assert numbers == expect(shown)
    assert {"curve", "attacks", "settings/text_summary", "verdict/text_summary"} <= {value.tag for value in values}
