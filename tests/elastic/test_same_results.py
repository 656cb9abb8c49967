"""What workers that come and go learn under bsp is what one loop learns."""

from functools import partial

import pytest
import torch
from torch import nn, optim

from counterpoint.elastic.ps_worker import WorkerConfig
from counterpoint.ps.consistency import Asp, Bsp, Ssp
from counterpoint.ps.storage.row_storage import initialize_rows
from counterpoint.ps.update_rules import UniformInit
from tests.elastic.worker_fixtures import (
    NUM_ROWS,
    InterleavedWorkers,
    embedding_bag_model,
    make_lookup_data,
    make_numeric_data,
    make_slices,
    max_relative_difference,
    mlp,
    train_single_process,
)

START = UniformInit(-0.5, 0.5, seed=7)
OPTIMIZERS = [
    partial(optim.SGD, lr=0.3, momentum=0.9, weight_decay=0.01),
    partial(optim.SGD, lr=0.3, momentum=0.9, nesterov=True),
    partial(optim.Adagrad, lr=0.1, lr_decay=0.1),
    partial(optim.Adam, lr=0.05, weight_decay=0.1),
]


def with_rows(model: nn.Module, padding: int | None = None) -> nn.Module:
    """The model with the rows that the servers begin with."""
    rows = initialize_rows(START, "0.weight", torch.arange(NUM_ROWS), 4, torch.float64)
    if padding is not None:
        rows[padding] = 0
    with torch.no_grad():
        model.get_parameter("0.weight").copy_(rows)
    return model


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_workers_that_come_and_go_equal_one_loop(optimizer):
    data = make_numeric_data()
    workers = InterleavedWorkers(make_slices(data, Bsp(4)), epochs=3)
    workers.join("a", mlp(), optimizer)
    workers.run_rounds(3)
    workers.join("b", mlp(), optimizer)
    workers.join("c", mlp(), optimizer)
    workers.run_rounds(3)
    workers.gone.add("a")
    workers.run_rounds()
    assert (
        max_relative_difference(workers.model(), train_single_process(mlp(), data, workers.slices, optimizer, epochs=3))
        < 1e-12
    )


def goes(_moment):
    raise KeyboardInterrupt


@pytest.mark.long(quick=["dense"])
@pytest.mark.parametrize(
    ("build", "data"), [(mlp, make_numeric_data()), (embedding_bag_model, make_lookup_data())], ids=["dense", "table"]
)
def test_a_slice_of_which_one_key_has_been_pushed_is_repeated_from_the_weights_of_its_step(build, data):
    """The key that had the last slice of a step from a worker that died went on without the others."""
    workers = InterleavedWorkers(make_slices(data, Bsp(4)))
    tables = {"0.weight": START} if build is embedding_bag_model else {}
    workers.join("before", build(), tables=tables)
    workers.run_rounds(6)
    workers.gone.add("before")
    workers.run_rounds()
    dying = workers.join("dying", build(), tables=tables)
    (dying.tables["0.weight"] if tables else dying.weights[0]).push = goes if build is mlp else partial(goes, None)
    with pytest.raises(KeyboardInterrupt):
        workers.run_rounds()
    workers.gone.add("dying")
    workers.join("after", build(), tables=tables)
    workers.run_rounds()
    expected = train_single_process(with_rows(build()) if tables else build(), data, workers.slices)
    assert max_relative_difference(workers.model(), expected) < 1e-12


@pytest.mark.long(quick=["4-2"])
@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("padding", [None, 4])
def test_rows_on_servers_equal_a_whole_table(num_workers, padding):
    data = make_lookup_data()
    workers = InterleavedWorkers(make_slices(data, Bsp(4)), task_slices=2)
    for index in range(num_workers):
        workers.join(f"w{index}", embedding_bag_model(padding), tables={"0.weight": START})
    workers.run_rounds()
    expected = train_single_process(with_rows(embedding_bag_model(padding), padding), data, workers.slices)
    assert max_relative_difference(workers.model(), expected) < 1e-12


def test_a_batch_that_is_snapshot_unevenly_is_the_mean_over_its_samples():
    data = make_numeric_data(13)
    workers = InterleavedWorkers(make_slices(data, Bsp(5), batch_size=7, minibatches_per_slice=2))
    workers.join("a", mlp())
    workers.run_rounds()
    assert max_relative_difference(workers.model(), train_single_process(mlp(), data, workers.slices)) < 1e-12


def test_the_same_bits_come_out_for_any_number_of_workers():
    result = []
    for num_workers in (1, 3):
        workers = InterleavedWorkers(make_slices(make_numeric_data(), Bsp(4)))
        for index in range(num_workers):
            workers.join(f"w{index}", mlp(dropout=0.5))
        workers.run_rounds()
        result.append(workers.model())
    assert max_relative_difference(*result) == 0


@pytest.mark.long
def test_what_is_fetched_ahead_is_what_would_have_been_fetched():
    for consistency in (Bsp(2), Ssp(1), Asp()):
        result = []
        for prefetch in (False, True):
            workers = InterleavedWorkers(make_slices(make_lookup_data(40), consistency, batch_size=4), task_slices=2)
            workers.join("a", embedding_bag_model(), tables={"0.weight": START}, config=WorkerConfig(prefetch=prefetch))
            workers.run_rounds()
            result.append(workers.model())
        assert max_relative_difference(*result) == 0


def test_keys_of_several_modules_equal_one_loop():
    data = make_numeric_data()
    workers = InterleavedWorkers(make_slices(data, Bsp(4)))
    workers.join("a", mlp(), key_bytes=1 << 16)
    workers.join("b", mlp(), key_bytes=1 << 16)
    workers.run_rounds()
    assert max_relative_difference(workers.model(), train_single_process(mlp(), data, workers.slices)) < 1e-12
