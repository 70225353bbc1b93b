"""A model of ``transformers`` from a folder, in two parts: the first blocks with the text, the others with the labels.

Nothing is downloaded, and nothing in the folder is executed: it is refused if it holds pickles, code, or a
configuration that names code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vflsec.base.errors import DataError, UsageError
from vflsec.base.layout import SPECIAL, Layout
from vflsec.language.transformer import Text, read_words

UNSAFE = {".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth", ".py"}
"""Endings of files that are code, or that can run code when they are read."""

NAMING = {
    "attn_implementation", "_attn_implementation", "auto_map", "fusion_config", "quantization_config",
    "transformers_weights",
}  # fmt: skip
"""Keys of a configuration that name code, or other files."""

COUNT, MOST = re.compile("block|depth|expert|group|layer|stage"), 256
"""Keys of a configuration that count parts of a model, and how many parts there may be beyond one for each tensor."""

ROWS = 256
"""The most texts that are read at once in prediction."""

TOLERANCE = 1e-4
"""How far states of a part may be from those of the whole model, relative to the largest."""


@contextmanager
def _read(path: Path, what: str) -> Iterator[None]:
    """Raise what goes wrong as a line about the folder."""
    try:
        yield
    except (DataError, UsageError):
        raise
    except ImportError as error:
        raise UsageError(f"expected transformers and peft, got {error}: pip install 'vflsec[transformers]'") from error
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        if "ignore_mismatched_sizes" in reason:
            reason = "weights of other sizes than config.json has"
        raise DataError(f"{path}: expected {what}, got {reason}: save it anew with save_pretrained") from error


def _check(path: Path) -> None:
    """Refuse a folder in which something could be executed, or that has no weights in safetensors."""
    if not (path / "config.json").is_file() or not any(path.glob("*.safetensors")):
        raise DataError(f"{path}: expected a folder with config.json and weights in safetensors, found none")
    unsafe = sorted(f.name for f in path.rglob("*") if f.suffix.lower() in UNSAFE or not (f.is_file() or f.is_dir()))
    if unsafe or (path / "adapter_config.json").exists():
        raise DataError(
            f"{path}: expected no pickle, code, adapter or pipe, found {(*unsafe, 'adapter_config.json')[0]}: copy "
            f"only config.json, tokenizer.json and safetensors into a folder"
        )
    settings: list[tuple[str, Any]] = []  # of all levels
    shards: dict[str, str] = {}
    with _read(path, "JSON in config.json and the index of the weights"):
        json.loads((path / "config.json").read_text("utf-8"), object_pairs_hook=settings.extend)
        for index in path.glob("*.safetensors.index.json"):
            shards |= json.loads(index.read_text("utf-8"))["weight_map"]
        elsewhere = {name for name in shards.values() if Path(name).name != name or Path(name).suffix != ".safetensors"}
    if naming := sorted(NAMING & {key for key, _ in settings} | elsewhere):
        raise DataError(f"{path}: expected JSON that names no code and no other file, found {naming[0]}: remove it")
    with _read(path, "weights in safetensors"):
        from safetensors import safe_open

        opened: list[Any] = [safe_open(file, "pt") for file in path.glob("*.safetensors")]
        tensors = sum(len(file.keys()) for file in opened)
    for key, value in settings:
        for number in value if isinstance(value, list) else [value]:
            if COUNT.search(key) and isinstance(number, int | float) and number > MOST + tensors:
                raise DataError(
                    f"{path}: expected {key} in config.json of at most {MOST} more than the {tensors} tensors, got "
                    f"{number:g}: copy the config.json of these weights"
                )


def load_model(path: Path) -> Any:
    """Return the model without a head, in float32, in evaluation mode.

    Raises:
        DataError: the folder is unsafe, damaged or incomplete.
        UsageError: transformers is not installed.
    """
    _check(path)
    with _read(path, "a model of transformers"):
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        model, info = transformers.AutoModel.from_pretrained(
            path, local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype=torch.float32,
            attn_implementation="eager", output_loading_info=True,
        )  # fmt: skip
        missing = sorted(name for name in info["missing_keys"] if "pooler" not in name)
        if missing:
            raise DataError(f"{path}: expected all weights in safetensors, found no {missing[0]}")
        for name, weight in model.named_parameters():
            if not torch.isfinite(weight).all():
                raise DataError(f"{path}: expected finite weights, got others in {name}: copy the file again")
        model.config.use_cache = False
        return model


def find_blocks(path: Path, model: Any, cut: int) -> str:
    """Return the name of the list of blocks.

    Raises:
        DataError: there is no such list, or several.
        UsageError: the cut leaves one part without blocks.
    """
    config = model.config
    blocks = getattr(config, "num_hidden_layers", 0)
    lists: list[str] = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == blocks]
    if len(lists) != 1 or blocks < 2 or getattr(config, "is_encoder_decoder", False):
        raise DataError(
            f"{path}: expected a model with one list of two or more blocks, found {config.model_type}: it has no cut"
        )
    if cut >= blocks:
        raise UsageError(f"expected cut below the {blocks} blocks of {path}, got {cut}: lower it")
    return lists[0]


class Bypass(nn.Module):
    """In the place of a block of the other part: returns the states that it gets, as the block would."""

    def __init__(self, *, as_tuple: bool) -> None:
        super().__init__()
        self.as_tuple = as_tuple

    def forward(self, states: Tensor, *args: object, **kwargs: object) -> Tensor | tuple[Tensor]:
        """Return the states."""
        return (states,) if self.as_tuple else states


class ModelPart(nn.Module):
    """The lower or the upper part of a model, which runs its own forward, so that masks and positions are the model's.

    Blocks of the other part are bypassed: the lower part returns what the first of them gets, the upper part puts its
    input in the place of what the last of them returns. On construction both are compared with the whole model.

    Args:
        path: the folder.
        cut: blocks in the lower part.
        length: of the texts, T.
        lora: the rank of the adapters, which alone learn; None to train all weights of the part.

    Raises:
        DataError: the model cannot be read or split.
        UsageError: no block would be above the cut.
    """

    is_lower: ClassVar[bool]

    def __init__(self, path: Path, cut: int, length: int, lora: int | None) -> None:
        super().__init__()
        self.model = load_model(path)
        self.blocks, self.cut, kinds = find_blocks(path, self.model, cut), cut, list[type]()
        blocks, tokens = self.model.get_submodule(self.blocks), self.model.get_input_embeddings()
        mask = torch.arange(length) < torch.tensor([[length], [max(1, length // 2)]])
        with _read(path, f"a model that reads texts of {length} words and can be split"):
            h = tokens(torch.arange(2 * length).view(2, length) % tokens.weight.shape[0]).detach()
            with blocks[0].register_forward_hook(lambda _, __, states: kinds.append(type(states))):
                whole = self.model(inputs_embeds=h, attention_mask=mask.long(), output_hidden_states=True)
            middle, last = whole.hidden_states[cut].detach(), whole.last_hidden_state.detach()
            for k in range(cut, len(blocks)) if self.is_lower else range(cut):
                blocks[k] = Bypass(as_tuple=kinds[0] is tuple)
            states, expected = self.run(h if self.is_lower else middle, mask), middle if self.is_lower else last
            if not ((states - expected)[mask].abs().max() <= TOLERANCE * expected[mask].abs().max()):
                raise DataError(f"{path}: expected a model that can be split after block {cut}, got other states")
            states.sum().backward()  # type: ignore[no-untyped-call]
            for parameter in self.model.parameters():  # what the other part has learns nothing here
                parameter.requires_grad_(parameter.grad is not None)
                parameter.grad = None
            if lora:
                self._adapt(lora)

    def remove_tokens(self) -> nn.Module:
        """Return the embedding of the model's tokens, which the part does without."""
        tokens: nn.Module = self.model.get_input_embeddings()
        self.model.set_input_embeddings(nn.Embedding(1, 1).requires_grad_(False))
        return tokens

    def _adapt(self, rank: int) -> None:
        """Add an adapter to each linear layer of the blocks, and freeze all else."""
        import peft

        kinds = {n: type(m).__name__ for n, m in self.model.named_modules() if n.startswith(f"{self.blocks}.")}
        linear = [name for name, kind in kinds.items() if kind in ("Conv1D", "Linear")]
        transposed = "Conv1D" in kinds.values()
        config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=linear, fan_in_fan_out=transposed)
        peft.inject_adapter_in_model(config, self.model)

    def run(self, h: Tensor, mask: Tensor) -> Tensor:
        """Return the states (B, T, d) of embeddings or states, zero where ``mask`` (B, T) is false."""
        if len(h) > ROWS and not torch.is_grad_enabled():
            parts = zip(torch.split(h, ROWS), torch.split(mask, ROWS), strict=True)
            return torch.cat([self.run(*part) for part in parts])
        read = mask | (torch.arange(mask.shape[1], device=mask.device) == 0)
        blocks, seen = self.model.get_submodule(self.blocks), list[Tensor]()

        def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            seen.append(args[0])
            return args if self.is_lower else (h, *args[1:])

        with blocks[self.cut if self.is_lower else self.cut - 1].register_forward_pre_hook(enter):
            last: Tensor = self.model(inputs_embeds=h, attention_mask=read.long()).last_hidden_state
        return (seen[0] if self.is_lower else last) * mask[..., None]


class PretrainedLower(ModelPart):
    """The words of the dataset, then the first blocks: encoded text (B, T·V) -> hidden states (B, T·d).

    A word that the model's tokenizer splits has the mean of the embeddings of its pieces; ``split`` counts such words.
    """

    is_lower = True

    def __init__(self, path: Path, cut: int, layout: Layout, lora: int | None) -> None:
        super().__init__(path, cut, len(layout.columns), lora)
        pieces, tokens = list_pieces(path, self.model.config, layout.vocabulary), self.remove_tokens()
        with _read(path, "a tokenizer of the model"), torch.no_grad():
            weight = torch.stack([tokens(torch.tensor(ids)).mean(dim=0) for ids in pieces])
        self.words = nn.Embedding(*weight.shape).requires_grad_(lora is None)
        self.words.weight.data = weight
        self.width, self.split = len(layout.columns) * weight.shape[1], sum(len(p) > 1 for p in pieces[len(SPECIAL) :])

    def forward(self, x: Tensor | Text) -> Tensor:
        """Return the hidden states of each row side by side, (B, T·d), zero at padding."""
        return self.run(*read_words(x, self.words)).flatten(1)


class PretrainedUpper(ModelPart):
    """The last blocks on the states of a text, of which it returns the mean: (B, T, d) -> (B, d)."""

    is_lower = False

    def __init__(self, path: Path, cut: int, length: int, lora: int | None) -> None:
        super().__init__(path, cut, length, lora)
        self.width = int(self.remove_tokens()(torch.zeros(1, dtype=torch.long)).shape[1])

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Return the mean of the last states of all words."""
        return self.run(states, mask).sum(dim=1) / mask.sum(dim=1, keepdim=True).clamp_min(1)


def list_pieces(path: Path, config: Any, vocabulary: Sequence[str]) -> list[list[int]]:
    """Return the model's tokens of each word, by the tokenizer in the folder.

    Without one, words are the model's tokens by their numbers, if there are as many.

    Raises:
        DataError: there is no tokenizer, and not as many words, or it is damaged.
    """
    if not (path / "tokenizer.json").exists():
        if config.vocab_size != len(vocabulary):
            raise DataError(
                f"{path}: expected tokenizer.json, or a model of as many tokens as the dataset has words, "
                f"{len(vocabulary)}, found no tokenizer and {config.vocab_size} tokens: save the fast tokenizer there"
            )
        return [[number] for number in range(len(vocabulary))]
    with _read(path, "a tokenizer in tokenizer.json"):
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        begin = [*tokenizer.encode("").ids, config.bos_token_id, config.eos_token_id, 0]
        unknown = tokenizer.encode("unknown", add_special_tokens=False).ids
        special = dict(zip(SPECIAL, ([0], unknown), strict=True))
        special["[start]"] = [next(token for token in begin if token is not None)]
        pieces = []
        for word in vocabulary:
            ways = [tokenizer.encode(text, add_special_tokens=False).ids for text in (f" {word}", word)]
            pieces.append(special.get(word, min(filter(None, ways), key=len, default=unknown)))
        words = pieces[len(SPECIAL) :]
        apart, last = len(set(map(tuple, words))), max(map(max, filter(None, pieces)), default=0)
        if not all(pieces) or 2 * apart < len(words) or last >= config.vocab_size:
            raise DataError(
                f"{path}: expected a tokenizer that tells most of the dataset's {len(words)} words apart, by tokens "
                f"below {config.vocab_size}, got {apart} apart and token {last}: copy that of these weights"
            )
        return pieces
