"""Sums of gradients that begin while the backward goes on: what is started when, and that results stay the same."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from counterpoint.data.sampler import split_batch
from counterpoint.errors import DataError
from counterpoint.plan.plan import Plan
from counterpoint.runtime.microbatches import SlicedBatch
from counterpoint.testing.parity import relative_difference
from counterpoint.training.local_ranks import trace_step
from tests.runtime.local_ranks import WIDTH, build_team, chain, make_batch

EACH = "bucket=0, tune=off"
SIZES = [EACH, "bucket=400B, first_bucket=300B, tune=off", "tune=off"]
PLANS = [("data(2, ...)", 2), ("data(3, ...)", 1), ("data(2, update=sharded, ...)", 1),
         ("pipeline(2) * data(2, ...)", 3), ("zero(2, level=2)", 1)]  # fmt: skip
REENTRANT = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")


@pytest.fixture(scope="module")
def solo():
    """What solo comes to."""
    return trained("solo", [make_batch(1, 12)] * 3)[0]


def sites(rank):
    return [site for group in rank.interpreter.exchange.early.sites.values() for site in group]


def trained(plan, feeds, *, model=None, num_microbatches=1, **options):
    """Return the parameters after a step on each feed, and for each rank its sites."""
    options.setdefault("passes", ("overlap",))
    model = chain(4) if model is None else model
    with build_team(plan, num_microbatches=num_microbatches, model=model, share_params_on_host=False, **options) as one:
        for number, batch in enumerate(feeds):
            one.step(number, batch)
        one.export_weights()
        return [param.detach().clone() for param in model.parameters()], {at: sites(one.ranks[at]) for at in one.ranks}


def apart(mine, theirs):
    return max(relative_difference(one, other) for one, other in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("plan", "num_microbatches"), PLANS)
def test_buckets_of_any_size_change_no_result(plan, num_microbatches, sizes, solo):
    text = plan.replace("...", sizes)
    num_micros = Plan.parse(text, num_microbatches=num_microbatches).global_num_microbatches
    found, seen = trained(text, [make_batch(num_micros, 12)] * 3, num_microbatches=num_microbatches)
    assert apart(found, solo) <= 1e-12
    assert all(len(site.bucket_plan.assignment) > 0 for each in seen.values() for site in each)


def test_from_the_second_step_on_buckets_begin_before_the_backward_is_over():
    with build_team(f"data(2, {EACH})", share_params_on_host=False, passes=("overlap",)) as one:
        one.step(0, make_batch(2))
        _, trace = trace_step(one, 1, make_batch(2))
    for rank in (0, 1):
        mine = [event for event in trace.events if event.rank == rank]
        (backward,) = [event for event in mine if event.text.startswith("B")]
        sums = [event for event in mine if event.lane == "link"]
        assert len(sums) == 8
        assert all(backward.start_s < event.start_s < backward.stop_s for event in sums)
        assert all(event.start_s <= event.stop_s for event in sums)


def test_without_the_pass_nothing_begins_early():
    _, found = trained("data(2)", [make_batch(2)] * 2, passes=())
    assert found == {0: [], 1: []}


class Twins(nn.Module):
    """Two branches, computed in an order that the samples decide."""

    def __init__(self):
        super().__init__()
        self.wide, self.build_deep_model = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        if float(x.detach().sum()) > 0:
            wide, deep = self.wide(x), self.build_deep_model(x)
        else:
            deep, wide = self.build_deep_model(x), self.wide(x)
        return wide[:, :WIDTH] + deep


def signed(*signs):
    draw = torch.Generator().manual_seed(5)
    inputs = torch.cat([sign * torch.rand(2, WIDTH, generator=draw) for sign in signs]).double()
    targets = torch.rand(len(inputs), WIDTH, generator=draw).double()
    return SlicedBatch((inputs, targets), tuple(split_batch(len(inputs), len(signs))))


def twins():
    torch.manual_seed(3)
    return nn.Sequential(Twins(), chain(1)).double()


def test_ranks_whose_gradients_come_in_different_orders_start_buckets_in_the_same_order():
    feeds = [signed(1, -1), signed(1, -1), signed(-1, 1)]
    found, seen = trained(f"data(2, {EACH})", feeds, model=twins())
    (first,), (second,) = seen[0], seen[1]
    assert first.bucket_plan.assignment == second.bucket_plan.assignment
    orders = [sorted(range(6), key=site.progress.ready_s.__getitem__) for site in (first, second)]
    assert orders[0] != orders[1]
    assert apart(found, trained("solo", feeds, model=twins(), num_microbatches=2)[0]) <= 1e-12


class Moody(nn.Module):
    """Takes its branch only where the samples sum up to something positive."""

    def __init__(self):
        super().__init__()
        self.branch = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.branch(x) if float(x.detach().sum()) > 0 else x


def moody():
    torch.manual_seed(3)
    return nn.Sequential(Moody(), chain(2)).double()


@pytest.mark.parametrize("first", [(1, 1), (-1, 1), (-1, -1)])
def test_parameters_that_some_steps_of_some_ranks_do_not_use_are_summed_all_the_same(first):
    def fed():
        return [signed(*first), signed(1, -1), signed(-1, -1), signed(1, 1)]

    found, _ = trained(f"data(2, {EACH})", fed(), model=moody(), unused_parameters="zero")
    assert apart(found, trained("solo", fed(), model=moody(), unused_parameters="zero", num_microbatches=2)[0]) <= 1e-12


class Tied(nn.Module):
    """One weight, used twice."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.inner(torch.tanh(self.inner(x)))


def test_a_weight_that_is_used_twice_is_summed_once_when_both_uses_are_known():
    def model():
        torch.manual_seed(3)
        return nn.Sequential(Tied(), chain(2)).double()

    found, _ = trained(f"data(2, {EACH})", [make_batch(2)] * 3, model=model())
    assert apart(found, trained("solo", [make_batch(1, 4)] * 3, model=model())[0]) <= 1e-12


@pytest.mark.parametrize("counts", [(1, 12), (12, 1), (3, 5, 12)])
def test_microbatches_without_samples_leave_their_rank_behind_but_not_wrong(counts):
    def fed(num_micros):
        return [make_batch(num_micros, count) for count in counts]

    found, _ = trained(f"data(2, {EACH})", fed(4), num_microbatches=2)
    assert apart(found, trained("solo", fed(1))[0]) <= 1e-12


class Rows(nn.Module):
    """A table with sparse gradients below a layer."""

    def __init__(self):
        super().__init__()
        self.table, self.top = nn.Embedding(9, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.top(self.table((x.abs() * 3).long().clamp(max=8)).sum(1))


def test_rows_of_sparse_gradients_are_brought_together_beside_buckets():
    def model():
        torch.manual_seed(3)
        return Rows().double()

    def sgd(params):
        return torch.optim.SGD(params, lr=0.1)

    found, seen = trained(f"data(2, {EACH})", [make_batch(2)] * 3, model=model(), optimizer=sgd)
    assert [place.slot.name for place in seen[0][0].grad_slots] == ["top.weight", "top.bias"]
    assert apart(found, trained("solo", [make_batch(1, 4)] * 3, model=model(), optimizer=sgd)[0]) <= 1e-12


class Again(nn.Module):
    """Computes a layer again in its backward, in one part or in two, as the samples decide."""

    def __init__(self):
        super().__init__()
        self.first, self.inner = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        parts = self.first(x).chunk(2) if float(x.detach().sum()) > 0 else (self.first(x),)
        return torch.cat([checkpoint(self.inner, part, use_reentrant=True) for part in parts])


@REENTRANT
def test_a_gradient_that_comes_again_after_its_sum_has_begun_is_an_error():
    def model():
        return nn.Sequential(Again(), chain(1)).double()

    with pytest.raises(DataError, match="got gradient number 2 of one backward after its sum had begun"):
        trained(f"data(2, {EACH})", [signed(-1, -1), signed(-1, -1), signed(1, 1)], model=model())


@REENTRANT
def test_a_gradient_that_always_comes_twice_is_waited_for():
    def model():
        torch.manual_seed(3)
        return nn.Sequential(Again(), chain(1)).double()

    found, seen = trained(f"data(2, {EACH})", [signed(1, 1)] * 3, model=model())
    assert max(seen[0][0].expected_hits) == 2
    assert apart(found, trained("solo", [signed(1, 1)] * 3, model=model(), num_microbatches=2)[0]) <= 1e-12


def test_no_hook_is_left_on_the_model():
    model = chain(4)
    trained("data(2)", [make_batch(2)] * 2, model=model)
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
