"""Signs leave with the mean magnitude of the batch or the row; lengths are hidden, and directions are not."""

import pytest
import torch

from vflsec.base.errors import UsageError
from vflsec.defenses.sign import SignOnly

G = torch.tensor([[3.0, -1.0], [-6.0, 0.0]])


def signs(g, strength, release, seed=0, **options):
    return SignOnly(strength, **options).on_gradient(g, release(seed))


@pytest.mark.parametrize(
    ("scale", "expected"), [("batch", [[2.5, -2.5], [-2.5, 0.0]]), ("row", [[2.0, -2.0], [-3.0, 0.0]])]
)
def test_known_answers(release, scale, expected):
    assert torch.equal(signs(G, 1.0, release, scale=scale), torch.tensor(expected))


@pytest.mark.parametrize("strength", [0.1, 0.5, 0.9])
def test_the_strength_is_the_share_of_entries_replaced(release, strength):
    g = torch.randn(500, 40, generator=torch.Generator().manual_seed(0))
    released = signs(g, strength, release)
    replaced = released != g
    assert float(replaced.float().mean()) == pytest.approx(strength, abs=4 * (strength * (1 - strength) / 20000) ** 0.5)
    assert torch.equal(released[replaced], signs(g, 1.0, release)[replaced])


def test_all_rows_become_equally_long(release):
    g = torch.randn(50, 8, generator=torch.Generator().manual_seed(0)) * torch.rand(50, 1)
    lengths = signs(g, 1.0, release).norm(dim=1)
    assert torch.allclose(lengths, g.abs().mean() * 8**0.5 * torch.ones(50))
    by_row = signs(g, 1.0, release, scale="row").norm(dim=1)
    assert torch.allclose(by_row, g.abs().mean(dim=1) * 8**0.5)


@pytest.mark.parametrize("scale", ["batch", "row"])
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 2)])
def test_empty_and_zero_batches(release, shape, scale):
    assert torch.equal(signs(torch.zeros(shape), 1.0, release, scale=scale), torch.zeros(shape))


def test_a_share_above_one_is_refused():
    with pytest.raises(UsageError, match="expected 0 <= strength <= 1, got 1.5"):
        SignOnly(1.5)


@pytest.mark.long
def test_the_length_gives_nothing_away_and_the_direction_all(leak):
    assert leak("norm", "sign", 1.0) == pytest.approx(0.5, abs=0.06)
    assert leak("norm", "sign", 1.0) < leak("norm", "sign", 0.5) < leak("norm", "sign", 0.0) - 0.02
    assert leak("direction", "sign", 1.0) > 0.9
