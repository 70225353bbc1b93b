"""What each defense leaves to each adversary at a cost of at most two points of utility, on several data sets.

    python benchmarks/comparison.py run             compute what no stored result has, and store it
    python benchmarks/comparison.py sign FOLDER     sign what you computed, for somebody who has your public key
    python benchmarks/comparison.py add FOLDER      check what somebody else computed, repeat a part, and store it
    python benchmarks/comparison.py page            write docs/comparison.md and docs/comparison.png

``run`` keeps its folders in ``runs/comparison``, so that an interrupted run goes on; a folder for ``add`` is such a
folder of another machine. Stored results are in ``results/comparison``, one file for each data set and adversary.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import vflsec
from vflsec.base.errors import StoreError, VflsecError
from vflsec.results.analysis.groups import USABLE
from vflsec.results.analysis.results import Point, Summary
from vflsec.results.analysis.verdict import MEASURES
from vflsec.results.records.manifest import Manifest
from vflsec.results.records.schema import seal, unseal
from vflsec.run.job import prepare
from vflsec.run.spec import read

ROOT = Path(__file__).parents[1]
PAGE, STORE, FOLDERS = ROOT / "docs" / "comparison.md", ROOT / "results" / "comparison", Path("runs/comparison")
DATASETS = ("credit-default", "flights", "digits", "multiple-features")
ROWS = {"flights": 10_000}
"""Of data with more, so that a result takes an hour at most."""

SEEDS, KNOWN, BUDGET = 3, 80, 0.02
HASHED, SIGNATURE = ("manifest.json", "records.jsonl"), "signature"
"""Files of a folder that a result is read from, and the file with a signature of their hashes."""

TOLERANCE = 0.01
"""How far a repeated leak may be from the stored one: another processor rounds otherwise."""


class Role(NamedTuple):
    """What is run for an adversary: defenses by their usual strengths."""

    title: str
    attacks: tuple[str, ...]
    defenses: tuple[str, ...]


ROLES = {
    "passive_1": Role(
        "labels, passive party",
        ("fusion", "mc", "norm", "averaging", "sums"),
        ("iso", "marvell", "gaussian-dp", "laplace-dp", "label-dp", "sealed:epsilon=1,4"),
    ),
    "active": Role(
        "columns, active party",
        ("column-fusion",),
        ("iso@embedding", "gaussian-dp@embedding", "compress@embedding", "mid", "dcor"),
    ),
}


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The strongest attack under a defense at a strength: utility, leak, *alone* and advantage as in a report."""

    defense: str
    strength: float
    status: str
    utility: float | None
    cost: float | None
    measure: str
    attack: str
    leak: float | None
    alone: float | None
    advantage: float | None
    low: float | None
    high: float | None
    by_seed: dict[int, float]


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The results of a data set and an adversary.

    Attributes:
        by: who computed them.
        files: SHA-256 of each file of the folder that they were read from.
        signer: the beginning of the SHA-256 of the public key that signed them; empty without a signature.
        sources: versions of methods, defenses and attacks, and hashes of data, by kind and name.
    """

    dataset: str
    adversary: str
    seeds: int
    by: str
    commit: str | None
    versions: dict[str, str]
    sources: dict[str, dict[str, Any]]
    files: dict[str, str]
    rows: list[Row]
    signer: str = ""


def register(dataset: str, adversary: str) -> dict[str, Any]:
    """Return the settings of ``vflsec.evaluate`` that everybody runs."""
    role = ROLES[adversary]
    settings = {"dataset": dataset, "adversary": adversary, "aux": {"n": KNOWN}}
    if dataset in ROWS:
        settings["data"] = {"options": {"rows": ROWS[dataset]}}
    return {**settings, "attack": role.attacks, "defense": role.defenses}


def find_path(dataset: str, adversary: str) -> Path:
    """Return the file of a stored result."""
    return STORE / f"{dataset}-{adversary}.json"


def read_stored() -> Iterator[Entry]:
    """Yield the stored results, in the order of the page, whose contents have the hash that they were stored with."""
    for dataset in DATASETS:
        for adversary in ROLES:
            if (path := find_path(dataset, adversary)).is_file():
                yield unseal(path.read_bytes().strip(), Entry)


def make_row(point: Point) -> Row:
    """Return what is stored of a headline."""
    leak = point.leak
    return Row(
        defense=point.defense, strength=point.strength, status=point.status, utility=point.utility.mean,
        cost=point.cost, measure=leak.metric, attack=point.choice, leak=leak.mean, alone=leak.alone,
        advantage=leak.advantage, low=leak.advantage_ci95[0], high=leak.advantage_ci95[1], by_seed=leak.by_seed,
    )  # fmt: skip


def make_entry(folder: Path, by: str) -> Entry:
    """Return what a folder says, or raise StoreError where it is damaged, not finished, or of another comparison."""
    report = vflsec.Report.read(folder)
    manifest, origin = report.manifest, report.manifest.provenance
    expect_registered(manifest)
    expect_complete(report.summary)
    return Entry(
        dataset=manifest.dataset, adversary=get_role(manifest), seeds=manifest.seeds, by=by, commit=origin.commit,
        versions=origin.versions, sources=origin.sources, rows=[make_row(point) for point in report.worst],
        files=hash_files(folder),
    )  # fmt: skip


def hash_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of the files of a result."""
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in HASHED}


def read_key(path: Path, kind: type[Ed25519PrivateKey] | type[Ed25519PublicKey]) -> Any:
    """Return an Ed25519 key from a PEM file without a pass phrase, or raise StoreError."""
    try:
        content = path.read_bytes()
        key = load_pem_private_key(content, None) if kind is Ed25519PrivateKey else load_pem_public_key(content)
    except (OSError, ValueError, TypeError):
        key = None
    if not isinstance(key, kind):
        what = "private" if kind is Ed25519PrivateKey else "public"
        raise StoreError(f"expected a {what} Ed25519 key in PEM in {path}, found none: openssl genpkey makes one")
    return key


def check_signature(folder: Path, path: Path) -> str:
    """Return the fingerprint of the public key in ``path``, or raise StoreError unless it signed the folder."""
    key = read_key(path, Ed25519PublicKey)
    try:
        key.verify((folder / SIGNATURE).read_bytes(), msgspec.json.encode(hash_files(folder)))
    except (OSError, InvalidSignature):
        raise StoreError(f"expected {folder} signed by the key in {path}, found another signature or none") from None
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()[:16]


def get_role(manifest: Manifest) -> str:
    """Return which party the adversary is, whatever the data call it."""
    return str(manifest.settings["adversary"])


def expect_registered(manifest: Manifest) -> None:
    """Raise StoreError unless an evaluation has the registered settings, versions and data, and seeds enough."""
    role = get_role(manifest)
    if manifest.dataset not in DATASETS or role not in ROLES:
        got = f"{manifest.dataset}, {role}"
        raise StoreError(
            f"expected one of {', '.join(DATASETS)}, and {' or '.join(ROLES)}, found {got}: see run --help"
        )
    if manifest.seeds < SEEDS:
        raise StoreError(f"expected at least {SEEDS} seeds, found {manifest.seeds}: run again with more")
    settings = register(manifest.dataset, role) | {"seeds": manifest.seeds}
    lists = {"attacks": list(settings.pop("attack")), "defenses": list(settings.pop("defense"))}
    wanted = prepare(read({**settings, **lists})).manifest
    wanted = msgspec.json.decode(msgspec.json.encode(wanted), type=Manifest)  # as it is read from a file
    here, there = wanted.settings | wanted.provenance.sources, manifest.settings | manifest.provenance.sources
    if differ := sorted(name for name in here.keys() | there if here.get(name) != there.get(name)):
        raise StoreError(
            f"expected the registered settings, versions and data, found other {', '.join(differ)}: compute it by run, "
            f"with this version of vflsec"
        )


def expect_complete(summary: Summary) -> None:
    """Raise StoreError unless each headline has a number or the status of a joint model that is of no use."""
    bad = [p for p in summary.worst if not set(p.statuses) <= {*USABLE, "collapsed", "unseen"}]
    if bad or not summary.worst:
        where = f"{bad[0].defense} {bad[0].strength:g}: {bad[0].status}" if bad else "no result"
        raise StoreError(f"expected a number for each setting, found {where}: run the same command again")
    collapsed = [f", {p.defense} {p.strength:g}: " for p in summary.worst if p.strength and "collapsed" in p.statuses]
    if warned := [alarm for alarm in summary.alarms if not any(setting in alarm for setting in collapsed)]:
        raise StoreError(f"expected results without a warning, found: {warned[0]}")


def repeat(entry: Entry, jobs: int) -> float:
    """Compute the first seed of the strongest defended row again, and return how far its leak is from the stored one.

    The row follows from the hash of the records, so that who sends results cannot choose it.
    """
    rows = [row for row in entry.rows if row.strength and 0 in row.by_seed]
    row = rows[int(entry.files["records.jsonl"], 16) % len(rows)]
    defense, _, direction = row.defense.partition("@")
    settings = register(entry.dataset, entry.adversary)
    settings["defense"] = f"{defense}:strength={row.strength!r}{'@' * bool(direction)}{direction}"
    with tempfile.TemporaryDirectory() as folder:
        report = vflsec.evaluate(**settings, seeds=1, jobs=jobs, out=Path(folder, "again"))
    (again,) = (point for point in report.worst if point.strength)
    return abs((again.leak.mean or math.inf) - row.by_seed[0])


def store(entry: Entry) -> Path:
    """Write a result, sealed by a hash of its contents."""
    STORE.mkdir(parents=True, exist_ok=True)
    path = find_path(entry.dataset, entry.adversary)
    path.write_bytes(seal(entry))
    return path


def choose(entry: Entry) -> dict[str, Row | None]:
    """Return by defense its largest strength that costs at most the budget; None where each one costs more.

    Leaks have no part in the choice, which would be too favorable to defenses with many strengths. A model that
    collapsed in a seed is not shown, whatever it costs.
    """
    chosen: dict[str, Row | None] = {row.defense: None for row in entry.rows if row.strength}
    for row in sorted(entry.rows, key=lambda row: row.strength):
        if row.status == "collapsed" or row.cost is None or row.advantage is None:
            continue
        if row.strength and row.cost <= BUDGET:
            chosen[row.defense] = row
    return chosen


def write_cell(row: Row | None) -> str:
    """Return leak and advantage at a strength."""
    if row is None:
        return f"costs more than {100 * BUDGET:.0f}"
    known = row.low is not None and row.low > 0
    return f"{row.leak:.3f} ({row.advantage:+.3f}{'' if known else ', not shown'}) at {row.strength:.3g}"


def write_table(entries: list[Entry]) -> str:
    """Return the table of an adversary: a row for each defense, a column for each data set."""
    chosen = {entry.dataset: choose(entry) for entry in entries}
    clean = {entry.dataset: next(row for row in entry.rows if not row.strength) for entry in entries}
    lines = [f"| defense | {' | '.join(f'`{name}`' for name in chosen)} |", "|---" * (1 + len(chosen)) + "|"]
    alone = [f"{MEASURES.get(row.measure, row.measure)} {row.alone:.3f}" for row in clean.values()]
    lines.append(f"| *without joining* | {' | '.join(alone)} |")
    lines.append(f"| none | {' | '.join(f'{row.leak:.3f} ({row.advantage:+.3f})' for row in clean.values())} |")
    for defense in dict.fromkeys(name for of_data in chosen.values() for name in of_data):
        cells = [write_cell(of_data.get(defense)) for of_data in chosen.values()]
        lines.append(f"| `{defense}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(entries: list[Entry]) -> Figure:
    """Return the heat map: how much of the undefended advantage each defense leaves."""
    by_role = {role: of_role for role in ROLES if (of_role := [e for e in entries if e.adversary == role])}
    figure = Figure(figsize=(8.5, 7.5), layout="constrained")
    heights = [len(ROLES[role].defenses) for role in by_role]
    grid = figure.subplots(len(by_role), height_ratios=heights, squeeze=False)[:, 0]
    for axes, (role, of_role) in zip(grid, by_role.items(), strict=True):
        axes.set_title(f"{ROLES[role].title}: advantage over the adversary alone")
        names = list(dict.fromkeys(row.defense for entry in of_role for row in entry.rows if row.strength))
        for x, entry in enumerate(of_role):
            chosen, start = choose(entry), next(row for row in entry.rows if not row.strength)
            for y, name in enumerate(names):
                row = chosen.get(name)
                left = max(0.0, row.advantage or 0.0) / (start.advantage or 1.0) if row else math.nan
                color = colormaps["cividis"](min(1.0, left)) if row else "0.85"
                axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=color, edgecolor="white"))
                text = f"{row.advantage:+.3f}" if row else "costs too much"
                axes.text(x, y, text, ha="center", va="center", color="black" if not left < 0.5 else "white")
        axes.set(xlim=(-0.5, len(of_role) - 0.5), ylim=(len(names) - 0.5, -0.5))
        axes.set_xticks(range(len(of_role)), [entry.dataset for entry in of_role])
        axes.set_yticks(range(len(names)), names)
    return figure


def write_page(entries: list[Entry]) -> str:
    """Return the page."""
    origins = []
    for entry in entries:
        version = f"{entry.versions.get('vflsec', '–')}, {(entry.commit or 'a package')[:10]}"
        by = f"{entry.by}{f', key `{entry.signer}`' * bool(entry.signer)}"
        who = f"{ROLES[entry.adversary].title} | {by} | {entry.seeds} | {version}"
        origins.append(f"| `{entry.dataset}` | {who} | `{entry.files['records.jsonl'][:16]}` |")
    tables = []
    for adversary, role in ROLES.items():
        of_role = [entry for entry in entries if entry.adversary == adversary]
        if not of_role:
            continue
        names = ", ".join(f"`{name}`" for name in role.attacks)
        tables += [
            f"## {role.title.capitalize()}",
            f"{'The strongest of' if len(role.attacks) > 1 else 'By'} {names}.",
            write_table(of_role),
        ]
    parts = [
        "# Defenses compared",
        "Written by `python benchmarks/comparison.py page` from the results in `results/comparison`. Two parties, "
        f"split learning; the adversary knows the answer of {KNOWN} rows. Of "
        f"{', '.join(f'`{name}`, {rows:,} rows' for name, rows in ROWS.items())} are used.",
        "![Advantage that each defense leaves, by data set](comparison.png)",
        f"Each defense is taken at the largest of its usual strengths that costs at most {100 * BUDGET:.0f} points of "
        "utility, by the mean over seeds. The strength of `label-dp` and `sealed` is 1/epsilon. A model that "
        "collapsed in a seed is left out. A leak is that of the strongest attack, chosen on half of the rows and "
        "scored on the other half. In brackets its advantage over what the adversary infers without joining, *not "
        "shown* where the interval of a single comparison includes 0. In the picture, the brighter a field, the more "
        "of the advantage without a defense is left.",
        *tables,
        "## Where the results come from",
        "| data | what is inferred | computed by | seeds | version | hash of the records |\n|---|---|---|---|---|---|\n"
        + "\n".join(origins),
        "## Add a result",
        "Compute the registered settings on your machine, and check the folder:",
        "```text\npython benchmarks/comparison.py run --dataset digits --adversary active\n"
        "python benchmarks/comparison.py sign runs/comparison/digits-active --key private.pem\n"
        "python benchmarks/comparison.py add runs/comparison/digits-active --by NAME --signer public.pem\n```",
        "`add` refuses a folder that is damaged or not finished, and other settings, versions or data. It computes "
        "the first seed of a row again, which the hash of the records chooses, and refuses a leak that differs by more "
        f"than {TOLERANCE:g}. With `--signer` it also refuses what this Ed25519 key has not signed. This finds "
        "mistakes; who invents all other numbers is found by chance alone.",
    ]
    return "\n\n".join(parts) + "\n"


@click.group()
def main() -> None:
    """Compare defenses on several data sets, from stored results."""


@main.command()
@click.option("--dataset", "datasets", type=click.Choice(DATASETS), multiple=True, default=DATASETS, help="May repeat.")
@click.option(
    "--adversary", "roles", type=click.Choice(list(ROLES)), multiple=True, default=list(ROLES), help="May repeat."
)
@click.option("--jobs", default=2, show_default=True, help="Processes.")
@click.option("--by", default="vflsec", show_default=True, help="Who computes.")
def run(datasets: tuple[str, ...], roles: tuple[str, ...], jobs: int, by: str) -> None:
    """Compute what is missing in runs/comparison, and store it."""
    for dataset in datasets:
        for adversary in roles:
            folder = FOLDERS / f"{dataset}-{adversary}"
            try:
                vflsec.evaluate(**register(dataset, adversary), seeds=SEEDS, jobs=jobs, out=folder)
                click.echo(f"stored {store(make_entry(folder, by))}")
            except VflsecError as error:
                raise click.ClickException(str(error)) from None


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--key", "path", type=click.Path(path_type=Path), required=True, help="Private Ed25519 key, in PEM.")
def sign(folder: Path, path: Path) -> None:
    """Sign the manifest and the records of FOLDER."""
    try:
        signed = read_key(path, Ed25519PrivateKey).sign(msgspec.json.encode(hash_files(folder)))
        (folder / SIGNATURE).write_bytes(signed)
    except (VflsecError, OSError) as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"wrote {folder / SIGNATURE}")


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--by", required=True, help="Who computed it.")
@click.option("--signer", type=click.Path(path_type=Path), help="Public Ed25519 key that has signed it, in PEM.")
@click.option("--jobs", default=2, show_default=True, help="Processes.")
def add(folder: Path, by: str, signer: Path | None, jobs: int) -> None:
    """Check FOLDER, which somebody else computed by run, and store it."""
    try:
        fingerprint = check_signature(folder, signer) if signer else ""
        entry = msgspec.structs.replace(make_entry(folder, by), signer=fingerprint)
        away = repeat(entry, jobs)
        if not away <= TOLERANCE:
            raise StoreError(f"expected the leak of a repeated row within {TOLERANCE:g}, found {away:.3f}: not stored")
    except VflsecError as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"stored {store(entry)}; a repeated row differs by {away:.4f}")


@main.command()
def page() -> None:
    """Write docs/comparison.md and docs/comparison.png."""
    try:
        entries = list(read_stored())
    except ValueError as error:
        raise click.ClickException(f"expected stored results in {STORE}, found a damaged one: {error}") from None
    if not entries:
        raise click.ClickException(f"expected results in {STORE}, found none: python benchmarks/comparison.py run")
    PAGE.write_text(write_page(entries), "utf-8")
    draw(entries).savefig(PAGE.with_suffix(".png"), dpi=120, metadata={"Software": None})
    click.echo(f"wrote {PAGE.name} and {PAGE.stem}.png")


if __name__ == "__main__":
    main()
