"""``vflsec reproduce``: a paper's table, measured anew."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vflsec.cli.options import FilePath, device, output_format

if TYPE_CHECKING:
    from vflsec.papers.recipe_grid import RecipeGrid


def _forecast(missing: int, before: Iterable[RecipeGrid], jobs: int) -> str:
    """Return how long ``missing`` trainings or results take, by the first job that has some."""
    each = next((job.seconds() / done for job in before if (done := len(job.records()))), None)
    if each is None:
        return "time: unknown; run --quick first"
    return f"time: about {timedelta(seconds=round(each * missing / jobs))} with --jobs {jobs}, by past results"


@click.command("reproduce")
@click.argument("name", required=False)
@click.option("--quick", is_flag=True, help="Fewer seeds, rows and columns: to see what it looks like, not to judge.")
@click.option("--seeds", type=click.IntRange(1, 1000), help="How many seeds.  [default: those of the recipe]")
@click.option(
    "--data-dir", type=FilePath(path_type=Path), help="Folder with avazu, bhi, criteo...: the paper's own data."
)
@click.option("--out", type=FilePath(path_type=Path), help="Results folder.  [default: runs/reproduce-NAME]")
@click.option("--jobs", type=click.IntRange(min=1), help="How many worker processes.  [default: the number of cores]")
@device
@click.option("--dry-run", is_flag=True, help="Print how much is to be computed; compute nothing.")
@output_format
def command(
    name: str | None,
    quick: bool,
    seeds: int | None,
    data_dir: Path | None,
    out: Path | None,
    jobs: int | None,
    device: str,
    dry_run: bool,
    form: str,
) -> None:
    """Measure a table of a paper, and print it beside what the paper prints.

    NAME is a recipe, or a TOML file of your own in the same form; without NAME, the recipes are listed. Results are
    kept, and the same command goes on where it stopped. Where the paper's data are not at hand, others stand in for
    them, and the table says so.
    """
    from vflsec import api
    from vflsec.base.checks import count
    from vflsec.cli.options import print_note, report_interrupt, show
    from vflsec.papers import recipe
    from vflsec.papers.recipe_grid import RecipeGrid
    from vflsec.papers.reproduction import Reproduction
    from vflsec.report.progress import show_progress
    from vflsec.run.engine import check_device
    from vflsec.run.store import Store, guard_writing

    if name is None:
        for known in recipe.list_recipes():
            click.echo(f"{known:20} {recipe.read_recipe(known).title}")
        return
    check_device(device)
    read = recipe.read_recipe(name)
    chosen = recipe.apply_seeds(recipe.apply_data(read, data_dir) if data_dir else read, seeds, quick=quick)
    stem = Path(name).stem
    store = Store(out or Path("runs") / f"reproduce-{stem}{'-quick' * quick}")
    job = RecipeGrid(chosen, store)
    missing, workers = job.missing(), jobs or api.count_cores()
    what = "result" if chosen.has_attacks else "training"
    print_note(f"vflsec reproduce {stem}: {count(missing, what)} to compute   {store.folder}")
    if dry_run:
        before = [job]
        if not quick:
            folder = Path("runs") / f"reproduce-{stem}-quick"
            before.append(RecipeGrid(recipe.apply_seeds(read, None, quick=True), Store(folder)))
        click.echo(_forecast(missing, before, workers), err=True)
        return
    with store.lock():
        store.trim()
        with report_interrupt(store):
            for _ in show_progress(job.compute(jobs=workers, device=device), job.plan(), workers):
                pass
    result = Reproduction(stem, chosen, job.measure(), job)
    show(result, form)
    with guard_writing(store.folder):
        for path in result.save_curve(store.folder):
            print_note(f"curve: {path}")
