"""Installation: the documented commands get the CPU build of torch where the package index has only the CUDA build."""

import base64
import hashlib
import importlib.metadata
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PINNED = re.search(r"^torch==(.+)$", (ROOT / "torch-cpu.txt").read_text("utf-8"), re.MULTILINE)[1]


def wheel(folder: Path, name: str, version: str, requires: tuple[str, ...] = ()) -> None:
    """Write an empty wheel."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {one}\n" for one in requires)
    members = {
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    hashes = {
        path: base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
        for path, text in members.items()
    }
    record = "".join(f"{path},sha256={found},\n" for path, found in hashes.items()) + f"{info}/RECORD,,\n"
    with zipfile.ZipFile(folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in {**members, f"{info}/RECORD": record}.items():
            archive.writestr(path, text)


def index(folder: Path, *wheels: tuple[str, str, tuple[str, ...]]) -> str:
    """Make a package index of empty wheels; return its address."""
    for name, version, requires in wheels:
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        wheel(place, name, version, requires)
        links = "".join(f'<a href="{path.name}">{path.name}</a>\n' for path in sorted(place.glob("*.whl")))
        (place / "index.html").write_text(f"<!doctype html><html><body>{links}</body></html>", "utf-8")
    return folder.as_uri()


@pytest.fixture
def public(tmp_path: Path) -> str:
    """An index whose torch is the CUDA build."""
    cuda = ("nvidia-cublas", "filelock")
    wheels = [
        ("torch", PINNED, cuda),
        ("nvidia-cublas", "13", ()),
        ("filelock", "3.20", ()),
        ("app", "1", ("torch>=2",)),
    ]
    return index(tmp_path / "public", *wheels)


def resolve(*arguments: object) -> dict[str, str]:
    """Return what pip would install, by name."""
    own = ["--isolated", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-", "--no-cache-dir"]
    words = [sys.executable, "-m", "pip", *own, *map(str, arguments)]
    shown = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    return {one["metadata"]["name"]: one["metadata"]["version"] for one in json.loads(shown.stdout)["install"]}


def test_without_the_second_index_pip_takes_the_cuda_build(public: str):
    assert resolve("--index-url", public, "-c", "constraints.txt", "app") == {
        "app": "1",
        "torch": PINNED,
        "nvidia-cublas": "13",
        "filelock": "3.20",
    }


def test_the_documented_file_takes_the_cpu_build_and_looks_up_torch_alone(public: str, tmp_path: Path):
    second = index(tmp_path / "cpu", ("torch", f"{PINNED}+cpu", ("filelock",)))
    text = (ROOT / "torch-cpu.txt").read_text("utf-8")
    changed = tmp_path / "torch-cpu.txt"
    changed.write_text(text.replace("https://download.pytorch.org/whl/cpu", second), "utf-8")
    assert changed.read_text("utf-8") != text
    assert resolve("--index-url", public, "--no-deps", "-r", changed) == {"torch": f"{PINNED}+cpu"}


def test_the_cpu_build_satisfies_the_constraints():
    from packaging.requirements import Requirement

    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    (torch,) = (Requirement(line) for line in lines if line.startswith("torch"))
    assert torch.specifier.contains(f"{PINNED}+cpu")


def test_this_environment_has_no_cuda_libraries():
    if "+cpu" not in importlib.metadata.version("torch"):
        pytest.skip("the torch of this environment is not the CPU build")
    assert not [one.name for one in importlib.metadata.distributions() if (one.name or "").startswith("nvidia")]


def test_every_documented_installation_of_a_tree_names_the_cpu_build():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile", *ROOT.glob("docs/**/*.md")]
    for page in pages:
        lines = page.read_text("utf-8").splitlines()
        for number, line in enumerate(lines):
            if re.search(r"pip install [^|]*-c constraints\.txt", line):
                near = " ".join(lines[max(0, number - 1) : number + 1])
                shares = "shared.pth" in near  # the environment reads torch from .venv
                assert shares or "--no-deps -r torch-cpu.txt" in near, f"{page.name}:{number + 1}"
