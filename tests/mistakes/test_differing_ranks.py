"""Two ranks that are given different things: named on both, with values, in the first step, in less than two seconds."""

import re

import pytest

from tests.mistakes.differing_ranks import DIFFERENCES, NUM_RANKS, differ_in_every_way
from tests.mistakes.rank_processes import run_on_ranks

pytestmark = [pytest.mark.process, pytest.mark.serial]  # two seconds, where nothing else runs


@pytest.mark.parametrize("way", DIFFERENCES)
def test_what_differs_before_the_first_step_is_named(way):
    result = run_on_ranks((differ_in_every_way,), NUM_RANKS, 60.0)
    texts, seconds = zip(*(one["differ_in_every_way"][0][way] for one in result), strict=True)
    assert texts[0] == texts[1]
    assert re.match(r"(Plan|Data)Error: ", texts[0])
    assert re.search(DIFFERENCES[way][1], texts[0])
    assert max(seconds) < 2
