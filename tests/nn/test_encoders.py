"""Every encoder has the shape it is to have, reads its columns as they lie, can be drawn anew, and learns."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from vflsec.base.errors import UsageError
from vflsec.base.layout import EncodedColumn, Layout
from vflsec.base.seeds import make_rng
from vflsec.core.settings import ModelSpec
from vflsec.nn.encoders import MLPBottom, build_encoder, reinitialize

# A category, a number, a category, a number: nothing lies beside its own kind.
MIXED = Layout(
    (
        EncodedColumn("color", "categorical", 0, 3),
        EncodedColumn("age", "numeric", 3, 1),
        EncodedColumn("town", "categorical", 4, 4),
        EncodedColumn("income", "numeric", 8, 1),
    )
)
CATEGORIES = Layout((EncodedColumn("color", "categorical", 0, 3), EncodedColumn("town", "categorical", 3, 2)))
NUMBERS = Layout.numeric(5)


def image(channels, height, width):
    """The layout of the pixels of an image."""
    return Layout.numeric(channels * height * width)._replace(image=(channels, height, width))


HALVES, THIN, COLORS = image(1, 8, 4), image(1, 28, 14), image(3, 9, 11)
TABLES, IMAGES = [MIXED, CATEGORIES, NUMBERS], [HALVES, image(1, 4, 4), COLORS]
KINDS = [("mlp", TABLES + IMAGES), ("tabular", TABLES + IMAGES), ("cnn", IMAGES), ("resnet18", IMAGES)]
CASES = [(encoder, layout) for encoder, layouts in KINDS for layout in layouts]
DEFAULT_WIDTH = {"mlp": 7, "tabular": 128, "cnn": 128, "resnet18": 512}


def build(layout, encoder, seed=0, **options):
    """An encoder for seven classes, drawn from ``seed``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_encoder(layout, ModelSpec(encoder=encoder, **options), 7)


def rows(layout, count=6, seed=0):
    """Rows that lie as ``layout`` says: one-hot categories, numbers from N(0, 1)."""
    rng = make_rng(seed, "rows")
    x = torch.randn(count, layout.width, generator=rng)
    for column in layout.columns:
        if column.kind == "categorical":
            drawn = torch.randint(column.width, (count,), generator=rng)
            x[:, column.start : column.start + column.width] = F.one_hot(drawn, column.width).float()
    return x


@pytest.mark.parametrize(("encoder", "layout"), CASES)
@pytest.mark.parametrize(
    ("options", "width"),
    [({}, None), ({"cut": 3}, 3), ({"bottom": (20, 10), "cut": 4}, 4), ({"head": "none", "aggregation": "sum"}, 7)],
)
def test_shapes(encoder, layout, options, width):
    model, x = build(layout, encoder, **options), rows(layout)
    assert model.width == (width or DEFAULT_WIDTH[encoder])
    assert model(x).shape == (len(x), model.width)
    assert torch.equal(model.eval()(x), model.top(model.bottom(x)))
    assert model(x[:0]).shape == (0, model.width)
    assert model(x[:1]).shape == (1, model.width)


@pytest.mark.parametrize("encoder", ["tabular", "cnn", "resnet18"])
def test_without_a_cut_the_last_hidden_layer_is_the_embedding(encoder):
    model = build(HALVES, encoder, bottom=(20, 10))
    assert model.width == 10
    assert [type(layer) for layer in model.top][-3:] == [nn.Linear, nn.BatchNorm1d, nn.ReLU]
    assert (model(rows(HALVES)) >= 0).all()


@pytest.mark.parametrize(("encoder", "layouts"), KINDS)
@pytest.mark.parametrize("options", [{}, {"cut": 3}, {"bottom": (20, 10)}])
def test_tops_have_one_shape_whatever_the_columns(encoder, layouts, options):
    shapes = [{k: v.shape for k, v in build(layout, encoder, **options).top.state_dict().items()} for layout in layouts]
    assert shapes[0]
    assert all(shape == shapes[0] for shape in shapes)


@given(st.integers(1, 9), st.lists(st.integers(1, 9), max_size=3), st.none() | st.integers(1, 9))
def test_mlp_is_the_plain_network_bit_for_bit(features, hidden, cut):
    model = build(Layout.numeric(features), "mlp", bottom=tuple(hidden), cut=cut)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = MLPBottom(features, hidden, cut or 7)
    x = torch.randn(4, features, generator=make_rng(0))
    assert torch.equal(model(x), plain(x))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert isinstance(model.top, nn.Linear)
    assert len(model.bottom) == 2 * len(hidden)


def test_no_encoder_named_is_an_mlp_with_one_hidden_layer_of_64():
    model = build(NUMBERS, None)
    assert [tuple(p.shape) for p in model.parameters()] == [(64, 5), (64,), (7, 64), (7,)]


@pytest.mark.parametrize(("layout", "encoder"), [(HALVES, "cnn"), (MIXED, "tabular"), (NUMBERS, "tabular")])
def test_auto_looks_at_the_columns(layout, encoder):
    chosen, named = build(layout, "auto").state_dict(), build(layout, encoder).state_dict()
    assert chosen.keys() == named.keys()
    assert all(torch.equal(value, named[key]) for key, value in chosen.items())


@pytest.mark.parametrize("encoder", ["cnn", "resnet18"])
def test_images_are_expected_where_the_encoder_reads_images(encoder):
    expected = f"model.encoder={encoder}, got columns .*auto"
    with pytest.raises(UsageError, match=expected):
        build(MIXED, encoder)


def test_a_tabular_encoder_has_hidden_layers():
    with pytest.raises(UsageError, match=r"model\.encoder=tabular, got none"):
        build(MIXED, "tabular", bottom=())


class TestTabular:
    def test_a_category_is_looked_up_and_a_number_passes(self):
        embedding = build(MIXED, "tabular").bottom[0]
        nn.init.normal_(embedding.weight, generator=make_rng(1))
        x = rows(MIXED)
        color, town = x[:, 0:3].argmax(dim=1), x[:, 4:8].argmax(dim=1)
        expected = [embedding.weight[color], embedding.weight[3 + town], x[:, [3]], x[:, [8]]]
        torch.testing.assert_close(embedding(x), torch.cat(expected, dim=1))

    def test_a_mixture_of_categories_is_embedded_as_the_mixture(self):
        embedding = build(CATEGORIES, "tabular").bottom[0]
        one, other = rows(CATEGORIES, seed=1), rows(CATEGORIES, seed=2)
        expected = 0.3 * embedding(one) + 0.7 * embedding(other)
        torch.testing.assert_close(embedding(0.3 * one + 0.7 * other), expected, rtol=1e-5, atol=1e-9)

    def test_embeddings_are_drawn_with_a_deviation_of_a_ten_thousandth(self):
        wide = Layout((EncodedColumn("town", "categorical", 0, 1000),))
        weight = build(wide, "tabular").bottom[0].weight
        assert weight.shape == (1000, 32)
        assert weight.detach().std().item() == pytest.approx(1e-4, rel=0.02)

    def test_only_the_last_block_is_the_top(self):
        model = build(NUMBERS, "tabular", bottom=(6, 5, 4), cut=2)
        block = [nn.Linear, nn.BatchNorm1d, nn.ReLU]
        assert [type(layer) for layer in model.bottom] == 2 * block
        assert [type(layer) for layer in model.top] == [*block, nn.Linear]
        assert [layer.out_features for layer in model.modules() if isinstance(layer, nn.Linear)] == [6, 5, 4, 2]

    def test_two_blocks_of_128_are_the_default(self):
        sizes = [tuple(p.shape) for p in build(NUMBERS, "tabular").parameters() if p.dim() == 2]
        assert sizes == [(128, 5), (128, 128)]


class TestCNN:
    def test_halves_of_digits_are_learnt(self):
        pixels, labels = load_digits(return_X_y=True)
        halves = torch.tensor(pixels, dtype=torch.float32).view(-1, 8, 8)[:, :, :4].flatten(1) / 16
        labels = torch.tensor(labels)
        model, rng = build(HALVES, "cnn", cut=10), make_rng(0, "digits")
        train, test = torch.randperm(len(labels), generator=rng).split([1200, len(labels) - 1200])
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        for _ in range(3):
            for batch in train[torch.randperm(len(train), generator=rng)].split(64):
                optimizer.zero_grad()
                F.cross_entropy(model(halves[batch]), labels[batch]).backward()
                optimizer.step()
        accuracy = float((model.eval()(halves[test]).argmax(dim=1) == labels[test]).float().mean())
        assert accuracy > 0.8

    def test_pixels_are_read_channel_by_channel_row_by_row(self):
        model = build(COLORS, "cnn").eval()
        x = rows(COLORS)
        first = model.bottom[1]
        assert isinstance(first, nn.Conv2d)
        torch.testing.assert_close(model.bottom[:2](x), first(x.view(-1, 3, 9, 11)))

    def test_the_top_is_a_convolution_the_average_of_quarters_and_a_block(self):
        layers = [nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.AdaptiveAvgPool2d, nn.Flatten]
        model = build(THIN, "cnn")
        assert [type(layer) for layer in model.top] == [*layers, nn.Linear, nn.BatchNorm1d, nn.ReLU]
        assert model.top[:5](model.bottom(rows(THIN))).shape == (6, 128 * 4)

    def test_halves_of_an_image_keep_a_quarter_of_their_pixels_in_the_bottom(self):
        assert build(THIN, "cnn").bottom(rows(THIN)).shape == (6, 64, 14, 7)


class TestResNet18:
    def test_the_number_of_parameters_is_the_known_one(self):
        """ResNet-18 has 11,689,512 parameters, 513,000 of them in the layer to the 1,000 classes of ImageNet."""
        colors = sum(p.numel() for p in build(image(3, 32, 32), "resnet18").parameters())
        grey = sum(p.numel() for p in build(image(1, 32, 32), "resnet18").parameters())
        assert colors == 11_176_512 == 11_689_512 - 513_000
        assert grey == colors - 2 * 64 * 7 * 7

    def test_the_bottom_is_the_stem_and_the_first_stage(self):
        model, x = build(image(3, 32, 32), "resnet18"), rows(image(3, 32, 32))
        assert model.bottom(x).shape == (6, 64, 8, 8)
        assert sum(p.numel() for p in model.bottom.parameters()) == 9_408 + 128 + 2 * (2 * 36_864 + 2 * 128)
        assert model.top[:6](model.bottom(x)).shape == (6, 512, 1, 1)  # before the pool

    def test_other_sizes_are_resized(self):
        small, plain = build(image(1, 16, 8), "resnet18").eval(), build(image(1, 32, 32), "resnet18").eval()
        x = rows(image(1, 16, 8))
        resized = F.interpolate(x.view(-1, 1, 16, 8), size=(32, 32), mode="bilinear").flatten(1)
        torch.testing.assert_close(small(x), plain(resized), rtol=1e-4, atol=1e-5)

    def test_convolutions_are_drawn_for_relu(self):
        """He et al. 2015: the variance is 2 / (kernel area · outputs)."""
        first = build(image(1, 32, 32), "resnet18").top[4].residual[0]  # 256 -> 512
        assert first.weight.shape == (512, 256, 3, 3)
        assert first.weight.detach().std().item() == pytest.approx(math.sqrt(2 / (9 * 512)), rel=0.01)

    def test_a_block_without_its_residual_passes_what_is_positive(self):
        block = build(image(1, 32, 32), "resnet18").bottom[-1].eval()
        nn.init.zeros_(block.residual[-1].weight)
        x = torch.randn(2, 64, 8, 8, generator=make_rng(0))
        torch.testing.assert_close(block(x), x.relu())


@pytest.mark.parametrize(
    ("encoder", "layout"), [("mlp", MIXED), ("tabular", MIXED), ("cnn", HALVES), ("resnet18", HALVES)]
)
class TestAll:
    def test_gradients_reach_every_parameter_and_the_input(self, encoder, layout):
        model, x = build(layout, encoder, cut=5), rows(layout, 16).requires_grad_()
        model(x).square().sum().backward()
        assert all(p.grad is not None and float(p.grad.abs().sum()) > 0 for p in model.parameters())
        assert float(x.grad.abs().sum()) > 0

    def test_an_untrained_copy_forgets_every_number(self, encoder, layout):
        model = build(layout, encoder, cut=5)
        with torch.no_grad():
            for value in (*model.parameters(), *model.buffers()):
                value.fill_(7)
        fresh, again, other = reinitialize(model, 1), reinitialize(model, 1), reinitialize(model, 2)
        for key, value in fresh.state_dict().items():
            assert not (value == 7).any(), key
            assert torch.equal(value, again.state_dict()[key]), key
        for name, value in fresh.named_parameters():
            if value.unique().numel() > 1:  # not the ones and zeros of a BatchNorm
                assert not torch.equal(value, other.get_parameter(name)), name

    def test_what_is_drawn_anew_has_the_distribution_of_what_was_drawn(self, encoder, layout):
        model = build(layout, encoder, cut=5)
        fresh = reinitialize(model, 1)
        for name, value in model.named_parameters():
            if value.numel() > 200:
                drawn, before = fresh.get_parameter(name).detach().std(), value.detach().std()
                assert drawn.item() == pytest.approx(before.item(), rel=0.25), name

    def test_its_state_can_be_stored_and_read(self, encoder, layout):
        model, other, x = build(layout, encoder), build(layout, encoder, seed=1), rows(layout)
        model(x)  # moves the running statistics
        other.load_state_dict(model.state_dict())
        assert torch.equal(model.eval()(x), other.eval()(x))
        assert all(value.is_floating_point() or value.dim() == 0 for value in model.state_dict().values())
