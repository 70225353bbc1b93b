"""Loaders of the papers' data that cannot be bundled: each reads the user's own copy, and has its card beside it."""
