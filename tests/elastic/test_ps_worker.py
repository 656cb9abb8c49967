"""The loop of a worker: what goes wrong is told and done again, who has to go goes, and nothing is counted twice."""

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
    """A loss that fails when it is told to."""

    def __init__(self, *times):
        self.times, self.count = times, 0

    def __call__(self, outputs, targets):
        self.count += 1
        if self.count in self.times:
            raise RuntimeError("a disk is gone")
        return F.cross_entropy(outputs, targets)


def test_a_task_that_fails_is_reported_and_done_again():
    data = make_numeric_data()
    crew = InterleavedWorkers(make_slices(data, Bsp(2)))
    crew.join("a", mlp(), loss=Failing(3, 4))
    crew.run_rounds()
    assert crew.failures == ["RuntimeError: a disk is gone"] * 2
    assert max_relative_difference(crew.model(), train_single_process(mlp(), data, crew.slices)) < 1e-12


def test_a_task_that_always_fails_ends_the_job_with_its_reason():
    crew = InterleavedWorkers(make_slices(make_numeric_data(), Bsp(2)))
    crew.join("a", mlp(), loss=Failing(*range(100)))
    with pytest.raises(
        PeerError, match="were failed 3 times, more than the 2 of the retry policy: RuntimeError: a disk is"
    ):
        crew.run_rounds()


def test_a_worker_that_has_to_go_gives_its_task_back():
    crew = InterleavedWorkers(make_slices(make_numeric_data(40), Asp(), batch_size=4), task_slices=5)
    crew.join("a", mlp())
    crew.run_rounds(2)
    crew.gone.add("a")
    crew.run_rounds(2)
    assert crew.ended == ["preempted"]
    crew.join("b", mlp())
    crew.run_rounds()
    assert crew.job.coordinator.state.tasks.is_finished
    assert sorted(set(crew.trained)) == list(range(20))


def test_a_loss_that_is_not_finite_fails_the_task():
    crew = InterleavedWorkers(make_slices(make_numeric_data(), Asp()))
    crew.join("a", mlp(), loss=lambda outputs, targets: F.cross_entropy(outputs, targets) * torch.nan)
    crew.run_rounds(1)
    (text,) = crew.failures
    assert text.startswith("DataError: the loss of slice 0 is nan; check its samples")


def test_a_loss_that_is_not_finite_may_count_as_zeros():
    crew = InterleavedWorkers(make_slices(make_numeric_data(), Bsp(2)))
    first, config = mlp(), WorkerConfig(nonfinite="skip")
    crew.join("a", mlp(), loss=lambda outputs, targets: F.cross_entropy(outputs, targets) * torch.nan, config=config)
    crew.run_rounds()
    assert max_relative_difference(crew.model(), first) == 0


def test_a_parameter_without_a_gradient_is_named():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, inputs):
            return self.used(inputs)

    crew = InterleavedWorkers(make_slices(make_numeric_data(), Asp()), epochs=1)
    crew.join("a", Idle().double())
    crew.run_rounds(1)
    assert "idle.weight got no gradient from slice 0" in crew.failures[0]
    crew.gone.add("a")
    crew.join("b", Idle().double(), unused_parameters="zero")
    crew.run_rounds()
    assert crew.job.coordinator.state.tasks.is_finished


def test_weights_that_are_used_without_their_module_are_waited_for():
    class Direct(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, inputs):
            return F.linear(torch.tanh(self.first(inputs)), self.second.weight, self.second.bias)

    data = make_numeric_data()
    crew = InterleavedWorkers(make_slices(data, Bsp(2)))
    torch.manual_seed(3)
    model = Direct().double()
    expected = Direct().double()
    expected.load_state_dict(model.state_dict())
    crew.join("a", model)
    crew.run_rounds()
    assert max_relative_difference(crew.model(), train_single_process(expected, data, crew.slices)) < 1e-12


def test_a_schedule_of_plain_sgd_goes_by_steps():
    data = make_numeric_data()
    crew = InterleavedWorkers(make_slices(data, Bsp(2)), epochs=1)
    crew.join("a", mlp(), config=WorkerConfig(schedule=lambda step: 1 / (1 + step)))
    crew.run_rounds()

    def optimizer(parameters):
        updates = SGD(parameters)
        schedule = torch.optim.lr_scheduler.LambdaLR(updates, lambda step: 1 / (1 + step))
        updates.register_step_post_hook(lambda *_: schedule.step())
        return updates

    assert (
        max_relative_difference(crew.model(), train_single_process(mlp(), data, crew.slices, optimizer, epochs=1))
        < 1e-12
    )


def test_a_schedule_that_servers_cannot_follow_is_refused():
    crew = InterleavedWorkers(make_slices(make_numeric_data(), Bsp(2)))
    with pytest.raises(PlanError, match="remove the schedule"):
        crew.join("a", mlp(), torch.optim.Adagrad, config=WorkerConfig(schedule=lambda step: 0.5))


def test_a_job_of_other_data_is_refused():
    crew = InterleavedWorkers(make_slices(make_numeric_data(), Bsp(2)))
    crew.slices = make_slices(make_numeric_data(100), Bsp(2))
    with pytest.raises(PlanError, match="6 slices per epoch, but this dataset has 26"):
        crew.join("a", mlp())


def test_a_checkpoint_is_a_moment_between_tasks():
    crew = InterleavedWorkers(make_slices(make_numeric_data(40), Asp(), batch_size=4))
    crew.join("a", mlp(), config=WorkerConfig(checkpoint_every_slices=8))
    crew.run_rounds()
    trained = [
        [key for state in cut.values() for key in state.keys if key.spec.key != LAYOUT]
        for cut in crew.job.snapshots.values()
    ]
    counted = [[key.progress.applied_slices for key in keys] for keys in trained]
    assert counted == [[(0, 8), (0, 8)], [(0, 16), (0, 16)]]


def test_the_newest_weights_can_be_measured_in_between():
    data = make_numeric_data()
    crew = InterleavedWorkers(make_slices(data, Bsp(2)), epochs=20)
    served = crew.join("a", mlp())
    losses = []
    for _ in range(4):
        crew.run_rounds(20)
        with served.latest_weights() as model:
            losses.append(float(F.cross_entropy(model(data.tensors[0]), data.tensors[1])))
    assert losses == sorted(losses, reverse=True)
    assert len([event for _, event in crew.events if isinstance(event, SliceTrained)]) < 80
