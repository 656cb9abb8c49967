"""Workers that are processes: they go from job to job, are terminated and killed, and every sample counts once."""

import os
from pathlib import Path

import pytest
import torch.nn.functional as F

from counterpoint.elastic.remote_module import RemoteModule
from counterpoint.elastic.worker_allocation import JobDemand
from counterpoint.launchers.server_processes import start_servers
from counterpoint.launchers.worker_pool import WorkerPool
from counterpoint.ps.job_config import Timeouts
from counterpoint.ps.process.job_file import read_job_file
from counterpoint.ps.process.join_job import join
from counterpoint.training.elastic_trainer import ElasticTrainer
from tests.elastic.worker_fixtures import SGD, make_numeric_data, max_relative_difference, mlp, train_single_process

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]
LONG_S = 150.0
TIMEOUTS = Timeouts(heartbeat_s=0.2, failure_timeout_s=4.0, lease_s=20.0, resend_s=0.2)


def plan(name):
    return ElasticTrainer(
        dataset=make_numeric_data(64), batch_size=16, epochs=4 if name == "long" else 1, consistency="bsp", name=name,
        timeouts=TIMEOUTS,
    )  # fmt: skip


def work(job, worker, must_go):
    """Work for the job that this file tells of."""
    contact = read_job_file(Path(job))
    with join(contact, worker) as session:
        report = plan(contact.job.name).train(session, mlp(), loss=F.cross_entropy, optimizer=SGD, should_stop=must_go)
    return report.is_complete


def work_and_die(job, worker, must_go):
    """The first life of each worker ends in the middle of a task."""
    mark = Path(job).with_name(f"{worker.partition('.')[0]}.died")

    def loss(outputs, targets):
        if not mark.exists():
            mark.touch()
            os._exit(9)
        return F.cross_entropy(outputs, targets)

    contact = read_job_file(Path(job))
    with join(contact, worker) as session:
        return plan(contact.job.name).train(session, mlp(), loss=loss, optimizer=SGD, should_stop=must_go).is_complete


def learned(servers):
    with servers.join("reader") as session:
        return RemoteModule(mlp(), session, SGD).export_weights()


@pytest.mark.long
def test_two_jobs_share_workers_and_learn_what_they_would_alone():
    with (
        start_servers(plan("long").job) as first,
        start_servers(plan("short").job) as second,
        WorkerPool(2, work) as pool,
    ):
        paths = [str(servers.contact_path) for servers in (first, second)]
        pool.add_job(JobDemand(paths[0]))
        pool.add_job(JobDemand(paths[1]))
        assert {pool.wait(LONG_S), pool.wait(LONG_S)} == set(paths)
        for servers, name in ((first, "long"), (second, "short")):
            expected = train_single_process(
                mlp(), make_numeric_data(64), plan(name).data_slices, epochs=plan(name).epochs
            )
            assert max_relative_difference(learned(servers), expected) < 1e-12


@pytest.mark.slow
def test_workers_that_die_in_the_middle_change_nothing():
    with start_servers(plan("short").job) as servers, WorkerPool(2, work_and_die) as pool:
        pool.add_job(JobDemand(str(servers.contact_path)))
        pool.wait(LONG_S)
        expected = train_single_process(mlp(), make_numeric_data(64), plan("short").data_slices, epochs=1)
        assert max_relative_difference(learned(servers), expected) < 1e-12
