"""What C has let p ask: a bound on what p may have read, honest or not."""

from __future__ import annotations

from collections import Counter

import numpy as np

from vflsec.audit.audit import Audit, Figure, Recovered
from vflsec.core.errors import InsufficientView
from vflsec.paillier.recording import Recording


class ForwardPasses(Audit):
    """C counts its forward passes of each sample: each is an inner product of its features with every column of W.

    With k passes and C outputs p has k C linear equations in the g features of a sample, whether it uses its share of W
    or weights of its own choice. Features at rest are determined by g of them. If C has a share of W_0 that p does not
    know, its g C numbers are unknown too, but they are the same for all samples: over n samples they take g C / n
    equations of each. The bound is on the directions of a sample's features that are determined, for the sample with
    the most passes; where features depend on each other, fewer equations can tell as much.

    Source: the bound on ``chosen-weights`` and ``score-gram``.
    """

    name = "forward-passes"
    role = "C"
    reads = "how often each sample was in a batch, and C's first share of W"
    mitigation = "fewer passes x outputs of each sample than it has features (max_passes)"
    reference = "bounds chosen-weights and score-gram"

    def run(self, recording: Recording) -> Recovered:
        """Return the bound, the largest over samples of min(1, equations / g)."""
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
        width, outputs = recording.header.layout.width, recording.header.layout.outputs
        counts = np.array(list(passes.values()))
        taken = hidden * width * outputs / len(counts)
        shares = np.clip((counts * outputs - taken) / width, 0, 1)
        start = "W_0 has a part that p does not know" if hidden else "p knows W_0"
        found = (
            f"at most {counts.max()} passes x {outputs} outputs of a sample, in its {width} features; "
            f"{(shares == 1).sum()} of {len(counts)} samples are fully exposed; {start}"
        )
        own = Figure(of="features", metric="bound", value=float(shares.max()), chance=0.0, n=len(counts))
        return Recovered(found, own=(own,))
