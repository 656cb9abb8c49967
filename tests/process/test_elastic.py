"""Workers that are processes: they go from job to job, are terminated and killed, and every sample counts once."""

import os
from pathlib import Path

import pytest
import torch.nn.functional as F

from counterpoint.launchers.pooled import WorkerPool
from counterpoint.launchers.serving import start
from counterpoint.server.hosting.contact import read_contact
from counterpoint.server.hosting.joining import join
from counterpoint.server.job import Patience
from counterpoint.server.working.pool import Want
from counterpoint.server.working.served import Served
from counterpoint.training.elastic import Elastic
from tests.server.working.crews import SGD, distance, mlp, numbers, solo

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]
LONG_S = 150.0
PATIENCE = Patience(beat_s=0.2, silence_s=4.0, lease_s=20.0, retry_s=0.2)


def plan(name):
    return Elastic(
        dataset=numbers(64), batch_size=16, epochs=4 if name == "long" else 1, consistency="bsp(4)", name=name,
        patience=PATIENCE,
    )  # fmt: skip


def work(job, worker, must_go):
    """Work for the job that this file tells of."""
    contact = read_contact(Path(job))
    with join(contact, worker) as session:
        report = plan(contact.job.name).train(session, mlp(), loss=F.cross_entropy, optimizer=SGD, must_go=must_go)
    return report.is_complete


def work_and_die(job, worker, must_go):
    """The first life of each worker ends in the middle of a task."""
    mark = Path(job).with_name(f"{worker.partition('.')[0]}.died")

    def loss(outputs, targets):
        if not mark.exists():
            mark.touch()
            os._exit(9)
        return F.cross_entropy(outputs, targets)

    contact = read_contact(Path(job))
    with join(contact, worker) as session:
        return plan(contact.job.name).train(session, mlp(), loss=loss, optimizer=SGD, must_go=must_go).is_complete


def learned(servers):
    with servers.join("reader") as session:
        return Served(mlp(), session, SGD).give_back()


def test_two_jobs_share_workers_and_learn_what_they_would_alone():
    with start(plan("long").job) as first, start(plan("short").job) as second, WorkerPool(2, work) as pool:
        paths = [str(servers.contact_path) for servers in (first, second)]
        pool.begin(Want(paths[0]))
        pool.begin(Want(paths[1]))
        assert {pool.wait(LONG_S), pool.wait(LONG_S)} == set(paths)
        for servers, name in ((first, "long"), (second, "short")):
            expected = solo(mlp(), numbers(64), plan(name).portions, epochs=plan(name).epochs)
            assert distance(learned(servers), expected) < 1e-12


@pytest.mark.slow
def test_workers_that_die_in_the_middle_change_nothing():
    with start(plan("short").job) as servers, WorkerPool(2, work_and_die) as pool:
        pool.begin(Want(str(servers.contact_path)))
        pool.wait(LONG_S)
        expected = solo(mlp(), numbers(64), plan("short").portions, epochs=1)
        assert distance(learned(servers), expected) < 1e-12
