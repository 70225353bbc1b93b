"""One evaluation from its settings to its records: resolve, check, plan, compute, store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from vflsec.results.records.manifest import Manifest
from vflsec.results.records.schema import Record
from vflsec.run import engine as engines
from vflsec.run import plan as plans
from vflsec.run import spec as specs
from vflsec.run import sweep
from vflsec.run.engine import Plan
from vflsec.run.manifest import manifest_of
from vflsec.run.spec import EvalSpec
from vflsec.run.store import StageDone, Store


class Job:
    """An evaluation in a results folder; ``vflsec eval``, ``vflsec.evaluate`` and each point of a sweep are one.

    Args:
        spec: as it was read; ``all`` stands for every attack, and parties have the names of the data.
        folder: of the results; by default ``runs/<name>``.
        command: the words of the command line.

    Attributes:
        spec: with every attack by its name, and standard names of parties.
        names: what the data call themselves and the parties.
        left_out: why ``all`` does not stand for some attacks.
        manifest: what a report must know; None until ``check`` has passed.

    Raises:
        UsageError: a name is unknown, or no attack can be mounted.
        DataError: the dataset cannot be read.
    """

    def __init__(self, spec: EvalSpec, folder: Path | None = None, command: Sequence[str] = ()) -> None:
        self.store, self.command = Store(folder or Path("runs") / spec.name), command
        self.names = plans.names_of(spec)
        self.spec, self.left_out = engines.every_attack(plans.with_standard_names(spec, self.names))
        self.manifest: Manifest | None = None

    def check(self) -> Manifest:
        """Check every name, option and need, and return the manifest; trains nothing and writes nothing.

        Raises:
            UsageError: settings that cannot be met, or a folder with something else.
            InsufficientView: an attack that its adversary cannot mount.
        """
        sweep.expect_kind(self.store.folder, sweep=False)
        engines.check(self.spec)
        self.manifest = manifest_of(self.spec, self.command, self.names)
        return self.manifest

    def set_seeds(self, seeds: int, until: float | None = None) -> None:
        """Evaluate so many seeds, of as many as the width ``until`` of intervals takes."""
        self.spec = msgspec.structs.replace(self.spec, seeds=seeds)
        self.manifest = msgspec.structs.replace(manifest_of(self.spec, self.command, self.names), until=until)

    def plan(self, *, keep: bool = False, fresh: bool = False) -> Plan:
        """Return what is to be computed; of a ``fresh`` evaluation all. With ``keep``, guesses on rows are kept."""
        return engines.plan(self.spec, None if fresh else self.store, keep=keep)

    def compute(
        self, todo: Plan, *, jobs: int = 1, device: str = "cpu", engine: str = "local"
    ) -> Iterator[Record | StageDone]:
        """Write the settings, and return the records of ``todo`` as they are computed and stored."""
        assert self.manifest is not None, "check comes first"
        self.store.write_settings(specs.to_toml(self.spec), self.manifest)
        return engines.evaluate(todo, self.store, jobs=jobs, device=device, engine=engine)
