"""Asynchronous pipelines: what the published formulas say of them, and what they cannot do."""

from dataclasses import replace
from math import ceil, lcm

import pytest
from hypothesis import example, given, settings, strategies as st

from counterpoint.errors import PlanError
from counterpoint.plan.plan import Plan
from counterpoint.program.instruction import Backward, Commit, Forward, Recv, Send, Update
from counterpoint.program.program import shift_microbatch, weight_versions_needed
from counterpoint.strategies.pipeline.pipeline import Pipeline
from tests.covering import given_few_or_many
from tests.program.verify.random_plans import compile_text

UNEQUAL = st.lists(st.integers(1, 4), min_size=2, max_size=5).filter(lambda counts: sum(counts) <= 10).map(tuple)


@given_few_or_many(10, 40, UNEQUAL)
@example((1, 1, 1, 1))
@example((3, 2, 1))
@example((1, 3, 1))
def test_warm_ups_and_versions_are_the_published_formulas_and_as_many_enter_as_noam_says(replicas):
    """NOAM is what each replica of the first stage has in flight, its share of all workers."""
    plan = Pipeline(len(replicas), "pipedream", replicas)
    compiled = compile_text(str(plan), m=plan.usable_microbatches(1), blocks=len(replicas))
    unrolled = iter(compiled.program.unroll(1))
    for stage, count in enumerate(replicas):
        warmups = (sum(replicas) - 1 - sum(replicas[:stage])) // count
        for instructions in (next(unrolled) for _ in range(count)):
            kinds = [type(instruction) for instruction in instructions if isinstance(instruction, Forward | Backward)]
            assert kinds.index(Backward) == warmups + 1  # the last of them is the one that goes back
            assert weight_versions_needed(instructions) == warmups + 1
    assert compiled.symbolic.peak_in_flight[0] == ceil(sum(replicas) / replicas[0])


@given_few_or_many(5, 20, UNEQUAL, st.integers(0, 2))
def test_2bw_holds_two_versions_whatever_replicas_and_microbatches_there_are(replicas, more):
    plan = Pipeline(len(replicas), "pipedream_2bw", replicas)
    compiled = compile_text(str(plan), m=plan.usable_microbatches(1) + more * lcm(*replicas), blocks=len(replicas))
    assert {weight_versions_needed(rank_program.body) for rank_program in compiled.program.rank_programs} == {2}
    assert {entry.staleness for entry in compiled.symbolic.updates[-len(replicas) :]} == {1}


@settings(max_examples=20)
@given(UNEQUAL)
def test_vertical_sync_keeps_as_many_versions_as_the_first_stage_makes_in_its_warm_up(replicas):
    """In updates of its own: a stage with fewer replicas makes more of them."""
    plan = Pipeline(len(replicas), "pipedream", replicas, vertical_sync="on")
    compiled = compile_text(str(plan), m=plan.usable_microbatches(1), blocks=len(replicas))
    versions = iter(weight_versions_needed(rank_program.body) for rank_program in compiled.program.rank_programs)
    ahead = (sum(replicas) - 1) // replicas[0] * replicas[0]
    for count in replicas:
        most = max(next(versions) for _ in range(count))
        assert ahead // count + 1 <= most <= -(-(ahead + replicas[0] - 1) // count) + 1


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_2bw_holds_two_versions_and_is_one_update_late_on_every_stage(num_stages):
    compiled = compile_text(f"pipedream_2bw({num_stages})", m=num_stages, blocks=num_stages)
    assert {weight_versions_needed(rank_program.body) for rank_program in compiled.program.rank_programs} == {2}
    assert {entry.staleness for entry in compiled.symbolic.updates[-num_stages:]} == {1}


def test_vertical_sync_changes_the_numbers_of_the_versions_and_nothing_else():
    def plain(instruction):
        return replace(instruction, version=0) if isinstance(instruction, Forward | Backward) else instruction

    stashed, synced = (compile_text(f"pipedream(3{sync})", blocks=3).program for sync in ("", ", vertical_sync=on"))
    for mine, other in zip(stashed.rank_programs, synced.rank_programs, strict=True):
        assert list(map(plain, mine.body)) == list(map(plain, other.body))
    assert [weight_versions_needed(rank_program.body) for rank_program in synced.rank_programs] == [3, 3, 3]


@pytest.mark.parametrize("plan", ["pipedream(3)", "pipedream_2bw(2)", "pipedream(2, replicas=(2,1))"])
def test_the_prologue_is_bodies_without_the_microbatches_that_there_are_not(plan):
    """So a run takes bodies alone: batches before the first one, and after the last one, are empty."""
    compiled = compile_text(plan, m=2, blocks=3)
    variant = compiled.step_variants[-1]
    bodies = range(-variant.lookahead, variant.lookahead)
    kinds = Forward | Backward | Send | Recv
    for rank_program, as_bodies in zip(compiled.program.rank_programs, variant.program.rank_programs, strict=True):
        instructions = [
            shift_microbatch(instruction, body * variant.microbatches_per_batch)
            for body in bodies
            for instruction in as_bodies.body
            if isinstance(instruction, kinds)
        ]
        assert [
            without_version(instruction) for instruction in instructions if without_version(instruction)[-1] >= 0
        ] == [without_version(instruction) for instruction in rank_program.prologue if isinstance(instruction, kinds)]


def without_version(instruction):
    """An instruction without its version; its microbatch comes last."""
    if isinstance(instruction, Forward | Backward):
        return type(instruction), instruction.block, instruction.micro
    return type(instruction), instruction.tensor.name, instruction.peer, instruction.tensor.micro


def test_stages_decide_each_for_itself_and_a_replicated_one_less_often():
    rank_programs = compile_text("pipedream(2, replicas=(2,1))", m=2).program.rank_programs
    commits = [
        [instruction.group for instruction in rank_program.body if isinstance(instruction, Commit)]
        for rank_program in rank_programs
    ]
    assert commits == [[(0, 1)], [(0, 1)], [(2,), (2,)]]
    assert [
        sum(isinstance(instruction, Update) for instruction in rank_program.body) for rank_program in rank_programs
    ] == [1, 1, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "pipedream(2) * data(3)",
            r"the stages instead, pipeline\(2, schedule=pipedream, replicas=\(3,3\)\),",
        ),
        (
            "data(2) * pipedream(2)",
            r"update independently, but data.2. needs all of them to update together; .* schedule=pipedream, replicas=.2,2..",
        ),
        (
            "tensor(2) * pipedream(2, replicas=(2,1)) * data(2)",
            r"tensor.2. \* pipeline.2, .* replicas=.4,2..",
        ),
        (
            "pipedream(2) * zero(2)",
            r"the stages instead, pipeline\(2, schedule=pipedream, replicas=\(2,2\)\),",
        ),
        (
            "gpipe(2) * pipedream(2)",
            r"schedule=pipedream\) has 2 pipelines, and a plan can have one; give it all stages,",
        ),
        ("pipedream(2) * tensor(2)", r"inside a stage; write tensor\(2\) \* pipeline\(2, schedule=pipedream\)"),
        ("pipedream(2) * tensor(2) * data(2)", r"tensor.2. \* pipeline.2, schedule=pipedream, replicas=.2,2.."),
        ("pipedream_2bw(4)", "updates once in 2 microbatches, but its first stage is 3 ahead.*num_microbatches=3 or"),
        (
            "pipeline(2, vertical_sync=on)",
            "schedule=one_f_one_b has one policy for them; drop it, or give schedule=pipedream",
        ),
        ("pipedream(2, vertical_sync=yes)", "has no vertical_sync='yes'; give off or on"),
        ("pipedream(2, replicas=(3,1))", "2 microbatches are not divisible by the 3 replicas of a stage"),
    ],
)
def test_what_a_pipeline_without_a_flush_cannot_do_is_refused(text, message):
    with pytest.raises(PlanError, match=message):
        compile_text(text, m=2, blocks=4)


def test_weights_that_two_stages_share_are_refused():
    with pytest.raises(PlanError, match=r"blocks 0 and 2 share weights, but under .* they are in stages 0 and 1, wh"):
        compile_text("pipedream(2)", blocks=3, tied=True)


@pytest.mark.parametrize(("text", "micros"), [("pipedream(4)", 1), ("pipedream(2, replicas=(2,3))", 6)])
def test_a_batch_is_one_microbatch_for_each_round_of_the_replicas(text, micros):
    assert Plan.parse(text).with_microbatches_for(24).num_microbatches == micros
