"""Protocols: what parties say to each other so that something stays secret. One file each."""

CATALOGUE = {
    "plain": "vflsec.protocols.plain:PlainBoundary",
}
