"""Audits of recordings: what a role of a protocol can read out of its own messages."""
