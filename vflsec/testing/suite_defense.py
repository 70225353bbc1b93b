"""Conformance of defenses; see ``vflsec.testing.conformance`` for how to use it."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vflsec.base.errors import UsageError
from vflsec.base.seeds import make_rng, seed_weights
from vflsec.core import hooks
from vflsec.core.defense import Defense, list_hooks
from vflsec.core.message import Kind
from vflsec.core.party import Party
from vflsec.testing.federations import make_tiny_federation
from vflsec.testing.suite import Suite, are_same, check_stated, expect_refusal

ROWS, WIDTH, CLASSES, RELEASES = 32, 4, 3, 20


class DefenseConformance(Suite):
    """Checks of one defense, at each of its points and always through ``Party.send``.

    Class attributes:
        weak, strong: two strengths, of which the second must protect visibly more.
    """

    weak: ClassVar[float] = 1.0
    strong: ClassVar[float] = 10.0

    def make(self, strength: float, **options: Any) -> Defense:
        """Return the defense; ``options`` holds ``at`` where a check chooses the point."""
        raise NotImplementedError

    def test_states_what_it_is(self) -> None:
        """Name, reference and guarantee are stated, and the repr shows the strength."""
        defense = self.make(self.weak)
        check_stated(type(defense), ("name", "reference", "guarantee", "strength_name"))
        assert f"{defense.strength_name}={self.weak:g}" in repr(defense)

    def test_refuses_impossible_settings(self) -> None:
        """A strength below zero, infinite or not a number, and an unknown point are refused in words."""
        for strength in (-1.0, float("inf"), float("nan")):
            with expect_refusal(UsageError, naming="strength"):
                self.make(strength)
        with expect_refusal(UsageError, naming="nowhere"):
            self.make(self.weak, at=["nowhere"])

    def test_strength_zero_is_the_identity(self) -> None:
        """Bit for bit, for every release; not even the noise stream moves."""
        for kind in self._list_points():
            defense = self.make(0.0, at=[kind.value])
            assert defense.strength == 0, f"strength 0 became {defense.strength}"
            sent = _draw_releases(kind, ROWS)
            for key, received in _send(defense, kind, sent).items():
                assert are_same(received, sent[key]), f"{defense!r} is not the identity at {kind}"

    def test_is_visible_at_non_zero_strength(self) -> None:
        """The receiver gets something else; a defense without points uses some other hook."""
        defense = self.make(self.strong)
        others = [hook for hook in list_hooks(defense) & set(hooks.HOOKS) if not hook.kind]
        assert self._list_points() or others, f"{defense!r} changes nothing"
        for kind in self._list_points():
            sent = _draw_releases(kind, ROWS)
            received = _send(self.make(self.strong, at=[kind.value]), kind, sent)
            assert any(not are_same(received[key], sent[key]) for key in sent), f"{defense!r} changes nothing at {kind}"

    def test_keeps_shape_and_dtype(self) -> None:
        """For batches of 0, 1, 2 and many rows, in both precisions; and nothing becomes infinite or NaN."""
        for kind in self._list_points():
            for dtype in (torch.float32, torch.float64):
                for rows in (0, 1, 2, ROWS):
                    sent = {key: value.to(dtype) for key, value in _draw_releases(kind, rows).items()}
                    for key, received in _send(self.make(self.weak, at=[kind.value]), kind, sent).items():
                        assert (received.shape, received.dtype) == (sent[key].shape, dtype)
                        assert torch.isfinite(received).all(), f"not finite at {kind} with {rows} rows"

    def test_equal_seeds_give_equal_releases(self) -> None:
        """All randomness comes from the sender's stream, none from torch's global one."""
        for kind in self._list_points():
            sent, got = _draw_releases(kind, ROWS), []
            for other in (1, 2):
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(other)
                    got.append(_send(self.make(self.weak, at=[kind.value]), kind, sent))
            assert all(are_same(got[0][key], got[1][key]) for key in sent), f"not reproducible at {kind}"

    def test_noise_is_fresh_at_each_release(self) -> None:
        """The same value sent twice is not noised twice in the same way."""
        for kind in self._list_points():
            defense, party, sent = self.make(self.weak, at=[kind.value]), _make_sender(kind), _draw_releases(kind, ROWS)
            first, second = (_send(defense, kind, sent, party) for _ in range(2))
            assert any(not are_same(first[key], second[key]) for key in sent), f"noise repeats at {kind}"

    def test_larger_strength_distorts_more(self) -> None:
        """On average over releases: the knob turns in one direction."""
        for kind in self._list_points():
            weak, strong = (self._measure_distortion(strength, kind) for strength in (self.weak, self.strong))
            assert strong > weak > 0, f"at {kind}: {weak:.3g} at {self.weak:g}, {strong:.3g} at {self.strong:g}"

    def test_labels_are_changed_reproducibly(self) -> None:
        """A defense of labels gives class numbers, or probabilities if it says so, and may be told its point.

        It draws from its stream alone, and one that softens takes what another one has softened, or no row at all.
        """
        if hooks.LABELS not in list_hooks(self.make(self.weak)):
            return
        y = torch.arange(60) % CLASSES
        kept, x = y.clone(), torch.randn(60, WIDTH, generator=make_rng(0, "columns")) + y[:, None]
        for strength in (0.0, self.weak):
            first, second = (_release_labels(self._prepare(strength), y, x) for _ in range(2))
            assert are_same(first, second), f"{self.make(strength)!r} is not reproducible at labels"
            if not strength:
                assert are_same(first, y), f"{self.make(strength)!r} is not the identity at labels"
        assert are_same(y, kept), "changed the active party's own labels"
        defense = self._prepare(self.weak)
        if defense.softens:
            _check_probabilities(first, 60, defense)
            _check_probabilities(_release_labels(defense, F.one_hot(y, CLASSES).float(), x), 60, defense)
            _check_probabilities(_release_labels(defense, y[:0], x[:0]), 0, defense)
        else:
            assert (first.shape, first.dtype) == (y.shape, y.dtype)
            assert set(first.tolist()) <= set(range(CLASSES)), f"{defense!r} gives labels of no class"

    def test_batches_are_mixed_reproducibly(self) -> None:
        """A defense of updates keeps every embedding's shape, and returns class numbers or probabilities."""
        if hooks.BATCH not in list_hooks(self.make(self.weak)):
            return
        y, rng, results = torch.arange(ROWS) % CLASSES, make_rng(0, "embeddings"), []
        embeddings = [torch.randn(ROWS, width, generator=rng) for width in (WIDTH, 2 * WIDTH)]
        kept = [h.clone() for h in embeddings]
        for targets in (y, y, F.one_hot(y, CLASSES).float()):
            mixed, softened = self._prepare(self.weak).on_batch(embeddings, targets)
            assert [h.shape for h in mixed] == [h.shape for h in embeddings]
            if softened.dim() > 1:
                _check_probabilities(softened, ROWS, self.make(self.weak))
            results.append([*mixed, softened])
        assert all(are_same(a, b) for a, b in zip(*results[:2], strict=True)), "not reproducible"
        assert all(are_same(a, b) for a, b in zip(results[0], results[2], strict=True)), (
            "one-hot rows are not their class"
        )
        assert all(are_same(a, b) for a, b in zip(embeddings, kept, strict=True)), "changed embeddings in place"

    def test_updates_are_changed_reproducibly(self) -> None:
        """A defense of updates draws from the party's stream alone, afresh in each, and leaves nothing on the models.

        More strength distorts more.
        """
        if hooks.UPDATE not in list_hooks(self.make(self.weak)):
            return
        plain, other, off = _get_updates(None, 1)[0], _get_updates(self.make(self.weak), 1)[0], self.make(0.0)
        again, next_ = _get_updates(self.make(self.weak), 2)
        assert are_same(other, again), f"{self.make(self.weak)!r} is not reproducible"
        assert not are_same(again, next_), "noise repeats"
        assert not are_same(other, plain), "changes no update"
        assert off.strength == 0, f"strength 0 became {off.strength}"
        weak, strong = (
            float((torch.stack(_get_updates(self.make(strength), RELEASES)) - plain).square().sum())
            for strength in (self.weak, self.strong)
        )
        assert strong > weak > 0, f"{weak:.3g} at {self.weak:g}, {strong:.3g} at {self.strong:g}"

    def test_privacy_is_accounted_for(self) -> None:
        """Where epsilon is told: more strength spends less, more releases no less, and strength 0 has no bound."""
        weak, strong, off = (self.make(strength) for strength in (self.weak, self.strong, 0.0))
        once, twice, less = weak.privacy_spent(1), weak.privacy_spent(2), strong.privacy_spent(1)
        if once is None:
            assert type(weak).by_epsilon is None, f"{weak!r} takes an epsilon and tells none"
            return
        assert twice is not None
        assert less is not None
        assert 0 < less["epsilon"] < once["epsilon"] <= twice["epsilon"] < float("inf")
        assert 0 <= once["delta"] < 1
        assert off.privacy_spent(1) is None, f"{off!r} claims a guarantee"

    def _prepare(self, strength: float) -> Defense:
        """Return the defense at its point of labels, with what it learns drawn, as a method does before training."""
        defense = self.make(strength, at=["labels"])
        if strength:
            with seed_weights(0, "prepared"):
                defense.prepare({"passive_1": WIDTH}, n_classes=CLASSES, rng=make_rng(0, "prepared"))
        return defense

    def _list_points(self) -> tuple[Kind, ...]:
        return type(self.make(self.weak)).points

    def _measure_distortion(self, strength: float, kind: Kind) -> float:
        defense, party, total = self.make(strength, at=[kind.value]), _make_sender(kind), 0.0
        for number in range(RELEASES):
            sent = _draw_releases(kind, ROWS, number)
            received = _send(defense, kind, sent, party)
            total += sum(float((received[key] - sent[key]).square().sum()) for key in sent)
        return total


def _draw_releases(kind: Kind, rows: int, number: int = 0) -> dict[str, Tensor]:
    """Return what a party might send: a batch (rows, d), or parameters of one, two and four dimensions.

    Gradient rows point to opposite sides for the two classes, as those of a loss do.
    """
    rng = make_rng(number, "release", kind)
    if kind == Kind.PARAMETERS:
        shapes = {"filters": (3, 2, 3, 3), "weight": (5, WIDTH), "bias": (5,)}
        return {key: torch.randn(shape, generator=rng) for key, shape in shapes.items()}
    if kind == Kind.NODES:  # two nodes with rows of one class each, and two with a few rows of the other one
        row, labels = torch.arange(rows), _make_labels(rows)
        mixed = torch.where(row % 8 < 2, 1 - labels, labels)
        return {"value": torch.where(row < rows // 2, 4 + labels, 6 + mixed)[:, None]}
    batch = torch.randn(rows, WIDTH, generator=rng)
    return {"value": batch + 2.0 * (2.0 * _make_labels(rows)[:, None] - 1.0) if kind == Kind.GRADIENT else batch}


def _get_updates(defense: Defense | None, number: int) -> list[Tensor]:
    """Return the gradients of a linear model, flat, as its optimizer reads them in ``number`` equal updates."""
    model, updates, rng = nn.Linear(WIDTH, 2), [], make_rng(0, "updates")
    nn.init.constant_(model.weight, 0.1)
    nn.init.zeros_(model.bias)
    modules = nn.ModuleDict({"bottom": model})
    x, before = torch.randn(ROWS, WIDTH, generator=make_rng(0, "columns")), set(vars(model))
    with defense.training_hooks(modules, ()) if defense else nullcontext():
        for _ in range(number):
            modules.zero_grad()
            F.cross_entropy(model(x), _make_labels(ROWS)).backward()  # type: ignore[no-untyped-call]
            if defense:
                defense.on_update(modules, ROWS, rng)
            updates.append(torch.cat([p.grad.flatten() for p in modules.parameters() if p.grad is not None]))
    assert set(vars(model)) == before, f"{defense!r} leaves something on the models"
    return updates


def _release_labels(defense: Defense, y: Tensor, x: Tensor) -> Tensor:
    return defense.on_labels(y, features=x, n_classes=CLASSES, rng=make_rng(0, "labels"))


def _check_probabilities(given: Tensor, rows: int, defense: Defense) -> None:
    assert given.shape == (rows, CLASSES), f"{defense!r} gives {tuple(given.shape)} in place of ({rows}, {CLASSES})"
    assert given.is_floating_point()
    assert bool((given >= 0).all()), f"{defense!r} gives probabilities below 0"
    assert torch.allclose(given.sum(dim=1), torch.ones(rows), atol=1e-5), f"{defense!r}: rows do not add up to 1"


def _make_labels(rows: int) -> Tensor:
    return torch.arange(rows) % 2


def _make_sender(kind: Kind) -> Party:
    """Return the party that sends messages of ``kind``, with a noise stream at its start."""
    federation = make_tiny_federation(rows=ROWS)
    return federation.passive[0] if kind == Kind.EMBEDDING else federation.active


def _send(
    defense: Defense, kind: Kind, payload: Mapping[str, Tensor], party: Party | None = None
) -> Mapping[str, Tensor]:
    party = party or _make_sender(kind)
    party.defenses = (defense,)
    rows = None if kind == Kind.PARAMETERS else torch.arange(len(payload["value"]))
    labels = _make_labels(len(rows)) if rows is not None and party.active else None
    message = party.send(kind, payload, to="passive_1", step=0, phase="train", rows=rows, labels=labels)
    return message.payload
