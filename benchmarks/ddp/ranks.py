"""One rank of the measurement: steps of DDP on either backend in turns; rank 0 prints what it has seen as JSON."""

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

WIDTHS, BATCH = (1024, 4096, 4096, 1024, 10), 32
BACKENDS = ("gloo", "counterpoint")
SETTINGS = {"default": {}, "bucket views": {"gradient_as_bucket_view": True}}
STEPS, WARM_UP = 4, 3


def keep_freed_memory():
    """Let glibc keep what is freed, for both sides alike.

    Otherwise it hands large gradients back to the kernel or not as the layout of the heap happens to be, and getting
    them again costs a tenth of a step: luck that would decide the comparison.
    """
    trim_threshold, mmap_max = -1, -4
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(mmap_max, 0)  # a higher threshold leaves three times as many page faults


class DDPRun:
    """One model that is trained on one backend."""

    def __init__(self, group, settings):
        torch.manual_seed(0)
        self.model = nn.parallel.DistributedDataParallel(mlp(*WIDTHS), process_group=group, **settings)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        draw = torch.Generator().manual_seed(dist.get_rank())
        self.inputs = torch.randn(BATCH, WIDTHS[0], generator=draw)
        self.targets = torch.randint(0, WIDTHS[-1], (BATCH,), generator=draw)
        self.losses = []

    def step(self):
        """Return the seconds of a step."""
        began = time.perf_counter()
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(self.inputs), self.targets)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        return time.perf_counter() - began


def compare(groups, settings, rounds):
    """Return the median seconds of a step on each backend in each round, and how far the two models are apart."""
    runs = {name: DDPRun(groups[name], settings) for name in BACKENDS}
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


def main(rounds):
    """Be one rank."""
    keep_freed_memory()
    torch.set_num_threads(1)
    register()
    dist.init_process_group("gloo")
    groups = {"gloo": None, "counterpoint": dist.new_group(backend="counterpoint")}
    found = {name: compare(groups, settings, rounds) for name, settings in SETTINGS.items()}
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
