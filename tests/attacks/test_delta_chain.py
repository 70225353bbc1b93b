"""A1: delta^C of consecutive batches gives C all labels and W, in every setting in which W is trained linearly."""

import re

import msgspec
import numpy as np
import pytest

from vflsec.attacks.delta_chain import DeltaChain, DeltaChainWeights, recover_chain
from vflsec.base.errors import DataError, InsufficientView
from vflsec.cipher.recording import Recording, RecordingWriter
from vflsec.testing.recordings import LinearRun, attack_recording, make_rng

KNOWN = 20
"""Labels that name the classes; their rows are not scored."""


def labels(c, p):
    """Return the leak of the labels."""
    return attack_recording(DeltaChain(), c, p, n=KNOWN)["leak"]["train"]


def r2(c, p):
    """Return the leak of W."""
    return attack_recording(DeltaChainWeights(), c, p, n=KNOWN)["leak"]["parameters"].headline


def weights_of(c, p):
    """Return W (g, C) by step."""
    shares = [{step.number: step.notes["share"] for step in own.steps() if step.has("share")} for own in (c, p)]
    return {n: np.ldexp((shares[0][n] + shares[1][n]).astype(float), -64) for n in shares[0] if n in shares[1]}


def error(folder, **settings):
    """Relative error of W at every step, and the accuracy of labels."""
    c, p = LinearRun(**settings).record(folder)
    true, after = weights_of(c, p), settings.get("order") == "paper"
    errors = []
    for number, read in recover_chain(c).steps.items():
        if number + after in true:
            w = true[number + after]
            errors.append(min(np.abs(read.weights - s * w).max() for s in (1, -1)) / np.abs(w).max())
    return max(errors), labels(c, p).metrics["accuracy"]


@pytest.mark.sampled
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


@pytest.mark.sampled
@pytest.mark.parametrize("order", ["current", "paper"])
@pytest.mark.parametrize(("momentum", "decay"), [(0.9, 0.0), (0.99, 1e-3), (0.0, 1e-2)])
def test_momentum_and_weight_decay_hide_nothing(tmp_path, order, momentum, decay):
    settings = {"order": order, "momentum": momentum, "weight_decay": decay}
    worst, accuracy = error(tmp_path, steps=70, rounding=2.0**-24, **settings)  # three windows
    assert accuracy == 1.0
    assert worst < 2e-5


@pytest.mark.sampled
@pytest.mark.parametrize(("outputs", "width"), [(3, 10), (4, 10), (10, 20)])
def test_of_several_outputs_all_labels_but_for_the_names_of_classes(tmp_path, outputs, width):
    c, p = LinearRun(outputs=outputs, width=width, steps=40, rate=0.5, rounding=2.0**-24).record(tmp_path)
    leak = labels(c, p)
    assert leak.headline > 0.999
    assert leak.row_interval[0] > leak.chance
    assert r2(c, p) > 0.99
    true = weights_of(c, p)
    guess = np.stack([read.weights for read in recover_chain(c).steps.values()])
    whole = np.stack([true[number] for number in recover_chain(c).steps])
    whole -= whole.mean(axis=2, keepdims=True)  # what all outputs share is not determined
    best = [[((guess[:, :, a] - whole[:, :, b]) ** 2).sum() for a in range(outputs)] for b in range(outputs)]
    assert np.min(best, axis=1).sum() < 0.01 * (whole**2).sum()


def test_noise_that_keeps_the_rank_keeps_the_direction_of_the_weights(tmp_path):
    clean = LinearRun(steps=20).record(tmp_path)
    assert [labels(*clean).metrics[name] for name in ("auc", "accuracy")] == pytest.approx([1.0, 1.0])
    assert r2(*clean) == pytest.approx(1.0)
    (tmp_path / "noisy").mkdir()
    c, p = LinearRun(steps=20, row_noise=1.0).record(tmp_path / "noisy")
    true = weights_of(c, p)
    for number, read in recover_chain(c).steps.items():
        found, w = read.weights[:, 0], true[number][:, 0]
        assert abs(found @ w) / np.linalg.norm(found) / np.linalg.norm(w) == pytest.approx(1.0)


class Epochs(LinearRun):
    """Visits the same 2048 samples again and again, in a new order each time."""

    def batches(self):
        rng = make_rng(self.seed, "batches")
        true = rng.normal(size=(self.columns, self.outputs))
        x = rng.normal(size=(2048, self.columns))
        labels = self._labels(x @ true + rng.normal(size=(2048, self.outputs)))
        order = np.concatenate([rng.permutation(2048) for _ in range(-(-self.steps * self.batch // 2048))])
        for rows in np.split(order[: self.steps * self.batch], self.steps):
            yield rows, x[rows], labels[rows]


@pytest.mark.long
@pytest.mark.parametrize(("noise", "steps", "least"), [(0.1, 40, 0.99), (1.0, 160, 0.85)])
def test_noise_on_every_coordinate_averages_out_over_batches(tmp_path, noise, steps, least):
    """Noise of 1 is larger than any loss gradient, and no sample is seen twice."""
    c, p = LinearRun(steps=steps, noise=noise).record(tmp_path)
    leak = labels(c, p)
    assert leak.metric == "auc"
    assert leak.headline > least
    assert leak.metrics["accuracy"] > 0.76
    assert r2(c, p) > 0.5


def test_noise_averages_out_over_visits_of_a_sample(tmp_path):
    c, p = Epochs(steps=160, noise=1.0).record(tmp_path)
    found = attack_recording(DeltaChain(), c, p, n=KNOWN)
    leak, (note,) = found["leak"]["train"], found["notes"]
    assert leak.headline > 0.99
    assert leak.metrics["accuracy"] > 0.95
    assert leak.n == 2048 - KNOWN  # samples, not visits
    assert re.search("2048 samples .*160 batches", note)
    assert 0.9 < float(re.search("deviation (.*) on every", note)[1]) < 1.1


def test_of_several_outputs_noise_averages_out_too(tmp_path):
    c, p = Epochs(outputs=3, steps=160, rate=0.5, noise=1.0).record(tmp_path)
    leak = labels(c, p)
    assert leak.headline > 0.9
    assert leak.n == 2048 - KNOWN


def test_of_two_outputs_the_ranking_is_given_too(tmp_path):
    c, p = Epochs(outputs=2, steps=80, rate=0.5, noise=0.5).record(tmp_path)
    leak = labels(c, p)
    assert leak.metric == "auc"
    assert leak.headline > 0.99


@pytest.mark.long
def test_noise_of_ten_times_the_gradients_hides_them_for_forty_batches(tmp_path):
    c, p = LinearRun(steps=40, noise=10.0).record(tmp_path)
    leak = labels(c, p)
    assert leak.headline < 0.53
    assert leak.metrics["accuracy"] < 0.76  # the share of the commoner class
    assert r2(c, p) < 0.05


def test_pooling_needs_as_many_features_as_the_rank_alone(tmp_path):
    c, p = Epochs(outputs=10, width=10, steps=64, rate=0.5).record(tmp_path)
    found = attack_recording(DeltaChain(), c, p, n=KNOWN)
    assert "pooled" in found["notes"][0]
    assert found["leak"]["train"].headline > 0.99


@pytest.mark.long
@pytest.mark.parametrize(("noise", "least"), [(0.3, 0.99), (1.0, 0.9)])
def test_noise_that_keeps_the_rank_averages_out_over_visits(tmp_path, noise, least):
    c, p = Epochs(steps=64, row_noise=noise).record(tmp_path)
    assert labels(c, p).headline > least
    assert r2(c, p) > 0.8
    true = weights_of(c, p)
    read = {number: step.weights for number, step in recover_chain(c).steps.items()}
    lost = min(sum(((sign * read[n] - true[n]) ** 2).sum() for n in read) for sign in (1, -1))
    assert 1 - lost / sum((true[n] ** 2).sum() for n in read) > 0.9


def test_shapes_that_do_not_fit_are_one_line(tmp_path):
    c, _ = LinearRun(steps=1).record(tmp_path)
    with RecordingWriter(tmp_path / "torn", c.header) as recorder:
        recorder.begin(0, rate=0.1)
        recorder.note("embedding_gradient", np.ones((2, 10)))
        recorder.note("rows", np.arange(3))
    with pytest.raises(DataError, match=r"rows of shape \(2,\) .* step 0 .* got \(3,\)"):
        attack_recording(DeltaChain(), Recording(tmp_path / "torn"))


def test_one_batch_is_enough_for_labels(tmp_path):
    c, p = LinearRun(steps=1).record(tmp_path)
    assert [labels(c, p).metrics[name] for name in ("auc", "accuracy")] == [1.0, 1.0]


def test_without_the_truth_it_says_how_well_all_fits(tmp_path):
    c, _ = LinearRun(steps=20, rounding=2.0**-24).record(tmp_path)
    found = attack_recording(DeltaChain(), c)
    (own,) = found["leak"].values()
    assert (own.metric, found["status"]) == ("consistency", "unmeasured")
    assert own.headline > 1 - 1e-6
    assert own.chance < 0.9


def test_a_gap_in_the_recording_is_not_bridged(tmp_path):
    c, p = LinearRun(steps=9, rounding=2.0**-24).record(tmp_path)
    with RecordingWriter(tmp_path / "gap", c.header) as recorder:
        for step in c.steps():
            if step.number != 4:
                recorder.begin(step.number, rate=step.rate)
                for name, array in step.notes.items():
                    recorder.note(name, array)
    gap = Recording(tmp_path / "gap")
    assert sorted(recover_chain(gap).steps) == [0, 1, 2, 3, 5, 6, 7, 8]
    assert labels(gap, p).metrics["accuracy"] == 1.0


def test_too_little_is_no_acquittal(tmp_path):
    wide, p = LinearRun(outputs=10, width=8).record(tmp_path)
    finding = attack_recording(DeltaChain(), wide)
    assert (finding["status"], finding.get("leak")) == ("unmeasured", None)
    assert re.search("9 features .*10 outputs.*8", finding["notes"][0])
    (tmp_path / "one").mkdir()
    with RecordingWriter(
        tmp_path / "one" / "passive", LinearRun(width=8).record(tmp_path / "one")[0].header
    ) as recorder:
        recorder.begin(0, rate=None)  # nothing is learned
    (note,) = attack_recording(DeltaChain(), Recording(tmp_path / "one" / "passive"))["notes"]
    assert "a step that learns" in note
    with pytest.raises(InsufficientView, match="passive side.*active side"):
        attack_recording(DeltaChain(), p)


def test_zero_gradients_are_passed_over(tmp_path):
    c, _ = LinearRun(steps=4).record(tmp_path)
    with RecordingWriter(tmp_path / "zero", msgspec.structs.replace(c.header)) as recorder:
        for step in c.steps():
            recorder.begin(step.number, rate=step.rate)
            recorder.note("mu", step.notes["mu"])
            recorder.note("embedding_gradient", step.notes["embedding_gradient"] * (step.number > 0))
    assert sorted(recover_chain(Recording(tmp_path / "zero")).steps) == [1, 2, 3]
