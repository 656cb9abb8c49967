"""Timings that are kept: read again as long as nothing has changed."""

import pytest

from counterpoint.errors import PlanError
from counterpoint.model.spec import chain
from counterpoint.profiler.cache import place_of, remembered
from tests.model.timings import timing_of, took

TIMING = timing_of(chain(1), [took(1.0, 2.0)])
FACTS = {"model": "Chain", "threads": 1}


class Measuring:
    """Gives the timing, and counts how often."""

    def __init__(self):
        self.count = 0

    def __call__(self):
        self.count += 1
        return TIMING


def test_a_model_is_measured_once(tmp_path):
    measuring = Measuring()
    assert [remembered(tmp_path / "new", FACTS, measuring) for _ in range(2)] == [TIMING, TIMING]
    assert measuring.count == 1
    assert [path.name.split("-")[0] for path in (tmp_path / "new" / "timings").iterdir()] == ["Chain"]


def test_it_is_measured_again_where_a_fact_has_changed_or_that_is_asked_for(tmp_path):
    measuring = Measuring()
    for threads, is_wanted_anew in ((1, False), (2, False), (1, True)):
        remembered(tmp_path, {**FACTS, "threads": threads}, measuring, is_wanted_anew=is_wanted_anew)
    assert measuring.count == 3


def test_a_file_that_cannot_be_read_is_written_anew(tmp_path):
    measuring = Measuring()
    remembered(tmp_path, FACTS, measuring)
    place_of(tmp_path, FACTS).write_text("{", encoding="utf-8")
    assert remembered(tmp_path, FACTS, measuring) == TIMING
    assert (measuring.count, remembered(tmp_path, FACTS, measuring), measuring.count) == (2, TIMING, 2)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(PlanError, match=r"the timing cannot be kept in .*file/timings: Not a directory; give another"):
        remembered(tmp_path / "file", FACTS, Measuring())
