"""Random numbers are keyed by seed, step, sample, module call and number of the draw, and nothing else."""

from itertools import product
from zlib import crc32

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from counterpoint.partitioning.seed_hooks import SeedHooks
from counterpoint.runtime.kernels.function_mode import InterceptFunctions
from counterpoint.runtime.kernels.philox import philox_words
from counterpoint.runtime.rng.draw_sites import DrawSite, DrawSites
from counterpoint.runtime.rng.sample_rng import SampleRange, SampleRNG, hash_seed

words = st.integers(-(2**63), 2**63 - 1)
CPU = torch.device("cpu")


def make_rng(seed=3, batch_dim=0, paths=("a", "b")):
    return SampleRNG(seed, sites=DrawSites({DrawSite(path, index): batch_dim for path in paths for index in range(2)}))


def draw(rng, step=0, samples=SampleRange(0, 4, 4), path="a", shape=(4, 5)):  # noqa: B008 - a constant
    rng.begin_microbatch(step, 0, samples)
    rng(path)
    return rng.words(shape, CPU)


def test_the_same_key_draws_the_same_whatever_was_drawn_before():
    one, other = make_rng(), make_rng()
    torch.rand(5)
    draw(one, path="b")
    assert torch.equal(draw(one), draw(other))


def test_numbers_are_those_that_the_documentation_defines():
    key = hash_seed(3, 7) ^ hash_seed(crc32(b"a"), 0)
    assert torch.equal(draw(make_rng(), 7, SampleRange(2, 4, 8)), philox_words(key, 2, 4, 5, CPU))


def test_every_part_of_the_key_matters():
    keys = list(product([0, 1], [0, 1], [0, 4], ["a", "b"]))
    drawn = {
        tuple(draw(make_rng(seed), step, SampleRange(first, 4, 8), path).flatten().tolist())
        for seed, step, first, path in keys
    }
    assert len(drawn) == len(keys)


def test_the_second_draw_of_a_call_is_another():
    rng = make_rng()
    assert not torch.equal(draw(rng), rng.words((4, 5), CPU))


@pytest.mark.parametrize(("shape", "dim"), [((1, 5), 0), ((5, 1), 1), ((3, 5), 0), ((2, 3, 2), 1)])
def test_a_sample_draws_the_same_in_any_microbatch(shape, dim):
    def shape_of(count):
        return (*shape[:dim], shape[dim] * count, *shape[dim + 1 :])

    rng = make_rng(batch_dim=dim)
    whole = draw(rng, samples=SampleRange(0, 6, 6), shape=shape_of(6))
    parts = [
        draw(rng, samples=SampleRange(first, count, 6), shape=shape_of(count)) for first, count in ((0, 1), (1, 5))
    ]
    assert torch.equal(torch.cat(parts, dim), whole)


def test_what_is_drawn_once_for_a_batch_is_the_same_in_every_microbatch():
    rng = make_rng(batch_dim=None)
    first, second = (draw(rng, samples=SampleRange(at, 2, 4), shape=(7,)) for at in (0, 2))
    assert torch.equal(first, second)


def test_a_draw_of_unknown_order_differs_between_microbatches_with_one_warning():
    rng = make_rng()
    with pytest.warns(
        UserWarning, match=r"^module 'c' draws random numbers of the shape \(2, 3\) for 2 of the batch's 4"
    ):
        first = draw(rng, samples=SampleRange(0, 2, 4), path="c", shape=(2, 3))
    assert not torch.equal(draw(rng, samples=SampleRange(2, 2, 4), path="c", shape=(2, 3)), first)


def test_a_draw_of_unknown_order_is_no_matter_in_a_batch_of_one_microbatch():
    assert draw(make_rng(), path="c").shape == (4, 5)


@given(st.lists(words, min_size=2, max_size=4), st.lists(words, min_size=2, max_size=4))
def test_other_parts_or_another_order_give_another_hash(mine, theirs):
    assert (hash_seed(*mine) == hash_seed(*theirs)) == (mine == theirs)
    assert 0 <= hash_seed(*mine) < 2**63


class DrawsTwice(nn.Module):
    """It draws twice in one call, the second time in a part that a checkpoint recomputes."""

    def __init__(self, *, recomputes):
        super().__init__()
        self.recomputes = recomputes
        self.inner = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.5))

    def part(self, x):
        return self.inner(x * torch.rand_like(x))

    def forward(self, x):
        x = x * torch.rand_like(x)
        return checkpoint(self.part, x, use_reentrant=False) if self.recomputes else self.part(x)


def gradients(recomputes):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, inputs = DrawsTwice(recomputes=recomputes).double(), torch.randn(6, 4, dtype=torch.float64)
        rng = make_rng(paths=("", "inner.0", "inner.2"))
        hooks = SeedHooks(model, rng)
        with InterceptFunctions(rng.functions):
            losses = []
            for first in (0, 3):
                rng.begin_microbatch(0, 0, SampleRange(first, 3, 6))
                losses.append(model(inputs[first : first + 3]).square().sum())
            for first, loss in zip((0, 3), losses, strict=True):
                rng.begin_microbatch(0, 0, SampleRange(first, 3, 6))
                engine = torch.autograd.Variable._execution_engine
                engine.run_backward(
                    (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
                )
        hooks.remove()
    return [param.grad for param in model.parameters()]


def test_a_checkpoint_recomputes_with_the_numbers_of_its_forward():
    for plain, recomputed in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(plain, recomputed)
