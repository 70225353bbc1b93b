"""Losses of self-supervised learning, one per file; all read directions only, so rows of any length will do."""
