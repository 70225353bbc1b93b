"""Defenses: each changes what leaves a party. One file each."""

CATALOGUE = {
    "iso": "vflsec.defenses.iso:IsotropicNoise",
    "marvell": "vflsec.defenses.marvell:Marvell",
    "max-norm": "vflsec.defenses.max_norm:MaxNorm",
    "perp": "vflsec.defenses.perp:PerpendicularNoise",
    "compress": "vflsec.defenses.compress:Compression",
    "discrete": "vflsec.defenses.discrete:Discretization",
    "sign": "vflsec.defenses.sign:SignOnly",
    "ppdl": "vflsec.defenses.ppdl:SparseVector",
    "average": "vflsec.defenses.average:GroupAverage",
    "dcor": "vflsec.defenses.dcor:DistanceCorrelation",
    "mid": "vflsec.defenses.mid:InformationBottleneck",
    "coae": "vflsec.defenses.coae:ConfusionalAutoencoder",
    "kd-k": "vflsec.defenses.kd_k:DistilledGroups",
    "mixup": "vflsec.defenses.mixup:Mixup",
    "fedpass": "vflsec.defenses.fedpass:Passports",
    "gaussian-dp": "vflsec.defenses.gaussian_dp:GaussianDP",
    "laplace-dp": "vflsec.defenses.laplace_dp:LaplaceDP",
    "dp-sgd": "vflsec.defenses.dp_sgd:DPSGD",
    "label-dp": "vflsec.defenses.label_dp:LabelDP",
    "phe": "vflsec.defenses.phe:EncryptedBoundary",
}
