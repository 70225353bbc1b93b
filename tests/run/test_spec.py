"""Settings: the grammar, the merge, and one line for every mistake."""

import re
import tomllib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vflsec.base.errors import UsageError
from vflsec.core import registry
from vflsec.run import spec as specs
from vflsec.run.grammar import parse_reference, parse_value, split_list
from vflsec.run.spec import AttackSpec, DefenseSpec, EvalSpec


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("iso", ("iso", {}, None)),
        ("iso:lambda=5", ("iso", {"lambda": 5}, None)),
        ("iso:lambda=0.5@embedding+parameters", ("iso", {"lambda": 0.5}, ("embedding", "parameters"))),
        ("mc:mode=mixmatch,epochs=3", ("mc", {"mode": "mixmatch", "epochs": 3}, None)),
        (
            "iso:lambda=.5,5,25.,by=active@embedding",
            ("iso", {"lambda": [0.5, 5, 25.0], "by": "active"}, ("embedding",)),
        ),
        ("a/b.py:Mine", ("a/b.py:Mine", {}, None)),
        ("a/b.py:Mine:k=3@gradient", ("a/b.py:Mine", {"k": 3}, ("gradient",))),
    ],
)
def test_references(text, expected):
    assert parse_reference(text, "defense") == expected


def test_the_point_of_a_defense_is_no_option():
    with pytest.raises(UsageError, match="iso@embedding, got at="):
        specs.parse_defense("iso:lambda=5,at=embedding")


def test_split_list_keeps_options_together():
    assert split_list("mc:mode=mixmatch,epochs=3, norm,x.py:A:k=1") == [
        "mc:mode=mixmatch,epochs=3",
        "norm",
        "x.py:A:k=1",
    ]


def test_a_defense_takes_its_strength_by_its_own_name():
    assert specs.parse_defense("iso:lambda=5@gradient") == DefenseSpec(name="iso", strength=5.0, at=("gradient",))
    assert specs.parse_defense("iso:strength=5") == DefenseSpec(name="iso", strength=5.0)
    assert specs.parse_defense("compress:lambda=.5") == DefenseSpec(name="compress", strength=0.5)


def test_split_list_keeps_numbers_together():
    assert split_list("iso:lambda=1,5@gradient+embedding, norm,compress:strength=.5,.9,at=x,b:k=1,1e-3") == [
        "iso:lambda=1,5@gradient+embedding", "norm", "compress:strength=.5,.9,at=x", "b:k=1,1e-3",
    ]  # fmt: skip


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=4))
def test_numbers_come_back_as_they_were(numbers):
    text = "iso:lambda=" + ",".join(map(repr, numbers))
    assert split_list(f"{text},norm") == [text, "norm"]
    _, options, _ = parse_reference(text, "defense")
    assert options["lambda"] == (numbers if len(numbers) > 1 else numbers[0])


@pytest.mark.parametrize(
    ("text", "value"),
    [(".5", 0.5), ("-.5e-1", -0.05), ("2.", 2.0), ("007", "007"), (".", "."), ("1.2.3", "1.2.3"), ("true", True)],
)
def test_values(text, value):
    assert parse_value(text) == value


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (specs.parse_defense, "iso:lambda", r"expected defense iso:option=value, got 'lambda'"),
        (specs.parse_defense, "iso:lambda=much", "lambda in 'iso:lambda=much'"),
        (specs.parse_defense, "izo", "'izo'. Did you mean iso"),
        (specs.parse_attack, "mc@a+b", "one phase .*mc attacks"),
        (specs.parse_attack, "mc:epochs=5,epochs=6", "expected epochs once"),
    ],
)
def test_wrong_references(parse, text, message):
    with pytest.raises(UsageError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": 3}, "settings: .*'seed'.*mean seeds.*dataset, data"),
        ({"data": {"n_labelled": 3}}, "'n_labelled' - at 'data'.*mean n_labeled"),
        ({"train": {"lr": "fast"}}, r"'str' - at 'train\.lr'"),
        ({"train": {"lr": 0}}, r"expected train.lr > 0, got 0"),
        ({"seeds": 0}, "expected seeds > 0, got 0"),
        ({"attacks": []}, "of attacks, got none"),
        ({"methods": ["fedsplitnn", "fedsplitnn"]}, "expected different methods"),
        ({"defenses": [{"name": "iso"}, {"name": "iso"}], "strengths": [1]}, "expected different defenses"),
        ({"defenses": ["iso:lambda=0"]}, "iso, got none: add --lambda"),
        ({"defenses": ["iso"], "strengths": [0]}, "iso, got none: add --lambda"),
        ({"defenses": ["iso", "max-norm:strength=-1,2"]}, r"max-norm, .*got \[-1\.0, 2\.0\]"),
        ({"defenses": ["iso:lambda=1,much"]}, "expected defense iso:option=value, got 'much'"),
        ({"defenses": ["iso:lambda=1,true"]}, "expected defense iso:option=value, got 'true'"),
        ({"defenses": ["iso:lambda=1,strength=2"]}, "once, got 'iso:lambda=1,strength=2'"),
        ({"defenses": ["iso:lambda=1", "iso:lambda=5"]}, "defenses, got iso, iso"),
        ({"fixed": ["iso:lambda=1,5"]}, "iso, got 1, 5"),
        ({"strengths": [1]}, "--defense with --lambda, got"),
        ({"defenses": [{"name": "iso"}], "strengths": [-1]}, r"iso, .*got \[-1\.0\]"),
        ({"defenses": ["iso:lambda=5"], "strengths": [1]}, "for iso and .*drop one"),
        ({"defenses": [{"name": "iso", "strength": 5}], "strengths": [1]}, "iso with strength 5"),
        ({"fixed": ["iso"]}, "iso, got 0: write iso:lambda=5"),
        ({"fixed": ["compress"]}, r"got 0: write compress:strength=0\.5"),
        ({"fixed": ["izo:lambda=5"]}, "'izo'. Did you mean iso"),
        ({"fixed": [5]}, r"'int' - at 'fixed\[0\]'"),
        ({"method": {"rounds": 5}}, r"'method\[...\]': write method\.NAME\.OPTION"),
        ({"aux": {"n": -1}}, "expected aux.n >= 0"),
        ({"aux": {"folds": 1}}, "aux.folds 0 or >= 2"),
        ({"method": {"secureboost": {}}}, r"fedsplitnn, got method\.secureboost: write method\.fedspl"),
        ({"method": {"fedspl": {}}}, "'fedspl'. Did you mean fedsplitnn"),
    ],
)
def test_wrong_settings_teach(settings, message):
    with pytest.raises(UsageError, match=message) as caught:
        specs.read(settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ({"fixed": "iso:lambda=5@embedding"}, {"fixed": [{"name": "iso", "strength": 5.0, "at": ["embedding"]}]}),
        ({"attacks": "mc:epochs=3,lr=0.1, logistic"}, {"attacks": [
            {"name": "mc", "options": {"epochs": 3, "lr": 0.1}}, {"name": "logistic"},
        ]}),
        ({"defenses": ["iso:lambda=5"]}, {"defenses": [{"name": "iso", "strengths": [5.0]}]}),
        ({"defenses": ["iso:lambda=5@gradient", "iso@embedding"], "strengths": [1]}, {"defenses": [
            {"name": "iso", "at": ["gradient"], "strengths": [5.0]}, {"name": "iso", "at": ["embedding"]},
        ], "strengths": [1.0]}),
        ({"defenses": "iso:lambda=1,5,compress:strength=.25,.5"}, {"defenses": [
            {"name": "iso", "strengths": [1.0, 5.0]}, {"name": "compress", "strengths": [0.25, 0.5]},
        ]}),
        ({"defenses": "gaussian-dp:epsilon=2,8,clip=1.0"}, {"defenses": [
            {"name": "gaussian-dp", "strengths": [0.5, 0.125], "options": {"clip": 1.0, "unit": "1/epsilon"}},
        ]}),
        ({"defenses": "iso,iso@embedding", "strengths": [1]}, {"defenses": [
            {"name": "iso"}, {"name": "iso", "at": ["embedding"]},
        ], "strengths": [1.0]}),
        ({"methods": "fedsplitnn"}, {}),
    ],
)  # fmt: skip
def test_texts_stand_for_tables(text, parsed):
    assert specs.read(text) == specs.read(parsed)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seeds": 3}, "'seeds'. Known: data, dataset, fixed"),
        ({"trian": {}}, "'trian'. Did you mean train"),
        ({"methods": ["a", "b"]}, "to train, got a, b"),
    ],
)
def test_what_a_training_does_not_have(settings, message):
    with pytest.raises(UsageError, match=message):
        specs.read_training(settings)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"dataset": "own/loans.toml"}, "loans-fedsplitnn-mc"),
        ({"attacks": ["own/near.py:Nearest"]}, "credit-default-fedsplitnn-near"),
        ({"defenses": [{"name": "own/d.py:Mine", "at": ("gradient",)}], "strengths": [1]},
         "credit-default-fedsplitnn-d@gradient-mc"),
        ({"methods": ["own/m.py:Mine"]}, "credit-default-m-mc"),
    ],
)  # fmt: skip
def test_the_name_is_one_folder(settings, name):
    assert specs.read(settings).name == name


@pytest.mark.parametrize("assignment", ["data.n_labeled", "=3", "data.=3"])
def test_wrong_assignments(assignment):
    with pytest.raises(UsageError, match="expected --set path.to.key=value"):
        specs.merge({}, [assignment])


def test_assignment_through_a_value():
    with pytest.raises(UsageError, match="expected a table at 'seeds'"):
        specs.merge({"seeds": 3}, ["seeds.x=1"])


def test_merge_leaves_its_input_alone():
    settings = {"data": {"n_labeled": 5, "options": {"rows": 3}}}
    assert specs.merge(settings, ["data.n_labeled=7", "data.options.rows=4", "model.head=mlp"]) == {
        "data": {"n_labeled": 7, "options": {"rows": 4}},
        "model": {"head": "mlp"},
    }
    assert settings == {"data": {"n_labeled": 5, "options": {"rows": 3}}}


@given(
    st.builds(
        EvalSpec,
        seeds=st.integers(1, 9),
        attacks=st.just((AttackSpec(name="mc", options={"mode": "mixmatch", "lr": 0.1}),)),
        defenses=st.just((DefenseSpec(name="iso", at=("embedding",)),)),
        strengths=st.lists(st.floats(0.1, 99), min_size=1, max_size=3).map(tuple),
    )
)
def test_toml_round_trip(spec):
    assert specs.read(tomllib.loads(specs.to_toml(spec))) == spec


def test_defaults_round_trip():
    assert specs.read(msgspec.to_builtins(EvalSpec())) == EvalSpec()


def test_config_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UsageError, match="expected a TOML file at"):
        specs.read_toml(tmp_path / "none.toml")
    with pytest.raises(UsageError, match="expected a TOML file at"):
        specs.read_toml(tmp_path)
    (tmp_path / "bad.toml").write_text("a = ")
    with pytest.raises(UsageError, match="is not TOML"):
        specs.read_toml(tmp_path / "bad.toml")


@pytest.mark.parametrize(
    ("text", "strength", "options", "at"),
    [
        ("label-dp:epsilon=2@labels", 0.5, {}, ("labels",)),
        ("label-dp:epsilon=inf", 0.0, {}, None),
        ("gaussian-dp:epsilon=4,clip=1.0", 0.25, {"clip": 1.0, "unit": "1/epsilon"}, None),
        ("laplace-dp:strength=4@embedding", 4.0, {}, ("embedding",)),
    ],
)
def test_a_private_defense_takes_an_epsilon(text, strength, options, at):
    spec = specs.parse_defense(text)
    assert (spec.strength, spec.options, spec.at) == (strength, options, at)


def test_epsilons_stand_for_strengths():
    spec = specs.read({"defenses": ["gaussian-dp", "label-dp"], "epsilons": [1, 2, 8]})
    assert spec.strengths == (1.0, 0.5, 0.125)
    assert [d.options for d in spec.defenses] == [{"unit": "1/epsilon"}, {}]
    assert specs.read(tomllib.loads(specs.to_toml(spec))) == spec


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"defenses": ["iso"], "epsilons": [1]}, "with iso:lambda=... or --lambda"),
        ({"defenses": ["label-dp"], "epsilons": [1], "strengths": [1]}, "the strength once"),
        ({"defenses": ["label-dp:epsilon=2"], "epsilons": [1]}, "the strength once"),
        ({"defenses": ["gaussian-dp:epsilon=2,strength=1"]}, "the strength once"),
        ({"defenses": ["label-dp"], "epsilons": [0]}, "epsilon > 0, got 0"),
        ({"fixed": ["iso:epsilon=2"]}, "with iso:lambda=... or --lambda"),
        ({"fixed": ["label-dp"]}, "write label-dp:epsilon=5"),
        ({"epsilons": [1]}, "got no defense"),
    ],
)
def test_wrong_epsilons_teach(settings, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        specs.read(settings)


def test_strengths_are_a_defenses_own_or_those_of_all_or_its_usual_ones():
    own = specs.read({"defenses": ["iso:lambda=2", "compress"], "strengths": [0.5]})
    assert [own.list_strengths(d) for d in own.defenses] == [(2.0,), (0.5,)]
    usual = specs.read({"defenses": ["iso:lambda=2", "compress", {"name": "sign"}]})
    assert [usual.list_strengths(d) for d in usual.defenses] == [(2.0,), (0.1, 0.25, 0.5), (0.25, 0.5, 1.0)]
    assert usual.strengths == ()
    private = specs.read({"defenses": ["iso:lambda=2", "gaussian-dp"], "epsilons": [8]})
    assert [(private.list_strengths(d), d.options) for d in private.defenses] == [
        ((2.0,), {}), ((0.125,), {"unit": "1/epsilon"}),
    ]  # fmt: skip
    for spec in (own, usual, private):
        assert specs.read(tomllib.loads(specs.to_toml(spec))) == spec


@pytest.mark.parametrize("name", registry.list_all("defenses"))
def test_the_usual_strengths_can_be_used(name):
    made = registry.load("defenses", name)
    assert len(made.strengths) == (1 if name == "phe" else 3)  # which is on or off
    assert list(made.strengths) == sorted(made.strengths)
    assert [made(strength).strength for strength in made.strengths] == list(made.strengths)
