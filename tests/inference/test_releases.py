"""What was sent about each row, in order: epochs, means and ranks equal a naive count."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from vflsec.base.errors import InsufficientView
from vflsec.core.attack import apply_threshold
from vflsec.core.message import Kind, Message
from vflsec.core.view import Guess, Need, View
from vflsec.inference.auxiliary import draw_references, measure_sureness, orient, separate
from vflsec.inference.releases import (
    average,
    get_parameters,
    project_batches,
    rank_releases,
    read_last_values,
    read_releases,
)  # fmt: skip


def make_view(batches, *, n_rows=8, classes=2, aux=((), ()), receiver="passive_1", split="train", values=None):
    """A view that heard one gradient message for each list of rows."""
    messages = []
    for step, rows in enumerate(batches):
        value = torch.full((len(rows), 3), float(step)) if values is None else values[step]
        about = torch.tensor(rows)
        messages.append(Message(Kind.GRADIENT, "active", receiver, step, "train", {"value": value}, about, split))
    known, labels = (torch.tensor(x, dtype=torch.long) for x in aux)
    features = {"train": torch.zeros(n_rows, 1)}
    return View("passive_1", "passive", classes, features, None, known, labels, tuple(messages))


@given(st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=6, unique=True), min_size=1, max_size=8))
def test_epochs_and_means_are_those_of_a_naive_count(batches):
    found = read_releases(make_view(batches), Kind.GRADIENT)
    seen, expected = {}, {}
    for step, rows in enumerate(batches):
        for row in rows:
            expected.setdefault(row, []).append(float(step))
            seen.setdefault("epochs", []).append(len(expected[row]) - 1)
    assert found.epoch.tolist() == seen["epochs"]
    means = found.mean(found.values[:, :1])[:, 0]
    everything = [value for values in expected.values() for value in values]
    for row in range(8):
        own = expected.get(row, everything)
        assert means[row].item() == pytest.approx(sum(own) / len(own), abs=1e-5)
    first = found.take_first(1)
    assert sorted(first.rows.tolist()) == sorted(expected)
    assert len(found.group_by_epoch()) == max(seen["epochs"]) + 1
    assert all((found.epoch[lines] == k).all() for k, lines in enumerate(found.group_by_epoch()))


def test_ranks_are_within_a_turn():
    found = read_releases(make_view([[0, 1], [2, 3], [0, 1, 2, 3]]), Kind.GRADIENT)
    scores = torch.tensor([4.0, 1.0, 3.0, 2.0, 100.0, 300.0, 200.0, 400.0])
    expected = torch.tensor([7, 1, 5, 3, 1, 5, 3, 7]) / 8
    assert torch.equal(rank_releases(found, scores), expected)


@pytest.mark.parametrize("changed", [{"receiver": "passive_2"}, {"split": "test"}, {"batches": []}])
def test_messages_of_others_and_of_other_rows_are_not_read(changed):
    settings = {"batches": [[0, 1]], **changed}
    with pytest.raises(InsufficientView, match="about train rows, got none"):
        read_releases(make_view(**settings), Kind.GRADIENT)


def test_a_score_is_turned_to_what_the_known_labels_say():
    score = torch.tensor([5.0, 4.0, 1.0, 0.0])
    down = make_view([[0]], n_rows=4, aux=([0, 3], [0, 1]))
    up = make_view([[0]], n_rows=4, aux=([0, 3], [1, 0]))
    one_sided = make_view([[0]], n_rows=4, aux=([0], [0]))
    assert torch.equal(orient(up, score)[:, 1], score)
    assert torch.equal(orient(down, score)[:, 1], -score)
    assert torch.equal(orient(one_sided, score)[:, 1], score), "one class cannot tell"
    assert torch.equal(orient(down, score[:2], train=score)[:, 1], -score[:2])


def test_how_sure_a_sign_is_is_mann_and_whitneys_test():
    rng = np.random.default_rng(0)
    labels = np.arange(80) % 2
    score = rng.normal(size=80) + 0.4 * labels
    view = make_view([[0]], n_rows=80, aux=(list(range(80)), labels.tolist()))
    guess = Guess({"train": torch.tensor(np.stack([-score, score], axis=1))})
    options = {"alternative": "greater", "method": "asymptotic", "use_continuity": False}
    expected = stats.mannwhitneyu(score[labels == 1], score[labels == 0], **options).pvalue
    assert measure_sureness(view, guess) == pytest.approx(1 - expected)


def test_without_both_classes_or_their_rows_nothing_is_sure():
    guess = Guess({"train": torch.zeros(8, 2)})
    assert measure_sureness(make_view([[0]], aux=([0, 3], [0, 0])), guess) is None
    view = make_view([[0]], aux=([0, 3], [0, 1]))
    assert measure_sureness(view, guess) == 0.5
    assert measure_sureness(view, Guess({"test": torch.zeros(8, 2)})) is None


def test_an_order_is_divided_where_the_known_labels_are_best_served():
    score = torch.tensor([0.1, 0.2, 0.3, 0.6, 0.7, 0.9])
    view = make_view([[0]], n_rows=6, aux=([0, 1, 3, 5], [0, 0, 0, 1]))
    assert torch.allclose(separate(view, score)[:, 1], score - 0.75)
    turned = make_view([[0]], n_rows=6, aux=([0, 1, 3, 5], [1, 1, 1, 0]))
    assert torch.allclose(separate(turned, score)[:, 1], 0.75 - score)
    assert torch.allclose(separate(view, score[:2], train=score)[:, 1], score[:2] - 0.75)
    unknowing = make_view([[0]], n_rows=6)
    assert torch.allclose(separate(unknowing, score)[:, 1], score - score.median())


def test_classes_weigh_the_same_in_a_division():
    """Nine of class 0 and one of class 1: to call all of them 0 would be right nine times of ten."""
    score = torch.cat([torch.linspace(0, 1, 9), torch.tensor([0.8])])
    view = make_view([[0]], n_rows=10, aux=(list(range(10)), [0] * 9 + [1]))
    found = separate(view, score)[:, 1] > 0
    assert found[9]
    assert found[:9].sum() == 2  # 0.875 and 1


def margins(guess, split="train"):
    return guess.scores[split][:, 1] - guess.scores[split][:, 0]


def test_a_guess_of_one_class_gets_the_threshold_that_known_labels_support():
    truth = torch.arange(40) % 2
    score = truth + torch.linspace(0.1, 0.4, 40)  # class 1 everywhere above 0; the classes part at 0.75
    guess = Guess({"train": torch.stack([-score, score], dim=1), "test": torch.stack([-score, score], dim=1)[:6]})
    view = make_view([[0]], n_rows=40, aux=(list(range(10)), truth[:10].tolist()))
    found = apply_threshold(view, guess)
    assert torch.equal(found.scores["train"].argmax(dim=1), truth)
    assert torch.equal(found.scores["test"].argmax(dim=1), truth[:6])
    assert torch.equal(margins(found).argsort(), margins(guess).argsort()), "the order stays"


def test_the_base_rate_of_known_labels_counts():
    """Eighteen of twenty known rows are of class 0, and the classes overlap: most rows are class 0."""
    score = torch.cat([torch.linspace(1, 2, 18), torch.tensor([1.9, 3.0])])
    guess = Guess({"train": torch.stack([-score, score], dim=1)})
    view = make_view([[0]], n_rows=20, aux=(list(range(20)), [0] * 18 + [1] * 2))
    assert apply_threshold(view, guess).scores["train"].argmax(dim=1).tolist() == [0] * 19 + [1]


@pytest.mark.parametrize("known", [4, 40])
def test_an_argmax_that_known_labels_support_stays(known):
    """Two errors of forty are no reason to move, and four labels are too few to say anything."""
    truth = torch.arange(40) % 2
    score = 2.0 * truth - 1 + torch.linspace(-0.1, 0.1, 40) if known == 40 else truth + 1.0
    score[:2] = torch.tensor([0.05, 0.06]) if known == 40 else score[:2]
    guess = Guess({"train": torch.stack([-score, score], dim=1)})
    view = make_view([[0]], n_rows=40, aux=(list(range(known - 1)), truth[: known - 1].tolist()))
    assert apply_threshold(view, guess) is guess


def test_without_known_labels_of_both_classes_or_of_this_split_a_guess_stays():
    guess = Guess({"test": torch.tensor([[0.0, 1.0], [0.0, 2.0]])})
    assert apply_threshold(make_view([[0]], n_rows=4, aux=([0, 3], [0, 1])), guess) is guess
    trained = Guess({"train": torch.tensor([[0.0, 1.0]] * 4)})
    assert apply_threshold(make_view([[0]], n_rows=4, aux=([0, 3], [1, 1])), trained) is trained


def test_references_are_a_draw_of_the_known_rows_of_each_class():
    view = make_view([[0]], classes=3, aux=([1, 2, 4, 5, 7], [0, 1, 1, 1, 0]))
    everything = draw_references(view, None, torch.Generator().manual_seed(0))
    assert [sorted(rows.tolist()) for rows in everything] == [[1, 7], [2, 4, 5], []]
    drawn = {tuple(draw_references(view, 2, torch.Generator().manual_seed(s))[1].tolist()) for s in range(20)}
    assert all(len(rows) == 2 and set(rows) <= {2, 4, 5} for rows in drawn)
    assert len(drawn) > 2


def test_steady_lines_have_the_same_mean_square_length_in_each_message():
    view = make_view([[0, 1, 2], [2, 1]], values=[torch.randn(3, 3), 50 * torch.randn(2, 3)])
    steady = read_releases(view, Kind.GRADIENT).to_steady()
    for lines in steady.group_by_message():
        assert steady.values[lines].square().sum(dim=1).mean() == pytest.approx(1)


@pytest.mark.parametrize("width", [3, 12])
def test_a_batch_is_projected_on_its_first_principal_axis(width):
    values = torch.randn(6, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = values @ torch.linalg.svd(values, full_matrices=False).Vh[0]
    scores = project_batches(values, [torch.arange(6)])
    torch.testing.assert_close(scores.abs(), (expected / expected.abs().mean()).abs())


def test_who_is_not_adaptive_reads_the_first_release_of_each_row():
    view = make_view([[0, 1], [1, 2], [0, 2]])
    found = read_releases(replace(view, adaptive=False), Kind.GRADIENT)
    assert found.rows.tolist() == [0, 1, 2]
    assert found.message.tolist() == [0, 0, 1]


@given(
    st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=6, unique=True), min_size=1, max_size=8),
    st.integers(1, 3),
)
def test_the_latest_are_those_of_a_naive_look_back(batches, turns):
    found = read_last_values(make_view(batches), Kind.GRADIENT, sender="active", releases=turns)
    last = {row: [float(step) for step, rows in enumerate(batches) if row in rows][-turns:] for row in range(8)}
    everything = [value for values in last.values() for value in values]
    for row in range(8):
        own = last[row] or everything
        assert found["train"][row].tolist() == pytest.approx([sum(own) / len(own)] * 3, abs=1e-5)


def test_averages_are_of_one_three_and_ten_releases_each_once():
    view = make_view([list(range(8))] * 5)
    found = average(view, Kind.GRADIENT, sender="active")
    assert [float(h[0, 0]) for h in found] == [4.0, 3.0, 2.0]  # of the last, the last three, all five
    assert len(average(make_view([list(range(8))]), Kind.GRADIENT, sender="active")) == 1
    assert [float(h[0, 0]) for h in average(view, Kind.GRADIENT, sender="active", releases=2)] == [3.5]
    assert len(average(replace(view, adaptive=False), Kind.GRADIENT, sender="active")) == 1
    features = {"train": torch.zeros(8, 1), "test": torch.zeros(8, 1)}
    with pytest.raises(InsufficientView, match="train rows, got only test"):
        average(replace(make_view([[0]], split="test"), features=features), Kind.GRADIENT, sender="active")


def test_colluding_parties_hear_side_by_side_in_the_order_of_their_names():
    one, two = (make_view([[0, 1]], receiver=r, values=[torch.full((2, 3), v)]) for r, v in
                (("passive_1", 1.0), ("passive_2", 2.0)))  # fmt: skip
    for names, expected in (("passive_1+passive_2", [1, 2]), ("passive_2+passive_1", [2, 1])):
        view = replace(one, party=names, messages=(*one.messages, *two.messages))
        assert read_releases(view, Kind.GRADIENT).values[0, [0, 3]].tolist() == expected


def test_the_latest_are_of_the_last_phase_and_by_split():
    """A narrow message of pre-training is not mixed with a wide one, nor one of another party, or about other rows."""

    def say(phase, width, value, split="train", sender="passive_1"):
        payload = {"value": torch.full((8, width), value)}
        return Message(Kind.EMBEDDING, sender, "active", 0, phase, payload, torch.arange(8), split)

    messages = (
        say("pretrain", 2, 1.0), say("train", 3, 2.0), say("train", 3, 9.0, sender="passive_2"),
        say("validate", 3, 4.0, "test"), say("predict", 3, 5.0, "test"), say("predict", 3, 6.0, "val"),
    )  # fmt: skip
    none = torch.zeros(0, dtype=torch.long)
    features = {"train": torch.zeros(8, 1), "test": torch.zeros(8, 1)}
    view = View("active", "active", 2, features, None, none, none, messages)
    found = read_last_values(view, Kind.EMBEDDING, sender="passive_1")
    assert set(found) == {"train", "test"}
    assert torch.equal(found["train"], torch.full((8, 3), 2.0))
    assert torch.equal(found["test"], torch.full((8, 3), 5.0))
    with pytest.raises(InsufficientView, match="from passive_3, got none"):
        read_last_values(view, Kind.EMBEDDING, sender="passive_3")


def pretrained_view(*, placed=True):
    """Train rows are 1, 3 and 4 of the aligned ones; projections are wider than what fine-tuning says."""

    def say(kind, phase, step, rows, width, split):
        value = torch.tensor(rows, dtype=torch.float)[:, None].expand(-1, width) + 10 * step
        return Message(kind, "active", "passive_1", step, phase, {"value": value}, torch.tensor(rows), split)

    messages = (
        say(Kind.EMBEDDING, "pretrain", 0, [4, 0, 1], 5, "aligned"),
        say(Kind.EMBEDDING, "pretrain", 1, [2, 5], 5, "aligned"),
        say(Kind.EMBEDDING, "pretrain", 2, [3, 1, 0], 5, "aligned"),
        say(Kind.GRADIENT, "finetune", 0, [2, 0, 1], 2, "train"),
    )
    none = torch.zeros(0, dtype=torch.long)
    places = {"aligned": torch.tensor([1, 3, 4])} if placed else {}
    return View("passive_1", "passive", 2, {"train": torch.zeros(3, 1)}, None, none, none, messages, places=places)


def test_messages_about_aligned_rows_are_read_as_of_the_training_rows_among_them():
    view = pretrained_view()
    found = read_releases(view, Kind.EMBEDDING)
    assert found.rows.tolist() == [2, 0, 1, 0]
    assert found.values[:, 0].tolist() == [4, 1, 23, 21]
    assert found.epoch.tolist() == [0, 0, 0, 1]
    assert found.n_rows == 3
    assert read_last_values(view, Kind.EMBEDDING, sender="active")["train"][:, 0].tolist() == [21, 23, 4]
    assert average(view, Kind.EMBEDDING, sender="active")[1][:, 0].tolist() == [11, 23, 4]
    assert {Need.EMBEDDINGS, Need.GRADIENTS} <= view.has()


def test_without_places_messages_about_aligned_rows_are_of_nobody_here():
    view = pretrained_view(placed=False)
    assert Need.EMBEDDINGS not in view.has()
    with pytest.raises(InsufficientView, match="about train rows, got none"):
        read_releases(view, Kind.EMBEDDING)


def test_one_phase_is_read_alone():
    view = pretrained_view()
    about = torch.arange(3)
    later = Message(Kind.EMBEDDING, "active", "passive_1", 9, "finetune", {"value": torch.zeros(3, 2)}, about)
    view = replace(view, messages=(*view.messages, later))
    assert read_releases(view, Kind.EMBEDDING).values.shape == (3, 2)
    assert read_releases(view, Kind.EMBEDDING, phase="pretrain").values.shape == (4, 5)
    assert read_last_values(view, Kind.EMBEDDING, sender=None, phase="pretrain")["train"].shape == (3, 5)
    assert average(view, Kind.EMBEDDING, sender=None, phase="pretrain")[0].shape == (3, 5)
    with pytest.raises(InsufficientView):
        read_last_values(view, Kind.GRADIENT, sender=None, phase="pretrain")


def test_parameters_are_those_of_the_last_step():
    def say(sender, receiver, step, name, value):
        payload = {name: torch.tensor([value])}
        return Message(Kind.PARAMETERS, sender, receiver, step, "pretrain", payload)

    told = [
        say("active", "server", 0, "weight", 1.0),
        say("server", "active", 0, "weight", 2.0),
        say("active", "server", 0, "mean", 3.0),
        say("active", "server", 1, "weight", 4.0),
        say("active", "server", 1, "mean", 5.0),
        say("server", "active", 1, "weight", 6.0),
    ]
    assert get_parameters(told, sender="active") == {"weight": torch.tensor([4.0]), "mean": torch.tensor([5.0])}
    assert get_parameters(told, sender="server", receiver="active") == {"weight": torch.tensor([6.0])}
    assert get_parameters(told, sender="server", receiver="passive_1") == {}


def test_steps_that_are_counted_anew_in_each_epoch_are_different_messages():
    view = make_view([[0, 1], [0, 1], [2]])
    again = tuple(replace(m, step=0) for m in view.messages)
    found = read_releases(replace(view, messages=again), Kind.GRADIENT)
    assert found.values[:, 0].tolist() == [0.0, 0.0, 1.0, 1.0, 2.0]
    assert found.message.tolist() == [0, 0, 1, 1, 2]
