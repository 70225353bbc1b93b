"""Runs a study: trains and attacks every arm on all of its data, and returns what its claims are judged by."""

import inspect
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from vflsec.base.errors import UsageError
from vflsec.papers.grid import (
    Grid,
    Place,
    Trainings,
    convert,
    expect_measure,
    list_names,
    merge_tables,
    prepare_evaluation,
    prepare_trainings,
    read_table,
)
from vflsec.papers.measurements import Measurements, Values, measure_leaks, measure_models
from vflsec.papers.study import ALONE, ATTACKED, ArmMeasure, Study
from vflsec.results.analysis.summary import summarize
from vflsec.run import spec as specs
from vflsec.run.cell import Cell, make_key
from vflsec.run.describe import read_commit
from vflsec.run.job import Evaluation
from vflsec.run.store import Store, get_environment

FOLDER = Path(__file__).with_name("claims")


def list_studies() -> list[str]:
    """Return the names of the studies that come with vflsec."""
    return list_names(FOLDER)


def read_study(name: str) -> Study:
    """Return a study by its name, or from a TOML file of the user's.

    Raises:
        UsageError: no such study, or one that is wrong.
    """
    return convert(name, read_table(FOLDER, "study", name), Study)


class StudyGrid(Grid):
    """The measurements of a study: which are to be made, and how.

    An arm of which claims need no attack is trained only.

    Args:
        name: of the study.
        study: as it is run.
        store: where trainings and results are kept; a second run computes what is missing.
        seeds: how many for each of the data; None for those of the first look.
    """

    def __init__(self, name: str, study: Study, store: Store, seeds: Mapping[str, int] | None = None) -> None:
        """Check every arm on all of the data; nothing is computed."""
        super().__init__(store)
        self.name, self.study = name, study
        self.seeds = seeds or {part.name: study.seeds for part in study.data}
        self.measures: dict[Place, list[ArmMeasure]] = {}
        for i, data in enumerate(study.data):
            for j, arm in enumerate(study.arms):
                wanted = study.measures(data.name, arm.name)
                if not wanted:
                    continue
                self.measures[i, j] = wanted
                settings = merge_tables(study.settings, data.settings, arm.settings)
                try:
                    self.parts[i, j] = [self._prepare(settings, wanted, self.seeds[data.name])]
                except UsageError as error:
                    raise UsageError(f"{name}, {arm.name} on {data.name}: {error}") from None
        self._expect_variation()

    def _prepare(self, settings: Mapping[str, Any], wanted: Sequence[ArmMeasure], seeds: int) -> Trainings | Evaluation:
        if isinstance(methods := settings.get("methods"), str):
            raise UsageError(f"expected methods to be a list of names, got {methods!r}")
        if any(measure.kind in ATTACKED or measure.strength for measure in wanted):
            part = prepare_evaluation(settings, seeds)
            if len(part.spec.methods) > 1 or len(part.spec.defenses) > 1:
                raise UsageError("expected one method and one defense with strengths for each arm, got more: add arms")
            for measure in wanted:
                expect_measure(part.spec, measure.kind, measure.attack, measure.strength)
            return part
        training = {key: value for key, value in settings.items() if key in (*specs.TRAINING, "tune")}
        spec = specs.read(training)
        if len(spec.methods) > 1:
            raise UsageError(f"expected one method for each arm, got {', '.join(spec.methods)}: make each an arm")
        if any(measure.kind == "bytes to target" for measure in wanted) and not spec.train.target:
            raise UsageError("expected train.target in the settings with bytes to target, got none")
        return prepare_trainings(training, seeds)

    def _expect_variation(self) -> None:
        """Raise UsageError if a claim compares a measurement with itself, by which "not worse" would always hold."""
        arms = [arm.name for arm in self.study.arms]
        for claim in self.study.claims:
            for i, data in enumerate(self.study.data):
                if data.name not in self.study.list_data(claim):
                    continue
                for better, other in claim.links:
                    if other == ALONE:
                        continue
                    keys = [self._keys((i, arms.index(arm)), claim.arm_measure) for arm in (better, other)]
                    if keys[0] == keys[1]:
                        raise UsageError(
                            f"{self.name}, claim {claim.text!r}: expected arms with different settings, got {better} "
                            f"and {other}, whose {claim.arm_measure.name} on {data.name} is the same measurement: vary "
                            f"what is compared, or name a strength"
                        )

    def _keys(self, place: Place, measure: ArmMeasure) -> frozenset[str]:
        """Return the keys of the trainings that a measure is of, or of the results on attacks."""
        (part,), keys = self.parts[place], set()
        over_strengths = measure.kind in ("cap", "calibrated")
        for row in part.trials():
            if row.seed or row.control or not (over_strengths or row.strength == measure.strength):
                continue
            if measure.kind not in ATTACKED or row.attack is None:
                keys.add(_drop_defaults(row.cell).key)
            elif measure.attack in ("worst", row.label, row.attack.name):
                keys.add(make_key(_drop_defaults(row.cell), row.attack, row.adversary, row.aux))
        return frozenset(keys)

    def measure(self) -> Measurements:
        """Return all that the claims need, as far as the store has it."""
        records, values = self.store.records(), list[Values]()
        for place, (part,) in sorted(self.parts.items(), key=lambda item: isinstance(item[1][0], Evaluation)):
            data, arm = self.study.data[place[0]].name, self.study.arms[place[1]].name
            rows = list(part.trials())
            summary = summarize(part.manifest, records, out="") if isinstance(part, Evaluation) else None
            for measure in self.measures[place]:
                if summary and measure.kind in ATTACKED:
                    values.append(measure_leaks(data, arm, measure, summary, self.seeds[data]))
                else:
                    values.append(measure_models(data, arm, measure, rows, records))
        return Measurements(
            study=self.name,
            experiment=self.study.experiment,
            registration=self.study.registration,
            seeds=max(self.seeds.values()),
            time=datetime.now(UTC).isoformat(timespec="seconds"),
            commit=read_commit(),
            versions=get_environment(),
            seconds=round(self.seconds(), 1),
            values=values,
        )


def _drop_defaults(cell: Cell) -> Cell:
    """Return ``cell`` without options of its method that are written out but have their default values."""
    method, known = cell.method, inspect.signature(cell.method.kind).parameters
    for option, value in method.options.items():
        method = method.drop_option(option) if option in known and known[option].default == value else method
    return msgspec.structs.replace(cell, method=method)
