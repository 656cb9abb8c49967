"""Worker of Counterpoint's servers: ``counterpoint_worker.py WORKLOAD WORKER JOB_FILE KEY FOLDER [PREFETCH]``."""

import sys
from pathlib import Path

import server_workloads
import torch
from timed_run import keep_stepping, time_steps

from counterpoint.elastic.remote_module import RemoteModule
from counterpoint.elastic.sync_policy import SyncPolicy
from counterpoint.ps.process import join, read_job_file
from counterpoint.ps.update_rules import NormalInit
from counterpoint.rpc.job_key import read_key
from counterpoint.training.ranks.process_memory import RetainedMemory


def make_remote_module(name, session, ahead):
    """Return the worker's replica; tables are initialized as in torch."""
    workload = server_workloads.workload(name)
    tables = {server_workloads.TABLE: NormalInit(0.0, 1.0)} if name == "D" else {}
    return RemoteModule(
        server_workloads.build_model(workload),
        session,
        workload.optimizer,
        tables=tables,
        sync_policy=SyncPolicy(pull_ahead=ahead),
    )


def make_step(name, worker, copy):
    """Return ``step(number)``, which prefetches rows of the next batch."""
    workload, batch, ahead = (
        server_workloads.workload(name),
        server_workloads.worker_batches(name, worker),
        copy.sync_policy.pull_ahead,
    )

    def prefetch_next(number):
        for other in range(number + 1, number + 1 + max(1, ahead)):
            copy.prefetch((batch(other)[0],), -1)

    def step(number):
        inputs, targets = batch(number)
        copy.begin_minibatch(-1, (inputs,))
        if ahead:
            prefetch_next(number)
        loss = workload.loss(copy.model(inputs), targets)
        prefetch_next(number)
        loss.backward()
        copy.finish_minibatch()
        return loss.item()

    return step


def main(name, worker, contact, key, folder, ahead="0"):
    torch.set_num_threads(1)
    secret = read_key(Path(key)) if key != "-" else None
    with join(read_job_file(Path(contact)), f"worker-{worker}", secret) as session:
        copy = make_remote_module(name, session, int(ahead))
        RetainedMemory(enabled=True).start()  # as cp.ElasticTrainer does
        step = make_step(name, int(worker), copy)
        done = time_steps(
            folder,
            f"worker-{worker}",
            step,
            warm_up=server_workloads.WARM_UP[name],
            steps=server_workloads.STEPS[name],
        )
        keep_stepping(folder, step, done)
        copy.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
