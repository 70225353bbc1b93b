"""The example of a split language model, as a user runs it."""

import runpy
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="extra transformers")
EXAMPLE = Path(__file__).parents[2] / "examples" / "split_lm.py"


def test_the_example_recovers_words_from_its_own_transcript(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    frame = runpy.run_path(str(EXAMPLE), run_name="__main__")["report"].to_frame()
    assert frame["leak"][0] > frame["alone"][0] + 0.2
    assert "text-inversion:decoder=linear" in capsys.readouterr().out
