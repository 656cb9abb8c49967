"""Times of the pieces of a model: between sizes, of other pieces, of another model, as text."""

import json
from dataclasses import replace

import pytest

from counterpoint.errors import PlanError
from counterpoint.model.spec import chain
from counterpoint.model.timing import Fixed, Point
from counterpoint.model.timing_file import read_timing, write_timing
from tests.model.timings import timing_of, took

MODEL = chain(3, width=8)
TIMING = timing_of(MODEL, [took(1.0, 2.0), took(2.0, 4.0), took(4.0, 8.0)], samples=4)


def with_point(samples, *forward_s):
    """The timing with another size of microbatches behind it."""
    pieces = tuple(took(seconds) for seconds in forward_s)
    return replace(TIMING, points=(*TIMING.points, Point(samples, pieces, took(sum(forward_s)))))


def refused(text):
    with pytest.raises(PlanError) as caught:
        read_timing(text)
    return str(caught.value)


def test_between_two_sizes_times_are_on_the_line_between_them():
    assert [one.forward_s for one in with_point(8, 3.0, 2.0, 5.0).at(6).pieces] == [2.0, 2.0, 4.5]


def test_on_a_slower_machine_everything_takes_longer_and_has_as_many_bytes():
    timing = replace(TIMING, update_s_per_byte=2.0, add_s_per_byte=1.0, fixed=Fixed(0.5))
    slower = timing.at_speed(1.5)
    assert [one.forward_s for one in slower.at(4).pieces] == [1.5, 3.0, 6.0]
    assert [one.output_bytes for one in slower.at(4).pieces] == [one.output_bytes for one in timing.at(4).pieces]
    assert (slower.update_s_per_byte, slower.add_s_per_byte, slower.fixed) == (3.0, 1.5, Fixed(0.75))


def test_beyond_all_sizes_times_are_in_proportion():
    assert with_point(8, 3.0, 2.0, 5.0).at(16).whole.forward_s == 20.0
    assert [one.forward_s for one in TIMING.at(2).pieces] == [0.5, 1.0, 2.0]


def test_below_all_sizes_times_are_on_the_line_of_the_two_smallest_and_never_less_than_in_proportion():
    found = [one.forward_s for one in with_point(8, 1.5, 2.0, 9.0).at(2).pieces]
    assert found == [0.75, 2.0, 2.0], "rising by half, not at all, and by more than in proportion"


def test_a_size_that_was_measured_is_as_measured():
    assert TIMING.at(4) is TIMING.points[0]


def test_a_model_weighed_by_its_times_costs_seconds_of_a_sample_both_ways():
    assert [piece.cost for piece in TIMING.weigh(MODEL, 4).pieces] == [3 / 4, 6 / 4, 12 / 4]


def test_another_cut_of_the_model_gets_the_times_of_its_part_of_the_work():
    whole = replace(MODEL.blocks[0], pieces=(replace(MODEL.pieces[0], name="a", cost=1.5),))
    rest = replace(MODEL.blocks[1], pieces=(replace(MODEL.pieces[2], name="b", cost=1.5),))
    found = TIMING.fitted(replace(MODEL, blocks=(whole, rest))).points[0].pieces
    assert [one.forward_s for one in found] == [2.0, 5.0]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (chain(3, width=16), "it has block0.weight with 256 bytes, where this model has block0.weight with 1024"),
        (chain(4, width=8), "it has 3 parameters, but this model has 4"),
        (replace(MODEL, params=MODEL.params[::-1]), "it has block0.weight with 256 bytes, where this model has block2"),
    ],
)
def test_a_timing_of_another_model_is_refused_by_name(model, words):
    with pytest.raises(PlanError, match=f"the timing is of Chain, and this is another model.*{words}.*profile JOB"):
        TIMING.fitted(model)


def test_a_timing_for_inputs_of_another_shape_is_refused():
    *others, last = MODEL.blocks
    longer = replace(last, pieces=(replace(last.pieces[0], output_bytes=64),))
    with pytest.raises(PlanError, match="its output has 32 bytes per sample, but that of this model has 64"):
        TIMING.fitted(replace(MODEL, blocks=(*others, longer)))


def test_a_timing_reads_back_as_it_was_written():
    assert read_timing(write_timing(with_point(8, 3.0, 2.0, 5.0))) == with_point(8, 3.0, 2.0, 5.0)


def test_a_text_that_is_no_timing_is_refused():
    assert refused("{").startswith("this is no timing: Expecting property name")
    assert refused("[]").startswith("this is no timing: it has no 'counterpoint timing'")
    assert refused('{"counterpoint timing": 7}').startswith("the timing is of version 7, but only version 3 can be")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.pop("points"), "no 'points'"),
        (lambda text: text["points"].clear(), "its sizes of microbatches are \\[\\]"),
        (lambda text: text["fixed"].update(step_s=-1.0), "-1.0 is no time and no size"),
        (lambda text: text["points"][0]["pieces"].pop(), "it has 3 pieces, but for 4 samples 2 times"),
    ],
)
def test_a_timing_with_figures_that_cannot_be_is_refused(change, words):
    loaded = json.loads(write_timing(TIMING))
    change(loaded)
    with pytest.raises(PlanError, match=words):
        read_timing(json.dumps(loaded))
