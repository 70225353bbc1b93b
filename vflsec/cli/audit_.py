"""``vflsec audit``: what a system gives away that was trained elsewhere, or a recording of the encrypted layer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vflsec.base.errors import UsageError
from vflsec.cli.eval_ import leak_limits
from vflsec.cli.options import completing, data_dir, draw, exit_code, max_undetected, output_format, several

if TYPE_CHECKING:
    from vflsec.run.spec import AttackSpec, AuxSpec


@click.command("audit")
@click.argument("what", type=click.Path(path_type=Path), metavar="WHAT")
@click.option(
    "--data",
    "dataset",
    metavar="FILE.toml|NAME",
    help="The columns of all parties and the labels: a TOML file, or a registered dataset.",
)
@data_dir
@click.option(
    "--party", help="The adversary.  [default: who recorded the transcript; passive_1 for models and embeddings]"
)
@click.option("--model", metavar="FILE.py:FUNCTION", help="Your code that builds the bottom model; it is executed.")
@click.option(
    "--messages", type=click.Path(path_type=Path), help="For a checkpoint of vflsec train: what --record has written."
)
@click.option(
    "--predictions", type=click.Path(path_type=Path), help="Predictions that the adversary gets: id, p_0, p_1..."
)
@click.option("--encoded", is_flag=True, help="The model reads the columns as they are, not as vflsec encodes them.")
@click.option("--train-ids", type=click.Path(path_type=Path), help="Ids that the model was trained on, one a line.")
@click.option(
    "--test-ids", type=click.Path(path_type=Path), help="Ids that it was not trained on.  [default: the rest]"
)
@click.option(
    "--attack",
    "attacks",
    multiple=True,
    shell_complete=completing("attacks", "all"),
    help="NAME[:option=value,...]; repeat or list.  [default: all]",
)
@click.option(
    "--defense",
    "defenses",
    multiple=True,
    shell_complete=completing("defenses"),
    metavar="NAME:option=value[@point]",
    help="A defense that was active in the training; its epsilon is computed if it has any; repeat.",
)
@click.option(
    "--allow-misfit", is_flag=True, help="Audit also what does not belong to the data; no gate holds on that."
)
@click.option("--confirm-fit", is_flag=True, help="You have checked that it does, where that cannot be verified.")
@click.option("--draws", type=click.IntRange(1, 1000), default=5, show_default=True, help="Of auxiliary labels.")
@click.option("--aux-ids", type=click.Path(path_type=Path), help="The rows whose labels the adversary knows.")
@click.option(
    "--set", "assignments", multiple=True, metavar="aux.KEY=VALUE", help="What the adversary knows: aux.n=40."
)
@click.option("--out", type=click.Path(path_type=Path), help="Results folder.  [default: runs/audit-WHAT]")
@click.option("--fresh", is_flag=True, help="Delete the results in the folder and compute them again.")
@click.option(
    "--truth", type=click.Path(path_type=Path), help="For a recording: the other role's recording of the same run."
)
@click.option("--max-leak", multiple=True, metavar="NAME=X", help="Fail (exit code 1) if the upper end of a leak's "
              "interval is above X, for example worst=0.8; repeat.")  # fmt: skip
@max_undetected
@output_format
def command(what: Path, max_leak: tuple[str, ...], form: str, **chosen: Any) -> None:
    """Audit what others trained: run every attack that one party can mount on it.

    WHAT is a transcript (a folder that vflsec.Recorder or your own code has written), a checkpoint of vflsec train,
    weights of a bottom model (.safetensors, with --model), an ONNX model, a table of embeddings (.csv or .parquet), or
    a recording of an encrypted layer (.recording, with --truth). Transcripts, models and embeddings need --data, which
    has the labels that score the attacks. Nothing in WHAT is executed.
    """
    if not what.exists():
        raise UsageError(f"expected a file or folder at {what}, found none: check the path")
    _system(what, leak_limits(max_leak), form, **chosen)


def _system(
    what: Path,
    limit: dict[str, float],
    form: str,
    *,
    dataset: str | None,
    data_dir: str | None,
    attacks: tuple[str, ...],
    assignments: tuple[str, ...],
    out: Path | None,
    fresh: bool,
    max_undetected: float | None,
    **given: Any,
) -> None:
    """Run every attack that one party can mount on what was trained elsewhere."""
    from vflsec.audit import job
    from vflsec.report.progress import shown
    from vflsec.report.report import Report
    from vflsec.results.analysis.gates import check_limits
    from vflsec.results.records.naming import with_given_names
    from vflsec.run import sweep
    from vflsec.run.engine import reasons
    from vflsec.run.store import Store

    folder = out or job.default_folder(what)
    for read in (what, given["messages"]):
        if read is not None and read.is_dir() and folder.resolve().is_relative_to(read.resolve()):
            raise UsageError(f"expected --out outside of what is audited, got {folder}, which is in {read}")
    options = {"data_dir": data_dir} if data_dir else {}
    audit = job.prepare(what, dataset, options=options, attacks=named(attacks), aux=aux_of(assignments), **given)
    for line in (*audit.subject.notes, *(f"left out: {line}" for line in reasons(audit.left_out))):
        click.echo(line, err=True)
    manifest = audit.manifest(["vflsec", *sys.argv[1:]])
    for note in manifest.data_notes:
        click.echo(f"NOTE {note}", err=True)
    check_limits(with_given_names(manifest, {})[0], limit)
    sweep.expect_kind(folder, sweep=False)
    store = Store(folder)
    with store.lock():
        if fresh:
            store.clear()
        else:
            store.expect_same(manifest)
        store.trim()
        store.write_limits(max_leak=limit, max_undetected=max_undetected)
        try:
            for _ in shown(job.compute(audit, manifest, store), len(audit.keys - store.records().keys())):
                pass
        except KeyboardInterrupt:
            click.echo("interrupted: finished results are kept; the same command goes on from there", err=True)
            sys.exit(130)
    report = Report.read(folder)
    draw(report, folder, form)
    sys.exit(exit_code(report))


def named(attacks: tuple[str, ...]) -> list[AttackSpec]:
    """Return the attacks named on the command line; none for all."""
    from vflsec.run import spec as specs

    texts = several(attacks)
    return [] if texts in ([], ["all"]) else [specs.parse_attack(text) for text in texts]


def aux_of(assignments: tuple[str, ...]) -> AuxSpec:
    """Return the auxiliary labels that ``--set aux.KEY=VALUE`` describes."""
    from vflsec.run import spec as specs

    found = specs.merge({}, assignments)
    others = [key for key in found if key != "aux"]
    if others:
        raise UsageError(f"expected --set aux.KEY=VALUE, got {others[0]}: what is audited is trained already")
    return specs.read(found).aux
