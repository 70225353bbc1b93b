"""The penalty is the logarithm of distance correlation, it pulls towards independence, and embeddings leak less."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import pdist, squareform
from sklearn.metrics import roc_auc_score

from vflsec.defenses.dcor import DistanceCorrelation, log_distance_correlation


def naive(x, y):
    """Distance correlation of two samples (n, p) and (n, q), from the definition."""
    centered = []
    for sample in (x, y):
        d = squareform(pdist(sample))
        centered.append(d - d.mean(axis=0) - d.mean(axis=1)[:, None] + d.mean())
    a, b = centered
    return np.sqrt((a * b).mean()) / np.sqrt(np.sqrt((a * a).mean()) * np.sqrt((b * b).mean()))


def dcor(h, labels):
    return float(log_distance_correlation(h, labels).exp())


@settings(max_examples=30)
@given(st.integers(0, 1000), st.integers(2, 5), st.integers(6, 40), st.integers(1, 4))
def test_equals_the_definition(seed, classes, rows, width):
    rng = torch.Generator().manual_seed(seed)
    labels = torch.arange(rows) % classes
    h = torch.randn(rows, width, generator=rng, dtype=torch.float64) + labels[:, None] * (seed % 3)
    assert dcor(h, labels) == pytest.approx(naive(h.numpy(), torch.nn.functional.one_hot(labels).numpy()), rel=1e-6)


def test_it_is_one_where_the_embedding_is_the_label():
    labels = torch.arange(40) % 2
    assert dcor(3.0 * labels[:, None].double() - 7, labels) == pytest.approx(1, abs=1e-9)
    one_hot = torch.nn.functional.one_hot(torch.arange(40) % 3).double()
    assert dcor(one_hot @ torch.linalg.qr(torch.randn(3, 3).double()).Q, torch.arange(40) % 3) == pytest.approx(1)


def test_it_is_near_zero_for_large_independent_samples():
    labels = torch.arange(2000) % 2
    h = torch.randn(2000, 2, generator=torch.Generator().manual_seed(0))
    assert dcor(h, labels) < 0.1
    assert dcor(h[:20], labels[:20]) > dcor(h, labels)  # biased upwards in small batches


def test_it_knows_neither_scale_nor_rotation():
    labels = torch.arange(30) % 2
    h = torch.randn(30, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + labels[:, None]
    turned = 5 * h @ torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q + 2
    assert dcor(turned, labels) == pytest.approx(dcor(h, labels))


def test_its_gradient_is_that_of_finite_differences():
    labels = torch.arange(7) % 2
    h = torch.randn(7, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: log_distance_correlation(x, labels), h)


@pytest.mark.parametrize("h", [torch.zeros(6, 2), torch.ones(6, 2), torch.eye(6)[:, :2]])
def test_equal_rows_have_a_finite_gradient(h):
    h = h.clone().requires_grad_()
    value = DistanceCorrelation(0.5).penalty(h, torch.arange(6) % 2, "passive_1")
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(h.grad).all()


def test_following_it_makes_labels_and_embeddings_independent():
    labels = torch.arange(60) % 2
    h = torch.randn(60, 2, generator=torch.Generator().manual_seed(0)) + 2.0 * labels[:, None]
    before = dcor(h, labels)
    h.requires_grad_()
    optimizer = torch.optim.Adam([h], lr=0.05)
    for _ in range(200):
        optimizer.zero_grad()
        DistanceCorrelation(1.0).penalty(h, labels, "passive_1").backward()
        optimizer.step()
    assert dcor(h.detach(), labels) < before / 3


def test_lambda_multiplies():
    h, labels = torch.randn(10, 2, generator=torch.Generator().manual_seed(0)), torch.arange(10) % 2
    once = DistanceCorrelation(1.0).penalty(h, labels, "passive_1")
    assert float(DistanceCorrelation(0.3).penalty(h, labels, "passive_1")) == pytest.approx(0.3 * float(once))


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_a_batch_of_one_class_adds_nothing(rows):
    assert DistanceCorrelation(1.0).penalty(torch.randn(rows, 2), torch.ones(rows), "passive_1") is None


@pytest.mark.sampled
@pytest.mark.parametrize("share", [0.1, 0.22, 0.5])
def test_what_norm_gains_is_what_any_push_together_gives_a_rare_class(share):
    """A known exception to "more strength never leaks more": of ``norm``, where one class is rare.

    The penalty does not know where embeddings lie, so that its gradients add up to nothing over a batch: those of a
    class with a share p of the rows are (1 - p) / p times as long, on average, as those of the rest, to whose side they
    are pushed. Of balanced classes ``norm`` gains nothing.
    """
    rng = torch.Generator().manual_seed(0)
    labels = (torch.arange(2000) < 2000 * share).long()
    h = (torch.randn(2000, 2, generator=rng, dtype=torch.float64) + 1.5 * labels[:, None]).requires_grad_()
    DistanceCorrelation(1.0).penalty(h, labels, "passive_1").backward()
    rare, common = (h.grad[labels == c].mean(dim=0) for c in (1, 0))
    assert torch.allclose(rare, -common * (1 - share) / share, rtol=1e-6)
    length = h.grad.norm(dim=1).numpy()
    found = roc_auc_score(labels, length)
    assert (0.4 < found < 0.6) if share == 0.5 else (found > 0.75)


@pytest.mark.sampled
@pytest.mark.parametrize(("attack", "signal"), [("mc", "planted"), ("spectral-embedding", "planted"), ("mc", "hidden")])
def test_embeddings_leak_less(leak, attack, signal):
    assert leak(attack, "dcor", 1.0, signal=signal) < leak(attack, "dcor", 0.0, signal=signal) - 0.15


def test_gradients_go_on_to_tell_labels(leak):
    assert leak("direction", "dcor", 1.0) > 0.75
