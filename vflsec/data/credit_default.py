"""Default of Credit Card Clients (UCI): 30,000 clients of a bank, who will fail to pay next month's bill?"""

import pandas as pd

from vflsec.base.checks import expect_known
from vflsec.data import bundle
from vflsec.data.dataset import VerticalDataset

NAME = "credit-default"
CLASSES = ("paid", "default")

BILLS = [f"BILL_AMT{month}" for month in range(1, 7)]
PAYMENTS = [f"PAY_AMT{month}" for month in range(1, 7)]
# The source has no PAY_1: PAY_0 is the month before PAY_2.
LATENESS = ["PAY_0", "PAY_2", "PAY_3", "PAY_4", "PAY_5", "PAY_6"]
CLIENT = ["LIMIT_BAL", "SEX", "EDUCATION", "MARRIAGE", "AGE"]

SPLITS = {
    "fate": {"active": ["PAY_6", *BILLS, *PAYMENTS], "passive_1": [*CLIENT, *LATENESS[:-1]]},
    "bureau": {"active": [*CLIENT, *BILLS], "passive_1": [*LATENESS, *PAYMENTS]},
}
CATEGORICAL = ["SEX", "EDUCATION", "MARRIAGE"]
MONEY = ["LIMIT_BAL", *BILLS, *PAYMENTS]


def load(*, split: str = "fate") -> VerticalDataset:
    """Clients of a bank, who fails to pay the next credit card bill? 30,000 rows, 2 parties.

    Args:
        split: ``fate``, the columns of FATE's example files in their order, with FATE's guest as active party
            (13 columns) and its host as passive party (10); or ``bureau``, a bank (11 columns) whose own columns
            hardly predict the label and a credit bureau (12) whose columns do.

    Raises:
        UsageError: an unknown ``split``.
    """
    expect_known(SPLITS, split=split)
    columns = bundle.read_arrays(NAME)
    ids = pd.Index(columns.pop("ID"), name="id", dtype="int64")
    labels = pd.Series(columns.pop("default-payment-next-month"), index=ids, name="label", dtype="int64")
    table = pd.DataFrame(columns, index=ids)
    parties = tuple(
        bundle.make_table(NAME, party, table[held], CATEGORICAL, MONEY) for party, held in SPLITS[split].items()
    )
    return VerticalDataset(NAME, parties, labels, CLASSES, card=bundle.get_card(NAME))
