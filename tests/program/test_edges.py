"""Skip connections are named by producer and consumers, and reach each consumer once, and their gradient comes back."""

import pytest

from counterpoint.errors import ProgramError
from counterpoint.program.instruction import TensorRef
from counterpoint.program.text import format_program, format_tensor_ref, parse_tensor_ref
from tests.program.verify.damaged_programs import DamagedProgram, verify_damaged
from tests.program.verify.random_plans import compile_text

SKIPS = (("blocks", 4), ("skips", True))
FOUR = "s0+1+3.0"

DAMAGED_EDGES = [
    DamagedProgram("an edge does not come to one of its readers", 4, "pipeline(3)",
           ((0, f"{FOUR}>2", ""), (2, f"{FOUR}<0", "")), f"rank 2, F3.0: {FOUR} is not live here", SKIPS),
    DamagedProgram("an edge comes to a reader twice", 4, "pipeline(3)",
           ((0, f"{FOUR}>2", f"{FOUR}>2 {FOUR}>2"), (2, f"{FOUR}<0", f"{FOUR}<0 {FOUR}<0")), "live already", SKIPS),
    DamagedProgram("an edge also comes to a rank that does not read it", 4, "pipeline(4)",
           ((0, f"{FOUR}>3", f"{FOUR}>3 {FOUR}>2"), (2, "x2.0<1", f"x2.0<1 {FOUR}<0")), "no block of this rank", SKIPS),
    DamagedProgram("an edge goes to the wrong rank", 4, "pipeline(4)",
           ((0, f"{FOUR}>3", f"{FOUR}>2"), (3, f"{FOUR}<0", ""), (2, "x2.0<1", f"x2.0<1 {FOUR}<0")), "", SKIPS),
    DamagedProgram("an edge goes by way of another reader", 8, "pipeline(3)",
           ((0, f"{FOUR}>2", ""), (1, f"{FOUR}<0", f"{FOUR}<0 {FOUR}>2"), (2, f"{FOUR}<0", f"{FOUR}<1")), "", SKIPS),
    DamagedProgram("an edge is received behind its reader", 4, "pipeline(3)",
           ((2, f"{FOUR}<0 x2.0<1 F2.0 F3.0", f"x2.0<1 F2.0 F3.0 {FOUR}<0"),), "rank 2, F3.0", SKIPS),
    DamagedProgram("a gradient is not sent back", 4, "pipeline(3)",
           ((0, f"d{FOUR}<2", ""), (2, f"d{FOUR}>0", "")), "rank 0, B0.0: ds0+1+3.0 (the addition of block 3)", SKIPS),
    DamagedProgram("a gradient is sent back twice", 4, "pipeline(3)",
           ((0, f"d{FOUR}<2", f"d{FOUR}<2 d{FOUR}<2"), (2, f"d{FOUR}>0", f"d{FOUR}>0 d{FOUR}>0")), "", SKIPS),
    DamagedProgram("a gradient is sent back before all readers of a rank have added to it", 4, "pipeline(2, balance=(1,3))",
           ((1, f"B1.0 d{FOUR}>0", f"d{FOUR}>0 B1.0"),), "the addition of block 1", SKIPS),
    DamagedProgram("a gradient is received behind the backward of its maker", 2, "pipeline(3)",
           ((0, f"d{FOUR}<2 B0.0", f"B0.0 d{FOUR}<2"),), "wait for each other", SKIPS),
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGED_EDGES, ids=lambda damage: damage.name)
def test_a_damaged_edge_violates_the_rule_that_names_it(damage):
    with pytest.raises(ProgramError) as caught:
        verify_damaged(damage)
    assert caught.value.rule == damage.rule
    assert damage.message in str(caught.value)


def test_an_edge_that_the_model_does_not_have_is_refused():
    with pytest.raises(ProgramError, match=r"s0\+2\.0 is not live here"):
        verify_damaged(DamagedProgram("", 4, "pipeline(3)", ((0, "x1.0>1", "x1.0>1 s0+2.0>2"), (2, "x2.0<1", "x2.0<1 s0+2.0<0")), "",
                     (("blocks", 3),)))  # fmt: skip


def test_inside_a_rank_nothing_is_sent():
    row, _ = format_program(compile_text("pipeline(2, balance=(3,1))", blocks=4, skips=True).program).splitlines()
    assert row.startswith("F0.0 F1.0 F2.0 s0+1+3.0>1 x3.0>1 ds0+1+3.0<1 g2.0<1 B2.0 B1.0 B0.0")


@pytest.mark.parametrize(
    ("text", "blocks"), [("s2+7.0", (2, 7)), ("ds0+1+3.4", (0, 1, 3)), ("s0+2-4+9.1", (0, 2, 3, 4, 9))]
)
def test_an_edge_is_formatted_as_its_producer_and_its_consumers(text, blocks):
    assert parse_tensor_ref(text) == TensorRef(text[: text.index("s") + 1], blocks, int(text[-1]))
    assert format_tensor_ref(parse_tensor_ref(text)) == text


@pytest.mark.parametrize("text", ["s2.0", "s2+1.0", "s2+3.0", "s2+5+4.0", "s1+4-2.0", "s1-3+4.0"])
def test_what_is_not_an_edge_is_refused_by_name(text):
    with pytest.raises(ProgramError, match=r"is not a (skip connection|tensor reference)"):
        parse_tensor_ref(text)
