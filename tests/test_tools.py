"""What runs outside of pytest: hosted CI and the hooks of pre-commit."""

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[1]
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"


def hooks():
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert repo["repo"] == "local"
    return {hook["id"]: hook for hook in repo["hooks"]}


def test_hosted_ci_runs_what_a_laptop_runs():
    workflow = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    assert set(workflow[True]) == {"push", "pull_request"}  # YAML reads the key ``on`` as true
    job = workflow["jobs"]["ci"]
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert [step["uses"].split("@")[0] for step in job["steps"] if "uses" in step] == [
        "actions/checkout",
        "actions/setup-python",
    ]
    assert [step["with"]["python-version"] for step in job["steps"] if "python" in step.get("uses", "")] == ["3.11"]
    versions = workflow["jobs"]["versions"]["strategy"]["matrix"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = project["requires-python"].removeprefix(">=")
    assert (versions["python"][0], versions["resolution"]) == (oldest, ["highest"])
    assert versions["include"] == [{"python": oldest, "resolution": "lowest-direct"}]
    assert "secrets" not in WORKFLOW.read_text(encoding="utf-8")
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_hooks_run_installed_tools_alone():
    assert {hook["language"] for hook in hooks().values()} == {"system"}
    verb, target = hooks()["lint"]["entry"].split()
    assert verb == "make"
    assert re.search(rf"^{target}:$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize(("length", "accepted"), [(72, True), (73, False)])
def test_a_subject_has_at_most_72_characters(length, accepted, tmp_path):
    message = tmp_path / "message"
    message.write_text("s" * length + "\n\n" + "b" * 100 + "\n")
    command = [*shlex.split(hooks()["subject"]["entry"]), str(message)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode == 0) is accepted
    assert f"{length} characters" in done.stdout or accepted


def test_what_the_test_command_leaves_out_runs_in_ci():
    options = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    left_out = re.fullmatch(r"not \((.*)\)", options["addopts"][options["addopts"].index("-m") + 1])[1]
    declared = {mark.partition(":")[0] for mark in options["markers"]}
    assert set(left_out.split(" or ")) == declared - {"slow", "sampled"}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f'\ntest-extended:\n\t$(BIN)/pytest -n 3 --dist worksteal -m "{left_out}"\n' in makefile
    assert f'\ntest-fast:\n\t$(BIN)/pytest -m "not (slow or {left_out})"\n' in makefile
    assert "\nmake test-extended\n" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
