"""Protocols: what parties say to each other so that something stays secret. One file each."""

CATALOGUE = {
    "model-average": "vflsec.protocols.model_average:ModelAverage",
    "plain": "vflsec.protocols.plain:PlainBoundary",
}
