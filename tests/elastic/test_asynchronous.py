"""Asynchronous workers equal their references, in what they read and what they push."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import optim

from counterpoint.elastic.parameter_keys import LAYOUT_KEY as LAYOUT
from counterpoint.elastic.remote_embedding import EmbeddingConfig
from counterpoint.elastic.sync_policy import SyncPolicy
from counterpoint.errors import PlanError
from counterpoint.ps.consistency import Asp, Bsp, Ssp
from counterpoint.ps.shard import replay_journal
from tests.elastic.test_same_results import START
from tests.elastic.worker_fixtures import (
    SGD,
    InterleavedWorkers,
    embedding_bag_model,
    make_lookup_data,
    make_numeric_data,
    make_slices,
    max_relative_difference,
    mlp,
)
from tests.references.downpour import downpour

ADAGRAD = partial(optim.Adagrad, lr=0.1)


@pytest.mark.parametrize(
    ("n_push", "n_fetch", "alpha"), [(1, 1, 0.0), (3, 1, 0.0), (1, 3, 0.0), (2, 3, 0.2), (3, 2, 0.2)]
)
@pytest.mark.parametrize("behind", [0, 1, 3])
def test_downpour_equals_its_sequential_reference(n_push, n_fetch, alpha, behind):
    data = make_numeric_data(24)
    slices = make_slices(data, Asp(), batch_size=2, minibatches_per_slice=n_push)
    workers = InterleavedWorkers(slices, epochs=1)
    workers.join("a", mlp(), ADAGRAD, sync_policy=SyncPolicy(n_push, n_fetch, alpha, pull_ahead=behind))
    workers.run_rounds()
    pieces = [one for number in range(slices.num_slices) for one in slices.read(0, number)]
    expected = downpour(
        mlp(),
        [one.fields for one in pieces],
        n_push=n_push,
        n_fetch=n_fetch,
        alpha=alpha,
        behind=behind,
        loss=F.cross_entropy,
        optimizer=ADAGRAD,
    )
    assert max_relative_difference(workers.model(), expected) < 1e-12


@pytest.mark.long(quick=["sums-found out-2", "rows-told-1"])
@pytest.mark.parametrize("behind", [1, 2])
@pytest.mark.parametrize("indices", [None, torch.clone], ids=["found out", "told"])
@pytest.mark.parametrize("num_servers", [2, 1], ids=["rows", "sums"])
def test_rows_that_are_fetched_ahead_lack_the_pushes_before_as_weights_do(num_servers, indices, behind):
    slices = make_slices(make_lookup_data(24), Asp(), batch_size=2)
    workers = InterleavedWorkers(slices, epochs=1, task_slices=12, num_servers=num_servers)
    table, sync_policy = EmbeddingConfig(START, lookup_indices=indices), SyncPolicy(pull_ahead=behind)
    served = workers.join("a", embedding_bag_model(), tables={"0.weight": table}, sync_policy=sync_policy)
    first = embedding_bag_model()
    first.get_parameter("0.weight").data = served.tables["0.weight"].pull_all_rows()
    workers.run_rounds()
    pieces = [one.fields for number in range(slices.num_slices) for one in slices.read(0, number)]
    options = {"n_push": 1, "n_fetch": 1, "alpha": 0.0, "loss": F.cross_entropy, "optimizer": SGD}
    expected = downpour(first, pieces, behind=behind, **options)
    assert max_relative_difference(workers.model(), expected) < 1e-12


@pytest.mark.long(quick=["Ssp(staleness=0)"])
@pytest.mark.parametrize("consistency", [Asp(), Ssp(0), Ssp(2), Bsp(3)], ids=str)
def test_the_journal_says_what_became_of_the_weights(consistency):
    workers = InterleavedWorkers(
        make_slices(make_lookup_data(30), consistency, batch_size=6), task_slices=1 if consistency == Bsp(3) else 2
    )
    for name in "abc":
        workers.join(name, embedding_bag_model(), ADAGRAD, tables={"0.weight": START})
    workers.run_rounds()
    for index in range(2):
        entries = [entry for _, entry in sorted(workers.job.journals[index].items())]
        again = replay_journal(workers.job.job, index, entries)
        assert again.digest() == workers.shard(index).digest()


def test_every_slice_counts_once_while_workers_join_and_leave():
    workers = InterleavedWorkers(make_slices(make_numeric_data(40), Asp(), batch_size=4), task_slices=2)
    workers.join("a", mlp())
    workers.run_rounds(3)
    workers.join("b", mlp())
    workers.run_rounds(1)
    workers.gone.add("a")
    workers.run_rounds()
    shards = [workers.shard(index) for index in range(2)]
    counted = [
        key.tracker.applied_slices.bounds for shard in shards for name, key in shard.keys.items() if name != LAYOUT
    ]
    assert counted == [[0, 20], [0, 20]]


def test_a_worker_that_is_slow_holds_the_others_no_further_back_than_agreed():
    workers = InterleavedWorkers(make_slices(make_numeric_data(40), Ssp(1), batch_size=4))
    workers.join("a", mlp())
    workers.join("b", mlp())
    workers.run_rounds()
    assert sorted(workers.trained) == list(range(20))


@pytest.mark.parametrize("sync_policy", [{"pull_every": 2}, {"pull_ahead": 1}], ids=str)
def test_weights_of_before_are_for_asynchronous_jobs_only(sync_policy):
    workers = InterleavedWorkers(make_slices(make_numeric_data(), Ssp(1)))
    with pytest.raises(PlanError, match="uses stale weights"):
        workers.join("a", mlp(), sync_policy=SyncPolicy(**sync_policy))


def test_one_push_for_several_minibatches_is_the_sum_of_their_gradients():
    data = make_numeric_data(8)
    workers = InterleavedWorkers(make_slices(data, Asp(), batch_size=4, minibatches_per_slice=2), epochs=1)
    workers.join("a", mlp(), sync_policy=SyncPolicy(push_every=2))
    workers.run_rounds()
    expected = mlp()
    updates = SGD(expected.parameters())
    for one in workers.slices.read(0, 0):
        F.cross_entropy(expected(one.fields[0]), one.fields[1]).backward()
    updates.step()
    assert max_relative_difference(workers.model(), expected) < 1e-12
