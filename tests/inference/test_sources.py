"""Tables of what a view holds: of many rare categories, only those that occur in known rows."""

import torch

from vflsec.base.sparse_rows import SparseRows
from vflsec.core.view import View
from vflsec.inference.sources import COLUMNS, list_sources


def test_categories_that_no_row_of_the_known_split_has_are_left_out():
    train, test = torch.tensor([[0, 5], [2, 5], [2, 7]]), torch.tensor([[1, 5], [2, 9]])
    rows = {split: SparseRows(torch.ones(x.shape), x, 2000) for split, x in (("train", train), ("test", test))}
    view = View("passive_1", "passive", 2, rows, None, torch.arange(1), torch.tensor([1]))
    table = list_sources(view)[COLUMNS].table
    assert table["train"].tolist() == [[1, 0, 1, 0], [0, 1, 1, 0], [0, 1, 0, 1]]  # columns 0, 2, 5 and 7
    assert table["test"].tolist() == [[0, 0, 1, 0], [0, 1, 0, 0]]
