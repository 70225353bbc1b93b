"""Groups side by side are the same networks one after the other; widths, embeddings and lengths are as stated."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vflsec.base.layout import EncodedColumn, Group, Layout
from vflsec.nn.encoders import reinitialize
from vflsec.nn.feature_groups import DomainDiscriminators, FeatureGroups, ParallelLinear, UnitLength, group_all
from vflsec.nn.wrappers import Frozen

LAYOUT = Layout(
    (
        EncodedColumn("town", "categorical", 0, 4),
        EncodedColumn("age", "numeric", 4, 1),
        EncodedColumn("job", "categorical", 5, 6),
        EncodedColumn("pay", "numeric", 11, 1),
    )
)
EVERYTHING = ("town", "age", "job", "pay")
GROUPS = (Group("who", EVERYTHING[:2], (6, 5, 3)), Group("work", EVERYTHING[2:]), Group("all", EVERYTHING))
WIDTHS = {"town": 2, "job": 3}


@pytest.fixture
def bottom():
    torch.manual_seed(0)
    return FeatureGroups(LAYOUT, GROUPS, WIDTHS)


def rows(count=7):
    rng = torch.Generator().manual_seed(1)
    x = torch.zeros(count, LAYOUT.width)
    every = torch.arange(count)
    x[every, torch.randint(0, 4, (count,), generator=rng)] = 1
    x[every, 5 + torch.randint(0, 6, (count,), generator=rng)] = 1
    x[:, [4, 11]] = torch.randn(count, 2, generator=rng)
    return x


def one_after_the_other(bottom, x):
    """What each group's network makes of its columns, layer by layer, without any module of ours."""
    tables = bottom.embedding.tables
    raw = {"town": x[:, :4] @ tables["town"], "age": x[:, 4:5], "job": x[:, 5:11] @ tables["job"], "pay": x[:, 11:]}
    layers = list(bottom.extractors)
    found, at = [], [0, 0, 0]
    for g, group in enumerate(GROUPS):
        h, linear = torch.cat([raw[name] for name in group.columns], dim=1), 0
        for place, layer in enumerate(layers):
            if isinstance(layer, ParallelLinear):
                own = layer.maps[g]
                norm = layers[place + 1]
                part = slice(at[linear], at[linear] + own.out_features)
                at[linear] += own.out_features
                h = F.batch_norm(
                    h @ own.weight.T + own.bias, norm.running_mean[part].clone(), norm.running_var[part].clone(),
                    norm.weight[part], norm.bias[part], training=bottom.training,
                )  # fmt: skip
                h, linear = F.leaky_relu(h), linear + 1
        found.append(F.normalize(h, dim=1))
    return found


@pytest.mark.parametrize("training", [False, True])
def test_groups_side_by_side_are_the_groups_one_after_the_other(bottom, training):
    for layer in bottom.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    bottom.train(training)
    x = rows()
    expected = one_after_the_other(bottom, x)
    f, mu = bottom.extract(x), bottom(x)
    assert torch.allclose(f, torch.cat(expected, dim=1), atol=1e-6)
    each = [a.weight @ h.T + a.bias[:, None] for a, h in zip(bottom.aggregators.maps, expected, strict=True)]
    assert torch.allclose(mu, torch.cat(each).T, atol=1e-6)


def test_widths_are_those_given_or_follow_the_inputs(bottom):
    # who: 2 + 1 inputs, its own widths; work: 3 + 1 inputs, so 8, 4, 2; all: 7 inputs, so 14, 7, 3
    linears = [layer for layer in bottom.extractors if isinstance(layer, ParallelLinear)]
    assert linears[0].inputs == [3, 4, 7]
    assert [[m.out_features for m in layer.maps] for layer in linears] == [[6, 8, 14], [5, 4, 7], [3, 2, 3]]
    assert bottom.widths == (3, 2, 3)
    assert bottom.names == ("who", "work", "all")
    assert bottom.width == 3
    assert FeatureGroups(LAYOUT, GROUPS[2:], WIDTHS, aggregated=4).width == 4
    assert bottom(rows()).shape == (7, 3)
    dropouts = [layer for layer in bottom.extractors if isinstance(layer, nn.Dropout)]
    assert [layer.p for layer in dropouts] == [0.1, 0.1], "none before the output"


def test_every_groups_vector_has_length_one(bottom):
    f = bottom.extract(rows())
    for part in torch.split(f, bottom.widths, dim=1):
        assert torch.allclose(part.norm(dim=1), torch.ones(7), atol=1e-5)
    assert torch.equal(UnitLength([2, 1])(torch.zeros(1, 3)), torch.zeros(1, 3))


def test_embeddings_are_drawn_narrow_and_anew():
    wide = FeatureGroups(
        Layout((EncodedColumn("town", "categorical", 0, 4000),)), (Group("all", ("town",)),), {"town": 5}
    )
    table = wide.embedding.tables["town"]
    assert table.shape == (4000, 5)
    assert table.std().item() == pytest.approx(0.01, rel=0.03)
    fresh = reinitialize(wide, 3).embedding.tables["town"]
    assert not torch.equal(fresh, table)
    assert fresh.std().item() == pytest.approx(0.01, rel=0.03)


def test_a_party_that_says_nothing_has_one_group():
    grouping = group_all(LAYOUT)
    bottom = FeatureGroups(LAYOUT, grouping.single, grouping.embeddings)
    assert grouping.single == (grouping.whole,)
    # a category of n slots has (n + 1) // 2 numbers: 2 + 1 + 3 + 1
    assert bottom.extractors[0].inputs == [7]


def test_a_copy_shares_no_graph(bottom):
    bottom(rows())
    assert bottom.extracted.requires_grad
    twin = copy.deepcopy(bottom)
    assert twin.extracted.numel() == 0
    assert torch.equal(twin.eval()(rows()), bottom.eval()(rows()))


def test_a_frozen_model_learns_nothing_and_counts_nothing(bottom):
    before = {key: value.clone() for key, value in bottom.state_dict().items()}
    frozen = Frozen(bottom).train()
    h = frozen(rows())
    h.sum().backward()
    assert torch.equal(h.grad, torch.ones_like(h))
    assert all(p.grad is None for p in bottom.parameters())
    assert all(torch.equal(before[key], value) for key, value in bottom.state_dict().items())


# Discriminators


def test_the_domain_loss_is_the_sum_of_each_groups_mean_cross_entropy():
    torch.manual_seed(0)
    tell = DomainDiscriminators((3, 2)).eval()
    source, target = torch.randn(5, 5), torch.randn(4, 5)
    logits = tell(torch.cat([source, target]))
    domain = torch.tensor([0] * 5 + [1] * 4)
    expected = sum(F.cross_entropy(logits[:, g], domain) for g in range(2))
    assert tell.loss(source, target, 0.7).item() == pytest.approx(expected.item(), rel=1e-6)


def test_below_the_discriminators_the_gradient_is_reversed_and_they_learn_with_weight_one():
    torch.manual_seed(0)
    tell = DomainDiscriminators((3, 2)).eval()
    found = []
    for alpha in (-1.0, 0.4):  # -1: as it is
        source, target = torch.ones(5, 5, requires_grad=True), torch.zeros(4, 5, requires_grad=True)
        tell.zero_grad()
        tell.loss(source, target, alpha).backward()
        found.append((source.grad, target.grad, next(tell.parameters()).grad.clone()))
    plain, reversed_ = found
    assert torch.allclose(reversed_[0], -0.4 * plain[0])
    assert torch.allclose(reversed_[1], -0.4 * plain[1])
    assert torch.equal(reversed_[2], plain[2])


def test_each_discriminator_reads_its_own_group_alone():
    torch.manual_seed(0)
    tell = DomainDiscriminators((3, 2)).eval()
    f = torch.randn(6, 5)
    changed = f.clone()
    changed[:, 3:] += 1
    assert torch.equal(tell(f)[:, 0], tell(changed)[:, 0])
    assert not torch.equal(tell(f)[:, 1], tell(changed)[:, 1])


@pytest.mark.parametrize(("options", "width"), [({}, 24), ({"width": 36, "spectral": False}, 36)])
def test_first_layers_have_the_width_and_the_norm_that_is_asked_for(options, width):
    torch.manual_seed(0)
    tell = DomainDiscriminators((14, 20), **options)
    for _ in range(30):  # one power iteration each
        tell(torch.randn(8, 34))
    norms = [torch.linalg.matrix_norm(m.weight, ord=2).item() for m in tell.layers[0].maps]
    assert [m.weight.shape for m in tell.layers[0].maps] == [(width, 14), (width, 20)]
    assert (norms == pytest.approx([1, 1], abs=1e-3)) == (not options)
