"""What attacks share: releases and source tables of a view, regressions, directions, convergence."""
