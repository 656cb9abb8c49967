"""Models that are trained on Spark in tests; executors import them, so this imports nothing else."""

import os
import signal
from pathlib import Path

import torch
from torch import nn


class Net(nn.Module):
    """Small, with a tied weight, a frozen one, a buffer, and sizes that no number of slices divides."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.again = nn.Linear(5, 5)
        self.tied = nn.Linear(5, 5)
        self.tied.weight = self.again.weight
        self.last = nn.Linear(5, 1)
        self.frozen = nn.Parameter(torch.full((5,), 0.5), requires_grad=False)
        self.register_buffer("shift", torch.full((5,), 0.1))

    def forward(self, x):
        hidden = torch.tanh(self.first(x)) * self.frozen + self.get_buffer("shift")
        return self.last(self.tied(torch.tanh(self.again(hidden))))


class KillsExecutor(Net):
    """Kills the executor that it runs on in the third forward of a worker, in mid-job, once for all."""

    def __init__(self, once):
        super().__init__()
        self.once, self.calls = str(once), 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 3 and not Path(self.once).exists():
            Path(self.once).touch()
            os.kill(executor_pid(), signal.SIGKILL)
        return super().forward(x)


class ExitsWorker(Net):
    """Ends the worker that it runs on, every time."""

    def forward(self, x):
        os._exit(1)


class Layers(nn.Sequential):
    """Two layers for digits."""

    def __init__(self, width: int):
        super().__init__(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


class Sum(nn.Module):
    """Of two inputs: a number for each sample."""

    def forward(self, x, y):
        return x.sum(1) + y


def executor_pid():
    """The Java process above this Python worker and the daemon that has forked it."""
    daemon = Path(f"/proc/{os.getppid()}/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) for line in daemon.splitlines() if line.startswith("PPid"))
