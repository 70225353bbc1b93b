"""How long the way is from the settings of an evaluation to a step of its training."""

import pickle
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest

import vflsec
from vflsec.cli import cli
from vflsec.core import registry
from vflsec.methods.split_training import SplitTraining
from vflsec.run import plan
from vflsec.run import spec as specs
from vflsec.run.cell import Technique

pytestmark = pytest.mark.usefixtures("few_trees_in_module")  # the subject is not how well trees guess

ROOT = Path(__file__).parents[2]
PLACES = tuple(str(ROOT / name) for name in ("vflsec", "defenses", "attacks", "protocols"))
TOY = {"dataset": "toy", "data": {"options": {"rows": 150}}, "attack": "norm", "defense": "iso:lambda=5",
       "train": {"epochs": 2}, "aux": {"n": 20, "folds": 0}, "seeds": 1, "jobs": 1}  # fmt: skip


@pytest.fixture
def calls(monkeypatch):
    """Count look-ups in the registry from now on."""
    counted = Counter()

    def counting(name, original):
        def count(*arguments):
            counted[name] += 1
            return original(*arguments)

        return count

    for name in ("load", "list_all"):
        monkeypatch.setattr(registry, name, counting(name, getattr(registry, name)))
    specs._load_class.cache_clear()
    return counted


@pytest.mark.long
def test_each_name_is_looked_up_once(calls, tmp_path):
    """A record lists all attacks that could be mounted, so that each one is loaded."""
    attacks = registry.list_all("attacks")
    calls.clear()
    vflsec.evaluate(**TOY, out=tmp_path, progress=False)
    assert len(attacks) <= calls["load"] <= len(attacks) + 3
    assert calls["list_all"] <= 10


def test_a_cell_is_resolved_again_where_it_is_sent():
    spec = specs.read({"dataset": "toy", "methods": ["fedhssl-simsiam"], "fixed": ["iso:lambda=5"]})
    cell = plan.build_cell(spec, spec.methods[0], 0)
    sent = pickle.loads(pickle.dumps(cell))  # noqa: S301  (made here)
    assert (sent, sent.key) == (cell, cell.key)
    assert sent.method.kind is cell.method.kind, "a preset, which has no module that it could be imported from"


def test_an_option_that_names_a_protocol_becomes_its_class_and_keeps_its_name_in_keys():
    plain, masked = (
        plan.resolve(specs.parse_method(text)) for text in ("fedsplitnn:boundary=plain", "fedsplitnn:boundary=paillier")
    )
    assert issubclass(masked.options["boundary"], registry.load("protocols", "paillier"))
    assert (plain.keyed, masked.keyed) == ({"boundary": "plain"}, {"boundary": "paillier"})
    assert masked.drop_option("boundary") == plan.resolve(specs.parse_method("fedsplitnn"))


def test_a_defense_at_another_strength_is_the_same_class():
    defense = plan.resolve(specs.parse_defense("iso:lambda=5"))
    weaker = defense.with_strength(1.0)
    assert weaker.defense().strength == 1.0
    assert weaker == msgspec.structs.replace(defense, spec=specs.parse_defense("iso:lambda=1"))


STRENGTH = 7.25
RECORDED = ("vflsec/report/", "vflsec/results/")
"""What reads the strength from records, which is the last stop of the value."""


def holds(value):
    """Whether ``value`` is the strength or holds it: as an item, a field, or an attribute, or in a technique's spec."""
    if isinstance(value, msgspec.Struct):
        parts = [*msgspec.structs.asdict(value).values()]
        parts += msgspec.structs.asdict(value.spec).values() if isinstance(value, Technique) else []
    elif isinstance(value, dict):
        parts = value.values()
    else:
        parts = value if isinstance(value, tuple | list | set) else getattr(value, "__dict__", {}).values()
    return any(isinstance(part, float) and part == STRENGTH for part in (value, *parts))


def test_few_functions_get_the_strength_of_a_defense(tmp_path):
    """Counted are functions with a name of which an argument holds it; what is handed on whole holds it deeper."""
    entered = set()

    def note(frame, event, _):
        code = frame.f_code
        if event != "call" or code.co_name.startswith("<") or not code.co_filename.startswith(PLACES):
            return
        count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
        arguments = [frame.f_locals.get(name) for name in code.co_varnames[:count]]
        if any(map(holds, arguments)):
            entered.add((code.co_filename.removeprefix(f"{ROOT}/"), code.co_qualname))

    options = {**TOY, "defense": "iso", "strengths": [STRENGTH], "train": {"epochs": 1}}
    sys.setprofile(note)
    try:
        vflsec.evaluate(**options, out=tmp_path, progress=False)
    finally:
        sys.setprofile(None)
    running = sorted(place for place in entered if not place[0].startswith(RECORDED))
    assert ("defenses/iso.py", "IsotropicNoise.on_gradient") in running
    assert len(running) <= 28, running
    assert len({path for path, _ in running}) <= 12, running


@pytest.mark.long
def test_ten_frames_lie_between_the_command_and_a_step_of_training(monkeypatch, tmp_path):
    """The command itself and the step among them."""
    stacks = []
    step = SplitTraining._update

    def noted(self, *arguments, **options):
        frame, names = sys._getframe(1), ["_update"]
        while frame and not frame.f_code.co_filename.endswith("core.py"):  # of click, which calls the command
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        stacks.append(names[::-1])
        return step(self, *arguments, **options)

    monkeypatch.setattr(SplitTraining, "_update", noted)
    options = ["--defense", "iso:lambda=5", "--seeds", "1", "--jobs", "1", "--set", "train.epochs=1"]
    options += ["--set", "data.options.rows=150", "--set", "aux.n=20", "--set", "aux.folds=0"]
    with pytest.raises(SystemExit):
        cli.main(["eval", "--dataset", "toy", "--attack", "norm", "--out", str(tmp_path), *options])
    assert stacks
    assert all(names[0] == "command" and len(names) <= 10 for names in stacks), stacks[0]
