"""One rank of a strategy with servers: ``strategy_rank.py STRATEGY WORKLOAD FOLDER``."""

import os
import sys

import server_workloads
import torch
from timed_run import time_steps

import counterpoint as cp


def main(strategy, name, folder):
    torch.set_num_threads(1)
    rank, workload = int(os.environ["RANK"]), server_workloads.workload(name)
    batches = [server_workloads.worker_batches(name, worker) for worker in range(server_workloads.RANKS)]
    run = cp.parallelize(server_workloads.build_model(workload), workload.optimizer, workload.loss, strategy=strategy)

    def step(number):
        parts = [batch(number) for batch in batches]
        return run(torch.cat([one for one, _ in parts]), torch.cat([two for _, two in parts]))

    time_steps(
        folder, f"worker-{rank}", step, warm_up=server_workloads.WARM_UP[name], steps=server_workloads.STEPS[name]
    )
    run.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
