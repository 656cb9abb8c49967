"""What travels: rows that were looked up and no others, and what a code leaves of a gradient."""

import gc
import weakref

import pytest
import torch
from torch import nn, optim

from counterpoint.elastic.parameter_keys import LAYOUT_KEY as LAYOUT, coalesce_small_keys, dense_keys, zero_copy_keys
from counterpoint.elastic.remote_embedding import EmbeddingConfig
from counterpoint.elastic.row_ids import densify_gradient
from counterpoint.errors import DataError, PlanError
from counterpoint.ps.consistency import Asp, Bsp
from counterpoint.ps.messages import PushRequest
from counterpoint.ps.shard import decode_push
from counterpoint.ps.update_rules import ConstantInit, Sgd, UniformInit
from tests.elastic.worker_fixtures import (
    InterleavedWorkers,
    build_seeded,
    embedding_bag_model,
    make_lookup_data,
    make_numeric_data,
    make_slices,
    max_relative_difference,
    mlp,
)

START = UniformInit(-0.5, 0.5)


def pushes(workers, key):
    return [entry for journal in workers.job.journals.values() for entry in journal.values()
            if isinstance(entry, PushRequest) and entry.key == key]  # fmt: skip


def test_only_rows_that_were_looked_up_are_pushed():
    data = make_lookup_data(20)
    workers = InterleavedWorkers(make_slices(data, Asp(), batch_size=2), epochs=1)
    workers.join("a", embedding_bag_model(), tables={"0.weight": START})
    workers.run_rounds()
    for slice_index in range(workers.slices.num_slices):
        (one,) = workers.slices.read(0, slice_index)
        result = [push.rows for push in pushes(workers, "0.weight") if push.slice_index == slice_index]
        assert torch.equal(torch.cat(result).sort().values, one.fields[0].unique())


def test_a_table_lies_on_no_worker():
    workers = InterleavedWorkers(make_slices(make_lookup_data(), Bsp(2)))
    served = workers.join("a", embedding_bag_model(), tables={"0.weight": START})
    workers.run_rounds(3)
    assert served.model.get_parameter("0.weight").is_meta
    assert served.export_weights(tables=True).get_parameter("0.weight").shape == (12, 4)


def test_a_table_that_two_modules_look_up_is_pushed_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Embedding(12, 2), nn.Embedding(12, 2)
            self.second.weight = self.first.weight

        def forward(self, rows):
            return self.first(rows[:, 0]) + self.second(rows[:, 1])

    workers = InterleavedWorkers(make_slices(make_lookup_data(8), Asp(), batch_size=8), epochs=1, num_servers=1)
    workers.join("a", build_seeded(Twice), tables={"first.weight": ConstantInit(0.5)})
    workers.run_rounds()
    (rows,) = [push.rows for push in pushes(workers, "first.weight")]
    assert torch.equal(rows, make_lookup_data(8).tensors[0][:, :2].unique())


def test_the_row_of_padding_never_travels_and_is_zeros():
    workers = InterleavedWorkers(make_slices(make_lookup_data(), Bsp(2)))
    served = workers.join("a", embedding_bag_model(padding=4), tables={"0.weight": START})
    workers.run_rounds()
    assert all(4 not in push.rows for push in pushes(workers, "0.weight"))
    assert not served.export_weights(tables=True).get_parameter("0.weight")[4].any()


@pytest.mark.long(quick=["fp16", "int8"])
@pytest.mark.parametrize("code", ["fp16", "int8", "twobit:0.25", "topk:0.1", "sign"])
def test_a_code_sends_fewer_bytes_and_keeps_the_rest_on_the_worker(code):
    workers = InterleavedWorkers(make_slices(make_numeric_data(80), Asp(), batch_size=4), epochs=4, num_servers=1)
    served = workers.join("a", mlp(), compress=code)
    workers.run_rounds()
    (push, *_) = pushes(workers, "0.weight+bias")
    assert push.values.nbytes < 40 * 8
    assert served.weights[0].residual.any()


def test_what_a_code_leaves_out_is_pushed_later():
    workers = InterleavedWorkers(make_slices(make_numeric_data(40), Asp(), batch_size=4), epochs=1, num_servers=1)
    frozen = {"optimizer": lambda parameters: optim.SGD(parameters, lr=0.0)}
    coded = workers.join("a", mlp(), compress="topk:0.2", **frozen)
    workers.run_rounds()
    exact = InterleavedWorkers(make_slices(make_numeric_data(40), Asp(), batch_size=4), epochs=1, num_servers=1)
    exact.join("a", mlp(), **frozen)
    exact.run_rounds()
    shard = workers.shard(0)
    sent = sum(of_code(push, shard) for push in pushes(workers, "0.weight+bias"))
    whole = sum(push.values for push in pushes(exact, "0.weight+bias"))
    assert float((sent + coded.weights[0].residual - whole).abs().max()) < 1e-12


def of_code(push, shard):
    return decode_push(push, shard.keys[push.key].spec).values


REFUSED = [
    (optim.AdamW, "use Adam with weight_decay=0"),
    (lambda parameters: optim.Adam(parameters, amsgrad=True), "amsgrad=True; remove it"),
    (lambda parameters: optim.SGD(parameters, lr=0.1, maximize=True), "maximize=True; remove it"),
    (optim.RMSprop, "torch.optim.SGD, Adagrad and Adam"),
    (optim.Adam, "use SparseAdam, Adagrad or SGD without momentum"),
    (lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9), "EmbeddingConfig\\(rule=...\\)"),
    (optim.SparseAdam, "1.weight, which is not a table"),
    (3, "neither an optimizer nor a factory"),
]


@pytest.mark.parametrize(("optimizer", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_an_optimizer_that_servers_do_not_know_is_refused_with_a_remedy(optimizer, message):
    workers = InterleavedWorkers(make_slices(make_lookup_data(), Asp()))
    with pytest.raises(PlanError, match=message):
        workers.join("a", embedding_bag_model(), optimizer, tables={"0.weight": START})


def test_a_table_may_have_a_rule_of_its_own():
    workers = InterleavedWorkers(make_slices(make_lookup_data(), Asp()))
    served = workers.join(
        "a", embedding_bag_model(), optim.Adam, tables={"0.weight": EmbeddingConfig(START, Sgd(0.1, momentum=0.9))}
    )
    assert served.rules["0.weight"] == Sgd(0.1, momentum=0.9)


def test_sparse_gradients_ask_for_a_table():
    workers = InterleavedWorkers(make_slices(make_lookup_data(), Asp()))
    with pytest.raises(PlanError, match=r"tables={'0.weight': NormalInit\(0, 1\)}"):
        workers.join("a", nn.Sequential(nn.Embedding(4, 2, sparse=True)))


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (embedding_bag_model(), {"tables": {"0.wait": START}}, "there is no weight '0.wait'"),
        (mlp(), {"tables": {"0.weight": START}}, "a weight of Linear"),
        (nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)), {}, "buffers='own'"),
        (nn.Sequential(nn.Embedding(4, 2, max_norm=1.0)), {"tables": {"0.weight": START}}, "max_norm=1.0"),
        (nn.Linear(4, 2, device="meta"), {}, "on meta, but workers of parameter servers compute on the CPU"),
        (mlp(), {"compress": "powersgd:1"}, "compresses an all-reduce, not a single push"),
        (mlp(), {"compress": "zip"}, "there is no codec 'zip'"),
    ],
)
def test_what_servers_cannot_do_is_refused(model, options, message):
    workers = InterleavedWorkers(make_slices(make_lookup_data(), Asp()))
    with pytest.raises(PlanError, match=message):
        workers.join("a", model, **options)


def test_a_row_that_is_not_there_is_an_error_of_the_data():
    workers = InterleavedWorkers(make_slices(make_lookup_data(), Asp()))
    served = workers.join("a", nn.Sequential(nn.Embedding(5, 2)).double(), tables={"0.weight": START})
    with (
        served.latest_weights() as model,
        pytest.raises(DataError, match=r"rows 0 to 9 of 0\.weight are looked up, which has 5"),
    ):
        model(torch.tensor([0, 9]))


def test_frozen_weights_are_the_first_workers():
    workers = InterleavedWorkers(make_slices(make_numeric_data(), Asp()))
    models = [nn.Linear(4, 2).double(), nn.Linear(4, 2).double()]
    for name, model in zip("ab", models, strict=True):
        model.weight.requires_grad = False
        workers.join(name, model)
    assert max_relative_difference(*models) > 0  # the biases have not been fetched yet
    assert torch.equal(models[0].weight, models[1].weight)


@pytest.mark.parametrize(
    ("key_bytes", "keys"),
    [(0, ["0.weight+bias", "3.weight+bias"]), (463, ["0.weight+bias", "3.weight+bias"]),
     (464, ["0.weight+bias to 3.weight+bias"])],
)  # fmt: skip
def test_small_modules_are_one_key_up_to_a_size(key_bytes, keys):
    workers = InterleavedWorkers(make_slices(make_numeric_data(8), Asp(), batch_size=4), epochs=1, num_servers=1)
    workers.join("a", mlp(), key_bytes=key_bytes)
    assert list(workers.shard(0).keys) == [LAYOUT, *keys]


def test_a_large_parameter_is_a_key_by_itself():
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 40), nn.Linear(40, 2)).double()
    rules = dict.fromkeys([name for name, _ in model.named_parameters()], Sgd(0.1))
    units = coalesce_small_keys(dense_keys(model, rules, excluded=(), own_key_bytes=600), 512)
    assert [unit.key for unit in units] == ["0.weight+bias to 2.bias", "1.weight", "2.weight"]
    assert zero_copy_keys(units) == {"0.weight+bias to 2.bias"}


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_a_gradient_of_each_look_up_sums_to_that_of_rows(mode):
    places, leaf = torch.arange(35).view(7, 5) % 9, torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    result = []
    for sparse in (False, True):
        nn.functional.embedding_bag(places, leaf, mode=mode, sparse=sparse).square().sum().backward()
        assert leaf.grad is not None
        result.append(densify_gradient(leaf.grad))
        leaf.grad = None
    assert float((result[0] - result[1]).abs().max()) < 1e-12


def test_rows_of_a_minibatch_are_let_go_when_the_next_begins():
    workers = InterleavedWorkers(make_slices(make_lookup_data(16), Asp(), batch_size=4), epochs=1, num_servers=1)
    served = workers.join("a", embedding_bag_model(), tables={"0.weight": START})
    workers.run_rounds(2)
    (touch,) = served.tables["0.weight"].accesses
    leaf = weakref.ref(touch.leaf)
    del touch
    gc.disable()
    try:
        served.tables["0.weight"].begin_minibatch(())
        assert leaf() is None
    finally:
        gc.enable()
