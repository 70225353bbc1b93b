"""What is counted before training agrees with what the attack then reads."""

import pytest

from vflsec.attacks.score_gram import ScoreGram
from vflsec.base.errors import UsageError
from vflsec.cipher.roles.exposure import Exposure
from vflsec.testing.recordings import LinearRun, attack_recording

ROWS, BATCH = 300, 30


@pytest.mark.parametrize(
    ("passes", "outputs", "width", "share"), [(2, 10, 16, 1.0), (12, 1, 8, 1.0), (1, 10, 16, 0.625), (3, 1, 6, 0.5)]
)
def test_the_share_is_equations_per_feature(passes, outputs, width, share):
    assert Exposure(passes=passes, outputs=outputs, width=width, rows=100).share == share


def test_the_line_names_what_it_counts():
    line = str(Exposure(passes=2, outputs=10, width=16, rows=100))
    assert line == (
        "exposure 1.00: 2 passes x 10 outputs give the active party 20 equations in the 16 features of each of 100 "
        "training samples; it can compute all of them up to a rotation"
    )
    assert "which move" in str(Exposure(passes=2, outputs=10, width=16, rows=100, frozen=False))
    once = str(Exposure(passes=1, outputs=1, width=16, rows=100))
    assert "1 equation in the 16" in once
    assert "are read from fewer" in once


def test_numbers_below_one_are_refused():
    with pytest.raises(UsageError, match="width"):
        Exposure(passes=1, outputs=1, width=0, rows=10)


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("epochs", "outputs", "width"),
    [(2, 1, 6), (8, 1, 4), (2, 3, 8), (2, 4, 12), (3, 4, 6)],
)
def test_the_attack_reads_all_where_the_share_is_one_and_little_more_than_the_share_elsewhere(
    tmp_path, epochs, outputs, width
):
    run = LinearRun(
        rows=ROWS, batch=BATCH, steps=epochs * ROWS // BATCH, rate=0.5, outputs=outputs, width=width, columns=width
    )
    c, p = run.record(tmp_path)
    recovered = attack_recording(ScoreGram(), p, c, n=3 * width)["leak"]["train"].headline
    share = Exposure(passes=epochs, outputs=outputs, width=width, rows=ROWS).share
    assert recovered > 0.99 if share == 1 else recovered < share + 0.1
