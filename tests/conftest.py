"""Fixtures that several packages' tests share.

They import the package when they run: the process that hands tests to workers reads this file, but runs no test.
"""

import importlib.util
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from threadpoolctl import threadpool_limits

# How fast an example is drawn or runs is a fact about the machine, which other work can make slow at any time.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # whose games of an epsilon tests play, too


LONGEST = (
    "test_notebook.py", "test_benchmarks.py", "test_boosting_replay.py", "test_workers.py", "test_controls.py",
    "test_engines.py", "test_chaos.py",
)  # fmt: skip
"""Files whose tests take longest, so that they begin first: no worker is left with one when others have none."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Leave nine of ten cases of a ``sampled`` test to make test-extended; the first always stays."""
    for item in items:
        if item.get_closest_marker("sampled") and sum(item.callspec.indices.values()) % 10:
            item.add_marker(pytest.mark.long)
    items.sort(key=lambda item: item.path.name not in LONGEST)


EXTRAS = {
    "pyarrow": "parquet|audit",
    "onnxruntime": "audit",
    "onnx": "test",
    "tenseal": "sealed",
    "transformers": "transformers",
}
"""Modules that tests need, and the extras of vflsec that install them."""


def skip_without_extra(error: Exception) -> None:
    """Skip a test whose error asks for an extra, or for a module of one, that is not installed."""
    for module, extras in EXTRAS.items():
        asked = rf"vflsec\[({extras})\]|No module named '{module}'|import of {module}\b|{module} is required"
        if importlib.util.find_spec(module) is None and re.search(asked, str(error)):
            pytest.skip(f"{module} is not installed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    """Skip a test that needs, or whose fixtures need, an extra that is not installed."""
    try:
        return (yield)
    except Exception as error:
        skip_without_extra(error)
        raise


pytest_runtest_call = pytest_runtest_setup


@pytest.fixture
def federation():
    """Bare parties, ``active`` and ``passive_1``, of eight rows on a bare wire."""
    from vflsec.testing.federations import make_tiny_federation

    return make_tiny_federation()


@pytest.fixture(scope="session")
def dirty(tmp_path_factory) -> Path:
    """A folder with the files of a bank and a bureau as companies export them; nothing is to be written there."""
    folder = tmp_path_factory.mktemp("dirty")
    runpy.run_path(str(Path(__file__).with_name("data") / "dirty.py"))["write"](folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def checked_reports():
    """Check every report that a test reads."""
    from tests.results.analysis.invariants import check_report
    from vflsec.report import report

    summarize = report.summarize

    def checked(*args, **options):
        found = summarize(*args, **options)
        check_report(found)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "summarize", checked)
        yield


def limit_trees(patch: pytest.MonkeyPatch) -> None:
    """Fit a fifth of the randomized trees of joint attacks."""
    patch.setattr("vflsec.inference.opinion_pool.TREES", 40)
    patch.setattr("vflsec.inference.opinion_pool.BAGGED_TREES", 20)
    patch.setattr("vflsec.inference.trees.values.TREES", 20)
    patch.setattr("vflsec.attacks.self_training.EARLY_TREES", 10)


@pytest.fixture
def few_trees(monkeypatch):
    """Fit a fifth of the randomized trees of joint attacks."""
    limit_trees(monkeypatch)


@pytest.fixture(scope="module")
def few_trees_in_module():
    """Fit a fifth of them in all tests and fixtures of a module, and of those of the adversary alone."""
    from vflsec.attacks.trees import Trees

    with pytest.MonkeyPatch.context() as patch:
        limit_trees(patch)
        patch.setitem(Trees.__init__.__kwdefaults__, "trees", 40)
        yield


@pytest.fixture
def small_forests(few_trees, monkeypatch):
    """Fit a fifth of the randomized trees, and hold auxiliary rows out in two parts."""
    for module in ("vflsec.inference.fused", "vflsec.inference.trees.guesses"):
        monkeypatch.setattr(f"{module}.FOLDS", 2)


@pytest.fixture(scope="session", autouse=True)
def limit_threads():
    """Leave the cores to pytest's workers: on small tensors more threads only wait for each other."""
    import torch

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start
    torch.set_num_threads(1)
    with threadpool_limits(1):
        yield
