"""References on pooled columns are the libraries' own models, stored as tensors."""

import warnings

import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_score

from vflsec.base.errors import Diverged, UsageError
from vflsec.base.seeds import derive
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.data.partition import DataSpec
from vflsec.methods import pooled
from vflsec.methods.checkpoint import load_states, save_states
from vflsec.methods.pooled import PooledLightGBM, PooledLogisticRegression
from vflsec.testing.federations import make_toy_federation

SPECS = TrainSpec(), ModelSpec()
LABELS = DataSpec(n_labeled=90, overlap=0.8, validation=0.2)


@pytest.fixture
def lightgbm():
    return pytest.importorskip("lightgbm", reason="an extra")


def make_federation(data=LABELS, *, parties=3, classes=2, signal="none", rows=200, **options):
    return make_toy_federation(
        data=data, parties=parties, classes=classes, columns=3, rows=rows, signal=signal, **options
    )


def arrays(federation, split):
    """The columns of all parties, put together by hand, and the labels."""
    columns = [party.features[split].numpy() for party in federation.parties.values()]
    return np.hstack(columns), federation.active.labels[split].numpy()


@pytest.fixture(params=["lr", "lightgbm"])
def made(request):
    if request.param == "lightgbm":
        request.getfixturevalue("lightgbm")
        return PooledLightGBM(*SPECS, rounds=8, leaf_rows=5)
    return PooledLogisticRegression(*SPECS)


@pytest.mark.sampled
@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("signal", ["none", "planted"])
def test_lr_is_scikit_learns_with_the_penalty_of_least_log_loss_on_folds(classes, signal):
    federation = make_federation(classes=classes, signal=signal)
    trained = PooledLogisticRegression(*SPECS).fit(federation)
    x, y = arrays(federation, "train")
    folds = StratifiedKFold(5, shuffle=True, random_state=derive(federation.seed, "folds") % 2**32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        losses = {
            c: -cross_val_score(
                LogisticRegression(C=c, max_iter=2000), x.astype(np.float64), y, scoring="neg_log_loss", cv=folds
            ).mean()
            for c in np.logspace(-4, 2, 7)
        }
    direct = LogisticRegression(C=min(losses, key=losses.get), max_iter=2000).fit(x.astype(np.float64), y)
    for split in ("train", "val", "test"):
        expected = torch.from_numpy(direct.predict_log_proba(arrays(federation, split)[0].astype(np.float64)))
        assert torch.allclose(trained.predict(split).double(), expected, atol=1e-6)


def test_lr_without_rows_for_folds_takes_a_penalty_of_one():
    federation = make_federation(DataSpec(n_labeled=4, stratify=True), classes=4, signal="planted")
    trained = PooledLogisticRegression(*SPECS).fit(federation)
    x, y = arrays(federation, "train")
    assert sorted(y) == [0, 1, 2, 3]
    direct = LogisticRegression(max_iter=2000).fit(x.astype(np.float64), y)
    expected = torch.from_numpy(direct.predict_log_proba(arrays(federation, "test")[0].astype(np.float64)))
    assert torch.allclose(trained.predict("test").double(), expected, atol=1e-6)


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("validation", [0.0, 0.3])
def test_lightgbm_is_lightgbm(lightgbm, classes, validation):
    federation = make_federation(DataSpec(validation=validation), classes=classes, rows=400)
    trained = PooledLightGBM(*SPECS, rounds=30, learning_rate=0.3, leaves=7, leaf_rows=5, patience=3).fit(federation)
    x, y = arrays(federation, "train")
    task = {"objective": "binary"} if classes == 2 else {"objective": "multiclass", "num_class": classes}
    settings = {"learning_rate": 0.3, "num_leaves": 7, "min_data_in_leaf": 5, "verbosity": -1, "num_threads": 1}
    train = lightgbm.Dataset(x, y)
    held_out = {}
    if validation:
        held_out["valid_sets"] = [lightgbm.Dataset(*arrays(federation, "val"), reference=train)]
        held_out["callbacks"] = [lightgbm.early_stopping(3, verbose=False)]
    direct = lightgbm.train({**task, **settings}, train, 30, **held_out)
    assert bool(validation) == (0 < direct.best_iteration < 30), "the case is none of early stopping"
    probabilities = direct.predict(arrays(federation, "test")[0])
    if classes == 2:
        probabilities = np.stack([1 - probabilities, probabilities], axis=1)
    assert torch.allclose(trained.predict("test").double().exp(), torch.from_numpy(probabilities), atol=1e-6)


def test_stored_models_predict_the_same_bit_for_bit(made, tmp_path):
    trained = made.fit(make_federation())
    save_states(trained.federation, tmp_path)
    federation, again = make_federation(), type(made)(*SPECS)
    again.build(federation)
    load_states(federation, tmp_path)
    assert torch.equal(again.predict(federation, "test"), trained.predict("test"))


@pytest.mark.sampled
@pytest.mark.parametrize("split", ["unlabeled", "local", "aligned", "test"])
def test_other_rows_are_not_looked_at(made, split):
    federations = [make_federation(DataSpec(n_labeled=90, overlap=0.8, aligned=0.9)) for _ in range(2)]
    expected = None
    for federation in federations:
        test = {name: party.features["test"].clone() for name, party in federation.parties.items()}
        if federation is federations[1]:
            for party in federation.parties.values():
                party.features[split].fill_(float("nan"))
        made.fit(federation)
        for name, party in federation.parties.items():
            party.features["test"].copy_(test[name])
        logits = made.predict(federation, "test")
        expected = logits if expected is None else expected
    assert torch.equal(logits, expected)


def test_every_party_counts(made):
    """Class and columns are tied in one party alone; without it nothing is to be learned."""
    federation = make_federation(signal="none")
    federation.passive[-1].features["train"][:, 0] = federation.active.labels["train"] * 2.0 - 1
    federation.passive[-1].features["test"][:, 0] = federation.active.labels["test"] * 2.0 - 1
    right = made.fit(federation).predict("test").argmax(dim=1) == federation.active.labels["test"]
    assert right.double().mean() > 0.95


def test_predictions_are_log_probabilities(made):
    trained = made.fit(make_federation(classes=3, signal="planted"))
    assert torch.allclose(trained.predict("test").exp().sum(dim=1), torch.ones(60), atol=1e-5)
    (loss,) = trained.history["train"]
    y = trained.federation.active.labels["train"]
    assert loss == pytest.approx(-float(trained.predict("train")[torch.arange(len(y)), y].mean()))


def test_nothing_is_said_and_nobody_has_a_model(made):
    federation = make_federation()
    trained = made.fit(federation)
    trained.predict("test")
    assert not federation.channel.traffic
    for party in federation.parties.values():
        own = party.features["test"]
        assert torch.equal(made.representation(party)(own), own)


def test_an_empty_split_gives_no_logits(made):
    trained = made.fit(make_federation(DataSpec(n_labeled=60)))
    assert trained.predict("val").shape == (0, 2)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_none_is_a_divergence(made, value):
    """LightGBM would take nan for a missing value, and go on."""
    federation = make_federation()
    federation.passive[0].features["train"][3, 1] = value
    with pytest.raises(Diverged, match="nan or infinity at passive_1"):
        made.fit(federation)


def test_lightgbm_is_an_extra(monkeypatch):
    def absent(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(pooled, "import_module", absent)
    federation, made = make_federation(), PooledLightGBM(*SPECS)
    made.build(federation)
    with pytest.raises(UsageError, match=r"pip install 'vflsec\[bench\]'"):
        made.check(federation)


@pytest.mark.parametrize(
    ("option", "match"),
    [({"rounds": 0}, "rounds > 0"), ({"leaves": 1}, "leaves >= 2"), ({"learning_rate": -1.0}, "learning_rate > 0")],
)
def test_impossible_settings_are_refused(option, match):
    with pytest.raises(UsageError, match=match):
        PooledLightGBM(*SPECS, **option)


@pytest.mark.parametrize("kind", ["lr", "lightgbm"])
def test_the_active_partys_columns_alone(kind):
    """What others hold changes nothing, and is not looked at."""
    if kind == "lightgbm":
        pytest.importorskip("lightgbm", reason="an extra")
    found = []
    for spoil in (False, True):
        federation = make_federation(signal="planted")
        if spoil:
            for passive in federation.passive:
                for rows in passive.features.values():
                    rows.fill_(float("nan"))
        options = {"columns": "active"}
        made = PooledLightGBM(*SPECS, **options) if kind == "lightgbm" else PooledLogisticRegression(*SPECS, **options)
        found.append(made.fit(federation).predict("test"))
    assert torch.equal(*found)
