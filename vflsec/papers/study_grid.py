"""Runs a study: trains and attacks every arm on all of its data, and returns what its claims are judged by."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from vflsec.base.errors import UsageError
from vflsec.papers.grid import Grid, Place, evaluation, expect_attack, merged, point, strengths, trainings
from vflsec.papers.measurements import Outcome, Values, collect, read_outcome
from vflsec.papers.settings_files import convert, list_names, read_table
from vflsec.papers.study import ALONE, ATTACKED, ArmMeasure, Study
from vflsec.run import engine
from vflsec.run import spec as specs
from vflsec.run.cell import Cell, result_key
from vflsec.run.plan import trials
from vflsec.run.store import Store

FOLDER = Path(__file__).with_name("claims")


def names() -> list[str]:
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
    """

    def __init__(self, name: str, study: Study, store: Store) -> None:
        """Check every arm on all of the data; nothing is computed."""
        super().__init__(store)
        self.name, self.study = name, study
        self.measures: dict[Place, list[ArmMeasure]] = {}
        for i, data in enumerate(study.data):
            for j, arm in enumerate(study.arms):
                wanted = study.measures(data.name, arm.name)
                if not wanted:
                    continue
                self.measures[i, j] = wanted
                settings = merged(study.settings, data.settings, arm.settings)
                try:
                    self._add((i, j), settings, wanted)
                except UsageError as error:
                    raise UsageError(f"{name}, {arm.name} on {data.name}: {error}") from None
        self._expect_variation()

    def _expect_variation(self) -> None:
        """Raise UsageError if a claim compares a measurement with itself, by which "not worse" would always hold."""
        arms = [arm.name for arm in self.study.arms]
        for claim in self.study.claims:
            for i, data in enumerate(self.study.data):
                if data.name not in self.study.tested_on(claim):
                    continue
                for better, other in claim.links:
                    if other == ALONE:
                        continue
                    keys = [self._keys((i, arms.index(arm)), claim.measured) for arm in (better, other)]
                    if keys[0] == keys[1]:
                        raise UsageError(
                            f"{self.name}, claim {claim.text!r}: expected arms with different settings, got {better} "
                            f"and {other}, whose {claim.measured.name} on {data.name} is the same measurement: vary "
                            f"what is compared, or name a strength"
                        )

    def _keys(self, place: Place, measure: ArmMeasure) -> frozenset[str]:
        """Return the keys of the trainings that a measure is of, or of the results on attacks."""
        if place in self.trainings:
            return frozenset(_without_defaults(cell).key for cell in self.trainings[place] if cell.seed == 0)
        spec, keys = self.points[place].spec, set()
        over_strengths = measure.kind in ("cap", "calibrated")
        for row in trials(msgspec.structs.replace(spec, seeds=1)):
            if row.control or not (over_strengths or row.strength == measure.strength):
                continue
            if measure.kind not in ATTACKED or row.attack is None:
                keys.add(_without_defaults(row.cell).key)
            elif measure.attack in ("worst", row.label, row.attack.name):
                keys.add(result_key(_without_defaults(row.cell), row.attack, spec.adversary, spec.aux))
        return frozenset(keys)

    def _add(self, place: Place, settings: Mapping[str, Any], wanted: Sequence[ArmMeasure]) -> None:
        if isinstance(names := settings.get("methods"), str):
            raise UsageError(f"expected methods to be a list of names, got {names!r}")
        if any(measure.kind in ATTACKED or measure.strength for measure in wanted):
            spec = evaluation(settings, self.study.seeds)
            if len(spec.methods) > 1 or len(spec.defenses) > 1:
                raise UsageError("expected one method and one defense with strengths for each arm, got more: add arms")
            for measure in wanted:
                if measure.strength not in strengths(spec):
                    raise UsageError(f"expected strength among {sorted(strengths(spec))}, got {measure.strength:g}")
                if measure.kind in ATTACKED:
                    expect_attack(spec, measure.attack)
                if measure.kind in ("cap", "calibrated") and len(strengths(spec)) == 1:
                    raise UsageError("expected a defense with strengths in defenses for CAP, got none")
            self.points[place] = point(spec, {"place": str(place)})
        else:
            training = {key: value for key, value in settings.items() if key in specs.TRAINING}
            spec = specs.read(training)
            if len(spec.methods) > 1:
                raise UsageError(f"expected one method for each arm, got {', '.join(spec.methods)}: make each an arm")
            if any(measure.kind == "bytes to target" for measure in wanted) and not spec.train.target:
                raise UsageError("expected train.target in the settings with bytes to target, got none")
            self.trainings[place] = trainings(training, self.study.seeds)

    def trained(self) -> list[Values]:
        """Return what was measured of the arms that were only trained, with the status of each seed that is missing."""
        return [self._of_trainings(place, measure) for place in self.trainings for measure in self.measures[place]]

    def _of_trainings(self, place: Place, measure: ArmMeasure) -> Values:
        outcomes: dict[int, Outcome] = {}
        for cell in self.trainings[place]:
            facts = self.facts(cell)
            outcomes[cell.seed] = (
                read_outcome(measure, facts.status, facts.utility, facts.traffic, facts.reached) if facts else "missing"
            )
        data, arm = self.names(place)
        return collect(data, arm, measure, outcomes)

    def names(self, place: Place) -> tuple[str, str]:
        """Return the names of the data and the arm at a place."""
        return self.study.data[place[0]].name, self.study.arms[place[1]].name

    def seconds(self) -> float:
        """Return the seconds of all trainings and attacks of this study that are in the store."""
        records, total = self.store.records(), 0.0
        cells = {cell.key for of_place in self.trainings.values() for cell in of_place}
        for at in self.points.values():
            planned = engine.plan(at.spec, None)
            keys = {row.key for row in planned.rows} | {baseline.key for baseline in planned.baselines}
            total += sum(records[key].seconds.get("attack", 0.0) for key in keys & records.keys())
            for row in planned.rows:
                cells |= {row.cell.key, *(row.cell.stage_key(stage) for stage in row.cell.stages)}
        stored = [self.store.cell(key).read() for key in cells]
        return total + sum(facts.seconds for facts in stored if facts)


def _without_defaults(cell: Cell) -> Cell:
    """Return ``cell`` without options of its method that are written out but have their default values."""
    method, known = cell.method, inspect.signature(cell.method.kind).parameters
    for option, value in method.options.items():
        method = method.without_option(option) if option in known and known[option].default == value else method
    return msgspec.structs.replace(cell, method=method)
