"""A results folder is read anywhere: without plug-ins, data or torch, and without executing what it names."""

import errno
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

import vflsec
from vflsec.base.errors import StoreError, VflsecError
from vflsec.cli import cli
from vflsec.results.records.folder import read_manifest, read_records
from vflsec.results.records.schema import SCHEMA, unseal

pytestmark = pytest.mark.usefixtures("few_trees_in_module")  # the subject is not how well trees guess

ATTACK = """
from pathlib import Path
from vflsec.attacks.direction import Direction

Path(__file__).with_name("imported").touch()

class Own(Direction):
    name = "own"
"""

NO_TORCH = """
import sys
from importlib.abc import MetaPathFinder

class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "safetensors") or name.startswith("vflsec.run"):
            raise ImportError(f"{name} is not to be imported")

sys.meta_path.insert(0, Refuse())
from vflsec.cli import cli
cli(prog_name="vflsec")
"""


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """A run with the user's own attack and data: its report as JSON, the folder, and the place of the attack."""
    place = tmp_path_factory.mktemp("own")
    (place / "attack.py").write_text(ATTACK)
    rows = [f"{k},{(k * 37) % 101},{(k * 53) % 97},{int((k * 37) % 101 > 40)}" for k in range(300)]
    (place / "a.csv").write_text("id,x,z,y\n" + "\n".join(rows))
    (place / "b.csv").write_text("id,u\n" + "\n".join(f"{k},{(k * 71) % 89}" for k in range(300)))
    (place / "data.toml").write_text(
        'label = "y"\nid = "id"\n[parties.active]\nfile = "a.csv"\n[parties.passive_1]\nfile = "b.csv"\n'
    )
    report = vflsec.evaluate(
        dataset=str(place / "data.toml"), attack=[f"{place / 'attack.py'}:Own", "mc:epochs=5"], defense="iso:lambda=1",
        seeds=2, jobs=1, train={"epochs": 1}, aux={"n": 20, "folds": 0}, out=place / "run",
    )  # fmt: skip
    return report.to_dict(), place / "run", place


@pytest.fixture
def copied(evaluated, tmp_path):
    """The folder on another machine: no data, no plug-in, no models."""
    _, folder, _ = evaluated
    for name in ("manifest.json", "records.jsonl"):
        shutil.copy(folder / name, tmp_path / name)
    return tmp_path


def report_on(folder, *words):
    command = [sys.executable, "-c", NO_TORCH, "report", str(folder), *words]
    return subprocess.run(command, check=False, capture_output=True, text=True)


@pytest.mark.long
def test_a_report_needs_no_plug_in_no_data_and_no_torch(evaluated, copied):
    before, _, place = evaluated
    os.rename(place, place.with_name("gone"))
    try:
        shown = report_on(copied, "--format", "json")
    finally:
        os.rename(place.with_name("gone"), place)
    assert shown.returncode == 0, shown.stderr
    assert {**json.loads(shown.stdout), "out": ""} == {**json.loads(json.dumps(before)), "out": ""}


@pytest.mark.long
def test_a_report_executes_nothing_that_its_folder_names(evaluated, copied):
    _, folder, place = evaluated
    (place / "imported").unlink(missing_ok=True)
    (copied / "spec.toml").write_text((folder / "spec.toml").read_text())
    assert report_on(copied).returncode == 0
    assert not (place / "imported").exists()


def test_a_report_of_a_read_only_folder(evaluated, copied, monkeypatch):
    """No file is opened for writing but those of the curve, and that may fail."""
    refused = []

    def read_only(path, flags, *args, **kwargs):
        if flags & (os.O_WRONLY | os.O_RDWR):
            refused.append(Path(path).name)
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, flags, *args, **kwargs)

    before = sorted(path.name for path in copied.iterdir())
    opened = os.open
    monkeypatch.setattr(os, "open", read_only)
    shown = CliRunner().invoke(cli, ["report", str(copied), "--format", "json"])
    monkeypatch.undo()
    assert shown.exit_code == 0
    assert json.loads(shown.stdout)["points"] == json.loads(json.dumps(evaluated[0]["points"]))
    assert shown.stderr == f"curve or report.html is missing: cannot write to {copied}: Permission denied\n"
    assert refused == [".writing-curve.svg"]
    assert sorted(path.name for path in copied.iterdir()) == before


def test_a_curve_does_not_follow_links(copied, tmp_path_factory):
    target = tmp_path_factory.mktemp("elsewhere") / "file"
    target.write_text("keep")
    (copied / "curve.svg").symlink_to(target)
    assert CliRunner().invoke(cli, ["report", str(copied)]).exit_code == 0
    assert target.read_text() == "keep"
    assert not (copied / "curve.svg").is_symlink()


def test_the_manifest_names_where_the_numbers_come_from(evaluated):
    _, folder, place = evaluated
    manifest = read_manifest(folder)
    assert manifest.provenance.versions["vflsec"] == vflsec.__version__
    (own, mc) = manifest.provenance.sources["attacks"].values()
    assert own[0].startswith("Own#")
    assert mc[0] == "mc"
    hashes = manifest.provenance.sources["dataset"][str(place / "data.toml")]
    assert len(hashes) == 3
    assert manifest.provenance.cards["attacks"]["mc"].endswith(".")
    assert manifest.settings["seeds"] == 2
    assert {entry.key for entry in (*manifest.rows, *manifest.baselines)} == set(read_records(folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace(b'"seeds":2', b'"seeds":3'), "its checksum does not match"),
        (lambda text: text[:-9], "it cannot be read"),
        (lambda text: b"", "it cannot be read"),
        (lambda text: text.replace(b'"schema":1', b'"schema":2'), "has schema 2, expected 1"),
    ],
)
def test_a_damaged_manifest_is_one_line(copied, change, message):
    path = copied / "manifest.json"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(StoreError, match=message):
        read_manifest(copied)


def test_a_line_of_another_kind_is_no_manifest(copied):
    path = copied / "manifest.json"
    path.write_bytes((copied / "records.jsonl").read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(StoreError, match=r"manifest\.json is damaged"):
        read_manifest(copied)
    with pytest.raises(ValueError, match="it cannot be read"):
        unseal((copied / "manifest.json").read_bytes(), int)


def mutated(text, rng):
    """Return ``text`` after one of the things that disks, editors and hostile people do."""
    lines = text.splitlines(keepends=True)
    at, line = rng.randrange(len(text)), rng.randrange(len(lines))
    kind = rng.randrange(9)
    if kind == 0:  # one bit
        return text[:at] + bytes([text[at] ^ (1 << rng.randrange(8))]) + text[at + 1 :]
    if kind == 1:  # some bytes
        return text[:at] + rng.randbytes(rng.randrange(1, 20)) + text[at + rng.randrange(20) :]
    if kind == 2:  # torn
        return text[:at]
    if kind == 3:  # a hole
        return text[:at] + bytes(50) + text[at + 50 :]
    if kind == 4:  # another number
        digits = [k for k, byte in enumerate(text) if byte in b"0123456789"]
        k = rng.choice(digits)
        return text[:k] + str(rng.randrange(10)).encode() + text[k + 1 :]
    if kind == 5:  # a value of another type
        value = rng.choice([b"null", b"[]", b"{}", b"1e999", b"-1", b'"x"', b"[" * 5000])
        k = text.find(b":", at)
        return text[: k + 1] + value + text[text.find(b",", k) :]
    if kind == 6:  # a line that is lost
        return b"".join(lines[:line] + lines[line + 1 :])
    if kind == 7:  # a line that is there twice
        return b"".join([*lines, lines[line]])
    return text.replace(b'"ok"', rng.choice([b'"error"', b'"fine"', b"0"]), 1)


def cells_of(report):
    """Return the numbers of each cell by seed, which are those of intact records."""
    return {
        (p["method"], p["defense"], p["strength"], p["attack"]): (p["leak"]["by_seed"], p["statuses"])
        for p in report["points"]
    }


@pytest.mark.long
def test_of_a_damaged_folder_no_number_is_believed_and_nothing_run(evaluated, copied, monkeypatch):
    """Each report of a damaged folder is refused in one line, or has only numbers of the intact one."""
    whole, folder, place = evaluated
    (place / "imported").unlink(missing_ok=True)
    rng = random.Random(0)  # noqa: S311  (reproducible damage)
    files = {name: (folder / name).read_bytes() for name in ("manifest.json", "records.jsonl", "spec.toml")}
    intact, outcomes = cells_of(whole), Counter()
    for _ in range(int(os.environ.get("VFLSEC_FUZZ", "60"))):
        for name, text in files.items():
            (copied / name).write_bytes(text)
        name = rng.choice(list(files))
        (copied / name).write_bytes(mutated(files[name], rng))
        try:
            found = cells_of(vflsec.Report.read(copied).to_dict())
        except VflsecError as error:
            assert "\n" not in str(error)  # noqa: PT017  (refusing is one of two right outcomes)
            outcomes["refused"] += 1
            continue
        for cell, (by_seed, statuses) in found.items():
            assert by_seed.items() <= intact[cell][0].items()
            assert len(by_seed) == len(intact[cell][0]) or set(statuses) - {"ok", "unconverged"}
        outcomes["as before" if found == intact else "less"] += 1
    assert outcomes["refused"] > outcomes["less"]
    assert not (place / "imported").exists()
    print(dict(outcomes))  # noqa: T201  (the figures, shown with -s)


def forged(folder, change_record=None, change_manifest=None):
    """Write the folder again with valid checksums and changed contents."""
    path = folder / "records.jsonl"
    records = [json.loads(line)["record"] for line in path.read_text().splitlines()]
    for record in records:
        (change_record or dict)(record)
    manifest = json.loads((folder / "manifest.json").read_text())["record"]
    (change_manifest or dict)(manifest)

    def sealed(content):
        body = json.dumps(content, separators=(",", ":"), ensure_ascii=False)
        return f'{{"schema":{SCHEMA},"check":"{hashlib.sha256(body.encode()).hexdigest()[:16]}","record":{body}}}\n'

    path.write_text("".join(map(sealed, records)))
    (folder / "manifest.json").write_text(sealed(manifest))


def every_row(**changed):
    return lambda manifest: [row.update(changed) for row in (*manifest["rows"], *manifest["priors"])]


@pytest.mark.parametrize(
    ("record", "manifest", "message"),
    [
        (lambda r: r.update(utility=None) if r["kind"] == "result" else None, None, "has no utility"),
        (lambda r: r.update(budget={"updates": 10**400}), None, "its budget is not finite"),
        (lambda r: r.update(spent=[{"defense": "iso", "epsilon": "x"}]) if r["kind"] == "result" else None, None,
         "no defense, epsilon or delta"),
        (lambda r: r.update(method="\x1b[2J"), None, "control characters"),
        (lambda r: r.update(seed=7), None, "another cell than the manifest"),
        (None, every_row(method="a\nGATE max-leak mc 0.1: holds"), "control characters"),
        (None, every_row(method="x" * 100_000), "longer than"),
        (None, lambda m: m.update(seeds=10**10), "10000000000 seeds"),
        (None, lambda m: m["settings"].update(fixed=[None]), "null in a list"),
        (None, lambda m: m["settings"]["data"].update(options={"rows": [[None]]}), "null in a list"),
        (None, lambda m: m["attacks"][0].update(target="weird"), "unknown target 'weird'"),
        (None, lambda m: m["rows"][0].update(attack="who"), "unknown attack 'who'"),
        (None, lambda m: m["rows"][0].update(strength=1e308), "a row of strength 1e[+]308"),
    ],
)  # fmt: skip
def test_a_forged_folder_with_valid_checksums_is_one_line(copied, record, manifest, message):
    forged(copied, record, manifest)
    with pytest.raises(StoreError, match=message):
        vflsec.Report.read(copied)


def test_names_are_no_markup_in_any_format(copied):
    name = "<img src=x>[/][red]=A1|$\\\\frac{$"
    forged(copied, lambda r: r.update(method=name) if r["kind"] == "result" else None, every_row(method=name))
    report = vflsec.Report.read(copied)
    assert name in report.table(300)
    assert "<img" not in report._repr_html_()
    assert "\\<img" in report.to_markdown()
    assert "\\|" in report.to_markdown()
    assert report.save_curve(copied)
    forged(copied, lambda r: r.update(method="=A1") if r["kind"] == "result" else None, every_row(method="=A1"))
    assert "\n'=A1," in vflsec.Report.read(copied).to_csv()


@pytest.mark.long
def test_a_report_does_not_obey_a_matplotlibrc_of_the_folder(copied):
    (copied / "matplotlibrc").write_text("text.usetex: True\n")
    command = [sys.executable, "-m", "vflsec", "report", "."]
    shown = subprocess.run(command, cwd=copied, check=False, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert (copied / "curve.png").exists()


@pytest.mark.long
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_a_terminal_cannot_show_is_replaced(copied, encoding):
    command = [sys.executable, "-m", "vflsec", "report", str(copied)]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    shown = subprocess.run(command, check=False, capture_output=True, env=environment)
    assert (shown.returncode, shown.stderr.count(b"Traceback")) == (0, 0)
    separator = "·" if encoding == "latin-1" else "?"
    assert f" {separator} adversary passive_1 {separator} " in shown.stdout.decode(encoding)


@pytest.mark.parametrize("name", ["manifest.json", "records.jsonl"])
def test_a_pipe_in_the_place_of_a_file_is_one_line(copied, name):
    (copied / name).unlink()
    os.mkfifo(copied / name)
    with pytest.raises(StoreError, match=f"cannot read .*{name}: .*something else"):
        vflsec.Report.read(copied)


def test_the_line_of_an_error_controls_no_terminal(copied):
    path = copied / "manifest.json"
    path.write_text(path.read_text().replace('"schema"', '"\\u001b[31mHACK\\u0007":1,"schema"', 1))
    shown = CliRunner().invoke(cli, ["report", str(copied)])
    assert shown.exit_code == 2
    assert "?[31mHACK?" in shown.stderr
