"""A GPU gives what the processor gives, but for rounding."""

import math

import pytest
import torch

import vflsec
from vflsec.core import registry

GPUS = torch.cuda.device_count()

pytestmark = [
    pytest.mark.skipif(not GPUS, reason="torch finds no GPU"),
    pytest.mark.usefixtures("few_trees_in_module"),  # the subject is not how well trees guess
    pytest.mark.filterwarnings("default"),  # the image of a GPU machine has versions of its own
]

ROWS = 600
CLOSE = 0.1
"""What rounding may move: epochs of training amplify it, and few rows are scored."""


def evaluate(folder, device, options=None, train=None, **settings):
    return vflsec.evaluate(
        dataset="toy", data={"options": {"rows": ROWS, **(options or {})}}, seeds=2, aux={"n": 40, "folds": 0},
        train={"epochs": 4, "batch": 64, "pretrain": {"epochs": 2}, **(train or {})},
        out=folder / device, device=device, jobs=1, progress=False, **settings,
    )  # fmt: skip


def expect_equal(folder, **settings):
    """Expect the same statuses, but that a fit may converge on one of the two alone, and numbers that are close."""
    report, other = (evaluate(folder, device, **settings) for device in ("cpu", "cuda"))
    assert not other.summary.failures
    far = []
    for one, two in zip(report.points, other.points, strict=True):
        for a, b in ((one.utility.mean, two.utility.mean), (one.leak.mean, two.leak.mean)):
            if (a is None) != (b is None) or (a is not None and not math.isclose(a, b, abs_tol=CLOSE)):
                far.append((one.attack, one.strength, a, b))
        if one.status != two.status and {one.status, two.status} != {"ok", "unconverged"}:
            far.append((one.attack, one.strength, one.status, two.status))
    assert not far


FAMILIES = {"fedcssl": "byol", "fedgssl": "moco", "fedhssl": "simsiam", "fedlocal": "moco"}
"""Methods of one family differ in their pre-training alone: of each family one, and of each kind one."""

METHODS = [
    name
    for name in sorted(registry.list_all("methods"))
    if FAMILIES.get(name.partition("-")[0], name.partition("-")[2]) == name.partition("-")[2]
    and name != "split-lm"  # which needs text
]
OTHERS = {
    "id-lmid": {"methods": ["secureboost"]},
    "phe": {"train": {"optimizer": "sgd"}, "defense": "phe:backend=plain"},
}
"""Settings of defenses that do not act in split learning, or not with its optimizer."""


@pytest.mark.parametrize("name", METHODS)
def test_methods(tmp_path, name):
    source = {"source": 300} if registry.load("methods", name).source_phases else {}
    expect_equal(tmp_path, options=source, methods=[name], attack="mc")


@pytest.mark.parametrize("name", sorted(registry.list_all("defenses")))
def test_defenses(tmp_path, name):
    strength = registry.load("defenses", name).strengths[-1]
    settings = {"methods": ["fedsplitnn"], "defense": name} | OTHERS.get(name, {})
    expect_equal(tmp_path, attack="mc", strengths=[strength], **settings)


@pytest.mark.parametrize("adversary", ["passive_1", "active"])
@pytest.mark.parametrize("defense", ["iso:lambda=5", "sealed:strength=1"])
def test_all_attacks(tmp_path, adversary, defense):
    expect_equal(tmp_path, methods=["fedsplitnn"], attack="all", defense=defense, adversary=adversary)
