"""Transcripts of systems that others trained: their format, and a recorder for PyTorch."""
