"""Building blocks of networks."""
