from xml.etree import ElementTree

import pytest

from counterpoint.program.trace import Trace, TraceEvent
from counterpoint.viz.chart import MAX_POINTS, ChartSeries, draw_chart, moving_average
from counterpoint.viz.event_style import KIND_COLOURS
from counterpoint.viz.svg_timeline import draw_comparison, draw_timeline
from tests.viz.sample_traces import REAL, UNIT

SVG = "{http://www.w3.org/2000/svg}"


def parse(drawing):
    return ElementTree.fromstring(drawing)


def tips(drawing):
    return [title.text for title in parse(drawing).iterfind(f".//{SVG}rect/{SVG}title")]


def texts(drawing):
    return [text.text for text in parse(drawing).iter(f"{SVG}text")]


def test_every_event_that_takes_time_has_a_box_with_its_instruction_and_milliseconds():
    assert sorted(tips(draw_timeline(REAL))) == [
        "B0.0: 8 ms",
        "F0.0 F1.0: 4 ms",
        "U0: 1 ms",
        "all_reduce_start(grad1)@0,1: 5 ms",
        "commit@0,1: 1 ms",
    ]


def test_a_drawing_has_a_description():
    root = parse(draw_timeline(REAL))
    assert (root.get("role"), root[0].tag, root[1].tag) == ("img", f"{SVG}title", f"{SVG}desc")
    assert root[0].text == "measured timeline of one step"
    assert root[1].text == (
        "measured, 1 rank: 14 ms a step, 7.1% of it idle. Part of the step in which a rank computes: rank 0 93%."
    )


def test_the_legend_names_the_kinds_that_are_there():
    assert [text for text in texts(draw_timeline(UNIT)) if text in KIND_COLOURS] == ["forward", "backward", "waiting"]
    assert [text for text in texts(draw_timeline(REAL)) if text in KIND_COLOURS] == [
        "forward", "backward", "update", "communication", "commit",
    ]  # fmt: skip


def test_boxes_are_placed_by_time():
    box = next(
        rect
        for rect in parse(draw_timeline(UNIT)).iter(f"{SVG}rect")
        if rect.findtext(f"{SVG}title") == "B0.0: 2,000 ms"
    )
    left, whole = 62, 960 - 62 - 46
    assert float(box.get("x")) == pytest.approx(left + whole * 4 / 6, abs=0.01)
    assert float(box.get("width")) == pytest.approx(whole * 2 / 6 - 0.6, abs=0.01)


def test_two_traces_share_one_scale():
    root = parse(
        draw_comparison(UNIT, Trace.from_events([TraceEvent(0, 0, "F0.0", 0.0, 3.0, "compute")], 1, "measured"))
    )
    widths = {rect.findtext(f"{SVG}title"): float(rect.get("width")) + 0.6 for rect in root.iter(f"{SVG}rect")}
    assert widths["F0.0: 3,000 ms"] == pytest.approx(3 * widths["F0.0: 1,000 ms"], abs=0.05)


def test_two_traces_of_very_different_length_say_that_each_has_its_own_scale():
    assert len([text for text in texts(draw_comparison(UNIT, REAL)) if text.endswith("on a scale of its own")]) == 2
    assert not [text for text in texts(draw_comparison(UNIT, UNIT)) if text.endswith("on a scale of its own")]


@pytest.mark.long
def test_many_ranks_and_thin_events_keep_a_drawing_small():
    events = [TraceEvent(rank, at, f"F0.{at}", at, at + 0.5, "compute") for rank in range(8) for at in range(5000)]
    drawing = draw_timeline(Trace.from_events(events, 8, "simulated"), max_ranks=4)
    assert len(drawing) < 1_000_000
    assert "and 4 more ranks" in texts(drawing)
    assert any(tip.startswith("4 events, F0.0 to F0.3: ") for tip in tips(drawing))


def test_an_empty_trace_is_a_valid_picture():
    assert parse(draw_timeline(Trace((), 0, "simulated"))).tag == f"{SVG}svg"
    assert parse(draw_comparison(Trace((), 1, "simulated"), Trace((), 1, "measured"))).tag == f"{SVG}svg"


def test_text_cannot_leave_its_element():
    drawing = draw_timeline(
        Trace((TraceEvent(0, 0, '</title><script a="1">&\x1b', 0.0, 1.0, "compute"),), 1, "simulated")
    )
    assert tips(drawing) == ['</title><script a="1">&\ufffd: 1,000 ms']
    assert "<script" not in drawing


def luminance(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("kind", KIND_COLOURS)
@pytest.mark.parametrize("page", ["#ffffff", "#11151b"])
def test_a_colour_has_contrast_on_a_light_and_on_a_dark_page(kind, page):
    darker, lighter = sorted((luminance(KIND_COLOURS[kind]), luminance(page)))
    assert (lighter + 0.05) / (darker + 0.05) >= 3.0


def chart(*series, y_low=None):
    return draw_chart(series, title="loss by step", x_label="step", y_label="loss", y_low=y_low)


def test_a_chart_has_round_ticks_around_its_values_and_a_legend_with_the_last_ones():
    drawing = chart(ChartSeries("train", ((0, 0.42), (10, 0.13))), ChartSeries("held out", ((10, 0.21),), "dots"))
    assert texts(drawing) == [
        "0.1", "0.2", "0.3", "0.4", "0.5", "0", "2", "4", "6", "8", "10", "loss", "step",
        "held out 0.21", "train 0.13",
    ]  # fmt: skip
    assert parse(drawing)[1].text == "train: 0.42 at 0, 0.13 at 10; held out: 0.21 at 10, 0.21 at 10."


def test_a_line_goes_through_its_points():
    line = next(parse(chart(ChartSeries("loss", ((0, 1.0), (5, 0.0), (10, 1.0))))).iter(f"{SVG}polyline"))
    assert line.get("points") == "56,34 261,236 466,34"


def test_values_that_are_not_finite_interrupt_the_line_and_are_counted():
    drawing = chart(
        ChartSeries("loss", ((0, 3.0), (1, 2.0), (2, float("nan")), (3, float("inf")), (4, 1.0), (5, float("nan"))))
    )
    root = parse(drawing)
    assert len(list(root.iter(f"{SVG}polyline"))) == 1
    assert len(list(root.iter(f"{SVG}circle"))) == 1
    assert "3 values are not finite" in root[1].text
    assert "nan" not in drawing


@pytest.mark.parametrize("points", [(), ((0, float("nan")),)])
def test_a_chart_without_values_says_so(points):
    assert texts(chart(ChartSeries("loss", points))) == ["no values"]


@pytest.mark.parametrize("y", [0.0, 5.0, -3.0, 1e12, 1e-9])
def test_a_single_value_has_an_axis_around_it(y):
    dot = next(parse(chart(ChartSeries("loss", ((7, y),)))).iter(f"{SVG}circle"))
    assert 56 < float(dot.get("cx")) < 466
    assert 34 < float(dot.get("cy")) <= 236


def test_an_axis_can_begin_at_zero():
    assert "0" in texts(chart(ChartSeries("samples/s", ((1, 800.0), (2, 810.0))), y_low=0.0))


def test_a_long_line_is_thinned_and_keeps_its_peak():
    points = tuple((float(at), 100.0 if at == 4321 else 1.0 + at % 3) for at in range(10_000))
    drawing = chart(ChartSeries("loss", points))
    places = next(parse(drawing).iter(f"{SVG}polyline")).get("points").split()
    assert len(places) <= MAX_POINTS
    assert any(place.endswith(",34") for place in places)


def test_a_moving_mean_is_centered():
    assert moving_average(((0, 1.0), (1, 2.0), (2, 6.0), (3, 4.0)), 3) == ((1, 3.0), (2, 4.0))
