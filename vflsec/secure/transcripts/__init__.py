"""Recordings of what a role saw, and audits of what it can read out of them."""
