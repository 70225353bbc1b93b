"""Jobs of Flower and NVFlare, run by the real engines as their pages say, against the same training in this process."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vflsec.audit.recorder import Recorder
from vflsec.audit.transcript import TranscriptFolder

ROOT = Path(__file__).parents[2]
ENGINES = Path(os.environ.get("VFLSEC_ENGINES", ROOT / ".engines"))
N_TRAIN = 400

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def engine(name):
    """Return the folder of an engine's programs."""
    found = ENGINES / name / "bin"
    if not found.is_dir():
        pytest.skip(f"{name} is not installed in {ENGINES}: make engines")
    return found


def environment(*folders, **more):
    path = os.pathsep.join(map(str, [*folders, Path(sys.executable).parent, os.environ["PATH"]]))
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **more}


def commands_of(page):
    """Return the commands of a page's bash blocks, one list for each block."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.DOTALL | re.MULTILINE)
    return [block.splitlines() for block in blocks]


@pytest.fixture
def checkout(tmp_path):
    """Return a folder with the examples, as the pages expect it."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def messages(folder):
    return list(TranscriptFolder(folder).messages())


def assert_same_messages(found, expected):
    assert [one[:6] for one in found] == [one[:6] for one in expected]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a.rows, b.rows)
        np.testing.assert_array_equal(a.values, b.values)


def audit(transcript, checkout, env):
    words = f"vflsec audit {transcript} --data mine.toml --attack direction --draws 1 --set aux.folds=0 --format json"
    done = subprocess.run(shlex.split(words), cwd=checkout, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {point["attack"]: point["leak"]["mean"] for point in json.loads(done.stdout)["points"]}


def bottom_of(width, out):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, out))


def tables(checkout, *names):
    return [pd.read_csv(checkout / f"{name}.csv", index_col="id") for name in names]


def numbers(table):
    return torch.tensor(table.to_numpy()).float()


def train_like_the_flower_app(checkout, folder, rounds):
    bank, *others = tables(checkout, "bank", "bureau", "shop")
    y, x = torch.tensor(bank.pop("label").to_numpy()[:N_TRAIN]), numbers(bank)[:N_TRAIN]
    inputs = [numbers(table) for table in others]
    bottoms = [bottom_of(z.shape[1], 4) for z in inputs]
    torch.manual_seed(1)
    top = nn.Linear(x.shape[1] + 8, 2)
    optimizers = [torch.optim.SGD(bottom.parameters(), lr=2.0) for bottom in bottoms]
    optimizers.append(torch.optim.SGD(top.parameters(), lr=0.5))
    ids = bank.index.to_numpy()
    parties = {"bank": "active", "bureau": "passive", "shop": "passive"}
    with Recorder(folder, parties=parties, observer="bureau") as recorder:
        for _ in range(rounds):
            cut = [bottom(z[:N_TRAIN]) for bottom, z in zip(bottoms, inputs, strict=True)]
            recorder.cut(cut[0], rows=ids[:N_TRAIN], party="bureau")
            loss = F.cross_entropy(top(torch.cat([x, *cut], dim=1)), y)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
        recorder.cut(bottoms[0](inputs[0][N_TRAIN:]).detach(), rows=ids[N_TRAIN:], party="bureau", split="test")


def wait_for(port, processes):
    for _ in range(240):
        assert all(process.poll() is None for process in processes), "an engine's process has ended"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.25)
    pytest.fail(f"nothing listens on port {port} after a minute")


def test_a_flower_job_gives_the_transcript_of_the_same_training_in_process(checkout):
    programs = engine("flower")
    home = checkout / "flwr"
    home.mkdir()
    page = (ROOT / "docs" / "record_a_flower_app.md").read_text()
    (home / "config.toml").write_text(re.search(r"^```toml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[1])
    env = environment(programs, FLWR_HOME=str(home), PWD=str(checkout))
    servers, (make, train, asked) = commands_of("record_a_flower_app.md")
    assert train.count('"data=') == 1, train
    train = train.replace('"data=', '"rounds=1 data=')  # a client takes seconds for each message
    subprocess.run(["/bin/sh", "-c", make], cwd=checkout, env=env, check=True)
    started = []
    try:
        for command in servers:
            with (checkout / f"{len(started)}.log").open("w") as log:
                started.append(
                    subprocess.Popen(
                        ["/bin/sh", "-c", f"exec {command}"],
                        cwd=checkout,
                        env=env,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
            wait_for(8000, started)
        done = subprocess.run(
            ["/bin/sh", "-c", train], cwd=checkout, env=env, capture_output=True, text=True, timeout=400, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        for process in reversed(started):
            os.killpg(process.pid, signal.SIGTERM)
        for process in started:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
    assert asked.startswith("vflsec audit transcripts/bureau --data mine.toml"), asked
    train_like_the_flower_app(checkout, checkout / "in_process" / "bureau", rounds=1)
    expected = messages(checkout / "in_process" / "bureau")
    assert len(expected) == 2 + 1
    assert_same_messages(messages(checkout / "transcripts" / "bureau"), expected)
    assert {one.sender for one in messages(checkout / "transcripts" / "shop")} == {"bank", "shop"}
    assert audit("transcripts/bureau", checkout, env)["direction"] == pytest.approx(1.0)


CASES = """
import sys
import numpy as np
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
import vflsec
from vflsec.audit.flower import DefenseMod, RecorderMod
from vflsec.audit.transcript import TranscriptFolder
from vflsec.base.errors import VflsecError

TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
PARTIES = {"bank": "active", "bureau": "passive", "shop": "passive"}
h = np.ones((3, 2), dtype=np.float16)


def call(mods, node, state, arrays=(h,), gradient=None):
    content = {"gradient": ArrayRecord([gradient])} if gradient is not None else {}
    message = Message(RecordDict(content), 1, "query")
    context = Context(1, 1, node, state, {})

    def app(message, context):
        return Message(RecordDict({"embedding": ArrayRecord(list(arrays))}), reply_to=message)

    for mod in reversed(mods):
        app = (lambda mod, inner: lambda m, c: mod(m, c, inner))(mod, app)
    return app(message, context)


def mod(**options):
    return RecorderMod(parties=PARTIES, about=lambda m, c: {"rows": ["a", "b", "c"]}, **options)


folder = sys.argv[1]
for title, node, mods, arrays in (
    ("no party", {"transcripts": folder}, [mod()], [h]),
    ("other party", {"party": "bank", "transcripts": folder}, [mod()], [h]),
    ("no folder", {"party": "shop"}, [mod()], [h]),
    ("two arrays", {"party": "shop", "transcripts": folder}, [mod()], [h, h]),
    ("whole numbers", {"party": "shop", "transcripts": folder}, [mod()], [h.astype(int)]),
    ("other rows", {"party": "shop", "transcripts": folder}, [mod()], [h[:2]]),
):
    try:
        call(mods, node, RecordDict(), arrays)
        print(title, "NOTHING")
    except VflsecError as error:
        print(title, error)
state, node = RecordDict(), {"party": "bureau", "transcripts": folder}
call([mod()], node, state)
call([mod()], node, state, gradient=2 * h.astype(np.float32))
try:
    call([mod()], node, RecordDict())  # as in another run
except VflsecError as error:
    print("other run", error)
noisy = [mod(), DefenseMod(vflsec.defend("iso:lambda=5@embedding", seed=0))]
reply = call(noisy, node, state)
sent = reply.content["embedding"].to_numpy_ndarrays()[0]
found = list(TranscriptFolder(folder + "/bureau").messages())
print("steps", [(one.kind, one.step) for one in found])
print("defended", sent.shape, bool((found[-1].values == sent).all()), bool((sent != 1).all()))
"""


def test_the_mod_says_what_is_wrong_and_sees_what_leaves(tmp_path):
    python = engine("flower") / "python"
    done = subprocess.run(
        [python, "-c", CASES, str(tmp_path)], capture_output=True, text=True, check=False, env=environment()
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for line, (case, fact) in zip(
        lines,
        (
            ("no party", "bureau, shop, found none"),
            ("other party", "bureau, shop, found 'bank'"),
            ("no folder", "transcripts, found none"),
            ("two arrays", "found float16 (3, 2), "),
            ("whole numbers", "found int64 (3, 2)"),
            ("other rows", "2 rows, got 3"),
            ("other run", "found a transcript in"),
            ("steps", "[('embedding', 0), ('gradient', 0), ('embedding', 1), ('embedding', 2)]"),
            ("defended", "(3, 2) True True"),
        ),
        strict=True,
    ):
        assert line.startswith(case)
        assert fact in line


def train_like_the_nvflare_job(checkout, folder, rounds, batch):
    bank, bureau = tables(checkout, "bank", "bureau")
    y, x, z = torch.tensor(bank.pop("label").to_numpy()), numbers(bank), numbers(bureau)
    bottom = bottom_of(z.shape[1], 8)
    torch.manual_seed(1)
    top = nn.Linear(x.shape[1] + 8, 2)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.5) for module in (bottom, top)]
    order, ids = np.random.default_rng(0), bank.index.to_numpy()
    parties = {"site-1": "passive", "site-2": "active"}
    with Recorder(folder, parties=parties, observer="site-1") as recorder:
        for _ in range(rounds):
            rows = order.integers(0, N_TRAIN, batch)
            h = recorder.cut(bottom(z[:N_TRAIN][rows]), rows=ids[rows])
            loss = F.cross_entropy(top(torch.cat([x[rows], h], dim=1)), y[rows])
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
        recorder.cut(bottom(z[N_TRAIN:]).detach(), rows=ids[N_TRAIN:], split="test")


def test_an_nvflare_job_gives_the_transcript_of_the_same_training_in_process(checkout):
    """With fewer rounds than the example, of larger batches, which still have each row."""
    rounds, batch = 12, 256
    (checkout / "examples").unlink()
    shutil.copytree(ROOT / "examples", checkout / "examples")
    config = checkout / "examples" / "nvflare" / "app_server" / "config" / "config_fed_server.json"
    written = '"num_rounds": 200, "batch_size": 64'
    assert written in config.read_text()
    config.write_text(config.read_text().replace(written, f'"num_rounds": {rounds}, "batch_size": {batch}'))
    env = environment(engine("nvflare"), PWD=str(checkout))
    ((make, train, asked),) = commands_of("record_an_nvflare_job.md")
    for command in (make, train):
        done = subprocess.run(
            ["/bin/sh", "-c", command], cwd=checkout, env=env, capture_output=True, text=True, timeout=400, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert asked.startswith("vflsec audit transcripts/bureau --data mine.toml"), asked
    train_like_the_nvflare_job(checkout, checkout / "in_process" / "bureau", rounds, batch)
    expected = messages(checkout / "in_process" / "bureau")
    assert len(expected) == rounds * 2 + 1
    found = messages(checkout / "transcripts" / "bureau")
    assert_same_messages(found, expected)
    seen_by_the_bank = messages(checkout / "transcripts" / "bank")
    assert [one[:6] for one in seen_by_the_bank] == [one[:6] for one in expected]
    assert audit("transcripts/bureau", checkout, env)["direction"] == pytest.approx(1.0)


def test_the_pages_show_what_the_examples_contain():
    for page, kind, file in (
        ("record_a_flower_app.md", "python", "flower/loans/client_app.py"),
        ("record_an_nvflare_job.md", "json", "nvflare/app_site-1/config/config_fed_client.json"),
    ):
        text = (ROOT / "docs" / page).read_text()
        shown = re.search(rf"^```{kind}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[1]
        added = [line for line in shown.splitlines() if line.strip()]
        assert len(added) <= 15
        inside = (ROOT / "examples" / file).read_text().splitlines()
        assert [line for line in added if line not in inside] == []
