"""Workers without servers: the same bits for any number of them, and nothing lost or done twice when they change."""

from functools import partial
from itertools import count

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from counterpoint.data.sampler import split_batch
from counterpoint.elastic.allreduce_worker import AllReduceWorker, PartialSum, add_partial_sum, tree_all_reduce
from counterpoint.elastic.ps_worker import GroupFormed, SliceTrained, TaskEnded, WorkerConfig
from counterpoint.elastic.replica import ModelReplica, broadcast_state
from counterpoint.elastic.worker_group import JobStoppedError, WorkerGroup
from counterpoint.errors import CheckpointError, PeerError, PlanError
from counterpoint.fabric.local import LocalWorld
from counterpoint.ps.consistency import Bsp
from counterpoint.ps.in_process import LocalJob
from counterpoint.ps.job_config import JobConfig
from counterpoint.ps.messages import JobMember, MembershipView
from counterpoint.ps.update_rules import Sgd
from tests.elastic.worker_fixtures import (
    TWO_FAILURES,
    build_seeded,
    make_numeric_data,
    make_slices,
    max_relative_difference,
    mlp,
    train_single_process,
)
from tests.fabric.run_ranks import result_or_error

ADAM = partial(torch.optim.Adam, lr=0.01)
SLICES = make_slices(make_numeric_data(), Bsp(3))


def circle(fabric):
    members = tuple(JobMember(f"worker-{rank}", rank + 1) for rank in range(fabric.num_ranks))
    return WorkerGroup(fabric, members, 1, lambda: MembershipView(1, members))


def summed(parts, num_members):
    """The sum of the parts, as each of so many members has it that have computed a run of them."""

    def run_rank(fabric):
        trees: list[PartialSum] = []
        for part in range(*split_batch(len(parts), num_members)[fabric.rank]):
            add_partial_sum(trees, PartialSum(part, 1, parts[part].clone()))
        return tree_all_reduce(circle(fabric), trees, len(parts), parts.shape[1], parts.dtype)

    with LocalWorld(num_members) as world:
        return world.run(run_rank)


@pytest.mark.parametrize("num_members", [2, 3, 5, 9])
def test_a_sum_is_the_same_bits_for_any_number_of_members(num_members):
    parts = torch.randn(7, 11) * 10 ** torch.randn(7, 1)
    (expected,) = summed(parts, 1)
    assert all(torch.equal(result, expected) for result in summed(parts, num_members))


def test_a_sum_may_be_shorter_than_there_are_members():
    (result, *_) = summed(torch.ones(4, 2), 3)
    assert result.tolist() == [4.0, 4.0]


def stepped(replica, num_steps):
    inputs, targets = make_numeric_data().tensors
    for _ in range(num_steps):
        F.cross_entropy(replica.model(inputs), targets).backward()
        replica.apply_step(*replica.take_gradients(), 1.0)
    return replica


def test_all_have_the_copy_of_who_has_taken_most_steps():
    copies = [ModelReplica(mlp(), ADAM), stepped(ModelReplica(mlp(), ADAM), 3), stepped(ModelReplica(mlp(), ADAM), 2)]
    with LocalWorld(3) as world:
        world.run(lambda fabric: broadcast_state(copies[fabric.rank], circle(fabric), 2))
    assert [copy.progress.steps for copy in copies] == [3, 3, 3]
    expected = stepped(ModelReplica(mlp(), ADAM), 4).model
    assert [max_relative_difference(stepped(copy, 1).model, expected) for copy in copies] == [0.0, 0.0, 0.0]


def test_a_worker_with_another_model_is_reported_so_and_the_others_wait_until_it_has_left():
    models = [mlp(), nn.Linear(4, 2), mlp()]
    with LocalWorld(3) as world:
        result = world.run(
            lambda fabric: result_or_error(
                lambda fabric: broadcast_state(ModelReplica(models[fabric.rank], ADAM), circle(fabric), 0), fabric
            )
        )
    assert result[1].startswith("PlanError: the model or the optimizer differs from that of worker-0")
    assert result[0] == result[2] == "PeerError: worker-1 trains another model and has to leave"


def job_of(slices, *, retry_policy=TWO_FAILURES, epochs=2):
    return LocalJob(
        JobConfig(
            "step",
            slices.consistency,
            0,
            slices.data_config(epochs, slices_per_task=slices.slices_per_step),
            retry_policy,
        )
    )


def worker(servers, name, model, optimizer=ADAM, *, folder=None, slices=SLICES, loss=F.cross_entropy, **options):
    replica = ModelReplica(model, optimizer, folder=folder)
    return AllReduceWorker(replica, servers.join(name), slices, loss, **options)


def leaving_at(step):
    """A worker is asked before the first step and in each whether it must go: in this one it must."""
    asked = count()
    return lambda: next(asked) > step


@pytest.mark.parametrize("optimizer", [ADAM, partial(torch.optim.RMSprop, lr=0.01, momentum=0.9)])
def test_one_worker_learns_what_a_loop_does(optimizer):
    model = mlp()
    events = worker(job_of(SLICES), "a", model, optimizer).run()
    assert max_relative_difference(model, train_single_process(mlp(), make_numeric_data(), SLICES, optimizer)) < 1e-12
    assert [event.slice_index for event in events if isinstance(event, SliceTrained)] == list(range(18))
    assert [event for event in events if isinstance(event, GroupFormed)] == [GroupFormed(1, ("a",), 0)]


def test_the_coordinator_has_a_line_for_every_step():
    servers = job_of(SLICES)
    worker(servers, "a", mlp()).run()
    assert servers.coordinator.state.tasks.is_finished
    assert sorted(servers.coordinator.state.tasks.done) == [(epoch, at) for epoch in (0, 1) for at in (0, 3, 6)]


def test_random_numbers_belong_to_a_slice_and_not_to_a_worker():
    models = [mlp(dropout=0.5), mlp(dropout=0.5)]
    for seed, model in enumerate(models):
        torch.manual_seed(seed)
        worker(job_of(SLICES), "a", model).run()
    assert max_relative_difference(*models) == 0.0


def test_a_parameter_without_gradient_stays_as_it_is():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(4, 2), nn.Parameter(torch.ones(3))

        def forward(self, inputs):
            return self.used(inputs)

    model = build_seeded(Idle)
    worker(job_of(SLICES), "a", model, partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)).run()
    assert model.get_parameter("idle").tolist() == [1.0, 1.0, 1.0]


def test_the_learning_rate_follows_a_schedule_under_any_optimizer():
    model, still = mlp(), mlp()
    config = WorkerConfig(schedule=lambda step: 1.0 if step < 3 else 0.0)
    worker(job_of(SLICES), "a", model, config=config).run()
    assert (
        max_relative_difference(model, train_single_process(still, make_numeric_data(), SLICES, ADAM, epochs=1)) < 1e-12
    )


def failing(times):
    calls = count(1)

    def loss(outputs, targets):
        call = next(calls)
        if call == 5 or call in range(7, 6 + times):
            raise ValueError(f"call {call}")
        return F.cross_entropy(outputs, targets)

    return loss


def test_a_step_that_fails_is_computed_again_and_counted_once():
    model = mlp()
    events = worker(job_of(SLICES), "a", model, loss=failing(1)).run()
    assert [(one.task.start, one.text) for one in events if isinstance(one, TaskEnded)] == [(3, "ValueError: call 5")]
    assert max_relative_difference(model, train_single_process(mlp(), make_numeric_data(), SLICES, ADAM)) < 1e-12


def test_a_step_that_fails_too_often_stops_the_job_and_says_why():
    with pytest.raises(
        PeerError, match=r"step 1 failed 3 times, more than the 2 of the retry policy: a: ValueError: call"
    ):
        worker(job_of(SLICES), "a", mlp(), loss=failing(100)).run()


def root_loss(outputs, targets):
    """A finite loss whose gradient is not."""
    return (outputs - outputs.detach()).sqrt().mean()


def test_a_gradient_that_is_not_finite_stops_the_job_and_names_the_parameter():
    text = r"step failed 3 times.*the gradient of \S+weight in slice 0 is not finite; check its samples, use a smaller"
    with pytest.raises(JobStoppedError, match=text.replace("step", "step 0")):
        worker(job_of(SLICES), "a", mlp(), loss=root_loss).run()


def test_a_gradient_that_is_not_finite_may_count_as_zeros():
    model, sgd = mlp(), partial(torch.optim.SGD, lr=0.1)
    worker(job_of(SLICES), "a", model, sgd, loss=root_loss, config=WorkerConfig(nonfinite="skip")).run()
    assert max_relative_difference(model, mlp()) == 0


def test_the_last_worker_takes_the_weights_with_it():
    servers = job_of(SLICES)
    leaving = worker(servers, "a", mlp(), should_stop=leaving_at(4))
    assert leaving.run()
    assert leaving.has_left
    with pytest.raises(
        PeerError, match=r"the last worker of job step left, and the weights are lost with it, after \d tasks"
    ):
        servers.join("b")


def test_a_worker_that_comes_when_all_is_done_is_reported_that_the_weights_are_gone():
    servers = job_of(SLICES)
    worker(servers, "a", mlp()).run()
    with pytest.raises(PeerError, match=r"the weights are lost: 6 steps are recorded, .* recent replica has 0"):
        worker(servers, "b", mlp()).run()


def test_a_job_continues_from_a_checkpoint(tmp_path):
    config = WorkerConfig(checkpoint_every_slices=6)
    worker(job_of(SLICES), "a", mlp(), folder=tmp_path, config=config, should_stop=leaving_at(4)).run()
    assert [path.name for path in sorted(tmp_path.iterdir())][-1] != "step-00000006"
    model = mlp()
    later = worker(job_of(SLICES), "b", model, folder=tmp_path)
    assert 0 < later.replica.progress.steps < 6
    later.run()
    assert max_relative_difference(model, train_single_process(mlp(), make_numeric_data(), SLICES, ADAM)) < 1e-12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": partial(torch.optim.SGD, lr=0.1)}, "of the optimizer Adam, and this is SGD"),
        ({"slices": make_slices(make_numeric_data(), Bsp(3), batch_size=4)}, "batch_size=8.*batch_size=4"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(tmp_path, options, message):
    config = WorkerConfig(checkpoint_every_slices=3)
    worker(job_of(SLICES), "a", mlp(), folder=tmp_path, config=config).run()
    with pytest.raises(CheckpointError, match=message):
        worker(job_of(options.get("slices", SLICES)), "b", mlp(), folder=tmp_path, **options)


def test_checkpoints_without_a_folder_are_refused():
    with pytest.raises(PlanError, match="needs a folder"):
        worker(job_of(SLICES), "a", mlp(), config=WorkerConfig(checkpoint_every_slices=3))


def test_workers_of_one_thread_cannot_meet():
    servers = job_of(SLICES)
    servers.join("b")
    with pytest.raises(PlanError, match=r"b \(rank 0\), a \(rank 1\) cannot rendezvous, since b has no address"):
        worker(servers, "a", mlp()).run()


def test_a_job_without_servers_keeps_no_key_and_has_no_snapshot():
    session = job_of(SLICES).join("a")
    with pytest.raises(PlanError, match="job step has no servers to hold weight"):
        session.init("weight", torch.zeros(2), Sgd(0.1))
    with pytest.raises(PlanError, match="no servers to hold a snapshot"):
        session.checkpoint()


def test_sparse_gradients_are_refused_with_a_remedy():
    model = build_seeded(lambda: nn.Sequential(nn.Embedding(12, 2, sparse=True), nn.Flatten(), nn.Linear(8, 2)))
    F.cross_entropy(model(torch.zeros(3, 4, dtype=torch.int64)), torch.zeros(3, dtype=torch.int64)).backward()
    with pytest.raises(PlanError, match="sparse=False"):
        ModelReplica(model, ADAM).take_gradients()


def test_a_session_that_the_job_continues_without_reports_it():
    servers = job_of(SLICES)
    session = servers.join("a")
    servers.pause("a")
    servers.advance(60.0)
    servers.resume("a")
    with pytest.raises(PeerError, match=r"does not belong to the job|continues without"):
        AllReduceWorker(ModelReplica(mlp(), ADAM), session, SLICES, F.cross_entropy).run()
