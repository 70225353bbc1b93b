"""Our losses against figures that another implementation gave: lightly 1.5.26, its loss modules run unmodified.

For each (B, d, seed): rng = numpy.random.RandomState(seed); a, b = rng.randn(B, d), rng.randn(B, d) and
negatives = rng.randn(32, d), all float64. Then NegativeCosineSimilarity()(a, b), NTXentLoss(temperature)(a, b), and
NTXentLoss(temperature, memory_bank_size=(32, d))(a, b) with its bank set to the normalized negatives, under torch 2.13.
"""

import numpy as np
import pytest
import torch

from vflsec.nn.losses import info_nce, negative_cosine, nt_xent, regression

COSINE = {(4, 3, 0): -0.425940761668946, (16, 8, 1): -0.141581152162278, (64, 128, 2): 0.005089643779290}

# temperature: (NTXentLoss without a bank, with a bank)
CONTRASTIVE = {
    (4, 3, 0): {
        0.1: (4.358058668555802, 6.085890402068787),
        0.5: (1.984972427590300, 3.225034044622634),
        1.0: (1.902715653592063, 3.231290898612186),
    },
    (16, 8, 1): {
        0.1: (6.109778634120817, 6.126444015384836),
        0.5: (3.412025072361094, 3.446927048743206),
        1.0: (3.366362610868407, 3.414173356327388),
    },
    (64, 128, 2): {
        0.1: (5.256531412626526, 3.933937555297335),
        0.5: (4.866106425435706, 3.524870005311028),
        1.0: (4.851323683318964, 3.506858623722154),
    },
}


def drawn(case, dtype):
    n, d, seed = case
    rng = np.random.RandomState(seed)
    return [torch.from_numpy(rng.randn(count, d)).to(dtype) for count in (n, n, 32)]


precision = pytest.mark.parametrize(("dtype", "rel"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])


@precision
@pytest.mark.parametrize("case", COSINE)
def test_cosine(case, dtype, rel):
    a, b, _ = drawn(case, dtype)
    assert negative_cosine(a, b).item() == pytest.approx(COSINE[case], rel=rel, abs=rel / 10)
    assert regression(a, b).item() == pytest.approx(2 + 2 * COSINE[case], rel=rel)


@precision
@pytest.mark.parametrize("tau", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("case", CONTRASTIVE)
def test_contrastive(case, tau, dtype, rel):
    a, b, negatives = drawn(case, dtype)
    in_batch, with_bank = CONTRASTIVE[case][tau]
    assert nt_xent(a, b, tau).item() == pytest.approx(in_batch, rel=rel)
    assert info_nce(a, b, negatives, tau).item() == pytest.approx(with_bank, rel=rel)
