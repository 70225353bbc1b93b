"""``vflsec party``: one of two companies that train together over the network."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from vflsec.base.errors import UsageError
from vflsec.cipher.roles.exchange import ROLES
from vflsec.cli.options import FilePath, add_max_exposure, expose, print_note


class Seconds(click.FloatRange):
    """Seconds; more than a hundred days count as that many, so that ``inf`` is accepted."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number of seconds."""
        seconds = float(super().convert(value, param, ctx))
        if math.isnan(seconds):
            self.fail("expected a number of seconds, got nan", param, ctx)
        return min(seconds, 1e7)


SECONDS = Seconds(min=0.1)


def add_role(text: str) -> Callable[[Any], Any]:
    """Return ``--role``."""
    return click.option("--role", type=click.Choice(ROLES), help=text)


@click.group("party", invoke_without_command=True)
@add_role("passive has features and the key, active the labels.")
@click.option("--job", type=FilePath(path_type=Path), help="The agreement: one TOML file, the same on both sides.")
@click.option("--data", type=FilePath(path_type=Path), help="Our own CSV or Parquet file; nobody else needs it.")
@click.option("--id", "key", default="id", show_default=True, help="The column of row ids.")
@click.option("--label", help="The column of labels, of the active party.")
@click.option("--columns", help="Our columns, by commas.  [default: all others]")
@click.option("--categorical", default="", help="Those of them that are categories, by commas.")
@click.option("--signed-log", default="", help="Those that are heavy-tailed numbers, such as money, by commas.")
@click.option("--listen", metavar="HOST:PORT", help="Wait for the other party here ...")
@click.option("--connect", metavar="HOST:PORT", help="... or reach it there.")
@click.option("--keys", type=FilePath(path_type=Path), help="Folder that vflsec party keys has made.")
@click.option("--out", type=FilePath(path_type=Path), help="Our models and results; meanwhile, our state.")
@click.option("--record", type=FilePath(path_type=Path), help="Record what this party sees, for vflsec audit.")
@add_max_exposure
@click.option("--timeout", type=SECONDS, default=60.0, show_default=True, help="Seconds a message may take.")
@click.option("--patience", type=SECONDS, default=300.0, show_default=True, help="Seconds for a peer to return.")
@click.option(
    "--repeats", type=click.IntRange(min=0), help="Times we answer one batch again.  [default: 3; with [sealed]: 0]"
)
@click.option("--workers", type=click.IntRange(0, 256), default=0, help="Processes that prepare encryption ahead.")
@click.pass_context
def command(ctx: click.Context, /, **given: Any) -> None:
    """Run one of two companies that train together over the network.

    The passive party holds columns and a Paillier key, the active party columns and the labels. The active party
    computes on the passive party's encrypted embedding; of the weights between them each holds only a share.
    `vflsec show protocol paillier` lists what each party learns all the same.

    \b
    1. Make keys. To try it out on one machine, for both:
         vflsec party keys KEYS
       Each company its own, and exchange certificate.pem, which becomes peer.pem there:
         vflsec party keys KEYS --role passive
    2. Agree on a job, the same file on both sides:
    \b
         name = "loans"
         seed = 0                    # of the split and the order of batches
         dataset = "credit-default"  # to try it out; else each gives its own --data
         [model]
         outputs = 1                 # logistic regression; or the number of classes
         encoder = "mlp"             # of the passive party; identity: its columns
         hidden = [64]
         width = 10
         [train]
         epochs = 1
         batch = 128
         lr = 0.1
         [paillier]
         bits = 2048
         max_passes = 1              # passes of each sample that it answers
       Or, so that the passive party learns noised sums in place of each row's gradient, [sealed] in place of
       [paillier], without width; the active party then holds the key (`vflsec show defense sealed`):
    \b
         [sealed]
         epsilon = 1.0               # of every label, at delta = 1e-5
    \b
    3. Start both, in any order:
         vflsec party --role passive --job job.toml --keys KEYS --listen 0.0.0.0:7700 --out passive
         vflsec party --role active --job job.toml --keys KEYS --connect HOST:7700 --out active

    Both must hold the same ids: match them beforehand. If a process or the connection breaks, start it again with the
    same command: both resume after the last batch that both have kept. The active party prints the utility on test
    rows; the passive party does not learn it.
    """
    if ctx.invoked_subcommand is None:
        run(**given)


@command.command("keys")
@click.argument("folder", type=FilePath(path_type=Path))
@add_role("Only ours.  [default: both, to try it out]")
@click.option("--days", type=click.IntRange(1, 36500), default=365, show_default=True, help="For which they hold.")
def keys(folder: Path, role: str | None, days: int) -> None:
    """Make a private key and a certificate for a party, or for both."""
    from vflsec.companies import identity

    if role is None:
        identity.make_pair(folder, days)
        click.echo(
            f"made {folder / 'passive'} and {folder / 'active'}: each party takes its own, and keeps key.pem secret"
        )
        return
    identity.make(folder / role, role, days)
    click.echo(f"made {folder / role}: give certificate.pem to the other party, and put its own there as peer.pem")
    click.echo(f"sha256 {identity.fingerprint(folder / role)}")


def run(**given: Any) -> None:
    """Take part in a run, with the options of the command line."""
    role, job_file, keys_folder, out = (_require_argument(given, name) for name in ("role", "job", "keys", "out"))
    if (given["listen"] is None) == (given["connect"] is None):
        raise UsageError("expected either --listen or --connect, and the other one at the other party")
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from vflsec.companies import job, session
    from vflsec.companies.identity import Identity
    from vflsec.companies.link import Dialer, Listener, parse_address
    from vflsec.companies.snapshots import Snapshots

    torch.set_num_threads(1)  # batches are small, and the encryption needs the cores
    agreed = job.read(job_file)
    data = _read_rows(agreed, role, given)
    identity = Identity(keys_folder / role)
    where = parse_address(given["listen"] or given["connect"])
    _expose(agreed, data, role, given["max_exposure"])
    console = Console(stderr=True)

    def tell(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)  # a message is one line of a log

    if agreed.sealed:
        tell(_describe_epsilon(agreed, agreed.sealed.epsilon))
    snapshots = Snapshots(out)
    try:
        side = session.make_side(role, data, agreed, snapshots, workers=given["workers"])
        link = (
            Listener(where, identity, given["timeout"], tell)
            if given["listen"]
            else Dialer(where, identity, given["timeout"])
        )
        if isinstance(link, Listener):
            click.echo(f"listening on {where[0]}:{link.port}", err=True)
        with link, Progress(console=console, transient=True) as progress:
            bar = progress.add_task("batches")
            result = session.Session(
                side,
                link,
                snapshots,
                timeout=given["timeout"],
                patience=given["patience"],
                tell=tell,
                progress=lambda done, total: progress.update(bar, completed=done, total=total),
                record=given["record"],
                repeats=given["repeats"],
            ).finish()
    finally:
        snapshots.close()
    for name, value in result.utility.items():
        click.echo(f"{name:10} {value:.4f}")
    if result.epsilon is not None:
        click.echo(_describe_epsilon(agreed, result.epsilon))
    click.echo(f"{'traffic':10} {(result.sent + result.received) / 1e6:.1f} MB", err=role == "passive")
    print_note(f"run {result.run[:8]}, {result.batches} batches, history {result.history[:12]}: {out}")


def _describe_epsilon(agreed: Any, epsilon: float) -> str:
    return f"every label: epsilon {epsilon:.4g} at delta {agreed.sealed.delta:g}"


def _expose(agreed: Any, data: Any, role: str, limit: float | None) -> None:
    """Print how much of the passive party's features its peer can compute; stop if that is more than ``limit``."""
    from vflsec.cipher.roles.exposure import Exposure

    model, sealed = agreed.model, agreed.sealed
    width = model.hidden[-1] if sealed and model.hidden else model.width
    width = data.layout.width if width is None and role == "passive" else width
    if width is None:
        if limit is not None:
            raise UsageError(
                "expected --max-exposure from the passive party alone, which knows its number of columns: leave it out"
            )
        return
    exposure = Exposure(
        passes=sealed.epochs + 1 if sealed else agreed.train.epochs,
        outputs=model.outputs,
        width=width,
        rows=len(data.ids["train"]),
        frozen=not model.hidden if sealed else model.encoder == "identity",
    )
    expose([(str(exposure), exposure.share)], limit)


def _require_argument(given: dict[str, Any], name: str) -> Any:
    if given[name] is None:
        raise UsageError(f"expected --{name}, got none: vflsec party --help shows how to start")
    return given[name]


def _read_rows(agreed: Any, role: Any, given: dict[str, Any]) -> Any:
    """Return the party's own rows: of the job's dataset, or of its own file."""
    from vflsec.companies import party_rows
    from vflsec.data.description import PartyFile

    if agreed.dataset is not None:
        if given["data"] is not None:
            raise UsageError(f"expected no --data with the job's dataset {agreed.dataset}, got {given['data']}")
        return party_rows.read_dataset(agreed, role)
    label = given["label"]
    if (label is None) == (role == "active"):
        raise UsageError(f"expected --label from the active party alone, got {label or 'none'} from {role}")
    files = PartyFile(
        columns=_split_names(given["columns"]) if given["columns"] is not None else None,
        categorical=_split_names(given["categorical"]),
        signed_log=_split_names(given["signed_log"]),
    )
    return party_rows.read_file(_require_argument(given, "data"), agreed, role, files, key=given["key"], label=label)


def _split_names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
