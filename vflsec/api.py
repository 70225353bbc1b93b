"""The Python API: what the command line does, in a few lines of a notebook."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from vflsec.core.attack import Attack
from vflsec.core.errors import Diverged
from vflsec.core.method import Progress, Trained
from vflsec.data.dataset import VerticalDataset
from vflsec.evaluation import engine, runner, world
from vflsec.evaluation import spec as specs
from vflsec.evaluation.plan import Cell
from vflsec.evaluation.spec import EvalSpec
from vflsec.evaluation.store import Record, Store
from vflsec.report.report import Report


def evaluate(
    *,
    attack: str | Iterable[str] = "mc",
    defense: str | Iterable[str] = (),
    strengths: Iterable[float] = (),
    out: Path | str | None = None,
    jobs: int | None = None,
    device: str = "cpu",
    **settings: Any,
) -> Report:
    """Train, defend, attack, score; return the report. What is in ``out`` already is not computed again.

    Example:
        >>> report = evaluate(attack="mc", defense="iso", strengths=[1, 5, 25])  # doctest: +SKIP

    Args:
        attack: one or several, as on the command line (``mc:mode=mixmatch``).
        defense: none, one or several; each is swept over ``strengths``.
        strengths: besides 0, which is always there.
        out: results folder; ``runs/<name>`` unless given.
        jobs: processes; as many as there are cores unless given.
        device: ``cpu`` or ``cuda``.
        settings: any field of ``EvalSpec``: ``dataset``, ``seeds``, ``data={"n_labeled": 200}``...

    Raises:
        UsageError: a setting or a name is wrong.
        InsufficientView: the adversary lacks what an attack needs.
    """
    chosen = {
        "attacks": [msgspec.to_builtins(specs.parse_attack(text)) for text in _several(attack)],
        "defenses": [msgspec.to_builtins(specs.parse_defense(text)) for text in _several(defense)],
        "strengths": list(strengths),
    }
    spec = specs.read({**chosen, **settings})
    folder = Path(out or Path("runs") / spec.name)
    for _ in run(spec, folder, jobs=jobs or cores(), device=device):
        pass
    report = Report.read(folder)
    report.save_curve(folder)
    return report


def run(spec: EvalSpec, folder: Path, *, jobs: int, device: str) -> Iterable[Record]:
    """Compute what ``folder`` lacks of ``spec``; yield each record when it is on the disk."""
    engine.check(spec)
    store = Store(folder)
    with store.lock():
        store.trim()
        todo = engine.plan(spec, store)
        store.write_settings(specs.to_toml(spec))
        yield from engine.evaluate(todo, store, jobs=jobs, device=device)


def train(
    *,
    dataset: str = "credit-default",
    method: str = "fedsplitnn",
    defense: str | Iterable[str] = (),
    seed: int = 0,
    device: str = "cpu",
    progress: Progress = lambda *_: None,
    **settings: Any,
) -> Trained:
    """Train one federation and return it.

    Example:
        >>> trained = train(dataset="digits", defense="iso:lambda=5")
        >>> trained.predict("test").shape
        torch.Size([539, 10])

    Args:
        dataset: a registered name or a TOML file.
        method: a registered name.
        defense: none, one or several, with their strengths.
        seed: drives split, model and noise.
        device: ``cpu`` or ``cuda``.
        progress: called with phase, epochs done, epochs in all.
        settings: ``data``, ``train``, ``model``, ``method_options`` as tables.

    Raises:
        UsageError: a setting or a name is wrong.
        Diverged: the loss is not finite.
    """
    trained, facts = runner.train(cell(dataset, method, defense, seed, settings), device, progress)
    if trained is None:
        raise Diverged(facts["error"])
    return trained


def cell(dataset: str, method: str, defense: str | Iterable[str], seed: int, settings: Mapping[str, Any]) -> Cell:
    """Return the cell that ``train`` trains."""
    options = dict(settings)
    own = options.pop("method_options", {})
    fixed = [msgspec.to_builtins(specs.parse_defense(text)) for text in _several(defense)]
    spec = specs.read({"dataset": dataset, "methods": [method], "fixed": fixed, **options})
    engine.check(spec)
    return Cell(
        dataset=dataset,
        data=spec.data,
        method=method,
        method_options=own,
        train=spec.train,
        model=spec.model,
        defenses=tuple(d for d in spec.fixed if d.strength > 0),
        seed=seed,
    )


def attack(name: str, **options: Any) -> Attack:
    """Return an attack by name: ``vflsec.attack("mc", mode="mixmatch")``; call it on a View.

    Raises:
        UsageError: an unknown name or option.
    """
    return runner.build_attack(specs.AttackSpec(name=name, options=options))


def load_dataset(name: str, **options: Any) -> VerticalDataset:
    """Return a bundled dataset by name, or the user's own from a TOML file.

    Raises:
        UsageError: an unknown name or option.
        DataError: a file is wrong.
    """
    return world.load_dataset(name, **options)


def cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _several(names: str | Iterable[str]) -> list[str]:
    return specs.split_list(names) if isinstance(names, str) else list(names)
