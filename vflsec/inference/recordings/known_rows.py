"""Features by regression on what is known of all samples, fitted to the few whose features are known."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import RidgeCV
from torch import Tensor

from vflsec.base.errors import InsufficientView
from vflsec.core.view import View
from vflsec.inference.recordings.samples import places, recording_of


def known_among(view: View, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return where the auxiliary samples are among ``ids``, and their answers (m, g).

    Raises:
        InsufficientView: fewer than two of them are.
    """
    order = {row: at for at, row in enumerate(places(recording_of(view), ids).tolist())}
    pairs = [(order[row], k) for k, row in enumerate(view.aux_rows.tolist()) if row in order]
    if len(pairs) < 2:
        raise InsufficientView(f"expected two known samples or more among those with scores, got {len(pairs)}")
    at, known = (np.array(own) for own in zip(*pairs, strict=True))
    return at, view.aux_labels.double().numpy()[known]


def by_known_rows(view: View, ids: NDArray[np.int64], inputs: NDArray[np.float64]) -> Tensor:
    """Return the answers (n, g) of the samples ``ids`` by ridge regression on ``inputs`` (n, p)."""
    at, answers = known_among(view, ids)
    fitted = RidgeCV(alphas=np.logspace(-12, 3, 31)).fit(inputs[at], answers)
    return torch.from_numpy(np.asarray(fitted.predict(inputs)).reshape(len(inputs), -1))
