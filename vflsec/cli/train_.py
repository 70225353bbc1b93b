"""``vflsec train``: one federation, saved."""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import click

from vflsec.base.errors import UsageError
from vflsec.cli import options


@click.command("train")
@options.dataset
@options.add_technique("--method", "methods", "methods", help="NAME[:option=value,...].  [default: fedsplitnn]")
@options.add_technique(
    "--defense", "fixed", "defenses", help="NAME:option=value[@point]; repeat for several, in order."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@options.settings
@options.config
@options.data_dir
@click.option("--out", type=options.PATH, help="Write the checkpoint to this new folder.")
@click.option(
    "--record",
    type=options.PATH,
    metavar="FOLDER",
    help="Record the messages for vflsec audit: embeddings, gradients and nodes of all parties, or, with phe, "
    "what both roles of the encrypted layer see.",
)
@options.device
@options.add_max_exposure
def command(
    seed: int,
    assignments: tuple[str, ...],
    config: Path | None,
    out: Path | None,
    record: Path | None,
    device: str,
    max_exposure: float | None,
    **chosen: Any,
) -> None:
    """Train one federation; print its utility; save each party's models as safetensors.

    --config also accepts the spec.toml of an evaluation; its settings of attacks are ignored.
    """
    from rich.console import Console
    from rich.progress import Progress

    from vflsec import api
    from vflsec.audit import checkpoint
    from vflsec.run import engine, plan
    from vflsec.run import spec as specs
    from vflsec.run.score import compute_largest_spending
    from vflsec.run.store import CellFolder, lock_folder

    file = specs.read_toml(config) if config else {}
    specs.read(file)  # also what does not concern training must be right
    training = {key: value for key, value in file.items() if key in specs.TRAINING}
    spec = specs.read_training(options.resolve(training, assignments, **chosen))
    engine.check_device(device)
    spec = plan.with_standard_names(spec, plan.get_names(spec))
    untrained = engine.check_training(spec)
    options.expose(engine.list_exposures(spec), max_exposure)
    folders = [folder for folder in (out, record) if folder]
    if len(folders) == 2 and any(a.resolve().is_relative_to(b.resolve()) for a, b in permutations(folders)):
        raise UsageError(f"expected --out and --record apart from each other, got {out} and {record}")
    if out:
        CellFolder(out).check(partial(checkpoint.save, trained=untrained, spec=spec, seed=seed))
    del untrained  # which holds the data once more
    with ExitStack() as locked:
        for folder in folders:
            locked.enter_context(lock_folder(folder))
        with Progress(console=Console(stderr=True), transient=True) as progress:
            bar = progress.add_task("train")
            trained, facts, lost = api.fit(
                spec,
                seed,
                device,
                lambda phase, done, total: progress.update(bar, description=phase, completed=done, total=total),
                record,
            )
        if out:
            CellFolder(out).write(facts, lambda path: checkpoint.save(path, trained, spec, seed), portable=True)
            options.print_note(f"checkpoint: {out}")
    for note in facts.notes:
        click.echo(f"NOTE {note}", err=True)
    assert facts.utility is not None, "its training has ended well"
    for name, value in facts.utility.metrics.items():
        click.echo(f"{name:10} {value:.4f}")
    nbytes = sum(count for phase, *_, count in facts.traffic if phase != "predict")
    click.echo(f"{'traffic':10} {nbytes / 1e6:.1f} MB")
    for account in compute_largest_spending(trained, facts.releases):
        click.echo(f"{'epsilon':10} {describe_budget(account)}")
    if lost:
        raise lost
    if record:
        for path in sorted(record.rglob("*.recording")) or [record]:
            options.print_note(f"recording: {path}")


def describe_budget(account: Mapping[str, Any]) -> str:
    """Return the privacy that one defense has spent: epsilon, delta, of what, and against whom."""
    name = account["defense"].partition(":")[0]
    if "releases" in account:
        of = f"one row in {account['releases']} releases to {account['adversary']}"
        of += f"; {account['epsilon_transcript']:.4g} over the releases of all rows received"
    elif "updates" in account:
        updates = f"{account['updates']} updates of a party's own {account['of']}"
        of = f"one row in {updates}, not in the messages about the row"
    else:
        of = f"one label or text {account.get('of', '')}".rstrip() + ", over all messages of the training"
    return f"{account['epsilon']:.4g} at delta {account['delta']:g} by {name}: {of}"
