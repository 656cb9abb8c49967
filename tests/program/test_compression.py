"""Compression codecs: their text, their encoded sizes, and what a program may not compress."""

from fractions import Fraction
from pathlib import Path

import pytest

from counterpoint.errors import PlanError, ProgramError
from counterpoint.plan.plan import Plan
from counterpoint.program.comm_volume import bytes_by_instruction
from counterpoint.program.compression import CODECS, find_codec, ring_volume_factor
from counterpoint.program.text import parse_instruction, parse_program
from counterpoint.program.verify.verifier import Bounds, verify


@pytest.mark.parametrize(
    ("code", "shape", "size"),
    [
        ("fp16", (10, 30), 600), ("bf16", (), 2),
        ("int8", (1024,), 1024 + 4), ("int8", (1025,), 1025 + 8), ("int8", (0,), 0),
        ("int4", (1024,), 512 + 4), ("int4", (1025,), 513 + 8), ("int4", (0,), 0),
        ("sign", (1024,), 128 + 4), ("sign", (9,), 2 + 4), ("onebit", (1025,), 129 + 8),
        ("twobit", (32, 2), 16), ("twobit:0.1", (5,), 2),
        ("topk", (1000,), 10 * 8), ("topk:0.01", (101,), 2 * 8), ("topk:1", (3,), 24), ("topk", (0,), 0),
        ("powersgd", (100, 50), 150 * 4), ("powersgd:2", (100, 5, 10), 300 * 4), ("powersgd", (100,), 400),
        ("powersgd:4", (8, 8), 64 * 4), ("powersgd", (1, 9), 36), ("powersgd", (0, 5), 0),
        ("adasum", (3, 5), 60),
    ],
)  # fmt: skip
def test_the_bytes_of_a_float32_parameter_follow_from_its_shape(code, shape, size):
    assert find_codec(code).encoded_bytes(shape, 4) == size


def test_scales_values_and_factors_are_as_wide_as_the_gradients():
    assert find_codec("int8").encoded_bytes((2000,), 8) == 2000 + 2 * 8
    assert find_codec("topk:0.1").encoded_bytes((20,), 2) == 2 * (4 + 2)
    assert find_codec("powersgd:2").encoded_bytes((30, 20), 8) == 2 * 50 * 8
    assert find_codec("fp16").encoded_bytes((20,), 8) == 40


@pytest.mark.parametrize("code", CODECS)
def test_a_sum_is_added_up_on_the_way_or_gathered(code):
    once = Fraction(3, 2) if code in {"fp16", "bf16", "onebit", "powersgd"} else 3
    assert ring_volume_factor(code, 4) == once
    assert ring_volume_factor(code, 1) == 0
    assert ring_volume_factor("", 4) == Fraction(3, 2)


def test_instructions_send_encoded_bytes():
    words = (
        parse_program(
            "F0.0 B0.0 all_reduce_start:topk(grad0)@0,1,2 all_reduce_wait:topk(grad0)@0,1,2 all_reduce:fp16(grad0)@0,1"
        )
        .rank_programs[0]
        .body
    )
    sizes = {"": 100, "topk": 8, "fp16": 50}
    assert [sent for _, sent in bytes_by_instruction(0, words, lambda value, code="": sizes[code])] == [0, 0, 16, 0, 50]


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("int9", "there is no codec 'int9'; the codecs are fp16, bf16, int8,"),
        ("int8:3", "the codec int8 takes no number, but 'int8:3' has one; write int8"),
        ("topk:1.5", "the fraction of 'topk:1.5' is 1.5, but must be between 0 and 1"),
        ("topk:0", "the fraction of 'topk:0' is 0, but must be between 0 and 1"),
        ("powersgd:1.5", "the rank of 'powersgd:1.5' is 1.5, but must be a whole number from 1"),
        ("twobit:0.0", "the threshold of 'twobit:0.0' is 0.0, but must be above 0"),
        ("topk:-1", "the fraction of 'topk:-1' must be a positive number in digits; write topk:0.01"),
    ],
)
def test_what_is_no_codec_is_refused_in_a_plan_as_in_a_program(code, why):
    with pytest.raises(ProgramError) as caught:
        find_codec(code)
    assert str(caught.value).startswith(why)
    with pytest.raises(PlanError) as caught_plan:
        Plan.parse(f"data(2, compress={code})")
    assert str(caught_plan.value) == str(caught.value)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("compress=int8, update=sharded", r"update=sharded with int8, but a codec needs whole gradients"),
        ("reduce=adasum, update=sharded", r"update=sharded with adasum"),
        ("compress=int8, reduce=adasum", r"compress=int8 and reduce=adasum, but adasum needs uncompressed gradients"),
        (
            "compress=adasum",
            r"compress=adasum and reduce=sum, but adasum needs uncompressed gradients; give reduce=adasum",
        ),
        ("reduce=mean", r"data has no reduce=mean; give reduce=sum or reduce=adasum"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, why):
    with pytest.raises(PlanError, match=why):
        Plan.parse(f"data(2, {options})")


@pytest.mark.parametrize("instruction", ["all_reduce:int8(weight0)@0,1", "all_reduce:int8(y0.1)@0,1"])
def test_only_sums_of_gradients_and_gathers_of_weights_have_a_codec(instruction):
    with pytest.raises(
        ProgramError, match=r"cannot have a codec: only sums of gradients and gathers of weights .*; omit :int8"
    ):
        parse_instruction(instruction)


@pytest.mark.parametrize("instruction", ["all_gather:sign(weight0)@0,1", "reduce_scatter:fp16(grad0)@0,1"])
def test_shards_have_codecs_that_bound_the_error_of_each_element(instruction):
    why = r"cannot have a codec: (sign|fp16) is for all-reduces; gathers and reduce-scatters have int8 or int4; omit :"
    with pytest.raises(ProgramError, match=why):
        parse_instruction(instruction)


def test_gathers_and_reduce_scatters_send_a_shard_of_the_encoded_bytes():
    text = "all_gather:int8(weight0)@0,1,2,3 reduce_scatter:int4(grad0)@0,1,2,3 all_reduce(grad0)@0,4"
    words, sizes = parse_program(text).rank_programs[0].body, {"": 100, "int8": 28, "int4": 16}
    assert [sent for _, sent in bytes_by_instruction(0, words, lambda value, code="": sizes[code])] == [21, 12, 25]


def test_weights_that_a_gather_has_rounded_must_be_freed():
    rows = [
        f"F0.{rank} B0.{rank} reduce_scatter(grad0)@0,1 commit@0,1 U0 all_gather:int8(weight0)@0,1" for rank in (0, 1)
    ]
    with pytest.raises(ProgramError, match="weights are not freed after use, so that ranks would go on") as caught:
        verify(parse_program("\n".join(rows)), Bounds())
    assert caught.value.rule == 6


@pytest.mark.parametrize(
    ("rows", "rule", "why"),
    [
        (("F0.0 B0.0 all_reduce:int8(grad0)@0,1 commit@0,1 U0", "F0.1 B0.1 all_reduce:sign(grad0)@0,1 commit@0,1 U0"), 3,
         r"rank 1 calls all_reduce:sign\(grad0\)@0,1 where rank 0 of the same group called all_reduce:int8\(grad0\)"),
        (("F0.0 B0.0 reduce_scatter(grad0)@0,1 all_reduce:int8(grad0)@0,1 commit@0,1 U0",
          "F0.1 B0.1 reduce_scatter(grad0)@0,1 all_reduce:int8(grad0)@0,1 commit@0,1 U0"), 6, r"different shards of this gradient"),
        (("F0.0 B0.0 all_reduce_start:int8(grad0)@0,1 all_reduce_wait(grad0)@0,1 commit@0,1 U0",
          "F0.1 B0.1 all_reduce_start:int8(grad0)@0,1 all_reduce_wait(grad0)@0,1 commit@0,1 U0"), 3, r"for a collective that it has not started"),
    ],
)  # fmt: skip
def test_programs_that_compress_what_cannot_be_compressed_are_refused(rows, rule, why):
    with pytest.raises(ProgramError, match=why) as caught:
        verify(parse_program("\n".join(rows)), Bounds(), [(0,)])
    assert caught.value.rule == rule


def test_a_gradient_that_was_shared_out_has_no_codec():
    """The parts of two pairs are summed over the pairs, as ZeRO's are over replicas."""
    text = "F0.{0} B0.{0} reduce_scatter(grad0)@{1} all_reduce:int8(grad0)@{2} commit@0-3 U0 all_gather(weight0)@{1}"
    rows = [text.format(rank, "0,1" if rank < 2 else "2,3", "0,2" if rank % 2 == 0 else "1,3") for rank in range(4)]
    with pytest.raises(
        ProgramError, match="this gradient was reduce-scattered; only whole gradients can be compressed"
    ) as caught:
        verify(parse_program("\n".join(rows)), Bounds(), [(0,)])
    assert caught.value.rule == 6


def test_the_table_of_the_documentation_has_the_bytes_of_the_formulas():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "strategies.md").read_text(encoding="utf-8")
    lines = page.partition("\n## Gradient compression\n")[2].partition("\n## ")[0].splitlines()
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| `")]
    assert [row[0].partition(":")[0] for row in rows] == list(CODECS)
    for code, size, each, sent, _ in rows:
        assert int(size) == find_codec(code).encoded_bytes((1000, 1000), 4)
        assert float(each) == pytest.approx(int(size) / 1e6, abs=1e-4)
        assert int(sent) == ring_volume_factor(code, 4) * int(size)
