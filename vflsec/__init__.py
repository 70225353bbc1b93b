"""Measure what a vertical federated learning system leaks.

    import vflsec
    report = vflsec.evaluate(attack="mc", defense="iso", strengths=[1, 5, 25])
    print(report.table())

Names are imported on first use, so ``import vflsec`` and ``vflsec --help`` do not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vflsec.api import attack, audit_system, evaluate, sweep, train
    from vflsec.audit.defending import defend
    from vflsec.audit.recorder import Recorder
    from vflsec.data.frames import dataset
    from vflsec.report.report import Report, plot
    from vflsec.report.sweep import SweepReport
    from vflsec.run.plan import load_dataset

__version__ = "0.1.0"
__all__ = [
    "Recorder",
    "Report",
    "SweepReport",
    "__version__",
    "attack",
    "audit_system",
    "dataset",
    "defend",
    "evaluate",
    "load_dataset",
    "plot",
    "sweep",
    "train",
]

_HOME = {
    "Recorder": "vflsec.audit.recorder",
    "Report": "vflsec.report.report",
    "SweepReport": "vflsec.report.sweep",
    "attack": "vflsec.api",
    "audit_system": "vflsec.api",
    "dataset": "vflsec.data.frames",
    "defend": "vflsec.audit.defending",
    "evaluate": "vflsec.api",
    "load_dataset": "vflsec.run.plan",
    "plot": "vflsec.report.report",
    "sweep": "vflsec.api",
    "train": "vflsec.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'vflsec' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
