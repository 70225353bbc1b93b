"""The wire: no graph, no shared memory, exact bytes, and a transcript of one's own messages only."""

import pytest
import torch

from vflsec.core.message import Channel, Kind, Message, ReleaseCount, Route, Transcript


def message(value, *, kind=Kind.EMBEDDING, sender="passive_1", receiver="active", rows=None):
    return Message(kind, sender, receiver, 0, "train", {"value": value}, rows)


def test_what_arrives_has_no_graph_and_shares_no_memory():
    weight = torch.ones(2, 3, requires_grad=True)
    sent = weight * 2
    arrived = Channel().deliver(message(sent)).payload["value"]
    assert not arrived.requires_grad
    assert torch.equal(arrived, sent)
    arrived.zero_()
    assert (sent == 2).all()


def test_rows_are_copied_too():
    rows = torch.arange(3)
    Channel().deliver(message(torch.ones(3, 1), rows=rows)).rows.zero_()
    assert rows.tolist() == [0, 1, 2]


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.float64, 8), (torch.int64, 8), (torch.int8, 1)])
def test_bytes_are_those_of_the_payload(dtype, size):
    assert message(torch.zeros(5, 7, dtype=dtype)).nbytes == 5 * 7 * size


def test_an_object_says_its_own_size():
    class Ciphertext:
        nbytes = 512

    channel = Channel()
    sent = Ciphertext()
    assert channel.deliver(message(sent, kind=Kind.CIPHERTEXT)).payload["value"] is sent
    assert channel.traffic.total() == 512


def test_traffic_adds_up_by_route():
    channel = Channel()
    for _ in range(3):
        channel.deliver(message(torch.zeros(2, 4)))
    channel.deliver(message(torch.zeros(2, 4), kind=Kind.GRADIENT, sender="active", receiver="passive_1"))
    assert channel.traffic == {
        Route("train", "passive_1", "active", Kind.EMBEDDING): 96,
        Route("train", "active", "passive_1", Kind.GRADIENT): 32,
    }


@pytest.mark.parametrize(
    ("parties", "kept"),
    [({"passive_1"}, ["a", "b"]), ({"passive_2"}, ["c"]), ({"active"}, ["a", "b", "c"]), ({"passive_3"}, [])],
)
def test_a_transcript_keeps_only_what_its_party_took_part_in(parties, kept):
    channel, transcript = Channel(), Transcript(frozenset(parties), frozenset(Kind))
    channel.taps.append(transcript)
    for name, sender, receiver in (
        ("a", "passive_1", "active"),
        ("b", "active", "passive_1"),
        ("c", "passive_2", "active"),
    ):
        channel.deliver(Message(Kind.CONTROL, sender, receiver, 0, "train", {name: torch.zeros(1)}))
    assert [key for heard in transcript.messages for key in heard.payload] == kept


def test_a_transcript_keeps_only_the_kinds_it_is_for():
    transcript = Transcript(frozenset({"active"}), frozenset({Kind.GRADIENT}))
    transcript(message(torch.zeros(1)))
    transcript(message(torch.zeros(1), kind=Kind.GRADIENT))
    assert [heard.kind for heard in transcript.messages] == [Kind.GRADIENT]


def test_the_wire_counts_how_often_each_row_has_crossed():
    channel = Channel()
    for rows in ([0, 1], [1, 7], [1]):
        value = torch.ones(len(rows), 2)
        channel.deliver(Message(Kind.EMBEDDING, "a", "b", 0, "train", {"h": value}, torch.tensor(rows)))
    with channel.mute():
        channel.deliver(Message(Kind.EMBEDDING, "a", "b", 0, "train", {"h": torch.ones(1, 2)}, torch.tensor([1])))
    channel.deliver(Message(Kind.EMBEDDING, "a", "b", 0, "predict", {"h": torch.ones(1, 2)}, torch.tensor([1]), "test"))
    channel.deliver(Message(Kind.PARAMETERS, "a", "b", 0, "train", {"w": torch.ones(2)}))
    assert channel.releases() == [
        ReleaseCount("train", "a", "b", Kind.EMBEDDING, "train", most=3, total=5),
        ReleaseCount("predict", "a", "b", Kind.EMBEDDING, "test", most=1, total=1),
    ]
