"""A worker as a process: it counts every portion of a job's data on a key of its own, until all are counted."""

from pathlib import Path

import torch

from counterpoint.server.choices import Sgd
from counterpoint.server.hosting.contact import read_contact
from counterpoint.server.hosting.joining import join
from counterpoint.server.job import Bsp, Ssp
from counterpoint.server.session import LATER

KEY = "counted"
WAIT_S = 1.0


def total_of(job):
    """How many portions there are in all epochs."""
    return job.work.num_portions * job.work.num_epochs


def work(session, num_tasks=0):
    """All data is counted, or so many tasks of it."""
    job = session.job
    session.init(KEY, torch.zeros(total_of(job), dtype=torch.float64), Sgd(1.0))
    num_done, has_entered = 0, False
    while (task := session.lease(WAIT_S)) is not None:
        if task is LATER:
            if has_entered:
                session.rest()
            has_entered = False
            continue
        if isinstance(job.consistency, Ssp) and not has_entered:
            session.enter()
            has_entered = True
        count(session, task)
        session.report(task, "done")
        num_done += 1
        if num_done == num_tasks:
            return


def count(session, task):
    """The portions of a task are counted: each is 1 in its own place."""
    job = session.job
    for number in range(task.start, task.stop):
        portion = task.epoch * job.work.num_portions + number
        least = portion // job.consistency.portions if isinstance(job.consistency, Bsp) else 0
        session.pull(KEY, least=least).wait()
        gradient = torch.zeros(total_of(job), dtype=torch.float64)
        gradient[portion] = 1.0
        session.push(KEY, gradient, portion=portion).wait()


def main(contact, name, num_tasks):
    """The worker has joined, worked and left."""
    with join(read_contact(Path(contact)), name) as session:
        work(session, int(num_tasks))
