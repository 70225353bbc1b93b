"""The time that is left, against sums worked out by hand."""

import pytest

from tests.run.test_forecast import SPEC, alone, result
from vflsec.report import progress
from vflsec.run import engine
from vflsec.run import spec as specs


@pytest.fixture
def todo():
    return engine.plan(specs.read({**SPEC, "seeds": 1}), None)


def replace_key(record, item):
    return type(record)(**{name: getattr(record, name) for name in record.__struct_fields__} | {"key": item.key})


def test_the_time_that_is_left_is_at_least_that_of_kinds_that_came(todo):
    countdown = progress.Countdown(todo, jobs=1)
    baselines = [item for task in todo.tasks for item in task.baselines]
    trials = [item for task in todo.tasks for item in task.rows]
    assert [trial.attack.name for trial in trials] == ["mc", "direction"] * 2
    for item in baselines:
        rest = countdown(replace_key(alone(1, item.attack.name), item))
    assert rest == ", at least 0:00:00 left", "nothing is known of an attack in the federation, nor of a training"
    # Then the first training takes 100 s, and its attacks 7 and 30 s; the other is a training and the same attacks.
    assert countdown(replace_key(result(100, 7, "mc"), trials[0])) == ", at least 0:01:47 left"
    assert countdown(replace_key(result(100, 30, "direction"), trials[1])) == ", about 0:02:17 left"
    assert countdown(replace_key(result(100, 9, "mc"), trials[2])) == ", about 0:00:30 left"
    assert countdown(replace_key(result(100, 30, "direction"), trials[3])) == ""
    assert countdown.came == len(baselines) + 4
