"""Text from hidden states by a public head: the words that would give such states under its weights before training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from sklearn.linear_model import RidgeCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from vflsec.base.layout import PADDING
from vflsec.core.knowledge import Knowledge
from vflsec.core.method import Trained
from vflsec.language.pretrained import PretrainedLower
from vflsec.language.split_lm import SplitLM

PENALTIES, SAMPLES, TINY = (1e-3, 1e-1, 1e1, 1e3, 1e5, 1e9), 32, 1e-6
FIRST, GAP, ENOUGH, MOST, SWEEPS, ENTRIES = 24, 20.0, 4.0, 256, 3, 4 * 10**6
"""Of ridge regression; how often a word is in random texts; the least variance of a number over that of its states;
words tried at first, and how much larger their squared distance may be than the least; the squared error of a number,
in variances, above which others are tried, and how many; passes over a text, and distances in memory at once."""


def read_heads(trained: Trained, _: Sequence[str]) -> Mapping[str, PretrainedLower] | None:
    """Return the head of each party with text, with the weights of the folder, or None without one."""
    method = trained.method
    if not isinstance(method, SplitLM) or method.path is None:
        return None
    texts = {name: party.layout for name, party in trained.federation.parties.items() if party.holds_text}
    return {name: PretrainedLower(method.path, method.cut, layout, None) for name, layout in texts.items()}


HEAD = Knowledge(
    "the public head",
    "evaluate a job with --method split-lm:path=FOLDER, whose weights before training both parties have",
    read=read_heads,
    sides=("active",),
)


@torch.no_grad()
def fit_head(
    known: tuple[Tensor, Tensor], y: Tensor, rows: tuple[Tensor, Tensor], head: PretrainedLower, rng: torch.Generator
) -> Tensor:
    """Return the words (n, T) of ``rows`` whose states under ``head`` are nearest to the earliest release.

    Training has changed the head least before that release; a regression on all releases of known rows tells how. A
    Gaussian for each word, of random texts, says which words to try; from the first place to the last, each is put into
    the text, and the head is run. If states depend on later words, there are several passes.

    Args:
        known: states (m, T, r d) of r releases of known rows, and where words are; m may be 0.
        y: (m, T) their words.
        rows: states (n, T, r d) of others, and where words are.
        head: with public weights.
        rng: for random texts.
    """
    length, size, width = rows[1].shape[1], len(head.words.weight), head.width // rows[1].shape[1]
    target, variance = rows[0][..., :width].clone(), torch.zeros(width)
    if known[1].any():
        change = (_run(head, y, known[1]) - known[0][..., :width])[known[1]]
        ridge = make_pipeline(StandardScaler(), RidgeCV(PENALTIES, alpha_per_target=True))
        ridge.fit(known[0][known[1]], change)
        variance = -torch.from_numpy(ridge[-1].best_score_).float()  # by leave-one-out errors
        target[rows[1]] += torch.from_numpy(ridge.predict(rows[0][rows[1]])).float()
    places, centers, apart = find_centers(head, rows[1], rng)
    spread = centers.square().mean(dim=0) + apart.square().mean(dim=0)
    variance = (variance + TINY * spread.float()).clamp_min(1e-12)
    covariance = torch.cov(apart.T, correction=0) + variance.double().diag()
    whitening, guesses = torch.linalg.cholesky(torch.linalg.inv(covariance)), []
    at_once = max(1, ENTRIES // (length * size))
    for part, mask in zip(target.split(at_once), rows[1].split(at_once), strict=True):  # type: ignore[no-untyped-call]
        z = (part - places).double() @ whitening
        squares = torch.cdist(z, (centers[PADDING + 1 :] @ whitening).expand(len(z), -1, -1)).square()
        guesses.append(_search(head, part, mask, squares, variance))
    return torch.cat(guesses)


@torch.no_grad()
def find_centers(head: PretrainedLower, used: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean of each position (T, d), of each word less that (V, d), and states less both, of random texts."""
    length, size = used.shape[1], len(head.words.weight)
    width = head.width // length
    texts = int(SAMPLES * max(size, width) / used.sum(dim=1).double().mean().clamp_min(1)) + 1
    drawn = torch.randint(PADDING + 1, size, (texts, length), generator=rng)
    mask = used[torch.randint(len(used), (texts,), generator=rng)]
    states, words = _run(head, drawn, mask), drawn[mask]
    places = states.sum(dim=0) / mask.sum(dim=0)[:, None].clamp_min(1)
    x = (states - places)[mask].double()
    counts = torch.bincount(words, minlength=size)[:, None].clamp_min(1)
    centers = torch.zeros(size, width, dtype=torch.double).index_add_(0, words, x) / counts
    return places, centers, x - centers[words]


def _search(head: PretrainedLower, target: Tensor, mask: Tensor, squares: Tensor, variance: Tensor) -> Tensor:
    """Return words (n, T) whose states are near ``target`` (n, T, d), by squared distances (n, T, V - 1) of words."""

    def measure(texts: Tensor, row: Tensor) -> Tensor:
        used = mask[row, : texts.shape[1]]
        apart = _run(head, texts, used) - target[row, : texts.shape[1]]
        return (apart.square() / variance).sum(dim=2) * used

    near, order = squares.topk(min(MOST, squares.shape[2]), largest=False)
    order, enough = order + PADDING + 1, ENOUGH * len(variance)
    close = (near <= near[..., :1] + GAP) & mask[..., None] & (torch.arange(near.shape[2]) < FIRST)
    words, texts = torch.where(mask, order[..., 0], PADDING), PADDING + 1 + torch.ones(2, mask.shape[1]).tril().long()
    unsettled = ((measure(words, torch.arange(len(words))) > enough) | (close.sum(dim=2) > 1)).any(dim=1)
    is_causal = torch.allclose(*_run(head, texts, texts > PADDING)[:, 0])
    for _ in range(1 if is_causal else SWEEPS):
        before = words.clone()
        for t in range(words.shape[1]):
            errors, tried = torch.full(near[:, t].shape, float("inf")), close[:, t] & unsettled[:, None]
            for _ in range(2):
                row, place = tried.nonzero(as_tuple=True)
                if len(row):
                    texts = words[row, : t + 1 if is_causal else None]
                    texts[:, t] = order[row, t, place]
                    apart = measure(texts, row)
                    errors[row, place] = apart[:, t] if is_causal else apart.sum(dim=1)
                least, best = errors.min(dim=1)
                words[:, t] = torch.where(least.isinf(), words[:, t], order[torch.arange(len(best)), t, best])
                tried = (unsettled & mask[:, t] & (least > enough) & is_causal)[:, None] & errors.isinf()
        if torch.equal(words, before):
            break
    return words


def _run(head: PretrainedLower, words: Tensor, mask: Tensor) -> Tensor:
    """Return the states (n, T, d) of words (n, T) under the head."""
    return head.run(head.words(words), mask)
