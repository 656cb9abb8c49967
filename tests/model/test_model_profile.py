"""Model profiles: interpolated between sizes, matched to other layers and models, formatted and parsed."""

import json
from dataclasses import replace

import pytest

from counterpoint.errors import PlanError
from counterpoint.model.model_profile import BatchSizeProfile, Overheads, format_profile, load_profile, parse_profile
from counterpoint.model.spec import linear_chain
from tests.model.profiles import build_profile, layer_profile

MODEL = linear_chain(3, width=8)
TIMING = build_profile(MODEL, [layer_profile(1.0, 2.0), layer_profile(2.0, 4.0), layer_profile(4.0, 8.0)], samples=4)


def with_point(samples, *forward_s):
    """The timing with another size of microbatches behind it."""
    pieces = tuple(layer_profile(seconds) for seconds in forward_s)
    return replace(
        TIMING, batch_sizes=(*TIMING.batch_sizes, BatchSizeProfile(samples, pieces, layer_profile(sum(forward_s))))
    )


def refused(text):
    with pytest.raises(PlanError) as caught:
        parse_profile(text)
    return str(caught.value)


def test_between_two_sizes_times_are_on_the_line_between_them():
    assert [one.forward_s for one in with_point(8, 3.0, 2.0, 5.0).at_microbatch_size(6).layers] == [2.0, 2.0, 4.5]


def test_on_a_slower_machine_everything_takes_longer_and_has_as_many_bytes():
    timing = replace(TIMING, update_s_per_byte=2.0, add_s_per_byte=1.0, overheads=Overheads(0.5))
    slower = timing.scale(1.5)
    assert [one.forward_s for one in slower.at_microbatch_size(4).layers] == [1.5, 3.0, 6.0]
    assert [one.output_bytes for one in slower.at_microbatch_size(4).layers] == [
        one.output_bytes for one in timing.at_microbatch_size(4).layers
    ]
    assert (slower.update_s_per_byte, slower.add_s_per_byte, slower.overheads) == (3.0, 1.5, Overheads(0.75))


def test_beyond_all_sizes_times_are_in_proportion():
    assert with_point(8, 3.0, 2.0, 5.0).at_microbatch_size(16).unpartitioned.forward_s == 20.0
    assert [one.forward_s for one in TIMING.at_microbatch_size(2).layers] == [0.5, 1.0, 2.0]


def test_below_all_sizes_times_are_on_the_line_of_the_two_smallest_and_never_less_than_in_proportion():
    result = [one.forward_s for one in with_point(8, 1.5, 2.0, 9.0).at_microbatch_size(2).layers]
    assert result == [0.75, 2.0, 2.0], "rising by half, not at all, and by more than in proportion"


def test_a_size_that_was_measured_is_as_measured():
    assert TIMING.at_microbatch_size(4) is TIMING.batch_sizes[0]


def test_a_model_weighed_by_its_times_costs_seconds_of_a_sample_both_ways():
    assert [piece.cost for piece in TIMING.with_measured_costs(MODEL, 4).layers] == [3 / 4, 6 / 4, 12 / 4]


def test_another_cut_of_the_model_gets_the_times_of_its_part_of_the_work():
    whole = replace(MODEL.blocks[0], layers=(replace(MODEL.layers[0], name="a", cost=1.5),))
    rest = replace(MODEL.blocks[1], layers=(replace(MODEL.layers[2], name="b", cost=1.5),))
    result = TIMING.match_to(replace(MODEL, blocks=(whole, rest))).batch_sizes[0].layers
    assert [one.forward_s for one in result] == [2.0, 5.0]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            linear_chain(3, width=16),
            "it has block0.weight with 256 bytes, where this model has block0.weight with 1024",
        ),
        (linear_chain(4, width=8), "it has 3 parameters, but this model has 4"),
        (replace(MODEL, params=MODEL.params[::-1]), "it has block0.weight with 256 bytes, where this model has block2"),
    ],
)
def test_a_profile_of_another_model_is_refused_by_name(model, words):
    with pytest.raises(PlanError, match=f"the profile is of Chain, but this is another model.*{words}.*profile JOB"):
        TIMING.match_to(model)


def test_a_profile_for_inputs_of_another_shape_is_refused():
    *others, last = MODEL.blocks
    longer = replace(last, layers=(replace(last.layers[0], output_bytes=64),))
    with pytest.raises(PlanError, match="its output has 32 bytes per sample, but that of this model has 64"):
        TIMING.match_to(replace(MODEL, blocks=(*others, longer)))


def test_a_profile_reads_back_as_it_was_written():
    assert parse_profile(format_profile(with_point(8, 3.0, 2.0, 5.0))) == with_point(8, 3.0, 2.0, 5.0)


def test_a_text_that_is_no_profile_is_refused():
    assert refused("{").startswith("this is not a profile: Expecting property name")
    assert refused("[]").startswith("this is not a profile: it has no 'counterpoint profile'")
    assert "; counterpoint timing is now called counterpoint profile; " in refused('{"counterpoint timing": 2}')
    assert refused('{"counterpoint profile": 7}').startswith("the profile has version 7, but only version 3 can be")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.pop("batch_sizes"), "no 'batch_sizes'"),
        (lambda text: text["batch_sizes"].clear(), "its microbatch sizes are \\[\\]"),
        (lambda text: text["overheads"].update(step_s=-1.0), "-1.0 is not a time or a size"),
        (lambda text: text["batch_sizes"][0]["layers"].pop(), "it has 3 layers, but for 4 samples 2 times"),
    ],
)
def test_a_profile_with_figures_that_cannot_be_is_refused(change, words):
    loaded = json.loads(format_profile(TIMING))
    change(loaded)
    with pytest.raises(PlanError, match=words):
        parse_profile(json.dumps(loaded))


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 10**400, "x", None, [], {}])
@pytest.mark.parametrize("key", ["weight_bytes", "cost", "output_bytes"])
def test_a_layer_with_a_value_that_cannot_be_is_refused(key, value):
    loaded = json.loads(format_profile(TIMING))
    loaded["layers"][0][key] = value
    assert refused(json.dumps(loaded)).startswith(("this is not a complete profile: ", "this is not a profile: "))


def test_a_file_that_is_no_profile_is_refused(tmp_path):
    path = tmp_path / "a.profile.json"
    for content, message in [(b"\xff", "cannot be read: 'utf-8' codec"), (b"[" * 100_000, "this is not a profile: ")]:
        path.write_bytes(content)
        with pytest.raises(PlanError, match=message):
            load_profile(path)
    with pytest.raises(PlanError, match="cannot be read: its name has a null byte"):
        load_profile(tmp_path / "a\0b")
