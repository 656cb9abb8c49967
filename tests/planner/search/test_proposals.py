"""Proposals: one thing changes, all ranks are used, and the batch is divisible."""

from itertools import islice, pairwise
from random import Random

import pytest

from counterpoint.planner.search.configuration import SearchConfiguration
from counterpoint.planner.search.proposals import MEMORY_PROPOSALS, PROPOSALS, SearchSpace, propose
from counterpoint.strategies.data import Data
from counterpoint.strategies.tensor import Tensor
from tests.planner.search.spaces import MODELS, random_plans


def walked(space, seed, count):
    return list(islice(random_plans(space, seed), count))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_ranks", [4, 12])
def test_every_proposal_uses_all_ranks_and_divides_the_batch(name, num_ranks):
    space = SearchSpace.for_model(MODELS[name], num_ranks, 48)
    for plan in walked(space, 1, 150):
        assert plan.num_ranks == num_ranks
        assert 48 % plan.global_num_microbatches == 0


def test_every_proposal_differs_from_what_it_was_made_of():
    plans = walked(SearchSpace.for_model(MODELS["transformer"], 8, 32), 2, 150)
    assert all(one != other for one, other in pairwise(plans))


def test_every_part_of_a_configuration_is_changed_now_and_then():
    space = SearchSpace(MODELS["transformer"], 8, 48, dims=("heads", "hidden"), codecs=("", "fp16"))
    plans = [str(plan) for plan in walked(space, 1, 600)]
    wanted = (
        "tensor(",
        "dims=heads",
        "balance=",
        "replicas=",
        "schedule=gpipe",
        "chunks_per_stage=2",
        "level=3)",
        "level=3, reshard_after_forward=off",
        "compress=fp16",
    )
    assert not [part for part in wanted if not any(part in plan for plan in plans)]


def test_if_memory_suffices_nothing_more_is_recomputed():
    space, draw = SearchSpace.for_model(MODELS["layers"], 4, 16), Random(0)
    now = SearchConfiguration(data=Data(4), recomputed=frozenset({1, 2}))
    for _ in range(100):
        proposed = propose(now, space, draw, saves_memory=False)
        assert proposed.recomputed <= now.recomputed
        now = proposed
    assert not now.recomputed
    assert not PROPOSALS.keys() & MEMORY_PROPOSALS.keys()


def test_dims_that_are_split_together_have_the_default_order():
    space = SearchSpace.for_model(MODELS["transformer"], 2, 4)
    assert Tensor(1).dims in space.dim_choices
    assert len(space.dim_choices) == 3
