"""``vflsec train``: one federation, saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from vflsec.cli.options import config, data_dir, device, resolve, settings


@click.command("train")
@click.option("--dataset", help="Registered name, or a TOML file.  [default: credit-default]")
@click.option("--method", "methods", multiple=True, help="The method.  [default: fedsplitnn]")
@click.option("--defense", "fixed", multiple=True, help="NAME:knob=value[@point]; repeat for several, in order.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@settings
@config
@data_dir
@click.option("--out", type=click.Path(path_type=Path), help="Write the checkpoint into this new folder.")
@device
def command(
    seed: int, assignments: tuple[str, ...], config: Path | None, out: Path | None, device: str, **chosen: Any
) -> None:
    """Train one federation; print its utility; save each party's models as safetensors.

    --config also takes the spec.toml of an evaluation: what concerns attacks is left aside.
    """
    from rich.console import Console
    from rich.progress import Progress

    from vflsec import api
    from vflsec.evaluation import engine
    from vflsec.evaluation import spec as specs
    from vflsec.evaluation.store import CellFolder

    spec = specs.read_training(resolve(of_training(config) if config else {}, assignments, **chosen))
    engine.check_device(device)
    engine.check_training(spec)
    if out:
        CellFolder(out).check()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("train")
        trained, facts = api.fit(
            spec,
            seed,
            device,
            lambda phase, done, total: progress.update(bar, description=phase, completed=done, total=total),
        )
    for name, value in facts["utility"]["metrics"].items():
        click.echo(f"{name:10} {value:.4f}")
    nbytes = sum(count for phase, *_, count in facts["traffic"] if phase != "predict")
    click.echo(f"{'traffic':10} {nbytes / 1e6:.1f} MB")
    if out:
        CellFolder(out).write(facts, trained.save)
        click.echo(f"checkpoint: {out}", err=True)


def of_training(config: Path) -> dict[str, Any]:
    """Return what concerns training in a file of settings, which must be right as a whole."""
    from vflsec.evaluation import spec as specs

    found = specs.read_toml(config)
    specs.read(found)
    return {key: value for key, value in found.items() if key in specs.TRAINING}
