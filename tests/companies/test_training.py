"""Joint training of two processes: the numbers of the same roles in one process, bit for bit, and of plain SGD."""

import re

import msgspec
import numpy as np
import pytest
import torch
from remote_pair import CIPHER, SEEDS, Masks, make_job, owns, run_both, weights
from scipy.stats import kstest, norm
from torch import nn
from torch.nn import functional as F

from vflsec.base.errors import UsageError
from vflsec.base.seeds import seed_weights
from vflsec.cipher.arithmetic.keys import Keys
from vflsec.cipher.arithmetic.layout import CipherSpec
from vflsec.cipher.arithmetic.linear_sgd import LinearSgd
from vflsec.cipher.recording import Recording
from vflsec.cipher.roles.active import ActiveRole
from vflsec.cipher.roles.passive import PassiveRole
from vflsec.companies.active_side import compute_residual
from vflsec.companies.messages import Hello
from vflsec.companies.passive_side import PassiveSide
from vflsec.companies.session import make_side
from vflsec.companies.side import Schedule, draw_first_share
from vflsec.companies.snapshots import Snapshots
from vflsec.nn.encoders import build_encoder
from vflsec.nn.wide import create_optimizer
from vflsec.results.metrics import METRICS


def first_models(job, own):
    """The models both parties draw from their own seeds, with C's part of the first weights (g, C)."""
    width = job.model.width or own["passive"].layout.width
    bottom = nn.Identity()
    if job.model.encoder != "identity":
        with seed_weights(SEEDS["passive"], "model", "passive_1"):
            bottom = build_encoder(own["passive"].layout, job.model.spec, job.model.outputs)
    columns, outputs, drawn = own["active"].layout.width, job.model.outputs, {role: Masks(role) for role in own}
    with seed_weights(SEEDS["active"], "model", "top"):
        joint = nn.Linear(columns + width, outputs).double()
    with torch.no_grad():
        joint.weight[:, columns:] = torch.from_numpy(
            draw_first_share(drawn["active"], width, outputs, columns + width).T
        )
    share = draw_first_share(drawn["passive"], width, outputs) if job.model.share else np.zeros((width, 1))
    return bottom, joint, share


def loss_of(z, y):
    if z.shape[1] == 1:
        return F.binary_cross_entropy_with_logits(z[:, 0], torch.from_numpy(y).double())
    return F.cross_entropy(z, torch.from_numpy(y))


def plain(job, own):
    """The same training in the clear: one model, one loss, plain SGD; returns the weights (g, C) and the logits."""
    bottom, joint, share = first_models(job, own)
    columns = own["active"].layout.width
    with torch.no_grad():
        joint.weight[:, columns:] += torch.from_numpy(share.T)
    optimizer = create_optimizer([*bottom.parameters(), *joint.parameters()], job.train.spec)
    x = {role: torch.from_numpy(own[role].features["train"]) for role in own}
    schedule = Schedule(job, len(x["active"]))
    for _, rows, rate in (schedule[step] for step in range(len(schedule))):
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        z = joint(torch.cat([x["active"][rows].double(), bottom(x["passive"][rows]).double()], dim=1))
        loss_of(z, own["active"].labels["train"][rows.numpy()]).backward()
        optimizer.step()
    test = {role: torch.from_numpy(own[role].features["test"]) for role in own}
    with torch.no_grad():
        z = joint(torch.cat([test["active"].double(), bottom(test["passive"]).double()], dim=1)).numpy()
    return joint.weight[:, columns:].detach().numpy().T, z


def in_process(job, own):
    """The same exchange without a wire: both roles' methods called in turn, with the same masks."""
    bottom, joint, share = first_models(job, own)
    columns, width = own["active"].layout.width, job.model.width or own["passive"].layout.width
    schedule = Schedule(job, len(own["active"].ids["train"]))
    layout = job.paillier.layout(width=width, outputs=job.model.outputs, batch=schedule.largest)
    sgd = {"optimizer": LinearSgd(job.train.momentum, job.train.weight_decay)}
    masks, keys = {role: Masks(role) for role in own}, Keys.generate(1024)
    c = PassiveRole(keys, layout, share0=share, randbits=masks["passive"], **sgd)
    first = joint.weight[:, columns:].detach().numpy().T.copy()
    p = ActiveRole(keys.public, layout, first, randbits=masks["active"], **sgd)
    top = nn.Linear(columns, layout.outputs, dtype=torch.float64)
    top.weight.data, top.bias.data = joint.weight.data[:, :columns].clone(), joint.bias.data.clone()
    optimizers = [create_optimizer(m.parameters(), job.train.spec) for m in (bottom, top) if list(m.parameters())]
    x = {role: torch.from_numpy(own[role].features["train"]) for role in own}
    for step in range(len(schedule)):
        _, rows, rate = schedule[step]
        for role in own:
            masks[role].begin(step)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
        mu, z_own = bottom(x["passive"][rows]), top(x["active"][rows].double())
        z_shared = p.scores(c.scores(p.mask_scores(c.features(mu.detach().double().numpy()))))
        delta, _ = compute_residual(z_shared + z_own.detach().numpy(), own["active"].labels["train"][rows.numpy()])
        noised = c.gradient(p.mask_gradient(delta), rate)
        p.update(noised, rate) if job.paillier.order == "paper" else None
        if list(bottom.parameters()):
            down = c.embedding_gradient(p.embedding_gradient(delta, noised))
            mu.backward(torch.from_numpy(down / len(rows)).to(mu))
        p.update(noised, rate) if job.paillier.order == "current" else None
        z_own.backward(torch.from_numpy(delta / len(rows)))
        for optimizer in optimizers:
            optimizer.step()
    return c.share, p.share, bottom.state_dict(), top.state_dict()


JOBS = {
    "logistic regression": make_job(encoder="identity", momentum=0.9, weight_decay=0.01),
    "mlp": make_job(momentum=0.5, schedule="cosine"),
    "printed order": make_job(model={"share": False}, paillier=type(CIPHER)(bits=1024, order="paper")),
    "every row of delta": make_job(paillier=type(CIPHER)(bits=1024, delta="outer"), epochs=1),
    "softmax": make_job(outputs=3, epochs=1, weight_decay=0.01),
    "tabular": make_job(encoder="tabular", epochs=1),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", JOBS)
def test_two_processes_compute_what_one_does_bit_for_bit(keys, tmp_path, name):
    job = JOBS[name]
    own = owns(job, classes=max(2, job.model.outputs))
    made, found, errors = run_both(keys, job, own, tmp_path, masks=True)
    assert not errors
    c, p, bottom, top = in_process(job, own)
    assert (made["passive"].side.holder.share == c).all()
    assert (made["active"].side.holder.share == p).all()
    for module, state in (made["passive"].side.bottom, bottom), (made["active"].side.top, top):
        for key, value in module.state_dict().items():
            assert torch.equal(value, state[key]), key
    assert found["passive"].history == found["active"].history
    assert found["passive"].utility == {}


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["logistic regression", "mlp", "softmax"])
def test_two_processes_compute_what_plain_sgd_does(keys, tmp_path, name):
    job = JOBS[name]
    own = owns(job, classes=max(2, job.model.outputs))
    made, found, errors = run_both(keys, job, own, tmp_path, masks=True)
    assert not errors
    expected, logits = plain(job, own)
    learned = weights({role: made[role].side.models() for role in made})
    assert np.abs(learned - expected).max() < 1e-6
    assert np.abs(made["active"].side.scores - logits).max() < 1e-5
    headline = "auc" if len(own["active"].classes) == 2 else "accuracy"
    two = np.hstack([np.zeros_like(logits), logits]) if logits.shape[1] == 1 else logits
    assert next(iter(found["active"].utility)) == headline
    assert found["active"].utility[headline] == pytest.approx(
        METRICS[headline](two, own["active"].labels["test"]), abs=1e-9
    )


@pytest.mark.parametrize("split", ["train", "test"])
def test_columns_out_of_range_are_found_before_any_is_sent(tmp_path, split):
    job = make_job(encoder="identity")
    own = owns(job)["passive"]
    own.features[split][3, 2] = 99.0
    with pytest.raises(UsageError, match=r"got 99 in column x2; .*: set feature_bits = 7$"):
        make_side("passive", own, job, Snapshots(tmp_path / "a"), batches=1)
    make_side(
        "passive",
        own,
        make_job(encoder="identity", paillier=CipherSpec(bits=1024, feature_bits=7)),
        Snapshots(tmp_path / "b"),
        batches=1,
    )


def test_features_that_grow_in_mid_run_keep_it_and_it_goes_on_with_more_bits(keys, tmp_path, monkeypatch):
    learn, begun = PassiveSide.learn, []

    def growing(side, exchange, batch, commit):
        if batch.number == 2 and side.agreed.feature_bits == 4:
            with torch.no_grad():
                for parameter in side.bottom.parameters():
                    parameter.mul_(20.0)
        begun.append(batch.number)
        learn(side, exchange, batch, commit)

    monkeypatch.setattr(PassiveSide, "learn", growing)
    jobs = [make_job(epochs=2, paillier=CipherSpec(bits=1024, feature_bits=bits)) for bits in (4, 9)]
    own = owns(jobs[0])
    _, _, errors = run_both(keys, jobs[0], own, tmp_path)
    assert isinstance(errors["passive"], UsageError)
    assert re.search(r"column \d; .*feature_bits = \d+$", str(errors["passive"]))
    assert begun == [0, 1, 2]
    begun.clear()
    _, found, errors = run_both(keys, jobs[1], own, tmp_path)
    assert not errors
    assert begun[0] == 2
    assert found["passive"].history == found["active"].history


def test_two_runs_on_equal_inputs_say_different_things(keys, tmp_path):
    job = JOBS["logistic regression"]
    histories = [run_both(keys, job, owns(job), tmp_path / name)[1]["active"].history for name in "ab"]
    assert histories[0] != histories[1]


def test_noise_on_every_coordinate_of_delta_reaches_c_alone_and_as_wide_as_agreed(keys, tmp_path):
    job = make_job(rows=300, epochs=1, batch=105, paillier=type(CIPHER)(bits=1024, delta="outer", noise=0.5))
    own = owns(job, rows=300)
    each = {role: {"record": tmp_path / role / "recording"} for role in own}
    _, _, errors = run_both(keys, job, own, tmp_path, masks=True, each=each)
    assert not errors
    here, there = (next(iter(Recording(each[role]["record"]).steps())) for role in ("passive", "active"))
    weight = ((here.notes["share"] + there.notes["share"]) / 2**64).astype(float)  # (g, 1)
    delta = there.notes["delta"]
    noise = (here.notes["embedding_gradient"] - delta @ weight.T) / np.linalg.norm(delta, axis=1).max()
    assert kstest(noise.ravel(), norm(scale=0.5).cdf).pvalue > 1e-3
    assert noise.std() == pytest.approx(0.5, rel=0.15)


def test_noise_on_scores_reaches_p_and_as_wide_as_agreed(keys, tmp_path):
    job = make_job(rows=300, epochs=1, batch=105, paillier=type(CIPHER)(bits=1024, score_noise=0.5))
    own = owns(job, rows=300)
    each = {role: {"record": tmp_path / role / "recording"} for role in own}
    _, _, errors = run_both(keys, job, own, tmp_path, masks=True, each=each)
    assert not errors
    noise = {}
    for here, there in zip(*(Recording(each[role]["record"]).steps() for role in ("passive", "active")), strict=True):
        weight = ((here.notes["share"] + there.notes["share"]) / 2**64).astype(float)  # (g, 1)
        noise.setdefault(here.rate is None, []).append(there.notes["scores"] - here.notes["mu"] @ weight)
    for found in map(np.concatenate, noise.values()):  # of training, and of prediction
        assert kstest(found.ravel(), norm(scale=0.5).cdf).pvalue > 1e-3
        assert found.std() == pytest.approx(0.5, rel=0.25)


def test_a_seed_gives_away_neither_noise_nor_shares(tmp_path):
    """Two runs of a party with equal seeds have equal networks, other shares and other noise."""
    job = make_job(paillier=type(CIPHER)(bits=1024, delta="outer", noise=0.1, score_noise=0.1))
    own = owns(job)
    made = [make_side("passive", own["passive"], job, Snapshots(tmp_path / name), seed=1, batches=1) for name in "ab"]
    assert torch.equal(*(side.bottom(side.x["train"]) for side in made))
    assert (made[0].holder.share != made[1].holder.share).all()
    assert (made[0]._score_noise(16) != made[1]._score_noise(16)).all()
    labels = [make_side("active", own["active"], job, Snapshots(tmp_path / name), seed=1, batches=1) for name in "cd"]
    for side, other in zip(labels, made, strict=True):
        hello = Hello(
            role="passive",
            settings={},
            counts={},
            rows="0" * 64,
            run="",
            history={0: "0" * 64},
            layout=msgspec.to_builtins(other.agreed),
            key=other.public,
        )
        side.meet(hello)
    assert torch.equal(*(side.top.weight for side in labels))
    assert (labels[0].holder.share != labels[1].holder.share).all()
    assert (labels[0]._noise(np.ones((16, 1))) != labels[1]._noise(np.ones((16, 1)))).all()


def test_an_answer_that_is_given_again_has_other_noise(tmp_path):
    """With the same noise, a peer that asks twice under two shares of its choice would cancel it."""
    job = make_job(paillier=type(CIPHER)(bits=1024, delta="outer", noise=0.1, score_noise=0.1))
    side = make_side("passive", owns(job)["passive"], job, Snapshots(tmp_path), seed=1, batches=1)
    first = side._score_noise(20_000)
    side.load(side.state())
    differences = (first - side._score_noise(20_000)) / (0.1 * 2**0.5)
    assert kstest(differences.ravel(), "norm").pvalue > 1e-6  # keys and noise are secret, and so not seeded
