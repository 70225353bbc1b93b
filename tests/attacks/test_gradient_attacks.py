"""Attacks on gradients: exact where the source says so, and the closed-form AUC on Gaussian gradients."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from vflsec.attacks.averaging import AveragedGradients
from vflsec.attacks.cluster import Cluster
from vflsec.attacks.direct import Direct
from vflsec.attacks.direction import Direction
from vflsec.attacks.hint import Hint
from vflsec.attacks.norm import Norm
from vflsec.attacks.rank_one import RankOne
from vflsec.attacks.spectral import Spectral
from vflsec.attacks.spectral_embedding import SpectralEmbedding
from vflsec.base.errors import InsufficientView, UsageError
from vflsec.core.message import Kind, Message, Transcript
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.core.view import View
from vflsec.defenses.iso import IsotropicNoise
from vflsec.defenses.phe import EncryptedBoundary
from vflsec.methods.fedsplitnn import FedSplitNN
from vflsec.methods.split_method import SPLIT
from vflsec.results import metrics
from vflsec.run.adversary import draw_auxiliary, observe
from vflsec.run.spec import AuxSpec
from vflsec.testing.conformance import AttackConformance
from vflsec.testing.federations import make_toy_federation

ROWS = 6000
ON_GRADIENTS = (Norm, Direction, Hint, Spectral, Cluster, AveragedGradients)


class TestClusterOnEmbeddings(AttackConformance):
    def make(self):
        return Cluster(source="embedding")


def gaussian(means, scales, *, turns=1, labels=None, aux=100, seed=0):
    """A view whose gradients are Gaussian around the mean of their class (C, d), a fresh draw each turn."""
    rng = torch.Generator().manual_seed(seed)
    means, scales = torch.tensor(means, dtype=torch.float64), torch.tensor(scales, dtype=torch.float64)
    n_classes = len(means)
    y = torch.arange(ROWS) % n_classes if labels is None else labels
    messages = []
    for turn in range(turns):
        order = torch.randperm(ROWS, generator=rng)
        noise = torch.randn(ROWS, means.shape[1], generator=rng, dtype=torch.float64)
        value = means[y[order]] + scales[y[order]][:, None] * noise
        messages.append(Message(Kind.GRADIENT, "active", "passive_1", turn, "train", {"value": value}, order, "train"))
    known = torch.randperm(ROWS, generator=rng)[:aux]
    features = {"train": torch.zeros(ROWS, 1)}
    return View("passive_1", "passive", n_classes, features, None, known, y[known], tuple(messages)), y


def auc(attack, view, y):
    return metrics.auc(attack(view, seed=0).scores["train"].numpy(), y.numpy())


def near(value, expected):
    """Within four standard errors of an AUC on this many rows."""
    return abs(value - expected) < 4 * np.sqrt(expected * (1 - expected) / (ROWS / 2))


@pytest.mark.parametrize("width", [1, 2, 10])
@pytest.mark.parametrize("ratio", [0.5, 1.3, 2.0])
def test_norm_reaches_the_auc_of_two_chi_squares(width, ratio):
    """Lengths of N(0, s^2 I) are s times a chi: the AUC is that of an F-distributed ratio."""
    view, y = gaussian(np.zeros((2, width)), [1.0, ratio])
    larger = max(ratio, 1 / ratio)  # auxiliary labels say which class is the longer
    assert near(auc(Norm(), view, y), stats.f.sf(larger**-2, width, width))


def test_norm_without_labels_takes_the_longer_for_class_1():
    view, y = gaussian(np.zeros((2, 3)), [1.0, 2.0], aux=0)
    assert near(auc(Norm(), view, y), stats.f.sf(1 / 4, 3, 3))
    view, y = gaussian(np.zeros((2, 3)), [2.0, 1.0], aux=0)
    assert near(auc(Norm(), view, y), stats.f.sf(4, 3, 3))


@pytest.mark.parametrize("distance", [0.3, 1.0])
def test_direction_in_one_dimension_is_the_sign(distance):
    """Both classes have half of the ties: AUC = Phi(mu / sigma)."""
    view, y = gaussian([[-distance], [distance]], [1.0, 1.0])
    assert near(auc(Direction(), view, y), stats.norm.cdf(distance))


@pytest.mark.parametrize("distance", [1.0, 2.0])
@pytest.mark.parametrize("aux", [0, 100])
def test_spectral_projects_on_the_axis_of_the_classes(distance, aux):
    """Two Gaussians at distance 2 mu along the axis of largest variance: AUC = Phi(sqrt(2) mu / sigma)."""
    view, y = gaussian([[-distance, 0, 0], [distance, 0, 0]], [1.0, 1.0], aux=aux)
    found = auc(Spectral(), view, y)
    assert near(found if aux else max(found, 1 - found), stats.norm.cdf(np.sqrt(2) * distance))


@pytest.mark.parametrize("aux", [0, 100])
def test_norm_and_spectral_guess_both_classes(aux):
    """Their recovery accuracy is that of a threshold, not that of always saying 1."""
    for attack, view, y, expected in (
        (Norm(), *gaussian(np.zeros((2, 10)), [1.0, 3.0], aux=aux), 0.97),
        (Spectral(), *gaussian([[-1.5, 0], [1.5, 0]], [1.0, 1.0], aux=aux), 0.92),
    ):
        right = (attack(view, seed=0).scores["train"].argmax(dim=1) == y).double().mean().item()
        assert max(right, 1 - right if not aux else right) > expected - 0.02


def test_spectral_without_labels_takes_the_longer_tail_for_class_1():
    rare = (torch.arange(ROWS) % 10 == 0).long()
    view, y = gaussian([[0, 0], [4, 4]], [0.5, 0.5], labels=rare, aux=0, turns=3)
    assert auc(Spectral(), view, y) > 0.99


@pytest.mark.parametrize("attack", [Direction(), Hint(), Cluster()])
@pytest.mark.parametrize("classes", [2, 3, 5])
def test_separate_clouds_are_told_apart_whatever_their_number(attack, classes):
    means = 10 * torch.eye(classes, 6).numpy() + 1
    view, y = gaussian(means, [0.1] * classes, aux=10 * classes)
    guess = attack(view, seed=0).scores["train"].argmax(dim=1)
    assert (guess == y).all()


@pytest.mark.parametrize("attack", [made() for made in ON_GRADIENTS])
def test_gradients_without_a_label_in_them_leave_chance(attack):
    view, y = gaussian([[1.0, 2.0], [1.0, 2.0]], [1.0, 1.0], turns=3)
    known = torch.zeros(ROWS, dtype=torch.bool)
    known[view.aux_rows] = True
    scores = attack(view, seed=0).scores["train"].numpy()[~known.numpy()]
    assert near(metrics.auc(scores, y[~known].numpy()), 0.5)


@pytest.mark.parametrize("attack", [Norm, Direction, Spectral])
def test_repeated_releases_average_the_noise_away(attack):
    y = torch.arange(ROWS) % 2
    means = [[-0.3, 0], [0.3, 0]] if attack is not Norm else np.zeros((2, 4))
    scales = [1.0, 1.0] if attack is not Norm else [1.0, 1.2]
    view, y = gaussian(means, scales, turns=20)
    once, often = auc(attack(releases=1), view, y), auc(attack(), view, y)
    assert often > once + 0.1
    assert often > 0.8


def trained_view(classes, *, defenses=(), **model):
    federation = make_toy_federation(classes=classes, rows=300)
    federation.active.defenses = tuple(defenses)
    transcript = Transcript(frozenset({"passive_1"}), frozenset(Kind))
    federation.channel.taps.append(transcript)
    spec = ModelSpec(**{"bottom": (16,), **model})
    trained = FedSplitNN(TrainSpec(epochs=5, batch=64, lr=5e-3), spec).fit(federation)
    labels = federation.active.labels["train"]
    rows = draw_auxiliary(labels, classes, AuxSpec(n=20), 0)
    return observe(trained, [federation.parties["passive_1"]], rows, tuple(transcript.messages)), labels


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("turns", [1, None])
def test_direct_recovers_every_label_where_nothing_is_trained_above(classes, turns):
    view, labels = trained_view(classes, aggregation="sum", head="none")
    guess = Direct(releases=turns)(view, seed=0).scores["train"].argmax(dim=1)
    assert torch.equal(guess, labels)


def test_direct_degrades_smoothly_under_noise():
    right = []
    for strength in (0.0, 1.0, 100.0):
        defenses = [IsotropicNoise(strength)]
        view, labels = trained_view(4, defenses=defenses, aggregation="sum", head="none")
        right.append((Direct()(view, seed=0).scores["train"].argmax(dim=1) == labels).double().mean().item())
    assert right[0] == 1.0
    assert right[0] > right[1] > right[2]
    assert right[2] < 0.45


def test_direct_refuses_gradients_of_another_width():
    view, _ = trained_view(3, cut=8)
    with pytest.raises(InsufficientView, match="expects gradients of 3 logits, got 8 entries: set model.head=none"):
        Direct()(view, seed=0)


@pytest.mark.parametrize("attack", [Norm, Spectral, SpectralEmbedding])
def test_attacks_for_two_classes_refuse_more(attack):
    view, _ = trained_view(3)
    with pytest.raises(InsufficientView, match="is for 2 classes, got 3"):
        attack()(view, seed=0)


def test_direct_refuses_a_trained_head_before_training():
    Direct().check_task(3, "none")
    with pytest.raises(InsufficientView, match="needs model.head=none, got linear"):
        Direct().check_task(3, "linear")


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Direction(references=0), "expected references > 0, got 0"),
        (lambda: Hint(hints=0), "expected hints > 0, got 0"),
        (lambda: Cluster(starts=0), "expected starts > 0, got 0"),
    ],
)
def test_wrong_numbers_are_refused(make, match):
    with pytest.raises(UsageError, match=match):
        make()


ENCRYPTED = EncryptedBoundary(bits=1024)


@pytest.mark.sampled
@pytest.mark.parametrize("aux", [0, 20])
@pytest.mark.parametrize(("batch", "defenses"), [(4, ()), (64, ()), (64, (ENCRYPTED,))], ids=["4", "64", "encrypted"])
def test_rank_one_recovers_every_label_under_a_linear_head(aux, batch, defenses):
    """Class 1 is the rarer, which is all that an adversary without labels has to go by; encryption changes nothing."""
    federation = make_toy_federation(rows=300)
    keep = torch.cat([torch.arange(0, 210)[federation.active.labels["train"] == 0], torch.tensor([], dtype=torch.long)])
    rare = (federation.active.labels["train"] == 1).nonzero().flatten()[:30]
    rows = torch.cat([keep, rare]).sort().values
    for party in federation.parties.values():
        party.features["train"] = party.features["train"][rows]
    federation.active.labels["train"] = federation.active.labels["train"][rows]
    transcript = Transcript(frozenset({"passive_1"}), frozenset(Kind))
    federation.channel.taps.append(transcript)
    federation.active.defenses = defenses
    optimizer = {"optimizer": "sgd", "lr": 0.05} if defenses else {"lr": 5e-3}
    trained = FedSplitNN(TrainSpec(epochs=4, batch=batch, **optimizer), ModelSpec(bottom=(16,), cut=5)).fit(federation)
    assert {route.kind for route in federation.channel.traffic} == ({Kind.CIPHERTEXT} if defenses else set(SPLIT))
    known = draw_auxiliary(federation.active.labels["train"], 2, AuxSpec(n=aux), 0) if aux else torch.arange(0)
    view = observe(trained, [federation.parties["passive_1"]], known, tuple(transcript.messages))
    guess = RankOne()(view, seed=0).scores["train"].argmax(dim=1)
    assert torch.equal(guess, federation.active.labels["train"])


@pytest.mark.parametrize(("turns", "adaptive"), [(1, True), (16, True), (16, False)])
def test_averaging_has_a_share_of_the_noise(turns, adaptive):
    """Means of n releases are sqrt(n) times as far apart, in deviations; one release is all that others read."""
    view, y = gaussian([[-0.2, 0, 0], [0.2, 0, 0]], [1.0, 1.0], turns=turns, aux=3000)
    read = turns if adaptive else 1
    found = auc(AveragedGradients(), replace(view, adaptive=adaptive), y)
    assert near(found, stats.norm.cdf(np.sqrt(2 * read) * 0.2))


def test_averaging_whitens_noise_of_any_shape():
    """The distance that counts is Mahalanobis's: noise that two columns share is taken out."""
    view, y = gaussian([[-0.25, 0.0], [0.25, 0.0]], [0.25, 0.25], aux=3000)
    shared = torch.randn(ROWS, 1, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    (message,) = view.messages
    noisy = replace(message, payload={"value": message.payload["value"] + shared})
    found = auc(AveragedGradients(), replace(view, messages=(noisy,)), y)
    covariance = 0.0625 * np.eye(2) + 1.0
    gap = np.array([0.5, 0.0])
    assert near(found, stats.norm.cdf(np.sqrt(gap @ np.linalg.solve(covariance, gap)) / np.sqrt(2)))


def test_averaging_weighs_messages_by_their_scale():
    """Gradients and their noise shrink in training; the early ones must not drown the rest."""
    view, y = gaussian([[-0.2, 0], [0.2, 0]], [1.0, 1.0], turns=8, aux=3000)
    shrunk = [replace(m, payload={"value": m.payload["value"] * 0.3**m.step}) for m in view.messages]
    assert near(auc(AveragedGradients(), replace(view, messages=tuple(shrunk)), y), stats.norm.cdf(4 * 0.2))


def test_averaging_of_a_class_without_a_sample():
    view, _ = gaussian([[0.0, 0.0], [3.0, 0.0], [0.0, 3.0]], [0.1, 0.1, 0.1], aux=100)
    known = view.aux_labels < 2
    found = AveragedGradients()(replace(view, aux_rows=view.aux_rows[known], aux_labels=view.aux_labels[known]), seed=0)
    assert not (found.scores["train"].argmax(dim=1) == 2).any()
