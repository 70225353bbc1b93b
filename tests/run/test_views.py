"""A view is as wide as reality: whatever a role receives is in its view, and some attack that it can mount reads it."""

import re

import msgspec
import pytest
import torch

from vflsec.base.errors import InsufficientView, UsageError
from vflsec.core import registry
from vflsec.core.message import Kind, Transcript
from vflsec.core.method import Trained
from vflsec.core.view import Need
from vflsec.results.records.schema import BaselineResult, Result
from vflsec.run import engine, mounting, plan
from vflsec.run import spec as specs
from vflsec.run.questions import ask
from vflsec.run.store import Store

pytestmark = pytest.mark.usefixtures("few_trees_in_module")  # the subject is not how well trees guess

UNREADABLE = frozenset({Kind.CIPHERTEXT, Kind.CONTROL})
"""Of no use without a key; what is decrypted or unmasked is shown as a message of the kind that it then is."""

UNASKED = frozenset({(Kind.EMBEDDING, "local"), (Kind.GRADIENT, "local"), (Kind.GRADIENT, "unlabeled")})
"""What FedCVT says of rows that no question is about.

The active party knows nothing else of rows that the passive party holds alone, not even whose they are. Gradients of
these rows and of unlabeled ones come from labels that the active party guessed: there is no secret of its own in them.
"""

OPTIONS = {"fedlocal": [{}, {"pma": True}, {"pma": True, "average": "secure-average"}],
           "fedhssl": [{}, {"average": "secure-average"}]}  # fmt: skip


LEARNING = {
    "train": {"epochs": 5, "lr": 0.05, "optimizer": "sgd", "pretrain": {"epochs": 20, "batch": 32, "lr": 0.01}},
    "seeds": 1,
    "parties": 2,
}
"""Enough for PrADA's extractors not to collapse."""


TEXT = {"dataset": "census-text", "data": {"n_labeled": 200, "options": {"rows": 300}}}
"""For the method that needs text."""


def settings(name, adversary="passive_1", attacks=("mc",), parties=3, **more):
    return specs.read(
        {
            "dataset": "toy",
            "data": {"n_labeled": 60, "aligned": 0.6, "overlap": 0.8,
                     "options": {"rows": 200, "columns": 4, "parties": parties, "source": 80}},
            "methods": [name],
            "model": {"bottom": [8, 8]},
            "train": {"epochs": 1, "batch": 32, "pretrain": {"epochs": 1, "batch": 32}},
            "aux": {"n": 20, "folds": 0},
            "adversary": adversary,
            "attacks": list(attacks),
            **(TEXT if name == "split-lm" else {}),
            **more,
        }
    )  # fmt: skip


def mountable(spec):
    """Each registered attack that can be mounted, with the phase after which it strikes: the last, or a former one."""
    ((_, method, federation),) = engine._build(spec)
    for name in registry.list_all("attacks"):
        for after in (None, *method.phases[:-1]):
            attack = plan.resolve(specs.parse_attack(name)).make()
            try:
                mounting.mount(
                    attack, after, spec.adversary, spec.aux, method, federation, spec.method.get(method.name, {})
                )
            except (InsufficientView, UsageError):
                continue
            if attack.target != "integrity":
                yield attack, after


def cases():
    for method in sorted(registry.list_all("methods")):
        if registry.load("methods", method).receives:
            yield from ((method, options) for options in OPTIONS.get(method.partition("-")[0], [{}]))


@pytest.mark.sampled
@pytest.mark.parametrize(("method", "options"), list(cases()))
def test_whatever_a_role_receives_some_attack_reads(method, options):
    parties = 2 if method == "fedcvt" else 3
    spec = settings(method, parties=parties, method={method: options})
    ((_, made, federation),) = engine._build(spec)
    taps = {name: Transcript(frozenset({name}), frozenset(Kind)) for name in (*federation.parties, *made.observers())}
    federation.channel.taps += taps.values()
    trained = made.fit(federation)
    trained.predict("test")
    made.close()
    for name, tap in taps.items():
        heard = {(m.kind, m.phase, m.split) for m in tap.messages if m.receiver == name and m.kind not in UNREADABLE}
        read = set()
        for attack, after in (
            mountable(settings(method, name, parties=parties, method={method: options})) if heard else ()
        ):
            kinds = {kind for need in attack.needs | attack.wants for kind in need.kinds}
            until = made.phases[: made.phases.index(after) + 1] if after else (*made.phases, "validate", "predict")
            told = tuple(m for m in tap.messages if m.phase in until and m.kind in kinds)
            if not kinds or (after is None and attack.target == "membership"):
                continue
            view = ask(attack, trained, name, spec.aux, told, after).view
            assert view.messages == told, f"{attack.name} of {name} lacks messages"
            about = {*view.features, *view.places}
            read |= {(m.kind, m.phase, m.split) for m in told if m.rows is None or m.split in about}
        lost = {(kind, phase, split) for kind, phase, split in heard - read if (kind, split) not in UNASKED}
        assert not lost, f"{name} receives {lost} in {method}, and no attack reads them"


def run(tmp_path, spec):
    engine.check(spec)
    store = Store(tmp_path)
    found = list(engine.evaluate(engine.plan(spec, store), store))
    return [record for record in found if isinstance(record, Result)], [
        r for r in found if isinstance(r, BaselineResult)
    ]


@pytest.mark.long
def test_gradients_of_pre_training_with_a_source_give_its_labels_away(tmp_path):
    spec = settings("prada", attacks=["direction@pretrain"], **LEARNING)
    ((record,), baselines) = run(tmp_path, spec)
    assert record.status == "ok"
    assert set(record.leak) == {"train"}
    assert record.leak["train"].n == 80 - 20
    assert record.leak["train"].metrics["auc"] == pytest.approx(1, abs=0.01)
    regression = next(baseline for baseline in baselines if baseline.attack.name == "logistic")
    assert set(regression.leak) == {"train"}
    assert regression.leak["train"].n == 80 - 20


@pytest.mark.long
def test_the_source_attacks_columns_of_its_own_people(tmp_path):
    spec = settings("prada", "source", attacks=["inversion-blackbox@pretrain", "attribute@pretrain"], **LEARNING)
    records, _ = run(tmp_path, spec)
    assert [record.status for record in records] == ["ok", "ok"]
    assert all(record.leak["train"].n == 80 - 20 for record in records)


def test_the_source_has_no_other_question():
    spec = settings("prada", "source", attacks=["inversion-blackbox"])
    with pytest.raises(InsufficientView, match="by source but at @pretrain"):
        engine.check(spec)
    with pytest.raises(UsageError, match="part in fedsplitnn, got source"):
        engine.check(settings("fedsplitnn", "source", attacks=["inversion-blackbox"]))


def test_labels_of_two_active_parties_are_not_compared():
    spec = settings("prada", attacks=["direction@pretrain", "direction"])
    with pytest.raises(UsageError, match="attacks on one party's labels"):
        engine.check(spec)


def test_views_of_the_source_hold_its_rows_and_what_was_said_of_them():
    spec = settings("prada")
    ((_, method, federation),) = engine._build(spec)
    tap = Transcript(frozenset({"passive_1"}), frozenset({Kind.GRADIENT}))
    federation.channel.taps.append(tap)
    method.run("pretrain", federation)
    attack = plan.resolve(specs.parse_attack("direction")).make()
    view, truth, *_ = ask(
        attack, Trained(method, federation, {}), "passive_1", spec.aux, tuple(tap.messages), "pretrain"
    )
    assert torch.equal(view.features["train"], federation.parties["passive_1"].features["source"])
    assert torch.equal(truth.labels["train"], federation.source.labels["source"])
    assert torch.equal(view.aux_labels, federation.source.labels["source"][view.aux_rows])
    assert Need.GRADIENTS in view.has()
    assert not view.labels


@pytest.mark.long
def test_the_server_mounts_what_it_can_and_all_strikes_after_a_phase(tmp_path):
    small = {"fedhssl-simsiam": {"projector": 16, "predictor": 8}}
    spec = settings("fedhssl-simsiam", "server", attacks=["all", "all@pretrain"], seeds=1, method=small)
    found, left_out = engine.expand_attacks(spec)
    victims = ["", ":victim=passive_1", ":victim=passive_2"]  # without a name, the active party
    expected = [f"model-recovery{victim}{phase}" for phase in ("", "@pretrain") for victim in victims]
    assert [attack.label for attack in found.attacks] == expected
    assert "for the passive side" in left_out["mc"]
    assert "not by the server" in left_out["attribute"]
    lines = engine.list_reasons(left_out)
    assert sum("for the passive side" in line for line in lines) == 1
    assert len(lines) < len(left_out) / 2
    ends = msgspec.structs.replace(found, attacks=[found.attacks[0], found.attacks[-1]])
    records, _ = run(tmp_path, ends)
    assert [record.leak["parameters"].metrics["r2"] for record in records] == pytest.approx([1, 1], abs=1e-6)


@pytest.mark.parametrize(
    ("method", "way"),
    [
        ("fedsplitnn", "fedlocal-* with pma=true"),
        ("fedgssl-simsiam", "fedlocal-* with pma=true"),
        ("fedlocal-simsiam", "set method.fedlocal-simsiam.pma=true"),
    ],
)
def test_where_nobody_averages_there_is_no_server(method, way):
    with pytest.raises(UsageError, match=f"{method} .*{re.escape(way)}"):
        engine.check(settings(method, "server", attacks=["model-recovery"]))


@pytest.mark.parametrize("attack", ["mc", "all"])
def test_without_pre_training_nothing_strikes_after_it(attack):
    text = f"so {attack}@pretrain cannot run: choose"
    with pytest.raises(UsageError, match=text):
        engine.check(engine.expand_attacks(settings("fedsplitnn", attacks=[f"{attack}@pretrain"]))[0])


@pytest.mark.long
def test_a_passive_party_attacks_the_active_partys_columns_of_training_rows(tmp_path):
    spec = settings("fedcssl-simsiam", attacks=["inversion-blackbox:victim=active", "attribute@pretrain"], seeds=1)
    records, _ = run(tmp_path, spec)
    assert [record.status for record in records] == ["ok", "ok"]
    assert all(set(record.leak) == {"train"} for record in records)


@pytest.mark.parametrize(
    ("method", "attack", "message"),
    [
        ("fedsplitnn", "inversion-blackbox", "embeddings; this adversary has only"),
        ("fedcssl-simsiam", "inversion-blackbox:victim=passive_2", "passive_1 .*those of active: choose"),
    ],
)
def test_whose_embeddings_were_not_received_is_not_attacked(method, attack, message):
    with pytest.raises(InsufficientView, match=message):
        engine.check(settings(method, attacks=[attack]))
