"""Names, suggestions, files, entry points; nothing heavy is imported to list what there is."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from vflsec.base.errors import UsageError
from vflsec.core import registry
from vflsec.core.registry import Entry

MINE = '''
from vflsec.core.defense import Defense

class Mine(Defense):
    """Does nothing."""
    name = "mine"
    reference = guarantee = "made for a test"
    points = ()

    def __init__(self, strength, *, at=None, bound: int = 2, loose=None):
        super().__init__(strength, at=at)
        self.bound, self.loose = bound, loose

NUMBER = 3
'''


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return f"{path}:Mine"


@pytest.fixture
def plugged(monkeypatch):
    """Pretend that installed packages bring these entry points: name, value, distribution."""

    def plug(*points):
        made = [
            SimpleNamespace(name=n, value=v, dist=d and SimpleNamespace(name=d, version="1.2")) for n, v, d in points
        ]
        monkeypatch.setattr(registry, "entry_points", lambda group: made if group == "vflsec.attacks" else [])
        registry._list_installed.cache_clear()

    yield plug
    registry._list_installed.cache_clear()


@pytest.mark.parametrize("kind", registry.PACKAGES)
def test_every_entry_resolves_and_has_a_summary(kind):
    for name, entry in registry.list_all(kind).items():
        found = registry.load(kind, name)
        assert registry.summarize(entry)
        if kind != "datasets":
            assert found.name == name


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: registry.list_all("atacks"), "'atacks'. Did you mean attacks"),
        (lambda: registry.load("attacks", "logistc"), "'logistc'.*mean logistic.*Known: "),
        (lambda: registry.load("defenses", "zzz"), "unknown defense 'zzz'. Known: .*iso"),
        (lambda: registry.load("attacks", "no/such/file.py:Mine"), r"Python file at no/such/file\.py"),
        (lambda: registry.build("attacks", "mc", epoch=3), "'epoch'. Did you mean epochs"),
        (lambda: registry.build("attacks", "mc", epochs="many"), "mc: option epochs='many': Expected `int"),
        (lambda: registry.build("attacks", "mc", mode="magic"), "mc: unknown mode 'magic'. Known: "),
        (lambda: registry.build("attacks", "mc", epochs=0), "expected epochs > 0, got 0"),
    ],
)
def test_what_is_wrong_is_said_in_words(call, match):
    with pytest.raises(UsageError, match=match):
        call()


def test_a_class_is_built_from_a_file(mine):
    made = registry.build("defenses", mine, 2.0, bound=5, loose="anything")
    assert (made.strength, made.bound, made.loose) == (2.0, 5, "anything")
    assert registry.load("defenses", mine) is type(made)


def test_a_file_without_the_class(mine):
    with pytest.raises(UsageError, match=r"'Yours' in .*mine\.py"):
        registry.load("defenses", mine.replace(":Mine", ":Yours"))


@pytest.mark.parametrize("attribute", ["Mine", "NUMBER"])
def test_a_thing_of_another_kind_is_refused(mine, attribute):
    with pytest.raises(UsageError, match=r"subclass of vflsec\.core\.attack\.Attack"):
        registry.load("attacks", mine.replace(":Mine", f":{attribute}"))


def test_a_broken_file_is_refused_each_time(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import no_such_module")
    for _ in range(2):  # a failed import must not leave half a module behind
        with pytest.raises(UsageError, match=r"broken\.py .*ModuleNotFoundError"):
            registry.load("attacks", f"{path}:Mine")


def test_a_file_that_exits_is_refused(tmp_path):
    path = tmp_path / "leaves.py"
    path.write_text("import sys; sys.exit(0)")
    with pytest.raises(UsageError, match=r"leaves\.py .*SystemExit: 0"):
        registry.load("attacks", f"{path}:Mine")


def test_a_file_is_run_as_it_is_whatever_bytecode_was_kept(mine, tmp_path, monkeypatch):
    """Python takes bytecode for that of a text with the same size and time."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "mine.py"
    for number in (3, 4):
        path.write_text(MINE.replace("bound: int = 2", f"bound: int = {number}"))
        os.utime(path, (1e9, 1e9))
        assert registry.build("defenses", f"{path}:Mine", 1.0).bound == number


def test_identity_of_a_file_is_its_text(mine, tmp_path):
    copy = tmp_path / "elsewhere.py"
    copy.write_text(MINE)
    identity = registry.identify("defenses", mine)
    assert identity == registry.identify("defenses", f"{copy}:Mine")
    assert identity.startswith("Mine#")
    copy.write_text(MINE + "\n# changed")
    assert identity != registry.identify("defenses", f"{copy}:Mine")
    assert registry.identify("attacks", "mc") == "mc"


def test_a_class_that_does_not_say_what_it_is_gets_one_line(tmp_path):
    path = tmp_path / "bare.py"
    path.write_text(MINE.replace('    reference = guarantee = "made for a test"\n', ""))
    with pytest.raises(UsageError, match="state its reference, guarantee"):
        registry.load("defenses", f"{path}:Mine")


def test_a_constructor_that_fails_gets_one_line(tmp_path):
    path = tmp_path / "failing.py"
    path.write_text(MINE.replace("super().__init__(strength, at=at)", "raise KeyError('x')"))
    with pytest.raises(UsageError, match="failing.py:Mine cannot be made: KeyError: 'x'"):
        registry.build("defenses", f"{path}:Mine", 1.0)


def test_an_entry_point_that_does_not_import_gets_one_line(plugged):
    plugged(("telepathy", "no_such_module:Telepathy", "their-package"))
    with pytest.raises(UsageError, match=r"'telepathy' from their-package 1\.2"):
        registry.load("attacks", "telepathy")


def test_a_plugin_is_listed_under_its_package(plugged):
    plugged(("telepathy", "their.module:Telepathy", "their-package"), ("odd", "odd:Odd", None))
    found = registry.list_all("attacks")
    assert found["telepathy"] == Entry("telepathy", "their.module:Telepathy", "their-package 1.2")
    assert registry.summarize(found["telepathy"]) == "plug-in from their-package 1.2"
    assert found["odd"].origin == "unknown package"
    assert registry.identify("attacks", "telepathy") == "telepathy@their-package 1.2"


def test_a_plugin_must_not_take_a_built_in_name(plugged):
    plugged(("mc", "their.module:Telepathy", "their-package"))
    with pytest.raises(UsageError, match=r"their-package 1\.2 .*'mc' in attacks"):
        registry.list_all("attacks")


def test_listing_imports_no_torch():
    code = (
        "import sys; from vflsec.core import registry\n"
        "[registry.summarize(e) for kind in registry.PACKAGES for e in registry.list_all(kind).values()]\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


PRESETS = """
from vflsec.core.registry import make_preset

Gentle = make_preset("vflsec.defenses.iso:IsotropicNoise", "Isotropic noise, gently.", strengths=(0.1, 0.2))
Wrong = make_preset("vflsec.defenses.iso:IsotropicNoise", "Isotropic noise.", strenghts=(0.1,))
Lost = make_preset("no_such_module:Class", "Of nothing.")
Again = make_preset("vflsec.attacks.norm:Norm", "The norm of gradients, again.", version=9)
"""


@pytest.fixture
def presets(tmp_path):
    path = tmp_path / "presets.py"
    path.write_text(PRESETS)
    return path


def test_a_preset_in_a_file_is_a_subclass_with_other_settings(presets):
    base = registry.load("defenses", "iso")
    found = registry.load("defenses", f"{presets}:Gentle")
    assert issubclass(found, base)
    assert (found.name, found.strengths, found.__doc__) == ("Gentle", (0.1, 0.2), "Isotropic noise, gently.")
    assert found.version == base.version
    assert found is registry.load("defenses", f"{presets}:Gentle"), "the same class each time"
    assert registry.build("defenses", f"{presets}:Gentle", 2.0).strength == 2.0
    assert base.strengths != found.strengths
    assert registry.identify("defenses", f"{presets}:Gentle").startswith("Gentle#")


def test_a_preset_with_a_setting_that_its_class_has_not_is_refused(presets):
    with pytest.raises(UsageError, match="preset Wrong.*'strenghts'.*mean strengths"):
        registry.load("defenses", f"{presets}:Wrong")


def test_a_preset_of_another_kind_is_refused(presets):
    with pytest.raises(UsageError, match=r"subclass of vflsec\.core\.attack\.Attack"):
        registry.load("attacks", f"{presets}:Gentle")


def test_a_preset_of_a_class_that_does_not_import_gets_one_line(presets):
    with pytest.raises(UsageError, match="preset Lost: no_such_module:Class"):
        registry.load("defenses", f"{presets}:Lost")


def test_a_plugin_may_be_a_preset(plugged, presets, monkeypatch):
    monkeypatch.syspath_prepend(presets.parent)
    plugged(("norm-again", "presets:Again", "their-package"))
    found = registry.load("attacks", "norm-again")
    assert (found.name, found.version) == ("norm-again", 9)
    assert isinstance(registry.build("attacks", "norm-again"), registry.load("attacks", "norm"))
    assert registry.summarize(registry.list_all("attacks")["norm-again"]) == "plug-in from their-package 1.2"
