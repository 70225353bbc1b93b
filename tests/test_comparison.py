"""The comparison of stored results: what it refuses, what it repeats, and which strength it shows."""

import shutil
import sys
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from vflsec.base.errors import StoreError
from vflsec.results.records.schema import decode, encode

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import comparison


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    """A folder with one attack, and one defense at one strength."""
    home = tmp_path_factory.mktemp("comparison")
    with pytest.MonkeyPatch.context() as patch:
        small(patch, home)
        comparison.vflsec.evaluate(
            **comparison.register("toy", "passive_1"), seeds=2, jobs=1, out=home / "folder", progress=False
        )
    return home / "folder"


def small(patch, home):
    patch.setattr(comparison, "DATASETS", ("toy",))
    patch.setattr(
        comparison, "ROLES", {"passive_1": comparison.Role("labels, passive party", ("norm",), ("iso:lambda=5",))}
    )
    patch.setattr(comparison, "SEEDS", 2)
    patch.setattr(comparison, "KNOWN", 20)
    patch.setattr(comparison, "STORE", home / "store")
    patch.setattr(comparison, "PAGE", home / "comparison.md")


@pytest.fixture(autouse=True)
def few(monkeypatch, tmp_path):
    small(monkeypatch, tmp_path)


def call(*words):
    result = CliRunner().invoke(comparison.main, [*map(str, words)])
    assert result.exit_code == 0 or "Error: " in result.output.splitlines()[-1], result.output
    return result


def change(folder, make):
    """Change each record, with a right checksum."""
    path = folder / "records.jsonl"
    path.write_bytes(b"".join(encode(make(decode(line))) for line in path.read_bytes().splitlines()))


def test_a_result_of_somebody_else_is_repeated_stored_and_shown(computed, tmp_path):
    result = call("add", computed, "--by", "reviewer", "--jobs", 1)
    assert "a repeated row differs by 0.0000" in result.output
    (entry,) = comparison.read_stored()
    assert (entry.by, entry.seeds, entry.dataset) == ("reviewer", 2, "toy")
    points = comparison.vflsec.Report.read(computed).worst
    assert [(row.leak, row.advantage) for row in entry.rows] == [(p.leak.mean, p.leak.advantage) for p in points]
    assert call("page").exit_code == 0
    page = (tmp_path / "comparison.md").read_text("utf-8")
    assert f"| none | {points[0].leak.mean:.3f} (" in page
    assert f"`{entry.files['records.jsonl'][:16]}`" in page
    assert (tmp_path / "comparison.png").stat().st_size > 10_000


def test_a_signature_is_of_the_folder_and_of_the_key(computed, tmp_path):
    folder = shutil.copytree(computed, tmp_path / "folder")
    keys = [Ed25519PrivateKey.generate() for _ in range(2)]
    for k, key in enumerate(keys):
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        (tmp_path / f"private{k}.pem").write_bytes(private)
        public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        (tmp_path / f"public{k}.pem").write_bytes(public)
    signed_by = ("add", folder, "--by", "reviewer", "--jobs", 1, "--signer")
    assert "found another signature or none" in call(*signed_by, tmp_path / "public0.pem").output
    assert "expected a private Ed25519 key" in call("sign", folder, "--key", tmp_path / "public0.pem").output
    assert call("sign", folder, "--key", tmp_path / "private0.pem").exit_code == 0
    assert "found another signature or none" in call(*signed_by, tmp_path / "public1.pem").output
    assert not list(comparison.read_stored())
    assert call(*signed_by, tmp_path / "public0.pem").exit_code == 0
    (entry,) = comparison.read_stored()
    assert entry.signer == sha256(keys[0].public_key().public_bytes_raw()).hexdigest()[:16]
    assert f"reviewer, key `{entry.signer}`" in comparison.write_page([entry])
    (folder / "records.jsonl").write_bytes((folder / "records.jsonl").read_bytes()[:-1])
    assert "found another signature or none" in call(*signed_by, tmp_path / "public0.pem").output


def test_invented_leaks_are_refused_though_their_checksums_are_right(computed, tmp_path):
    def lower(record):
        blocks = {
            split: msgspec.structs.replace(
                block,
                metrics={**block.metrics, "auc": block.metrics["auc"] - 0.1},
                halves=[half - 0.1 for half in block.halves],
            )
            for split, block in (record.leak or {}).items()
        }
        return msgspec.structs.replace(record, leak=blocks or record.leak)

    folder = shutil.copytree(computed, tmp_path / "folder")
    change(folder, lower)
    result = call("add", folder, "--by", "nobody", "--jobs", 1)
    assert "expected the leak of a repeated row within 0.01" in result.output
    assert not list(comparison.read_stored())


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("damaged", "damaged"),
        ("unfinished", "expected a number for each setting"),
        ("seeds", "expected at least 3 seeds, found 2"),
        ("settings", "found other aux"),
        ("version", "found other attacks"),
        ("dataset", "expected one of digits"),
    ],
)
def test_what_is_not_comparable_is_refused_in_a_line(case, message, computed, tmp_path, monkeypatch):
    folder = shutil.copytree(computed, tmp_path / "folder")
    records = folder / "records.jsonl"
    if case == "damaged":
        records.write_bytes(records.read_bytes().replace(b'"auc":0.', b'"auc":1.', 1))
    elif case == "unfinished":
        records.write_bytes(b"".join(records.read_bytes().splitlines(keepends=True)[:-1]))
    elif case == "version":
        monkeypatch.setattr(
            comparison.vflsec.run.plan.resolve(comparison.read({"attacks": ["norm"]}).attacks[0]).kind, "version", 99
        )
    else:
        name, value = {"seeds": ("SEEDS", 3), "settings": ("KNOWN", 21), "dataset": ("DATASETS", ("digits",))}[case]
        monkeypatch.setattr(comparison, name, value)
    result = call("add", folder, "--by", "nobody")
    assert result.exit_code == 1
    assert message in result.output
    assert not list(comparison.read_stored())


def test_a_changed_entry_is_not_shown(computed):
    call("add", computed, "--by", "reviewer", "--jobs", 1)
    path = comparison.find_path("toy", "passive_1")
    path.write_bytes(path.read_bytes().replace(b"reviewer", b"somebody", 1))
    assert "found a damaged one" in call("page").output


def make_row(strength, cost, advantage):
    return comparison.Row(
        defense="iso" if strength else "none", strength=strength, status="ok", utility=0.8, cost=cost, measure="auc",
        attack="norm", leak=0.7, alone=0.6, advantage=advantage, low=None, high=None, by_seed={},
    )  # fmt: skip


def test_the_largest_strength_within_the_cost_is_shown_whatever_it_leaks():
    rows = [make_row(0.0, None, 0.4), make_row(1.0, 0.0, 0.01), make_row(5.0, 0.02, 0.2), make_row(25.0, 0.021, 0.0)]
    entry = comparison.Entry(
        dataset="toy", adversary="passive_1", seeds=2, by="", commit=None, versions={}, sources={}, files={}, rows=rows
    )
    chosen = comparison.choose(entry)
    assert chosen["iso"].strength == 5.0
    assert comparison.choose(msgspec.structs.replace(entry, rows=[rows[0], rows[3]])) == {"iso": None}
    collapsed = msgspec.structs.replace(rows[2], status="collapsed")
    assert comparison.choose(msgspec.structs.replace(entry, rows=[*rows[:2], collapsed]))["iso"].strength == 1.0


@pytest.mark.parametrize(("is_defended", "is_refused"), [(True, False), (False, True)])
def test_a_model_that_collapsed_is_accepted_under_a_defense_alone(is_defended, is_refused, computed, tmp_path):
    def collapse(record):
        if not getattr(record, "utility", None) or bool(record.defenses) is not is_defended:
            return record
        return msgspec.structs.replace(record, status="collapsed", error="its embeddings are equal", leak={})

    folder = shutil.copytree(computed, tmp_path / "folder")
    change(folder, collapse)
    if is_refused:
        with pytest.raises(StoreError, match="expected results without a warning, found: .*its embeddings are equal"):
            comparison.make_entry(folder, "somebody")
    else:
        entry = comparison.make_entry(folder, "somebody")
        assert [row.status for row in entry.rows if row.strength] == ["collapsed"]
        assert comparison.choose(entry) == {"iso": None}


def test_the_page_is_that_of_the_stored_results(monkeypatch):
    monkeypatch.undo()
    entries = list(comparison.read_stored())
    assert comparison.write_page(entries) == comparison.PAGE.read_text("utf-8")
    assert comparison.draw(entries).axes


def test_a_party_that_the_data_name_is_recognized(monkeypatch, tmp_path):
    """``flights`` calls the passive party weather."""
    monkeypatch.setattr(comparison, "DATASETS", ("flights",))
    settings = comparison.register("flights", "passive_1") | {"data": {"options": {"rows": 1500}}}
    comparison.vflsec.evaluate(**settings, seeds=2, jobs=1, out=tmp_path / "folder", progress=False)
    monkeypatch.setattr(comparison, "ROWS", {"flights": 1500})
    entry = comparison.make_entry(tmp_path / "folder", "reviewer")
    assert (entry.dataset, entry.adversary) == ("flights", "passive_1")
