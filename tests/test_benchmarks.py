"""The benchmarks run: one cell of each, not timed."""

import importlib.util
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_one_cell_of_the_digits_job():
    job = load("digits_job")
    x, y = job.load()
    found = job.run(x, y, 0.0, 0, full=False)
    assert found["main"] > 0.94
    assert found["test"] > 0.3
    assert job.run_alone(x, y, 0)["test"] > 0.6


@pytest.mark.slow
def test_one_pair_of_the_overhead(monkeypatch):
    overhead = load("overhead")
    monkeypatch.setattr(overhead, "EPOCHS", 1)
    assert overhead.split(5.0) > 0
    assert overhead.joint() > 0


def test_the_main_command_is_the_readmes():
    assert " ".join(load("main_command").COMMAND) in (FOLDER.parent / "README.md").read_text(encoding="utf-8")
