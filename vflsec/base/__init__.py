"""Errors, checks, files and seeds, which every part of the package uses."""
