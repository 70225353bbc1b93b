"""SimSiam, BYOL and MoCo against compositions by hand: values, gradients, what moves after a step and what does not."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vflsec.base.errors import UsageError
from vflsec.nn.siamese import BYOL, MoCo, Predictor, Projector, Siamese, SimSiam

ROWS, FEATURES, WIDTH = 8, 5, 6
KINDS = [SimSiam, BYOL, MoCo]
AVERAGED = [BYOL, MoCo]
SMALL = {SimSiam: {}, BYOL: {"momentum": 0.9}, MoCo: {"momentum": 0.9, "temperature": 0.4, "queue": 20, "out": 3}}


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(FEATURES, 7), nn.BatchNorm1d(7), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(7, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())

    def forward(self, x):
        return self.top(self.bottom(x))


def make(kind, seed=0, **options):
    torch.manual_seed(seed)
    return kind(Encoder(), WIDTH, **{"projector": 4, "predictor": 2, **SMALL[kind], **options}).double()


def views(seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(ROWS, FEATURES, generator=draw, dtype=torch.float64) for _ in range(2)]


def guides(model, seed=1):
    """Projections that a cross-party model might have, d wide."""
    draw = torch.Generator().manual_seed(seed)
    width = model.projector[-1].num_features
    return tuple(torch.randn(ROWS, width, generator=draw, dtype=torch.float64) for _ in range(2))


def optimizer_of(model, lr=0.1):
    scheduled, fixed = model.list_online()
    return torch.optim.SGD([*scheduled, *fixed], lr=lr)


def step(model, seed=0, guide=None, gamma=0.0):
    optimizer = optimizer_of(model)
    optimizer.zero_grad()
    model.two_views(*views(seed), guide=guide, gamma=gamma).backward()
    optimizer.step()
    model.update_state()


def gradients(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def cos(a, b):
    return F.cosine_similarity(a, b, dim=1)


def cross_entropy_by_hand(query, key, bank, tau):
    """InfoNCE, row by row."""
    losses = []
    for q, k in zip(query, key, strict=True):
        scores = torch.stack([torch.dot(q, each) / (q.norm() * each.norm()) for each in [k, *bank]]) / tau
        losses.append(torch.logsumexp(scores, dim=0) - scores[0])
    return torch.stack(losses).mean()


def by_hand(model, v1, v2, guide, gamma):
    """Equation 6 from the model's parts, every stop-gradient written out."""
    z1, z2 = model.projector(model.encoder(v1)), model.projector(model.encoder(v2))
    if isinstance(model, MoCo):
        p1, p2 = z1, z2
    else:
        p1, p2 = model.predictor(z1), model.predictor(z2)
    if isinstance(model, SimSiam):
        t1, t2 = z1.detach(), z2.detach()
    else:
        t1, t2 = (model.target[1](model.target[0](v)).detach() for v in (v1, v2))

    def ssl(p, z, bank):
        if isinstance(model, SimSiam):
            return -cos(p, z).mean()
        if isinstance(model, BYOL):
            return (2 - 2 * cos(p, z)).mean()
        return cross_entropy_by_hand(p, z, bank.keys.clone(), model.temperature)

    bank1, bank2 = (model.bank1, model.bank2) if isinstance(model, MoCo) else (None, None)
    loss = (ssl(p1, t2, bank2) + ssl(p2, t1, bank1)) / 2
    if guide is None:
        return loss
    return loss + gamma * (ssl(p1, guide[0].detach(), bank2) + ssl(p2, guide[1].detach(), bank1))


each_kind = pytest.mark.parametrize("kind", KINDS)
each_averaged = pytest.mark.parametrize("kind", AVERAGED)


@each_kind
@pytest.mark.parametrize("gamma", [None, 0.5, 2.0])
def test_two_views_is_equation_6(kind, gamma):
    model = make(kind)
    step(model, seed=5)  # the target is no longer the online network, and MoCo's banks hold keys
    model.zero_grad(set_to_none=True)
    twin = copy.deepcopy(model)
    guide = None if gamma is None else guides(model)
    loss, expected = model.two_views(*views(), guide, gamma or 0.0), by_hand(twin, *views(), guide, gamma)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
    loss.backward(), expected.backward()
    found, wanted = gradients(model), gradients(twin)
    assert found.keys() == wanted.keys()
    for name, grad in found.items():
        assert (grad is None) == name.startswith("target."), name
        torch.testing.assert_close(grad, wanted[name], rtol=1e-8, atol=1e-12)


@each_kind
def test_guidance_pulls_view_i_to_its_own_guide(kind):
    model = make(kind)
    c1, c2 = guides(model)
    losses = [model.two_views(*views(), guide, 1.0) for guide in [(c1, c2), (c2, c1)]]
    assert abs(losses[0] - losses[1]) > 1e-6


@each_kind
@pytest.mark.parametrize("how", ["gamma is 0", "no guide"])
def test_without_guidance_not_a_bit_differs(kind, how):
    plain, unguided = make(kind).float(), make(kind).float()
    v1, v2 = (v.float() for v in views())
    poison = tuple(torch.full_like(c, float("nan")) for c in guides(plain))
    guide, gamma = (poison, 0.0) if how == "gamma is 0" else (None, 0.5)
    losses = [plain.two_views(v1, v2), unguided.two_views(v1, v2, guide, gamma)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for a, b in zip(plain.parameters(), unguided.parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad)
    for a, b in zip(plain.buffers(), unguided.buffers(), strict=True):
        assert torch.equal(a, b)


@each_kind
def test_guides_get_no_gradient(kind):
    model = make(kind)
    guide = tuple(c.requires_grad_() for c in guides(model))
    model.two_views(*views(), guide, 0.5).backward()
    assert guide[0].grad is None
    assert guide[1].grad is None


@each_kind
def test_the_parts_are_the_encoder_the_projector_and_the_predictor(kind):
    model = make(kind).eval()
    x, _ = views()
    h = model.encoder(x)
    assert torch.equal(h, model.encoder(x))
    assert h.shape == (ROWS, WIDTH)
    z = model.project(x)
    assert torch.equal(z, model.projector(h))
    assert z.shape == (ROWS, 3 if kind is MoCo else 4)
    assert torch.equal(model.predict(z), z if kind is MoCo else model.predictor(z))


@pytest.mark.parametrize("kind", [SimSiam, BYOL])
def test_between_parties_simsiam_and_byol_compare_directions(kind):
    model = make(kind)
    p, z = guides(model)
    torch.testing.assert_close(model.cross_loss(p, z), -cos(p, z).mean())


def test_between_parties_moco_tells_the_batch_apart():
    model = make(MoCo)
    p, z = guides(model)
    both = torch.cat([p, z])
    losses = []
    for i in range(2 * ROWS):
        partner = (i + ROWS) % (2 * ROWS)
        others = both[[j for j in range(2 * ROWS) if j not in (i, partner)]]
        losses.append(cross_entropy_by_hand(both[[i]], both[[partner]], others, 0.4))
    torch.testing.assert_close(model.cross_loss(p, z), torch.stack(losses).mean())


@each_kind
def test_what_was_received_gets_no_gradient(kind):
    model = make(kind)
    x, other = views()
    received = model.project(other).detach().requires_grad_()
    before = state(model)
    model.cross_loss(model.predict(model.project(x)), received).backward()
    assert received.grad is None
    assert model.encoder.bottom[0].weight.grad.abs().max() > 0
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name])


def test_after_step_changes_nothing_of_simsiam():
    model = make(SimSiam)
    model.two_views(*views()).backward()
    before = state(model)
    model.update_state()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@each_averaged
def test_the_target_starts_as_a_copy_and_is_never_trained(kind):
    model = make(kind)
    online = nn.Sequential(model.encoder, model.projector)
    for average, new in zip(model.target.parameters(), online.parameters(), strict=True):
        assert torch.equal(average, new)
        assert average.data_ptr() != new.data_ptr()
        assert not average.requires_grad
    model.two_views(*views(), guides(model), 0.5).backward()
    assert all(p.grad is None for p in model.target.parameters())
    trained = {id(p) for group in model.list_online() for p in group}
    assert not trained & {id(p) for p in model.target.parameters()}


@each_averaged
def test_the_target_follows_in_closed_form(kind):
    model = make(kind)
    start = [p.clone() for p in model.target.parameters()]
    with torch.no_grad():
        for p in (*model.encoder.parameters(), *model.projector.parameters()):
            p.add_(1)
    goal = [p.clone() for p in (*model.encoder.parameters(), *model.projector.parameters())]
    for _ in range(3):
        model.update_state()
    for before, online, average in zip(start, goal, model.target.parameters(), strict=True):
        torch.testing.assert_close(average, 0.9**3 * before + (1 - 0.9**3) * online)


@each_averaged
def test_the_targets_batch_statistics_are_its_own(kind):
    """In training mode it normalizes by the batch, and ``update_state`` leaves its running statistics alone."""
    model = make(kind)
    norm = model.target[0].bottom[1]
    with torch.no_grad():
        v1, v2 = views()
        linear = model.target[0].bottom[0]
        linear.weight.mul_(2)
        expected = 0.9 * 0.1 * linear(v1).mean(dim=0) + 0.1 * linear(v2).mean(dim=0)
    model.two_views(v1, v2)
    torch.testing.assert_close(norm.running_mean, expected)
    assert norm.num_batches_tracked == 2
    before = {name: value.clone() for name, value in model.target.named_buffers()}
    model.update_state()
    for name, value in model.target.named_buffers():
        assert torch.equal(value, before[name])


def test_the_target_is_read_before_it_moves():
    model = make(BYOL)
    before = [p.clone() for p in model.target.parameters()]
    model.two_views(*views()).backward()
    optimizer_of(model).step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.target.parameters(), strict=True))
    model.update_state()
    assert not all(torch.equal(a, b) for a, b in zip(before, model.target.parameters(), strict=True))


def test_moco_remembers_each_views_keys_after_the_step():
    model = make(MoCo)
    banks = [model.bank1, model.bank2]
    start = [bank.keys.clone() for bank in banks]
    v1, v2 = views()
    target = copy.deepcopy(model.target)
    model.two_views(v1, v2).backward()
    assert all(torch.equal(bank.keys, before) for bank, before in zip(banks, start, strict=True))
    model.update_state()
    for bank, before, view in zip(banks, start, (v1, v2), strict=True):
        keys = F.normalize(target(view), dim=1)  # of the network before it moved
        torch.testing.assert_close(bank.keys, torch.cat([keys, before[ROWS:]]))
        assert bank.pointer == ROWS
    model.update_state()
    assert model.bank1.pointer == ROWS, "one step's keys were remembered twice"


def test_moco_never_remembers_the_guide():
    plain, guided = make(MoCo), make(MoCo)
    for model, guide, gamma in [(plain, None, 0.0), (guided, guides(guided), 0.5)]:
        model.two_views(*views(), guide, gamma).backward()
        model.update_state()
    for a, b in [(plain.bank1, guided.bank1), (plain.bank2, guided.bank2)]:
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.pointer, b.pointer)


def test_moco_remembers_nothing_of_an_evaluation():
    model = make(MoCo)
    model.two_views(*views(seed=1))
    model.eval()
    model.two_views(*views(seed=2))
    before = model.bank1.keys.clone()
    model.update_state()
    assert torch.equal(model.bank1.keys, before)


def test_mocos_banks_are_for_the_other_view():
    """A bank that holds the batch's own keys: log-softmax over all of them, the positive once more."""
    model = make(MoCo, queue=ROWS)
    v1, v2 = views()
    target = copy.deepcopy(model.target)
    keys = [F.normalize(target(view), dim=1) for view in (v1, v2)]
    model.bank1.keys.copy_(keys[0])
    model.bank2.keys.copy_(keys[1])
    online = copy.deepcopy(model)
    expected = 0.0
    for view, key in [(v1, keys[1]), (v2, keys[0])]:
        s = F.normalize(online.project(view), dim=1) @ key.T / 0.4
        for i in range(ROWS):
            exps = s[i].exp()
            expected -= (exps[i] / (exps[i] + exps.sum())).log() / ROWS / 2
    torch.testing.assert_close(model.two_views(v1, v2), expected)


@each_kind
def test_the_optimizer_trains_all_but_the_target_each_parameter_once(kind):
    model = make(kind)
    scheduled, fixed = model.list_online()
    assert {id(p) for p in scheduled} == {id(p) for m in (model.encoder, model.projector) for p in m.parameters()}
    assert {id(p) for p in fixed} == (set() if kind is MoCo else {id(p) for p in model.predictor.parameters()})
    online = [p for name, p in model.named_parameters() if not name.startswith("target.")]
    assert sorted(map(id, scheduled + fixed)) == sorted(map(id, online))


@each_kind
def test_shared_is_top_projector_and_predictor(kind):
    model = make(kind)
    shared = model.list_averaged()
    assert list(shared) == ["top", "projector"] + ["predictor"] * (kind is not MoCo)
    assert shared["top"] is model.encoder.top
    assert shared["projector"] is model.projector
    assert shared.get("predictor") is model.predictor


@each_kind
def test_the_state_goes_on_where_it_was(kind):
    model, other = make(kind), make(kind, seed=1)
    step(model, seed=1)
    other.load_state_dict(model.state_dict())
    for each in (model, other):
        step(each, seed=2, guide=guides(each), gamma=0.5)
    assert model.state_dict().keys() == other.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


@each_kind
def test_equal_seeds_equal_models(kind):
    first, second, third = make(kind), make(kind), make(kind, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(state(first).values(), state(second).values(), strict=True))
    assert not torch.equal(first.projector[0].weight, third.projector[0].weight)


@each_kind
def test_training_brings_two_views_of_a_row_together(kind):
    """On two far groups of rows, 60 steps lower the loss clearly, and the groups keep apart."""
    model = make(kind, queue=16) if kind is MoCo else make(kind)
    torch.manual_seed(0)
    center = torch.cat([torch.full((16, FEATURES), 2.0), torch.full((16, FEATURES), -2.0)]).double()
    rows = center + torch.randn(32, FEATURES).double()
    optimizer, losses = optimizer_of(model, lr=0.05), []
    for _ in range(60):
        optimizer.zero_grad()
        loss = model.two_views(rows + 0.2 * torch.randn_like(rows), rows + 0.2 * torch.randn_like(rows))
        loss.backward()
        optimizer.step()
        model.update_state()
        losses.append(loss.item())
    assert sum(losses[-5:]) / 5 < losses[0] - 0.2
    h = F.normalize(model.eval().encoder(rows), dim=1)
    assert (h[:16].mean(dim=0) - h[16:].mean(dim=0)).norm() > 0.2


def test_names_and_defaults_are_those_of_the_paper():
    assert [kind.name for kind in KINDS] == ["simsiam", "byol", "moco"]
    for kind in KINDS:
        model = kind(Encoder(), WIDTH)
        widths = [layer.out_features for layer in model.projector if isinstance(layer, nn.Linear)]
        assert widths == [512, 512, 128 if kind is MoCo else 512]
        heads = None if kind is MoCo else [p.shape for p in model.predictor.parameters() if p.dim() == 2]
        assert heads == (None if kind is MoCo else [(128, 512), (512, 128)])
    assert BYOL(Encoder(), WIDTH).momentum == 0.995
    moco = MoCo(Encoder(), WIDTH)
    assert (moco.momentum, moco.temperature, moco.bank1.keys.shape) == (0.99, 0.5, (4096, 128))


@pytest.mark.parametrize("kind", [BYOL, MoCo])
@pytest.mark.parametrize("updates", [1, 40, 120])
def test_a_target_network_forgets_its_random_start(kind, updates):
    model = kind(Encoder(), WIDTH)
    model.fit_momentum(updates)
    assert model.momentum**updates == pytest.approx(math.exp(-7))
    of_the_paper = kind(Encoder(), WIDTH)
    of_the_paper.fit_momentum(10_000)
    assert of_the_paper.momentum == kind(Encoder(), WIDTH).momentum


def test_only_the_last_linear_of_a_head_has_a_bias():
    projector, predictor = Projector(6, 5, 4), Predictor(4, 2)
    layers = [type(layer) for layer in projector]
    assert layers == [nn.Linear, nn.BatchNorm1d, nn.ReLU] * 2 + [nn.Linear, nn.BatchNorm1d]
    assert [layer.bias is not None for layer in projector if isinstance(layer, nn.Linear)] == [False, False, True]
    assert [type(layer) for layer in predictor] == [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear]
    assert [layer.bias is not None for layer in predictor if isinstance(layer, nn.Linear)] == [False, True]
    assert projector(torch.ones(3, 6)).shape == (3, 4)
    assert predictor(torch.ones(3, 4)).shape == (3, 4)


def test_a_siamese_network_needs_a_loss():
    with pytest.raises(TypeError, match="abstract"):
        Siamese(Encoder(), WIDTH)


@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [
        (BYOL, "momentum", 1.5),
        (BYOL, "momentum", -0.1),
        (MoCo, "momentum", 1.5),
        (MoCo, "temperature", 0.0),
        (MoCo, "queue", 0),
    ],
)
def test_impossible_options_are_refused(kind, option, value):
    with pytest.raises(UsageError, match=f"expected .*{option}.*, got {value}"):
        make(kind, **{option: value})
