"""A5: the same frozen batch at many steps gives p all inner products of C's features; moving extractors blunt it."""

import numpy as np
import pytest

from vflsec.attacks.score_gram import ScoreGram, recover_geometry
from vflsec.cipher.recording import Recording, RecordingWriter
from vflsec.testing.recordings import LinearRun, attack_recording


def products(c, p):
    """Return the inner products of all pairs of samples, as recovered and true, at the first step of each sample."""
    geometry, first = recover_geometry(p), {}
    for step in c.steps():
        for row, mu in zip(step.notes["rows"].tolist(), step.notes["mu"], strict=True):
            first.setdefault(row, mu)
    true = np.array([first[row] for row in geometry.rows.tolist()])
    return geometry.features @ geometry.features.T, true @ true.T


def correlation_of(c, p):
    """Return the correlation of the inner products of different samples."""
    guess, true = products(c, p)
    above = np.triu_indices(len(true), 1)
    return float(np.corrcoef(guess[above], true[above])[0, 1])


def figure(tmp_path_factory, seeds=range(5), **settings):
    """Median over seeds of the correlation of inner products, and of their relative error."""
    values = []
    for seed in seeds:
        c, p = LinearRun(same_batch=True, seed=seed, **settings).record(tmp_path_factory.mktemp("run"))
        guess, true = products(c, p)
        values.append((correlation_of(c, p), 1 - ((guess - true) ** 2).sum() / (true**2).sum()))
    return tuple(np.median(values, axis=0))


def test_forty_steps_on_frozen_features_give_all_inner_products(tmp_path_factory):
    correlation, recovered = figure(tmp_path_factory, steps=40, rate=0.5, unit=52)
    assert correlation > 0.999999999
    assert 1 - recovered < (4e-5) ** 2  # the square of the relative error
    correlation, recovered = figure(tmp_path_factory, steps=40, rate=0.5)  # W rounded to 2^-28 in the scores
    assert correlation > 0.9999
    assert 1 - recovered < (1e-2) ** 2


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("settings", "published"),
    [
        ({"steps": 12, "rate": 0.5}, 0.99),
        ({"rate": 5e-4, "columns": 10}, 0.77),
        ({"rate": 5e-4}, 0.73),
        ({"rate": 5e-4, "columns": 500}, 0.52),
        ({"rate": 0.5, "columns": 136}, 1.0),
        ({"rate": 0.5, "columns": 20, "drift": 0.01}, 0.96),
        ({"rate": 0.5, "columns": 64, "drift": 0.01}, 0.84),
        ({"rate": 0.5, "columns": 136, "drift": 0.01}, 0.67),
        ({"rate": 0.5, "columns": 300, "drift": 0.01}, 0.45),
        ({"rate": 0.5, "columns": 20, "drift": 1.0}, 0.32),
        ({"rate": 0.5, "columns": 64, "drift": 1.0}, 0.18),
        ({"rate": 0.5, "columns": 136, "drift": 1.0}, 0.20),
        ({"rate": 0.5, "columns": 300, "drift": 1.0}, 0.13),
    ],
)
def test_correlations_are_those_of_the_page(tmp_path_factory, settings, published):
    """Of docs/audit_a_recording.md; few steps, a low rate and extractors that move each blunt it."""
    correlation, _ = figure(tmp_path_factory, **{"steps": 40, **settings})
    assert correlation == pytest.approx(published, abs=0.02)


@pytest.mark.parametrize(("momentum", "decay"), [(0.9, 0.0), (0.0, 1e-2), (0.5, 1e-2)])
def test_momentum_and_weight_decay_hide_nothing(tmp_path_factory, momentum, decay):
    correlation, _ = figure(tmp_path_factory, steps=40, rate=0.5, momentum=momentum, weight_decay=decay)
    assert correlation > 0.999


def test_several_outputs_need_fewer_steps(tmp_path):
    c, p = LinearRun(same_batch=True, outputs=3, steps=12, rate=0.5).record(tmp_path)
    assert correlation_of(c, p) > 0.999
    leak = attack_recording(ScoreGram(), p, c, n=30)["leak"]["train"]
    assert leak.headline > 0.999
    assert leak.row_interval[0] > leak.chance


def test_new_rows_in_every_batch_are_not_measured(tmp_path):
    c, p = LinearRun(steps=10).record(tmp_path)
    finding = attack_recording(ScoreGram(), p, c, n=30)
    assert finding["status"] == "unmeasured"
    assert "1280 samples" in finding["notes"][0]


def shuffled(folder, **settings):
    settings = {"rows": 400, "batch": 64, "rate": 0.3, "columns": 6, "width": 6, **settings}
    epochs = settings.pop("epochs")
    c, p = LinearRun(steps=epochs * -(-settings["rows"] // settings["batch"]), **settings).record(folder)
    return c, p


def r2(c, p):
    """Return the leak of the features with 18 known samples."""
    return attack_recording(ScoreGram(), p, c, n=18)["leak"]["train"].headline


@pytest.mark.sampled
@pytest.mark.parametrize(
    "settings",
    [
        {"outputs": 5, "epochs": 2},
        {"outputs": 5, "epochs": 2, "validation": 50},
        {"outputs": 5, "epochs": 2, "momentum": 0.5, "weight_decay": 1e-2},
        {"outputs": 1, "epochs": 10},
    ],
)
def test_shuffled_batches_give_all_features(tmp_path, settings):
    c, p = shuffled(tmp_path, **settings)
    assert correlation_of(c, p) > 0.999
    assert r2(c, p) > 0.999


def test_without_the_truth_it_says_how_well_it_predicts_scores_that_it_did_not_see(tmp_path):
    _, p = shuffled(tmp_path, outputs=5, epochs=2)
    (block,) = attack_recording(ScoreGram(), p)["leak"].values()
    assert block.metric == "consistency"
    assert block.headline > 1 - 1e-6
    assert block.headline > block.chance


@pytest.mark.statistical
def test_fewer_scores_than_features_do_not_determine_them(tmp_path):
    c, p = shuffled(tmp_path, outputs=1, epochs=3)
    assert correlation_of(c, p) < 0.9
    assert r2(c, p) < 0.7


@pytest.mark.statistical
def test_noise_on_the_scores_blunts_it(tmp_path):
    assert correlation_of(*shuffled(tmp_path, outputs=5, epochs=2, score_noise=0.3)) < 0.9


def test_momentum_from_before_the_recording_is_not_guessed(tmp_path):
    _, p = LinearRun(steps=10, same_batch=True, momentum=0.9).record(tmp_path)
    with RecordingWriter(tmp_path / "late", p.header) as recorder:
        for step in p.steps():
            if step.number > 2:
                recorder.begin(step.number, rate=step.rate)
                for name, array in step.notes.items():
                    recorder.note(name, array)
    assert "from the first step on" in attack_recording(ScoreGram(), Recording(tmp_path / "late"))["notes"][0]


def test_rows_in_another_order_are_the_same_batch_and_inference_between_moves_nothing(tmp_path):
    _, p = LinearRun(same_batch=True, steps=40, rate=0.5).record(tmp_path)
    rng, shuffled = np.random.default_rng(0), tmp_path / "shuffled"
    orders = []
    with RecordingWriter(shuffled, p.header) as recorder:
        for step in p.steps():
            order = rng.permutation(128)
            orders.append(order)
            recorder.begin(2 * step.number, rate=step.rate)
            for name in ("rows", "scores", "delta"):
                recorder.note(name, step.notes[name][order])
            recorder.begin(2 * step.number + 1, rate=None)
    found, expected = recover_geometry(Recording(shuffled)).features, recover_geometry(p).features
    np.testing.assert_allclose(found @ found.T, (expected @ expected.T)[np.ix_(orders[0], orders[0])], atol=1e-6)
