"""One rank of the program that a strategy makes: ``program.py STRATEGY WORKLOAD FOLDER``."""

import os
import sys

import given
import torch
from turn import measured

import counterpoint as cp


def main(strategy, name, folder):
    torch.set_num_threads(1)
    rank, workload = int(os.environ["RANK"]), given.workload(name)
    batches = [given.own_batches(name, worker) for worker in range(given.RANKS)]
    run = cp.parallelize(given.built(workload), workload.optimizer, workload.loss, strategy=strategy)

    def step(number):
        parts = [batch(number) for batch in batches]
        return run(torch.cat([one for one, _ in parts]), torch.cat([two for _, two in parts]))

    measured(folder, f"worker-{rank}", step, warm_up=given.WARM_UP[name], steps=given.STEPS[name])
    run.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
