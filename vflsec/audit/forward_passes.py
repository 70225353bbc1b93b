"""What C has let p ask: a bound on what a p that deviates may have read."""

from __future__ import annotations

from collections import Counter

import numpy as np

from vflsec.audit.audit import Audit, Figure, Recovered
from vflsec.core.errors import InsufficientView
from vflsec.paillier.recording import Recording


class ForwardPasses(Audit):
    """C counts its forward passes of each sample: every one is an inner product with weights that p may have chosen.

    Whether p has used its share or other weights, C cannot tell. Of k passes of one sample, features that stay as they
    are, p gets at most k inner products with weights that it knows, less one for C's part of W where p does not know
    it: C's share of W_0. With g of them mu is known. This is a bound, not an attack.

    Source: the bound on ``chosen-weights``.
    """

    name = "forward-passes"
    role = "C"
    reads = "how often each sample was in a batch, and C's first share of W"
    mitigation = "a share of C's own in W_0 (KeyHolder(share0=...)), few passes over frozen features"
    reference = "bounds chosen-weights"

    def run(self, recording: Recording) -> Recovered:
        """Return the bound, the mean over samples of min(1, known inner products / g)."""
        passes: Counter[int] = Counter()
        hidden = None
        for step in recording.steps():
            if step.has("rows"):
                passes.update(step.notes["rows"].tolist())
            if hidden is None and step.number == 0 and step.has("share"):
                hidden = bool((step.notes["share"] != 0).any())
        if not passes:
            raise InsufficientView("expected which samples each batch has, got no notes of rows")
        if hidden is None:
            raise InsufficientView("expected C's share of W at step 0, got a recording that starts later")
        width = recording.header.layout.width
        counts = np.array(list(passes.values())) - hidden
        bound = float(np.minimum(counts / width, 1).mean())
        start = "W_0 has a part that p does not know" if hidden else "p knows W_0"
        found = f"at most {counts.max()} known inner products with a sample's {width} features; {start}"
        return Recovered(found, own=(Figure(of="features", metric="bound", value=bound, chance=0.0, n=len(counts)),))
