"""The loop of a worker: what goes wrong is told and done again, who has to go goes, and nothing is counted twice."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from counterpoint.errors import PeerError, PlanError
from counterpoint.server.job import Asp, Bsp
from counterpoint.server.working.layout import KEY as LAYOUT
from counterpoint.server.working.loop import Habits, Trained
from tests.server.working.crews import SGD, Crew, distance, mlp, numbers, portions_of, solo


class Failing:
    """A loss that fails when it is told to."""

    def __init__(self, *times):
        self.times, self.count = times, 0

    def __call__(self, outputs, targets):
        self.count += 1
        if self.count in self.times:
            raise RuntimeError("a disk is gone")
        return F.cross_entropy(outputs, targets)


def test_a_task_that_fails_is_told_and_done_again():
    data = numbers()
    crew = Crew(portions_of(data, Bsp(2)))
    crew.join("a", mlp(), loss=Failing(3, 4))
    crew.take_turns()
    assert crew.failures == ["RuntimeError: a disk is gone"] * 2
    assert distance(crew.model(), solo(mlp(), data, crew.portions)) < 1e-12


def test_a_task_that_always_fails_ends_the_job_with_its_reason():
    crew = Crew(portions_of(numbers(), Bsp(2)))
    crew.join("a", mlp(), loss=Failing(*range(100)))
    with pytest.raises(PeerError, match="were failed 3 times, more than the 2 of the budget: RuntimeError: a disk is"):
        crew.take_turns()


def test_a_worker_that_has_to_go_gives_its_task_back():
    crew = Crew(portions_of(numbers(40), Asp(), batch_size=4), task_portions=5)
    crew.join("a", mlp())
    crew.take_turns(2)
    crew.gone.add("a")
    crew.take_turns(2)
    assert crew.ended == ["preempted"]
    crew.join("b", mlp())
    crew.take_turns()
    assert crew.job.coordinator.book.queue.is_finished
    assert sorted(set(crew.trained)) == list(range(20))


def test_a_loss_that_is_not_finite_fails_the_task():
    crew = Crew(portions_of(numbers(), Asp()))
    crew.join("a", mlp(), loss=lambda outputs, targets: F.cross_entropy(outputs, targets) * torch.nan)
    crew.take_turns(1)
    (text,) = crew.failures
    assert text.startswith("DataError: the loss of portion 0 is nan; look at its samples")


def test_a_loss_that_is_not_finite_may_count_as_zeros():
    crew = Crew(portions_of(numbers(), Bsp(2)))
    first, habits = mlp(), Habits(nonfinite="skip")
    crew.join("a", mlp(), loss=lambda outputs, targets: F.cross_entropy(outputs, targets) * torch.nan, habits=habits)
    crew.take_turns()
    assert distance(crew.model(), first) == 0


def test_a_parameter_without_a_gradient_is_named():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, inputs):
            return self.used(inputs)

    crew = Crew(portions_of(numbers(), Asp()), epochs=1)
    crew.join("a", Idle().double())
    crew.take_turns(1)
    assert "idle.weight got no gradient from portion 0" in crew.failures[0]
    crew.gone.add("a")
    crew.join("b", Idle().double(), unused="zero")
    crew.take_turns()
    assert crew.job.coordinator.book.queue.is_finished


def test_weights_that_are_used_without_their_module_are_waited_for():
    class Direct(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, inputs):
            return F.linear(torch.tanh(self.first(inputs)), self.second.weight, self.second.bias)

    data = numbers()
    crew = Crew(portions_of(data, Bsp(2)))
    torch.manual_seed(3)
    model = Direct().double()
    expected = Direct().double()
    expected.load_state_dict(model.state_dict())
    crew.join("a", model)
    crew.take_turns()
    assert distance(crew.model(), solo(expected, data, crew.portions)) < 1e-12


def test_a_schedule_of_plain_sgd_goes_by_steps():
    data = numbers()
    crew = Crew(portions_of(data, Bsp(2)), epochs=1)
    crew.join("a", mlp(), habits=Habits(schedule=lambda step: 1 / (1 + step)))
    crew.take_turns()

    def optimizer(parameters):
        updates = SGD(parameters)
        schedule = torch.optim.lr_scheduler.LambdaLR(updates, lambda step: 1 / (1 + step))
        updates.register_step_post_hook(lambda *_: schedule.step())
        return updates

    assert distance(crew.model(), solo(mlp(), data, crew.portions, optimizer, epochs=1)) < 1e-12


def test_a_schedule_that_servers_cannot_follow_is_refused():
    crew = Crew(portions_of(numbers(), Bsp(2)))
    with pytest.raises(PlanError, match="whose rate on the servers stays"):
        crew.join("a", mlp(), torch.optim.Adagrad, habits=Habits(schedule=lambda step: 0.5))


def test_a_job_of_other_data_is_refused():
    crew = Crew(portions_of(numbers(), Bsp(2)))
    crew.portions = portions_of(numbers(100), Bsp(2))
    with pytest.raises(PlanError, match="6 portions in an epoch, but this dataset makes 26"):
        crew.join("a", mlp())


def test_a_checkpoint_is_a_moment_between_tasks():
    crew = Crew(portions_of(numbers(40), Asp(), batch_size=4))
    crew.join("a", mlp(), habits=Habits(checkpoint_every=8))
    crew.take_turns()
    trained = [
        [key for state in cut.values() for key in state.keys if key.spec.key != LAYOUT]
        for cut in crew.job.cuts.values()
    ]
    counted = [[key.counts.portions for key in keys] for keys in trained]
    assert counted == [[(0, 8), (0, 8)], [(0, 16), (0, 16)]]


def test_the_newest_weights_can_be_measured_in_between():
    data = numbers()
    crew = Crew(portions_of(data, Bsp(2)), epochs=20)
    served = crew.join("a", mlp())
    losses = []
    for _ in range(4):
        crew.take_turns(20)
        with served.reading() as model:
            losses.append(float(F.cross_entropy(model(data.tensors[0]), data.tensors[1])))
    assert losses == sorted(losses, reverse=True)
    assert len([event for _, event in crew.events if isinstance(event, Trained)]) < 80
