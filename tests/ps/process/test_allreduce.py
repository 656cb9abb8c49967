"""Workers without servers as processes: they come, go, are terminated and killed, and learn what one loop would."""

import os
import random
import signal
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from counterpoint.elastic.allreduce_worker import AllReduceWorker
from counterpoint.elastic.ps_worker import GroupFormed
from counterpoint.elastic.replica import ModelReplica
from counterpoint.launchers.signals import collect_signals
from counterpoint.ps.in_process import LocalJob
from counterpoint.ps.job_config import Timeouts
from counterpoint.ps.process.job_file import read_job_file, write_job_file
from counterpoint.ps.process.join_job import join
from counterpoint.rpc.job_key import JobKey
from counterpoint.training.elastic_trainer import ElasticTrainer
from tests.elastic.worker_fixtures import make_numeric_data, mlp
from tests.fabric.run_ranks import result_or_error
from tests.forkserver import CONTEXT
from tests.ps.process.conftest import wait_until

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
LONG_S = 60.0
TIMEOUTS = Timeouts(heartbeat_s=0.2, failure_timeout_s=1.5, lease_s=20.0, resend_s=0.2)
ADAM = partial(torch.optim.Adam, lr=0.01)


def plan(epochs, parts):
    return ElasticTrainer(
        dataset=make_numeric_data(64),
        batch_size=16,
        epochs=epochs,
        consistency="bsp",
        slices_per_step=parts,
        servers=0,
        timeouts=TIMEOUTS,
    )


class Moments:
    """A loss that does something before a call: dies, lets somebody come, waits for somebody to go, must go."""

    def __init__(self, session, folder, moments):
        self.session, self.folder, self.moments = session, folder, moments
        self.calls = 0

    def __call__(self, outputs, targets):
        for call, what, whom in self.moments:
            if call == self.calls:
                getattr(self, what)(whom)
        self.calls += 1
        return F.cross_entropy(outputs, targets)

    def get(self, number):
        os.kill(os.getpid(), number)

    def invite(self, whom):
        (self.folder / whom).touch()
        wait_until(lambda: whom in self.names)

    @property
    def names(self):
        return [member.name for member in self.session.view.workers]


def work(pipe, folder, key, name, shape, moments, transport):
    """Be a worker: wait to be invited, join, train, and tell what came of it."""
    torch.set_num_threads(1)
    wait_until(lambda: (folder / name).exists(), LONG_S)

    def run_rank(_):
        with join(read_job_file(folder / "job.json"), name, JobKey(bytes.fromhex(key))) as session:
            model = mlp(dropout=0.5)
            loss, one = Moments(session, folder, moments), plan(*shape)
            with collect_signals((signal.SIGTERM,)) as received:
                worker = AllReduceWorker(
                    ModelReplica(model, ADAM),
                    session,
                    one.data_slices,
                    loss,
                    should_stop=lambda: bool(received),
                    transport=transport,
                )
                met = [list(event.members) for event in worker.events() if isinstance(event, GroupFormed)]
            return not worker.has_left, [one.detach().numpy() for one in model.parameters()], met

    pipe.send(result_or_error(run_rank, None))


class WorkerProcesses:
    """Worker processes of one job; one that is not invited by another joins at once."""

    def __init__(self, job, folder, shape, transport):
        write_job_file(job.contact, folder / "job.json")
        self.folder, self.shape, self.transport = folder, shape, transport
        self.key = job.key.secret.hex()
        self.pipes, self.processes = {}, {}

    def start(self, name, *moments, is_invited=False):
        ours, theirs = CONTEXT.Pipe()
        arguments = (theirs, self.folder, self.key, name, self.shape, moments, self.transport)
        process = CONTEXT.Process(target=work, args=arguments)
        process.start()
        theirs.close()
        self.pipes[name], self.processes[name] = ours, process
        if not is_invited:
            (self.folder / name).touch()

    def result_of(self, name):
        """What came of it; None of a process that was killed."""
        pipe, process = self.pipes[name], self.processes[name]
        try:
            return pipe.recv() if pipe.poll(LONG_S) else "silence"
        except EOFError:
            return None
        finally:
            process.join(LONG_S)

    def close(self):
        for process in self.processes.values():
            process.kill()
            process.join(LONG_S)


@pytest.fixture
def run_workers(threads, tmp_path):
    """What starts the processes of a job; none of them is left."""
    started = []

    def start(epochs=3, parts=4, transport="auto"):
        job = threads(plan(epochs, parts).job)
        started.append(WorkerProcesses(job, tmp_path, (epochs, parts), transport))
        return started[-1]

    yield start
    for one in started:
        one.close()


def alone(epochs=3, parts=4):
    """The result of a single worker."""
    model = mlp(dropout=0.5)
    one = plan(epochs, parts)
    with LocalJob(one.job).join("alone") as session:
        one.train(session, model, loss=F.cross_entropy, optimizer=ADAM)
    return model


def is_the_same(parameters, model):
    return all(
        torch.equal(torch.from_numpy(one), other) for one, other in zip(parameters, model.parameters(), strict=True)
    )


@pytest.mark.long
def test_workers_that_come_are_killed_and_are_terminated_change_no_bit(run_workers):
    result = run_workers()
    result.start("a", (5, "invite", "b"), (13, "get", signal.SIGKILL))
    result.start("b", (3, "invite", "c"), (14, "get", signal.SIGTERM), is_invited=True)
    result.start("c", is_invited=True)
    assert result.result_of("a") is None
    is_complete, _, met = result.result_of("b")
    assert not is_complete
    assert met[0] == ["a", "b"]
    is_complete, parameters, met = result.result_of("c")
    assert is_complete
    assert met[-1] == ["c"]
    assert is_the_same(parameters, alone())


@pytest.mark.parametrize("transport", ["auto", pytest.param("gloo", marks=pytest.mark.slow)])
def test_more_workers_than_parts_of_a_batch_all_learn_the_same(run_workers, transport):
    result = run_workers(epochs=1, parts=2, transport=transport)
    result.start("a", (1, "invite", "b"), (2, "invite", "c"))
    for name in "bc":
        result.start(name, is_invited=True)
    expected = alone(epochs=1, parts=2)
    for name in "abc":
        answer = result.result_of(name)
        assert isinstance(answer, tuple), answer
        assert answer[0]
        assert is_the_same(answer[1], expected)


def test_when_all_who_had_the_weights_are_killed_who_comes_is_reported_what_is_lost(run_workers):
    result = run_workers()
    result.start("a", (14, "invite", "b"), (14, "get", signal.SIGKILL))
    result.start("b", is_invited=True)
    assert result.result_of("a") is None
    assert "the weights are lost: 2 steps are recorded" in result.result_of("b")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
def test_workers_that_die_at_random_change_no_bit(run_workers, seed):
    result, chance = run_workers(epochs=20), random.Random(seed)
    names = [f"w{index}" for index in range(6)]
    result.start("last", *((10 * index + 4, "invite", name) for index, name in enumerate(names)))
    for name in names:
        how = chance.choice((signal.SIGKILL, signal.SIGTERM))
        result.start(name, (chance.randrange(1, 60), "get", how), is_invited=True)
    is_complete, parameters, met = result.result_of("last")
    assert is_complete
    assert len(met) > len(names)
    assert is_the_same(parameters, alone(epochs=20))


@pytest.mark.slow
def test_the_others_continue_without_a_worker_that_is_stopped_and_it_is_reported_so(run_workers):
    result = run_workers()
    result.start("a", (1, "invite", "b"))
    result.start("b", (3, "get", signal.SIGSTOP), is_invited=True)
    is_complete, parameters, met = result.result_of("a")
    os.kill(result.processes["b"].pid, signal.SIGCONT)
    assert is_complete
    assert met == [["a"], ["a", "b"], ["a"]]
    assert is_the_same(parameters, alone())
    assert "PeerError: b: " in result.result_of("b")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
def test_when_the_oldest_dies_again_and_again_no_bit_changes(run_workers, seed):
    result, chance = run_workers(epochs=20), random.Random(seed)
    names = [f"w{index}" for index in range(6)]
    for name, following in pairwise(names):
        how = chance.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM))
        moments = (2, "invite", following), (chance.randrange(8, 25), "get", how)
        result.start(name, *moments, is_invited=name != names[0])
    result.start(names[-1], is_invited=True)
    is_complete, parameters, met = result.result_of(names[-1])
    assert is_complete
    assert met[-1] == [names[-1]]
    assert is_the_same(parameters, alone(epochs=20))
