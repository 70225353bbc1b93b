"""The names that users give to parties, in settings: replaced by those that training and attacks use."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from vflsec.base.checks import unknown
from vflsec.base.errors import UsageError
from vflsec.core.message import SERVER, SOURCE
from vflsec.run.federation import partition_of
from vflsec.run.plan import training_cell
from vflsec.run.spec import DefenseSpec, EvalSpec


class Names(msgspec.Struct, frozen=True):
    """What the data call the dataset and each party."""

    dataset: str
    parties: Mapping[str, str] = {}

    def standard(self, text: str) -> str:
        """Return ``bureau+shop`` as ``passive_1+passive_2``; other words stay."""
        back = {given: name for name, given in self.parties.items()}
        return "+".join(back.get(word, word) for word in text.split("+"))

    def given(self, text: str) -> str:
        """Return ``passive_1+passive_2`` as the data call them."""
        return "+".join(self.parties.get(word, word) for word in text.split("+"))


def names_of(spec: EvalSpec) -> Names:
    """Return the names in the data of ``spec``.

    Raises:
        DataError: the dataset cannot be read.
    """
    split = partition_of(training_cell(spec, spec.methods[0], seed=0))
    return Names(split.dataset, split.names)


def with_standard_names(spec: EvalSpec, names: Names) -> EvalSpec:
    """Return ``spec`` with each party that it names under its standard name.

    Raises:
        UsageError: an adversary that the data do not name.
    """
    if not names.parties:
        return spec
    for party in spec.adversary.split("+"):
        if party not in (*names.parties, *names.parties.values(), SERVER, SOURCE):
            raise UsageError(unknown("adversary", party, names.parties.values()))

    def carried(defense: DefenseSpec) -> DefenseSpec:
        return msgspec.structs.replace(defense, by=names.standard(defense.by)) if defense.by else defense

    attacks = [
        msgspec.structs.replace(one, options={**one.options, "victim": names.standard(one.options["victim"])})
        if isinstance(one.options.get("victim"), str)
        else one
        for one in spec.attacks
    ]
    return msgspec.structs.replace(
        spec,
        adversary=names.standard(spec.adversary),
        attacks=tuple(attacks),
        defenses=tuple(carried(one) for one in spec.defenses),
        fixed=tuple(carried(one) for one in spec.fixed),
    )
