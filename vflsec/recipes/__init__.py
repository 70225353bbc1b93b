"""Recipes: the tables of papers as settings, with the values that the papers print. One TOML file each."""
