"""Uneven data: gradients are averaged over all samples, equally weighted, however these are split."""

from collections import Counter
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn, optim

from counterpoint.data.microbatch_reader import SampleReader
from counterpoint.data.sampler import Sampler
from counterpoint.fabric.local import LocalWorld
from counterpoint.plan.plan import Plan
from counterpoint.runtime.microbatches import SlicedBatch
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.testing.parity import relative_difference
from counterpoint.training.batches.dataset_batches import DatasetBatch
from counterpoint.training.options import TrainingOptions
from counterpoint.training.ranks.local_ranks import LocalRanks
from tests.covering import given_few_or_many

PLANS = ["data({})", "zero({}, level=1)", "zero({}, level=2)", "zero({}, level=3)", "data({}, update=sharded)"]


class Samples:
    """Points and their values, and how often each was read."""

    def __init__(self, count):
        draw = torch.Generator().manual_seed(count)
        self.inputs, self.targets = (torch.randn(count, width, generator=draw).double() for width in (3, 2))
        self.read: Counter[int] = Counter()

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        self.read[int(index)] += 1
        return self.inputs[index], self.targets[index]


def model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Linear(3, 2).double()


def updated_by_hand(start, batches):
    """The parameters after a step on each batch by one process; a batch without samples is none."""
    alone = start
    optimizer = optim.SGD(alone.parameters(), lr=0.5)
    for inputs, targets in batches:
        if len(inputs):
            optimizer.zero_grad()
            F.mse_loss(alone(inputs), targets).backward()
            optimizer.step()
    return dict(alone.named_parameters())


def updated_by(plan, feeds):
    """The parameters after a step on each feed by the ranks of a plan."""
    mine = model()
    with LocalWorld(plan.num_ranks, 10.0) as world:
        optimizer_spec = OptimizerSpec(partial(optim.SGD, lr=0.5), dict(mine.named_parameters()))
        local_ranks = LocalRanks(world, plan, mine, F.mse_loss, optimizer_spec, TrainingOptions())
        local_ranks.build(torch.zeros(1, 3).double(), 1)
        for number, feed in enumerate(feeds):
            local_ranks.step(number, feed)
        local_ranks.export_weights()
    return dict(mine.named_parameters())


def same(result, expected):
    return all(relative_difference(result[name].detach(), expected[name].detach()) <= 1e-12 for name in expected)


@given_few_or_many(
    5,
    20,
    plan=st.sampled_from(PLANS),
    num_samples=st.integers(1, 23),
    num_ranks=st.integers(2, 4),
    micro_size=st.integers(1, 3),
    accumulation=st.integers(1, 3),
    drop_last=st.booleans(),
)
def test_an_epoch_of_any_length_trains_as_one_process_does_and_reads_no_sample_twice(
    plan, num_samples, num_ranks, micro_size, accumulation, drop_last
):
    data, size = Samples(num_samples), num_ranks * micro_size * accumulation
    sampler = Sampler(num_samples, size, drop_last=drop_last) if size <= num_samples else Sampler(num_samples, size)
    batches = [sampler.batch(0, index) for index in range(sampler.num_batches)]
    result = Plan.parse(plan.format(num_ranks), num_microbatches=accumulation)
    mine = updated_by(
        result, [DatasetBatch(SampleReader(data, 0), batch, result.global_num_microbatches) for batch in batches]
    )
    assert data.read == Counter(int(index) for batch in batches for index in batch)
    assert set(data.read.values()) == {1}
    alone = [(data.inputs[list(batch)], data.targets[list(batch)]) for batch in batches]
    assert same(mine, updated_by_hand(model(), alone))


@given_few_or_many(
    5,
    20,
    plan=st.sampled_from(PLANS),
    steps=st.integers(1, 2).flatmap(
        lambda accumulation: st.lists(
            st.lists(st.integers(0, 3), min_size=3 * accumulation, max_size=3 * accumulation), min_size=1, max_size=3
        )
    ),
)
def test_microbatches_of_any_sizes_none_among_them_train_as_their_union(plan, steps):
    """What ranks bring that have batches of their own; one that has run out brings none."""
    result = Plan.parse(plan.format(3), num_microbatches=len(steps[0]) // 3)
    feeds = []
    for number, sizes in enumerate(steps):
        data = Samples(sum(sizes) or number)
        edges = [sum(sizes[:at]) for at in range(len(sizes) + 1)]
        batch = (data.inputs[: edges[-1]], data.targets[: edges[-1]])
        feeds.append(SlicedBatch(batch, tuple(pairwise(edges))))
    assert same(updated_by(result, feeds), updated_by_hand(model(), [feed.batch for feed in feeds]))
