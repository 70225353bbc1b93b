"""A model that was trained outside of vflsec, by plain PyTorch on CSV files, and all that an auditor may be handed."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from vflsec.audit.recorder import Recorder

FACTORY = """
from torch import nn

def build():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))

def wider():
    return nn.Linear(7, 4)

def number():
    return 7
"""

N, TRAIN = 700, 450


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Return a folder with the material, and the parts of the training."""
    folder = tmp_path_factory.mktemp("trained")
    rng = np.random.default_rng(3)
    own, other = rng.normal(size=(N, 5)), rng.normal(size=(N, 6))
    y = (1.5 * own[:, 0] + other[:, 0] + other[:, 1] + 0.3 * rng.normal(size=N) > 0).astype(int)
    ids = pd.Index([f"person {k}" for k in rng.permutation(N)], name="id")
    bank = pd.DataFrame(own, index=ids, columns=[f"bank_{k}" for k in range(5)]).assign(
        label=np.where(y, "bad", "good")
    )
    bureau = pd.DataFrame(other, index=ids, columns=[f"bureau_{k}" for k in range(6)])
    bank.to_csv(folder / "bank.csv")
    bureau.to_csv(folder / "bureau.csv")
    folder.joinpath("mine.toml").write_text(
        'name = "loans"\nlabel = "label"\nid = "id"\n[parties.active]\nfile = "bank.csv"\n'
        '[parties.passive_1]\nfile = "bureau.csv"\n'
    )
    folder.joinpath("factory.py").write_text(FACTORY)
    x, z, target = torch.tensor(own).float(), torch.tensor(other).float(), torch.tensor(y)
    torch.manual_seed(0)
    bottom = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
    top = nn.Linear(9, 2)
    optimizer = torch.optim.Adam([*bottom.parameters(), *top.parameters()], lr=1e-2)
    names = ids.to_numpy()
    with Recorder(
        folder / "transcript", parties={"bank": "active", "bureau": "passive"}, observer="bureau", classes=2
    ) as recorder:
        for _ in range(12):
            for rows in torch.randperm(TRAIN).split(64):
                h = recorder.cut(bottom(z[rows]), rows=names[rows])
                loss = F.cross_entropy(top(torch.cat([x[rows], h], dim=1)), target[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        with torch.no_grad():
            embeddings = bottom(z)
            for split, rows in (("train", slice(0, TRAIN)), ("test", slice(TRAIN, N))):
                recorder.cut(embeddings[rows], rows=names[rows], split=split, phase="predict")
    save_file(bottom.state_dict(), folder / "bottom.safetensors")
    torch.save(bottom.state_dict(), folder / "bottom.pt")
    columns = [f"e_{k}" for k in range(4)]
    table = pd.DataFrame(embeddings.numpy(), index=ids, columns=columns)
    table.to_csv(folder / "embeddings.csv")
    table.reset_index().to_parquet(folder / "embeddings.parquet")
    folder.joinpath("train.txt").write_text("\n".join(names[:TRAIN]))
    folder.joinpath("test.txt").write_text("id\n" + "\n".join(names[TRAIN:]) + "\n")
    return SimpleNamespace(folder=folder, bottom=bottom, embeddings=embeddings, ids=ids, y=y, own=own, other=other)
