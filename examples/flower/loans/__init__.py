"""A Flower app: a bank trains a split network with a bureau and a shop."""
