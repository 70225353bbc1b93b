"""Recipes and studies: tables and claims of papers as settings, and what is measured of them. A guest."""
