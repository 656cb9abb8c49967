"""A worker as a process: it counts every slice of a job's data on a key of its own, until all are counted."""

from pathlib import Path

import torch

from counterpoint.ps.consistency import Ssp, find_step
from counterpoint.ps.process.job_file import read_job_file
from counterpoint.ps.process.join_job import join
from counterpoint.ps.session import NO_TASK_YET
from counterpoint.ps.update_rules import Sgd

KEY = "counted"
WAIT_S = 1.0


def total_of(job):
    """How many slices there are in all epochs."""
    return job.data.num_slices * job.data.num_epochs


def work(session, num_tasks=0):
    """All data is counted, or so many tasks of it."""
    job = session.job
    session.init(KEY, torch.zeros(total_of(job), dtype=torch.float64), Sgd(1.0))
    num_done, has_entered = 0, False
    while (task := session.lease(WAIT_S)) is not None:
        if task is NO_TASK_YET:
            if has_entered:
                session.leave_clock()
            has_entered = False
            continue
        if isinstance(job.consistency, Ssp) and not has_entered:
            session.join_clock()
            has_entered = True
        count(session, task)
        session.report(task, "done")
        num_done += 1
        if num_done == num_tasks:
            return


def count(session, task):
    """The slices of a task are counted: each is 1 in its own place."""
    job = session.job
    for number in range(task.start, task.stop):
        slice_index = task.epoch * job.data.num_slices + number
        least = find_step(job.consistency, slice_index)[0]
        session.pull(KEY, min_versions=least).wait()
        gradient = torch.zeros(total_of(job), dtype=torch.float64)
        gradient[slice_index] = 1.0
        session.push(KEY, gradient, slice_index=slice_index).wait()


def main(contact, name, num_tasks):
    """The worker has joined, worked and left."""
    with join(read_job_file(Path(contact)), name) as session:
        work(session, int(num_tasks))
