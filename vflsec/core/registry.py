"""Finds attacks, defenses, protocols, methods and datasets by name, and imports them only when they are used.

Built-in ones are listed in the ``CATALOGUE`` of their package; others come from entry points of the groups
``vflsec.attacks`` and so on; and ``path/to/file.py:Class`` is accepted wherever a name is. An entry is a target,
``module:Class``, or a ``Preset`` of one; entry points and files may also name a preset.
"""

import ast
import hashlib
import inspect
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.machinery import SourceFileLoader
from importlib.metadata import entry_points
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

from vflsec.base.checks import describe_unknown, expect_known
from vflsec.base.errors import UsageError
from vflsec.core.options import list_classes, make

PACKAGES = {
    "attacks": "vflsec.attacks",
    "defenses": "vflsec.defenses",
    "protocols": "vflsec.protocols",
    "methods": "vflsec.methods",
    "datasets": "vflsec.data",
}
_BASES = {
    "attacks": "vflsec.core.attack:Attack",
    "defenses": "vflsec.core.defense:Defense",
    "protocols": "vflsec.core.protocol:Protocol",
    "methods": "vflsec.core.method:Method",
}


class Preset(NamedTuple):
    """A class with other class attributes, see ``make_preset``."""

    target: str
    doc: str
    settings: tuple[tuple[str, Any], ...]


def make_preset(target: str, doc: str, **settings: Any) -> Preset:
    """Return a catalogue entry for a member of a family: the class at ``target`` with some of its settings fixed.

    When the entry is loaded, it becomes a subclass of the target with the name of the entry.

    Example:
        >>> make_preset("vflsec.methods.fedhssl:FedHSSL", "FedHSSL with BYOL.", ssl="byol").target
        'vflsec.methods.fedhssl:FedHSSL'

    Args:
        target: ``module:Class``, imported when the entry is loaded.
        doc: docstring of the subclass; ``vflsec list`` shows its first line.
        settings: class attributes of the subclass that the target declares; hashable.
    """
    return Preset(target, doc, tuple(settings.items()))


class Entry(NamedTuple):
    """One registered thing: its name, where its object lives or what it is a preset of, who brought it."""

    name: str
    target: str | Preset
    origin: str


def list_all(kind: str) -> dict[str, Entry]:
    """Return all entries of ``kind`` (``attacks``, ``defenses``, ``protocols``, ``methods``, ``datasets``) by name.

    Raises:
        UsageError: an unknown kind, or a plug-in that takes a built-in name.
    """
    expect_known(PACKAGES, kind=kind)
    catalogue: Mapping[str, str | Preset] = import_module(PACKAGES[kind]).CATALOGUE
    return add_plugins(kind, {name: Entry(name, target, "built in") for name, target in catalogue.items()})


def load(kind: str, name: str) -> Any:
    """Return the class (for datasets, the loading function) registered as ``name``, or defined in a file.

    Raises:
        UsageError: an unknown name, with the nearest known one and the list; or a class of the wrong kind.
    """
    if is_file(name):
        loaded = _load_file(name)
    else:
        entry = _find(kind, name)
        if entry is None:
            raise UsageError(describe_unknown(kind.removesuffix("s"), name, list_all(kind)))
        loaded = resolve(entry)
    if isinstance(loaded, Preset):
        loaded = _specialize(name.rpartition(":")[2], loaded)
    base = _resolve(_BASES[kind]) if kind in _BASES else None
    if base and not (inspect.isclass(loaded) and issubclass(loaded, base)):
        raise UsageError(f"expected {name!r} to be a subclass of {base.__module__}.{base.__name__}, got {loaded!r}")
    stated = [fact for fact, kind in base.__annotations__.items() if "ClassVar" in str(kind)] if base else []
    lacking = [fact for fact in stated if not hasattr(loaded, fact)]
    if lacking:
        raise UsageError(f"expected {name!r} to state its {', '.join(lacking)}, got none: set them in the class")
    return loaded


def resolve(entry: Entry) -> Any:
    """Import and return what ``entry`` names.

    Raises:
        UsageError: it cannot be imported.
    """
    try:
        return _resolve(entry.target)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{entry.name!r} from {entry.origin} cannot be imported: {error}; update it") from error


def build(kind: str, name: str, *args: Any, **options: Any) -> Any:
    """Return an instance of ``name`` made with ``options``, each checked against the constructor's annotations.

    Raises:
        UsageError: an unknown name or option, or an option of the wrong type.
    """
    loaded = load(kind, name)
    return make(name, loaded, *args, **resolve_classes(name, loaded, options))


def resolve_classes(name: str, factory: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of ``factory`` with the protocol in place of its name, where an option takes a class of protocols.

    Raises:
        UsageError: no such protocol, or one of another kind; the message starts with ``name``.
    """
    resolved = dict(options)
    for option, base in list_classes(factory).items():
        value = options.get(option)
        if not isinstance(value, str):
            continue
        known = list_all("protocols")
        resolved[option] = load("protocols", value) if is_file(value) or value in known else None
        if resolved[option] is None or not issubclass(resolved[option], base):
            fitting = [other for other in known if issubclass(load("protocols", other), base)]
            way = f"or file.py:Class, a subclass of {base.__module__}.{base.__name__}"
            raise UsageError(f"{name}: {describe_unknown(option, value, fitting)}, {way}")
    return resolved


def identify(kind: str, name: str) -> str:
    """Return what cache keys call ``name``: for a file, its class and a hash of its text, wherever it lies."""
    if not is_file(name):
        entry = _find(kind, name)
        return name if entry is None or entry.origin == "built in" else f"{name}@{entry.origin}"
    path, attribute = name.rsplit(":", 1)
    if not Path(path).is_file():
        raise UsageError(f"expected a Python file at {path}, found none")
    return f"{attribute}#{hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]}"


def get_origin(kind: str, name: str) -> str:
    """Return where ``name`` comes from: ``built in``, a package with its version, or ``file``."""
    entry = None if is_file(name) else _find(kind, name)
    return entry.origin if entry else "file"


def summarize(entry: Entry) -> str:
    """Return the first docstring line of an entry's object, read without importing its module.

    ``(contrib)`` at its end stands for ``contrib = True`` in the class.
    """
    if isinstance(entry.target, Preset):
        return entry.target.doc.split("\n")[0]
    module, attribute = entry.target.split(":")
    if entry.origin != "built in":
        return f"plug-in from {entry.origin}"
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    node = next(n for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == attribute)
    contrib = any(isinstance(line, ast.Assign) and ast.unparse(line) == "contrib = True" for line in node.body)
    return (ast.get_docstring(node) or "").split("\n")[0] + (" (contrib)" if contrib else "")


def is_file(name: str) -> bool:
    """Whether ``name`` has the form ``path/to/file.py:Class``."""
    return ".py:" in name


def _find(kind: str, name: str) -> Entry | None:
    """Return one entry; packages that are installed are asked only for a name that is not in the catalogue."""
    expect_known(PACKAGES, kind=kind)
    target = import_module(PACKAGES[kind]).CATALOGUE.get(name)
    if target is not None:
        return Entry(name, target, "built in")
    return next((entry for entry in _list_installed(kind) if entry.name == name), None)


@cache
def _list_installed(kind: str) -> list[Entry]:
    """Return the entries of installed packages; looked up once, because a look-up reads the metadata of each package.

    Those of vflsec itself count as built in, and are left out where their folder was deleted.
    """
    installed = []
    for point in sorted(entry_points(group=f"vflsec.{kind}"), key=lambda point: point.name):
        origin = f"{point.dist.name} {point.dist.version}" if point.dist else "unknown package"
        is_ours = point.dist is not None and point.dist.name == "vflsec"
        with suppress(ModuleNotFoundError):  # of the package of the module
            if not is_ours or find_spec(point.module):
                installed.append(Entry(point.name, point.value, "built in" if is_ours else origin))
    return installed


def add_plugins(kind: str, catalogue: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return ``catalogue`` and the entries of installed packages by name.

    Raises:
        UsageError: a plug-in takes a name of the catalogue.
    """
    known = dict(catalogue)
    for entry in _list_installed(kind):
        if entry.name in known:
            way_out = "which is taken: uninstall it"
            raise UsageError(f"plug-in {entry.origin} claims the name {entry.name!r} in {kind}, {way_out}")
        known[entry.name] = entry
    return known


def _resolve(target: str | Preset) -> Any:
    if isinstance(target, Preset):
        return target
    module, attribute = target.split(":")
    return getattr(import_module(module), attribute)


@cache  # so that an entry is the same class each time it is loaded
def _specialize(name: str, preset: Preset) -> Any:
    """Return the subclass that ``preset`` describes."""
    try:
        base = _resolve(preset.target)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"preset {name}: {preset.target} cannot be imported: {error}") from error
    settings = dict(preset.settings)
    declared = {
        attribute for parent in base.__mro__ for attribute in (*vars(parent), *vars(parent).get("__annotations__", ()))
    }
    for setting in settings:
        if setting not in declared:
            known = {attribute for attribute in declared if attribute[0] != "_"}
            raise UsageError(f"preset {name}: {describe_unknown('setting', setting, known)}")
    return type(
        base.__name__, (base,), {"__doc__": preset.doc, "__module__": base.__module__, "name": name, **settings}
    )


class _TextLoader(SourceFileLoader):
    """Runs the text of a file: bytecode on the disk may be that of an earlier text with the same size and time."""

    def get_code(self, fullname: str) -> CodeType | None:
        return self.source_to_code(self.get_data(self.path), self.path)


def _load_file(name: str) -> Any:
    path_text, attribute = name.rsplit(":", 1)
    path = Path(path_text).resolve()
    if not path.is_file():
        raise UsageError(f"expected a Python file at {path_text}, found none")
    content = hashlib.sha256(str(path).encode() + path.read_bytes())  # an edited file is another module
    module_name = f"vflsec_file_{content.hexdigest()[:12]}"
    if module_name not in sys.modules:
        spec = spec_from_file_location(module_name, path, loader=_TextLoader(module_name, str(path)))
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        sys.modules[module_name] = module
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:  # a file that exits must not end the run as if all were well
            del sys.modules[module_name]
            raise UsageError(f"{path_text} cannot be imported: {type(error).__name__}: {error}") from error
    loaded = getattr(sys.modules[module_name], attribute, None)
    if loaded is None:
        raise UsageError(f"expected a class or function {attribute!r} in {path_text}, found none")
    return loaded
