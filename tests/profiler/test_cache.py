"""Cached profiles: read again as long as nothing has changed."""

import os

import pytest

from counterpoint.errors import PlanError
from counterpoint.model.spec import linear_chain
from counterpoint.profiler.cache import cache_path, load_or_measure
from tests.model.profiles import build_profile, layer_profile
from tests.other_user import STRANGER, as_root

TIMING = build_profile(linear_chain(1), [layer_profile(1.0, 2.0)])
FACTS = {"model": "Chain", "threads": 1}


class Measuring:
    """Returns the profile, and counts the calls."""

    def __init__(self):
        self.count = 0

    def __call__(self):
        self.count += 1
        return TIMING


def test_a_model_is_measured_once(tmp_path):
    measuring = Measuring()
    assert [load_or_measure(tmp_path / "new", FACTS, measuring) for _ in range(2)] == [TIMING, TIMING]
    assert measuring.count == 1
    assert [path.name.split("-")[0] for path in (tmp_path / "new" / "timings").iterdir()] == ["Chain"]


def test_a_model_is_measured_again_if_an_attribute_changed_or_on_request(tmp_path):
    measuring = Measuring()
    for threads, is_wanted_anew in ((1, False), (2, False), (1, True)):
        load_or_measure(tmp_path, {**FACTS, "threads": threads}, measuring, must_measure=is_wanted_anew)
    assert measuring.count == 3


def test_an_unreadable_file_is_rewritten(tmp_path):
    measuring = Measuring()
    load_or_measure(tmp_path, FACTS, measuring)
    cache_path(tmp_path, FACTS).write_text("{", encoding="utf-8")
    assert load_or_measure(tmp_path, FACTS, measuring) == TIMING
    assert (measuring.count, load_or_measure(tmp_path, FACTS, measuring), measuring.count) == (2, TIMING, 2)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(
        PlanError, match=r"the profile cannot be written to .*file/timings: Not a directory; give another"
    ):
        load_or_measure(tmp_path / "file", FACTS, Measuring())


@as_root
def test_a_folder_that_other_users_can_write_to_is_refused(tmp_path):
    folder = cache_path(tmp_path, FACTS).parent
    folder.mkdir()
    for owner, mode in ((STRANGER, 0o700), (0, 0o777)):
        os.chown(folder, owner, owner)
        folder.chmod(mode)
        with pytest.raises(PlanError, match=rf"belongs to user {owner} and has mode {mode:o}, so others can change"):
            load_or_measure(tmp_path, FACTS, Measuring())


def test_a_folder_is_made_for_this_user_only(tmp_path):
    load_or_measure(tmp_path / "new", FACTS, Measuring())
    assert (tmp_path / "new" / "timings").stat().st_mode & 0o077 == 0
