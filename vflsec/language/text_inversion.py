"""The victim's text from the hidden states that it sends, by linear, transformer, channel and head decoders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vflsec.base.checks import check_positive_or_none
from vflsec.base.errors import InsufficientView
from vflsec.base.layout import PADDING
from vflsec.core.attack import Attack
from vflsec.core.message import Kind
from vflsec.core.view import Guess, Need, View
from vflsec.inference.regression import standardize
from vflsec.inference.releases import read_last_values, read_releases
from vflsec.language.copied_words import find_copies, replace_copies
from vflsec.language.noisy_channel import MECHANISM, Decoded, Mechanism, fit_channel, weigh_releases
from vflsec.language.public_head import HEAD, find_centers, fit_head
from vflsec.language.text_prior import TextPrior, fit_forests, guess_alone, list_columns
from vflsec.language.transformer import Blocks, split_positions
from vflsec.language.word_order import KNOWN, ReadTexts, States, list_evenly
from vflsec.nn.stacked import draw_batches

PENALTIES = (1e-3, 1e-1, 1e1, 1e3)
"""Of ridge regression, on standardized states."""

FOLDS, SURE, PERFECT, OTHER, FAR = 5, 2.0, 0.995, 1.5, 10.0
"""Folds of known rows, the standard errors by which a decoder is too bad for more of them, the best share, and how many
times as large states may be as those of training texts, and a column of them as the usual one."""

ROWS, POOL, READ = 256, 10_000, 40_000
"""The most rows that are decoded at once, the words that stand for all of them in a fold of known rows, and the words
of training texts that were read."""

HIDDEN, HEADS, BLOCKS, EPOCHS, BATCH, RATE = 64, 4, 2, 60, 32, 2e-3
"""Of the decoder that is a transformer."""


class Texts(NamedTuple):
    """What a decoder is fitted to and decodes: m known rows, their words (m, T), and n others.

    Attributes:
        known: whose words are known.
        y: these words.
        rows: that are decoded.
        read: training rows that were read before, where others are decoded.
    """

    known: States
    y: Tensor
    rows: States
    read: ReadTexts


class TextInversion(Attack):
    """Decoders from hidden states (n, T, d) to the word of each position, fitted to rows whose text is known.

    The linear decoder is a ridge regression of one-hot words on the states of a position. The second is a small
    transformer on the principal components of the states of all positions, so that it also learns which words
    follow which. The third knows the defense of words, if there is one, or a public head, and finds the likeliest
    words by their states, by all other words of the text, by own columns, by labels of training rows, by the length
    of the text, by numbers and categories that texts copy, and by similar known texts; for whole texts, words that
    are likely together. The fourth knows the head before training, where it is public, and finds the words that
    give such states. Folds of known rows choose between them and the guess without the federation; what is clearly
    worse on the first ones is not fitted to others. In folds the third knows the order of words, and its network is
    fitted to all known rows once it is chosen.

    A training row has a release in each epoch. The first and the fourth read all side by side, since each epoch has
    another model, the others their mean, since noise is drawn anew, weighted by signal and noise of each epoch. A test
    row has one release, at prediction, and a decoder of its own. The channel decoder of test rows also learns from the
    words that were read in training rows, each with the probability that it is right.

    Source: Chen et al. 2024 (BiSR), arXiv 2409.00960: learned inversion, its first stage, and matching, its second.

    Args:
        victim: whose text; None for the first passive party.
        decoder: ``linear``, ``transformer``, ``channel`` or ``head``; None for the best, or *alone*, on known rows.
        releases: how many releases of a training row are read, from the last; None for all.
    """

    name = "text-inversion"
    side = "active"
    target = "text"
    version = 15
    needs = frozenset({Need.FEATURES, Need.EMBEDDINGS, Need.AUX_LABELS})
    wants = frozenset({MECHANISM, HEAD})
    reference = "Chen et al. 2024 (BiSR), arXiv 2409.00960; linear and channel decoders: this project"
    differs = (
        "The source fits a recurrent decoder to another corpus, which pre-trained weights allow; here known rows are "
        "the only text.",
        "It reads all releases of a training row, where the source reads one, and may fall back to *alone*.",
        "The head decoder tries words at each place, where the source moves embeddings by gradients.",
        "The channel decoder knows the defense of words, and its epsilon; the source has no defense of words.",
    )
    verified = "exact recovery from a head of frozen random weights; figures of the source: unverified"
    costs = (
        "a ridge regression of a few hundred columns, two to four forests for each position, eight passes over all "
        "words by the forward-backward algorithm, a few hundred steps of a small transformer, and 800 of a network"
    )
    fails = (
        "with noise far larger than the mean of all releases, and on words that no known row has unless a head or "
        "embeddings of at most 4,000 words are public; copies of own columns other than whole numbers and categories "
        "are words like others, and known texts with words inserted are similar only in part; own columns are read by"
        " the channel decoder alone, and folds choose it by the order of words, without the network, for time"
    )

    def __init__(
        self,
        *,
        victim: str | None = None,
        decoder: Literal["linear", "transformer", "channel", "head"] | None = None,
        releases: int | None = None,
    ) -> None:
        check_positive_or_none(releases=releases)
        self.victim = victim
        self.decoder = decoder
        self.releases = releases
        if decoder == "head":
            self.needs = self.needs | {HEAD}  # type: ignore[misc]

    def alone(self) -> Attack:
        """Return the guess without the federation."""
        return TextPrior(victim=self.victim)

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return words (n, T) for every split with hidden states, and beside them those of *alone*."""
        length, known = view.n_classes, view.aux_split
        (prior, held_out), copies = guess_alone(view, rng), find_copies(view)
        last = read_last_values(view, Kind.EMBEDDING, sender=view.victim)
        if widths := {h.shape[1] for h in last.values() if h.shape[1] % length}:
            raise InsufficientView(
                f"expected hidden states of the {length} words of the longest text, side by side, got rows of "
                f"{min(widths)} numbers: pad all texts to {length} positions before they are recorded, or choose "
                f"--method split-lm"
            )
        values = {split: split_positions(x, length) for split, x in last.items()}
        masks = {split: (h != 0).any(dim=2) for split, h in values.items()}
        every_release = _read_all(view, masks[known], self.releases)
        _check_states(view, values, masks)
        seed = int(torch.randint(2**31, (), generator=rng))

        read, right = torch.full(masks[known].shape, PADDING), torch.zeros(masks[known].shape)
        unknown = torch.arange(len(masks[known]))
        unknown = unknown[~torch.isin(unknown, view.aux_rows)]
        unknown = unknown[list_evenly(masks[known][unknown], READ)]

        def gather(split: str) -> Texts:
            """Return what is known and the rows of a split, and beside others training rows by their last release."""
            both = zip(list_columns(view, split), (masks[known], masks[split]), strict=True)
            columns, rest = (torch.cat([x, mask.sum(dim=1, keepdim=True)], dim=1) for x, mask in both)
            releases = {s: every_release if s == split == known else values[s][:, :, None] for s in (known, split)}
            left, y = unknown if split != known else unknown[:0], view.aux_labels
            of_left = torch.where(right > KNOWN, read, PADDING)[left]
            at, words = torch.cat([view.aux_rows, left]), torch.cat([y, of_left])
            copied = copies[known][at]
            tables = columns[at].cpu().numpy(), replace_copies(words, copied).numpy(), {split: rest.cpu().numpy()}
            of_source, shares = fit_forests(*tables, seed)
            source = States(releases[known][at], masks[known][at], of_source, _bin(columns[at], columns), copied)
            rows = States(releases[split], masks[split], shares[split], _bin(rest, columns), copies[split])
            first, others = torch.arange(len(at)).tensor_split([len(y)])
            return Texts(source.select(first), y, rows, ReadTexts(source.select(others), read[left], right[left]))

        every = ["linear", *(["head"] if HEAD.name in view.further else []), "channel", "transformer"]
        if len(view.aux_rows) >= FOLDS:  # fewer tell by chance alone that a guess is better than reading states
            every.append("alone")
        kinds: list[str] = every if self.decoder is None else [self.decoder]
        scores: dict[str, Tensor] = {}
        whole: dict[str, Tensor] = {}
        rights: dict[str, Tensor] = {}
        for split in sorted(masks, key=lambda split: split != known):
            texts = gather(split)
            best, rights[split] = _choose(kinds, texts, view, held_out[split], rng)
            guess = prior[split]
            decoded = Decoded(guess, guess) if best == "alone" else _fit(best, texts, view, rng)
            scores[split], whole[split] = (torch.where(masks[split], words, PADDING) for words in decoded[:2])
            if split == known:
                usual = torch.full(guess.shape, float(rights[split].mean().nan_to_num()))
                read, right = scores[split].long(), usual if decoded.right is None else decoded.right
        return Guess(
            {split: words.double() for split, words in scores.items()},
            prior={split: prior[split] for split in scores},
            whole=whole,
            budget={f"right of known rows, {split}": float(r.mean().nan_to_num()) for split, r in rights.items()},
        )


def _choose(kinds: list[str], texts: Texts, view: View, alone: Tensor, rng: torch.Generator) -> tuple[str, Tensor]:
    """Return the decoder that is best on folds of known rows, and its share of right words in each.

    Args:
        kinds: decoders.
        texts: that they are fitted to.
        view: of the adversary.
        alone: words (m, T) of known rows that are guessed without the federation and without the row.
        rng: for folds and decoders.
    """
    best, right, y = kinds[0], dict.fromkeys(kinds, torch.zeros(0)), texts.y
    order, scored = torch.randperm(len(y), generator=rng), (y != PADDING) & (y != y[0]).any(dim=0)
    pool, read = texts.rows.thin(POOL), texts.read.thin(POOL)
    for out in order.tensor_split(min(FOLDS, len(y))) if len(y) > 1 else ():
        fit = order[~torch.isin(order, out)]
        fold = Texts(texts.known.select(fit), y[fit], texts.known.select(out), read)
        for kind in kinds:
            guess = alone[out] if kind == "alone" else _fit(kind, fold, view, rng, pool).words
            correct = (guess == y[out]) & scored[out]
            right[kind] = torch.cat([right[kind], correct.sum(dim=1) / scored[out].sum(dim=1).clamp_min(1)])
            if right[kind].mean() > PERFECT:
                kinds = [kind]
                break
        best = max(kinds, key=lambda kind: float(right[kind].mean()))
        gaps = {kind: right[best] - right[kind] for kind in kinds}  # of each text
        kinds = [kind for kind, g in gaps.items() if len(g) < 2 or not g.mean() > SURE * g.std() / len(g) ** 0.5]
        if len(kinds) == 1:
            break
    return best, right[best]


def _bin(x: Tensor, reference: Tensor) -> Tensor:
    """Return columns (n, c) standardized, and whether they exceed each decile of those of the reference."""
    shares = torch.linspace(0.1, 0.9, 9, dtype=torch.double)
    exceeds = x[..., None] > torch.quantile(reference.double(), shares, dim=0).T
    return torch.cat([standardize(x, reference), exceeds.flatten(1).double() - 0.5], dim=1)


def _check_states(view: View, values: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> None:
    """Raise InsufficientView unless each text has states that differ and then zeros, of similar size in all splits."""
    known = masks[view.aux_split][view.aux_rows]
    for split, mask in masks.items():
        wrong = ~mask[:, 0] | (mask[:, 1:] & ~mask[:, :-1]).any(dim=1)
        if split == view.aux_split:
            wrong[view.aux_rows] |= (known != (view.aux_labels != PADDING)).any(dim=1)
        if wrong.any():
            raise InsufficientView(
                f"expected a state for each word and zeros behind them, got other places in {int(wrong.sum())} {split} "
                f"texts: pad on the right, drop start tokens, multiply by the mask, or choose --method split-lm"
            )
        if len(x := values[split][mask]) > 1 and (x == x[0]).all():
            raise InsufficientView(
                f"expected states that differ between words, got the same one for all words of {split} texts: record "
                f"what the party with the text sends"
            )
        size, level = _compare_scales(values[split], mask, values[view.aux_split], masks[view.aux_split])
        if not 1 / OTHER < size < OTHER and not 1 / OTHER < level < OTHER:  # noise of training alone changes the size
            raise InsufficientView(
                f"expected states of {split} texts about as large as those of {view.aux_split} texts, got {size:.1g} "
                f"times as large: record both in the same unit"
            )


def _compare_scales(x: Tensor, mask: Tensor, reference: Tensor, used: Tensor) -> tuple[float, float]:
    """Return how many times as large as others states are: by their size, and by the mean of each position."""
    size = _compute_mean_square(x, mask) / _compute_mean_square(reference, used)
    sums, usual = ((values * m[..., None]).sum(dim=0).double() for values, m in ((x, mask), (reference, used)))
    means, usual = (s / m.sum(dim=0)[:, None].clamp_min(1) for s, m in ((sums, mask), (usual, used)))
    both = (mask.any(dim=0) & used.any(dim=0))[:, None]
    return float(size.sqrt()), float((means * usual * both).sum() / (usual.square() * both).sum())


def _compute_mean_square(x: Tensor, mask: Tensor) -> Tensor:
    parts = zip(x.split(ROWS), mask.split(ROWS), strict=True)  # type: ignore[no-untyped-call]  # for memory
    total = torch.stack([part[used].double().square().sum() for part, used in parts]).sum()
    return total / (mask.sum() * x.shape[2])


def _read_all(view: View, mask: Tensor, most: int | None) -> Tensor:
    """Return the states (n, T, r, d) of training rows by all releases or the last few; zero where one is missing."""
    releases = read_releases(view, Kind.EMBEDDING, split=view.aux_split, sender=view.victim)
    if missing := int((torch.bincount(releases.rows, minlength=len(mask)) == 0).sum()):
        raise InsufficientView(
            f"expected hidden states of all {len(mask)} {view.aux_split} texts in the last phase that sends them, got "
            f"none of {missing}: record all of them, or leave that phase out"
        )
    times = int(releases.epoch.max()) + 1
    values = split_positions(releases.values, mask.shape[1])  # (R, T, d)
    every = values.new_zeros(len(mask), times, *values.shape[1:])
    every[releases.rows, releases.epoch] = values
    chosen = every[:, -min(most or times, times) :]
    return chosen.transpose(1, 2)


def _fit(kind: str, texts: Texts, view: View, rng: torch.Generator, others: States | None = None) -> Decoded:
    """Return the words of rows by a decoder that is fitted to known rows, and to ``others`` without words."""
    known, y, rows, read = texts
    groups = [known, rows, read.states, *(() if others is None else (others,))]
    if kind != "head":  # which compares states with those of the public head
        groups = _scale_columns(*groups)
    if kind in ("channel", "transformer"):
        weights = weigh_releases(groups[0], y)
        known, rows, of_read, *pool = (states.average(weights) for states in groups)
    else:
        known, rows, of_read, *pool = (states.join() for states in groups)
    if kind == "channel":
        mechanism = view.further.get(MECHANISM.name)
        if mechanism is None and HEAD.name in view.further:
            centers = find_centers(view.further[HEAD.name][view.victim], rows.mask, rng)[1]
            mechanism = Mechanism(centers / centers.std())
        read = read._replace(states=of_read)
        return fit_channel(known, y, rows, mechanism, *pool, read=read, has_network=others is None)
    if kind == "head":
        words = fit_head(known[:2], y, rows[:2], view.further[HEAD.name][view.victim], rng)
    elif kind == "linear":
        words = fit_linear(known, y, rows)
    else:
        words = fit_transformer(known, y, rows, len(view.layout.vocabulary) if view.layout else 0, rng)
    return Decoded(words, words)


def _scale_columns(*groups: States) -> list[States]:
    """Return states with columns divided that are far larger than the usual one, as some of language models are."""
    spread = groups[0].values[groups[0].mask].double().std(dim=(0, 1), correction=0)
    times = spread / spread[spread > 0].median()  # NaN, which is not far, if all are constant
    if not (times > FAR).any():
        return [*groups]
    divisor = torch.where(times > FAR, times, 1.0).to(groups[0].values.dtype)
    return [states._replace(values=states.values / divisor) for states in groups]


def fit_linear(known: States, y: Tensor, rows: States) -> Tensor:
    """Return the words (n, T) by ridge regression of one-hot words on states and positions, with the best penalty."""
    used = known.values[known.mask].double()
    shift, scale, positions = used.mean(dim=0), used.std(dim=0, correction=0), torch.eye(known.mask.shape[1])
    scale = scale.clamp_min(1e-6 * scale.max()).masked_fill(scale.max() == 0, 1.0)

    def to_inputs(states: States) -> Tensor:
        place = positions.expand(len(states.mask), -1, -1)
        return torch.cat([(states.values - shift) / scale, place], dim=2)[states.mask]

    vocabulary, numbers = y[known.mask].unique(return_inverse=True)  # type: ignore[no-untyped-call]  # of known rows
    x, targets = to_inputs(known), F.one_hot(numbers, len(vocabulary)).double()
    left, singular, right = torch.linalg.svd(x, full_matrices=False)
    inner, errors = left.T @ targets, []
    for penalty in PENALTIES:  # leave-one-out errors in closed form
        shrink = singular.square() / (singular.square() + penalty)
        leverage = (left.square() * shrink).sum(dim=1, keepdim=True)
        residual = (targets - left @ (shrink[:, None] * inner)) / (1 - leverage).clamp_min(1e-6)
        errors.append(float(((targets - residual).argmax(dim=1) != targets.argmax(dim=1)).double().mean()))
    penalty = PENALTIES[min(range(len(errors)), key=errors.__getitem__)]
    weights = right.T @ ((singular / (singular.square() + penalty))[:, None] * inner)
    words = torch.full(rows.mask.shape, PADDING)
    for part in torch.arange(len(words)).split(ROWS):  # type: ignore[no-untyped-call]  # for memory
        chosen = vocabulary[(to_inputs(rows.select(part)) @ weights).argmax(dim=1)]
        words[part] = words[part].masked_scatter(rows.mask[part], chosen)
    return words


class Decoder(nn.Module):
    """A small transformer, (B, T, k) -> scores of words (B, T, V)."""

    def __init__(self, width: int, length: int, size: int) -> None:
        super().__init__()
        self.inputs, self.positions = nn.Linear(width, HIDDEN), nn.Embedding(length, HIDDEN)
        self.blocks, self.outputs = Blocks(BLOCKS, HIDDEN, HEADS), nn.Linear(HIDDEN, size)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return the score of each word at each position."""
        scores: Tensor = self.outputs(self.blocks(self.inputs(x) + self.positions.weight, mask))
        return scores


def fit_transformer(known: States, y: Tensor, rows: States, size: int, rng: torch.Generator) -> Tensor:
    """Return the words (n, T) by a transformer on the principal components of the states."""
    used = known.values[known.mask].double()
    shift, axes = used.mean(dim=0), torch.linalg.svd(used - used.mean(dim=0), full_matrices=False).Vh[:HIDDEN].T
    scale = ((used - shift) @ axes).std(dim=0, correction=0).max()
    scale = scale if scale > 0 else torch.ones_like(scale)

    def to_inputs(states: States) -> Tensor:
        components: Tensor = (states.values - shift) @ axes / scale
        return (components * states.mask[..., None]).float()

    x, model = to_inputs(known), Decoder(axes.shape[1], y.shape[1], size)
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    for _ in range(EPOCHS):
        for batch in draw_batches(len(y), BATCH, rng, y.device):
            logits, mask = model(x[batch], known.mask[batch]), known.mask[batch]
            optimizer.zero_grad()
            F.cross_entropy(logits[mask], y[batch][mask], label_smoothing=0.05).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    with torch.no_grad():
        parts = map(rows.select, torch.arange(len(rows.mask)).split(ROWS))  # type: ignore[no-untyped-call]
        return torch.cat([model(to_inputs(part), part.mask).argmax(dim=2) for part in parts])
