"""Damage to commit groups, to the amount of work, to partial results and to frees: each is found and named."""

from dataclasses import replace

import pytest
from hypothesis import assume, strategies as st

from counterpoint.compiler.compile import bounds_from, compile as compile_plan, count_bytes
from counterpoint.errors import ProgramError
from counterpoint.program.instruction import Commit
from counterpoint.program.program import Program
from counterpoint.program.rewrite import map_parts
from counterpoint.program.verify.verifier import verify
from tests.covering import given_few_or_many
from tests.program.verify.damaged_programs import ALL_RANKS, DamagedProgram, verify_damaged, verify_text
from tests.program.verify.random_plans import legal_cases

ONE = (("blocks", 1),)
TWO_MICROS = (("m", 2),)
THREE_BLOCKS = (("blocks", 3),)
TWO_OF_THREE = (("m", 2), ("blocks", 3))


def narrowed(old, *new):
    """Each rank commits with the ranks given for it."""
    return tuple((rank, f"commit@{old}", f"commit@{group}") for rank, group in enumerate(new))


COMMITS = [
    DamagedProgram("every replica commits alone", 6, "data(2)", narrowed("0,1", "0", "1"),
           "its gradient is of microbatches 0, 1, but commit@0 commits microbatch 0"),
    DamagedProgram("every stage commits alone", 6, "pipeline(2)", narrowed("0,1", "0", "1"),
           "rank 1 contributed to it, but are not in commit@0"),
    DamagedProgram("every slice commits alone", 6, "tensor(2)", narrowed("0,1", "0", "1"), "rank 1 contributed"),
    DamagedProgram("every share commits alone", 6, "zero(2)", narrowed("0,1", "0", "1"), "commits microbatch 0"),
    DamagedProgram("every replica of a pipeline commits alone", 6, "pipeline(2) * data(2)",
           narrowed("0-3", "0,1", "0,1", "2,3", "2,3"), "commits microbatch 0"),
    DamagedProgram("every stage of all replicas commits alone", 6, "pipeline(2) * data(2)",
           narrowed("0-3", "0,2", "1,3", "0,2", "1,3"), "ranks 1,3 contributed to it, but are not in commit@0,2"),
    DamagedProgram("a server commits alone", 6, "server(2)", narrowed("0-2", "0,1", "0,1", "2"),
           "commit@2 commits no microbatch"),
    DamagedProgram("a server commits with one of its workers", 6, "server(2)", narrowed("0-2", "0,2", "1", "0,2"),
           "commits microbatch 0"),
    DamagedProgram("the ranks of a drawn worker commit alone", 6, "data(2) * easgd(2, alpha=0.5, tau=1)",
           narrowed("0,1:0,1", "0:0", "1:1"), "gradients counted without cause B0.1"),
    DamagedProgram("workers that push apart commit together", 6, "asp(2)", ((0, "commit@0", "commit@0,1"),
           (1, "commit@1", "commit@0,1")), "but commit@0,1 commits microbatches 0, 1"),
    DamagedProgram("the ranks of one worker commit alone", 6, "data(2) * asp(2)",
           ((0, "commit@0,1", "commit@0"), (1, "commit@0,1", "commit@1")), "commits microbatch 0"),
    DamagedProgram("all commit twice", 6, "data(2)", ((ALL_RANKS, "commit@0,1", "commit@0,1 commit@0,1"),), "commits 2 times"),
    DamagedProgram("a narrow commit stands first", 6, "data(2)",
           ((0, "commit@0,1", "commit@0 commit@0,1"), (1, "commit@0,1", "commit@1 commit@0,1")), "commits 2 times"),
    DamagedProgram("a narrow commit stands last", 6, "data(2)",
           ((0, "commit@0,1", "commit@0,1 commit@0"), (1, "commit@0,1", "commit@0,1 commit@1")), "commits 2 times"),
    DamagedProgram("a step is applied in two halves", 6, "solo",
           ((0, "F0.1", "commit@0 U0 U1 F0.1"),), "commits 2 times", TWO_MICROS),
]  # fmt: skip

WORK = [
    DamagedProgram("the last block is never run", 4, "solo", ((0, "F1.0 B1.0", ""),),
           "forward of block 1 on microbatch 0 is done 0 times"),
    DamagedProgram("the last block is never run by replicas that sum it", 4, "data(2)",
           ((0, "F1.0 B1.0", ""), (1, "F1.1 B1.1", "")), "forward of block 1"),
    DamagedProgram("the last block is never run by replicas that share it", 4, "zero(2)",
           ((0, "F1.0 B1.0", ""), (1, "F1.1 B1.1", "")), "forward of block 1"),
    DamagedProgram("the last block is never run where gradients are shared", 4, "zero2(2)",
           ((0, "F1.0 B1.0", ""), (1, "F1.1 B1.1", "")), "forward of block 1"),
    DamagedProgram("the last microbatch is never run", 4, "solo", ((0, "F0.1 F1.1 B1.1 B0.1", ""),),
           "forward of block 0 on microbatch 1 is done 0 times", TWO_MICROS),
    DamagedProgram("the last microbatch of each replica is never run", 4, "data(2)",
           ((0, "F0.1 F1.1 B1.1 B0.1", ""), (1, "F0.3 F1.3 B1.3 B0.3", "")), "on microbatch 1", TWO_MICROS),
    DamagedProgram("a microbatch is run that does not exist", 4, "data(2)",
           ((1, "F0.1 F1.1 B1.1 B0.1", "F0.7 F1.7 B1.7 B0.7"),), "on microbatch 1 is done 0 times"),
    DamagedProgram("a microbatch too many is run", 4, "solo", ((0, "commit@0", "F0.1 F1.1 B1.1 B0.1 commit@0"),),
           "on microbatch 1 is done but is not part of this plan"),
    DamagedProgram("the last slice is run by nobody", 4, "tensor(2)", ((1, "1/2: ", "0/2: "),)),
]  # fmt: skip

SUMS = [
    DamagedProgram("a partial output is never summed", 4, "tensor(2)", ((ALL_RANKS, "all_reduce(y0.0)@0,1", ""),), "x1.0 is not live here"),
    DamagedProgram("the last partial output is never summed", 4, "tensor(2)", ((ALL_RANKS, "all_reduce(y1.0)@0,1", ""),), "x2.0 is not"),
    DamagedProgram("a partial output is summed twice", 4, "tensor(2)",
           ((ALL_RANKS, "all_reduce(y0.0)@0,1", "all_reduce(y0.0)@0,1 all_reduce(y0.0)@0,1"),), "y0.0 is not live here"),
    DamagedProgram("the partial output of another microbatch is summed", 4, "tensor(2)",
           ((ALL_RANKS, "all_reduce(y1.1)@0,1", "all_reduce(y1.0)@0,1"),), "y1.0 is not live here", TWO_OF_THREE),
    DamagedProgram("the partial output of another block is summed", 4, "tensor(2) * pipeline(2)",
           ((ALL_RANKS, "all_reduce(y1.0)@0,1", "all_reduce(y0.0)@0,1"),), "y0.0 is not live here", (("blocks", 4),)),
    DamagedProgram("the partial gradient of another microbatch is summed", 4, "tensor(2)",
           ((ALL_RANKS, "all_reduce(dx1.1)@0,1", "all_reduce(dx1.0)@0,1"),), "dx1.0 is not live here", TWO_OF_THREE),
    DamagedProgram("a partial output is summed instead of a partial gradient", 4, "tensor(2)",
           ((ALL_RANKS, "all_reduce(dx1.0)@0,1", "all_reduce(y1.0)@0,1"),), "y1.0 is not live here"),
    DamagedProgram("one sum too few and one too many", 4, "tensor(2)",
           ((ALL_RANKS, "all_reduce(dx1.0)@0,1", ""), (ALL_RANKS, "all_reduce(y2.0)@0,1", "all_reduce(y2.0)@0,1 all_reduce(y2.0)@0,1")), "", THREE_BLOCKS),
    DamagedProgram("a partial gradient of the data is summed", 4, "tensor(2)",
           ((ALL_RANKS, "B0.0", "B0.0 all_reduce(dx0.0)@0,1"),), "dx0.0 is not live here"),
    DamagedProgram("a partial output is shared out and gathered", 4, "tensor(2)",
           ((ALL_RANKS, "all_reduce(y1.0)@0,1", "reduce_scatter(y1.0)@0,1 all_gather(y1.0)@0,1"),), "only by all_reduce"),
    DamagedProgram("a partial output is gathered twice", 4, "tensor(2)",
           ((ALL_RANKS, "all_reduce(y1.0)@0,1", "all_gather(y1.0)@0,1 all_gather(y1.0)@0,1"),), "only by all_reduce"),
    DamagedProgram("a partial output is copied", 4, "tensor(2)", ((ALL_RANKS, "all_reduce(y1.0)@0,1", "broadcast(y1.0)@0,1"),), "only by all_reduce"),
    DamagedProgram("a whole value is summed", 4, "data(2)",
           ((0, "F1.0", "all_reduce(x1.0)@0 F1.0"),), "only partial results are combined"),
    DamagedProgram("half of the slices are summed", 4, "tensor(4)",
           ((0, "all_reduce(y0.0)@0-3", "all_reduce(y0.0)@0,1"), (1, "all_reduce(y0.0)@0-3", "all_reduce(y0.0)@0,1"),
            (2, "all_reduce(y0.0)@0-3", "all_reduce(y0.0)@2,3"), (3, "all_reduce(y0.0)@0-3", "all_reduce(y0.0)@2,3")), "sums 2 of 4 partial"),
    DamagedProgram("a gradient is copied where it should be summed", 6, "data(2)",
           ((ALL_RANKS, "all_reduce(grad1)@0,1", "broadcast(grad1)@0,1"),), "but not gathered or broadcast"),
]  # fmt: skip

RELEASES = [
    DamagedProgram("a value is released before it is used", 4, "solo", ((0, "F0.0", "F0.0 free(x1.0)"),), "x1.0 is not"),
    DamagedProgram("a value is released before it is sent", 4, "pipeline(2)", ((0, "x1.0>1", "free(x1.0) x1.0>1"),)),
    DamagedProgram("a received value is released before it is used", 4, "pipeline(2)",
           ((1, "x1.0<0", "x1.0<0 free(x1.0)"),), "rank 1, F1.0: x1.0 is not live here"),
    DamagedProgram("a received gradient is released before it is used", 4, "pipeline(2)",
           ((0, "g0.0<1", "g0.0<1 free(g0.0)"),), "rank 0, B0.0: g0.0 is not live here"),
    DamagedProgram("a value is released twice", 4, "solo", ((0, "F1.0", "F1.0 free(x1.0) free(x1.0)"),)),
    DamagedProgram("a value is released after it was used up", 4, "solo", ((0, "B1.0", "B1.0 free(x1.0)"),)),
    DamagedProgram("a value is released after it was sent", 4, "pipeline(2)", ((0, "x1.0>1", "x1.0>1 free(x1.0)"),)),
    DamagedProgram("a value is released that was never there", 4, "data(2)", ((0, "commit", "free(x5.9) commit"),)),
    DamagedProgram("a partial result is released", 4, "tensor(2)", ((ALL_RANKS, "all_reduce(y0.0)@0,1", "free(y0.0)"),)),
    DamagedProgram("a gradient is released that was never there", 7, "data(2)", ((0, "commit", "free(grad7) commit"),),
           "there is no gradient to free"),
    DamagedProgram("a gradient is released twice", 7, "zero2(2)",
           ((ALL_RANKS, "free(grad1)", "free(grad1) free(grad1)"),), "there is no gradient to free"),
    DamagedProgram("a gradient is released after it was sent", 7, "server(2)", ((0, "grad1>2", "grad1>2 free(grad1)"),)),
    DamagedProgram("weights are released that were never gathered", 7, "zero(2)", ((ALL_RANKS, "commit", "free(weight1) commit"),),
           "no gathered weight is there"),
    DamagedProgram("shared gradients are kept whole", 7, "zero2(2)",
           ((ALL_RANKS, "free(grad1)", ""), (ALL_RANKS, "free(grad0)", "")),
           "the whole gradient of unit 1 is held; the plan declares a fraction of 1/2"),
    DamagedProgram("the last shared gradient is kept whole", 7, "zero2(2)", ((ALL_RANKS, "free(grad0) commit", "commit"),),
           "[commit@0,1]"),
    DamagedProgram("shared gradients are released late", 7, "zero3(2)",
           ((0, "free(grad1)", ""), (0, "B0.0", "B0.0 free(grad1)")), "[B0.0]"),
    DamagedProgram("gradients are shared once where that should be done after each backward", 7, "zero2(2)",
           ((ALL_RANKS, "reduce_scatter(grad0)@0,1 free(grad0)", ""),
            (ALL_RANKS, "reduce_scatter(grad0)@0,1", "reduce_scatter(grad0)@0,1 reduce_scatter(grad0)@0,1")), "", (("m", 2), ("blocks", 1))),
    DamagedProgram("a gradient is summed whole where the optimizer is shared", 7, "zero(2)",
           ((ALL_RANKS, "reduce_scatter(grad0)@0,1", "all_reduce(grad0)@0,1"), (ALL_RANKS, "all_gather(weight0)@0,1", "")),
           "updates 1 of unit 0 and keeps optimizer state for it; the plan declares at most 1/2"),
]  # fmt: skip


@pytest.mark.parametrize("damage", [*COMMITS, *WORK, *SUMS, *RELEASES], ids=lambda damage: damage.name)
def test_damage_is_caught_by_the_rule_that_names_it(damage):
    with pytest.raises(ProgramError) as caught:
        verify_damaged(damage)
    assert caught.value.rule == damage.rule
    assert damage.message in str(caught.value)


def test_a_unit_without_a_gradient_is_not_updated():
    with pytest.raises(ProgramError, match="unit 0\\+1 is updated only partly: nothing") as caught:
        verify_text("F0.0 F1.0 B1.0 B0.0 commit@0 U0 U1", units=[(0,), (1,), (0, 1)])
    assert caught.value.rule == 6


def test_an_update_without_any_mark_is_refused():
    with pytest.raises(ProgramError, match="verifier rule 4 violated: forward of block 1") as caught:
        verify_text("F0.0 B0.0 commit@0 U0 U1", units=[(0,), (1,)])
    assert caught.value.rule == 4


def test_a_value_may_be_freed_between_its_forward_and_its_backward():
    symbolic = verify_text("F0.0 F1.0 free(x1.0) B1.0 B0.0 commit@0 U0 U1")
    assert [entry.unit for entry in symbolic.updates] == [(0,), (1,)]


STEPS = """\
F0.0 B0.0 all_reduce(grad0)@0,1 commit@0,1 U0 | F0.+2 B0.+2 all_reduce(grad0)@0,1 commit@0,1 U0 |
F0.1 B0.1 all_reduce(grad0)@0,1 commit@0,1 U0 | F0.+3 B0.+3 all_reduce(grad0)@0,1 commit@0,1 U0 |"""


def test_the_replicas_of_an_async_pipeline_commit_together():
    verify_text(STEPS)
    first, second = STEPS.splitlines()
    apart = "\n".join([first.replace("commit@0,1", "commit@0"), second.replace("commit@0,1", "commit@1")])
    with pytest.raises(ProgramError, match="commit@0 commits microbatch 0") as caught:
        verify_text(apart)
    assert caught.value.rule == 6


def broken_rule(case, change):
    """The rule that is broken by a composition whose words ``change(word)`` replaces; None where nothing changes."""
    model, plan, samples = case
    compiled = compile_plan(plan, model, samples_per_micro=samples)
    rank_programs = tuple(
        map_parts(rank_program, lambda instructions: [new for old in instructions for new in change(old)])
        for rank_program in compiled.program.rank_programs
    )
    if rank_programs == compiled.program.rank_programs:
        return None
    bounds, counted = bounds_from(compiled.cost), count_bytes(Program(rank_programs), compiled.model, samples)
    with pytest.raises(ProgramError) as caught:
        verify(Program(rank_programs), bounds, compiled.model.units, counted)
    return caught.value.rule


@given_few_or_many(10, 80, legal_cases(), st.integers(1, 11))
def test_no_commit_of_any_composition_can_fall_in_two(case, at):
    compiled = compile_plan(case[1], case[0])
    rank_programs = compiled.program.rank_programs
    bodies = [rank_program.body for rank_program in rank_programs]
    assume(all(any(not isinstance(one, Commit) for one in body) for body in bodies))  # no server without a unit

    def split(rank, instruction):
        if isinstance(instruction, Commit):
            return Commit(tuple(member for member in instruction.group if (member < at) == (rank < at)))
        return instruction

    apart = tuple(
        replace(rank_program, body=tuple(split(rank, instruction) for instruction in rank_program.body))
        for rank, rank_program in enumerate(rank_programs)
    )
    assume(apart != rank_programs)
    with pytest.raises(ProgramError) as caught:
        verify(Program(apart), bounds_from(compiled.cost), compiled.model.units)
    assert caught.value.rule == 6


@given_few_or_many(10, 80, legal_cases(), st.data())
def test_no_microbatch_of_any_composition_can_be_omitted(case, data):
    left_out = data.draw(st.integers(0, case[1].global_num_microbatches - 1))

    def change(instruction):
        micro = getattr(getattr(instruction, "value", instruction), "micro", None)
        return () if micro == left_out else (instruction,)

    assert broken_rule(case, change) == 4


@given_few_or_many(10, 80, legal_cases(), st.data())
def test_no_block_of_any_composition_can_be_omitted(case, data):
    compiled = compile_plan(case[1], case[0])
    block = data.draw(st.integers(0, compiled.model.num_blocks - 1))
    assert (
        broken_rule(case, lambda instruction: () if getattr(instruction, "block", None) == block else (instruction,))
        == 4
    )
