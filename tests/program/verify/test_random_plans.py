"""Properties of every composition: text, execution order, rules, bytes, and its refusal if it makes no sense."""

from dataclasses import replace
from itertools import chain as joined
from math import lcm

from hypothesis import strategies as st

from counterpoint.compiler.compile import compile as compile_plan, count_bytes
from counterpoint.errors import PlanError
from counterpoint.model.spec import linear_chain
from counterpoint.plan.plan import Plan
from counterpoint.program.execution_order import check_rendezvous_sends, execution_order
from counterpoint.program.instruction import Backward, Collective, Forward
from counterpoint.program.program import weight_versions_needed
from counterpoint.program.text import format_program, parse_program
from counterpoint.program.verify.verifier import Bounds, verify
from counterpoint.strategies.data import Data
from counterpoint.strategies.pipeline.pipeline import Pipeline
from tests.covering import given_few_or_many
from tests.program.verify.random_plans import (
    TESTED_SCHEDULES,
    any_strategy,
    async_pipelines,
    can_be_composed,
    compile_text,
    delayed_plans,
    legal_cases,
)


@given_few_or_many(12, 120, legal_cases())
def test_a_legal_composition_compiles_and_keeps_every_rule(case):
    model, plan, samples = case
    compiled = compile_plan(plan, model, samples_per_micro=samples)
    assert compiled.program.num_ranks == plan.num_ranks == len(compiled.cost.ranks)


@given_few_or_many(12, 120, legal_cases())
def test_a_program_reads_back_as_it_was_written(case):
    model, plan, _ = case
    program = compile_plan(plan, model).program
    assert parse_program(format_program(program)) == program


@given_few_or_many(12, 120, legal_cases())
def test_a_plan_reads_back_as_it_was_written(case):
    _, plan, _ = case
    assert Plan.parse(str(plan), num_microbatches=plan.num_microbatches).strategies == plan.strategies
    assert Plan.from_yaml(plan.to_yaml()) == plan


@given_few_or_many(12, 120, legal_cases())
def test_the_execution_order_has_every_instruction_once_and_keeps_the_order_of_each_rank(case):
    model, plan, _ = case
    unrolled = compile_plan(plan, model).program.unroll(1)
    visited = list(execution_order(unrolled))
    for rank, instructions in enumerate(unrolled):
        assert [index for at, index in visited if at == rank] == list(range(len(instructions)))
    check_rendezvous_sends(unrolled)


@given_few_or_many(12, 120, legal_cases())
def test_the_instructions_move_the_bytes_that_the_formulas_say_on_every_rank(case):
    model, plan, samples = case
    compiled = compile_plan(plan, model, samples_per_micro=samples)
    assert count_bytes(compiled.program, compiled.model, samples) == compiled.cost.sent_bytes()


@given_few_or_many(12, 120, legal_cases())
def test_all_work_of_the_global_batch_is_done_once_by_the_ranks_of_each_shard(case):
    model, plan, _ = case
    compiled = compile_plan(plan, model)
    slices = {rank_program.tp_rank for rank_program in compiled.program.rank_programs}
    instructions = list(compiled.program.instructions())
    forwards = [(rank, compute) for rank, compute in instructions if isinstance(compute, Forward)]
    backwards = [(rank, compute) for rank, compute in instructions if isinstance(compute, Backward)]
    inputs = [(rank, backward) for rank, backward in backwards if backward.computes_input_grad]
    weights = [(rank, backward) for rank, backward in backwards if backward.computes_weight_grad]
    tp_ranks = [rank_program.tp_rank for rank_program in compiled.program.rank_programs]
    for computed in (forwards, inputs, weights):
        done = [(compute.block, compute.micro, tp_ranks[rank]) for rank, compute in computed]
        every = [(b, m, s) for b in range(compiled.model.num_blocks) for m in compiled.program.micros for s in slices]
        assert sorted(done) == sorted(every)


@given_few_or_many(8, 60, st.sampled_from(TESTED_SCHEDULES), st.integers(1, 6), st.integers(1, 13))
def test_no_pipeline_waits_for_ever_however_many_stages_chunks_and_microbatches_it_has(kind, stages, count):
    schedule, chunks = kind
    plan = Plan((Pipeline(stages, schedule, chunks_per_stage=chunks),), count)
    unrolled = compile_plan(plan, linear_chain(stages * chunks, width=12)).program.unroll(1)
    check_rendezvous_sends(unrolled)
    assert len(list(execution_order(unrolled))) == len(list(joined(*unrolled)))


@given_few_or_many(
    8,
    40,
    st.sampled_from([name for name, chunks in TESTED_SCHEDULES if chunks == 1]),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
)
def test_no_pipeline_waits_for_ever_however_unequal_its_replicas_are(schedule, replicas):
    plan = Plan((Pipeline(len(replicas), schedule, tuple(replicas)),), 2 * lcm(*replicas))
    unrolled = compile_plan(plan, linear_chain(len(replicas), width=12)).program.unroll(1)
    check_rendezvous_sends(unrolled)
    assert len(list(execution_order(unrolled))) == len(list(joined(*unrolled)))


@given_few_or_many(12, 120, legal_cases())
def test_overlap_moves_instructions_but_neither_adds_work_nor_changes_what_enters_an_update(case):
    model, plan, _ = case
    plain = compile_plan(Plan(plan.strategies, plan.num_microbatches), model)
    early = compile_plan(Plan(plan.strategies, plan.num_microbatches, ("overlap",)), model)
    for before, after in zip(plain.program.rank_programs, early.program.rank_programs, strict=True):
        ends = [
            instruction
            for instruction in after.body
            if not (isinstance(instruction, Collective) and instruction.phase == "start")
        ]
        assert len(ends) == len(before.body)
    entered = [
        [(e.rank, e.unit, e.shard, e.contributions) for e in compiled.symbolic.updates] for compiled in (plain, early)
    ]
    assert sorted(entered[0], key=str) == sorted(entered[1], key=str)


@given_few_or_many(20, 200, st.lists(any_strategy(), min_size=1, max_size=4))
def test_strategies_in_an_order_without_meaning_are_a_mistake_in_the_plan(strategies):
    try:
        compile_plan(Plan(tuple(strategies), 2), linear_chain(4, width=12))
        refused = False
    except PlanError:
        refused = True
    assert refused == (not can_be_composed(strategies))


@given_few_or_many(8, 40, legal_cases(), st.integers(2, 3))
def test_a_synchronous_program_keeps_the_rules_step_after_step(case, times):
    model, plan, _ = case
    compiled = compile_plan(plan, model)
    unrolled = compiled.program.unroll(times)
    assert [len(instructions) for instructions in unrolled] == [
        times * len(rank_program.body) for rank_program in compiled.program.rank_programs
    ]
    assert len(list(execution_order(unrolled))) == len(list(joined(*unrolled)))


@given_few_or_many(8, 40, delayed_plans(), st.integers(1, 3))
def test_delayed_gradients_keep_every_rule_and_send_as_much_as_an_all_reduce_in_each_step(case, times):
    model, plan = case
    compiled = compile_plan(plan, model)
    inside = replace(plan, strategies=(*plan.strategies[:-1], Data(plan.strategies[-1].degree)))
    assert compiled.sent_bytes() == compile_plan(inside, model).sent_bytes()
    assert parse_program(format_program(compiled.program)) == compiled.program
    assert compiled.cost.staleness == max(entry.staleness for entry in compiled.symbolic.updates) == 1
    unrolled = compiled.program.unroll(times)
    assert len(list(execution_order(unrolled))) == len(list(joined(*unrolled)))


@given_few_or_many(8, 40, async_pipelines(), st.integers(1, 3))
def test_a_pipeline_without_a_flush_keeps_every_rule_and_its_formulas_are_what_the_program_does(case, times):
    model, plan = case
    compiled = compile_plan(plan, model)
    replicas, sliced = (
        plan.strategies[-1].stage_ranks,
        len(compiled.program.rank_programs) // sum(plan.strategies[-1].stage_ranks),
    )
    for rank, rank_program in enumerate(compiled.program.rank_programs):
        stage = [stage for stage, count in enumerate(replicas) for _ in range(count * sliced)][rank]
        ahead = (sum(replicas) - 1 - sum(replicas[:stage])) // replicas[stage]
        assert compiled.symbolic.peak_in_flight[rank] == compiled.cost.ranks[rank].in_flight == ahead + 1
        assert (
            weight_versions_needed(rank_program.prologue + rank_program.body + rank_program.epilogue)
            == compiled.cost.ranks[rank].weight_versions
        )
    assert compiled.cost.staleness == max(entry.staleness for entry in compiled.symbolic.updates)
    assert parse_program(format_program(compiled.program)) == compiled.program
    check_rendezvous_sends(compiled.program.unroll(times), compiled.cost.recv_buffer_depth)


@given_few_or_many(12, 120, legal_cases())
def test_every_kind_of_step_is_a_program_and_their_parts_of_all_steps_are_all(case):
    model, plan, _ = case
    compiled = compile_plan(plan, model)
    assert sum(variant.frequency for variant in compiled.step_variants) == 1
    assert compiled.step_variants[-1].program == compiled.program
    for variant in compiled.step_variants:
        assert count_bytes(variant.program, compiled.model, 1) == variant.sent_bytes


def test_empty_bounds_are_kept_by_every_program():
    compiled = compile_text("pipeline(2) * data(2)", m=2)
    symbolic = verify(compiled.program, Bounds(None), compiled.model.units)
    assert len(symbolic.updates) == 4
