"""An attack on a column is stored with the name of the column, of its party and of the median that splits it."""

import numpy as np
import pytest

from vflsec.base.errors import UsageError
from vflsec.data.partition import DataSpec, split_dataset
from vflsec.run import engine
from vflsec.run import spec as specs
from vflsec.run.describe import build_manifest, describe_attack
from vflsec.run.plan import load_dataset, resolve
from vflsec.run.spec import AttackSpec

CREDIT = {"adversary": "active", "seeds": 1, "data": {"n_labeled": 500}}


def resolved(*attacks, **settings):
    spec, _ = engine.expand_attacks(specs.read({**CREDIT, **settings, "attacks": list(attacks)}))
    return spec


def test_the_default_column_is_stored_by_its_name():
    spec = resolved("attribute", "column-fusion")
    assert list(spec.labels) == ["attribute:column=SEX", "column-fusion"]
    attribute, features = build_manifest(spec).attacks
    assert (attribute.target, attribute.victim, attribute.column) == ("attribute SEX", "passive_1", "SEX")
    assert (features.target, features.victim, features.column) == ("features", "passive_1", "")
    assert resolved("attribute:column=SEX").attacks[0] == spec.attacks[0], "so both have the same results"


def test_all_columns_are_those_that_vary_and_each_number_has_its_median():
    entries = build_manifest(resolved("attribute:column=all,folds=3")).attacks
    columns = [entry.column for entry in entries]
    assert columns == ["LIMIT_BAL", "SEX", "EDUCATION", "MARRIAGE", "AGE", "PAY_0", "PAY_2", "PAY_3", "PAY_4", "PAY_5"]
    assert all("folds=3" in entry.label for entry in entries)
    above = {entry.column: entry.above for entry in entries}
    assert above["SEX"] is None
    dataset = load_dataset("credit-default")
    split = split_dataset(dataset, DataSpec(n_labeled=500), 0)
    holder = next(one.frame for one in dataset.parties if "LIMIT_BAL" in one.frame)
    for column in ("LIMIT_BAL", "AGE", "PAY_0"):
        assert above[column] == np.sort(holder.loc[split.ids["train"], column])[249]


def test_every_attack_tries_each_column_with_the_quick_one():
    labels = resolved("all").labels
    assert sum(label.startswith("attribute:") for label in labels) == 10
    assert sum(label.startswith("attribute-fusion:") for label in labels) == 1


def test_labels_have_neither_victim_nor_column():
    spec = specs.read({"seeds": 1})
    entry = describe_attack(resolve(AttackSpec(name="mc")), "mc", "passive_1", None)
    assert (entry.victim, entry.column, entry.above) == ("", "", None)
    assert engine.expand_attacks(spec)[0] is spec


def test_an_unknown_column_is_one_line():
    with pytest.raises(UsageError, match=r"unknown column of passive_1 'PAY'"):
        resolved("attribute:column=PAY")
