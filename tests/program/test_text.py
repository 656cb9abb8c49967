"""Instructions, groups, units and tensor references: formatted, parsed back, and refused with a caret."""

import re
from contextlib import suppress

import pytest
from hypothesis import given, strategies as st

from counterpoint.errors import ProgramError
from counterpoint.program.instruction import (
    ApplyPushes,
    Backward,
    Collective,
    Commit,
    Fetch,
    Forward,
    Free,
    Offload,
    Pull,
    Push,
    Recv,
    Send,
    TensorRef,
    Update,
)
from counterpoint.program.program import Program, RankProgram
from counterpoint.program.text import (
    FORMER_NAMES,
    MAX_LINE,
    format_group,
    format_instruction,
    format_program,
    format_tensor_ref,
    format_unit,
    parse_group,
    parse_instruction,
    parse_program,
    parse_tensor_ref,
    parse_unit,
)
from tests.covering import given_few_or_many

ranks = st.integers(0, 2000)
groups = st.sets(ranks, min_size=1, max_size=6).map(lambda result: tuple(sorted(result)))
units = st.sets(st.integers(0, 30), min_size=1, max_size=4).map(lambda result: tuple(sorted(result)))
numbers = st.integers(0, 99)
parameters = st.builds(TensorRef, st.sampled_from(["grad", "weight"]), units)
activations = st.builds(TensorRef, st.sampled_from(["x", "g", "y", "dx"]), st.tuples(numbers), numbers)
edges = st.builds(
    TensorRef,
    st.sampled_from(["s", "ds"]),
    units.filter(lambda blocks: blocks[1:] not in {(), (blocks[0] + 1,)}),
    numbers,
)
values = parameters | activations | edges
phases = st.sampled_from(["", "start", "wait"])
codes = st.sampled_from(
    ["fp16", "int8", "sign", "twobit", "twobit:0.5", "topk:0.01", "topk:1", "powersgd:12", "adasum"]
)
gradients = st.builds(TensorRef, st.just("grad"), units)
alone = st.sampled_from(["fp16", "int8", "sign", "twobit:0.5", "topk:0.01"])
served = st.lists(units, min_size=1, max_size=3).map(tuple)
instructions = st.one_of(
    st.builds(Forward, numbers, numbers, st.integers(-9, 0)),
    st.builds(Backward, numbers, numbers, st.integers(-9, 0), st.sampled_from(["", "input", "weight"])),
    st.builds(Update, units),
    st.builds(Commit, groups),
    st.builds(Send, values, ranks),
    st.builds(Recv, values, ranks),
    st.builds(
        Collective, st.sampled_from(["all_reduce", "reduce_scatter", "all_gather", "broadcast"]), values, groups, phases
    ),
    st.builds(Collective, st.just("all_reduce"), st.builds(TensorRef, st.just("grad"), units), groups, phases, codes),
    st.builds(Push, parameters, ranks),
    st.builds(Push, gradients, ranks, alone, st.sampled_from(["push", "push_no_reply"])),
    st.builds(Send, gradients, ranks, alone),
    st.builds(Recv, gradients, ranks, alone),
    st.builds(Pull, parameters, ranks),
    st.builds(ApplyPushes, served, groups, st.none() | st.integers(0, 9)),
    st.builds(ApplyPushes, served, groups, op=st.just("apply")),
    st.builds(ApplyPushes, served, groups, op=st.just("elastic_average"), alpha=st.sampled_from(["0.5", "0.0225"])),
    st.builds(Free, values),
    st.builds(Fetch, st.builds(TensorRef, st.just("state"), units), st.sampled_from(["disk", "host"])),
    st.builds(Offload, st.builds(TensorRef, st.just("state"), units), st.sampled_from(["disk", "host"])),
)
words = st.lists(instructions, max_size=5).map(tuple)
slices = st.integers(1, 4).flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n)))
rows = st.builds(lambda b, p, e, s: RankProgram(b, p, e, *s), words, words, words, slices)
steps = st.builds(lambda b, s: RankProgram(b, (), (), *s), words, slices)


@given(instructions)
def test_every_instruction_is_formatted_without_spaces_and_parsed_back(instruction):
    text = format_instruction(instruction)
    assert parse_instruction(text) == instruction
    assert not set(" |") & set(text)


@given_few_or_many(20, 100, st.lists(steps, max_size=4) | st.lists(rows, max_size=4))
def test_every_program_reads_back_empty_rank_programs_and_async_pipelines_included(result):
    program = Program(tuple(result))
    assert parse_program(format_program(program)) == program


@given(groups, units, values)
def test_groups_units_and_values_read_back(group, unit, value):
    assert parse_group(format_group(group)) == group
    assert parse_unit(format_unit(unit)) == unit
    assert parse_tensor_ref(format_tensor_ref(value)) == value


@pytest.mark.parametrize(
    ("group", "text"),
    [
        ((3,), "3"),
        ((0, 1), "0,1"),
        ((0, 4), "0,4"),
        ((0, 1, 2), "0-2"),
        ((0, 4, 8, 12), "0-12/4"),
        ((1, 2, 4), "1,2,4"),
        (tuple(range(1024)), "0-1023"),
    ],
)
def test_three_evenly_spaced_ranks_and_more_are_written_as_a_span(group, text):
    assert format_group(group) == text
    assert parse_group(text) == group


def test_a_group_may_be_written_out_or_mixed():
    assert parse_group("0,1,2") == (0, 1, 2)
    assert parse_group("0-2,5,8-12/2") == (0, 1, 2, 5, 8, 10, 12)


@pytest.mark.parametrize("instruction", ["all_reduce(grad0)@{}", "commit@{}", "s{}.0>1", "x0.{}>1", "F{}.0"])
@pytest.mark.parametrize("number", ["18446744073709551616", "9223372036854775807", "9" * 18])
def test_numbers_that_no_machine_has_are_refused_or_kept(instruction, number):
    """``0-18446744073709551616`` raised OverflowError."""
    for text in (f"0-{number}", number):
        with suppress(ProgramError):
            assert format_instruction(parse_instruction(instruction.format(text))) == instruction.format(text)


@pytest.mark.parametrize("text", ["1,0", "0,0", "5-2", "0-7/0", "0-5/2", "0-3,2", "4,0-3"])
def test_a_group_whose_ranks_do_not_go_upwards_is_refused(text):
    with pytest.raises(
        ProgramError, match="is not a group; write its ranks in ascending order, as 0,1 or 0-7 or 0-12/4"
    ):
        parse_group(text)


@pytest.mark.parametrize("text", ["w3", "grad", "grad0.1", "x1", "x1+2.0", "weight0+", "gradient3", ""])
def test_what_is_no_value_is_refused(text):
    with pytest.raises(ProgramError, match=r"is not a tensor reference; expected one such as x1\.2"):
        parse_tensor_ref(text)


@pytest.mark.parametrize(
    "instruction",
    [
        *(
            "F0",
            "F0.",
            "f0.0",
            "F0.0:1",
            "F0.0:0",
            "U",
            "U0,1",
            "commit",
            "commit@",
            "all_reduce(grad0)",
            "all_reduce(grad0)@",
        ),
        *(
            "total(grad0)@0,1",
            "all_reduce(grad0)@0,1*",
            "x1.0",
            "x1.0>",
            "push(grad0)<2",
            "pull(weight0)>2",
            "apply_and_reply()@0",
        ),
        *("apply_and_reply(0)", "free()", "free(weight0)@0", "F0.0F0.0", "x1.0>1>2"),
    ],
)
def test_what_is_no_instruction_is_refused_with_examples(instruction):
    with pytest.raises(ProgramError, match="is not an instruction; expected one such") as caught:
        parse_instruction(instruction)
    assert caught.value.rule == 0


@pytest.mark.parametrize(
    ("text", "line", "start", "length"),
    [
        ("F0.0 B0.0\nF0.1 F0.x B0.1", 2, 5, 4),
        ("F0.0 F0", 1, 5, 2),
        ("0/2: F0.0 U", 1, 10, 1),
        ("F0.0 | F0.+1 B | B0.+0", 1, 13, 1),
        ("F0.0 | F0.+1 | x1.0", 1, 15, 4),
        ("F0.0  all_reduce(grad0)@2,1", 1, 6, 21),
    ],
)
def test_a_program_that_cannot_be_read_shows_its_line_with_a_caret_under_the_instruction(text, line, start, length):
    with pytest.raises(ProgramError) as caught:
        parse_program(text)
    message, shown, caret = str(caught.value).split("\n")
    assert message.startswith(f"line {line}: ")
    assert shown == f"  {text.splitlines()[line - 1]}"
    assert caret == f"  {' ' * start}{'^' * length}"


def test_a_rank_program_has_one_part_or_three():
    with pytest.raises(
        ProgramError, match=r"line 1 has 2 parts; a rank program is a body, or prologue \| body \| epilogue"
    ):
        parse_program("F0.0 | B0.0")


def test_a_rank_program_that_does_nothing_can_be_seen():
    assert format_program(Program((RankProgram((Forward(0, 0),)), RankProgram(())))) == "F0.0\n0/1:"


def test_only_the_body_and_the_epilogue_of_an_async_pipeline_count_from_the_repetition():
    row = RankProgram(
        (Forward(0, 1),), (Forward(0, 0), Send(TensorRef("x", (1,), 0), 1)), (Free(TensorRef("x", (1,), 1)),)
    )
    assert format_program(Program((row,))) == "F0.0 x1.0>1 | F0.+1 | free(x1.+1)"


FORMER_INSTRUCTIONS = [
    ("sum(grad0)@0,1", "all_reduce(grad0)@0,1"),
    ("sum:int8(grad0)@0,1+", "all_reduce_start:int8(grad0)@0,1"),
    ("sum(grad0)@0,1-", "all_reduce_wait(grad0)@0,1"),
    ("all_reduce(grad0)@0,1+", "all_reduce_start(grad0)@0,1"),
    ("sum(late0)@0,1", "all_reduce(delayed_grad0)@0,1"),
    ("share(grad0)@0,1", "reduce_scatter(grad0)@0,1"),
    ("join(weight0)@0,1", "all_gather(weight0)@0,1"),
    ("copy(weight0)@0,1", "broadcast(weight0)@0,1"),
    ("mean(weight0)@0,1", "all_reduce_mean(weight0)@0,1"),
    ("tell(grad0)>2", "push_no_reply(grad0)>2"),
    ("serve(0,1)@0,1", "apply_and_reply(0,1)@0,1"),
    ("serve:2(0)@0,1", "apply_and_reply:2(0)@0,1"),
    ("take(0)@0,1", "apply(0)@0,1"),
    ("draw:0.25(0)@0,1", "elastic_average:0.25(0)@0,1"),
    ("swap(grad0)", "swap_grad_buffers(grad0)"),
    ("release(late0)", "free(delayed_grad0)"),
    ("late0>1", "delayed_grad0>1"),
]


def test_every_former_name_is_tried():
    tried = {name for former, _ in FORMER_INSTRUCTIONS for name in re.findall("[a-z_]+", former)}
    assert FORMER_NAMES.keys() <= tried


@pytest.mark.parametrize(("former", "current"), FORMER_INSTRUCTIONS)
def test_a_former_name_of_an_instruction_is_refused_with_its_current_one(former, current):
    parse_instruction(current)
    with pytest.raises(ProgramError) as caught:
        parse_instruction(former)
    assert str(caught.value) == f"{former!r} is not an instruction; its name has changed: write {current}"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("draw(0)@0,1", "draw is now called elastic_average"),
        ("sum(grad0)", "sum is now called all_reduce"),
        ("join", "join is now called all_gather"),
        ("all_reduce(late0)", "late is now called delayed_grad"),
    ],
)
def test_a_former_name_in_an_incomplete_instruction_is_refused_with_its_current_one(text, hint):
    with pytest.raises(ProgramError) as caught:
        parse_instruction(text)
    assert str(caught.value).startswith(f"{text!r} is not an instruction; {hint}; expected one such as F0.2")


MANY = "9" * 5000


@pytest.mark.parametrize(
    "text",
    [
        f"F{MANY}.0",
        f"F0.{MANY}",
        f"F0.0:-{MANY}",
        f"U{MANY}",
        f"U0+{MANY}",
        f"commit@{MANY}",
        f"commit@0-{MANY}",
        f"commit@0-8/{MANY}",
        f"x0.{MANY}>1",
        f"x0.0>{MANY}",
        f"s0+{MANY}.0>1",
        f"push(grad0)>{MANY}",
        f"apply_and_reply:{MANY}(0)@0,1",
        f"0/{MANY}: F0.0",
    ],
)
def test_a_number_with_too_many_digits_is_refused(text):
    with pytest.raises(ProgramError, match="a number of an instruction has 5000 digits; give at most 18"):
        parse_program(text)


@pytest.mark.parametrize("text", [f"elastic_average:0.{MANY}(0)@0", f"all_reduce:topk:{MANY}(grad0)@0,1"])
def test_a_fraction_with_too_many_digits_is_refused(text):
    with pytest.raises(ProgramError, match="is not an instruction"):
        parse_instruction(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("|" * 100_000, "line 1 has 100001 parts; a rank program is a body, or prologue | body | epilogue"),
        ("all_reduce(grad0)@0-99999999", "'0-99999999' has 100000000 ranks; a group here has at most 1024"),
        ("commit@0-99999999999", "'0-99999999999' has 100000000000 ranks; a group here has at most 1024"),
        ("apply(0)@0-4096/2", "'0-4096/2' has 2049 ranks; a group here has at most 1024"),
        ("s0+1-99999999.0>1", "'0+1-99999999' has 100000000 blocks; a skip connection has at most 65536"),
        ("x" * (MAX_LINE + 1), "line 1 has 10000001 characters; a line has at most 10000000"),
    ],
)
def test_a_program_that_would_take_too_long_to_read_is_refused(text, message):
    with pytest.raises(ProgramError) as caught:
        parse_program(text)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_group_may_have_as_many_ranks_as_the_program():
    result = parse_program("\n".join(["commit@0-1999"] * 2000))
    assert result.rank_programs[0].body == (Commit(tuple(range(2000))),)


def test_an_error_in_a_long_line_shows_the_part_around_it():
    with pytest.raises(ProgramError) as caught:
        parse_program("F0.0 " * 1000 + "wrong" + " F0.0" * 1000)
    line, caret = str(caught.value).splitlines()[-2:]
    assert len(line) == 202
    assert line[caret.index("^") : caret.rindex("^") + 1] == "wrong"
