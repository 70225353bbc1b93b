"""Under the masked linear layer training is what it is in clear, and each party learns what the protocol says."""

import inspect

import msgspec
import numpy as np
import pytest
import torch
from scipy.stats import kstest, norm

from vflsec.base.errors import UsageError
from vflsec.cipher.arithmetic.layout import CipherSpec
from vflsec.core import registry
from vflsec.core.message import Kind, Step
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.defenses.dp_sgd import DPSGD
from vflsec.defenses.iso import IsotropicNoise
from vflsec.defenses.label_dp import LabelDP
from vflsec.defenses.phe import EncryptedBoundary
from vflsec.methods.checkpoint import load_states, save_states
from vflsec.methods.feature_group_method import VerticalLogisticRegression
from vflsec.methods.fedcvt import FedCVT
from vflsec.methods.fedsplitnn import FedSplitNN
from vflsec.methods.ss_vfl import SSVFLIndependent
from vflsec.nn.top import SharedTop, Top
from vflsec.protocols.masked_plain import PlainMaskedBoundary, Sealed
from vflsec.protocols.paillier import PaillierBoundary
from vflsec.testing.federations import make_toy_federation

MODEL = ModelSpec(bottom=(6,), cut=3)
SGD = TrainSpec(epochs=4, batch=32, lr=0.1, optimizer="sgd", momentum=0.9, weight_decay=1e-3)
SEALED = EncryptedBoundary(backend="plain")
PAILLIER = EncryptedBoundary(bits=1024)


def train(defenses=(), *, spec=SGD, model=MODEL, taps=(), method=FedSplitNN, **federation):
    made = make_toy_federation(rows=150, columns=4, **federation)
    made.active.defenses = tuple(defenses)
    made.channel.taps.extend(taps)
    trained = method(spec, model).fit(made)
    return trained, trained.predict("test")


@pytest.mark.long
@pytest.mark.parametrize("defense", [SEALED, PAILLIER], ids=["sealed", "paillier"])
@pytest.mark.parametrize(
    "federation", [{}, {"parties": 3}, {"classes": 3}], ids=["two", "three parties", "three classes"]
)
def test_training_equals_training_in_clear(defense, federation):
    clear, logits = train(**federation)
    sealed, again = train([defense], **federation)
    torch.testing.assert_close(again, logits, rtol=1e-4, atol=1e-5)
    assert sealed.history["train"] == pytest.approx(clear.history["train"], rel=1e-4)
    for name, party in clear.federation.parties.items():
        for mine, theirs in zip(
            party.modules["bottom"].parameters(),
            sealed.federation.parties[name].modules["bottom"].parameters(),
            strict=True,
        ):
            torch.testing.assert_close(theirs, mine, rtol=1e-4, atol=1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize(("cut", "classes", "told"), [(2, 2, True), (3, 2, False), (3, 3, True), (4, 3, False)])
def test_scores_that_give_an_embedding_away_are_noted(cut, classes, told):
    """As many scores as the embedding is wide are the embedding, up to one linear map."""
    model = ModelSpec(bottom=(6,), cut=cut)
    sealed, _ = train([SEALED], model=model, classes=classes)
    notes = sealed.method.notes(sealed.federation)
    assert len(notes) == told
    assert all(f"set model.cut above {classes}" in note for note in notes)
    clear, _ = train(model=model, classes=classes)
    assert clear.method.notes(clear.federation) == []


def test_the_shares_add_up_to_the_weights_that_training_in_clear_finds():
    clear, _ = train()
    sealed, _ = train([SEALED])
    shares = [party.modules["boundary_passive_1"].weight for party in sealed.federation.parties.values()]
    whole = clear.federation.active.modules["top"].head.weight
    torch.testing.assert_close(sum(shares).T.float(), whole[:, 3:], rtol=1e-4, atol=1e-5)
    assert all((share - whole[:, 3:].T).abs().max() > 0.01 for share in shares)


def test_the_active_party_gets_scores_and_the_passive_party_the_gradient_of_its_embedding():
    heard, sealed_heard = [], []
    train(taps=[heard.append])
    trained, _ = train([SEALED], taps=[sealed_heard.append])
    opened = [message for message in sealed_heard if message.kind is not Kind.CIPHERTEXT]
    assert [(m.kind, m.sender, m.receiver, m.step, m.phase) for m in opened] == [
        (m.kind, m.sender, m.receiver, m.step, m.phase) for m in heard
    ]
    for there, here in zip(heard, opened, strict=True):
        assert torch.equal(there.rows, here.rows)
        if here.kind is Kind.GRADIENT:
            torch.testing.assert_close(here.payload["value"], there.payload["value"], rtol=1e-3, atol=1e-6)
        else:
            assert here.payload["value"].shape == (len(here.rows), 2)
    assert {route.kind for route in trained.federation.channel.traffic} == {Kind.CIPHERTEXT}
    assert {count.kind for count in trained.federation.channel.releases()} == {
        Kind.EMBEDDING,
        Kind.GRADIENT,
        Kind.CIPHERTEXT,
    }


def boundary_of(backend, weight, **options):
    federation = make_toy_federation(rows=150, columns=4)
    boundary = backend(federation.passive[0], federation.active, **options)
    boundary.join(weight, SGD)
    return boundary


@pytest.mark.parametrize(("backend", "options"), [(PlainMaskedBoundary, {}), (PaillierBoundary, {"bits": 1024})])
def test_neither_party_knows_the_first_weights(backend, options):
    """Each holds half of them and noise of that size, with opposite signs."""
    weight = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    boundary = boundary_of(backend, weight, **options)
    parts = []
    for share in boundary.shares.values():
        if "weight" in share.arrays():
            parts.append(share.arrays()["weight"])
        else:
            numbers = [
                int.from_bytes(n.tobytes(), "little", signed=True) for n in share.arrays()["share"].reshape(-1, 32)
            ]
            parts.append(np.ldexp(np.array(numbers, float), -64).reshape(50, 2))
    assert np.allclose(sum(parts), weight.double().numpy(), rtol=0, atol=1e-12)
    for part in parts:
        noise = part - weight.numpy() / 2
        assert 0.35 < noise.std() < 0.65
        assert abs(np.corrcoef(noise.ravel(), weight.numpy().ravel())[0, 1]) < 0.5


@pytest.mark.long
def test_the_printed_order_runs_at_the_boundary():
    """Gradients of the features then come from the weights after the step."""
    weight = torch.ones(3, 2)
    found = {}
    for order in ("current", "paper"):
        boundary = boundary_of(PaillierBoundary, weight, bits=1024, order=order)
        step = Step(0, "train", torch.arange(5), torch.tensor([0, 1, 0, 1, 1]), rate=0.1)
        h = torch.linspace(0, 1, 15).reshape(5, 3)
        boundary.forward(h, step)
        g = torch.tensor([[0.1, -0.2]]).repeat(5, 1)
        found[order] = boundary.backward(g, step)
    decayed = weight - 0.1 * (h.T @ g + SGD.weight_decay * weight)
    torch.testing.assert_close(found["current"], g @ weight.T, rtol=0, atol=1e-6)
    torch.testing.assert_close(found["paper"], g @ decayed.T, rtol=0, atol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("defense", [SEALED, PAILLIER], ids=["sealed", "paillier"])
def test_stored_shares_are_taken_up_again(defense, tmp_path):
    trained, logits = train([defense])
    save_states(trained.federation, tmp_path)
    federation = make_toy_federation(rows=150, columns=4)
    federation.active.defenses = (defense,)
    method = FedSplitNN(SGD, MODEL)
    method.build(federation)
    load_states(federation, tmp_path)
    torch.testing.assert_close(method.predict(federation, "test"), logits, rtol=0, atol=1e-6)


def test_a_defense_on_gradients_noises_what_the_passive_party_learns_and_not_the_weights():
    federation = make_toy_federation(rows=150, columns=4)
    heard = []
    boundaries = []
    for defenses in ([], [IsotropicNoise(1.0)]):
        federation.active.defenses = tuple(defenses)
        boundary = PlainMaskedBoundary(federation.passive[0], federation.active)
        boundary.join(torch.ones(3, 2), TrainSpec(optimizer="sgd"))
        step = Step(0, "train", torch.arange(5), torch.tensor([0, 1, 0, 1, 1]), rate=0.1)
        h = torch.linspace(0, 1, 15).reshape(5, 3)
        boundary.forward(h, step)
        g = torch.tensor([[0.2, -0.2]]).repeat(5, 1)
        heard.append(boundary.backward(g, step))
        boundaries.append(sum(share.weight for share in boundary.shares.values()))
    torch.testing.assert_close(heard[0], g @ torch.ones(2, 3))
    assert not torch.allclose(heard[1], heard[0])
    torch.testing.assert_close(boundaries[0], boundaries[1])
    torch.testing.assert_close(boundaries[0], torch.ones(3, 2, dtype=torch.float64) - 0.1 * (h.T @ g).double())


@pytest.mark.sampled
@pytest.mark.parametrize("backend", [{"backend": "plain"}, {"bits": 1024, "delta": "outer"}], ids=["plain", "paillier"])
def test_noise_on_every_coordinate_stops_rank_one_and_the_weights_stay_clean(backend):
    found = []
    for noise in (0.0, 1.0):
        federation = make_toy_federation(rows=150, columns=4)
        protocol, options = EncryptedBoundary(noise=noise, **backend).protocol()
        boundary = protocol(federation.passive[0], federation.active, **options)
        boundary.join(torch.ones(3, 1), TrainSpec(optimizer="sgd"))
        step = Step(0, "train", torch.arange(64), torch.arange(64) % 2, rate=0.1)
        h = torch.linspace(0, 1, 192).reshape(64, 3)
        boundary.forward(h, step)
        g = torch.where(torch.arange(64) % 2 == 0, 0.5, -0.5)[:, None] / 64
        found.append(boundary.backward(g, step))
        after = boundary.forward(torch.eye(3), Step(1, "predict", torch.arange(3)))
        torch.testing.assert_close(after, 1 - 0.1 * (h.T @ g), rtol=0, atol=1e-6)
    exact, noised = found
    torch.testing.assert_close(exact, g @ torch.ones(1, 3), rtol=1e-4, atol=1e-7)
    assert ((noised - exact) * 64).std() == pytest.approx(0.5, rel=0.15)
    assert torch.linalg.matrix_rank(exact.double(), rtol=1e-3) == 1
    assert torch.linalg.matrix_rank(noised.double(), rtol=1e-3) == 3


@pytest.mark.parametrize(
    ("backend", "options"), [(PlainMaskedBoundary, {}), (PaillierBoundary, {"bits": 1024, "feature_bits": 0})]
)
def test_the_passive_party_noises_every_score(backend, options):
    """In training and in prediction, with the deviation that is asked for; without, scores are exact."""
    found = {}
    for score_noise in (0.0, 0.5):
        boundary = boundary_of(backend, torch.ones(3, 2), score_noise=score_noise, **options)
        h = torch.linspace(0, 1, 450).reshape(150, 3)
        for phase in ("train", "predict"):
            z = torch.cat(
                [boundary.forward(h[i : i + 30], Step(0, phase, torch.arange(30))) for i in range(0, 150, 30)]
            )
            found[score_noise, phase] = (z - h @ torch.ones(3, 2)).ravel().numpy()
    for phase in ("train", "predict"):
        assert np.abs(found[0.0, phase]).max() < 1e-5
        assert kstest(found[0.5, phase], norm(scale=0.5).cdf).pvalue > 1e-3
    assert abs(np.corrcoef(found[0.5, "train"], found[0.5, "predict"])[0, 1]) < 0.3


@pytest.mark.parametrize("defense", [{"backend": "plain"}, {"bits": 1024}], ids=["plain", "paillier"])
def test_more_passes_than_the_passive_party_answers_are_refused_before_training(defense):
    trained, _ = train([EncryptedBoundary(max_passes=SGD.epochs, **defense)])
    assert len(trained.history["train"]) == SGD.epochs
    with pytest.raises(UsageError, match="max_passes = 3 .*training .*takes 4"):
        train([EncryptedBoundary(max_passes=3, **defense)])
    watched = TrainSpec(epochs=4, batch=32, optimizer="sgd", select="paper_best_on_test")
    with pytest.raises(UsageError, match="max_passes = 4 .*test .*takes 5"):
        train([EncryptedBoundary(max_passes=4, **defense)], spec=watched)


def test_the_passive_party_answers_no_pass_too_many():
    boundary = boundary_of(PlainMaskedBoundary, torch.ones(3, 2), max_passes=2)
    seen = torch.ones(5, 3)
    for _ in range(2):
        boundary.forward(seen, Step(0, "train", torch.arange(5)))
    boundary.forward(seen, Step(0, "predict", torch.arange(5), split="test"))  # other samples
    boundary.forward(seen, Step(0, "train", torch.arange(5, 10)))
    with pytest.raises(UsageError, match="max_passes = 2 .*train samples"):
        boundary.forward(seen, Step(0, "train", torch.arange(4, 9)))


def test_every_setting_of_the_cipher_is_an_option_of_defense_and_protocols():
    fields = {field.name: field.default for field in msgspec.structs.fields(CipherSpec)}
    for kind, name in (("defenses", "phe"), ("protocols", "paillier"), ("protocols", "masked-plain")):
        found = inspect.signature(registry.load(kind, name).__init__).parameters
        assert {key: found[key].default for key in fields} == fields
    protocol, options = registry.build("defenses", "phe", feature_bits=6, delta_bits=2).protocol()
    federation = make_toy_federation(rows=150, columns=4)
    boundary = protocol(federation.passive[0], federation.active, **options)
    boundary.join(torch.ones(3, 2), SGD)
    assert (boundary.layout.feature_bits, boundary.layout.delta_bits) == (6, 2)
    for wrong, said in (
        ({"mode": "short"}, "'short'. Known: standard, subgroup"),
        ({"feature_bit": 6}, "Did you mean feature_bits"),
    ):
        with pytest.raises(UsageError, match=said):
            registry.build("defenses", "phe", **wrong)
    with pytest.raises(UsageError, match="expected 0 <= feature_bits <= 16, got 17"):
        registry.build("defenses", "phe", feature_bits=17)


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_row_at_rest_is_checked_before_anything_is_sent(split):
    """The error names the column and the value to set, and with that value training runs."""
    for feature_bits in (4, 7):
        federation, sent = make_toy_federation(rows=150, columns=4), []
        federation.passive[0].features[split][3, 1] = -99.0
        federation.active.defenses = (EncryptedBoundary(bits=1024, feature_bits=feature_bits),)
        federation.channel.taps.append(sent.append)
        method = VerticalLogisticRegression(TrainSpec(epochs=1, batch=50, optimizer="sgd", lr=0.01), ModelSpec())
        if feature_bits == 4:
            with pytest.raises(UsageError, match="99 in column passive_1_x1; .*feature_bits = 7$"):
                method.fit(federation)
            assert sent == []
        else:
            assert method.fit(federation).predict("test").isfinite().all()


def test_a_row_left_over_that_joins_the_last_batch_has_room():
    rows = len(make_toy_federation(rows=150, columns=4).active.labels["train"])
    trained, _ = train([PAILLIER], spec=TrainSpec(epochs=1, batch=rows - 1, lr=0.1, optimizer="sgd"))
    assert trained.history["train"]


def test_noise_on_every_coordinate_needs_every_row():
    with pytest.raises(UsageError, match="delta=outer"):
        train([EncryptedBoundary(noise=1.0)])


def test_noise_on_gradients_has_room_under_encryption():
    trained, _ = train([PAILLIER, IsotropicNoise(25.0)], spec=TrainSpec(epochs=1, batch=32, optimizer="sgd", lr=1e-3))
    assert trained.history["train"]


def test_a_defense_on_embeddings_noises_what_enters_the_encryption():
    federation = make_toy_federation(rows=150, columns=4)
    federation.passive[0].defenses = (IsotropicNoise(1.0, at=["embedding"]),)
    boundary = PlainMaskedBoundary(federation.passive[0], federation.active)
    boundary.join(torch.ones(3, 2), SGD)
    assert not torch.allclose(
        boundary.forward(torch.ones(4, 3), Step(0, "train", torch.arange(4))), torch.full((4, 2), 3.0)
    )


def test_more_rows_than_a_batch_take_several_exchanges():
    federation, heard = make_toy_federation(rows=150, columns=4), []
    federation.channel.taps.append(heard.append)
    boundary = PlainMaskedBoundary(federation.passive[0], federation.active)
    boundary.join(torch.ones(3, 2), SGD)
    z = boundary.forward(torch.ones(70, 3), Step(0, "predict", torch.arange(70)))
    torch.testing.assert_close(z, torch.full((70, 2), 3.0))
    assert [len(message.rows) for message in heard] == [*[33] * 6, *[4] * 3, 70]


def test_sealed_numbers_are_read_with_the_key_alone():
    key = object()
    sealed = Sealed(torch.ones(2, 3).numpy(), key).dot(torch.ones(3, 1).numpy()).add(1)
    assert sealed.open(key).tolist() == [[4.0], [4.0]]
    with pytest.raises(PermissionError, match="key"):
        sealed.open(object())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"spec": TrainSpec()}, "optimizer"),
        ({"spec": TrainSpec(optimizer="sgd", clip=1.0)}, "clip"),
        ({"spec": TrainSpec(optimizer="sgd", local_steps=4)}, "local_steps"),
        ({"model": ModelSpec(head="mlp")}, "linear head"),
        ({"model": ModelSpec(aggregation="sum")}, "linear head"),
        ({"method": FedCVT}, "linear head"),
        ({"method": SSVFLIndependent}, "linear head"),
    ],
)
def test_what_shares_cannot_follow_is_refused_before_training(settings, words):
    with pytest.raises(UsageError, match=words):
        train([SEALED], **settings)


def test_a_defense_of_updates_would_not_reach_the_shares():
    with pytest.raises(UsageError, match="dp-sgd"):
        train([SEALED, DPSGD(1.0)])


def test_the_rest_of_a_linear_head_and_its_parts_make_the_whole():
    top = Top([2, 3, 4], 2, aggregation="concat", head="linear", hidden=0)
    h = [torch.rand(5, width) for width in (2, 3, 4)]
    parts = [h[1] @ top.head.weight[:, 2:5].T, h[2] @ top.head.weight[:, 5:].T]
    torch.testing.assert_close(SharedTop(top, 2)([h[0], *parts]), top(h))


@pytest.mark.parametrize("strength", [0.5, 2.0])
def test_encryption_has_no_strength(strength):
    with pytest.raises(UsageError, match="on or off"):
        EncryptedBoundary(strength)


def test_defenses_that_add_to_the_loss_get_the_room_they_need():
    """A penalty can make the gradient of a sample larger than cross-entropy does, noise much larger."""
    federation = make_toy_federation(rows=150, columns=4)
    room = []
    for defenses in ([PAILLIER], [PAILLIER, LabelDP(1.0)], [PAILLIER, IsotropicNoise(1.0)]):
        federation.active.defenses = tuple(defenses)
        room.append(PaillierBoundary(federation.passive[0], federation.active).delta_bits)
    assert room == [0, 4, 10]
