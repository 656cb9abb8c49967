"""Bytes per rank and step, written out as the papers count them, with P bytes of weights."""

from fractions import Fraction

import pytest

from tests.program.verify.random_plans import compile_text

BLOCKS = 3
UNIT = 256 * 256 * 4
P = BLOCKS * UNIT
SAMPLE = 256 * 4


def sent(text, **given):
    compiled = compile_text(text, blocks=BLOCKS, **given)
    return [int(bytes_) if bytes_ == int(bytes_) else bytes_ for bytes_ in compiled.cost.sent_bytes()]


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("micros", [1, 3])
def test_replicas_send_what_their_paper_says(n, micros):
    ring = Fraction(n - 1, n)
    assert sent(f"data({n})", m=micros) == [2 * ring * P] * n
    assert sent(f"zero1({n})", m=micros) == [2 * ring * P] * n
    assert sent(f"zero2({n})", m=micros) == [(micros + 1) * ring * P] * n
    assert sent(f"zero3({n})", m=micros) == [3 * micros * ring * P] * n
    assert sent(f"zero3({n}, reshard_after_forward=off)", m=micros) == [(micros + 1) * ring * P] * n


@pytest.mark.parametrize("micros", [1, 3])
def test_units_within_the_threshold_send_what_level_2_sends(micros):
    half = Fraction(1, 2)
    whole, shards = (micros + 1) * half * P, 3 * micros * half * P
    assert sent(f"zero3(2, persistence_threshold={UNIT // 4})", m=micros) == [whole] * 2
    assert sent(f"zero3(2, persistence_threshold={UNIT // 4 - 1})", m=micros) == [shards] * 2
    per_rank = "tensor(2) * zero3(2, persistence_threshold={})"
    assert sent(per_rank.format(UNIT // 8), m=micros) == sent("tensor(2) * zero2(2)", m=micros)
    assert sent(per_rank.format(UNIT // 8 - 1), m=micros) == sent("tensor(2) * zero3(2)", m=micros)


@pytest.mark.parametrize("micros", [1, 3])
def test_quantized_shards_send_codes_and_a_scale_for_1024_elements(micros):
    half, int8, int4 = Fraction(1, 2) * P, Fraction(257, 1024), Fraction(129, 1024)
    both = "quantized_weights=int8, quantized_gradients=int4"
    assert sent(f"zero3(2, {both})", m=micros) == [micros * half * (2 * int8 + int4)] * 2
    assert sent(f"zero3(2, reshard_after_forward=off, {both})", m=micros) == [half * (int8 + micros * int4)] * 2
    assert sent("zero3(2, quantized_gradients=int8)", m=micros) == [micros * half * (2 + int8)] * 2
    assert sent("zero2(2, quantized_gradients=int8)", m=micros) == [half * (micros * int8 + 1)] * 2
    assert sent("zero1(2, quantized_gradients=int8)", m=micros) == [half * (int8 + 1)] * 2


def test_merged_blocks_send_the_same_bytes_and_a_weight_within_one_of_them_once():
    merged = f"zero3(2, min_num_params={3 * UNIT // 4})"
    assert sent(merged, m=2) == sent("zero3(2)", m=2)
    assert sent(merged, tied=True) == [Fraction(1, 2) * 3 * 2 * UNIT] * 2


def test_solo_sends_nothing():
    assert sent("solo") == [0]


def test_a_weight_that_two_blocks_use_is_gathered_for_each_of_them():
    ring = Fraction(1, 2)
    assert sent("zero3(2)", tied=True) == [ring * (3 * UNIT + 5 * UNIT)] * 2
    assert sent("zero2(2)", tied=True) == [ring * 2 * 2 * UNIT] * 2


def test_a_stage_sends_activations_on_and_gradients_back():
    assert sent("pipeline(3)", m=4, samples=2) == [8 * SAMPLE, 16 * SAMPLE, 8 * SAMPLE]


def test_replicas_of_a_stage_share_its_microbatches_and_sum_its_gradients():
    assert sent("pipeline(2, replicas=(2,1), balance=(2,1))", m=4) == [
        2 * SAMPLE + 2 * UNIT,
        2 * SAMPLE + 2 * UNIT,
        4 * SAMPLE,
    ]


def test_stages_that_share_a_weight_sum_its_gradient():
    assert sent("pipeline(3)", tied=True) == [SAMPLE + UNIT, 2 * SAMPLE, SAMPLE + UNIT]


def test_slices_sum_partial_outputs_forward_and_partial_gradients_backward():
    """The gradient of the model's input is not needed, so that block 0 sums nothing backward."""
    assert sent("tensor(4)", m=2, samples=3) == [2 * Fraction(3, 4) * 5 * SAMPLE * 6] * 4


@pytest.mark.parametrize("consistency", ["bsp", "asp"])
def test_workers_send_gradients_and_servers_send_weights_to_each_worker(consistency):
    assert sent(f"{consistency}(2)") == [P, P, 2 * P]
    assert sent(f"{consistency}(3, servers=2)") == [P, P, P, 3 * 2 * UNIT, 3 * UNIT]


def test_of_a_group_of_replicas_one_rank_talks_to_the_server_and_tells_the_others():
    assert sent("data(2) * server(2)") == [3 * P, P, 3 * P, P, 2 * P]


def test_replicas_of_shared_states_sum_a_share_only():
    half = Fraction(1, 2)
    assert sent("zero1(2) * data(2)") == [2 * half * P + 2 * half * P / 2] * 4
    assert sent("data(2) * zero1(2)") == [2 * half * P + 2 * half * P] * 4
    assert sent("data(2) * zero2(2)") == [2 * half * P + 2 * half * P / 2] * 4


def test_forecasts_know_blocks_microbatches_and_peak_of_each_rank():
    ranks = compile_text("pipeline(3)", m=4, blocks=4).cost.ranks
    assert [rank.blocks for rank in ranks] == [(0,), (1,), (2, 3)]
    assert [rank.in_flight for rank in ranks] == [3, 2, 1]
    assert [rank.in_flight for rank in compile_text("gpipe(3)", m=4, blocks=3).cost.ranks] == [4, 4, 4]
    assert [rank.num_micros for rank in compile_text("pipeline(2, replicas=(2,1))", m=4).cost.ranks] == [2, 2, 4]


@pytest.mark.parametrize(
    ("text", "times"),
    [
        ("tree(2)", [1, 1]),
        ("tree(4)", [2, 1, 2, 1]),
        ("tree(7)", [3, 1, 2, 1, 3, 1, 1]),
        ("tree(4, shape=star)", [3, 1, 1, 1]),
        ("tree(4, shape=chain, send=during_backward)", [1, 2, 2, 1]),
        ("tree(2, shape=chain) * tree(2)", [2, 1, 2, 1]),
        ("tree(2, shape=star) * data(2)", [2, 1, 2, 1]),
        ("data(2) * tree(2)", [2, 2, 2, 2]),
        ("data(2, update=sharded) * data(2)", [Fraction(3, 2)] * 4),
    ],
)
def test_trees_send_gradients_up_and_weights_down(text, times):
    assert sent(text) == [P * factor for factor in times]


def test_of_a_tree_only_the_first_copy_updates():
    assert [rank.optimizer_fraction for rank in compile_text("tree(3)").cost.ranks] == [1, 0, 0]
    assert [rank.optimizer_fraction for rank in compile_text("tree(2) * data(2)").cost.ranks] == [1, 0, 1, 0]
