"""Balanced partitions, against all other partitions."""

from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given, strategies as st

from counterpoint.errors import PlanError
from counterpoint.strategies.pipeline.partition import (
    IMBALANCE_TOLERANCE,
    balance_chunks,
    balance_stages,
    max_stage_cost,
)


def slowest(boundaries, costs, replicas):
    stops = [sum(boundaries[:stage]) for stage in range(len(boundaries) + 1)]
    return max(sum(costs[a:b]) / count for (a, b), count in zip(pairwise(stops), replicas, strict=True))


def sent(boundaries, left):
    return sum(left[sum(boundaries[: stage + 1]) - 1] for stage in range(len(boundaries) - 1))


def all_partitions(num_blocks, num_stages):
    for inner in combinations(range(1, num_blocks), num_stages - 1):
        yield tuple(after - before for before, after in pairwise((0, *inner, num_blocks)))


@given(st.data())
def test_no_other_partition_has_a_faster_slowest_stage(data):
    costs = data.draw(st.lists(st.integers(0, 20).map(float), min_size=1, max_size=7))
    stages = data.draw(st.integers(1, len(costs)))
    replicas = data.draw(st.tuples(*[st.integers(1, 3)] * stages))
    boundaries = balance_stages(costs, replicas)
    assert sum(boundaries) == len(costs)
    assert min(boundaries) >= 1
    best = min(slowest(other, costs, replicas) for other in all_partitions(len(costs), stages))
    assert slowest(boundaries, costs, replicas) == pytest.approx(best, abs=1e-12)


@given(st.data())
def test_no_other_partition_that_is_nearly_as_fast_sends_less(data):
    costs = data.draw(st.lists(st.integers(1, 20).map(float), min_size=1, max_size=7))
    stages = data.draw(st.integers(1, len(costs)))
    left = data.draw(st.tuples(*[st.integers(0, 9)] * len(costs)))
    replicas = (1,) * stages
    boundaries = balance_stages(costs, replicas, left)
    every = list(all_partitions(len(costs), stages))
    limit = IMBALANCE_TOLERANCE * min(slowest(other, costs, replicas) for other in every)
    near = [other for other in every if slowest(other, costs, replicas) <= limit * (1 + 1e-12)]
    assert boundaries in near
    assert sent(boundaries, left) == min(sent(other, left) for other in near)


def test_a_split_point_is_after_the_pool_if_that_makes_no_stage_slower():
    assert balance_stages([2, 2, 1, 3], (1, 1), boundary_bytes=[8, 8, 2, 0]) == (2, 2)
    assert balance_stages([2, 2, 1, 5], (1, 1), boundary_bytes=[8, 8, 2, 0]) == (3, 1)
    assert balance_stages([40, 40, 1, 78], (1, 1), boundary_bytes=[8, 8, 2, 0]) == (3, 1)


@pytest.mark.parametrize(
    ("costs", "replicas", "boundaries"),
    [
        ([1, 1, 1, 1], (1, 1), (2, 2)),
        ([1, 1, 1], (1, 1), (1, 2)),
        ([1, 1, 1, 1, 1, 1], (2, 1), (4, 2)),
        ([4, 1, 1, 1, 1], (1, 1), (1, 4)),
        ([1], (1,), (1,)),
    ],
)
def test_cuts_read_as_expected(costs, replicas, boundaries):
    assert balance_stages(costs, replicas) == boundaries


def test_every_stage_needs_a_block():
    with pytest.raises(PlanError, match="the pipeline has 3 stages, but the model has only 2 blocks; every stage"):
        balance_stages([1.0, 1.0], (1, 1, 1))


V, LOOP = (0, 1, 1, 0), (0, 1, 0, 1)


def ends_moved(boundaries, others):
    moves = [abs(one - other) for one, other in zip(accumulate(boundaries), accumulate(others), strict=True)]
    return sum(moves) if max(moves) <= 1 else 9


@given(st.lists(st.integers(1, 20).map(float), min_size=4, max_size=9), st.sampled_from([V, LOOP]))
def test_chunks_are_dealt_so_that_no_move_of_an_end_helps_the_busiest_stage(costs, stages):
    def work(boundaries):
        return max_stage_cost(costs, boundaries, (1,) * len(stages), stages)

    boundaries = balance_chunks(costs, stages)
    near = [other for other in all_partitions(len(costs), 4) if ends_moved(other, boundaries) <= 2]
    assert sum(boundaries) == len(costs)
    assert work(boundaries) <= min(work(balance_stages(costs, (1,) * 4)), *map(work, near))


def test_a_stage_with_a_heavy_end_has_less_of_the_rest():
    costs = [1.0, *[10.0] * 12, 12.0]  # an embedding, twelve halves of layers, an output layer
    for stages in (V, LOOP):
        assert max_stage_cost(costs, balance_chunks(costs, stages), (1,) * 4, stages) <= 71.0
