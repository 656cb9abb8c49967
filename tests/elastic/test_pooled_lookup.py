"""Bags travel as their sums, in both directions, and train as rows do."""

import numpy as np
import pytest
import torch
from torch import nn

from counterpoint.elastic import parameter_keys as layout, remote_embedding as lookups
from counterpoint.elastic.ps_worker import WorkerConfig
from counterpoint.elastic.row_ids import find_unique_rows, make_pooled_lookup, unique_sorted
from counterpoint.elastic.sync_policy import SyncPolicy
from counterpoint.fabric.shm.native import NativeLibrary, native
from counterpoint.ps.consistency import Asp, Bsp, Ssp
from counterpoint.ps.messages import PullRequest, PushRequest
from counterpoint.ps.shard import PsShard
from counterpoint.ps.update_rules import UniformInit
from tests.elastic.worker_fixtures import (
    InterleavedWorkers,
    build_seeded,
    embedding_bag_model,
    make_lookup_data,
    make_slices,
    max_relative_difference,
)

START = UniformInit(-0.5, 0.5)
TABLE = {"0.weight": START}


def trained(consistency, build=embedding_bag_model, *, config=None, minibatches=1):
    sync_policy = SyncPolicy(push_every=minibatches)
    workers = InterleavedWorkers(
        make_slices(make_lookup_data(40), consistency, batch_size=8, minibatches_per_slice=minibatches), num_servers=1
    )
    workers.join("a", build(), tables=TABLE, config=config, sync_policy=sync_policy)
    workers.run_rounds()
    return workers


@pytest.fixture
def asked(monkeypatch):
    """Every pull and push of a table that a shard executes, as whether it is one of sums."""
    result = []
    for method in ("apply", "read"):
        execute = getattr(PsShard, method)

        def noted(self, request, execute=execute):
            is_lookup = isinstance(request, PullRequest | PushRequest) and request.key != layout.LAYOUT_KEY
            if is_lookup and request.rows is not None:
                result.append((type(request), request.pooling is not None))
            return execute(self, request)

        monkeypatch.setattr(PsShard, method, noted)
    return result


def test_where_bags_are_fewer_than_rows_only_sums_travel(asked):
    trained(Asp())
    assert set(asked) == {(PullRequest, True), (PushRequest, True)}


def test_a_push_of_sums_has_a_value_for_each_bag_and_rows_that_were_looked_up(asked):
    workers = trained(Asp())
    pushes = [
        entry
        for entry in workers.job.journals[0].values()
        if isinstance(entry, PushRequest) and entry.pooling is not None
    ]
    assert {len(push.values) for push in pushes} == {8}
    assert all(push.rows is not None and len(push.rows) > 8 for push in pushes)


@pytest.mark.long(quick=["Ssp(staleness=1)-2", "Bsp(slices_per_step=1)-1"])
@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("consistency", [Asp(), Ssp(1), Bsp(1)], ids=str)
def test_sums_train_as_rows_do(consistency, minibatches, monkeypatch):
    result = [trained(consistency, minibatches=minibatches).model()]
    monkeypatch.setattr(lookups, "make_pooled_lookup", lambda *_: None)
    result.append(trained(consistency, minibatches=minibatches).model())
    assert max_relative_difference(*result) < 1e-12


@pytest.mark.parametrize("consistency", [Asp(), Ssp(1), Bsp(1)], ids=str)
def test_sums_that_are_fetched_ahead_are_those_that_would_have_been_fetched(consistency):
    models = [trained(consistency, config=WorkerConfig(prefetch=prefetch)).model() for prefetch in (True, False)]
    assert max_relative_difference(*models) == 0


class Pair(nn.Module):
    """Two modules with one table, of which one adds up and one takes the mean."""

    def __init__(self):
        super().__init__()
        self.first = nn.EmbeddingBag(12, 4, mode="sum")
        self.second = nn.EmbeddingBag(12, 4, mode="mean")
        self.second.weight = self.first.weight
        self.last = nn.Linear(4, 2)

    def forward(self, rows):
        return self.last(self.first(rows) - self.second(rows) + self.second(rows.flip(0)))


def test_modules_that_share_a_table_push_one_gradient(monkeypatch):
    result = []
    for is_summed in (True, False):
        if not is_summed:
            monkeypatch.setattr(lookups, "make_pooled_lookup", lambda *_: None)
        workers = InterleavedWorkers(make_slices(make_lookup_data(40), Asp(), batch_size=8), epochs=1, num_servers=1)
        workers.join("a", build_seeded(Pair), tables={"first.weight": START})
        workers.run_rounds()
        result.append(workers.model())
    assert max_relative_difference(*result) < 1e-12


@pytest.mark.parametrize("options", [{"mode": "max"}, {"scale_grad_by_freq": True}], ids=str)
def test_what_is_no_sum_of_rows_is_looked_up_as_rows(options, asked):
    trained(Asp(), lambda: build_seeded(lambda: nn.Sequential(nn.EmbeddingBag(12, 4, **options), nn.Linear(4, 2))))
    assert set(asked) == {(PullRequest, False), (PushRequest, False)}


def test_few_rows_of_many_bags_are_looked_up_as_rows(asked):
    class Same(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.last = nn.EmbeddingBag(12, 4, mode="sum"), nn.Linear(4, 2)

        def forward(self, rows):
            return self.last(self.table(rows % 2))

    workers = InterleavedWorkers(make_slices(make_lookup_data(40), Asp(), batch_size=8), epochs=1, num_servers=1)
    workers.join("a", build_seeded(Same), tables={"table.weight": START})
    workers.run_rounds()
    assert set(asked) == {(PullRequest, False), (PushRequest, False)}


def test_a_model_that_is_measured_looks_up_rows():
    workers = trained(Asp())
    served = workers.remote_modules["a"]
    with served.latest_weights() as model:
        result = model(make_lookup_data(4).tensors[0])
    expected = served.export_weights(tables=True)(make_lookup_data(4).tensors[0])
    assert float((result - expected).detach().abs().max()) < 1e-12


def test_the_table_of_bags_is_what_torch_would_make_of_it():
    torch.manual_seed(0)
    indices = torch.randint(0, 12, (5, 3))
    bag = nn.EmbeddingBag(12, 4, mode="sum").double()
    wanted = find_unique_rows("table", indices, 12, None)
    made = make_pooled_lookup(wanted, bag, 1)
    assert made
    sums = made.pull_pooling.pool(bag.weight.detach()[wanted.rows])
    assert torch.equal(sums, bag(indices).detach())
    (expected,) = torch.autograd.grad(bag(indices), bag.weight, sums)
    assert torch.allclose(made.push_pooling.pool(sums), expected[wanted.rows])


@pytest.mark.parametrize("low", [0, -3, (1 << 63) - 40], ids=["rows", "below 0", "too large"])
@pytest.mark.parametrize("count", [0, 1, 2, 3000])
def test_numbers_are_put_in_order_the_same_with_the_native_part_and_without(low, count, monkeypatch):
    numbers = low + np.random.default_rng(count).integers(0, 40, count)
    result = []
    for library in (native(), NativeLibrary(None, "left out")):
        monkeypatch.setattr("counterpoint.elastic.row_ids.native", lambda library=library: library)
        order, rows, places = unique_sorted(numbers)
        result.append([one.tolist() for one in (order.permutation, order.group_starts, rows, places)])
    assert result[0] == result[1]
    assert result[0][2] == sorted(set(numbers.tolist()))


def test_numbers_of_several_digits_are_put_in_order():
    numbers = np.random.default_rng(1).integers(0, 1 << 40, 5000)
    order, rows, places = unique_sorted(np.concatenate([numbers, numbers]))
    assert np.array_equal(rows, np.unique(numbers))
    assert np.array_equal(rows[places], np.concatenate([numbers, numbers]))
    assert np.array_equal(order.permutation[order.group_starts][places[:5000]], np.arange(5000))
