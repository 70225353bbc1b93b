"""An interrupted training goes on after its last epoch, bit for bit, or starts again where that cannot be."""

import logging

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file

from vflsec.base.errors import Diverged
from vflsec.core.federation import Checkpoint
from vflsec.core.message import Kind, Transcript
from vflsec.methods.epochs import Epochs
from vflsec.run import runner, training
from vflsec.run import spec as specs
from vflsec.run.federation import build_federation, build_method
from vflsec.run.plan import build_cell, list_trials, resolve
from vflsec.run.store import Store
from vflsec.testing.federations import make_tiny_federation

DATA = {"n_labeled": 90, "aligned": 0.8, "overlap": 0.8, "validation": 0.2, "options": {"rows": 240, "source": 60}}
TRAIN = {"epochs": 5, "batch": 32, "pretrain": {"epochs": 1, "batch": 32}}


class Killed(BaseException):
    pass


def cell(method="fedsplitnn", *, train=None, defense=(), malicious=None, **options):
    settings = {"dataset": "toy", "data": DATA, "train": {**TRAIN, **(train or {})}, "methods": [method]}
    spec = specs.read({**settings, "method": {method: options} if options else {}})
    honest = build_cell(spec, method, 0, tuple(map(specs.parse_defense, defense)))
    return honest if malicious is None else structs.replace(honest, malicious=(malicious[0], resolve(malicious[1])))


def killed_after(epoch):
    def kill(phase, done, total):
        if done == epoch and phase != "pretrain":
            raise Killed

    return kill


def build(wanted, path=None):
    federation, method = build_federation(wanted, "cpu"), build_method(wanted)
    federation.checkpoint = Checkpoint(path)
    method.build(federation)
    heard = []
    federation.channel.taps.append(heard.append)
    return federation, method, heard


def last_phase(wanted, path=None, progress=lambda *_: None):
    """Run the last phase from the models as they were drawn; it is the one that starts from any."""
    federation, method, heard = build(wanted, path)
    history = method.run(method.phases[-1], federation, progress)
    return federation, history, heard


def state(federation):
    return {f"{p.name}.{key}": v for p in federation.all_parties for key, v in p.modules.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


CASES = {
    "as it is": {},
    "best on validation rows": {"train": {"select": "best_on_val", "patience": 2, "lr": 0.05}},
    "patience alone": {"train": {"patience": 2, "lr": 0.02}},
    "target": {"train": {"target": 0.6, "schedule": "cosine", "optimizer": "sgd", "local_steps": 2, "clip": 1.0}},
    "noise": {"defense": ["iso:strength=2"]},
    "learned defense with a stream of its own": {"defense": ["mid:strength=0.1"]},
    "passports": {"defense": ["fedpass:strength=1"]},
    "mixed rows": {"defense": ["mixup:strength=1", "label-dp:epsilon=1"]},
    "updates": {"defense": ["dp-sgd:strength=1"]},
    "rows without a label": {"method": "fedcvt"},
    "dropout": {"method": "prada"},
    "no groups": {"method": "prada-no-da-fg-ir", "train": {"select": "paper_best_on_test"}},
    "head alone": {"method": "vertical-lr", "train": {"select": "best_on_val"}},
    "altered rows": {"method": "ss-vfl-i", "recompute_augmented": True},
    "constraint": {"method": "vflhlp"},
    "averaged encoders": {"method": "fedhssl-simsiam"},
    "one party": {"method": "local", "train": {"select": "best_on_val", "patience": 2}},
}


@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES)
def test_a_killed_training_goes_on_bit_for_bit(case, tmp_path):
    wanted, path = cell(**CASES[case]), tmp_path / "partial"
    whole, history, heard = last_phase(wanted)
    assert len(history) > 2, "or there is nothing left to resume"
    with pytest.raises(Killed):
        last_phase(wanted, path, killed_after(2))
    seen = []
    resumed, again, rest = last_phase(wanted, path, lambda phase, done, total: seen.append(done))
    assert seen == list(range(3, len(history) + 1))
    assert again == history
    assert same(state(whole), state(resumed))
    assert resumed.channel.traffic == whole.channel.traffic
    assert resumed.channel.releases() == whole.channel.releases()
    assert resumed.reached == whole.reached
    tail = [m for m in rest if m.phase != "train" or m.step > 0][-3:]
    for mine, theirs in zip(tail, heard[len(heard) - len(tail) :], strict=True):
        assert (mine.kind, mine.sender, mine.step) == (theirs.kind, theirs.sender, theirs.step)
        assert all(torch.equal(mine.payload[key], value) for key, value in theirs.payload.items())


@pytest.mark.parametrize(
    "case",
    [
        {"defense": ["marvell:strength=1"]},
        {"defense": ["phe:backend=plain,strength=1"], "train": {"optimizer": "sgd"}},
        {"malicious": ("passive_1", specs.parse_attack("active-mc"))},
    ],
    ids=["a defense that remembers", "encrypted weights", "an attack in training"],
)
def test_what_changes_more_than_is_kept_starts_again(case, tmp_path):
    wanted, path = cell(**case), tmp_path / "partial"
    with pytest.raises(Killed):
        last_phase(wanted, path, killed_after(2))
    assert not path.exists()
    seen = []
    last_phase(wanted, path, lambda phase, done, total: seen.append(done))
    assert seen == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("damage", [lambda b: b[:-7], lambda b: b"", lambda b: b[:999] + b"!" + b[1000:]])
def test_a_damaged_state_is_ignored_with_a_line(damage, tmp_path, caplog):
    wanted, path = cell(), tmp_path / "partial"
    whole, history, _ = last_phase(wanted)
    with pytest.raises(Killed):
        last_phase(wanted, path, killed_after(3))
    path.write_bytes(damage(path.read_bytes()))
    seen = []
    with caplog.at_level(logging.WARNING):
        again, found, _ = last_phase(wanted, path, lambda phase, done, total: seen.append(done))
    assert [record.message.partition(" is damaged")[0] for record in caplog.records] == [str(path)]
    assert "\n" not in caplog.text.strip()
    assert (seen, found) == ([1, 2, 3, 4, 5], history)
    assert same(state(whole), state(again))


def test_a_kill_while_the_state_is_written_leaves_the_one_before(tmp_path, monkeypatch):
    wanted, path = cell(), tmp_path / "partial"
    with pytest.raises(Killed):
        last_phase(wanted, path, killed_after(2))
    before = path.read_bytes()

    def killed(_):
        raise Killed

    monkeypatch.setattr("vflsec.base.files.os.fsync", killed)  # before the new file takes the place of the old one
    with pytest.raises(Killed):
        last_phase(wanted, path)
    assert path.read_bytes() == before


def task(spec):
    (row,) = list_trials(spec)
    return runner.Task(cell=row.cell, rows=(row,), baselines=())


def evaluation(attack):
    settings = {"dataset": "toy", "data": DATA, "train": TRAIN, "seeds": 1, "attacks": [attack]}
    return specs.read({**settings, "aux": {"n": 20, "folds": 0}})


def test_an_interrupted_cell_goes_on_and_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "SECONDS_BETWEEN_CHECKPOINTS", 0.0)
    wanted, store = task(evaluation("logistic")), Store(tmp_path / "killed")
    (whole,) = runner.run(wanted, tmp_path / "whole", "cpu")
    with pytest.raises(Killed):
        training.train(wanted.cell, "cpu", killed_after(2), store=store)
    folder = store.cell(wanted.cell.key)
    assert folder.partial.exists()
    assert folder.read() is None
    (resumed,) = runner.run(wanted, store.folder, "cpu")
    assert (resumed.utility, resumed.leak, resumed.traffic) == (whole.utility, whole.leak, whole.traffic)
    assert not list(store.folder.glob("cells/*partial*"))
    for path in (tmp_path / "whole").glob("cells/*/*.safetensors"):
        assert same(load_file(path), load_file(store.folder / path.relative_to(tmp_path / "whole")))


def test_a_training_whose_messages_are_recorded_is_run_as_a_whole(tmp_path, monkeypatch):
    """Messages are not stored, and an attack reads all of them."""
    monkeypatch.setattr(training, "SECONDS_BETWEEN_CHECKPOINTS", 0.0)
    tap = Transcript(frozenset({"passive_1"}), frozenset({Kind.GRADIENT}))
    with pytest.raises(Killed):
        training.train(cell(), "cpu", killed_after(2), store=Store(tmp_path), tap=tap)
    assert not list(tmp_path.glob("cells/*"))


def test_states_are_written_at_most_so_often(tmp_path):
    wanted, path = cell(), tmp_path / "partial"
    federation, method, _ = build(wanted)
    federation.checkpoint = Checkpoint(path, every=3600.0)
    method.run("train", federation)
    assert not path.exists()


def test_a_training_that_failed_starts_again(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "SECONDS_BETWEEN_CHECKPOINTS", 0.0)

    def fail(phase, done, total):
        if done == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        training.train(cell(), "cpu", fail, store=Store(tmp_path))
    assert not list(tmp_path.glob("cells/*"))


def test_the_state_of_a_finished_cell_is_swept(tmp_path):
    store = Store(tmp_path)
    done, open_ = (store.cell(key).partial for key in ("0" * 16, "1" * 16))
    for partial in (done, open_):
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(b"state")
    store.cell("0" * 16).path.mkdir()
    (store.cell("0" * 16).path / "cell.json").write_text("{}")
    with store.lock():
        assert not done.exists()
        assert open_.exists()


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_the_phase(loss):
    epochs = Epochs(make_tiny_federation(), "train", lambda *_: None, 3, kept={}, optimizers=[])
    assert next(iter(epochs)) == 0
    with pytest.raises(Diverged, match=f"the loss is {loss} after epoch 1: lower train.lr"):
        epochs.end(loss)


def test_every_phase_reports_each_of_its_epochs_once():
    for name in ("fedsplitnn", "vflhlp-a", "ss-vfl-c", "fedcssl-moco"):
        federation, method, _ = build(cell(name))
        for phase in method.phases:
            seen = []
            history = method.run(phase, federation, lambda *progress, seen=seen: seen.append(progress))
            assert [(where, done) for where, done, _ in seen] == [(phase, n + 1) for n in range(len(history))]
