"""Labels of events: chunks follow from the order of a trace, versions from its instructions."""

import json
import re

import pytest

from counterpoint.program.trace import TraceEvent
from counterpoint.simulator.cost_model import unit_costs
from counterpoint.simulator.simulate import simulate
from counterpoint.viz.event_style import KIND_COLOURS, EventLabels, chunk_shade
from counterpoint.viz.perfetto import format_perfetto
from counterpoint.viz.svg_timeline import draw_timeline
from tests.program.verify.random_plans import compile_text


def traced(text, m, blocks):
    return simulate(compile_text(text, m=m, blocks=blocks).program, unit_costs(backward_ticks=2))


@pytest.mark.parametrize(
    ("text", "blocks", "num_chunks"),
    [
        ("pipeline(2)", 6, 1),
        ("zero_bubble(2)", 6, 1),
        ("pipedream(2)", 6, 1),
        ("data(2)", 3, 1),
        ("gpipe(2, chunks_per_stage=2)", 8, 2),
        ("interleaved(2, chunks_per_stage=3)", 12, 3),
        ("zero_bubble(4, chunks_per_stage=2)", 16, 2),
        ("placement(2, modules=block0:0+block1:1+block3:0)", 4, 2),
    ],
)
def test_blocks_that_always_follow_one_another_are_one_chunk(text, blocks, num_chunks):
    assert EventLabels.from_traces(traced(text, 4, blocks)).num_chunks == num_chunks


def test_both_chunks_at_the_foot_of_a_v_are_distinguished():
    names = EventLabels.from_traces(traced("zero_bubble(2, chunks_per_stage=2)", 4, 8))
    assert [names.chunk_of[1, block] for block in (2, 3, 4, 5)] == [0, 0, 1, 1]
    assert [names.chunk_of[0, block] for block in (0, 1, 6, 7)] == [0, 0, 1, 1]


def test_a_name_has_the_suffix_of_its_chunk_and_the_version_it_reads():
    names = EventLabels({(0, 4): 1}, 2)
    event = TraceEvent(0, 0, "Bi4.+3:-2", 0.0, 1.0, "compute")
    assert (names.short_label(event), names.full_label(event)) == ("Bi3b", "Bi3b:-2")
    assert EventLabels({}, 1).full_label(TraceEvent(0, 0, "F4.3", 0.0, 1.0, "compute")) == "F3"


def test_a_picture_has_a_shade_for_each_chunk_and_says_so():
    picture = draw_timeline(traced("interleaved(2, chunks_per_stage=3)", 4, 6))
    assert ">chunks a .. c of a rank<" in picture
    assert all(f'fill="{chunk_shade("backward", chunk, 3)}"' in picture for chunk in range(3))
    assert "of a rank<" not in draw_timeline(traced("pipeline(2)", 4, 4))


def test_a_trace_file_says_the_chunk_and_the_version():
    written = json.loads(
        format_perfetto(traced("zero_bubble(2, chunks_per_stage=2)", 4, 4), traced("pipedream(2)", 1, 2))
    )
    result = [event["args"] for event in written["traceEvents"] if event["ph"] == "X"]
    assert {args.get("chunk") for args in result} == {None, 0, 1}
    assert {args.get("version") for args in result} == {None, -1}


@pytest.mark.parametrize("kind", KIND_COLOURS)
def test_shades_differ_and_stand_out_on_a_light_and_on_a_dark_page(kind):
    shades = [chunk_shade(kind, chunk, 3) for chunk in range(3)]
    assert shades[0] == KIND_COLOURS[kind]
    assert all(re.fullmatch("#[0-9a-f]{6}", shade) for shade in shades)
    assert all(contrast(shade, page) >= 3 for shade in shades for page in ("#ffffff", "#16181d"))


def contrast(one, other):
    def luminance(colour):
        shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
