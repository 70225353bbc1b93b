"""Building blocks of networks: encoders, heads and batches."""
