"""The calls of MXNet's tutorials on torch tensors, with the figures that the tutorials print.

Source: mxnet.apache.org, tutorials/packages/kvstore/kvstore.html, api/kvstore, faq/gradient_compression,
faq/distributed_training; the docstrings of python/mxnet/kvstore/kvstore.py; tests/nightly/dist_sync_kvstore.py.
"""

from functools import partial

import pytest
import torch

from counterpoint.compat import kvstore as kv_module
from tests.compat.kvstore.store_helpers import pull, stores

SHAPE = (2, 3)
DEVICES = range(4)


def ones(number=1.0):
    return torch.ones(SHAPE) * number


@pytest.fixture
def kv():
    """Return the tutorial's store."""
    store = kv_module.create("local")
    store.init(3, ones(2))
    return store


def update(key, given, stored):
    """The tutorial's updater."""
    stored += given * 2


def test_what_was_initialized_is_pulled(kv):
    a = torch.zeros(SHAPE)
    kv.pull(3, out=a)
    assert torch.equal(a, ones(2))


def test_what_is_pushed_replaces_the_value(kv):
    kv.push(3, ones(8))
    assert torch.equal(pull(kv, 3, *SHAPE), ones(8))


@pytest.mark.parametrize("kind", ["local", "device", "dist_sync", "dist_device_sync"])
def test_the_values_of_four_devices_are_added_up(kind):
    (store,) = stores(kind, 1) if "dist" in kind else (kv_module.create(kind),)
    store.init(3, ones(2))
    store.push(3, [ones() for _ in DEVICES])
    assert torch.equal(pull(store, 3, *SHAPE), ones(4))


def test_an_updater_says_how_values_are_merged(kv):
    kv.push(3, [ones() for _ in DEVICES])
    kv._set_updater(update)
    assert torch.equal(pull(kv, 3, *SHAPE), ones(4))
    kv.push(3, ones())
    assert torch.equal(pull(kv, 3, *SHAPE), ones(6))


def test_several_devices_pull_at_once(kv):
    b = [ones() for _ in DEVICES]
    kv.pull(3, out=b)
    assert all(torch.equal(each, ones(2)) for each in b)


def test_a_list_of_keys_is_pushed_and_pulled_in_one_call(kv):
    names: dict[int, int] = {}
    kv.set_updater(lambda key, given, stored: update(names.setdefault(key, key), given, stored))
    keys = [5, 7, 9]
    kv.init(keys, [ones()] * len(keys))
    kv.push(keys, [ones()] * len(keys))
    b = [torch.zeros(SHAPE)] * len(keys)
    kv.pull(keys, out=b)
    assert torch.equal(b[1], ones(3))
    several = [[ones() for _ in DEVICES]] * len(keys)
    kv.push(keys, several)
    kv.pull(keys, out=several)
    assert torch.equal(several[1][1], ones(11))
    assert list(names) == keys


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_an_optimizer_updates_the_weight(kind):
    (store,) = stores(kind, 1) if "dist" in kind else (kv_module.create(kind),)
    weight = torch.zeros(2, 2)
    store.init(3, weight)
    store.set_optimizer(partial(torch.optim.SGD, lr=0.01))
    store.push(3, torch.ones(2, 2))
    store.pull(3, out=weight)
    assert torch.equal(weight, torch.full((2, 2), -0.01))


def test_broadcast_and_pushpull_are_two_calls_in_one():
    store = kv_module.create("local")
    a, b = torch.zeros(SHAPE), [ones() for _ in DEVICES]
    store.broadcast("3", ones(2), out=a)
    assert torch.equal(a, ones(2))
    store.pushpull("3", ones(8), out=a)
    assert torch.equal(a, ones(8))
    store.pushpull("3", b)
    assert torch.equal(b[2], ones(4))


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
@pytest.mark.parametrize(("row_ids", "expected"), [([0, 2], [1, 0, 1]), ([2, 2], [0, 0, 1]), ([1, 0], [1, 1, 0])])
def test_rows_are_pulled_by_number(kind, row_ids, expected):
    (store,) = stores(kind, 1, 2) if "dist" in kind else (kv_module.create(kind),)
    store.init("3", torch.ones(3, 3).to_sparse(1))
    a = torch.zeros(3, 3).to_sparse(1)
    store.row_sparse_pull("3", out=a, row_ids=torch.tensor(row_ids))
    assert a.to_dense().tolist() == [[float(number)] * 3 for number in expected]


def test_a_row_sparse_value_is_pushed():
    store = kv_module.create()
    b = torch.zeros(SHAPE).to_sparse(1)
    store.init("10", b)
    store.push("10", ones().to_sparse(1))
    store.row_sparse_pull("10", row_ids=torch.tensor([0, 1]), out=b)
    assert torch.equal(b.to_dense(), ones())


def test_gradients_of_two_bits_keep_what_they_do_not_send():
    """MXNet's nightly test: 0.4 is too small, 0.1 more is not, 0.2 is, 0.3 more is not; the server adds up, twice."""
    kvs = stores("dist_sync", 2)
    seen = []
    for store in kvs:
        store.set_optimizer(partial(torch.optim.SGD, lr=2.0))
        store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        store.init("1000", torch.zeros(SHAPE))
    for number in (0.0, 0.4, 0.5 - 0.4, 0.2, 0.5 - 0.2):
        for store in kvs:
            store.push("1000", -ones(number))
        seen.append([pull(store, "1000", *SHAPE).unique().tolist() for store in kvs])
    assert seen == [[[number]] * 2 for number in (0.0, 0.0, 2.0, 2.0, 4.0)]


def test_what_workers_of_dist_sync_push_is_added_up_seven_times():
    """MXNet's nightly test: worker r pushes r + 1, and the server adds it up at a rate of 2."""
    kvs = stores("dist_sync", 3, 2)
    for store in kvs:
        store.set_optimizer(partial(torch.optim.SGD, lr=2.0))
        store.init(["3", "5"], [ones(), ones()])
    for turn in range(1, 8):
        for store in kvs:
            store.push(["3", "5"], [-ones(store.rank + 1)] * 2)
        expected = (store.num_workers + 1) * store.num_workers * 2 / 2 * turn + 1
        assert all(torch.equal(pull(store, "5", *SHAPE), ones(expected)) for store in kvs)


def test_the_rank_and_the_number_of_workers_divide_the_data():
    kvs = stores("dist_async", 2)
    assert [(store.type, store.rank, store.num_workers) for store in kvs] == [
        ("dist_async", 0, 2),
        ("dist_async", 1, 2),
    ]
    alone = kv_module.create("local_allreduce_cpu")
    assert (alone.type, alone.rank, alone.num_workers) == ("local_allreduce_cpu", 0, 1)
