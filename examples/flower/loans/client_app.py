"""A passive party: it sends embeddings of its columns, and updates its model by the gradients that come back."""

from pathlib import Path

import pandas as pd
import torch
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from vflsec.audit.flower import RecorderMod

PARTIES = {"bank": "active", "bureau": "passive", "shop": "passive"}
N_TRAIN = 400


def about(message, context):
    split = message.content["batch"]["split"]
    return {"rows": table_of(context, split).index.to_numpy(), "split": split}


app = ClientApp(mods=[RecorderMod(parties=PARTIES, about=about)])


def table_of(context, split):
    table = pd.read_csv(Path(context.run_config["data"]) / f"{context.node_config['party']}.csv", index_col="id")
    return table[:N_TRAIN] if split == "train" else table[N_TRAIN:]


def bottom_of(context, width):
    """Return the party's model, which Flower keeps in the context between messages."""
    torch.manual_seed(0)
    bottom = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 4))
    if "bottom" in context.state:
        bottom.load_state_dict(context.state["bottom"].to_torch_state_dict())
    return bottom


@app.query()
def embed(message, context):
    batch = message.content["batch"]
    z = torch.tensor(table_of(context, batch["split"]).to_numpy()).float()
    h = bottom_of(context, z.shape[1])(z).detach().numpy()
    batch["party"] = context.node_config["party"]
    return Message(RecordDict({"embedding": ArrayRecord([h]), "batch": batch}), reply_to=message)


@app.train()
def update(message, context):
    batch = message.content["batch"]
    z = torch.tensor(table_of(context, batch["split"]).to_numpy()).float()
    bottom = bottom_of(context, z.shape[1])
    (gradient,) = message.content["gradient"].to_numpy_ndarrays()
    bottom(z).backward(torch.tensor(gradient))
    torch.optim.SGD(bottom.parameters(), lr=2.0).step()
    context.state["bottom"] = ArrayRecord(bottom.state_dict())
    return Message(RecordDict({"batch": batch}), reply_to=message)
