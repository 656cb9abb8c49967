"""One rank: alternating DDP steps on both backends; rank 0 prints its results as JSON."""

import ctypes
import json
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from counterpoint.compat.torch_backend import register
from counterpoint.jobs.models import mlp

BATCH = 32
BACKENDS = ("gloo", "counterpoint")
SETTINGS = {"default": {}, "bucket views": {"gradient_as_bucket_view": True}}
STEPS, WARM_UP = 4, 3


def keep_freed_memory():
    """Configure glibc to retain freed memory, for both backends.

    Otherwise it depends on the heap layout whether large gradients are returned to the kernel, and allocating them
    again takes a tenth of a step.
    """
    trim_threshold, mmap_max = -1, -4
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(mmap_max, 0)  # a higher threshold would cause three times as many page faults


class DDPRun:
    """One model trained on one backend."""

    def __init__(self, group, settings, widths):
        torch.manual_seed(0)
        self.model = nn.parallel.DistributedDataParallel(mlp(*widths), process_group=group, **settings)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        draw = torch.Generator().manual_seed(dist.get_rank())
        self.inputs = torch.randn(BATCH, widths[0], generator=draw)
        self.targets = torch.randint(0, widths[-1], (BATCH,), generator=draw)
        self.losses = []

    def step(self):
        """Run a step and return its seconds."""
        began = time.perf_counter()
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(self.inputs), self.targets)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        return time.perf_counter() - began


def compare(groups, settings, rounds, widths):
    """Return the median seconds per step on each backend by round, and the difference of the two models."""
    runs = {name: DDPRun(groups[name], settings, widths) for name in BACKENDS}
    for run in runs.values():
        for _ in range(WARM_UP):
            run.step()
    seconds = {name: [] for name in BACKENDS}
    for _ in range(rounds):
        for name, run in runs.items():
            dist.barrier()
            seconds[name].append(statistics.median(run.step() for _ in range(STEPS)))
    mine, theirs = (list(runs[name].model.parameters()) for name in BACKENDS)
    apart = max(float((a - b).detach().abs().max() / b.detach().abs().max()) for a, b in zip(mine, theirs, strict=True))
    losses = (torch.tensor(run.losses) for run in runs.values())
    return {"seconds": seconds, "apart": apart, "losses_apart": float((next(losses) - next(losses)).abs().max())}


def main(rounds, widths):
    """Run one rank."""
    keep_freed_memory()
    torch.set_num_threads(1)
    register()
    dist.init_process_group("gloo")
    groups = {"gloo": None, "counterpoint": dist.new_group(backend="counterpoint")}
    found = {name: compare(groups, settings, rounds, widths) for name, settings in SETTINGS.items()}
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), list(map(int, sys.argv[2:])))
