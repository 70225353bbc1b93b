"""A queue of keys: order, wrap-around, contents."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vflsec.base.errors import UsageError
from vflsec.nn.losses import info_nce
from vflsec.nn.siamese import Queue


def directions(*angles):
    """Rows of length 1 + angle at these angles, and the same of length one."""
    angle = torch.tensor(angles)
    rows = torch.stack([angle.cos(), angle.sin()], dim=1)
    return rows * (1 + angle[:, None]), rows


def test_it_starts_with_random_directions_of_the_global_stream():
    torch.manual_seed(3)
    queue = Queue(200, 4)
    torch.manual_seed(3)
    torch.testing.assert_close(queue.keys, torch.nn.functional.normalize(torch.randn(200, 4), dim=1))
    assert queue.pointer == 0
    assert not torch.equal(queue.keys, Queue(200, 4).keys)
    assert not list(queue.parameters())


def test_first_in_first_out_with_wrap_around():
    queue = Queue(5, 2)
    start = queue.keys.clone()
    rows, keys = directions(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
    queue.enqueue(rows[:3])
    torch.testing.assert_close(queue.keys, torch.cat([keys[:3], start[3:]]))
    assert queue.pointer == 3
    queue.enqueue(rows[3:7])  # two fit, two go to the front
    torch.testing.assert_close(queue.keys, keys[[5, 6, 2, 3, 4]])
    assert queue.pointer == 2


def test_a_batch_as_large_as_the_queue_replaces_all():
    queue = Queue(3, 2)
    rows, keys = directions(0.1, 0.2, 0.3)
    queue.enqueue(rows)
    torch.testing.assert_close(queue.keys, keys)
    assert queue.pointer == 0


def test_of_a_larger_batch_the_last_rows_stay():
    queue = Queue(3, 2)
    rows, keys = directions(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
    queue.enqueue(rows)
    torch.testing.assert_close(queue.keys, keys[[6, 4, 5]])
    assert queue.pointer == 1


@given(st.integers(1, 6), st.lists(st.integers(0, 14), max_size=6), st.integers(0, 99))
@settings(max_examples=50)
def test_batches_are_as_good_as_one_key_at_a_time(size, batches, seed):
    torch.manual_seed(seed)
    queue = Queue(size, 3)
    naive, at = list(queue.keys.clone()), 0
    for n in batches:
        rows = torch.randn(n, 3)
        queue.enqueue(rows)
        for row in rows:
            naive[at] = row / row.norm()
            at = (at + 1) % size
    torch.testing.assert_close(queue.keys, torch.stack(naive))
    assert queue.pointer == at


def test_keys_carry_no_graph_and_share_no_memory():
    queue = Queue(4, 2)
    rows = torch.tensor([[0.0, 2.0], [2.0, 0.0]], requires_grad=True)
    queue.enqueue(rows)
    assert not queue.keys.requires_grad
    with torch.no_grad():
        rows.fill_(7)
    assert queue.keys[:2].tolist() == [[0, 1], [1, 0]]


def test_a_loss_can_go_back_after_its_negatives_were_replaced():
    queue, p = Queue(4, 2), torch.randn(3, 2, requires_grad=True)
    loss = info_nce(p, torch.randn(3, 2), queue.keys, 0.5)
    expected = torch.autograd.grad(loss, p, retain_graph=True)[0]
    queue.enqueue(torch.randn(4, 2))
    assert torch.equal(torch.autograd.grad(loss, p)[0], expected)


def test_the_state_goes_on_where_it_was():
    queue, other = Queue(5, 2), Queue(5, 2)
    queue.enqueue(directions(0.1, 0.2, 0.3)[0])
    other.load_state_dict(queue.state_dict())
    for each in (queue, other):
        each.enqueue(directions(0.4, 0.5, 0.6)[0])
    assert torch.equal(other.keys, queue.keys)
    assert other.pointer == queue.pointer == 1


def test_an_empty_queue_is_refused():
    with pytest.raises(UsageError, match="expected queue > 0, got 0"):
        Queue(0, 3)
