"""An evaluation in an experiment tracker: its settings, the numbers of the default table, its page and pictures."""

import math
import os
import re
import sys
import tempfile
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path

from matplotlib.image import imread

from vflsec.base.errors import UsageError
from vflsec.report.columns import select_columns
from vflsec.report.comparison import list_settings
from vflsec.report.curve import draw_attacks
from vflsec.report.report import Report
from vflsec.report.table import show_most
from vflsec.results.analysis.results import Summary, name_defense
from vflsec.results.records.manifest import NO_ADVERSARY

NUMBERS = (
    "utility", "utility_low", "utility_high", "cost", "leak", "leak_low", "leak_high", "alone", "advantage",
    "advantage_low", "advantage_high", "epsilon", "epsilon_at_least",
)  # fmt: skip
"""Columns of the default table, and the ends of their intervals."""

Texts = dict[str, str]
Numbers = dict[str, float]


def list_numbers(summary: Summary) -> Numbers:
    """Return the numbers of the default table by target, method, defense and column; those of JSON."""
    points = summary.points
    others = map(show_most, points) if summary.audited else [p for p in points if p.attack == NO_ADVERSARY]
    numbers: dict[str, float | None] = {}
    for row in (*summary.worst, *others):
        place = [row.target, row.method, name_defense(row, summary.undefended)]
        place += [] if row.attack == "worst" else [row.attack]
        numbers |= {_name(*place, column.name): column.value(row) for column in select_columns(*NUMBERS)}
    for cap in (cap for cap in summary.cap if cap.attack == "worst"):
        for score, mean in (("value", "CAP"), ("calibrated", "calibrated CAP"), ("hypervolume", "hypervolume")):
            ends = cap.ci95 if score == "value" else getattr(cap, f"{score}_ci95")
            values = zip((mean, f"{mean}_low", f"{mean}_high"), (getattr(cap, score), *ends), strict=True)
            numbers |= {_name(cap.target, cap.method, cap.defense, name): value for name, value in values}
    return {name: value for name, value in numbers.items() if value is not None and math.isfinite(value)}


def _name(*parts: str) -> str:
    """Return a name with the letters that every tracker takes."""
    return "/".join(re.sub(r"[^\w.: -]", "_", part) for part in parts)


def send(tracker: str, report: Report, folder: Path) -> None:
    """Send a report to a tracker, which finds its server by its own settings; raise UsageError if that fails."""
    adapter = {"mlflow": _send_to_mlflow, "wandb": _send_to_wandb, "tensorboard": _send_to_tensorboard}[tracker]
    place = folder / tracker / Path(report.summary.out).name
    settings = {_name(key): value for key, value in list_settings(report.manifest)}
    verdict = "\n\n".join((*report.summary.alarms, *report.summary.verdict))
    with tempfile.TemporaryDirectory() as files:
        report.save(files)
        if dots := draw_attacks(report.summary):
            dots.savefig(Path(files, "attacks.png"))
        try:
            with redirect_stdout(sys.stderr):  # stdout may be JSON
                adapter(place, settings, list_numbers(report.summary), verdict, Path(files))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            again = f"vflsec report {folder} --track {tracker}"
            raise UsageError(f"cannot send to {tracker} ({reason}): {again} sends the results again") from error


def _send_to_mlflow(place: Path, settings: Texts, numbers: Numbers, verdict: str, files: Path) -> None:
    mlflow = import_module("mlflow")
    with mlflow.start_run(run_name=place.name, description=verdict):
        mlflow.log_params(settings)
        mlflow.log_metrics(numbers)
        mlflow.log_artifacts(str(files))


def _send_to_wandb(place: Path, settings: Texts, numbers: Numbers, verdict: str, files: Path) -> None:
    wandb = import_module("wandb")
    project = os.environ.get("WANDB_PROJECT", "vflsec")
    with wandb.init(project=project, name=place.name, config=settings, notes=verdict) as run:
        pictures = {path.stem: wandb.Image(str(path)) for path in files.glob("*.png")}
        page = wandb.Html((files / "report.html").read_text("utf-8"), inject=False)
        run.log({**numbers, **pictures, "report": page})


def _send_to_tensorboard(place: Path, settings: Texts, numbers: Numbers, verdict: str, files: Path) -> None:
    for earlier in place.glob("events.out.tfevents.*"):
        earlier.unlink()
    with import_module("torch.utils.tensorboard").SummaryWriter(str(place)) as writer:
        for name, value in numbers.items():
            writer.add_scalar(name, value, new_style=True, double_precision=True)
        for path in files.glob("*.png"):
            writer.add_image(path.stem, imread(path)[..., :3], dataformats="HWC")
        writer.add_text("settings", "\n\n".join(f"{name}: `{value}`" for name, value in settings.items()))
        writer.add_text("verdict", verdict)
