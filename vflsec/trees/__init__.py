"""Building blocks of trees: bins of columns, choices of splits, and ensembles of which each party holds its part."""
