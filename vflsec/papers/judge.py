"""``vflsec judge``: published claims, tested."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vflsec.cli.options import FilePath, device, expect_folder

if TYPE_CHECKING:
    from vflsec.papers.measurements import Measurements
    from vflsec.papers.verdicts import MeasuredStudy

ALL = "all"


@click.command("judge")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--page", type=FilePath(path_type=Path, dir_okay=False), help="Write the page of all that is measured.")
@click.option(
    "--results", type=FilePath(path_type=Path, file_okay=False), default=Path("results"), show_default=True,
    help="Folder of the measurements.",
)  # fmt: skip
@click.option(
    "--seeds", type=click.IntRange(1, 1000), help="How many; measurements then stay in --out.  [default: as registered]"
)
@click.option(
    "--out", type=FilePath(path_type=Path, file_okay=False), default=Path("runs/judge"), show_default=True,
    help="Folder of trainings, which studies share.",
)  # fmt: skip
@click.option("--jobs", type=click.IntRange(min=1), help="How many worker processes.  [default: the number of cores]")
@device
@click.option(
    "--rounding", is_flag=True, help="Also repeat the first seed with another processor's rounding: what it changes."
)
@click.option("--dry-run", is_flag=True, help="Print how much is to be computed; compute nothing.")
@click.option("--format", "form", type=click.Choice(["table", "json", "markdown"]), default="table", show_default=True)
def command(
    names: tuple[str, ...],
    page: Path | None,
    results: Path,
    seeds: int | None,
    out: Path,
    jobs: int | None,
    device: str,
    rounding: bool,
    dry_run: bool,
    form: str,
) -> None:
    """Test published claims, and print a verdict on each.

    NAME is a study, `all`, or a TOML file of your own in the same form; without NAME, the studies are listed. Where a
    study registers several looks, seeds are added until every claim is decided. Trainings are kept, and the same
    command goes on where it stopped. Measurements are written to --results, from which --page makes a page without
    training.
    """
    from vflsec.base.errors import UsageError
    from vflsec.cli.options import print_to_terminal
    from vflsec.papers import study_grid as study
    from vflsec.run.engine import check_device

    if ALL in names and len(names) > 1:
        raise UsageError(f"expected all alone, got {' '.join(names)}")
    chosen = tuple(study.list_studies()) if ALL in names else names
    stems = [Path(name).stem for name in chosen]
    if len(set(stems)) < len(stems):
        raise UsageError(f"expected each study once, got {', '.join(stems)}: rename one of equal names")
    for name, stem in zip(chosen, stems, strict=True):
        if name.endswith(".toml") and stem in study.list_studies():
            raise UsageError(f"expected another name than that of a study of vflsec, got {name}: rename the file")
    if page and dry_run:
        raise UsageError("expected --page or --dry-run, got both: a page computes nothing")
    if page and page.exists() and not page.is_file():  # a pipe would wait for a reader
        raise UsageError(f"expected a file for --page, got {page}, which is something else: name another")
    if page:
        expect_folder(page, "--page")
        _write_page(chosen, page, results)
        return
    if not names:
        for name in study.list_studies():
            done = "measured" if (results / f"{name}.json").exists() else ""
            click.echo(f"{name:15} {done:8} {study.read_study(name).title}")
        return
    check_device(device)
    studies = [_run(name, seeds, results, out, jobs, device, rounding=rounding, dry_run=dry_run) for name in chosen]
    if dry_run:
        return
    from vflsec.papers.judgement import Judgement

    judged = Judgement([study for study in studies if study])
    if form == "table":
        print_to_terminal(judged.rich)
    else:
        click.echo((judged.to_json() if form == "json" else judged.to_markdown()).rstrip("\n"))
    if judged.failures:
        sys.exit(3)


def _run(
    name: str,
    seeds: int | None,
    results: Path,
    out: Path,
    jobs: int | None,
    device: str,
    *,
    rounding: bool,
    dry_run: bool,
) -> MeasuredStudy | None:
    """Compute what a study lacks, and return its measurements; None if nothing is to be computed."""
    import msgspec

    from vflsec import api
    from vflsec.base.checks import count
    from vflsec.cli.options import print_note, report_interrupt
    from vflsec.papers.judgement import compare_values
    from vflsec.papers.measurements import write_measurements
    from vflsec.papers.study_grid import StudyGrid, read_study
    from vflsec.papers.verdicts import MeasuredStudy, plan_look
    from vflsec.report.progress import show_progress
    from vflsec.run.store import Store, guard_writing

    registered, stem = read_study(name), Path(name).stem
    study = registered
    if seeds not in (None, registered.seeds):
        study = msgspec.structs.replace(registered, seeds=seeds, looks=[])
    store, look = Store(out), dict.fromkeys([part.name for part in study.data], study.seeds)
    job, workers = StudyGrid(stem, study, store), jobs or api.count_cores()
    path = (results if study is registered else store.folder) / f"{stem}.json"
    with store.lock():
        if not dry_run:
            store.trim()
        while look:
            job = StudyGrid(stem, study, store, look)
            at = f", with {max(look.values())} of at most {study.schedule[-1]} seeds" if study.looks else ""
            print_note(f"vflsec judge {stem}: {count(job.missing(), 'result')} to compute{at}   {store.folder}")
            if dry_run:
                return None
            with report_interrupt(store):
                for _ in show_progress(job.compute(jobs=workers, device=device), job.plan(), workers):
                    pass
            measurements = job.measure()
            look = plan_look(MeasuredStudy(stem, study, measurements))
        if rounding:
            first = StudyGrid(stem, msgspec.structs.replace(study, seeds=1, looks=[]), store).measure()
            other = _measure_other_rounding(name, stem, out / "rounding", jobs, device)
            measurements = msgspec.structs.replace(measurements, rounding=compare_values(first, other))
        else:
            measurements = msgspec.structs.replace(measurements, rounding=_read_rounding(path, measurements))
        with guard_writing(path.parent):
            write_measurements(path, measurements)
    print_note(f"measurements: {path}")
    return MeasuredStudy(stem, study, measurements)


OTHERWISE = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}
"""Without wide instructions sums are taken in another order, as on another processor."""


def _measure_other_rounding(name: str, stem: str, out: Path, jobs: int | None, device: str) -> Measurements:
    """Return the measurements of the first seed from a process that rounds otherwise."""
    import os
    import subprocess

    from vflsec.base.errors import StoreError
    from vflsec.papers.measurements import read_measurements

    words = [sys.executable, "-P", "-m", "vflsec", "judge", name, "--seeds", "1", "--out", str(out), "--device", device]
    words += ["--results", str(out / "whole"), *(["--jobs", str(jobs)] if jobs else [])]
    ended = subprocess.run(words, env={**os.environ, **OTHERWISE}, stdout=subprocess.DEVNULL, check=False)  # noqa: S603
    if ended.returncode not in (0, 3):
        raise StoreError(f"the run with other rounding ended with {ended.returncode}; its folder is {out}")
    path = out / f"{stem}.json"
    return read_measurements(path if path.exists() else out / "whole" / f"{stem}.json")


def _read_rounding(path: Path, measurements: Measurements) -> dict[str, float]:
    """Return what an earlier run found of the same experiment."""
    from vflsec.base.errors import StoreError
    from vflsec.papers.measurements import read_measurements

    try:
        before = read_measurements(path)
    except StoreError:  # none, or a damaged file, which this run replaces
        return {}
    return before.rounding if before.experiment == measurements.experiment else {}


def _write_page(names: Sequence[str], page: Path, results: Path) -> None:
    """Write the page of these studies, or of all that come with vflsec and are measured."""
    from vflsec.base.errors import UsageError
    from vflsec.cli.options import print_note
    from vflsec.papers.diagrams import draw_verdicts
    from vflsec.papers.judgement import Judgement
    from vflsec.papers.measurements import read_measurements
    from vflsec.papers.study_grid import list_studies as known
    from vflsec.papers.study_grid import read_study
    from vflsec.papers.verdicts import MeasuredStudy
    from vflsec.run.store import guard_writing

    chosen = names or [name for name in known() if (results / f"{name}.json").exists()]
    if not chosen:
        raise UsageError(f"expected measurements in {results}, found none: run vflsec judge NAME, or name --results")
    read = [(Path(name).stem, read_study(name)) for name in chosen]
    judged = Judgement(
        [MeasuredStudy(stem, study, read_measurements(results / f"{stem}.json")) for stem, study in read]
    )
    unmeasured = [] if names else [name for name in known() if name not in chosen]
    picture = page.with_suffix(".png")
    with guard_writing(page.parent):
        draw_verdicts(judged.verdicts).savefig(picture, dpi=130)
        page.write_text(judged.page(unmeasured, picture.name), encoding="utf-8")
    print_note(f"page: {page}")
