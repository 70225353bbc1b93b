"""Protocols: messages between parties that keep something secret. One file each."""

CATALOGUE = {
    "histograms-masked": "vflsec.protocols.histograms_masked:MaskedHistograms",
    "histograms-paillier": "vflsec.protocols.histograms_paillier:PaillierHistograms",
    "histograms-plain": "vflsec.protocols.histograms_plain:PlainHistograms",
    "masked-plain": "vflsec.protocols.masked_plain:PlainMaskedBoundary",
    "model-average": "vflsec.protocols.model_average:ModelAverage",
    "paillier": "vflsec.protocols.paillier:PaillierBoundary",
    "plain": "vflsec.protocols.plain:PlainBoundary",
    "sealed-bfv": "vflsec.protocols.sealed_bfv:EncryptedSums",
    "sealed-plain": "vflsec.protocols.sealed_plain:SealedSums",
    "secure-average": "vflsec.protocols.secure_average:SecureAverage",
}
