"""What each exchange of self-supervised pre-training gives away, before any label is used.

    python benchmarks/exchanges.py            compute, about half an hour on two cores, and print the page
    python benchmarks/exchanges.py --write    write benchmarks/exchanges.md as well

The family of FedHSSL differs in what is exchanged: nothing (FedLocal), projections of aligned rows (FedCSSL, FedGSSL),
projections and averaged models (FedHSSL). The passive party attacks after pre-training; the server that averages models
attacks what it received. What is computed is kept in ``runs/exchanges-*``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

import vflsec
from vflsec.report.formats import with_margin
from vflsec.results.analysis.results import Leak

PAGE = Path(__file__).with_name("exchanges.md")
FAMILY = ("fedlocal-simsiam", "fedcssl-simsiam", "fedgssl-simsiam", "fedhssl-simsiam")
BOTH = "fedhssl-simsiam"
NOISE = (0.4, 1.0, 5.0)
SETTINGS: dict[str, Any] = {
    "dataset": "multiple-features",
    "data": {"aligned": 0.4},
    "train": {"pretrain": {"epochs": 20}},
    "aux": {"folds": 0},
}


def evaluated(name: str, seeds: int, jobs: int, **settings: Any) -> vflsec.Report:
    """Run what is missing of one evaluation."""
    return vflsec.evaluate(seeds=seeds, jobs=jobs, out=Path(f"runs/exchanges-{name}"), **SETTINGS, **settings)


def on_rows(report: vflsec.Report) -> list[list[str]]:
    """Return a line for each method and strength: leaks of labels and of the active party's columns, training rows."""
    leaks: dict[tuple[str, float], dict[str, Leak]] = {}
    for point in report.points:
        leaks.setdefault((point.method, point.strength), {})[point.target] = point.leak_train
    return [
        [method, f"{strength:g}" if strength else "–", *_cells(found["labels"]), *_cells(found["features"])]
        for (method, strength), found in leaks.items()
    ]


def _cells(leak: Leak) -> list[str]:
    return [with_margin(leak), _advantage(leak)]


def _advantage(leak: Leak) -> str:
    """Return the advantage over the adversary alone, with its interval."""
    low, high = leak.advantage_ci95
    margin = "" if leak.advantage is None or low is None or high is None else f" ±{(high - low) / 2:.3f}"
    return "–" if leak.advantage is None else f"{leak.advantage:+.3f}{margin}"


def on_models(seeds: int, jobs: int) -> list[list[str]]:
    """Return a line for each protocol and adversary: how much of the active party's shared model is recovered."""
    found = []
    for protocol in ("model-average", "secure-average"):
        line = [f"`{protocol}`"]
        for adversary in ("server", "passive_1"):
            report = evaluated(
                f"{protocol}-{adversary}",
                seeds,
                jobs,
                attack="model-recovery:victim=active@pretrain",
                adversary=adversary,
                methods=[BOTH],
                method={BOTH: {"average": protocol}},
            )
            line.append(with_margin(report.points[0].leak))
        found.append(line)
    return found


def page(seeds: int, jobs: int) -> str:
    """Compute and return the page."""
    attacks = ["fusion@pretrain", "column-fusion@pretrain"]
    plain = on_rows(evaluated("family", seeds, jobs, attack=attacks, methods=list(FAMILY)))
    swept = f"iso:lambda={','.join(f'{s:g}' for s in NOISE)}@pretrain.embedding"
    noisy = on_rows(evaluated("iso", seeds, jobs, attack=attacks, methods=[BOTH], defense=swept))
    header = ["method", "ISO, lambda", "labels", "advantage", "columns", "advantage"]
    parts = [
        "# What each exchange of pre-training gives away",
        f"Written by `python benchmarks/exchanges.py --write`; {seeds} seeds of `multiple-features`, 40 % of the rows "
        "aligned, 20 iterations of SimSiam. The passive party strikes after pre-training, when no label has been used. "
        "It knows the labels, or the active party's columns, of 80 rows. *Labels* is the accuracy of "
        "`fusion@pretrain`, *columns* the R² of `column-fusion@pretrain`, both on training rows. *Advantage* is over "
        "the same party alone. "
        "± is a 95 % interval over seeds.",
        _table(header, plain),
        "FedLocal exchanges nothing. In FedCSSL and FedGSSL the passive party receives projections of the active "
        "party's columns of all aligned rows, in every iteration. FedHSSL also averages top encoders.",
        "ISO noise on these projections (`--defense iso@pretrain.embedding`):",
        _table(header, [line for line in noisy if line[1] != "–"]),
        "How much of the active party's shared model is recovered (`model-recovery@pretrain`, R² around the mean of "
        "both parties, which is 0 for the mean itself):",
        _table(["protocol", "by the server", "by the passive party"], on_models(seeds, jobs)),
        "Secure aggregation hides single models from the server. It cannot hide one of two parties from the other, for "
        "whom it is twice the mean less its own.",
    ]
    return "\n\n".join(parts) + "\n"


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *lines))


@click.command()
@click.option("--seeds", default=5, show_default=True)
@click.option("--jobs", default=2, show_default=True)
@click.option("--write", is_flag=True, help="Write the page to benchmarks/exchanges.md.")
def main(seeds: int, jobs: int, write: bool) -> None:
    """Compute and print the page."""
    text = page(seeds, jobs)
    if write:
        PAGE.write_text(text, encoding="utf-8")
    click.echo(text)


if __name__ == "__main__":
    main()
