"""Methods named with options: one grammar, one canonical label, separate results."""

import json
import re
import tomllib

import pytest
import torch

from vflsec.api import evaluate, train
from vflsec.base.errors import UsageError
from vflsec.report.report import Report
from vflsec.run import engine, training
from vflsec.run import spec as specs
from vflsec.run.describe import build_manifest
from vflsec.run.federation import build_method
from vflsec.run.plan import build_cell, list_baselines, list_trials
from vflsec.run.spec import EvalSpec, MethodSpec, parse_method
from vflsec.run.store import Store

pytestmark = pytest.mark.usefixtures("few_trees_in_module")  # the subject is not how well trees guess

QUICK = {
    "dataset": "toy",
    "data": {"options": {"rows": 160, "columns": 4}},
    "train": {"epochs": 2, "pretrain": {"epochs": 1}},
    "attacks": ["logistic"],
    "aux": {"n": 20, "folds": 0},
    "seeds": 1,
}
NAME = "fedhssl-simsiam"


@pytest.mark.parametrize(
    ("text", "options", "label"),
    [
        ("m", {}, "m"),
        ("m:b=2,a=1", {"b": 2, "a": 1}, "m:a=1,b=2"),
        ("m: pma = false , g = .5", {"pma": False, "g": 0.5}, "m:g=0.5,pma=false"),
        ("m:pool=concat", {"pool": "concat"}, "m:pool=concat"),
        ('m:name="1"', {"name": "1"}, 'm:name="1"'),
        ("m:widths=8,4,x=1", {"widths": [8, 4], "x": 1}, "m:widths=8,4,x=1"),
        ("m:t.b=1,t.a=0.5", {"t": {"b": 1, "a": 0.5}}, "m:t.a=0.5,t.b=1"),
        ("m:average=own/a.py:Mine", {"average": "own/a.py:Mine"}, "m:average=own/a.py:Mine"),
        ("own/m.py:Mine:k=3", {"k": 3}, "own/m.py:Mine:k=3"),
        ("own/m.py:Mine", {}, "own/m.py:Mine"),
    ],
)
def test_a_reference_has_one_label_which_reads_back(text, options, label):
    found = parse_method(text)
    assert (found.options, found.label) == (options, label)
    assert parse_method(label) == found
    assert EvalSpec(methods=(text,)).methods == (label,)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"methods": ["m:pma"]}, "expected method m:option=value, got 'pma'"),
        ({"methods": ["m@pretrain"]}, "'m@pretrain': drop @pretrain"),
        ({"methods": ["m:a=1,a.b=2"]}, r"table in 'm:a=1,a\.b=2'"),
        ({"methods": ["m:a=1,b=2", "m:b=2,a=1"]}, "methods, got m:a=1,b=2, m:a=1,b=2"),
        ({"methods": ["m", "m:a=1"], "method": {"m": {"a": 1}}}, "m, m:a=1 .*drop one"),
        ({"methods": ["m:a=1"], "method": {"m": {"a": 2}}}, r"method\.m\.a, got 2 .*m:a=1"),
        ({"methods": ["m:t.a=1"], "method": {"m": {"t": {"a": 2}}}}, r"method\.m\.t\.a, got 2 .*m:t\.a=1"),
        ({"methods": ["m:a=1"], "method": {"m:a=1": {"b": 2}}}, "method 'm:a=1'. .*Known: m"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(settings, match):
    with pytest.raises(UsageError, match=match) as caught:
        specs.read({**QUICK, **settings})
    assert "\n" not in str(caught.value)


def test_options_of_both_places_are_joined():
    table = {"m": {"a": 1, "t": {"x": 1}}}
    spec = specs.read({**QUICK, "methods": "m:b=2,t.y=2,m:a=1,t.x=1,c=3", "method": table})
    first, second = map(spec.get_method, spec.methods)
    assert first == MethodSpec(name="m", options={"a": 1, "b": 2, "t": {"x": 1, "y": 2}})
    assert second == MethodSpec(name="m", options={"a": 1, "c": 3, "t": {"x": 1}})
    assert spec.method == table, "which stays as it was"
    assert specs.read(tomllib.loads(specs.to_toml(spec))) == spec


def test_an_unknown_option_is_refused_with_the_known_ones():
    spec = specs.read({**QUICK, "methods": [f"{NAME}:pmaa=false"]})
    with pytest.raises(UsageError, match=f"{NAME}: .*'pmaa'.*mean pma.*Known: average"):
        build_method(build_cell(spec, spec.methods[0], 0))


def test_an_option_in_the_name_is_the_option_in_the_table():
    """The same cell, and so the same training; only the name of the result differs."""
    named = specs.read({**QUICK, "methods": [f"{NAME}:pma=false"]})
    table = specs.read({**QUICK, "methods": [NAME], "method": {NAME: {"pma": False}}})
    one, other = (build_cell(spec, spec.methods[0], 0) for spec in (named, table))
    assert (one, one.key) == (other, other.key)
    assert one.method.name == NAME
    (mine,), (theirs,) = list_trials(named), list_trials(table)
    assert (mine.method, theirs.method) == (f"{NAME}:pma=false", NAME)
    assert mine.key != theirs.key, "each record names its method"
    assert {one.key for one in list_baselines(named)} == {one.key for one in list_baselines(table)}
    plain = build_cell(specs.read({**QUICK, "methods": [NAME]}), NAME, 0)
    assert plain.key != one.key
    assert training.train(one, "cpu")[1].utility == training.train(other, "cpu")[1].utility


@pytest.mark.long
def test_one_method_under_two_options_is_compared_with_itself(tmp_path):
    labels = [NAME, f"{NAME}:gamma=0.2,pma=false", "local"]
    settings = {key: value for key, value in QUICK.items() if key != "attacks"}
    methods = f"{NAME},{NAME}:pma=false,gamma=0.2,local"
    report = evaluate(
        attack="logistic", defense="iso", strengths=[5], out=tmp_path, jobs=1, methods=methods, **settings
    )
    records = [json.loads(line)["record"] for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    results = {record["method"] for record in records if record["kind"] == "result"}
    assert results == set(labels)
    assert len({record["key"] for record in records}) == len(records)
    found = json.loads(report.to_json())
    assert list(dict.fromkeys(point["method"] for point in found["points"])) == labels
    assert {cap["method"] for cap in found["cap"]} == set(labels[:2])
    table = report.table(details=True)
    assert all(re.search(rf"^ *{re.escape(label)}, ", table, re.MULTILINE) for label in labels)
    assert set(labels[:2]) <= {text.get_text().split(", ")[0] for text in _texts(report.plot())}
    spec = specs.read(specs.read_toml(tmp_path / "spec.toml"))
    assert list(spec.methods) == labels
    assert {row.method for row in build_manifest(spec).rows} == set(labels)
    assert Report.read(tmp_path).table(details=True) == table
    assert not engine.plan(spec, Store(tmp_path)).tasks, "running it again computes nothing"


def _texts(figure):
    return [text for legend in [*figure.legends, *(axes.get_legend() for axes in figure.axes)] if legend
            for text in legend.get_texts()] + [text for axes in figure.axes for text in axes.texts]  # fmt: skip


@pytest.mark.long
def test_a_result_under_a_name_does_not_stand_for_one_under_another(tmp_path):
    """The same training, once with the option in the table and once in the name: one cell, two records."""
    settings = {key: value for key, value in QUICK.items() if key != "attacks"}
    for methods, table in (([NAME], {NAME: {"pma": False}}), ([f"{NAME}:pma=false"], {})):
        report = evaluate(attack="logistic", out=tmp_path, jobs=1, methods=methods, method=table, **settings)
        assert {point.method for point in report.points} == set(methods)
    assert len(list(tmp_path.glob("cells/*/cell.json"))) == 2, "one stage and one cell"


@pytest.mark.long
def test_train_takes_options_in_the_name():
    settings = {key: QUICK[key] for key in ("dataset", "data", "train")}
    named = train(method=f"{NAME}:pma=false", **settings)
    given = train(method=NAME, options={"pma": False}, **settings)
    both = train(method=f"{NAME}:pma=false", options={"gamma": 0.5}, **settings)
    logits = named.predict("test")
    assert torch.equal(logits, given.predict("test"))
    assert torch.equal(logits, both.predict("test"))
    assert not torch.equal(logits, train(method=NAME, **settings).predict("test"))
    with pytest.raises(UsageError, match=r"simsiam\.pma, got True .*False"):
        train(method=f"{NAME}:pma=false", options={"pma": True}, **settings)
