"""When seeds stop being added, and what is said of it."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from vflsec.cli import cli
from vflsec.report.report import Report
from vflsec.results.analysis.trainings import find_widest, list_stops, note_on_seeds

pytestmark = pytest.mark.usefixtures("few_trees_in_module")  # the subject is not how well trees guess

RUN = ["eval", "--dataset", "toy", "--attack", "direction", "--set", "data.options.rows=150", "--set", "train.epochs=1",
       "--set", "aux.n=20", "--set", "aux.folds=0", "--jobs", "1"]  # fmt: skip


def run(folder: Path, *options: str) -> Report:
    result = CliRunner().invoke(cli, [*RUN, "--out", str(folder), *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return Report.read(folder)


def test_there_is_a_look_after_each_five_seeds_and_at_the_end():
    assert list(list_stops(12)) == [5, 10, 12]
    assert list(list_stops(5)) == [5]
    assert list(list_stops(3)) == [3]


@pytest.mark.long
@pytest.mark.slow
def test_seeds_are_added_until_intervals_are_narrow_and_are_not_computed_again(tmp_path):
    wide = run(tmp_path, "--until", "0.9")
    half = find_widest(wide.summary)
    assert wide.summary.seeds == 5
    assert half is not None
    assert half <= 0.9
    assert wide.summary.notes[-1] == note_on_seeds(wide.summary, 0.9)
    assert "at most ±0.9: reached with 5" in wide.table(200)
    lines = (tmp_path / "records.jsonl").read_bytes()
    narrow = run(tmp_path, "--until", "0.0001", "--seeds", "7")
    assert narrow.summary.seeds == 7
    assert "not reached with 7" in narrow.summary.notes[-1]
    assert (tmp_path / "records.jsonl").read_bytes().startswith(lines)
    by_seed = [report.points[0].leak.by_seed for report in (wide, narrow)]
    assert by_seed[0].items() <= by_seed[1].items()


def test_a_sweep_has_a_fixed_number_of_seeds(tmp_path):
    options = ["--until", "0.1", "--sweep", "aux.n=20,40", "--out", str(tmp_path / "sweep")]
    result = CliRunner().invoke(cli, [*RUN, *options])
    assert result.exit_code == 2 or "expected no --until with --sweep" in str(result.exception)
