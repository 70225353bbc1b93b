"""Attacks: each turns what an adversary saw into a guess. One file each."""

CATALOGUE = {
    "logistic": "vflsec.attacks.logistic:LogisticRegression",
    "mc": "vflsec.attacks.model_completion:ModelCompletion",
    "active-mc": "vflsec.attacks.active_model_completion:ActiveModelCompletion",
    "rank-one": "vflsec.attacks.rank_one:RankOne",
    "direct": "vflsec.attacks.direct:Direct",
    "norm": "vflsec.attacks.norm:Norm",
    "direction": "vflsec.attacks.direction:Direction",
    "hint": "vflsec.attacks.hint:Hint",
    "spectral": "vflsec.attacks.spectral:Spectral",
    "spectral-embedding": "vflsec.attacks.spectral_embedding:SpectralEmbedding",
    "cluster": "vflsec.attacks.cluster:Cluster",
    "averaging": "vflsec.attacks.averaging:Averaging",
    "replay": "vflsec.attacks.replay:Replay",
    "batch-label": "vflsec.attacks.batch_label:BatchLabel",
    "residual": "vflsec.attacks.residual:Residual",
    "backdoor": "vflsec.attacks.backdoor:Backdoor",
    "missing-feature": "vflsec.attacks.missing_feature:MissingFeature",
    "noisy-sample": "vflsec.attacks.noisy_sample:NoisySample",
    "imputation": "vflsec.attacks.imputation:Imputation",
    "inversion-blackbox": "vflsec.attacks.inversion_blackbox:BlackBoxInversion",
}
