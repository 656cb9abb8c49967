"""Stores whose values servers keep, in one thread."""

from functools import partial

import pytest
import torch
from torch.optim import SGD, Adagrad, Adam, SparseAdam

from counterpoint.compat import kvstore
from counterpoint.errors import DataError, PeerError, PlanError
from counterpoint.ps.update_rules import Sgd
from tests.compat.kvstore.store_helpers import pull, sparse_rows, stores


def test_the_value_of_rank_0_counts():
    kvs = stores("dist_sync", 2)
    for kv in reversed(kvs[:1]):
        kv.init(3, torch.full((2,), 5.0))
    kvs[1].init(3, torch.full((2,), 7.0))
    assert [pull(kv, 3, 2).tolist() for kv in kvs] == [[5, 5], [5, 5]]


def test_without_an_optimizer_the_sum_replaces_the_value():
    kvs = stores("dist_sync", 2)
    for kv in kvs:
        kv.init("w", torch.full((2,), 5.0))
    for kv in kvs:
        kv.push("w", torch.full((2,), kv.rank + 1.0))
    assert [pull(kv, "w", 2).tolist() for kv in kvs] == [[3, 3], [3, 3]]


def test_every_push_of_dist_async_is_an_update():
    kvs = stores("dist_async", 2)
    for kv in kvs:
        kv.set_optimizer(partial(SGD, lr=0.5))
        kv.init("w", torch.zeros(2))
    kvs[0].push("w", torch.ones(2))
    assert pull(kvs[1], "w", 2).tolist() == [-0.5, -0.5]
    kvs[1].push("w", torch.ones(2))
    assert pull(kvs[0], "w", 2).tolist() == [-1, -1]


def test_keys_go_over_to_a_new_optimizer_as_they_are():
    kvs = stores("dist_sync", 2, 2)
    for kv in kvs:
        kv.init(["w", "e"], [torch.zeros(2), sparse_rows([1], [3.0], 4)])
    for lr in (1.0, 0.5):
        for kv in kvs:
            kv.set_optimizer(partial(SGD, lr=lr))
        for kv in kvs:
            kv.push(["w", "e"], [torch.ones(2), sparse_rows([1, 3], [1.0, 2.0], 4)])
    assert pull(kvs[1], "w", 2).tolist() == [-3, -3]
    assert pull(kvs[1], "e", 4, 2)[:, 0].tolist() == [0, 0, 0, -6]


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        partial(Adagrad, lr=0.1, lr_decay=0.1),
        partial(Adam, lr=0.1, betas=(0.8, 0.9)),
        Adam([torch.nn.Parameter(torch.zeros(1))], lr=0.2),
        Sgd(0.1, momentum=0.5),
    ],
    ids=lambda optimizer: str(getattr(optimizer, "func", type(optimizer)).__name__),
)
@pytest.mark.parametrize("has_rows", [False, True])
def test_servers_and_a_local_store_come_to_the_same_bits(optimizer, has_rows):
    value, (kv,), alone = torch.randn(6, 2), stores("dist_sync", 1, 2), kvstore.create("local")
    outs = []
    for store in (kv, alone):
        store.set_optimizer(optimizer)
        store.init(1, value.to_sparse(1) if has_rows else value)
        torch.manual_seed(1)
        for turn in range(4):
            gradient = sparse_rows([turn, 5], torch.randn(2).tolist(), 6) if has_rows else torch.randn(6, 2)
            store.push(1, gradient)
        outs.append(pull(store, 1, 6, 2))
    assert torch.equal(*outs)
    assert not torch.equal(outs[0], value)


def test_arrays_that_are_large_are_divided_over_the_servers():
    (kv,) = stores("dist_sync", 1, 2)
    value = torch.arange(1_200_000, dtype=torch.float32).view(1200, 1000)
    kv.init("99", value)
    kv.push("99", value)
    out = torch.zeros(1200, 1000, requires_grad=True)
    kv.pull("99", out=out)
    assert torch.equal(out, value)


def test_pushes_may_follow_each_other_without_a_pull():
    kvs = stores("dist_sync", 2)
    for kv in kvs:
        kv.set_optimizer(partial(SGD, lr=1.0))
        kv.init(1, torch.zeros(1, dtype=torch.float64))
    for _ in range(3):
        for kv in kvs:
            kv.push(1, torch.ones(1, dtype=torch.float64))
    assert [pull(kv, 1, 1).item() for kv in kvs] == [-6, -6]


@pytest.mark.parametrize("name", ["dist_sync", "dist_async"])
def test_one_worker_is_a_barrier_s_everybody(name):
    (kv,) = stores(name, 1)
    kv.init(1, torch.zeros(1))
    kv.barrier()
    kv._barrier()
    assert pull(kv, 1, 1).item() == 0.0


def test_a_worker_that_waits_too_long_gets_an_error_that_says_so():
    kvs = stores("dist_sync", 2)
    for kv in kvs:
        kv.init(1, torch.zeros(1))
    kvs[0].push(1, torch.ones(1))
    with pytest.raises(PeerError, match="it needs push 1 of all 2 workers"):
        pull(kvs[0], 1, 1)


def test_dist_async_needs_an_optimizer_before_a_push():
    (kv,) = stores("dist_async", 1)
    kv.init("w", torch.ones(2))
    assert pull(kv, "w", 2).tolist() == [1, 1]
    with pytest.raises(PlanError, match=r"push of key 'w' without an optimizer, but a dist_async store needs one"):
        kv.push("w", torch.ones(2))


def test_workers_with_different_optimizers_get_an_error():
    kvs = stores("dist_sync", 2)
    for kv in kvs:
        kv.set_optimizer(partial(SGD, lr=0.1 * (1 + kv.rank)))
        kv.init("w", torch.ones(2))
    with pytest.raises(PlanError, match=r"Sgd\(lr=0.1.*initializer=None.*, but worker-1 defines it as .*Sgd\(lr=0.2"):
        pull(kvs[1], "w", 2)


@pytest.mark.parametrize(
    ("use", "error", "text"),
    [
        (lambda kv: kv.push("w", torch.tensor([1.0, torch.nan])), DataError, "values that are not finite"),
        (lambda kv: kv.init("i", torch.ones(2, dtype=torch.int64)), PlanError, "servers store float64"),
        (lambda kv: kv.set_updater(print), PlanError, "servers run no functions"),
        (lambda kv: kv.set_optimizer(partial(torch.optim.AdamW, lr=0.1)), PlanError, "AdamW has no rule"),
        (lambda kv: kv.set_optimizer(partial(Adam, amsgrad=True)), PlanError, "Adam with amsgrad=True"),
        (lambda kv: kv.set_optimizer("sgd"), PlanError, "give a factory such as"),
        (lambda kv: kv.set_optimizer(lambda _: 3), PlanError, "the factory makes a int"),
        (lambda kv: kv.save_optimizer_states("x"), PlanError, "they are on the servers"),
        (
            lambda kv: kv.push("e", sparse_rows([1], [1.0], 4)),
            PlanError,
            "without an optimizer, but sparse rows need one",
        ),
    ],
)
def test_what_servers_cannot_do_is_refused(use, error, text):
    (kv,) = stores("dist_sync", 1)
    kv.init(["w", "e"], [torch.ones(2), sparse_rows([], [], 4)])
    with pytest.raises(error, match=text):
        use(kv)


def test_rows_are_not_compressed():
    (kv,) = stores("dist_sync", 1)
    kv.set_optimizer(partial(SparseAdam, lr=0.1))
    kv.set_gradient_compression({"type": "2bit"})
    kv.init("e", sparse_rows([], [], 4))
    with pytest.raises(PlanError, match="sparse rows cannot be compressed"):
        kv.push("e", sparse_rows([1], [1.0], 4))


def test_a_job_that_counts_otherwise_is_refused():
    member = kvstore.KVStoreMember(stores("dist_async", 1)[0]._store._session, 0, 1)
    with pytest.raises(PlanError, match=r"which counts by Asp\(\): make the job with make_job"):
        kvstore.create("dist_sync", member=member)
