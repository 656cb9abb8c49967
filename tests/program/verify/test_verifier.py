"""Each kind of damage violates the rule that names it, and the message marks the place."""

import pytest
from hypothesis import strategies as st

from counterpoint.compiler.compile import bounds_from, compile as compile_plan, count_bytes
from counterpoint.errors import ProgramError
from counterpoint.model.spec import linear_chain
from counterpoint.plan.plan import Plan
from counterpoint.program.execution_order import check_rendezvous_sends
from counterpoint.program.program import Program, RankProgram
from counterpoint.program.text import parse_instruction, parse_program
from counterpoint.program.verify.symbolic import SymbolicResult
from counterpoint.program.verify.verifier import Bounds, add_row_gathers, verify
from tests.covering import given_few_or_many
from tests.program.verify.damaged_programs import ALL_RANKS, DamagedProgram, verify_damaged, verify_text
from tests.program.verify.random_plans import legal_cases

ONE = (("blocks", 1),)
TWO_MICROS = (("m", 2), ("blocks", 1))
EARLY = (("passes", ("overlap",)),)
S1, S0, S02 = "all_reduce(grad1)@0,1", "all_reduce(grad0)@0,1", "all_reduce(grad0)@0,2"
R0 = "free(weight0)"


def started(collective):
    """Return the start of a collective: ``all_reduce_start(grad1)@0,1``."""
    return collective.replace("(", "_start(", 1)


def awaited(collective):
    """Return the wait for a collective: ``all_reduce_wait(grad1)@0,1``."""
    return collective.replace("(", "_wait(", 1)


MESSAGES = [
    DamagedProgram("a send is dropped", 1, "pipeline(2)", ((0, "x1.0>1", ""),), "x1.0 from rank 0 to rank 1 is never sent"),
    DamagedProgram("a receive is dropped", 1, "pipeline(2)", ((1, "x1.0<0", ""),), "is never received"),
    DamagedProgram("a message goes to the wrong peer", 1, "pipeline(3)", ((0, "x1.0>1", "x1.0>2"),), "rank 0 to rank 2",
           (("blocks", 3),)),
    DamagedProgram("a message goes to a rank that is not live here", 1, "solo", ((0, "F1.0", "x1.0>7 F1.0"),)),
    DamagedProgram("a message goes twice", 4, "pipeline(2)", ((0, "x1.0>1", "x1.0>1 x1.0>1"), (1, "x1.0<0", "x1.0<0 x1.0<0"))),
    DamagedProgram("a push is not answered", 1, "asp(2)", ((0, "pull(weight1)<2", ""),), "never pulled"),
    DamagedProgram("a pull has no push", 1, "asp(2)", ((0, "push(grad1)>2", ""),), "pulled without a push"),
    DamagedProgram("a worker neither pushes nor pulls", 2, "asp(2)",
           ((0, "push(grad1)>2", ""), (0, "pull(weight1)<2", "")), "[apply_and_reply(0,1)@0,1] <- waits here"),
    DamagedProgram("a server does not serve a unit", 2, "asp(2)", ((2, "apply_and_reply(0,1)", "apply_and_reply(0)"),), "[pull(weight1)<2]"),
    DamagedProgram("a server does not serve a worker", 2, "asp(2)", ((2, "@0,1", "@0"),), "1 of 3 ranks"),
    DamagedProgram("a pull stands before its push", 2, "asp(2)",
           ((0, "push(grad1)>2 push(grad0)>2 pull(weight1)<2", "pull(weight1)<2 push(grad1)>2 push(grad0)>2"),)),
    DamagedProgram("a gradient in a code is received as it is", 1, "bsp(2, compress=int8)", ((2, "grad1:int8<0", "grad1<0"),),
           "grad1 in int8 from rank 0 to rank 2 is never received"),
    DamagedProgram("a worker does not come to the center", 2, "easgd(2, alpha=0.5, tau=1)",
           ((0, "push(weight1)>2", ""), (0, "pull(weight1)<2", "")), "[elastic_average:0.5(0,1)@0,1] <- waits here"),
    DamagedProgram("a receive stands before the send that leads to it", 2, "pipeline(2)",
           ((0, "x1.0>1 g0.0<1", "g0.0<1 x1.0>1"),), "2 of 2 ranks wait for each other"),
]  # fmt: skip

TOGETHER = [
    DamagedProgram("collectives are swapped on one rank", 3, "data(2)", ((0, f"{S1} {S0}", f"{S0} {S1}"),),
           "rank 1 calls all_reduce(grad1)@0,1 where rank 0 of the same group called all_reduce(grad0)"),
    DamagedProgram("a collective is missing on one member", 3, "data(2)", ((0, S1, ""),)),
    DamagedProgram("the last collective is missing on one member", 2, "data(2)",
           ((0, f"{S0} commit@0,1", ""), (1, "commit@0,1", "")),
           "[all_reduce(grad0)@0,1] U0", ONE),
    DamagedProgram("a rank calls another verb", 3, "data(2)", ((0, S1, "all_gather(grad1)@0,1"),), "called all_gather(grad1)"),
    DamagedProgram("a rank calls a smaller group", 2, "data(3)", ((0, "all_reduce(grad1)@0-2", "all_reduce(grad1)@0,1"),), "3 of 3 ranks"),
    DamagedProgram("a rank calls a group it is not in", 3, "data(3)", ((0, "all_reduce(grad1)@0-2", "all_reduce(grad1)@1,2"),),
           "but is not a member of its group"),
    DamagedProgram("a group has a rank that is not live here", 2, "data(2)", ((ALL_RANKS, S1, "all_reduce(grad1)@0,1,7"),)),
    DamagedProgram("a commit is missing on one member", 2, "data(2)", ((0, "commit@0,1", ""),)),
    DamagedProgram("a wait has no start", 3, "data(2)",
           ((0, started(S1), ""),), "waits with all_reduce_wait(grad1)@0,1 for a collective", EARLY),
    DamagedProgram("nobody starts what all wait for", 3, "data(2)", ((ALL_RANKS, started(S1), ""),), "has not started", EARLY),
]  # fmt: skip

WORK = [
    DamagedProgram("a forward is done twice", 4, "solo",
           ((0, "F1.0", "F1.0 F1.0"),), "forward of block 1 on microbatch 0 is done 2 times"),
    DamagedProgram("a backward is done twice", 4, "solo", ((0, "B1.0", "B1.0 B1.0"),), "done 2 times"),
    DamagedProgram("a forward is missing", 4, "solo", ((0, "F1.0", ""),), "done 0 times"),
    DamagedProgram("a backward is missing", 4, "solo", ((0, "B1.0", ""),),
           "backward of block 1 on microbatch 0 is done 0 times"),
    DamagedProgram("backward comes before forward", 4, "solo", ((0, "F1.0 B1.0", "B1.0 F1.0"),)),
    DamagedProgram("a microbatch goes backward on another replica", 4, "data(2)", ((0, "B0.0", "B0.1"), (1, "B0.1", "B0.0")),
           "this rank has not run the forward", ONE),
    DamagedProgram("a block is left out on one slice", 4, "tensor(2)", ((1, "F1.0", ""), (1, "B1.0", "")),
           "forward of block 1 on microbatch 0 of shard 1 is done 0 times"),
    DamagedProgram("two replicas do the same microbatch", 4, "data(2)", ((1, "F0.1 B0.1", "F0.0 B0.0"),), "", ONE),
]  # fmt: skip

PARTS = [
    DamagedProgram("a weight part is missing", 4, "zero_bubble(2)", ((0, "Bw0.0", ""),),
           "weight part of the backward of block 0 on microbatch 0 is done 0 times"),
    DamagedProgram("an input part is missing", 4, "zero_bubble(2)", ((1, "Bi1.0", ""),),
           "input part of the backward of block 1 on microbatch 0 is done 0 times"),
    DamagedProgram("a weight part comes before its input part", 4, "zero_bubble(2)", ((0, "Bi0.0 Bw0.0", "Bw0.0 Bi0.0"),),
           "the weight part of a backward comes once, after its input part"),
    DamagedProgram("a whole backward comes behind an input part", 4, "zero_bubble(2)", ((0, "Bi0.0 Bw0.0", "Bi0.0 B0.0"),),
           "input part of the backward of block 0 on microbatch 0 is done 2 times"),
    DamagedProgram("a weight part comes behind the update", 6, "zero_bubble(2)",
           ((0, "Bw0.0 commit@0,1 U0", "commit@0,1 U0 Bw0.0"),), "never B0.0"),
    DamagedProgram("a gradient is summed before its weight part", 6, "zero_bubble(2) * data(2)",
           ((ALL_RANKS, "Bw0.0 all_reduce(grad0)@0,2", "all_reduce(grad0)@0,2 Bw0.0"),), "with different gradients", (("m", 1),)),
    DamagedProgram("what an input part would send is sent first", 4, "zero_bubble(2)", ((1, "Bi1.0 g0.0>0", "g0.0>0 Bi1.0"),),
           "g0.0 is not live here"),
    DamagedProgram("two messages are received the wrong way round", 1, "interleaved(2)",
           ((1, "x1.1<0 F1.1 x2.1>0 x3.0<0", "x3.0<0 F1.1 x2.1>0 x1.1<0"),),
           "rank 1 receives x3.0 where rank 0 sends x1.1", (("m", 2), ("blocks", 4))),
]  # fmt: skip

VERSIONS = [
    DamagedProgram("backward reads a version that was not kept", 5, "solo",
           ((0, "B0.0", "B0.0:-1"),), "no version -1 of weight0"),
    DamagedProgram("backward reads a newer version than forward", 5, "solo",
           ((0, "F0.0 B0.0 F0.1 B0.1", "F0.0 F0.1 B0.0 U0 B0.1"),),
           "forward used version 0 of weight0, backward 1", TWO_MICROS),
    DamagedProgram("a gradient is staler than promised", 5, "solo",
           ((0, "F0.0 B0.0 F0.1 B0.1", "F0.0 F0.1 B0.0 U0 B0.1:-1"),), "a gradient 1 updates old", TWO_MICROS),
]  # fmt: skip

GRADIENTS = [
    DamagedProgram("a sum is done twice", 6, "data(2)", ((ALL_RANKS, S1, f"{S1} {S1}"),), "twice B1.0, B1.1"),
    DamagedProgram("a sum is missing", 6, "data(2)", ((ALL_RANKS, S1, ""),), "never B1.1"),
    DamagedProgram("a sum is started twice", 6, "data(2)", ((ALL_RANKS, started(S1), f"{started(S1)} {started(S1)}"),), "twice", EARLY),
    DamagedProgram("a sum is started before the last backward", 6, "data(2)",
           ((0, f"B0.0 {started(S0)}", f"{started(S0)} B0.0"), (1, f"B0.1 {started(S0)}", f"{started(S0)} B0.1")), "never B0.1", (*ONE, *EARLY)),
    DamagedProgram("an update comes before the sum", 6, "data(2)", ((ALL_RANKS, f"{S0} commit@0,1 U0", f"U0 {S0} commit@0,1"),),
           "never B0.1", ONE),
    DamagedProgram("an update is missing everywhere", 6, "data(2)",
           ((ALL_RANKS, "U1", ""),), "unit 1 is updated only partly: nothing"),
    DamagedProgram("an update is missing on one rank", 6, "data(2)", ((0, "U1", ""),), "that no update has applied"),
    DamagedProgram("an update is done twice on one rank", 6, "data(2)", ((0, "U1", "U1 U1"),), "with different gradients"),
    DamagedProgram("a share is missing", 6, "zero(2)", ((ALL_RANKS, "reduce_scatter(grad1)@0,1", ""),)),
    DamagedProgram("a share is missing where weights are shared", 6, "zero3(2)", ((ALL_RANKS, "reduce_scatter(grad1)@0,1", ""),)),
    DamagedProgram("an update is missing on the first of those who share the weights", 6, "zero(2)",
           ((0, "U0", ""),), "in versions [0, 1]", ONE),
    DamagedProgram("only one of two gradients is shared", 6, "zero2(2)",
           ((ALL_RANKS, "reduce_scatter(grad0)@0,1 free(grad0) commit@0,1", "commit@0,1"),), "another one was not", TWO_MICROS),
    DamagedProgram("a gradient is shared along two axes", 6, "data(2) * zero(2)",
           ((ALL_RANKS, "all_reduce(grad0)@0,1", "reduce_scatter(grad0)@0,1"), (ALL_RANKS, "all_reduce(grad0)@2,3", "reduce_scatter(grad0)@2,3")), "other", ONE),
    DamagedProgram("different parts are summed", 6, "zero(2) * data(2)",
           ((0, "all_reduce(grad0)@0,2", "all_reduce(grad0)@0,1"), (1, "all_reduce(grad0)@1,3", "all_reduce(grad0)@0,1"),
            (2, "all_reduce(grad0)@0,2", "all_reduce(grad0)@2,3"), (3, "all_reduce(grad0)@1,3", "all_reduce(grad0)@2,3")), "different shards", ONE),
    DamagedProgram("a part of the weights is never updated", 6, "zero3(2)", ((0, "U1", ""),)),
    DamagedProgram("a gradient is released before it is shared", 6, "zero2(2)",
           ((ALL_RANKS, "reduce_scatter(grad0)@0,1 free(grad0)", "free(grad0) reduce_scatter(grad0)@0,1"),), "never B0.0, B0.1"),
    DamagedProgram("a server updates before the second gradient came", 6, "server(2)",
           ((2, "grad0<1 commit@0-2 U0", "U0 grad0<1 commit@0-2"),), "never B0.1", ONE),
    DamagedProgram("a worker sends its gradient before its backward", 6, "server(2)",
           ((1, "B0.1 grad0>2", "grad0>2 B0.1"),), "", ONE),
    DamagedProgram("a worker never gives its gradient", 6, "server(2)", ((1, "grad1>2", ""), (2, "grad1<1", "")), "never B1.1"),
    DamagedProgram("a copy in a tree keeps its gradient", 6, "tree(2)", ((1, "grad1>0", ""), (0, "grad1<1", "")), "never B1.1"),
    DamagedProgram("a sum is started before all of its gradient has come", 6, "tree(2) * data(2)",
           ((0, f"grad0<1 {started(S02)}", f"{started(S02)} grad0<1"), (2, f"grad0<3 {started(S02)}", f"{started(S02)} grad0<3")), "B0.1",
           (*ONE, *EARLY)),
    DamagedProgram("weights are summed", 6, "data(2)", ((ALL_RANKS, "U1", "U1 all_reduce(weight1)@0,1"),), "but not summed"),
    DamagedProgram("tied stages do not sum", 6, "pipeline(2)", ((ALL_RANKS, "all_reduce(grad0+1)@0,1", ""),), "", (("tied", True),)),
]  # fmt: skip

MEMORY = [
    DamagedProgram("weights are not gathered after the update", 7, "zero(2)", ((ALL_RANKS, "all_gather(weight1)@0,1", ""),), "rank 0"),
    DamagedProgram("weights are not gathered before forward", 7, "zero3(2)", ((ALL_RANKS, f"F0.0 {R0}", f"{R0} F0.0"),),
           "weight0 is available only from 0 to 1/2 of it"),
    DamagedProgram("weights are released twice", 7, "zero3(2)", ((ALL_RANKS, f"F0.0 {R0}", f"F0.0 {R0} {R0}"),),
           "no gathered weight is there to free"),
    DamagedProgram("more microbatches are in flight than promised", 7, "pipeline(2)",
           ((0, "g0.0<1 B0.0 F0.2 x1.2>1", "F0.2 x1.2>1 g0.0<1 B0.0"),), "3 microbatches in flight", (("m", 4),)),
]  # fmt: skip

BYTES = [
    DamagedProgram("weights are copied for nothing", 8, "data(2)", ((ALL_RANKS, "U1", "U1 broadcast(weight1)@0,1"),),
           "sends 786432 bytes in a step; by the formulas"),
    DamagedProgram("a rank talks to itself", 8, "solo", ((0, "F1.0", "x1.0>0 x1.0<0 F1.0"),)),
]  # fmt: skip


@pytest.mark.parametrize(
    "damage",
    [*MESSAGES, *TOGETHER, *WORK, *PARTS, *VERSIONS, *GRADIENTS, *MEMORY, *BYTES],
    ids=lambda damage: damage.name,
)
def test_damage_is_caught_by_the_rule_that_names_it(damage):
    with pytest.raises(ProgramError) as caught:
        verify_damaged(damage)
    assert caught.value.rule == damage.rule
    assert damage.message in str(caught.value)


ALONG_A_ROW = [
    DamagedProgram("a start is never waited for", 7, "data(2)", ((ALL_RANKS, awaited(S1), ""),), "", EARLY),
    DamagedProgram("one rank never waits for what it started", 7, "data(2)", ((0, awaited(S1), ""),), "", EARLY),
    DamagedProgram("an update does not wait for the sum under way", 6, "data(2)",
           ((ALL_RANKS, f"{awaited(S0)} commit@0,1 U0", f"commit@0,1 U0 {awaited(S0)}"),), "", (*ONE, *EARLY)),
    DamagedProgram("an update without a gradient follows the first", 6, "data(2)", ((ALL_RANKS, "U1", "U1 U1"),)),
    DamagedProgram("a unit that the model does not have is updated", 6, "solo", ((0, "U1", "U1 U5"),)),
    DamagedProgram("nobody commits", 6, "data(2)", ((ALL_RANKS, "commit@0,1", ""),)),
    DamagedProgram("an update comes before the commit", 6, "data(2)", ((ALL_RANKS, "commit@0,1 U0", "U0 commit@0,1"),)),
    DamagedProgram("a sum comes after the commit", 6, "data(2)", ((ALL_RANKS, f"{S0} commit@0,1", f"commit@0,1 {S0}"),)),
    DamagedProgram("gathered weights are not released before the update", 7, "zero3(2)",
           ((ALL_RANKS, f"{R0} commit@0,1", "commit@0,1"),)),
    DamagedProgram("gathered weights are gathered again", 7, "zero3(2)",
           ((0, f"F0.0 {R0}", "F0.0"), (1, f"F0.1 {R0}", "F0.1"))),
    DamagedProgram("weights are scattered like a gradient", 6, "zero(2)", ((ALL_RANKS, "all_gather(weight1)@0,1", "reduce_scatter(weight1)@0,1"),)),
    DamagedProgram("a worker gets weights from before the update", 6, "server(2)",
           ((2, "U0 weight0>0", "weight0>0 U0"),), "", ONE),
    DamagedProgram("a forward comes before its input", 4, "pipeline(2)", ((1, "x1.0<0 F1.0", "F1.0 x1.0<0"),)),
    DamagedProgram("an output is sent before its forward", 4, "pipeline(2)", ((0, "F0.0 x1.0>1", "x1.0>1 F0.0"),)),
    DamagedProgram("a backward comes before its gradient", 4, "pipeline(2)", ((0, "g0.0<1 B0.0", "B0.0 g0.0<1"),)),
    DamagedProgram("a gradient is sent before its backward", 4, "pipeline(2)", ((1, "B1.0 g0.0>0", "g0.0>0 B1.0"),)),
    DamagedProgram("blocks go forward out of order", 4, "solo", ((0, "F0.0 F1.0", "F1.0 F0.0"),)),
    DamagedProgram("blocks go backward out of order", 4, "solo", ((0, "B1.0 B0.0", "B0.0 B1.0"),)),
    DamagedProgram("a partial output is summed after it was used", 4, "tensor(2)",
           ((ALL_RANKS, "all_reduce(y0.0)@0,1 F1.0", "F1.0 all_reduce(y0.0)@0,1"),)),
]  # fmt: skip
"""Damage that shows along one rank program, or only at the end of a step."""


@pytest.mark.parametrize("damage", ALONG_A_ROW, ids=lambda damage: damage.name)
def test_damage_along_a_rank_program_is_caught_by_the_rule_that_names_it(damage):
    with pytest.raises(ProgramError) as caught:
        verify_damaged(damage)
    assert caught.value.rule == damage.rule


CROSSING = """\
F0.0 x1.0>1 F0.1 x1.1>1 F0.2 x1.2>1 F0.3 g0.0<1 B0.0 g0.1<1 B0.1 g0.2<1 B0.2 x1.3>1 g0.3<1 B0.3 commit@0,1 U0
x1.0<0 F1.0 x1.1<0 F1.1 B1.0 g0.0>0 B1.1 x1.2<0 F1.2 B1.2 g0.1>0 g0.2>0 x1.3<0 F1.3 B1.3 g0.3>0 commit@0,1 U1"""


def test_sends_that_cross_deadlock_as_soon_as_nothing_buffers_them():
    """Rank 0 sends before it posts g0.0, rank 1 sends before it posts x1.2: fine only with buffers between."""
    with pytest.raises(ProgramError) as caught:
        verify_text(CROSSING, units=[(0,), (1,)])
    assert caught.value.rule == 2
    assert "2 of 2 ranks wait for each other" in str(caught.value)
    assert "[x1.2>1]" in str(caught.value)
    assert "[g0.0>0]" in str(caught.value)


def test_sends_that_cross_in_one_batch_with_their_receives_are_fine():
    together = CROSSING.replace("F0.3 g0.0<1", "g0.0<1 F0.3").replace("g0.0>0 B1.1", "B1.1 g0.0>0")
    assert verify_text(together, units=[(0,), (1,)]).peak_in_flight == [4, 2]


def without(program, rank, index):
    rank_programs = list(program.rank_programs)
    body = rank_programs[rank].body
    rank_programs[rank] = RankProgram(
        body[:index] + body[index + 1 :], (), (), rank_programs[rank].tp_rank, rank_programs[rank].tp_degree
    )
    return Program(tuple(rank_programs))


@given_few_or_many(15, 150, legal_cases(), st.data())
def test_no_instruction_of_any_composition_can_be_omitted(case, data):
    model, plan, samples = case
    compiled = compile_plan(plan, model, samples_per_micro=samples)
    places = [
        (r, i) for r, rank_program in enumerate(compiled.program.rank_programs) for i in range(len(rank_program.body))
    ]
    less = without(compiled.program, *data.draw(st.sampled_from(places)))
    with pytest.raises(ProgramError) as caught:
        verify(less, bounds_from(compiled.cost), compiled.model.units, count_bytes(less, compiled.model, samples))
    assert caught.value.rule in range(1, 9)


def test_rows_that_are_gathered_where_one_rank_waits_and_another_needs_its_message_are_a_deadlock():
    """Without sparse gradients a wait ends when the other rank has started its reduction."""
    texts = [
        "all_reduce_start(grad0)@0,1 all_reduce_wait(grad0)@0,1 x1.0>1",
        "all_reduce_start(grad0)@0,1 x1.0<0 all_reduce_wait(grad0)@0,1",
    ]
    ranks = [tuple(map(parse_instruction, text.split())) for text in texts]
    check_rendezvous_sends(ranks, 1)
    with pytest.raises(ProgramError, match="deadlock: 2 of 2 ranks wait for each other"):
        check_rendezvous_sends([tuple(add_row_gathers(one, {(0,)})) for one in ranks], 1)


TWO_REPLICAS = "F0.0 B0.0 all_reduce(grad0)@0,1 commit@0,1 U0\nF0.1 B0.1 all_reduce(grad0)@0,1 commit@0,1 U0"


def test_the_result_is_printed_with_what_was_found_first():
    result = verify(parse_program(TWO_REPLICAS))
    first = "2 ranks, 1 unit, 2 microbatches, at most 1 in flight on a rank; rules 1 to 7 hold"
    assert str(result).splitlines() == [first, "2 updates on 2 ranks", "in flight on each rank: 1, 1"]
    assert repr(result) == f"<SymbolicResult: {first}>"


def test_the_result_of_an_asynchronous_pipeline_says_how_late_gradients_are():
    compiled = compile_plan(Plan.parse("pipedream(2)"), linear_chain(2))
    result = verify(compiled.program, Bounds(staleness=1))
    first, updates, *_ = str(result).splitlines()
    assert "2 units, 1 microbatch, " in first
    assert updates == "8 updates on 2 ranks, by gradients at most 1 update late"


def test_a_result_without_updates_or_checked_rules_says_so():
    assert str(SymbolicResult()).splitlines() == [
        "0 ranks, 0 units, 0 microbatches, at most 0 in flight on a rank",
        "0 updates",
    ]
