"""Attributions add up, and are the linear formula."""

import pytest
import torch
from torch.nn import functional as F

from vflsec.base.errors import UsageError
from vflsec.core.settings import ModelSpec, PretrainSpec, TrainSpec
from vflsec.methods.feature_group_method import VerticalLogisticRegression
from vflsec.methods.fedsplitnn import FedSplitNN
from vflsec.methods.local import Local
from vflsec.methods.prada import PrADA
from vflsec.papers import model_pictures as pictures
from vflsec.testing.federations import make_toy_federation

TRAIN = TrainSpec(epochs=3, batch=32, lr=0.05, pretrain=PretrainSpec(epochs=1, batch=32))


def train(kind=VerticalLogisticRegression, *, model=None, **options):
    federation = make_toy_federation(**{"rows": 120, "columns": 3, "source": 64, **options})
    return kind(TRAIN, ModelSpec(**(model or {}))).fit(federation)


def log_odds(trained, split):
    logits = trained.predict(split)
    return logits[:, 1] - logits[:, 0]


@pytest.mark.parametrize("parties", [2, 3])
@pytest.mark.parametrize("kind", [VerticalLogisticRegression, PrADA, FedSplitNN])
def test_exact_contributions_add_up_to_the_log_odds(kind, parties):
    trained = train(kind, parties=parties)
    found = pictures.attribute(trained)
    less_background = log_odds(trained, "test") - log_odds(trained, "train").mean()
    assert torch.allclose(found.phi.sum(dim=1), less_background, atol=1e-4)
    assert found.phi.shape == found.values.shape == (len(less_background), len(found.names))
    assert len(set(found.names)) == len(found.names)


def test_exact_contributions_are_the_formula():
    trained = train()
    found, parties = pictures.attribute(trained), trained.federation.parties.values()
    weight = trained.federation.active.modules["top"].head.weight[0]
    x, background = (torch.cat([p.features[split] for p in parties], dim=1) for split in ("test", "train"))
    for j in range(6):
        assert torch.allclose(found.phi[:, j], weight[j] * (x[:, j] - background[:, j].mean()), atol=1e-6)
    assert found.names[:3] == ("active_x0", "active_x1", "active_x2")
    assert torch.equal(found.values, x)


def test_the_inputs_of_prada_are_columns_and_groups():
    names = pictures.attribute(train(PrADA)).names
    assert names == ("active_x0", "active_x1", "active_x2", "all")
    assert pictures.attribute(train(PrADA, parties=3)).names[3:] == ("passive_1 all", "passive_2 all")


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Local, {}, "two classes.*got local"),
        (FedSplitNN, {"classes": 3}, "got fedsplitnn and 3 classes"),
        (FedSplitNN, {"model": {"head": "mlp"}}, "linear head .*active party"),
    ],
)
def test_what_is_not_linear_is_refused(kind, options, message):
    with pytest.raises(UsageError, match=message):
        pictures.attribute(train(kind, **options))


# Figures


def test_the_figure_of_importance_puts_the_most_important_on_top():
    found = pictures.Attribution(("a", "b", "c"), torch.tensor([[1.0, -3, 0], [1, 3, 0]]), torch.zeros(2, 3))
    axes = pictures.draw_importance(found, "title").axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["c", "a", "b"]
    assert [bar.get_width() for bar in axes.patches] == [0, 1, 3]


def test_the_swarm_has_every_row_where_it_belongs():
    rng = torch.Generator().manual_seed(0)
    values = torch.randn(60, 2, generator=rng)
    found = pictures.Attribution(("weak", "strong"), values * torch.tensor([-0.1, 2.0]), values)
    figure = pictures.draw_swarm(found)
    lines = figure.axes[0].collections
    for line, j in enumerate((0, 1)):  # from below
        x, y = lines[line].get_offsets().T
        assert torch.allclose(torch.as_tensor(x.data).float(), found.phi[:, j], atol=1e-6)
        assert abs(y - line).max() < 0.5, "lines do not run into each other"
        shade = torch.as_tensor(lines[line].get_array().data)
        assert float(shade.min()) == 0
        assert float(shade.max()) == 1
        middle = shade.argsort()
        assert (values[middle, j].diff() >= 0)[5:-5].all(), "color follows the value"
    constant = pictures.Attribution(("x",), torch.zeros(9, 1), torch.ones(9, 1))
    pictures.draw_swarm(constant).savefig(__import__("io").BytesIO())


def test_the_map_has_a_panel_for_each_group_and_both_domains():
    rng = torch.Generator().manual_seed(0)
    rows = {g: (torch.randn(20, 3, generator=rng), 2 + torch.randn(15, 3, generator=rng)) for g in ("emp", "demo")}
    figure = pictures.draw_domains({"before": rows, "after": rows})
    assert [axes.get_title() for axes in figure.axes] == ["emp", "demo"] * 2
    assert all(len(axes.collections[0].get_offsets()) == 35 for axes in figure.axes)
    assert [axes.get_ylabel() for axes in figure.axes[::2]] == ["before", "after"]


def test_log_odds_are_those_of_cross_entropy():
    trained = train()
    logits = trained.predict("test")
    assert torch.allclose(F.softmax(logits, dim=1)[:, 1], torch.sigmoid(log_odds(trained, "test")), atol=1e-6)
