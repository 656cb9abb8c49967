"""The loop of a worker: failed tasks are reported and repeated, workers can leave, and no slice is counted twice."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from counterpoint.elastic.parameter_keys import LAYOUT_KEY as LAYOUT
from counterpoint.elastic.ps_worker import SliceTrained, WorkerConfig
from counterpoint.errors import PeerError, PlanError
from counterpoint.ps.consistency import Asp, Bsp
from tests.elastic.worker_fixtures import (
    SGD,
    InterleavedWorkers,
    make_numeric_data,
    make_slices,
    max_relative_difference,
    mlp,
    train_single_process,
)


class Failing:
    """A loss that fails on request."""

    def __init__(self, *times):
        self.times, self.count = times, 0

    def __call__(self, outputs, targets):
        self.count += 1
        if self.count in self.times:
            raise RuntimeError("a disk is gone")
        return F.cross_entropy(outputs, targets)


def test_a_task_that_fails_is_reported_and_done_again():
    data = make_numeric_data()
    workers = InterleavedWorkers(make_slices(data, Bsp(2)))
    workers.join("a", mlp(), loss=Failing(3, 4))
    workers.run_rounds()
    assert workers.failures == ["RuntimeError: a disk is gone"] * 2
    assert max_relative_difference(workers.model(), train_single_process(mlp(), data, workers.slices)) < 1e-12


def test_a_task_that_always_fails_ends_the_job_with_its_reason():
    workers = InterleavedWorkers(make_slices(make_numeric_data(), Bsp(2)))
    workers.join("a", mlp(), loss=Failing(*range(100)))
    with pytest.raises(
        PeerError, match="were failed 3 times, more than the 2 of the retry policy: RuntimeError: a disk is"
    ):
        workers.run_rounds()


def test_a_worker_that_has_to_go_gives_its_task_back():
    workers = InterleavedWorkers(make_slices(make_numeric_data(40), Asp(), batch_size=4), task_slices=5)
    workers.join("a", mlp())
    workers.run_rounds(2)
    workers.gone.add("a")
    workers.run_rounds(2)
    assert workers.ended == ["preempted"]
    workers.join("b", mlp())
    workers.run_rounds()
    assert workers.job.coordinator.state.tasks.is_finished
    assert sorted(set(workers.trained)) == list(range(20))


def test_a_loss_that_is_not_finite_fails_the_task():
    workers = InterleavedWorkers(make_slices(make_numeric_data(), Asp()))
    workers.join("a", mlp(), loss=lambda outputs, targets: F.cross_entropy(outputs, targets) * torch.nan)
    workers.run_rounds(1)
    (text,) = workers.failures
    assert text.startswith("DataError: the loss of slice 0 is nan; check its samples")


def test_a_loss_that_is_not_finite_may_count_as_zeros():
    workers = InterleavedWorkers(make_slices(make_numeric_data(), Bsp(2)))
    first, config = mlp(), WorkerConfig(nonfinite="skip")
    workers.join("a", mlp(), loss=lambda outputs, targets: F.cross_entropy(outputs, targets) * torch.nan, config=config)
    workers.run_rounds()
    assert max_relative_difference(workers.model(), first) == 0


def test_a_parameter_without_a_gradient_is_named():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, inputs):
            return self.used(inputs)

    workers = InterleavedWorkers(make_slices(make_numeric_data(), Asp()), epochs=1)
    workers.join("a", Idle().double())
    workers.run_rounds(1)
    assert "idle.weight got no gradient from slice 0" in workers.failures[0]
    workers.gone.add("a")
    workers.join("b", Idle().double(), unused_parameters="zero")
    workers.run_rounds()
    assert workers.job.coordinator.state.tasks.is_finished


def test_weights_that_are_used_without_their_module_are_waited_for():
    class Direct(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, inputs):
            return F.linear(torch.tanh(self.first(inputs)), self.second.weight, self.second.bias)

    data = make_numeric_data()
    workers = InterleavedWorkers(make_slices(data, Bsp(2)))
    torch.manual_seed(3)
    model = Direct().double()
    expected = Direct().double()
    expected.load_state_dict(model.state_dict())
    workers.join("a", model)
    workers.run_rounds()
    assert max_relative_difference(workers.model(), train_single_process(expected, data, workers.slices)) < 1e-12


def test_a_schedule_of_plain_sgd_goes_by_steps():
    data = make_numeric_data()
    workers = InterleavedWorkers(make_slices(data, Bsp(2)), epochs=1)
    workers.join("a", mlp(), config=WorkerConfig(schedule=lambda step: 1 / (1 + step)))
    workers.run_rounds()

    def optimizer(parameters):
        updates = SGD(parameters)
        schedule = torch.optim.lr_scheduler.LambdaLR(updates, lambda step: 1 / (1 + step))
        updates.register_step_post_hook(lambda *_: schedule.step())
        return updates

    assert (
        max_relative_difference(workers.model(), train_single_process(mlp(), data, workers.slices, optimizer, epochs=1))
        < 1e-12
    )


def test_a_schedule_that_servers_cannot_follow_is_refused():
    workers = InterleavedWorkers(make_slices(make_numeric_data(), Bsp(2)))
    with pytest.raises(PlanError, match="remove the schedule"):
        workers.join("a", mlp(), torch.optim.Adagrad, config=WorkerConfig(schedule=lambda step: 0.5))


def test_a_job_of_other_data_is_refused():
    workers = InterleavedWorkers(make_slices(make_numeric_data(), Bsp(2)))
    workers.slices = make_slices(make_numeric_data(100), Bsp(2))
    with pytest.raises(PlanError, match="6 slices per epoch, but this dataset has 26"):
        workers.join("a", mlp())


def test_a_checkpoint_is_a_moment_between_tasks():
    workers = InterleavedWorkers(make_slices(make_numeric_data(40), Asp(), batch_size=4))
    workers.join("a", mlp(), config=WorkerConfig(checkpoint_every_slices=8))
    workers.run_rounds()
    trained = [
        [key for state in snapshot.values() for key in state.keys if key.spec.key != LAYOUT]
        for snapshot in workers.job.snapshots.values()
    ]
    counted = [[key.progress.applied_slices for key in keys] for keys in trained]
    assert counted == [[(0, 8), (0, 8)], [(0, 16), (0, 16)]]


def test_the_newest_weights_can_be_measured_in_between():
    data = make_numeric_data()
    workers = InterleavedWorkers(make_slices(data, Bsp(2)), epochs=20)
    served = workers.join("a", mlp())
    losses = []
    for _ in range(4):
        workers.run_rounds(20)
        with served.latest_weights() as model:
            losses.append(float(F.cross_entropy(model(data.tensors[0]), data.tensors[1])))
    assert losses == sorted(losses, reverse=True)
    assert len([event for _, event in workers.events if isinstance(event, SliceTrained)]) < 80
