"""The bottleneck is Gaussian, the penalty is its divergence, and a narrow one leaks less."""

import pytest
import torch
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

from vflsec.base.seeds import make_rng, seed_weights
from vflsec.defenses.mid import InformationBottleneck, measure_divergence


def prepared(strength=1.0, *, senders=("passive_1",), width=3, seed=0):
    made = InformationBottleneck(strength)
    with seed_weights(seed, "weights"):
        made.prepare(dict.fromkeys(senders, width), n_classes=2, rng=make_rng(seed, "mid"))
    return made


def layers(made, sender="passive_1"):
    encoders, decoders = made.modules()
    return encoders[sender], decoders[sender]


def plain(made, *, mean=0.0, raw=0.0):
    """Set the encoder to constants and the decoder to the identity."""
    encoder, decoder = layers(made)
    with torch.no_grad():
        encoder.weight.zero_()
        encoder.bias[:3], encoder.bias[3:] = mean, raw
        decoder.weight.copy_(torch.eye(3))
        decoder.bias.zero_()
    return made


def test_the_divergence_is_that_of_two_gaussians():
    rng = torch.Generator().manual_seed(0)
    mean, deviation = torch.randn(9, 4, generator=rng), torch.rand(9, 4, generator=rng) + 0.1
    expected = kl_divergence(Normal(mean, deviation), Normal(0.0, 1.0)).sum(dim=1)
    assert torch.allclose(measure_divergence(mean, deviation), expected, atol=1e-5)


@pytest.mark.parametrize("strength", [0.3, 100.0])
def test_the_penalty_is_lambda_times_its_mean_over_rows(strength):
    made = prepared(strength)
    h = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    mean, raw = (h @ layers(made)[0].weight.T + layers(made)[0].bias).detach().split(3, dim=1)
    naive = sum(
        0.5 * float(m**2 + s**2 - 1 - 2 * s.log())
        for m, s in zip(mean.flatten(), F.softplus(raw - 0.5).flatten(), strict=True)
    )
    assert float(made.penalty(h, None, "passive_1").detach()) == pytest.approx(strength * naive / 8, rel=1e-4)


def test_the_noise_has_the_encoders_deviation():
    made = plain(prepared(), mean=-2.0, raw=-1.0)  # a ReLU would have made both of them 0
    t = made.on_received(torch.ones(20_000, 3), "passive_1").detach()
    assert float(t.mean()) == pytest.approx(-2.0, abs=0.01)
    assert float(t.std()) == pytest.approx(float(F.softplus(torch.tensor(-1.5))), rel=0.02)
    assert not torch.equal(made.on_received(torch.ones(20_000, 3), "passive_1"), t)  # fresh each time


def test_prediction_is_without_noise():
    made = prepared()
    for module in made.modules():
        module.eval()
    h = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    encoder, decoder = layers(made)
    assert torch.equal(made.on_received(h, "passive_1"), decoder(encoder(h)[:, :3]))


def test_each_sender_has_layers_of_its_own():
    made = prepared(senders=("passive_1", "passive_2"))
    h = torch.ones(2, 3)
    assert not torch.equal(made.penalty(h, None, "passive_1"), made.penalty(h, None, "passive_2"))


def test_equal_seeds_give_equal_bottlenecks():
    h = torch.ones(4, 3)
    one, same, other = (prepared(seed=seed).on_received(h, "passive_1") for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_gradients_are_finite_however_sure_the_encoder_is():
    made = plain(prepared(), mean=3.0, raw=-200.0)
    h = torch.ones(4, 3, requires_grad=True)
    value = made.penalty(h, None, "passive_1") + made.on_received(h, "passive_1").sum()
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(layers(made)[0].weight.grad).all()


def test_what_norm_gains_is_an_offset_that_all_rows_of_a_message_share(leak):
    """A known exception to "a narrower bottleneck never leaks more": of ``norm`` alone, at middling lambda.

    The penalty's gradient has a part that is the same for all rows. Added to gradients that point to opposite sides for
    the two classes it makes one side longer, so that ``norm`` reads what ``direction`` read all the time: without that
    part it gains nothing, and ``direction`` never falls below it.
    """
    plain, found = (leak("norm", "mid", strength, signal="none") for strength in (0.0, 0.1))
    assert found > plain + 0.05
    assert leak("norm", "mid", 0.1, signal="none", read=centered) < plain + 0.02
    assert leak("direction", "mid", 0.1, signal="none") > found


def centered(g):
    return g - g.mean(dim=0)


@pytest.mark.long
@pytest.mark.parametrize(("attack", "signal"), [("mc", "hidden"), ("direction", "hidden"), ("spectral", "planted")])
def test_a_narrow_bottleneck_leaks_less(leak, attack, signal):
    found = [leak(attack, "mid", strength, signal=signal) for strength in (0.0, 0.01, 10.0)]
    assert found[2] < found[1] - 0.15
    assert found[2] < found[0] - 0.15
