"""Attacks: each turns what an adversary saw into a guess. One file each."""

CATALOGUE = {
    "logistic": "vflsec.attacks.logistic:LogisticRegression",
    "mc": "vflsec.attacks.model_completion:ModelCompletion",
}
