"""Proposals: one thing is another, all ranks are taken, and the batch divides."""

from itertools import islice, pairwise
from random import Random

import pytest

from counterpoint.planner.search.configuration import Configuration
from counterpoint.planner.search.moves import MOVES, SAVING, Space, propose
from counterpoint.strategies.data import Data
from counterpoint.strategies.tensor import Tensor
from tests.planner.search.spaces import MODELS, changes


def walked(space, seed, count):
    return list(islice(changes(space, seed), count))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_ranks", [4, 12])
def test_every_proposal_takes_all_ranks_and_divides_the_batch(name, num_ranks):
    space = Space.of(MODELS[name], num_ranks, 48)
    for plan in walked(space, 1, 150):
        assert plan.num_ranks == num_ranks
        assert 48 % plan.num_micros == 0


def test_every_proposal_differs_from_what_it_was_made_of():
    plans = walked(Space.of(MODELS["transformer"], 8, 32), 2, 150)
    assert all(one != other for one, other in pairwise(plans))


def test_every_part_of_a_configuration_is_changed_now_and_then():
    space = Space(MODELS["transformer"], 8, 48, dims=("heads", "hidden"), codes=("", "fp16"))
    plans = [str(plan) for plan in walked(space, 3, 600)]
    wanted = ("tensor(", "dims=heads", "balance=", "replicas=", "order=gpipe", "virtual=2", "level=3", "compress=fp16")
    assert not [part for part in wanted if not any(part in plan for plan in plans)]


def test_without_need_of_memory_nothing_more_is_recomputed():
    space, draw = Space.of(MODELS["layers"], 4, 16), Random(0)
    now = Configuration(copies=Data(4), recomputed=frozenset({1, 2}))
    for _ in range(100):
        proposed = propose(now, space, draw, saves_memory=False)
        assert proposed.recomputed <= now.recomputed
        now = proposed
    assert not now.recomputed
    assert not MOVES.keys() & SAVING.keys()


def test_dims_that_are_sliced_together_are_written_as_by_default():
    space = Space.of(MODELS["transformer"], 2, 4)
    assert Tensor(1).dims in space.rules
    assert len(space.rules) == 3
