"""Every algorithm in memory: the correct sum, every contribution once, the same bits everywhere."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from counterpoint.fabric.collectives import ALGORITHMS, interpret
from counterpoint.fabric.collectives.algorithms import (
    binomial_tree,
    butterfly,
    double_tree,
    fixed_tree,
    halving_doubling,
    hierarchical,
    pipelined_ring,
    ring,
    shard_owners,
    torus,
)

NAMES = st.sampled_from(sorted(ALGORITHMS))
RANKS = st.integers(2, 17)
LENGTHS = st.one_of(st.integers(0, 40), st.integers(41, 3000))
FLAT = (binomial_tree, butterfly, halving_doubling, ring, torus, double_tree)


class Term:
    """A sum as it was added up; ``a + b`` and ``b + a`` are the same, as they are in floating point."""

    def __init__(self, text):
        self.text = text

    def __add__(self, other):
        return Term("({}+{})".format(*sorted((self.text, other.text))))


def check_sums(schedule):
    """Prove it for every chunk: all ranks have one and the same sum, in which every rank's part is exactly once."""
    members = range(schedule.num_ranks)
    parts = [np.array([Term(str(rank)) for _ in range(schedule.num_chunks)], dtype=object) for rank in members]
    for chunk in zip(*interpret(schedule, parts), strict=True):
        assert len({term.text for term in chunk}) == 1
        assert sorted(map(int, re.findall(r"\d+", chunk[0].text))) == list(members)


@pytest.mark.parametrize("num_ranks", range(1, 18))
@pytest.mark.parametrize("name", ALGORITHMS)
def test_all_ranks_add_every_part_once_and_in_the_same_way(name, num_ranks):
    check_sums(ALGORITHMS[name].schedule(num_ranks))


@given(st.integers(1, 40), st.integers(1, 5))
def test_so_do_pipelines_of_any_depth(num_ranks, num_pieces):
    check_sums(double_tree(num_ranks, num_pieces))
    check_sums(pipelined_ring(min(num_ranks, 9), num_pieces))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=17), st.sampled_from(FLAT))
def test_so_do_hosts_of_any_sizes_in_any_order(hosts, inter):
    check_sums(hierarchical(hosts, inter))


@given(NAMES, RANKS, LENGTHS, st.integers(0, 2**32 - 1))
@settings(max_examples=200)
def test_every_algorithm_agrees_with_a_float64_sum(name, num_ranks, length, seed):
    schedule = ALGORITHMS[name].schedule(num_ranks)
    draw = np.random.default_rng(seed)
    arrays = [(draw.standard_normal(length) * 10.0 ** draw.integers(-6, 6, length)).astype(np.float32)
              for _ in range(schedule.num_ranks)]  # fmt: skip
    results = interpret(schedule, arrays)
    assert {result.tobytes() for result in results} == {results[0].tobytes()}
    exact = np.sum(np.array(arrays, dtype=np.float64), axis=0)
    bound = np.sum(np.abs(np.array(arrays, dtype=np.float64)), axis=0) * schedule.num_ranks * 2.0**-24
    assert np.all(np.abs(results[0] - exact) <= bound)


def test_what_is_given_stays_as_it_is():
    tensors = [torch.full((5,), float(rank)) for rank in range(3)]
    assert [result.tolist() for result in interpret(ring(3), tensors)] == [[3.0] * 5] * 3
    assert [tensor.tolist() for tensor in tensors] == [[0.0] * 5, [1.0] * 5, [2.0] * 5]


@given(st.sampled_from([1, 2, 4, 8, 16]), st.integers(0, 50), st.integers(0, 2**32 - 1))
def test_butterfly_halving_doubling_and_both_trees_have_the_same_bits_on_a_power_of_two(num_ranks, length, seed):
    arrays = list(np.random.default_rng(seed).standard_normal((num_ranks, length), dtype=np.float32))
    builds = (butterfly, halving_doubling, binomial_tree, fixed_tree)
    assert len({interpret(build(num_ranks), arrays)[0].tobytes() for build in builds}) == 1


@given(st.sampled_from([1, 2, 4, 8]), st.integers(0, 2**32 - 1))
def test_ranks_that_add_their_own_shards_over_the_tree_first_have_the_bits_of_the_tree(num_ranks, seed):
    shards = list(np.random.default_rng(seed).standard_normal((8, 5), dtype=np.float32))
    held = [[shards[shard] for shard, rank in enumerate(shard_owners(8, num_ranks)) if rank == here]
            for here in range(num_ranks)]  # fmt: skip
    partial = [interpret(fixed_tree(len(own)), own)[0] for own in held]
    whole = interpret(fixed_tree(8), shards)[0]
    assert interpret(binomial_tree(num_ranks), partial)[0].tobytes() == whole.tobytes()
