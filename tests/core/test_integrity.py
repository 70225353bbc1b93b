"""The base of attacks on integrity: randomness that can be asked for again, and nothing to guess."""

import pytest
import torch

from vflsec.base.errors import UsageError
from vflsec.cli.show_ import describe
from vflsec.core.attack import IntegrityAttack, list_integrity
from vflsec.core.message import Step
from vflsec.core.view import View

CPU = torch.device("cpu")


class Idle(IntegrityAttack):
    name = reference = verified = "idle"


def joined(party="passive_1", seed=3):
    attack = Idle()
    x = torch.ones(4, 2)
    attack.join(View(party, "passive", 2, {"train": x}, None, torch.tensor([1]), torch.tensor([0])), seed=seed)
    return attack


def step(number=0, phase="train", split="train"):
    return Step(number, phase, torch.arange(1000), split=split)


def drawn(rng):
    return torch.rand(3, generator=rng).tolist()


def test_randomness_is_of_seed_party_and_step_and_can_be_asked_for_again():
    attack = joined()
    first = drawn(attack.noise(step(), CPU))
    assert first == drawn(joined().noise(step(), CPU))
    others = [attack.noise(s, CPU) for s in (step(1), step(phase="predict"), step(split="local"))]
    others += [
        joined("passive_2").noise(step(), CPU),
        joined(seed=4).noise(step(), CPU),
        attack.joint_noise(step(), CPU),
    ]
    assert len({*map(tuple, map(drawn, others)), tuple(first)}) == 7


def test_parties_that_collude_choose_the_same_rows():
    one, other = joined(), joined("passive_2")
    assert torch.equal(one.draw_rows(0.3, step()), other.draw_rows(0.3, step()))
    assert not torch.equal(one.draw_rows(0.3, step()), one.draw_rows(0.3, step(1)))
    assert one.draw_rows(0.3, step()).float().mean() == pytest.approx(0.3, abs=0.06)
    assert one.draw_rows(1.0, step()).all()
    assert not one.draw_rows(0.0, step()).any()


def test_parts_of_a_run():
    assert [s.learns for s in (step(), step(phase="finetune"), step(phase="predict"), step(phase="validate"))] == [
        True, True, False, False,
    ]  # fmt: skip
    assert [step().is_part_of(w) for w in ("train", "predict", "both")] == [True, False, True]
    assert [step(phase="predict").is_part_of(w) for w in ("train", "predict", "both")] == [False, True, True]


def test_it_guesses_nothing_and_its_card_says_what_it_breaks():
    attack = joined()
    assert attack.acts_in_training
    assert list_integrity({"passive_1": attack}) == {"passive_1": attack}
    view = View("passive_1", "passive", 2, {"train": torch.ones(4, 2)}, None, torch.tensor([1]), torch.tensor([0]))
    with pytest.raises(UsageError, match="'idle' .*vflsec eval"):
        attack(view, seed=0)
    assert describe("attack", Idle)["breaks"] == "integrity"
    assert repr(attack) == "idle()"
