"""Model recovery: the parameters that one party contributes to an average, from received parameters."""

import torch
from torch import Tensor

from vflsec.core.attack import Attack
from vflsec.core.message import SERVER
from vflsec.core.view import Guess, Need, View
from vflsec.inference.releases import flatten_parameters, get_parameters


class ModelRecovery(Attack):
    """Recovery of the parameters that a single party contributes to partial model aggregation, in the last iteration.

    The server of ``model-average`` receives them in the party's message. A party knows the mean m of all K parties and
    its own parameters w: the mean of the others is (K m - w) / (K - 1), which with two parties equals the other party's
    parameters. Colluding parties subtract the parameters of each of them. An adversary who knows only the mean, as the
    server of ``secure-average``, guesses the mean.

    The score is about the deviation of the victim's parameters from the mean of all parties, which everybody learns: R2
    is 0 for guessing the mean, and 1 for the parameters themselves.

    Source: FedHSSL (He et al. 2022), section IV-B-3, for the messages; the arithmetic of an average.

    Args:
        victim: whose modules; None for the first party that is not the adversary.
    """

    name = "model-recovery"
    version = 2
    side = "any"
    target = "parameters"
    needs = frozenset({Need.PARAMETERS})
    reference = "none: the arithmetic of an average"
    differs = ()
    verified = "equality with the victim's parameters"
    costs = "one pass over the messages"
    fails = (
        "if many parties are averaged and masked, so that one model is a small part of the sum; noise of a defense of "
        "parameters stays in the recovered values"
    )

    def __init__(self, *, victim: str | None = None) -> None:
        self.victim = victim

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return the deviation (P, 1) of the victim's parameters from the mean."""
        assert view.victim is not None
        mean, received = _send(view, SERVER), _send(view, view.victim)
        if len(received):
            guess = received
        elif view.side == SERVER:
            guess = mean
        else:
            known = [_send(view, name) for name in view.party.split("+")]
            guess = (len(view.parties) * mean - torch.stack(known).sum(dim=0)) / (len(view.parties) - len(known))
        return Guess({view.aux_split: (guess - mean)[:, None]})


def _send(view: View, sender: str) -> Tensor:
    return flatten_parameters(get_parameters(view.messages, sender=sender))
