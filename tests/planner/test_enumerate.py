"""All compositions that fit so many ranks, each once, the simplest first."""

import pytest

from counterpoint.compiler.compile import compile  # noqa: A004 - read as cp.compile
from counterpoint.errors import PlanError
from counterpoint.model.precision import Precision
from counterpoint.model.spec import linear_chain
from counterpoint.planner.enumerate import MAX_STRATEGIES, enumerate_plans
from tests.planner.models import named


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_plans_for_few_ranks_read_as_written(num_ranks, golden):
    plans = enumerate_plans(num_ranks, linear_chain(4))
    golden(f"plans_{num_ranks}.txt", "".join(f"{line}\n" for line in named(plans)))


def test_one_rank_has_nothing_to_choose():
    assert named(enumerate_plans(1, linear_chain(4))) == ["solo, 1"]


@pytest.mark.parametrize("num_ranks", range(1, 13))
def test_every_plan_fits_exactly_and_comes_once(num_ranks):
    plans = enumerate_plans(num_ranks, linear_chain(5))
    assert {plan.num_ranks for plan in plans} == {num_ranks}
    assert len(set(named(plans))) == len(plans)
    assert max(len(plan.strategies) for plan in plans) <= MAX_STRATEGIES


@pytest.mark.long(quick=["2"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_plan_compiles_for_a_model_with_tensor_parallelism(num_ranks):
    for plan in enumerate_plans(num_ranks, linear_chain(4, width=12)):
        assert compile(plan, linear_chain(4, width=12)).program.num_ranks == num_ranks


def test_a_plan_that_does_not_compile_says_why():
    refused = [plan for plan in enumerate_plans(4, linear_chain(4, width=6)) if "tensor(4)" in str(plan)]
    assert refused
    for plan in refused:
        with pytest.raises(PlanError, match="6 is not divisible by 4"):
            compile(plan, linear_chain(4, width=6))


@pytest.mark.parametrize("num_ranks", [5, 6])
def test_servers_accept_groups_of_replicas_stages_and_tensor_parallel_ranks(num_ranks):
    plans = "\n".join(map(str, enumerate_plans(num_ranks, linear_chain(4))))
    wanted = {5: ["data(2) * server(2", "pipeline(2) * server(2"], 6: ["consistency=bsp) * tensor(2)"]}
    assert all(text in plans for text in wanted[num_ranks])
    assert "consistency=asp) * tensor" not in plans, "slices would drift apart"


def test_weights_are_gathered_once_only_where_a_rank_runs_several_blocks_or_gathers_casts():
    def once(num_blocks, precision=None):
        plans = map(str, enumerate_plans(4, linear_chain(num_blocks, precision=precision)))
        return {plan for plan in plans if "reshard_after_forward=off" in plan}

    whole = {"zero(4, level=3, reshard_after_forward=off)", "zero(2, level=3, reshard_after_forward=off) * data(2)"}
    staged = "pipeline(2) * zero(2, level=3, reshard_after_forward=off)"
    assert not once(1)
    assert whole < once(2)
    assert staged not in once(2)
    assert staged in once(3) & once(2, Precision("bf16"))


def test_there_are_no_more_stages_than_blocks():
    assert not [plan for plan in map(str, enumerate_plans(4, linear_chain(1))) if "pipeline" in plan]


def test_with_a_batch_size_microbatches_divide_it():
    every, some = enumerate_plans(4, linear_chain(4)), enumerate_plans(4, linear_chain(4), batch_size=8)
    assert some == tuple(plan for plan in every if 8 % plan.global_num_microbatches == 0)
    assert len(some) < len(every)


def test_simpler_plans_come_first():
    counts = [len(plan.strategies) for plan in enumerate_plans(8, linear_chain(4))]
    assert counts == sorted(counts)
    assert named(enumerate_plans(8, linear_chain(4)))[0] == "data(8), 1"
