"""Fine-tune a split GPT-2 in your own loop, record what crosses the cut, and audit what it tells of the texts."""

import torch
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2Model

import vflsec
from vflsec.language.census_text import build_tokenizer, load

data = load(rows=400)
tokens = torch.tensor(data.parties[1].frame.sort_index().to_numpy())  # (n, T), 0 is padding
labels, mask = torch.tensor(data.labels.sort_index().to_numpy()), tokens != 0
train, test = torch.arange(300), torch.arange(300, 400)

torch.manual_seed(0)
size = {"vocab_size": len(build_tokenizer().vocabulary), "n_embd": 16, "n_head": 4}
size |= {"bos_token_id": 2, "eos_token_id": 2}
lower = GPT2Model(GPT2Config(n_layer=1, **size))  # at the party with the texts
upper, head = GPT2Model(GPT2Config(n_layer=2, **size)), torch.nn.Linear(16, 2)  # at the party with the labels
optimizer = torch.optim.AdamW([p for part in (lower, upper, head) for p in part.parameters()], 1e-3)


def predict(rows, **place):
    """Return the logits of some texts, and record the hidden states (B, T, d), zero at padding."""
    seen = mask[rows]
    states = lower(tokens[rows], attention_mask=seen.long()).last_hidden_state * seen[..., None]
    states = recorder.cut(states, rows=rows, **place)
    last = upper(inputs_embeds=states, attention_mask=seen.long()).last_hidden_state * seen[..., None]
    return head(last.sum(dim=1) / seen.sum(dim=1, keepdim=True))


with vflsec.Recorder("transcript", parties={"active": "active", "passive_1": "passive"}, classes=2) as recorder:
    for _ in range(2):
        for rows in torch.randperm(300).split(50):
            optimizer.zero_grad()
            cross_entropy(predict(rows), labels[rows]).backward()
            optimizer.step()
    with torch.no_grad():
        predict(train, phase="predict")
        predict(test, split="test")

report = vflsec.audit_system(
    "transcript", data, party="active", attack="text-inversion:decoder=linear", aux={"n": 100}, draws=1
)
print(report.to_frame()[["attack", "leak", "alone"]])  # noqa: T201
