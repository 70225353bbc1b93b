"""Measurements that no run gives are refused in one line, before a verdict is made of them."""

import json
import os

import pytest
from click.testing import CliRunner

from vflsec.base.errors import StoreError
from vflsec.cli import cli
from vflsec.papers.measurements import Measurements, Values, read_measurements, write_measurements

WHOLE = Measurements(
    study="s",
    experiment="e",
    registration="r",
    seeds=3,
    time="",
    commit=None,
    versions={},
    seconds=60.0,
    rounding={"leak of mc": 0.01},
    values=[
        Values(
            data="d", arm="a", measure="leak of mc", by_seed={0: 0.5, 1: -7.0, 2: 1.0}, alone={0: 0.5}, unconverged=3
        ),
        Values(data="d", arm="a", measure="bytes", by_seed={0: 3e12}, lost={1: "diverged", 2: "missing"}),
    ],
)


@pytest.fixture
def stored(tmp_path):
    path = tmp_path / "s.json"
    write_measurements(path, WHOLE)
    return path


def test_what_is_written_is_what_is_read(stored):
    assert read_measurements(stored) == WHOLE


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('"0":0.5', '"0":1e7', "1e+06, found 10000000.0"),
        ('"1":-7.0', '"1":-1e300', "found -1e+300"),
        ('"1":-7.0', '"1":1e999', "out of range"),
        ('"1":-7.0', '"1":NaN', "invalid"),
        ('"0":3000000000000.0', '"0":-1', "1e+18, found -1.0"),
        ('"0":3000000000000.0', '"0":1e19', "found 1e+19"),
        ('"seconds": 60.0', '"seconds": -1', "expected seconds from 0 to 1e+09, found -1.0"),
        ('"seconds": 60.0', '"seconds": 1e10', "found 10000000000.0"),
        ('"unconverged":3', '"unconverged":4', "from 0 to 3, found 4"),
        ('"unconverged":3', '"unconverged":-1', "found -1"),
        ('"leak of mc": 0.01', '"leak of mc": -0.01', "leak of mc from 0"),
        ('"0":0.5,', '"0":0.5,"0":0.6,', "'0' once in an object"),
        ('"study": "s"', '"study": "t"', "found those of t"),
        ('"seeds": 3', '"seeds": 1e30', "Expected `int`"),
    ],
)
def test_measurements_that_no_run_gives_are_refused(stored, before, after, message):
    text = stored.read_text()
    assert before in text
    stored.write_text(text.replace(before, after, 1))
    with pytest.raises(StoreError) as refused:
        read_measurements(stored)
    assert message.casefold() in str(refused.value).casefold()
    assert "run vflsec judge" in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_a_number_that_no_float_holds_is_refused(stored):
    body = json.loads(stored.read_text())
    body["values"][0]["unconverged"] = 10**400
    stored.write_text(json.dumps(body))
    with pytest.raises(StoreError, match="cannot read measurements"):
        read_measurements(stored)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="has no pipes with a name")
def test_a_page_that_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    done = CliRunner().invoke(cli, ["judge", "--page", str(tmp_path / "pipe")])
    assert done.exit_code == 2
    assert done.stderr.splitlines() == [
        f"Error: expected a file for --page, got {tmp_path / 'pipe'}, which is something else: name another"
    ]


def test_a_page_in_a_folder_that_is_not_there(tmp_path):
    done = CliRunner().invoke(cli, ["judge", "--page", str(tmp_path / "no" / "page.md")])
    assert done.exit_code == 2
    assert f"folder {tmp_path / 'no'} for --page" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "no").exists()
