"""Conformance suites and toy federations, shipped for authors of plug-ins."""
