"""Conformance suites and toy worlds, shipped for authors of plug-ins."""
