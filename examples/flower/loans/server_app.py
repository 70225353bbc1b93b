"""The active party: it has the labels and the top model, and returns the gradients of the embeddings."""

import time
from pathlib import Path

import pandas as pd
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import ServerApp
from torch import nn

N_TRAIN, CLIENTS, WIDTH = 400, 2, 4

app = ServerApp()


@app.main()
def main(grid, context):
    bank = pd.read_csv(Path(context.run_config["data"]) / "bank.csv", index_col="id")[:N_TRAIN]
    y = torch.tensor(bank.pop("label").to_numpy())
    x = torch.tensor(bank.to_numpy()).float()
    torch.manual_seed(1)
    top = nn.Linear(x.shape[1] + CLIENTS * WIDTH, 2)
    optimizer = torch.optim.SGD(top.parameters(), lr=0.5)
    while len(nodes := list(grid.get_node_ids())) < CLIENTS:
        time.sleep(1)

    def ask(kind, split, arrays):
        """Send each node a message; return the replies in the order of the parties' names."""
        batch = {"batch": ConfigRecord({"split": split})}
        replies = list(grid.send_and_receive([Message(RecordDict(batch | arrays[n]), n, kind) for n in nodes]))
        if failed := [reply.error for reply in replies if reply.has_error()]:
            raise RuntimeError(f"a client failed: {failed[0].reason}")
        return sorted(replies, key=lambda reply: reply.content["batch"].get("party", ""))

    for _ in range(int(context.run_config["rounds"])):
        replies = ask(MessageType.QUERY, "train", {node: {} for node in nodes})
        cut = [torch.tensor(reply.content["embedding"].to_numpy_ndarrays()[0]).requires_grad_() for reply in replies]
        loss = nn.functional.cross_entropy(top(torch.cat([x, *cut], dim=1)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        senders = [reply.metadata.src_node_id for reply in replies]
        gradients = {n: {"gradient": ArrayRecord([h.grad.numpy()])} for n, h in zip(senders, cut, strict=True)}
        ask(MessageType.TRAIN, "train", gradients)
    ask(MessageType.QUERY, "test", {node: {} for node in nodes})
