"""Which two views a party makes of its rows."""

import torch

from vflsec.base.layout import Layout
from vflsec.base.seeds import make_rng
from vflsec.nn.augmentation import ImageAugmentation, UniformCorruption, make_two_views


def test_of_a_table_the_rows_and_a_corruption():
    rng = make_rng(0, "rows")
    x, reference = torch.randn(9, 5, generator=rng), torch.randn(50, 5, generator=rng)
    first, second = make_two_views(Layout.numeric(5), reference)(x, make_rng(1))
    assert torch.equal(first, x)
    assert torch.equal(second, UniformCorruption(Layout.numeric(5), reference)(x, make_rng(1)))
    assert not torch.equal(second, x)


def test_of_images_two_alterations():
    x, rng = torch.randn(9, 48, generator=make_rng(0, "rows")), make_rng(1)
    layout = Layout.numeric(48)._replace(image=(3, 4, 4))
    first, second = make_two_views(layout, x)(x, make_rng(1))
    augment = ImageAugmentation((3, 4, 4))
    assert torch.equal(first, augment(x, rng))
    assert torch.equal(second, augment(x, rng))
    assert not torch.equal(first, second)
