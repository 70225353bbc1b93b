"""What attacks share: releases and sources in a view, regressions, directions, convergence."""
