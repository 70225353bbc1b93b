"""The job: one file for both, refused in one line where it is wrong."""

import pytest

from vflsec.base.errors import UsageError
from vflsec.companies import job
from vflsec.companies.job import JobFile, JobModel, JobTraining

FULL = """
name = "loans"
seed = 3
test = 0.25
[model]
outputs = 1
encoder = "mlp"
hidden = [16, 8]
width = 4
[train]
epochs = 2
batch = 32
lr = 0.05
momentum = 0.9
schedule = "cosine"
[paillier]
bits = 3072
mode = "subgroup"
"""


def written(tmp_path, text):
    path = tmp_path / "job.toml"
    path.write_text(text)
    return path


def test_what_is_written_is_read(tmp_path):
    found = job.read(written(tmp_path, FULL))
    assert found.model == JobModel(encoder="mlp", hidden=(16, 8), width=4)
    assert found.model.spec.bottom == (16, 8)
    assert found.train.spec.optimizer == "sgd"
    assert found.settings["train.lr"] == "0.05"
    assert found.settings["paillier.mode"] == '"subgroup"'


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("epoch = 3", "unknown field `epoch`"),
        ("test = 1.0", "0 < test < 1, got 1.0"),
        ("seed = -1", "seed >= 0"),
        ("options = {parties = 2}", "options with a dataset alone"),
        ("[model]\nencoder = 'mlp'", "say width = 10"),
        ("[model]\nwidth = 3", "no model.width with model.encoder=identity"),
        ("[model]\nencoder = 'resnet18'", "resnet18"),
        ("[model]\noutputs = 0", "model.outputs > 0"),
        ("[model]\nhidden = [1000000, 1000000]", "model.hidden <= 65536, got 1000000"),
        ("[model]\nhidden = [65536, 65536]", r"model\.hidden .*268435456 weights, got 4295032832"),
        ("[model]\nencoder = 'mlp'\nwidth = 70000", "model.width <= 65536, got 70000"),
        ("[model]\noutputs = 70000", "model.outputs <= 65536, got 70000"),
        ("[train]\nlr = -1.0", "train.lr > 0"),
        ("[train]\noptimizer = 'adam'", "unknown field `optimizer`"),
        ("[paillier]\nmode = 'fast'", "fast"),
        ("[paillier]\nmode = 'short'", "short"),
        ("[paillier]\nfeature_bits = 40", "0 <= feature_bits <= 16, got 40"),
        ("[train]\nepochs = 4\n[paillier]\nmax_passes = 3", "max_passes = 3 .*takes 4"),
        ("[paillier]\nnoise = 0.1", "expected delta=outer with noise"),
        ("[paillier]\nnoise = -1.0", "a finite noise >= 0"),
        ("[paillier]\ndelta = 'outer'\nnoise = inf", "a finite noise >= 0, got inf"),
        ("[paillier]\nscore_noise = nan", "a finite score_noise >= 0, got nan"),
        ("[paillier]\nscore_noise = 410.0", r"score_noise <= 409\.6.*2\^12"),
        ("[paillier]\nring = 56\nscore_noise = 1e300", r"score_noise <= 1\.6, .*got 1e\+300"),
        ("[train]\nlr = inf", "a finite train.lr, got inf"),
        ("[train]\nlr = nan", "train.lr > 0, got nan"),
        ("[train]\nmomentum = inf", "a finite train.momentum, got inf"),
        ("[train]\nweight_decay = inf", "a finite train.weight_decay, got inf"),
        ("[sealed]\n[paillier]\nbits = 3072\n[model]\nencoder = 'mlp'", r"\[sealed\] or \[paillier\], got both"),
        ("[sealed]\n[model]\nencoder = 'tabular'", "model.encoder = 'mlp' with .sealed., got 'tabular'"),
        ("[sealed]\n[model]\nencoder = 'mlp'\nwidth = 3", "no model.width with .sealed., got 3"),
        ("[sealed]\nepsilon = 0.0", "sealed.epsilon > 0, got 0"),
        ("[sealed]\nepsilon = 1e9", "expected epsilon below"),
        ("[sealed]\ndelta = 1.5", "0 < delta < 1"),
        ("[sealed]\nbits = 17", "8 to 16 bits"),
        ("[sealed]\nparameters = 2000000", "sealed.parameters <= 1000000"),
        ("[sealed]\nlr = -1.0", "expected lr > 0"),
        ("[sealed]\nlr = inf", "a finite lr, got inf"),
        ("[sealed]\nepsilon = 1e-9\ndelta = 1e-300", "expected epsilon >= .* at delta 1e-300"),
        ("name =", "expected TOML"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, line, said):
    with pytest.raises(UsageError, match=said) as error:
        job.read(written(tmp_path, f'name = "x"\n{line}\n' if not line.startswith("name") else line))
    assert "\n" not in str(error.value)


def test_no_file(tmp_path):
    with pytest.raises(UsageError, match="expected a job in"):
        job.read(tmp_path / "none.toml")


def test_every_setting_has_a_name():
    assert {name.split(".")[0] for name in JobFile(name="x").settings} >= {
        "name",
        "seed",
        "test",
        "model",
        "train",
        "paillier",
    }
    assert JobTraining().spec.rate(0, 1) == 0.1
