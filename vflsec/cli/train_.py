"""``vflsec train``: one federation, saved."""

from __future__ import annotations

from pathlib import Path

import click

from vflsec.cli.options import config, device, settings


@click.command("train")
@click.option("--dataset", default="credit-default", show_default=True, help="Registered name, or a TOML file.")
@click.option("--method", default="fedsplitnn", show_default=True)
@click.option("--defense", "defenses", multiple=True, help="NAME:knob=value[@point]; repeat for several, in order.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@settings
@config
@click.option("--out", type=click.Path(path_type=Path), help="Write the checkpoint into this new folder.")
@device
def command(
    dataset: str,
    method: str,
    defenses: tuple[str, ...],
    seed: int,
    assignments: tuple[str, ...],
    config: Path | None,
    out: Path | None,
    device: str,
) -> None:
    """Train one federation; print its utility; save each party's models as safetensors."""
    from rich.console import Console
    from rich.progress import Progress

    from vflsec import api
    from vflsec.core.errors import Diverged, UsageError
    from vflsec.evaluation import runner
    from vflsec.evaluation import spec as specs
    from vflsec.evaluation.store import CellFolder

    if out and out.exists():
        raise UsageError(f"expected a new folder for --out, got {out}, which exists: remove it or name another")
    chosen = specs.merge(specs.read_toml(config) if config else {}, assignments)
    cell = api.cell(dataset, method, defenses, seed, chosen)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("train")
        with runner.one_thread():
            trained, facts = runner.train(
                cell,
                device,
                lambda phase, done, total: progress.update(bar, description=phase, completed=done, total=total),
            )
    if trained is None:
        raise Diverged(facts["error"])
    for name, value in facts["utility"]["metrics"].items():
        click.echo(f"{name:10} {value:.4f}")
    nbytes = sum(count for phase, *_, count in facts["traffic"] if phase != "predict")
    click.echo(f"{'traffic':10} {nbytes / 1e6:.1f} MB")
    if out:
        CellFolder(out).write(facts, trained.save)
        click.echo(f"checkpoint: {out}", err=True)
