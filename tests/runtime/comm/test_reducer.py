"""Gradient reductions that overlap with backward: what is started when, and that results do not change."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from counterpoint.data.sampler import split_batch
from counterpoint.errors import DataError
from counterpoint.plan.plan import Plan
from counterpoint.runtime.microbatches import SlicedBatch
from counterpoint.testing.parity import relative_difference
from counterpoint.training.ranks.step_trace import trace_step
from tests.runtime.local_ranks import WIDTH, build_local_ranks, chain, make_batch

EACH = "bucket=0, tune=off"
SIZES = [EACH, "bucket=400B, first_bucket=300B, tune=off", "tune=off"]
PLANS = [("data(2, ...)", 2), ("data(3, ...)", 1), ("data(2, update=sharded, ...)", 1),
         ("pipeline(2) * data(2, ...)", 3), ("zero(2, level=2)", 1)]  # fmt: skip
REENTRANT = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")


@pytest.fixture(scope="module")
def solo():
    """Return the parameters of single-process training."""
    return train("solo", [make_batch(1, 12)] * 3)[0]


def reducers(rank):
    return [reducer for group in rank.interpreter.communication.overlap.reducers.values() for reducer in group]


def train(plan, batches, *, model=None, num_microbatches=1, **options):
    """Return the parameters after a step on each batch, and the reducers of each rank."""
    options.setdefault("passes", ("overlap",))
    model = chain(4) if model is None else model
    with build_local_ranks(
        plan, num_microbatches=num_microbatches, model=model, share_params_on_host=False, **options
    ) as local_ranks:
        for number, batch in enumerate(batches):
            local_ranks.step(number, batch)
        local_ranks.export_weights()
        return [param.detach().clone() for param in model.parameters()], {
            at: reducers(local_ranks.ranks[at]) for at in local_ranks.ranks
        }


def max_difference(params, others):
    return max(relative_difference(param, other) for param, other in zip(params, others, strict=True))


@pytest.mark.long(
    quick=["pipeline(2) * data(2, ...)-3-bucket=400B...", "zero(2, level=2)-1-bucket=400B, first_bucket=300B, tune=off"]
)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("plan", "num_microbatches"), PLANS)
def test_buckets_of_any_size_change_no_result(plan, num_microbatches, sizes, solo):
    text = plan.replace("...", sizes)
    num_micros = Plan.parse(text, num_microbatches=num_microbatches).global_num_microbatches
    params, reducers_of = train(text, [make_batch(num_micros, 12)] * 3, num_microbatches=num_microbatches)
    assert max_difference(params, solo) <= 1e-12
    assert all(
        len(reducer.bucket_plan.assignment) > 0 for rank_reducers in reducers_of.values() for reducer in rank_reducers
    )


def test_from_the_second_step_on_buckets_start_during_backward():
    with build_local_ranks(f"data(2, {EACH})", share_params_on_host=False, passes=("overlap",)) as local_ranks:
        local_ranks.step(0, make_batch(2))
        _, trace = trace_step(local_ranks, 1, make_batch(2))
    for rank in (0, 1):
        own_events = [event for event in trace.events if event.rank == rank]
        (backward,) = [event for event in own_events if event.text.startswith("B")]
        reductions = [event for event in own_events if event.lane == "link"]
        assert len(reductions) == 8
        assert all(backward.start_s < event.start_s < backward.stop_s for event in reductions)
        assert all(event.start_s <= event.stop_s for event in reductions)


def test_without_the_pass_nothing_overlaps():
    _, params = train("data(2)", [make_batch(2)] * 2, passes=())
    assert params == {0: [], 1: []}


class TwoBranches(nn.Module):
    """Two branches, computed in an order that the samples decide."""

    def __init__(self):
        super().__init__()
        self.wide, self.deep = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        if float(x.detach().sum()) > 0:
            wide, deep = self.wide(x), self.deep(x)
        else:
            deep, wide = self.deep(x), self.wide(x)
        return wide[:, :WIDTH] + deep


def signed_batch(*signs):
    draw = torch.Generator().manual_seed(5)
    inputs = torch.cat([sign * torch.rand(2, WIDTH, generator=draw) for sign in signs]).double()
    targets = torch.rand(len(inputs), WIDTH, generator=draw).double()
    return SlicedBatch((inputs, targets), tuple(split_batch(len(inputs), len(signs))))


def two_branch_model():
    torch.manual_seed(3)
    return nn.Sequential(TwoBranches(), chain(1)).double()


def test_ranks_whose_gradients_are_ready_in_different_orders_start_buckets_in_the_same_order():
    batches = [signed_batch(1, -1), signed_batch(1, -1), signed_batch(-1, 1)]
    params, reducers_of = train(f"data(2, {EACH})", batches, model=two_branch_model())
    (first,), (second,) = reducers_of[0], reducers_of[1]
    assert first.bucket_plan.assignment == second.bucket_plan.assignment
    orders = [sorted(range(6), key=reducer.progress.ready_s.__getitem__) for reducer in (first, second)]
    assert orders[0] != orders[1]
    assert max_difference(params, train("solo", batches, model=two_branch_model(), num_microbatches=2)[0]) <= 1e-12


class DataDependentBranch(nn.Module):
    """Uses its branch only if the samples have a positive sum."""

    def __init__(self):
        super().__init__()
        self.branch = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.branch(x) if float(x.detach().sum()) > 0 else x


def branching_model():
    torch.manual_seed(3)
    return nn.Sequential(DataDependentBranch(), chain(2)).double()


@pytest.mark.long(quick=["first1"])
@pytest.mark.parametrize("first", [(1, 1), (-1, 1), (-1, -1)])
def test_parameters_that_some_ranks_do_not_use_in_some_steps_are_still_reduced(first):
    def make_batches():
        return [signed_batch(*first), signed_batch(1, -1), signed_batch(-1, -1), signed_batch(1, 1)]

    options = {"unused_parameters": "zero", "cross_sample": "accept"}
    params, _ = train(f"data(2, {EACH})", make_batches(), model=branching_model(), **options)
    expected, _ = train("solo", make_batches(), model=branching_model(), num_microbatches=2, **options)
    assert max_difference(params, expected) <= 1e-12


class Tied(nn.Module):
    """One weight, used twice."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.inner(torch.tanh(self.inner(x)))


def test_a_weight_that_is_used_twice_is_reduced_once_both_gradients_are_ready():
    def model():
        torch.manual_seed(3)
        return nn.Sequential(Tied(), chain(2)).double()

    params, _ = train(f"data(2, {EACH})", [make_batch(2)] * 3, model=model())
    assert max_difference(params, train("solo", [make_batch(1, 4)] * 3, model=model())[0]) <= 1e-12


@pytest.mark.parametrize("counts", [(1, 12), (12, 1), (3, 5, 12)])
def test_microbatches_without_samples_do_not_change_results(counts):
    def make_batches(num_micros):
        return [make_batch(num_micros, count) for count in counts]

    params, _ = train(f"data(2, {EACH})", make_batches(4), num_microbatches=2)
    assert max_difference(params, train("solo", make_batches(1))[0]) <= 1e-12


class SparseTable(nn.Module):
    """A table with sparse gradients below a layer."""

    def __init__(self):
        super().__init__()
        self.table, self.top = nn.Embedding(9, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.top(self.table((x.abs() * 3).long().clamp(max=8)).sum(1))


def test_rows_of_sparse_gradients_are_gathered_in_addition_to_buckets():
    def model():
        torch.manual_seed(3)
        return SparseTable().double()

    def sgd(params):
        return torch.optim.SGD(params, lr=0.1)

    result, reducers_of = train(f"data(2, {EACH})", [make_batch(2)] * 3, model=model(), optimizer=sgd)
    assert [grad_slot.slot.name for grad_slot in reducers_of[0][0].grad_slots] == ["top.weight", "top.bias"]
    assert max_difference(result, train("solo", [make_batch(1, 4)] * 3, model=model(), optimizer=sgd)[0]) <= 1e-12


class Checkpointed(nn.Module):
    """Recomputes a layer in its backward, in one part or in two, depending on the samples."""

    def __init__(self):
        super().__init__()
        self.first, self.inner = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        parts = self.first(x).chunk(2) if float(x.detach().sum()) > 0 else (self.first(x),)
        return torch.cat([checkpoint(self.inner, part, use_reentrant=True) for part in parts])


@REENTRANT
def test_another_gradient_after_its_reduction_has_started_is_an_error():
    def model():
        return nn.Sequential(Checkpointed(), chain(1)).double()

    with pytest.raises(DataError, match="got gradient 2 of one backward after its reduction had started"):
        train(f"data(2, {EACH})", [signed_batch(-1, -1), signed_batch(-1, -1), signed_batch(1, 1)], model=model())


@REENTRANT
def test_a_parameter_that_always_gets_two_gradients_is_reduced_after_both():
    def model():
        torch.manual_seed(3)
        return nn.Sequential(Checkpointed(), chain(1)).double()

    params, reducers_of = train(f"data(2, {EACH})", [signed_batch(1, 1)] * 3, model=model())
    assert max(reducers_of[0][0].expected_grad_counts) == 2
    assert (
        max_difference(params, train("solo", [signed_batch(1, 1)] * 3, model=model(), num_microbatches=2)[0]) <= 1e-12
    )


def test_no_hook_is_left_on_the_model():
    model = chain(4)
    train("data(2)", [make_batch(2)] * 2, model=model)
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
