"""The table of names."""

import pytest

from counterpoint.errors import PlanError
from counterpoint.plan.registry import STRATEGIES, find_strategy


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_name_finds_its_line_and_the_line_says_what_it_is(name):
    named = find_strategy(name)
    assert named.summary == named.summary.strip(". ")
    assert len(named.summary.split()) >= 3
    assert "Cost:" in (named.doc_source.__doc__ or "")


SLIPS = [("zeroo3", "zero3"), ("pipline", "pipeline"), ("ASP", "asp"), ("slo", "solo")]


@pytest.mark.parametrize(("wrong", "near"), SLIPS)
def test_a_name_with_a_slip_of_the_pen_finds_the_nearest(wrong, near):
    with pytest.raises(PlanError, match=f"there is no strategy '{wrong}'; did you mean {near}\\?"):
        find_strategy(wrong)
