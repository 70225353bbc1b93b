"""``vflsec audit``: what a system gives away that was trained elsewhere, or a recording of the encrypted layer."""

import sys
from pathlib import Path
from typing import Any

import click

from vflsec.base.errors import UsageError
from vflsec.cli import options
from vflsec.cli.eval_ import read_limits


@click.command("audit")
@click.argument("what", type=options.PATH, metavar="WHAT")
@click.option(
    "--data",
    "dataset",
    metavar="FILE.toml|NAME",
    help="The columns of all parties and the labels: a TOML file, or a registered dataset.",
)
@options.data_dir
@click.option(
    "--party", help="The adversary.  [default: who recorded the transcript; passive_1 for models and embeddings]"
)
@click.option("--model", metavar="FILE.py:FUNCTION", help="Your code that builds the bottom model; it is executed.")
@click.option("--messages", type=options.PATH, help="For a checkpoint of vflsec train: what --record has written.")
@click.option("--predictions", type=options.PATH, help="Predictions that the adversary gets: id, p_0, p_1...")
@click.option("--encoded", is_flag=True, help="The model reads the columns as they are, not as vflsec encodes them.")
@click.option("--train-ids", type=options.PATH, help="Ids that the model was trained on, one a line.")
@click.option("--test-ids", type=options.PATH, help="Ids that it was not trained on.  [default: the rest]")
@options.add_technique(
    "--attack", "attacks", "attacks", help="NAME[:option=value,...]; repeat or list.  [default: all]"
)
@options.add_technique(
    "--defense",
    "defenses",
    "defenses",
    help="NAME:option=value[@point] that was active in the training; its epsilon is computed if it has any; repeat.",
)
@click.option(
    "--allow-misfit", is_flag=True, help="Audit also what does not belong to the data; no gate holds on that."
)
@click.option("--confirm-fit", is_flag=True, help="You have checked that it does, where that cannot be verified.")
@click.option("--draws", type=click.IntRange(1, 1000), default=5, show_default=True, help="Of auxiliary labels.")
@click.option("--aux-ids", type=options.PATH, help="The rows whose labels the adversary knows.")
@click.option(
    "--set", "assignments", multiple=True, metavar="aux.KEY=VALUE", help="What the adversary knows: aux.n=40."
)
@click.option("--out", type=options.PATH, help="Results folder.  [default: runs/audit-WHAT]")
@click.option("--fresh", is_flag=True, help="Delete the results in the folder and compute them again.")
@click.option("--truth", type=options.PATH, help="For a recording: the other role's recording of the same run.")
@click.option("--max-leak", multiple=True, metavar="NAME=X", help="Fail (exit code 1) if the upper end of a leak's "
              "interval is above X, for example worst=0.8; repeat.")  # fmt: skip
@options.add_max_undetected
@options.track
@options.output_format
def command(
    what: Path,
    dataset: str | None,
    data_dir: str | None,
    attacks: tuple[str, ...],
    assignments: tuple[str, ...],
    out: Path | None,
    fresh: bool,
    max_leak: tuple[str, ...],
    max_undetected: float | None,
    trackers: tuple[str, ...],
    form: str,
    **given: Any,
) -> None:
    """Audit what others trained: run every attack that one party can mount on it.

    WHAT is a transcript (a folder that vflsec.Recorder or your own code has written), a checkpoint of vflsec train,
    weights of a bottom model (.safetensors, with --model), an ONNX model, a table of embeddings (.csv or .parquet), or
    a recording of an encrypted layer (.recording, with --truth). Transcripts, models and embeddings need --data, which
    has the labels that score the attacks. Nothing in WHAT is executed.
    """
    from vflsec.audit.job import name_folder, prepare_audit
    from vflsec.results.records.manifest import RunLimits
    from vflsec.run import spec as specs
    from vflsec.run.job import Job

    options.expect_trackers(trackers)
    if not what.exists():
        raise UsageError(f"expected a file or folder at {what}, found none: check the path")
    folder = out or name_folder(what)
    for read in (what, given["messages"]):
        if read is not None and read.is_dir() and folder.resolve().is_relative_to(read.resolve()):
            raise UsageError(f"expected --out outside of what is audited, got {folder}, which is in {read}")
    limit = RunLimits(max_leak=read_limits(max_leak), max_undetected=max_undetected)
    texts, settings = options.split_references(attacks), specs.merge({}, assignments)
    if others := [key for key in settings if key != "aux"]:
        raise UsageError(f"expected --set aux.KEY=VALUE, got {others[0]}: what is audited is trained already")
    audit = prepare_audit(
        what,
        dataset,
        options={"data_dir": data_dir} if data_dir else {},
        attacks=[] if texts in ([], ["all"]) else [specs.parse_attack(text) for text in texts],
        aux=specs.read(settings).aux,
        command=["vflsec", *sys.argv[1:]],
        **given,
    )
    for line in audit.subject.notes:
        click.echo(line, err=True)
    job = Job(folder, [audit])
    options.check_job(job, limit, fresh=fresh)
    with job.open(limit, fresh=fresh):
        todo = job.plan()
        with options.show_progress(job, todo) as show:
            for record in job.run(todo):
                show(record)
    options.finish(options.read_report(folder), folder, form, trackers=trackers)
