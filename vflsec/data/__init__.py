"""Datasets split by columns: the catalogue, the alignment of ids, and the seeded split into train and test.

Nothing heavy is imported here: a name resolves to its loader when it is used.
"""

CATALOGUE: dict[str, str] = {
    "credit-default": "vflsec.data.credit_default:load",
    "census-income": "vflsec.data.census_income:load",
    "flights": "vflsec.data.flights:load",
    "multiple-features": "vflsec.data.multiple_features:load",
    "digits": "vflsec.data.digits:load",
    "toy": "vflsec.testing.federations:make_toy",
}

__all__ = ["CATALOGUE"]
