"""Learning algorithms, one per file."""

CATALOGUE = {
    "fedsplitnn": "vflsec.methods.fedsplitnn:FedSplitNN",
}
