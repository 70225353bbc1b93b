"""Learning algorithms, one per file; the members of a family are presets of one class."""

from vflsec.core.registry import Preset, make_preset

_SSL = {"simsiam": "SimSiam", "byol": "BYOL", "moco": "MoCo"}
_FEDHSSL = "He et al. 2022 (FedHSSL), arXiv 2208.08934"
_VFLHLP = "Li et al. 2024 (VFLHLP), arXiv 2405.11884, section 5.4"
_SECUREBOOST = "Cheng et al. 2021 (SecureBoost), arXiv 1901.08755"
_PRADA = "Kang et al. 2022 (PrADA), section 8.1"


def _make_fedhssl(doc: str, reference: str, family: str, **steps: bool | None) -> dict[str, Preset]:
    """Return one row of the FedHSSL family for each self-supervised method."""
    return {
        f"{family}-{ssl}": make_preset(
            "vflsec.methods.fedhssl:FedHSSL",
            doc.format(title),
            ssl=ssl,
            reference=f"{_FEDHSSL}, {reference}",
            **steps,
        )
        for ssl, title in _SSL.items()
    }


CATALOGUE: dict[str, str | Preset] = {
    "fedsplitnn": "vflsec.methods.fedsplitnn:FedSplitNN",
    "local": "vflsec.methods.local:Local",
    "lr": "vflsec.methods.pooled:PooledLogisticRegression",
    "lightgbm": "vflsec.methods.pooled:PooledLightGBM",
    **_make_fedhssl(
        "{} by each party alone on all its rows, then split learning.\n\n"
        "Pre-training sends nothing, unless ``pma`` has a server average the local top encoders. Covers the idea of\n"
        "SS-VFL with the self-supervised methods of FedHSSL, which has it as a baseline.",
        "section V-A, baseline FedLocalSSL; table V",
        "fedlocal",
        cross=False,
        pma=False,
    ),
    **_make_fedhssl(
        "{} across parties on aligned rows, then split learning.\n\n"
        "Covers VFed-SSD. SimSiam and BYOL are the same here: across parties, the authors' code has one loss for both\n"
        "and no moving average.",
        "algorithm 1, step 1 (FedCSSL; VFed-SSD)",
        "fedcssl",
        local=False,
        pma=None,
    ),
    **_make_fedhssl(
        "{} guided across parties, then split learning.",
        "algorithm 1, steps 1 and 2; table V",
        "fedgssl",
        pma=None,
    ),
    **_make_fedhssl(
        "{} across parties, guided locally, with averaged top encoders; then split learning.", "algorithm 1", "fedhssl"
    ),
    "fedcvt": "vflsec.methods.fedcvt:FedCVT",
    "ss-vfl-i": "vflsec.methods.ss_vfl:SSVFLIndependent",
    "ss-vfl-c": "vflsec.methods.ss_vfl:SSVFLCoupled",
    "vertical-lr": "vflsec.methods.feature_group_method:VerticalLogisticRegression",
    "prada": "vflsec.methods.prada:PrADA",
    "prada-no-ir": make_preset(
        "vflsec.methods.prada:PrADA",
        "PrADA without interactions: feature groups alone, and no pairs of them.",
        reference=f"{_PRADA}, PrADA w/o IR",
        interacting=False,
    ),
    "prada-no-fg-ir": make_preset(
        "vflsec.methods.prada:PrADA",
        "PrADA without feature groups: one extractor of all columns, four numbers, and one discriminator of its own "
        "shape.",
        reference=f"{_PRADA}, PrADA w/o FG&IR",
        grouped=False,
    ),
    "prada-no-da-fg-ir": make_preset(
        "vflsec.methods.feature_group_method:FeatureGroupMethod",
        "PrADA without domain adaptation, feature groups and interactions: split learning of one extractor from "
        "scratch.\n\n"
        "On the active party's rows it is the paper's A-VFL; with the source's rows among them (``--set\n"
        "data.options.source=merged`` of census-domains) its AB-VFL.",
        reference=f"{_PRADA}, PrADA w/o DA&FG&IR",
        grouped=False,
    ),
    "secureboost": "vflsec.methods.secureboost:SecureBoost",
    "secureboost-rl": make_preset(
        "vflsec.methods.secureboost:SecureBoost",
        "SecureBoost whose first tree the active party grows alone: Reduced-Leakage, or completely secure.",
        reference=f"{_SECUREBOOST}; in FATE complete_secure",
        alone=1,
    ),
    "secureboost-turns": make_preset(
        "vflsec.methods.secureboost:SecureBoost",
        "SecureBoost whose trees use the columns of one party each, in turn: the mix mode of SecureBoost+.",
        reference="Chen et al. 2021 (SecureBoost+), arXiv 2110.10927, mix tree mode",
        order="turns",
    ),
    "secureboost-layers": make_preset(
        "vflsec.methods.secureboost:SecureBoost",
        "SecureBoost whose upper levels use the columns of passive parties, and whose lower ones the active party's.",
        reference="Chen et al. 2021 (SecureBoost+), arXiv 2110.10927, layered tree mode",
        order="layers",
    ),
    "vflhlp": "vflsec.methods.vflhlp:VFLHLP",
    "vflhlp-a": make_preset(
        "vflsec.methods.vflhlp:VFLHLP",
        "VFLHLP-A: the constraint alone; passive parties start at random, as in FedSplitNN.",
        reference=f"{_VFLHLP}, VFLHLP-A",
        initializes=False,
    ),
    "vflhlp-p": make_preset(
        "vflsec.methods.vflhlp:VFLHLP",
        "VFLHLP-P: initialization of the passive parties alone, which they could do by themselves; no constraint.",
        reference=f"{_VFLHLP}, VFLHLP-P",
        constrains=False,
    ),
}
