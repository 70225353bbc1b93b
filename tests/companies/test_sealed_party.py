"""Sealed training between two processes: the numbers of one process, and no batch that is answered twice for free."""

import math
import multiprocessing
import os
import re
import shutil
import signal
import socket
import threading
import time
from functools import partial

import msgspec
import numpy as np
import pytest
import torch
from click.exceptions import Exit
from remote_pair import HERE, SEEDS, Masks, assert_same, make_job, owns, run_both, train_calmly, work
from safetensors.numpy import load_file

pytest.importorskip("tenseal")

from vflsec.audit.job import prepare_audit
from vflsec.base.errors import PeerLost, PeerRefused, ProtocolError, UsageError, VflsecError
from vflsec.base.seeds import make_rng, seed_weights
from vflsec.cipher.lattice import LatticeKeys
from vflsec.cipher.noise import compute_epsilon, draw_rounded_normal
from vflsec.cipher.recording import Recording
from vflsec.companies import party
from vflsec.companies.job import JobSealed
from vflsec.companies.messages import LatticeKey, MaskedSums, NoisedSums, Numbers, SealedResiduals, agree
from vflsec.companies.sealed_sides import SealedPassiveSide
from vflsec.companies.session import BatchPort, Session, make_side
from vflsec.companies.snapshots import Snapshots
from vflsec.core.federation import Federation
from vflsec.core.message import Channel
from vflsec.core.party import Party
from vflsec.core.settings import ModelSpec
from vflsec.inference.sums import estimate_labels
from vflsec.methods.sealed_training import PRIVATE, PrivateModel, SealedTraining
from vflsec.nn.encoders import build_encoder
from vflsec.nn.top import Top
from vflsec.protocols.sealed_plain import SealedSums
from vflsec.run.runner import try_attack
from vflsec.run.spec import AttackSpec, AuxSpec


def make_sealed_job(*, outputs=1, hidden=(5,), epochs=2, batch=14, seed=SEEDS["active"], train=2, **sealed):
    settings = JobSealed(epochs=epochs, batch=batch, **sealed)
    job = make_job(outputs=outputs, model={"hidden": hidden, "width": None}, epochs=train, sealed=settings)
    return msgspec.structs.replace(job, seed=seed)


JOB = make_sealed_job()  # four batches of 14 of 28 rows
OWN = owns(JOB)


@pytest.fixture(scope="module")
def calm(keys, tmp_path_factory):
    """The models of an undisturbed run with noise that can be drawn again."""
    return train_calmly(keys, JOB, OWN, tmp_path_factory.mktemp("calm"))


def train_in_one_process(job, own):
    """Return what ``SealedTraining`` learns from the same first weights and noise, and its logits of test rows."""
    channel, parties, m = Channel(), {}, job.model.outputs
    for role, name in (("active", "active"), ("passive", "passive_1")):
        data = own[role]
        features = {split: torch.from_numpy(x) for split, x in data.features.items()}
        labels = {split: torch.from_numpy(y) for split, y in (data.labels or {}).items()} or None
        noise = partial(make_rng, job.seed, "noise", name)
        party = Party(name, features, channel, noise=noise, layout=data.layout, labels=labels)
        with seed_weights(SEEDS[role], "model", name):
            spec = ModelSpec(encoder="mlp", bottom=job.model.hidden, cut=m)
            party.modules["bottom"] = build_encoder(data.layout, spec, m)
        parties[name] = party
    active, passive = parties.values()
    with seed_weights(SEEDS["active"], "model", "private"):
        active.modules[PRIVATE] = PrivateModel(active.n_features + m, len(own["active"].classes))
    classes = len(own["active"].classes)
    federation = Federation(parties, channel, classes, "accuracy", job.seed, torch.device("cpu"))
    top = Top([m, m], m, aggregation="sum", head="none", hidden=0)
    bottoms = {name: party.modules["bottom"] for name, party in parties.items()}
    boundaries = {passive.name: SealedSums(passive, active, plan=job.sealed.plan)}
    training, masks = SealedTraining(federation, bottoms, top, boundaries, job.train.spec), Masks("active")
    update = training._update

    def begin(step, optimizers):
        masks.begin(step.number)
        return update(step, optimizers)

    training._update = begin
    units = training.unit**2
    training._draw = lambda like: torch.from_numpy(
        draw_rounded_normal(training.scale * units, like.numel(), masks) / units
    )
    federation.begin("train")
    training.fit("train", lambda *_: None)
    return {name: party.modules for name, party in parties.items()}, training.predict("test")


@pytest.mark.parametrize("outputs", [1, 3])
def test_two_processes_learn_what_one_process_does(keys, tmp_path, outputs):
    job = make_sealed_job(outputs=outputs)
    own = owns(job, classes=max(2, outputs))
    made, found, errors = run_both(keys, job, own, tmp_path, masks=True)
    assert not errors
    modules, logits = train_in_one_process(job, own)
    for role, name in (("active", "active"), ("passive", "passive_1")):
        for key, value in modules[name]["bottom"].state_dict().items():
            torch.testing.assert_close(made[role].side.bottom.state_dict()[key], value, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(torch.from_numpy(made["active"].side.logits()), logits, rtol=1e-5, atol=1e-6)
    assert found["active"].epsilon == pytest.approx(1.0)
    assert found["passive"].utility == {}
    assert found["passive"].history == found["active"].history


def test_noise_comes_from_no_seed(keys, tmp_path):
    models = [run_both(keys, JOB, OWN, tmp_path / name)[0]["passive"].side.models() for name in "ab"]
    assert any((models[0][key] != value).any() for key, value in models[1].items())


# Answers ------------------------------------------------------------------------------------------------------------


class Answers:
    """The masked sums that the active party opens, and the answers that arrive."""

    def __init__(self, patch, *, lose=(), forget=()):
        self.opened, self.sent = [], []
        opens, send, receive = LatticeKeys.open, BatchPort.send, BatchPort.receive
        self.lose, self.forget = list(lose), list(forget)

        def counting(keys, *rest):
            self.opened.append(1)
            return opens(keys, *rest)

        def sending(port, message):
            if isinstance(message, NoisedSums) and port._step in self.forget:
                self.forget.remove(port._step)
                raise PeerLost("lost on its way")
            send(port, message)
            if isinstance(message, NoisedSums):
                self.sent.append((port._step, message.values))

        def receiving(port, expected):
            message = receive(port, expected)
            if expected is NoisedSums and port._step in self.lose:
                self.lose.remove(port._step)
                raise PeerLost("the passive party hangs up")
            return message

        patch.setattr(LatticeKeys, "open", counting)
        patch.setattr(BatchPort, "send", sending)
        patch.setattr(BatchPort, "receive", receiving)


@pytest.mark.parametrize("lost", [{"lose": [1, 1, 3]}, {"forget": [0, 2]}])
def test_an_answer_that_is_lost_is_sent_again_and_is_the_same(keys, tmp_path, calm, lost):
    with pytest.MonkeyPatch.context() as patch:
        answers = Answers(patch, **lost)
        made, found, errors = run_both(keys, JOB, OWN, tmp_path, masks=True)
    assert not errors
    assert len(answers.opened) == 4
    assert len({step for step, _ in answers.sent}) == len(set(answers.sent)) == 4
    assert len(answers.sent) == 4 + len(lost.get("lose", []))
    assert found["active"].epsilon == pytest.approx(1.0)
    assert_same(made, calm)


def stop_at(step):
    def stop(at):
        if at == step:
            raise UsageError("stopped")

    return stop


def run_until(keys, folder, step):
    _, _, errors = run_both(keys, JOB, OWN, folder, each={"passive": {"begin": stop_at(step)}}, patience=1)
    assert str(errors["passive"]) == "stopped"


def test_no_other_question_about_a_batch_is_answered(keys, tmp_path):
    """A passive party goes back to an old state, in which it could weigh the rows of a batch otherwise."""
    run_until(keys, tmp_path, 1)
    shutil.copytree(tmp_path / "passive", tmp_path / "old")
    run_until(keys, tmp_path, 3)
    shutil.rmtree(tmp_path / "passive")
    shutil.copytree(tmp_path / "old", tmp_path / "passive")
    hello = Session._make_hello

    def lies(self):
        return msgspec.structs.replace(hello(self), lost=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "_make_hello", lies)
        answers = Answers(patch)
        _, _, errors = run_both(keys, JOB, OWN, tmp_path)
        assert isinstance(errors["active"], PeerRefused)
        assert re.search(
            "batch 0 is not answered again.*0 repeats of one.*every further answer .* epsilon", str(errors["active"])
        )
        assert not answers.sent
        _, found, errors = run_both(keys, JOB, OWN, tmp_path, each={"active": {"repeats": 1}})
    assert not errors
    twice = JOB.sealed.plan.mu * math.sqrt(2)  # batches 0 to 2 are answered twice: rows of batch 2 have four answers
    assert found["active"].epsilon == pytest.approx(compute_epsilon(twice, 1e-5))


def test_a_passive_party_that_weighs_again_after_an_answer_ends_the_run(keys, tmp_path, calm):
    """It has the answer to batch 1, hangs up, and sends other sums in place of waiting for the same answer."""

    def weighs_again(side, port, batch, commit):
        port.receive(NoisedSums)
        port.send(MaskedSums(b"x"))

    resend = SealedPassiveSide.resend

    def hangs_up_once(side, *rest):
        (resend if answers.lose else weighs_again)(side, *rest)

    with pytest.MonkeyPatch.context() as patch:
        answers = Answers(patch, lose=[1])
        patch.setattr(SealedPassiveSide, "resend", hangs_up_once)
        _, found, errors = run_both(keys, JOB, OWN, tmp_path, masks=True)
    assert not found
    assert "expected Numbers, got MaskedSums" in str(errors["active"])
    assert len(answers.opened) == 2
    made, _, errors = run_both(keys, JOB, OWN, tmp_path, masks=True)
    assert not errors
    assert_same(made, calm)


def test_a_malicious_passive_party_reads_a_row_for_each_parameter(keys, tmp_path):
    """A weight of 2^30 in a sum makes the noise small; the active party cannot see it under the mask."""
    job = make_sealed_job(epochs=1, batch=28, hidden=(2,), epsilon=0.5)
    own, read = owns(job), {}
    resend = SealedPassiveSide.resend

    def weigh_rows(side, x):
        weights = np.zeros((len(x), side.parameters), dtype=np.int64)
        np.fill_diagonal(weights, 1 << 30)
        yield weights

    def reads(side, port, batch, commit):
        port.note = lambda name, values: read.update({name: values})
        read["rows"] = batch.rows.numpy()
        resend(side, port, batch, commit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SealedPassiveSide, "_compute_weights", weigh_rows)
        patch.setattr(SealedPassiveSide, "resend", reads)
        patch.setattr("vflsec.cipher.lattice.WEIGHT_BITS", 30)  # its own checks do not bind it
        patch.setattr("vflsec.companies.sealed_sides.DEVIATIONS", 1e9)
        made, _, errors = run_both(keys, job, own, tmp_path)
    assert not errors
    parameters = made["passive"].side.parameters
    assert len(read["sum"]) == parameters < 28
    labels = own["active"].labels["train"][read["rows"][:parameters]]
    assert ((read["sum"] < 0) == labels).all()  # p - y is negative for class 1 alone


@pytest.mark.parametrize("parameters", [0, 5000, None, "9", 2**62])
def test_more_parameters_than_agreed_are_refused(keys, tmp_path, parameters):
    introduce = {"layout": {"parameters": parameters}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SealedPassiveSide, "introduce", lambda side: introduce)
        _, found, errors = run_both(keys, JOB, OWN, tmp_path)
    assert not found
    assert "expected 1 to sealed.parameters = 4096 parameters from the peer, got" in str(errors["active"])


def test_a_model_larger_than_agreed_is_refused_before_anybody_connects(tmp_path):
    with pytest.raises(UsageError, match="at most sealed.parameters = 20, got 31"):
        make_side("passive", OWN["passive"], make_sealed_job(parameters=20), Snapshots(tmp_path))


# Lies ---------------------------------------------------------------------------------------------------------------

LIES = {  # the message, its changed content, and what is said at whom
    "not finite": (Numbers, lambda data: np.full(len(data) // 4, np.nan, "<f4").tobytes(), "active", "finite numbers"),
    "fewer numbers": (Numbers, lambda data: data[:-4], "active", "expected 56 bytes of numbers, got 52"),
    "no sums": (MaskedSums, lambda data: b"", "active", "bytes as sums, got 0"),
    "residues": (MaskedSums, lambda data: b"\xff" * len(data), "active", "residues below"),
    "no residuals": (SealedResiduals, lambda data: data[:9], "passive", "bytes as values, got 9"),
    "other residuals": (SealedResiduals, lambda data: b"\xff" * len(data), "passive", "residues below"),
    "no key": (LatticeKey, lambda data: b"", "passive", "bytes as a public key, got 0"),
    "a key of zeros": (LatticeKey, lambda data: bytes(len(data)), "passive", "got zeros"),
    "an empty answer": (NoisedSums, lambda data: b"", "passive", "expected 248 bytes of noised sums, got 0"),
    "a large answer": (NoisedSums, lambda data: b"\xff" * len(data), "passive", "below 1125899906842624"),
    "another answer": (NoisedSums, lambda data: bytes(len(data)), "passive", "deviates from the protocol"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_ends_in_one_line(keys, tmp_path, name):
    kind, lie, who, said = LIES[name]
    send = BatchPort.send

    def lies(port, message):
        if isinstance(message, kind):
            (field,) = message.__struct_fields__
            message = kind(lie(getattr(message, field)))
        send(port, message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchPort, "send", lies)
        _, found, errors = run_both(keys, JOB, OWN, tmp_path)
    assert not found
    assert isinstance(errors[who], ProtocolError)
    assert said in str(errors[who])
    assert all(isinstance(each, VflsecError) and "\n" not in str(each) for each in errors.values())


def test_messages_out_of_turn_and_too_large_ones_are_refused(keys, tmp_path):
    for kind, size, said in (
        (SealedResiduals, 9, "expected Numbers, got SealedR"),
        (Numbers, 1 << 20, "bytes at most"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                SealedPassiveSide, "learn", lambda side, port, *_, k=kind, n=size: send_anyway(port, k(bytes(n)))
            )
            _, _, errors = run_both(keys, JOB, OWN, tmp_path / kind.__name__, patience=1)
        assert said in str(errors["active"])


def send_anyway(port, message):
    """Send a message that is larger than agreed."""
    port._wire.limits[type(message)] = 1 << 30
    port.send(message)
    raise UsageError("nothing else comes")


def test_another_epsilon_is_another_job(keys, tmp_path):
    sides = {}
    for role, epsilon in (("passive", 1.0), ("active", 2.0)):
        job = make_sealed_job(epsilon=epsilon)
        side = make_side(role, OWN[role], job, snapshots := Snapshots(tmp_path / role))
        sides[role] = Session(side, None, snapshots)._make_hello()
    with pytest.raises(PeerRefused, match=r"sealed.epsilon = 1.0 here and 2.0 there"):
        agree(sides["passive"], sides["active"])


# Recordings ---------------------------------------------------------------------------------------------------------


def record(keys, folder, job, own, **options):
    each = {role: {"record": folder / f"{role}.recording"} for role in own}
    made, _, errors = run_both(keys, job, own, folder, each=each, **options)
    assert not errors
    return made, [each[role]["record"] for role in ("passive", "active")]


def attack_sums(paths, attack="sums"):
    audit = prepare_audit(paths[0], truth=paths[1], attacks=[AttackSpec(name=attack)], aux=AuxSpec(n=10), draws=1)
    draw = audit.joint(0)
    made = audit.attacks[0].make()
    return audit, try_attack(made, audit.build_question(made, draw), draw.federation, audit.aux)


@pytest.mark.parametrize("outputs", [1, 3])
def test_the_passive_party_s_recording_is_audited(keys, tmp_path, outputs):
    """Without much noise, and with many parameters, sums are the labels; with noise they are not."""
    leaks = {}
    for epsilon in (1.0, 1000.0):
        job = make_sealed_job(outputs=outputs, hidden=(16,), epochs=3, batch=35, epsilon=epsilon, bits=16)
        own = owns(job, rows=100, classes=max(2, outputs))
        made, paths = record(keys, tmp_path / str(epsilon), job, own)
        audit, result = attack_sums(paths)
        assert result["status"] == "ok"
        view = audit.build_question(audit.attacks[0].make(), audit.joint(0)).view
        assert (estimate_labels(view) is None) == (outputs > 1)  # it knows its own part of the scores
        assert [loss["epsilon"] for loss in audit.spent] == [epsilon]
        leaks[epsilon] = result["leak"]["train"].metrics["auc"]
        x = torch.from_numpy(own["passive"].features["train"])
        with torch.no_grad():
            assert torch.equal(audit.subject.model(x), made["passive"].side.bottom(x))
    assert leaks[1000.0] > 0.95 > 0.9 > leaks[1.0]


def test_the_active_party_s_recording_is_audited(keys, tmp_path):
    job = make_sealed_job(batch=35)
    _, paths = record(keys, tmp_path, job, owns(job, rows=100))
    audit, result = attack_sums(paths[::-1], "inversion-blackbox")
    assert result["status"] == "ok"
    assert audit.subject.adversary == "active"
    assert not audit.spent


def test_a_recording_goes_on_after_a_break_and_scores_no_other_run(keys, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        Answers(patch, lose=[1], forget=[2])
        _, paths = record(keys, tmp_path / "a", JOB, OWN)
    _, others = record(keys, tmp_path / "b", JOB, OWN)
    numbers = [[step.number for step in Recording(path).steps()] for path in paths]
    assert numbers == [list(range(8))] * 2  # four batches, two blocks of rows, two epochs
    audit, _ = attack_sums(paths)
    assert [message.step for message in audit.messages] == [0, 1, 2, 3]
    with pytest.raises(UsageError, match="two recordings of one run"):
        attack_sums([paths[0], others[1]])
    with pytest.raises(UsageError, match="expected --truth"):
        prepare_audit(paths[0])


# Processes ----------------------------------------------------------------------------------------------------------


@pytest.mark.chaos
def test_both_processes_are_killed_and_go_on(keys, tmp_path, calm):
    with socket.create_server((HERE, 0)) as server:
        port = server.getsockname()[1]
    context, roles = multiprocessing.get_context("spawn"), ("passive", "active")

    def start(pause):
        given = {role: (role, keys, JOB, OWN[role], tmp_path / role, port, pause, 0) for role in roles}
        processes = [context.Process(target=work, args=given[role]) for role in roles]
        for process in processes:
            process.start()
        return processes

    processes = start(0.5)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("active/state-00000002.bin")) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    assert not list(tmp_path.glob("*/result.json"))
    for process in start(0):
        process.join(120)
        assert process.exitcode == 0
    for role in roles:
        models = load_file(tmp_path / role / f"{role}.safetensors")
        assert all((models[key] == value).all() for key, value in calm[role].items())


# Command line -------------------------------------------------------------------------------------------------------


def test_the_command_prints_epsilon_on_both_sides(keys, tmp_path, capsys):
    (tmp_path / "job.toml").write_text(
        'name = "toy"\ndataset = "toy"\noptions = {rows = 100}\n[model]\nencoder = "mlp"\nhidden = [4]\n'
        "[train]\nepochs = 1\n[sealed]\nepsilon = 2.0\nepochs = 1\n"
    )
    with socket.create_server((HERE, 0)) as server:
        port = f"{HERE}:{server.getsockname()[1]}"
    options = party.command.make_context("party", []).params
    common = {**options, "job": tmp_path / "job.toml", "keys": keys, "timeout": 20.0, "patience": 20.0}
    passive = {**common, "role": "passive", "listen": port, "out": tmp_path / "passive"}
    active = {**common, "role": "active", "connect": port, "out": tmp_path / "active"}
    thread = threading.Thread(target=party.run, kwargs=passive)
    thread.start()
    party.run(**active)
    thread.join()
    out, err = capsys.readouterr()
    assert "every label: epsilon 2 at delta 1e-05\n" in out
    assert err.count("every label: epsilon 2 at delta 1e-05\n") == 2
    assert re.search(r"auc +[01]\.\d+\n", out)
    assert err.count("exposure 0.50: 2 passes x 1 output give the active party 2 equations in the 4 features") == 2
    with pytest.raises(Exit):
        party.run(**{**active, "max_exposure": 0.3})
    assert "exposure 0.50 > 0.3; nothing was sent" in capsys.readouterr().err
