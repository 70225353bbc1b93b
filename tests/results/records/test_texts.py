"""Whatever a writer accepts its reader accepts: every text on its way into a results folder."""

from pathlib import Path

import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vflsec.base.errors import DataError, UsageError
from vflsec.data.description import read_description
from vflsec.results.records.manifest import Provenance, Subgroup, Subgroups
from vflsec.results.records.schema import MAX_TEXT, AttackRun, BaselineResult, decode, encode, is_readable, seal, unseal
from vflsec.run import spec as specs
from vflsec.run.describe import describe_provenance

SIGNS = st.characters(codec="utf-8") | st.sampled_from("\n\t\r\0\x7f\x85\u2028\u202e")
TEXTS = st.text(SIGNS, max_size=20) | st.sampled_from(["x" * MAX_TEXT, "x" * (MAX_TEXT + 1)])
WORDS = TEXTS | st.text(st.characters(categories=["Cs"]), max_size=3)
"""Texts as the system gives them: bytes that are no text become surrogates."""


@given(TEXTS, TEXTS)
def test_records_are_read_again(name: str, error: str):
    record = BaselineResult(key="k", method=name, seed=0, adversary="active", status="error", error=error,
                            attack=AttackRun(name="norm", options={name: [error]}, repr=error))  # fmt: skip
    read = decode(encode(record))
    assert read == record or not (is_readable(name) and is_readable(error))


@given(TEXTS)
def test_groups_are_read_again(text: str):
    groups = Subgroups(column=text, keys=[], rows="test", metric="auc", groups=[Subgroup(group=text, n=1)], p=None)
    assert unseal(seal(groups), Subgroups) == groups or not is_readable(text)


@given(st.lists(WORDS, max_size=3))
def test_every_command_is_read_again(words: list[str]):
    provenance = describe_provenance({}, {}, words)
    assert unseal(seal(provenance), Provenance) == provenance


@given(WORDS)
def test_settings_that_are_accepted_are_read_again(text: str):
    for table in ({"dataset": text}, {"adversary": text}, {"attacks": [{"name": "mc", "options": {text: text}}]}):
        try:
            spec = specs.read(table)
        except UsageError:
            continue
        assert unseal(seal(spec), specs.EvalSpec) == spec
        assert specs.read(specs.files.parse_toml(specs.to_toml(spec))) == spec


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TEXTS, TEXTS)
def test_names_of_data_and_parties_that_are_accepted_are_readable(tmp_path: Path, name: str, party: str):
    parties = {party: {"file": "a.csv"}, "bureau": {"file": "b.csv"}}
    table = {"name": name, "label": "y", "id": "id", "parties": parties}
    (tmp_path / "data.toml").write_bytes(tomli_w.dumps(table).encode(errors="surrogatepass"))
    try:
        config = read_description(tmp_path / "data.toml")
    except DataError:
        return
    assert is_readable(config.name or "")
    assert all(map(is_readable, config.parties))
