"""A1: delta^C of consecutive batches gives C all labels and W, in every setting in which W is trained linearly."""

import msgspec
import numpy as np
import pytest

from vflsec.audit.audit import Truth
from vflsec.audit.delta_chain import DeltaChain
from vflsec.core.errors import InsufficientView
from vflsec.paillier.recording import Recorder, Recording
from vflsec.testing.recordings import LinearRun


def audited(folder, **settings):
    c, p = LinearRun(**settings).record(folder)
    return DeltaChain()(c, Truth(c, p))


def error(folder, **settings):
    """Relative error of W at every step, and the accuracy of labels."""
    c, p = LinearRun(**settings).record(folder)
    recovered = DeltaChain().run(c)
    true = Truth(c, p).at([*recovered.steps, *(n + 1 for n in recovered.steps)])
    after = settings.get("order") == "paper"
    found = []
    for number, arrays in recovered.steps.items():
        if "weights" in true[number + after]:
            w = true[number + after]["weights"]
            found.append(min(np.abs(arrays["weights"] - s * w).max() for s in (1, -1)) / np.abs(w).max())
    return max(found), DeltaChain()(c, Truth(c, p)).figures[0].value


@pytest.mark.parametrize("order", ["current", "paper"])
@pytest.mark.parametrize("rate", [0.1, 5e-4])
@pytest.mark.parametrize(("rounding", "limit"), [(0.0, 5e-12), (2.0**-24, 2e-5)])
def test_two_batches_give_all_labels_and_the_weights(tmp_path, order, rate, rounding, limit):
    steps = 3 if order == "paper" else 2  # one more, so that p's recording has the W that is told
    worst, accuracy = error(tmp_path, order=order, rate=rate, rounding=rounding, steps=steps)
    assert accuracy == 1.0
    assert worst < limit


def test_more_batches_give_the_weights_better(tmp_path):
    for name in ("few", "many"):
        (tmp_path / name).mkdir()
    few, _ = error(tmp_path / "few", rate=5e-4, rounding=2.0**-24, seed=3)
    many, accuracy = error(tmp_path / "many", rate=5e-4, rounding=2.0**-24, seed=3, steps=32)
    assert accuracy == 1.0
    assert many < few / 2


@pytest.mark.parametrize("order", ["current", "paper"])
@pytest.mark.parametrize(("momentum", "decay"), [(0.9, 0.0), (0.99, 1e-3), (0.0, 1e-2)])
def test_momentum_and_weight_decay_hide_nothing(tmp_path, order, momentum, decay):
    settings = {"order": order, "momentum": momentum, "weight_decay": decay}
    worst, accuracy = error(tmp_path, steps=70, rounding=2.0**-24, **settings)  # three windows
    assert accuracy == 1.0
    assert worst < 2e-5


@pytest.mark.parametrize(("outputs", "width"), [(3, 10), (4, 10), (10, 20)])
def test_of_several_outputs_all_labels_but_for_the_names_of_classes(tmp_path, outputs, width):
    finding = audited(tmp_path, outputs=outputs, width=width, steps=40, rate=0.5, rounding=2.0**-24)
    labels, weights = finding.figures
    assert labels.value > 0.999
    assert weights.value > 0.99
    assert finding.verdict == "leaks"


def test_noise_that_keeps_the_rank_keeps_the_direction_of_the_weights(tmp_path):
    clean = audited(tmp_path, steps=20).figures
    assert [figure.value for figure in clean] == pytest.approx([1.0, 1.0, 1.0])
    (tmp_path / "noisy").mkdir()
    c, p = LinearRun(steps=20, row_noise=1.0).record(tmp_path / "noisy")
    recovered = DeltaChain().run(c)
    true = Truth(c, p).at(recovered.steps)
    for number, arrays in recovered.steps.items():
        found, w = arrays["weights"][:, 0], true[number]["weights"][:, 0]
        assert abs(found @ w) / np.linalg.norm(found) / np.linalg.norm(w) == pytest.approx(1.0)


def test_noise_on_every_coordinate_is_what_stops_it(tmp_path):
    found = []
    for noise in (0.0, 0.1, 10.0):
        (tmp_path / str(noise)).mkdir()
        found.append(audited(tmp_path / str(noise), steps=40, noise=noise))
    ranking = [finding.figures[1] for finding in found]
    assert [figure.of for figure in ranking] == ["labels"] * 3
    assert ranking[0].value == 1.0
    assert ranking[1].value > 0.95  # noise of a third of the gradients is no defence
    assert ranking[2].value < 0.53
    assert found[2].figures[0].value < found[2].figures[0].chance
    assert found[2].figures[2].value < 0.05  # W is lost
    assert "only in direction" in found[2].found


def test_without_the_truth_it_says_how_well_all_fits(tmp_path):
    c, _ = LinearRun(steps=20, rounding=2.0**-24).record(tmp_path)
    (own,) = DeltaChain()(c).figures
    assert own.metric == "consistency"
    assert own.value > 1 - 1e-6
    assert own.chance < 0.9


def test_a_gap_in_the_recording_is_not_bridged(tmp_path):
    c, p = LinearRun(steps=9, rounding=2.0**-24).record(tmp_path)
    with Recorder(tmp_path / "gap", c.header) as recorder:
        for step in c.steps():
            if step.number != 4:
                recorder.begin(step.number, rate=step.rate)
                for name, array in step.notes.items():
                    recorder.note(name, array)
    gap = Recording(tmp_path / "gap")
    assert sorted(DeltaChain().run(gap).steps) == [0, 1, 2, 3, 5, 6, 7, 8]
    assert DeltaChain()(gap, Truth(gap, p)).figures[0].value == 1.0


def test_too_little_is_no_acquittal(tmp_path):
    c, _ = LinearRun(steps=1).record(tmp_path)
    finding = DeltaChain()(c)
    assert (finding.verdict, finding.figures) == ("unmeasured", ())
    (tmp_path / "wide").mkdir()
    wide, p = LinearRun(outputs=10, width=10).record(tmp_path / "wide")
    assert "at least 18 features for 10 outputs" in DeltaChain()(wide).found
    with pytest.raises(InsufficientView, match="for role C, got a recording of role p"):
        DeltaChain()(p)


def test_zero_gradients_are_passed_over(tmp_path):
    c, _ = LinearRun(steps=4).record(tmp_path)
    with Recorder(tmp_path / "zero", msgspec.structs.replace(c.header)) as recorder:
        for step in c.steps():
            recorder.begin(step.number, rate=step.rate)
            recorder.note("mu", step.notes["mu"])
            recorder.note("embedding_gradient", step.notes["embedding_gradient"] * (step.number > 0))
    assert sorted(DeltaChain().run(Recording(tmp_path / "zero")).steps) == [1, 2, 3]
