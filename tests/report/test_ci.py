"""The jobs of examples/ci run as scripts, without network: a planted regression fails them, and noise does not."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from vflsec.results.records.schema import Result
from vflsec.run import engine
from vflsec.run import spec as specs
from vflsec.run.describe import build_manifest
from vflsec.run.store import Store

ROOT = Path(__file__).parents[2]
PRELUDE = """
pip() { :; }
gh() { cat "$5" > posted.md; }
vflsec() { if [ "$1" = eval ]; then return "${EVAL:-0}"; else command vflsec "$@"; fi; }
"""
"""What a machine of the pipeline does besides the report: it installs, posts, and has evaluated the change."""


@pytest.fixture(scope="module")
def plant(tmp_path_factory):
    """Return a function that stores a run whose attack leaks a given AUC, with a narrow interval."""
    spec = specs.read({
        "dataset": "toy", "data": {"options": {"rows": 300, "signal": "hidden"}}, "train": {"epochs": 1}, "seeds": 1,
        "aux": {"n": 20, "folds": 0}, "attacks": ["norm"], "defenses": [],
    })  # fmt: skip
    store = Store(tmp_path_factory.mktemp("run"))
    with store.lock():
        store.write_settings(specs.to_toml(spec), build_manifest(spec))
        records = list(engine.evaluate(engine.plan(spec, store), store))

    def write(folder, leak):
        def move(block):
            metrics, ends = {**block.metrics, block.metric: leak}, (leak - 0.005, leak + 0.005)
            without = tuple(leak + (value - block.headline) / 10 for value in block.without)
            return replace(block, metrics=metrics, halves=(leak, leak), ci95_rows=ends, without=without)

        planted = Store(folder)
        with planted.lock():
            planted.write_settings(specs.to_toml(spec), build_manifest(spec))
            for record in records:
                moved = {split: move(block) for split, block in getattr(record, "leak", {}).items()}
                planted.append(replace(record, leak=moved) if isinstance(record, Result) else record)

    return write


def list_steps(name):
    """The shell of each step of a job: a step with ``if: always()`` runs after a failure, too."""
    text = (ROOT / "examples" / "ci" / f"{name}.yml").read_text("utf-8")
    if name == "gitlab":
        script = re.search(r"  script:\n((?:    - .*\n)+)", text)[1]
        return [("\n".join(line.removeprefix("    - ") for line in script.splitlines()), False)]
    steps = text[text.index("steps:") :].split("      - ")[1:]
    return [(run[1], "if: always()" in step) for step in steps if (run := re.search(r"run: (.*)", step))]


def run_job(name, folder, **env):
    """Run the steps as the pipeline does; return its exit code, and what they print."""
    code, printed, env = 0, "", {**os.environ, **env, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for shell, always in list_steps(name):
        if always or not code:
            done = subprocess.run(
                ["/bin/bash", "-e", "-o", "pipefail", "-c", PRELUDE + shell],
                cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=300,
            )  # fmt: skip
            code, printed = code or done.returncode, printed + done.stdout + done.stderr
    return code, printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "leak", "ran", "code"),
    [
        pytest.param("github", 0.85, 0, 1, id="regression"),
        pytest.param("github", 0.803, 0, 0, id="noise"),
        pytest.param("github", 0.75, 0, 0, id="improvement"),
        pytest.param("github", 0.80, 1, 1, id="gate of eval"),
        pytest.param("gitlab", 0.85, 0, 1, id="regression on GitLab"),
        pytest.param("gitlab", 0.80, 1, 1, id="gate of eval on GitLab"),
    ],
)
def test_a_job_fails_on_a_regression_and_names_it(name, leak, ran, code, plant, tmp_path):
    plant(tmp_path / "accepted", 0.80)
    plant(tmp_path / "privacy", leak)
    found, printed = run_job(name, tmp_path, EVAL=str(ran))
    assert found == code, printed
    comment = (tmp_path / ("posted.md" if name == "github" else "comment.md")).read_text()
    assert (name == "github") or comment in printed
    assert ("labels, fedsplitnn no defense: .800 to .850" in comment) is (leak == 0.85)
    assert ("GATE max-rise 0.02: FAILED" in comment) is (leak == 0.85)
    assert ('failures="1"' in (tmp_path / "gates.xml").read_text()) is (leak == 0.85)


def test_the_page_shows_the_jobs_of_the_examples():
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "ci_gates.md").read_text("utf-8"), re.DOTALL)
    assert blocks == [(ROOT / "examples" / "ci" / f"{name}.yml").read_text("utf-8") for name in ("github", "gitlab")]
