"""The page of verdicts: made from the committed measurements, and no number of it is typed."""

import ast
import inspect
import re
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from matplotlib.colors import to_hex

from vflsec.cli import cli
from vflsec.papers import judgement
from vflsec.papers.diagrams import VERDICT_COLORS, draw_verdicts
from vflsec.papers.judgement import Judgement, compare_values
from vflsec.papers.measurements import read_measurements, write_measurements
from vflsec.papers.study_grid import list_studies, read_study
from vflsec.papers.verdicts import MeasuredStudy

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
PAGE = ROOT / "RESULTS.md"


@pytest.fixture(scope="module")
def judged():
    found = [name for name in list_studies() if (RESULTS / f"{name}.json").exists()]
    return Judgement(
        [MeasuredStudy(name, read_study(name), read_measurements(RESULTS / f"{name}.json")) for name in found]
    )


def test_the_page_is_that_of_the_committed_measurements(tmp_path):
    page = tmp_path / "RESULTS.md"
    done = CliRunner().invoke(cli, ["judge", "--page", str(page), "--results", str(RESULTS)])
    assert done.exit_code == 0, done.output
    assert page.read_bytes() == PAGE.read_bytes()
    assert f"({page.with_suffix('.png').name})" in page.read_text(encoding="utf-8")
    assert page.with_suffix(".png").exists()


def test_the_page_has_enough_verdicts(judged):
    assert len(judged.verdicts) >= 40
    assert sum(one.topic == "privacy" for one in judged.verdicts) >= 12
    counts = judged.counts()
    of_all, primary, of_papers, ours = ([int(text) for text in row[1:]] for row in counts.rows[-4:])
    assert of_all[-1] == len(judged.verdicts)
    assert of_all == [sum(pair) for pair in zip(of_papers, ours, strict=True)]
    assert primary[-1] == sum(one.primary for one in judged.verdicts)


def test_every_measured_study_was_registered_before(judged):
    for one in judged.measured:
        assert one.study.registered <= one.measurements.time
        assert one.measurements.registration == one.study.registration
        assert one.measurements.seeds in one.study.schedule


def _texts(tree):
    """Yield the texts of a module that are printed: all but docstrings and formats of numbers."""
    formats = {id(part) for node in ast.walk(tree) if isinstance(node, ast.FormattedValue) and node.format_spec
               for part in ast.walk(node.format_spec)}  # fmt: skip
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = {id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, documented) and node.body
                  and isinstance(node.body[0], ast.Expr)}  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in formats | docstrings:
            yield node.value


def test_no_digit_of_the_page_is_typed():
    typed = [text for text in _texts(ast.parse(inspect.getsource(judgement))) if re.search(r"\d", text)]
    assert typed == []


def test_the_map_has_the_decision_on_each_claim_and_its_data(judged):
    (axes,) = draw_verdicts(judged.verdicts).axes
    rows = [label.get_text().rstrip("*") for label in axes.get_yticklabels()]
    columns = [label.get_text().replace("\n", " ") for label in axes.get_xticklabels()]
    drawn = {}
    for patch in axes.patches:
        row, column = rows[round(patch.get_y() + 0.5)], columns[round(patch.get_x() + 0.5)]
        drawn[row, column.replace("- ", "-")] = to_hex(patch.get_facecolor())
    assert drawn == {(f"{v.study} {v.number}", v.data): VERDICT_COLORS[v.decision] for v in judged.verdicts}


def test_each_paper_has_a_paragraph_with_its_primary_claims(judged):
    sources = {one.study.source for one in judged.measured}
    paragraphs = judged.write_papers()
    assert len(paragraphs) == len(sources)
    for verdict in judged.verdicts:
        if verdict.primary:
            (paragraph,) = (text for text in paragraphs if f"{verdict.claim} (" in text)
            assert f"{verdict.decision} on {verdict.data} (" in paragraph
        assert any(f"{verdict.claim} ({verdict.source}): " in text for text in paragraphs)
    heads = [text.partition("Verdicts on ")[2].partition(". ")[0] for text in paragraphs]
    counts = [re.findall(r"(\d+) (?:holds|equivalent|does not|undecided)", part) for part in heads]
    assert sum(int(n) for numbers in counts for n in numbers) == len(judged.verdicts)
    ours = [re.findall(r"\d+", text.partition("on claims of ours: ")[2].partition(".")[0]) for text in paragraphs]
    expected = sum(verdict.source.startswith("ours") for verdict in judged.verdicts)
    assert sum(int(n) for numbers in ours for n in numbers) == expected > 0


def test_a_changed_value_changes_the_page(judged):
    one = judged.measured[0]
    first = one.measurements.values[0]
    other = msgspec.structs.replace(first, by_seed={seed: value + 0.1 for seed, value in first.by_seed.items()})
    values = [other, *one.measurements.values[1:]]
    changed = MeasuredStudy(one.name, one.study, msgspec.structs.replace(one.measurements, values=values))
    assert Judgement([changed]).page() != Judgement([one]).page()
    assert max(compare_values(one.measurements, changed.measurements).values()) == pytest.approx(0.1)
    assert set(compare_values(one.measurements, one.measurements).values()) == {0.0}


def test_claims_that_were_edited_after_the_measurement_are_named(judged):
    one = judged.measured[0]
    claims = [msgspec.structs.replace(one.study.claims[0], margin=0.5), *one.study.claims[1:]]
    edited = Judgement([MeasuredStudy(one.name, msgspec.structs.replace(one.study, claims=claims), one.measurements)])
    assert f"EDITED the claims of {one.name}" in edited.page()
    assert "EDITED" not in Judgement([one]).page()


@pytest.mark.parametrize("width", [80, 140])
def test_the_table_fits_the_terminal(judged, width):
    shown = judged.table(width)
    assert max(map(len, shown.splitlines())) <= width
    assert "undecided" in shown


def test_lines_of_the_page_are_not_overly_wide():
    text = PAGE.read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert max(map(len, rows)) <= 200


def test_measurements_of_fewer_seeds_than_registered_decide_nothing(judged, tmp_path):
    """A run that was stopped while its claim held is no test of it."""
    one = next(one for one in judged.measured if any(v.decision == "holds" for v in judged.select_study(one)))
    few = one.study.seeds - 3

    def cut(by_seed):
        return {seed: value for seed, value in by_seed.items() if seed < few}

    values = [
        msgspec.structs.replace(own, by_seed=cut(own.by_seed), alone=cut(own.alone), lost=cut(own.lost), unconverged=0)
        for own in one.measurements.values
    ]
    write_measurements(
        tmp_path / f"{one.name}.json", msgspec.structs.replace(one.measurements, seeds=few, values=values)
    )
    words = ["judge", one.name, "--page", str(tmp_path / "page.md"), "--results", str(tmp_path)]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert f"missing, seed {one.study.seeds - 1}" in page
    assert "LOST" in page
    assert "**undecided**" in page
    assert "**holds** |" not in page
    assert "**does not hold here** |" not in page
