"""Random numbers are keyed by seed, step, microbatch and module, and nothing else."""

from itertools import product

import torch
from hypothesis import given, strategies as st

from counterpoint.runtime.rng import ModuleRNG, hash_seed, make_seeder

words = st.integers(-(2**63), 2**63 - 1)


def draw(rng, step, micro, path):
    rng.step, rng.micro = step, micro
    rng(path)
    return float(torch.rand(()))


def test_the_same_name_draws_the_same_whatever_was_drawn_before():
    one, other = ModuleRNG(3), ModuleRNG(3)
    torch.rand(5)
    assert draw(one, 4, 2, "blocks.0.dropout") == draw(other, 4, 2, "blocks.0.dropout")


def test_every_part_of_the_key_matters():
    names = list(product([0, 1], [0, 1], [0, 1], ["a", "b"]))
    assert len({draw(ModuleRNG(seed), step, micro, path) for seed, step, micro, path in names}) == len(names)


@given(st.lists(words, min_size=2, max_size=4), st.lists(words, min_size=2, max_size=4))
def test_other_parts_or_another_order_give_another_hash(mine, theirs):
    assert (hash_seed(*mine) == hash_seed(*theirs)) == (mine == theirs)
    assert 0 <= hash_seed(*mine) < 2**63


def test_a_model_that_draws_nothing_leaves_the_generator_alone():
    before = torch.get_rng_state()
    make_seeder(ModuleRNG(0), uses_rng=False)("blocks.0")
    assert torch.equal(torch.get_rng_state(), before)
