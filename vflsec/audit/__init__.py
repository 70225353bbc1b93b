"""Audits of what somebody else made: recordings of a protocol."""
