"""The one road out: defenses in the order given, at their kinds only, knowing what the sender knows."""

import pytest
import torch

from vflsec.core.defense import Defense
from vflsec.core.message import Kind


class Footprint(Defense):
    """Writes its letter to a shared list, and passes everything on."""

    name = "footprint"
    reference = guarantee = "made for a test"
    points = (Kind.GRADIENT, Kind.EMBEDDING, Kind.PARAMETERS)

    def __init__(self, letter, trail, *, strength=1.0, at=None):
        super().__init__(strength, at=at or [point.value for point in self.points])
        self.letter, self.trail = letter, trail

    def on_gradient(self, g, release):
        self.trail.append((self.letter, release))
        return g

    on_embedding = on_parameters = on_gradient


@pytest.fixture
def trail():
    return []


def send(party, kind=Kind.EMBEDDING, payload=None, **options):
    payload = {"value": torch.ones(2, 3)} if payload is None else payload
    return party.send(kind, payload, to="other", step=4, phase="train", **options)


@pytest.mark.parametrize("letters", ["ab", "ba", "cab"])
def test_defenses_run_in_the_order_given(federation, trail, letters):
    party = federation.active
    party.defenses = [Footprint(letter, trail) for letter in letters]
    send(party)
    assert "".join(letter for letter, _ in trail) == letters


def test_the_second_defense_gets_what_the_first_returns(federation):
    class Double(Footprint):
        def on_embedding(self, h, release):
            return h * 2

    class AddOne(Footprint):
        def on_embedding(self, h, release):
            return h + 1

    federation.active.defenses = [Double("d", []), AddOne("a", [])]
    assert (send(federation.active).payload["value"] == 3).all()


def test_a_defense_that_works_in_place_leaves_what_its_sender_keeps(federation):
    class InPlace(Footprint):
        def on_embedding(self, h, release):
            return h.mul_(0)

    kept = torch.ones(2, 3)
    federation.active.defenses = [InPlace("i", [])]
    assert (send(federation.active, payload={"value": kept}).payload["value"] == 0).all()
    assert (kept == 1).all()


@pytest.mark.parametrize("kind", list(Kind))
def test_a_defense_acts_at_its_own_kinds_only(federation, trail, kind):
    federation.active.defenses = [Footprint("g", trail, at=["gradient"]), Footprint("e", trail, at=["embedding"])]
    send(federation.active, kind)
    assert [letter for letter, _ in trail] == {Kind.GRADIENT: ["g"], Kind.EMBEDDING: ["e"]}.get(kind, [])


def test_strength_zero_is_not_even_called(federation, trail):
    federation.active.defenses = [Footprint("a", trail, strength=0.0)]
    sent = torch.tensor([[float("nan"), -0.0]])
    received = send(federation.active, payload={"value": sent}).payload["value"]
    assert not trail
    assert received.numpy().tobytes() == sent.numpy().tobytes()


def test_the_release_tells_what_the_sender_knows(federation, trail):
    federation.active.defenses = [Footprint("a", trail)]
    rows, labels = torch.tensor([3, 1]), torch.tensor([0, 1])
    send(federation.active, Kind.GRADIENT, rows=rows, labels=labels)
    release = trail[0][1]
    assert (release.sender, release.receiver, release.kind) == ("active", "other", Kind.GRADIENT)
    assert (release.step, release.phase, release.key) == (4, "train", "value")
    assert release.rows is rows
    assert release.labels is labels


def test_labels_are_for_their_owner_only(federation):
    with pytest.raises(AssertionError, match="passive_1 owns no labels"):
        send(federation.passive[0], labels=torch.zeros(2))


def test_each_tensor_of_the_payload_is_a_release_of_its_own(federation, trail):
    federation.active.defenses = [Footprint("a", trail)]
    send(federation.active, Kind.PARAMETERS, {"weight": torch.ones(2, 2), "bias": torch.ones(2)})
    assert [release.key for _, release in trail] == ["weight", "bias"]


def test_a_defense_sees_no_graph(federation):
    class Curious(Footprint):
        def on_embedding(self, h, release):
            assert not h.requires_grad
            return h

    federation.active.defenses = [Curious("c", [])]
    send(federation.active, payload={"value": torch.ones(2, 3, requires_grad=True)})


def test_a_change_of_shape_is_caught(federation):
    class Narrow(Footprint):
        def on_embedding(self, h, release):
            return h[:, :1]

    federation.active.defenses = [Narrow("n", [])]
    with pytest.raises(AssertionError, match=r"shape of .*\[2, 3\].*\[2, 1\]"):
        send(federation.active)


def test_repr_shows_role_and_no_data(federation):
    assert repr(federation.active) == "Party('active', active, defenses=[])"
    assert repr(federation.passive[0]) == "Party('passive_1', passive, defenses=[])"
    assert federation.passive[0].n_features == 3
