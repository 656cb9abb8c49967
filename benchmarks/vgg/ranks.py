"""One rank of one round: trains and times every contender, one after the other, and prints the results as JSON."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import workload
from torch import nn
from torch.nn.functional import cross_entropy

import counterpoint as cp
from counterpoint.launchers.environment import detect

WARM_UP, ALONE = 3, 5


class DDP:
    """torch's DistributedDataParallel on gloo, as its documentation recommends."""

    def __init__(self, side):
        self.model = nn.parallel.DistributedDataParallel(workload.build_vgg())
        self.optimizer = side.optimizer(self.model.parameters())

    def __call__(self, inputs, targets):
        count = len(inputs) // dist.get_world_size()
        own = slice(dist.get_rank() * count, (dist.get_rank() + 1) * count)
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model(inputs[own]), targets[own])
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def flush(self):
        """Do nothing: no batch is in flight."""

    def close(self):
        """Do nothing: the process group is shared by all contenders."""


def make_step(side, number):
    """Return the step function of a contender; each uses a separate port."""
    if not side.strategy:
        return DDP(side)
    found = detect()
    return cp.parallelize(
        workload.build_vgg(),
        side.optimizer,
        cross_entropy,
        strategy=side.strategy,
        num_microbatches=side.num_microbatches,
        environment=replace(found, master_port=found.master_port + 1 + number),
    )


def sent_bytes():
    """Return the bytes sent by this host's interface."""
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "eth0":
            return int(figures.split()[8])
    raise RuntimeError("this host has no eth0; run this script in benchmarks.lab")


def time_batches(step, batches):
    """Return the seconds until the last rank has finished all batches, and the bytes sent by this host."""
    sent = sent_bytes()
    dist.barrier()  # start after all ranks have read their counters
    began = time.perf_counter()
    for batch in batches:
        step(*batch)
    step.flush()
    dist.barrier()
    seconds, now = time.perf_counter() - began, sent_bytes()
    dist.barrier()  # continue after all ranks have read their counters
    return seconds, now - sent


def train_until_accurate(step, train, held_out, max_epochs):
    """Return the seconds of each epoch until the target accuracy, and the accuracy after each.

    Gathering weights and evaluation between epochs are not timed.
    """
    seconds, found = [], []
    for _, epoch in zip(range(max_epochs), workload.epochs(train), strict=False):
        seconds.append(time_batches(step, epoch)[0])
        found.append(workload.accuracy(step.export_weights(), held_out))
        if found[-1] >= workload.TARGET_ACCURACY:
            break
    return {"epochs": seconds, "accuracy": found}


def time_single_rank(batch):
    """Return the seconds of forward and backward of the whole batch while all other ranks do the same."""
    model, found = workload.build_vgg(), []
    for _ in range(ALONE):
        dist.barrier()
        began = time.perf_counter()
        cross_entropy(model(batch[0]), batch[1]).backward()
        found.append(time.perf_counter() - began)
    return found


def main(number, max_epochs):
    """Run one rank of a round; each round starts with another contender."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train, held_out = workload.load_data()
    batches = [batch for _, epoch in zip(range(5), workload.epochs(train, seed=1), strict=False) for batch in epoch]
    found = {"alone": time_single_rank(batches[0]), "sides": {}}
    names = list(workload.CONTENDERS)
    for name in names[number % len(names) :] + names[: number % len(names)]:
        side = workload.CONTENDERS[name]
        step = make_step(side, names.index(name))
        seen = train_until_accurate(step, train, held_out, max_epochs) if side.trains else {}
        if not seen:
            time_batches(step, batches[:WARM_UP])
        seconds, sent = time_batches(step, batches[: workload.STEPS])
        step.close()
        found["sides"][name] = {**seen, "seconds": seconds, "sent": sent}
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
