import pytest
from hypothesis import given, strategies as st

from counterpoint.program.trace import TraceEvent
from counterpoint.viz.event_style import event_kind, short_name
from counterpoint.viz.number_format import format_number, format_seconds, format_tick, ticks


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.27272727, "0.2727"), (81.5321, "81.53"), (12345.6, "12,346"), (25_165_824, "25,165,824"), (2.0, "2"),
        (0.0, "0"), (100.0, "100"), (-0.5, "-0.5"), (1e-7, "1.000e-07"), (float("nan"), "nan"), ("asp", "asp"),
    ],
)  # fmt: skip
def test_a_figure_has_four_digits_that_count(value, text):
    assert format_number(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(2.5, "2.5 s"), (0.0125, "12.5 ms"), (3e-6, "3 us"), (0.0, "0 us")])
def test_a_duration_is_in_the_unit_that_suits_it(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(("value", "step", "text"), [(0.25, 0.05, "0.25"), (12000, 2000, "12,000"), (-0.0, 1, "0")])
def test_a_tick_has_the_decimals_of_its_step(value, step, text):
    assert format_tick(value, step) == text


@given(st.floats(-1e9, 1e9), st.floats(1e-3, 1e9), st.integers(2, 10))
def test_ticks_are_few_even_and_inside(low, span, most):
    result = ticks(low, low + span, most)
    assert len(result) <= most + 1
    slack = span * 1e-3 + abs(low) * 1e-6
    assert all(low - slack <= tick <= low + span + slack for tick in result)


@pytest.mark.parametrize(
    ("words", "lane", "kind"),
    [
        ("F0.0 F1.0", "compute", "forward"), ("B0.0", "compute", "backward"), ("U0+4", "compute", "update"),
        ("x1.0>1", "link", "communication"), ("x1.0<0", "wait", "waiting"), ("all_reduce(grad0)@0,1", "wait", "waiting"),
        ("commit@0,1", "wait", "commit"), ("commit@0,1", "link", "commit"), ("apply_and_reply(0)@0,1", "compute", "update"),
    ],
)  # fmt: skip
def test_the_kind_of_an_event_follows_from_its_lane_and_instruction(words, lane, kind):
    assert event_kind(TraceEvent(0, 0, words, 0.0, 1.0, lane)) == kind


@pytest.mark.parametrize(
    ("words", "name"),
    [("F3.11:-1", "F11"), ("B0.2 B1.2", "B2"), ("U0+4", "U"), ("all_reduce_wait(grad0)@0,1", "all_reduce_wait"), ("commit@0-7", "commit"),
     ("x1.0>1", "x1.0>1"), ("what?", "what?")],
)  # fmt: skip
def test_a_short_name_is_the_letter_and_the_microbatch(words, name):
    assert short_name(words) == name
