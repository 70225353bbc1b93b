"""A model of transformers from a folder, split between two parties: against the model itself, and a joint peft loop."""

import dataclasses
import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from vflsec.base.errors import DataError, InsufficientView, UsageError
from vflsec.base.layout import PADDING
from vflsec.core.message import Kind, Transcript
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.data import frames
from vflsec.data.bundle import make_table
from vflsec.data.dataset import VerticalDataset
from vflsec.data.partition import DataSpec
from vflsec.language.noisy_channel import Mechanism, fit_channel
from vflsec.language.pretrained import PretrainedLower, PretrainedUpper
from vflsec.language.public_head import find_centers, fit_head
from vflsec.language.split_lm import SplitLM
from vflsec.language.text import START, Tokenizer, make_text_table
from vflsec.language.text_inversion import TextInversion
from vflsec.language.text_prior import fit_forests
from vflsec.language.word_order import States
from vflsec.language.word_privacy import SanText, SnD
from vflsec.results import metrics
from vflsec.run.federation import build_federation
from vflsec.run.plan import make_cell
from vflsec.run.questions import ask
from vflsec.run.spec import AuxSpec
from vflsec.testing.conformance import MethodConformance

transformers = pytest.importorskip("transformers", reason="extra transformers")
WIDTH, LENGTH = 16, 8
WORDS = ("cat", "dog", "owl", "bee", "sees", "hears", "at", "night")
VOCABULARY = Tokenizer.from_texts(WORDS).vocabulary


def make_texts(rows=160, classes=2, parties=2):
    """Texts of three to six words, whose first word tells the class; the other parties have numbers."""
    rng, ids = np.random.default_rng(0), pd.RangeIndex(rows, name="id")
    labels = rng.permutation(np.arange(rows) % classes)
    texts = pd.Series([" ".join([WORDS[y], *rng.choice(WORDS, rng.integers(2, 6))]) for y in labels], ids)
    text = make_text_table("texts", "passive_1", texts, Tokenizer.from_texts(WORDS), LENGTH)
    others = ["active", *(f"passive_{k}" for k in range(2, parties))]
    tables = [make_table("texts", n, pd.DataFrame(rng.normal(size=(rows, 2)), ids, ["a", "b"])) for n in others]
    ordered = sorted([*tables, text], key=lambda table: table.name)
    return VerticalDataset("texts", tuple(ordered), pd.Series(labels, ids), tuple("uvwx"[:classes]))


def make_config(kind, size, **further):
    small = {"vocab_size": size, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    if kind == "gpt2":
        small |= {"n_embd": WIDTH, "n_layer": 3, "n_head": 2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
        return transformers.GPT2Config(**{"n_positions": 32, **small, **further})
    small |= {"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    if kind == "llama":
        return transformers.LlamaConfig(num_key_value_heads=1, max_position_embeddings=32, **small)
    small |= {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    return transformers.BertConfig(max_position_embeddings=32, **small)


def make_folder(path, kind="gpt2", words=VOCABULARY, **further):
    """Save a model of random weights and a tokenizer whose words stand in another order than the dataset's."""
    import tokenizers
    from tokenizers import models, pre_tokenizers

    tokens = {word: number for number, word in enumerate(["[pad]", "[bos]", "unknown", *reversed(words[3:])])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(tokens, unk_token="unknown"))  # noqa: S106  (no password)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(make_config(kind, len(tokens), **further))
        for parameter in model.parameters():  # so that no bias is zero, and no norm the identity
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each kind, which no test changes."""
    return {kind: make_folder(tmp_path_factory.mktemp(kind), kind) for kind in ("gpt2", "llama", "bert")}


@pytest.fixture
def folder(folders, tmp_path):
    return shutil.copytree(folders["gpt2"], tmp_path / "model")


def make_federation(seed=0, data=None, **options):
    settings = {"train": TrainSpec(), "model": ModelSpec(), "data": data or DataSpec(), "defenses": ()}
    name = frames.keep(make_texts(**options))
    return build_federation(make_cell(dataset=name, method="split-lm", method_options={}, seed=seed, **settings), "cpu")


def make_method(path, epochs=2, **options):
    return SplitLM(TrainSpec(epochs=epochs, batch=32), ModelSpec(bottom=(8,)), path=str(path), **options)


def read_rows(federation, split="test"):
    """The layout, the encoded rows, the model's tokens for them, and the mask."""
    party = federation.parties["passive_1"]
    tokens = party.features[split].reshape(-1, LENGTH, len(party.layout.vocabulary)).argmax(dim=2)
    places = {START: 1, PADDING: 0}
    last = len(party.layout.vocabulary) + 2
    ids = torch.tensor([[places.get(t, last - t) for t in row] for row in tokens.tolist()])
    return party.layout, party.features[split], ids, tokens != PADDING


@pytest.mark.parametrize("lora", [None, 2])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_states_after_each_block_are_those_of_transformers(kind, lora, folders):
    layout, x, ids, mask = read_rows(make_federation())
    assert not mask.all()
    whole = transformers.AutoModel.from_pretrained(folders[kind]).eval()
    with torch.no_grad():
        answer = whole(input_ids=ids, attention_mask=mask.long(), output_hidden_states=True)
    for cut in (1, 2):
        lower = PretrainedLower(folders[kind], cut, layout, lora).eval()
        states = lower(x).unflatten(1, (LENGTH, WIDTH))
        torch.testing.assert_close(states[mask], answer.hidden_states[cut][mask], rtol=0, atol=1e-5)
        assert not states[~mask].any()
        upper = PretrainedUpper(folders[kind], cut, LENGTH, lora).eval()
        expected = (answer.last_hidden_state * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)
        torch.testing.assert_close(upper(states, mask), expected, rtol=0, atol=1e-5)
        mixture = (x.clone().requires_grad_(), x)  # as attacks read it that change the rows
        torch.testing.assert_close(lower(mixture[0]), lower(mixture[1]), rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers for it
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_lora_learns_as_in_a_joint_loop_of_peft(kind, folders):
    """Losses, hidden states, their gradients and the adapters of three epochs are those of the model in one place."""
    import peft

    federation, sent = make_federation(), {Kind.EMBEDDING: [], Kind.GRADIENT: []}
    federation.channel.taps.append(lambda message: message.phase == "train" and sent[message.kind].append(message))
    trained = make_method(folders[kind], epochs=3, lora=2, cut=2).fit(federation)
    ends = list_adapters(federation)

    twin = make_federation()
    make_method(folders[kind], lora=2, cut=2).build(twin)  # the same weights before training
    starts, features, labels = list_adapters(twin), twin.active.features["train"], twin.active.labels["train"]
    ids, mask = read_rows(twin, "train")[2:]
    bottom, head = twin.active.modules["bottom"], twin.active.modules["top"].head
    special = {"gpt2": {"fan_in_fan_out": True}, "bert": {"exclude_modules": ["pooler.dense"]}}.get(kind, {})
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules="all-linear", **special)
    joint = peft.get_peft_model(transformers.AutoModel.from_pretrained(folders[kind]), config)
    learned = {n.removeprefix("base_model.model."): p for n, p in joint.named_parameters() if p.requires_grad}
    assert learned.keys() == starts.keys()
    for name, parameter in learned.items():
        parameter.data.copy_(starts[name])
    optimizer = torch.optim.Adam([*learned.values(), *bottom.parameters(), *head.parameters()], 1e-3)
    losses = []
    for embedding, gradient in zip(sent[Kind.EMBEDDING], sent[Kind.GRADIENT], strict=True):
        rows = embedding.rows
        words = mask[rows]
        answer = joint(input_ids=ids[rows], attention_mask=words.long(), output_hidden_states=True)
        middle = answer.hidden_states[2]
        middle.retain_grad()
        mean = (answer.last_hidden_state * words[..., None]).sum(dim=1) / words.sum(dim=1, keepdim=True)
        loss = F.cross_entropy(head(torch.cat([bottom(features[rows]), mean], dim=1)), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(embedding.payload["value"][words], middle[words].detach(), rtol=0, atol=1e-5)
        torch.testing.assert_close(gradient.payload["value"][words], middle.grad[words], rtol=0, atol=1e-5)
        losses.append(loss.item() * len(rows))
    epochs = [sum(part) / len(labels) for part in np.array_split(losses, 3)]
    assert len(losses) > 6
    assert trained.history["train"] == pytest.approx(epochs, abs=1e-5)
    for name, parameter in learned.items():
        torch.testing.assert_close(ends[name], parameter.detach(), rtol=0, atol=1e-5)
    assert max(float((ends[name] - starts[name]).abs().max()) for name in ends) > 1e-3


def list_adapters(federation):
    """What of the model learns, of both parties, by its name in the model."""
    parts = federation.parties["passive_1"].modules["bottom"], federation.active.modules["top"].readers[0]
    return {n: p.detach().clone() for part in parts for n, p in part.model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_what_learns_is_the_part_of_a_party_or_its_adapters_alone(kind, folders):
    names = {}
    for lora in (None, 2):
        federation = make_federation()
        make_method(folders[kind], lora=lora, cut=2).build(federation)
        lower = federation.parties["passive_1"].modules["bottom"]
        names[lora] = {n for n, p in lower.named_parameters() if p.requires_grad}
        assert all(p.grad is None for p in federation.active.modules["top"].parameters())
    assert "words.weight" in names[None]
    assert names[2]
    assert all(".lora_" in name for name in names[2])
    whole = transformers.AutoModel.from_pretrained(folders[kind])
    layers = {re.split(r"\.(?=[012]\.)", n)[0] for n, _ in whole.named_parameters() if re.search(r"\.[012]\.", n)}
    assert len(layers) == 1
    place = f"model.{layers.pop()}"
    assert {n for n in names[None] if n.startswith(place)} == {
        f"model.{n}" for n, _ in whole.named_parameters() if f"model.{n}".startswith((f"{place}.0.", f"{place}.1."))
    }


def test_a_word_of_several_tokens_has_the_mean_of_their_embeddings(folder):
    tokens = json.loads((folder / "tokenizer.json").read_text())
    tokens["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": "ni|ght"}, "behavior": "Isolated", "invert": False}
    tokens["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}, tokens["pre_tokenizer"]]}
    del tokens["model"]["vocab"]["night"]
    tokens["model"]["vocab"] |= {"ni": 4, "ght": 5}
    tokens["model"]["vocab"] = {w: n for w, n in tokens["model"]["vocab"].items() if w not in ("sees", "owl")}
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    federation, method = make_federation(), make_method(folder)
    method.build(federation)
    lower = federation.parties["passive_1"].modules["bottom"]
    weight = transformers.AutoModel.from_pretrained(folder).get_input_embeddings().weight
    place = lower.words.weight[federation.parties["passive_1"].layout.vocabulary.index("night")]
    torch.testing.assert_close(place, weight[[4, 5]].mean(dim=0))
    note = "1 of 11 words of passive_1 are several tokens of the model: each has the mean of their embeddings"
    assert note in method.notes(federation)


def test_without_a_tokenizer_words_are_tokens_by_their_numbers_if_there_are_as_many(folder, tmp_path):
    (folder / "tokenizer.json").unlink()
    federation = make_federation()
    make_method(folder).build(federation)
    words = federation.parties["passive_1"].modules["bottom"].words.weight
    assert torch.equal(words, transformers.AutoModel.from_pretrained(folder).get_input_embeddings().weight)
    other = make_folder(tmp_path, words=[*VOCABULARY, "more"])
    (other / "tokenizer.json").unlink()
    expect_refusal(other, "expected tokenizer.json, or a model of as many tokens .* 11, found no tokenizer and 12")


def expect_refusal(path, match, error=DataError, **options):
    with pytest.raises(error, match=match) as refused:
        make_method(path, **options).build(make_federation())
    assert "\n" not in str(refused.value)


class Marker:
    """A pickle that writes a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("beside", [True, False])
def test_a_folder_with_a_pickle_is_refused_and_not_read(folder, tmp_path, beside):
    marker = tmp_path / "marker"
    torch.save({"wte.weight": Marker(marker)}, folder / "pytorch_model.bin")
    if not beside:
        (folder / "model.safetensors").unlink()
    expect_refusal(
        folder, "no pickle, code, adapter or pipe, found pytorch_model.bin" if beside else "weights in safetensors"
    )
    assert not marker.exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)["wte.weight"].close()
    assert marker.exists()  # so that the test could have failed


def test_an_index_that_names_a_file_elsewhere_is_refused_and_none_is_read(folder, tmp_path):
    marker = tmp_path / "marker"
    torch.save({"wte.weight": Marker(marker)}, tmp_path / "evil.bin")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, "model-1.safetensors")}))
    make_method(folder).build(make_federation())
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, "../evil.bin")}))
    expect_refusal(folder, "no other file, found ../evil.bin")
    assert not marker.exists()


@pytest.mark.parametrize("file", ["evil.py", None])
@pytest.mark.parametrize("kind", ["gpt2", "evil"])
def test_a_configuration_that_names_code_is_refused_and_none_is_executed(folder, tmp_path, file, kind):
    marker = tmp_path / "marker"
    code = f"open({str(marker)!r}, 'w').close()\nclass Config: pass\nclass Model: pass\n"
    if file:
        (folder / file).write_text(code)
    change(folder, model_type=kind, auto_map={"AutoConfig": "evil.Config", "AutoModel": "evil.Model"})
    expect_refusal(folder, "found evil.py" if file else "names no code and no other file, found auto_map")
    assert not marker.exists()


def change(folder, **settings):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_damaged_folders_are_refused_in_a_line(folder, tmp_path):
    def damage(name, **files):
        copy = shutil.copytree(folder, tmp_path / name)
        for file, text in files.items():
            (copy / re.sub("_json$", ".json", file)).write_text(text)
        return copy

    expect_refusal(tmp_path / "nowhere", "config.json and weights in safetensors, found none")
    expect_refusal(
        damage("text", config_json="{"), "JSON in config.json and the index of the weights, got JSONDecodeError"
    )
    expect_refusal(damage("type", config_json='{"model_type": "none"}'), "a model of transformers, got")
    expect_refusal(damage("words", tokenizer_json="{}"), "a tokenizer in tokenizer.json, got")
    expect_refusal(damage("adapter", adapter_config_json="{}"), "found adapter_config.json")
    for name, match, settings in [
        ("shape", "a model of transformers, got", {"n_embd": 32}),
        ("heads", "a model of transformers, got", {"n_head": "two"}),
        (
            "deep",
            r"n_layer in config.json of at most 256 more than the 40 tensors, got 1e\+09: copy",
            {"n_layer": 10**9},
        ),
        ("inner", "num_experts in config.json of at most", {"text_config": {"num_experts": [1e308]}}),
        ("shallow", "one list of two or more blocks, found gpt2", {"n_layer": 0}),
        ("large", "weights of other sizes than config.json has", {"vocab_size": 10**9}),
        ("quantized", "found quantization_config", {"quantization_config": {"bits": 4}}),
        ("nested", "found attn_implementation", {"inner": [{"attn_implementation": "someone/kernel"}]}),
    ]:
        copy = damage(name)
        change(copy, **settings)
        expect_refusal(copy, match)
    cut_off = damage("truncated")
    weights = (cut_off / "model.safetensors").read_bytes()
    (cut_off / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    expect_refusal(cut_off, "weights in safetensors, got SafetensorError")
    less = damage("incomplete")
    tensors = load_file(less / "model.safetensors")
    del tensors["h.1.ln_1.weight"]
    save_file(tensors, less / "model.safetensors", metadata={"format": "pt"})
    expect_refusal(less, "all weights in safetensors, found no h.1.ln_1.weight")


@pytest.mark.parametrize("kind", [SanText, SnD])
def test_privacy_of_words_acts_before_the_blocks_of_the_model(folders, kind):
    federation, method = make_federation(), make_method(folders["gpt2"], epochs=1)
    party = federation.parties["passive_1"]
    party.defenses = [kind(0.125)]
    trained = method.fit(federation)
    before = transformers.AutoModel.from_pretrained(folders["gpt2"]).get_input_embeddings().weight
    words = party.modules["bottom"].words.weight
    assert any(torch.equal(words[-1], each) for each in before) == kind.fixes
    states = []
    federation.channel.taps.append(lambda message: message.kind == Kind.EMBEDDING and states.append(message.payload))
    trained.predict("test")
    plain = party.modules["bottom"](party.features["test"]).unflatten(1, (LENGTH, WIDTH))
    assert torch.equal(states[0]["mask"], (plain != 0).any(dim=2))
    assert (states[0]["value"] - plain).abs().mean() > 0.1 * plain.abs().mean()


def test_weights_that_are_not_finite_are_refused(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["wte.weight"][-1, 0] = float("nan")  # of a word that no check runs through the model
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    expect_refusal(folder, "expected finite weights, got others in wte.weight: copy the file again")


@pytest.mark.parametrize(
    ("tokens", "got"),
    [
        ({"unknown": 0}, "2 apart and token 1"),
        ({w: 99 + k for k, w in enumerate([*WORDS, "unknown"])}, "9 apart .* 107"),
    ],
)
def test_a_tokenizer_of_another_model_is_refused(folder, tokens, got):
    text = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(text | {"model": text["model"] | {"vocab": tokens}}))
    expect_refusal(folder, f"tells most of the dataset's 9 words apart, by tokens below 11, got {got}: copy that of")


def test_models_without_a_cut_are_refused_in_a_line(folders, tmp_path):
    expect_refusal(folders["gpt2"], "cut below the 3 blocks of .*, got 3: lower it", UsageError, cut=3)
    short = make_folder(tmp_path / "short", n_positions=LENGTH - 1)
    expect_refusal(short, "a model that reads texts of 8 words and can be split, got IndexError")
    config = transformers.T5Config(vocab_size=11, d_model=8, d_kv=4, d_ff=8, num_layers=3, num_heads=2)
    transformers.T5Model(config).save_pretrained(tmp_path / "t5")
    expect_refusal(tmp_path / "t5", "one list of two or more blocks, found t5: it has no cut")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"lora": 2}, "a model of transformers for lora=2, got none: add path=FOLDER"),
        ({"path": "model", "blocks": 2}, "no blocks, hidden or heads with path"),
        ({"path": "model", "lora": 0}, "lora > 0, got 0"),
    ],
)
def test_options_without_effect_are_refused(options, match):
    with pytest.raises(UsageError, match=match):
        SplitLM(TrainSpec(), ModelSpec(), **options)


def test_another_model_in_the_same_folder_is_another_training(folder, tmp_path):
    def key(path):
        settings = {"train": TrainSpec(), "model": ModelSpec(), "data": DataSpec(), "defenses": (), "seed": 0}
        return make_cell(dataset="census-text", method="split-lm", method_options={"path": str(path)}, **settings).key

    before = key(folder)
    assert key(shutil.copytree(folder, tmp_path / "elsewhere")) == before
    change(folder, layer_norm_epsilon=1e-3)
    assert key(folder) != before


def test_the_seed_draws_the_dropout_of_a_model(folder):
    change(folder, resid_pdrop=0.3, embd_pdrop=0.3)
    weights = []
    for other in (1, 2):  # what was drawn before in the process
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(other)
            trained = make_method(folder, epochs=1).fit(make_federation())
        weights.append([p for party in trained.federation.parties.values() for p in party.modules.parameters()])
    assert all(map(torch.equal, *weights))


def test_without_transformers_the_line_names_the_extra(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    expect_refusal(folder, r"pip install 'vflsec\[transformers\]'", UsageError)


class TestMethodConformance_split_lm_of_transformers(MethodConformance):
    @pytest.fixture(autouse=True)
    def _folder(self, folders):
        self.folder = folders["gpt2"]

    def make(self):
        return make_method(self.folder, lora=2)

    def federation(self, seed=0, *, parties=2, classes=2, **_):
        data = DataSpec(n_labeled=60, aligned=0.8, validation=0.2)
        return make_federation(seed, data, parties=parties, classes=classes)


@pytest.mark.parametrize(("kind", "cut"), [("gpt2", 2), ("llama", 1), ("bert", 2)])
def test_a_public_head_gives_every_word_without_known_rows(folders, kind, cut):
    """States of random words, in texts of all lengths; another model's weights give few of them."""
    layout, words = make_federation().parties["passive_1"].layout, torch.randint(1, 11, (40, LENGTH))
    mask = torch.arange(LENGTH) <= torch.arange(40)[:, None] % LENGTH
    words *= mask
    head, other = (
        PretrainedLower(folders[name], cut, layout, None) for name in (kind, "llama" if kind != "llama" else "gpt2")
    )
    with torch.no_grad():
        states = head.run(head.words(words), mask)
    none = (states[:0], mask[:0])
    rng = torch.Generator().manual_seed(0)
    assert torch.equal(fit_head(none, words[:0], (states, mask), head, rng), words)
    wrong = fit_head(none, words[:0], (states, mask), other, rng)
    assert ((wrong == words) & mask).sum() < 0.5 * mask.sum()


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_the_head_decoder_recovers_all_words_from_the_first_epoch_also_those_that_no_known_row_has(folders, kind):
    federation, transcript = make_federation(), Transcript(frozenset({"active"}), frozenset(Kind))
    federation.channel.taps.append(transcript)
    trained = make_method(folders[kind], epochs=2, lora=2).fit(federation)
    for split in ("train", "test"):
        trained.predict(split)
    question, rates = ask(TextInversion(), trained, "active", AuxSpec(n=20), tuple(transcript.messages)), {}
    truth, absent = question.truth.labels, VOCABULARY.index("night")
    known = (truth["train"] != absent).all(dim=1).nonzero()[:20, 0]
    view = dataclasses.replace(question.view, aux_rows=known, aux_labels=truth["train"][known])
    for decoder in ("head", "linear", None):
        words = TextInversion(decoder=decoder)(view, seed=0).scores
        rates[decoder] = [metrics.measure_words(words[s].numpy(), truth[s].numpy()) for s in ("train", "test")]
    assert min(rates["head"]) == 1
    assert max(rates["linear"]) < 0.95


def test_a_public_head_names_words_of_noisy_states_that_no_known_row_has(folders):
    """The channel decoder reads the words' mean states under the head; without them it names known words alone."""
    layout, rng = make_federation().parties["passive_1"].layout, torch.Generator().manual_seed(0)
    words = torch.randint(1, 11, (400, LENGTH), generator=rng)
    mask = torch.arange(LENGTH) <= torch.arange(400)[:, None] % LENGTH
    words *= mask
    head = PretrainedLower(folders["gpt2"], 1, layout, None)
    with torch.no_grad():
        states = head.run(head.words(words), mask)
    drawn = states[:, :, None] + 1.0 * states[mask].std(dim=0) * torch.randn(
        400, LENGTH, 4, states.shape[2], generator=rng
    )
    noisy = drawn.mean(dim=2) * mask[..., None]  # of four releases
    known = (words != 10).all(dim=1).nonzero()[:60, 0]
    centers = find_centers(head, mask, rng)[1]
    of_known, shares = fit_forests(np.zeros((60, 1)), words[known].numpy(), {"all": np.zeros((400, 1))}, 0)
    columns = torch.zeros(400, 1)
    rows, rates = States(noisy, mask, shares["all"], columns, words[:, :0]), []
    for mechanism in (Mechanism(centers / centers.std()), None):
        source = States(noisy[known], mask[known], of_known, columns[known], words[known, :0])
        read = fit_channel(source, words[known], rows, mechanism).words
        rates.append([float((read == words)[part].double().mean()) for part in (mask, words == 10)])
    assert rates[0][0] > max(0.85, rates[1][0])
    assert rates[0][1] > 0.5 > rates[1][1] == 0


def test_a_head_decoder_without_a_public_head_is_refused_in_a_line():
    federation, transcript = make_federation(), Transcript(frozenset({"active"}), frozenset(Kind))
    federation.channel.taps.append(transcript)
    trained = SplitLM(TrainSpec(epochs=1), ModelSpec(bottom=(8,)), hidden=8, heads=2).fit(federation)
    attack = TextInversion(decoder="head")
    view = ask(attack, trained, "active", AuxSpec(n=20), tuple(transcript.messages)).view
    with pytest.raises(InsufficientView, match=r"^attack 'text-inversion' needs the public head; [^\n]*path=FOLDER"):
        attack(view, seed=0)


@pytest.mark.long
def test_the_page_recovers_text_from_the_states_of_a_model_on_disk(tmp_path, monkeypatch, capsys):
    """200 known sentences of the survey; the model has random weights, and only its adapters learn."""
    page = (Path(__file__).parents[2] / "docs" / "language.md").read_text("utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(code.splitlines()) <= 30
    monkeypatch.chdir(tmp_path)
    names = {}
    with torch.random.fork_rng(devices=[]):
        exec(code, names)  # noqa: S102  (the page's own example)
    leaks = {point.attack: point.leak for point in names["report"].points}
    assert leaks["text-inversion"].mean > 0.9
    assert leaks["text-prior"].mean < 0.4
    assert "text-inversion" in capsys.readouterr().out
