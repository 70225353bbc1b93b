"""Split learning of a small language model: its lower blocks where the text is, the others with the labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from vflsec.base.checks import check_positive, check_positive_or_none
from vflsec.base.errors import UsageError
from vflsec.base.seeds import make_rng
from vflsec.base.sparse_rows import find_words
from vflsec.core import hooks
from vflsec.core.federation import Federation
from vflsec.core.message import Kind, Step
from vflsec.core.method import Method
from vflsec.core.party import Party
from vflsec.core.protocol import Boundary
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.language.pretrained import PretrainedLower, PretrainedUpper
from vflsec.language.transformer import LowerModel, Text, UpperBlocks, UpperModel, split_positions
from vflsec.language.word_privacy import CusText, WordPrivacy
from vflsec.methods.fedsplitnn import FedSplitNN
from vflsec.methods.split_training import SplitTraining

EPOCHS, MOST = 12, 4096
"""Passes over the training rows without ``train.epochs``: twice as many fit single rows, and predict others worse; and
the largest number of blocks, width of a state and rank of an adapter."""


class SequenceBoundary(Boundary):
    """The plain protocol, with hidden states (B, T, d) and a mask (B, T) both ways in place of rows of text."""

    name = "sequences"
    reference = "Vepakomma et al. 2018, arXiv 1812.00564, with sequences"
    reveals = {  # noqa: RUF012  (declared ClassVar in the base class)
        "active": ("the length of each text and the hidden state of each word, after the passive party's defenses",),
        "passive": ("the loss gradient with respect to each hidden state, after the active party's defenses",),
    }

    def forward(self, h: Tensor, step: Step) -> Tensor:
        """Send the hidden states of the rows (B, T·d); return what the active party received, zero at padding."""
        payload = {"value": h}
        if self.passive.holds_text:
            states = split_positions(h, len(self.passive.layout.columns))
            payload = {"value": states, "mask": (states != 0).any(dim=2)}
        message = self.passive.send(Kind.EMBEDDING, payload, to=self.active.name, **step.place)
        self._mask = message.payload.get("mask")
        received: Tensor = message.as_table().payload["value"]
        return received

    def backward(self, g: Tensor, step: Step) -> Tensor:
        """Send the gradient of the states (B, T·d); return what the passive party received, zero at padding."""
        payload = {"value": g}
        if self._mask is not None:
            payload = {"value": split_positions(g, self._mask.shape[1]), "mask": self._mask}
        message = self.active.send(Kind.GRADIENT, payload, to=self.passive.name, labels=step.labels, **step.place)
        received: Tensor = message.as_table().payload["value"]
        return received


class TextTraining(SplitTraining):
    """Split learning whose parties' defenses of text act once, before anything reads it."""

    @cache  # noqa: B019  (a training is short-lived)
    def defend_text(self, name: str, split: str) -> Text | None:
        """Return a text as defenses change it for all releases; None without any, as of a party that is malicious."""
        party, seed = self.federation.parties[name], self.federation.seed
        defenses = party.defenses.select(hooks.TEXT)
        if not party.holds_text or not defenses or name in self.federation.malicious:
            return None
        text = Text(find_words(party.features[split], len(party.layout.vocabulary)))
        for number, defense in enumerate(defenses):
            rng = make_rng(seed, "noise", name, "text", split, number, device=self.federation.device)
            text = defense.on_text(text, rng=rng)
        return text

    def _feed(self, party: Party, step: Step) -> Any:
        text = self.defend_text(party.name, step.split)
        return super()._feed(party, step) if text is None else text.select(step.rows)


class SplitLM(FedSplitNN):
    """Split learning of a transformer: the text at passive parties, the labels at the active one.

    A party with text embeds its words and runs the first blocks; it sends the hidden states (B, T, d) of each position
    and a mask that is false at padding. The active party runs the other blocks, and joins the state of [start] to its
    own columns and to what parties with columns send, by a linear layer. With the default options it has about 160,000
    parameters, drawn at random. Training is that of split learning: every update sends gradients (B, T, d) back.

    With ``path``, the blocks are those of a model of ``transformers``, and the mean of the last states takes the place
    of that of [start]. A word that its tokenizer splits has the mean of the embeddings of its pieces.

    Source: this project; split as in VFLAIR-LLM's head and tail, arXiv 2508.03097.

    Args:
        cut: blocks at the party with the text, k.
        blocks: in all.
        hidden: d, the width of a hidden state.
        heads: of the attention.
        path: a folder with config.json, tokenizer.json and weights in safetensors, which both parties have; None for a
            model of ``blocks``, ``hidden`` and ``heads`` from scratch.
        lora: the rank of adapters that alone learn, beside the linear head; None to train all weights.

    Raises:
        UsageError: no block would be left above the cut, heads do not divide the width, or an option has no effect.
    """

    name = "split-lm"
    reference = "this project; Vaswani et al. 2017, arXiv 1706.03762; split as by Gu et al. 2025 (VFLAIR-LLM)"
    differs = (
        "Without path and lora the model is small and trained from scratch; those of VFLAIR-LLM are pre-trained and "
        "fine-tuned with LoRA.",
    )
    shares_head = False
    learns = {"train": hooks.SPLIT_LEARNING | {hooks.TEXT}}  # noqa: RUF012  (declared ClassVar in the base)
    together = Method.together  # type: ignore[assignment]  # one training after the other

    def __init__(
        self,
        train: TrainSpec,
        model: ModelSpec,
        *,
        cut: int = 1,
        blocks: int = 3,
        hidden: int = 64,
        heads: int = 4,
        path: str | None = None,
        lora: int | None = None,
    ) -> None:
        check_positive(cut=cut, blocks=blocks, hidden=hidden, heads=heads)
        check_positive_or_none(lora=lora)
        if (got := max(blocks, hidden, lora or 0)) > MOST:
            raise UsageError(f"expected blocks, hidden and lora of at most {MOST}, got {got}")
        if path is None and lora is not None:
            raise UsageError(f"expected a model of transformers for lora={lora}, got none: add path=FOLDER")
        if path is not None and (blocks, hidden, heads) != (3, 64, 4):
            raise UsageError("expected no blocks, hidden or heads with path, whose model has its own: drop them")
        if path is None and cut >= blocks:
            raise UsageError(f"expected cut below the {blocks} blocks of split-lm, got {cut}: lower it, or add blocks")
        if hidden % heads:
            raise UsageError(f"expected heads to divide hidden={hidden}, got {heads}")
        train = train if train.epochs else msgspec.structs.replace(train, epochs=EPOCHS)
        super().__init__(train, model, boundary=SequenceBoundary)
        self.cut, self.blocks, self.hidden, self.heads = cut, blocks, hidden, heads
        self.path, self.lora = None if path is None else Path(path), lora

    def build(self, federation: Federation) -> None:
        """Draw each party's models from streams of their own.

        Raises:
            UsageError: no passive party holds text, or the active one does.
        """
        texts = [party for party in federation.parties.values() if party.holds_text]
        if not texts or federation.active in texts:
            got = "some at the active party" if texts else "none"
            raise UsageError(
                f"expected text at a passive party for split-lm, got {got}: choose --dataset census-text, or another "
                f"--method"
            )
        super().build(federation)
        for party in federation.parties.values():
            for defense in party.defenses.select(hooks.TEXT):
                if isinstance(defense, WordPrivacy) and party.holds_text:
                    words = party.modules["bottom"].get_submodule("words")
                    assert isinstance(words, nn.Embedding)
                    defense.read_words(words, len(party.layout.columns))

    @torch.no_grad()
    def embed_defended(self, federation: Federation, parties: Sequence[Party]) -> Mapping[str, Tensor]:
        """Return by split the states (n, T·d) of text as defenses of ``parties`` changed it; empty if none did."""
        training, embedded = self.split(federation), dict[str, Tensor]()
        for split in ("train", "test"):
            states = [self.representation(p)(text) for p in parties if (text := training.defend_text(p.name, split))]
            embedded |= {split: torch.cat(states, dim=1)} if states else {}
        return embedded

    def split(self, federation: Federation) -> TextTraining:
        """Return the training across the cut layer, from the models as they are."""
        bottoms = {party.name: self.representation(party) for party in federation.parties.values()}
        top = federation.active.modules["top"]
        return TextTraining(federation, bottoms, top, self._boundaries, self.train_spec)

    def build_party(self, party: Party, federation: Federation) -> None:
        """Give a party with text the lower model, another one an encoder of its columns."""
        if party.holds_text and self.path:
            party.modules["bottom"] = PretrainedLower(self.path, self.cut, party.layout, self.lora)
        elif party.holds_text:
            party.modules["bottom"] = LowerModel(party.layout, self.hidden, self.heads, self.cut)
        else:
            super().build_party(party, federation)

    def build_top(self, federation: Federation) -> nn.Module:
        """Return the upper model."""
        parties = federation.parties.values()
        lengths = [len(party.layout.columns) if party.holds_text else 0 for party in parties]
        readers = [self._build_reader(length) for length in lengths if length]
        return UpperModel([self.width(party) for party in parties], lengths, readers, federation.n_classes)

    def _build_reader(self, length: int) -> nn.Module:
        if self.path:
            return PretrainedUpper(self.path, self.cut, length, self.lora)
        return UpperBlocks(self.hidden, self.heads, self.blocks - self.cut)

    def notes(self, federation: Federation) -> list[str]:
        """Return whose lengths and sets of words are sent in clear, and which words a model of transformers has not."""
        texts = {party.name: party for party in federation.passive if party.holds_text}
        notes = [
            f"the mask tells the length of each text of {name}: no defense hides it, and no epsilon covers it"
            for name in texts
        ] + [
            f"custext hides the words of {name} within their sets alone: the set of each is revealed"
            for name, party in texts.items()
            if any(isinstance(defense, CusText) for defense in party.defenses.select(hooks.TEXT))
        ]
        return notes + [
            f"{model.split} of {len(party.layout.vocabulary)} words of {name} are several tokens of the model: each "
            f"has the mean of their embeddings"
            for name, party in texts.items()
            if isinstance(model := party.modules["bottom"], PretrainedLower) and model.split
        ]

    def _get_protocol(self, federation: Federation) -> tuple[type[Boundary], dict[str, Any]]:
        if federation.active.defenses.protocols():
            raise UsageError(
                "expected no encrypted layer with split-lm, whose upper blocks read hidden states in clear: drop the "
                "defense, or choose --method fedsplitnn"
            )
        return super()._get_protocol(federation)
