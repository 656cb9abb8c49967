"""Train on the ranks of a launcher; one of them has a fault somewhere: ``fault_job.py LOOP STRATEGY PLACE FAULT``."""

import ctypes
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import Dataset

import counterpoint as cp

CULPRIT = 1
NTH = {"dataset": 20, "worker": 5}  # call at which the fault occurs; elsewhere the second
MEMORY_LIMIT_BYTES = 16 << 30


def fail():
    raise ValueError("no data here")


def wait_in_a_loop():
    while True:
        pass


def wait_in_native_code():
    ctypes.PyDLL(None).pause()  # with the interpreter's lock


def wait_for_a_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def allocate_too_much():
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    torch.zeros(MEMORY_LIMIT_BYTES)


FAULTS: dict[str, Callable[[], object]] = {
    **{name: partial(os.kill, os.getpid(), signal.Signals[name])
       for name in ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGBUS", "SIGSTOP")},
    "raise": fail,
    "_exit": partial(os._exit, 0),
    "exit": lambda: sys.exit(0),
    "loop": wait_in_a_loop,
    "wait": lambda: threading.Event().wait(600),
    "native": wait_in_native_code,
    "lock": wait_for_a_lock,
    "memory": allocate_too_much,
}  # fmt: skip


class Trap:
    """Counts calls of places, and has the fault of the command line at the n-th call of its place."""

    def __init__(self):
        self.num_calls = dict.fromkeys(NTH, 0)
        self.has_stepped = False  # before the first step the model is tried out, where an exception means other things

    def __call__(self, place):
        if int(os.environ["RANK"]) != CULPRIT or place != sys.argv[3]:
            return
        self.num_calls[place] = self.num_calls.get(place, 0) + 1
        if self.num_calls[place] == NTH.get(place, 2):
            FAULTS[sys.argv[4]]()


trap = Trap()


class Samples(Dataset[tuple[torch.Tensor, int]]):
    """Forty-eight samples of six values; a worker's process has another place than the rank's own."""

    def __len__(self):
        return 48

    def __getitem__(self, index):
        is_worker = "loader worker" in threading.main_thread().name or os.environ["RANK_PID"] != str(os.getpid())
        trap("worker" if is_worker else "dataset")
        random = torch.Generator().manual_seed(index)
        if sys.argv[4] == "nan" and index == 7:
            return torch.full((6,), float("nan")), 0
        target = 99 if sys.argv[4] == "target" and index == 7 else index % 3
        return torch.randn(6, generator=random), target


class Trapped(nn.Module):
    """Passes its input on, with the traps of forward and backward."""

    def forward(self, x):
        if trap.has_stepped:
            trap("forward")
        if x.requires_grad:
            x.register_hook(lambda grad: trap("backward"))
        return x


class AfterStep(cp.Callback):
    """Has the trap of a callback."""

    on_every_rank = True

    def on_step(self, event):
        trap.has_stepped = True
        trap("callback")


def fit(model, strategy):
    num_workers = 1 if sys.argv[3] == "worker" else 0
    with cp.Trainer(
        model, loss=F.cross_entropy, optimizer=partial(optim.SGD, lr=0.1), strategy=strategy, callbacks=[AfterStep()],
        progress="off",
    ) as trainer:  # fmt: skip
        trainer.fit(Samples(), batch_size=12, epochs=5, num_workers=num_workers)


def train_in_own_loop(model, strategy):
    inputs = torch.stack([Samples()[index][0] for index in range(12)])
    targets = torch.arange(12) % 3
    is_culprit = int(os.environ["RANK"]) == CULPRIT
    with cp.parallelize(model, partial(optim.SGD, lr=0.1), F.cross_entropy, strategy=strategy) as step:
        for number in range(6):
            if is_culprit and number == 3:
                match sys.argv[4]:
                    case "break":
                        break
                    case "return":
                        return
                    case "skip":
                        continue
                    case "export":
                        step.export_weights()
                    case _:
                        pass
            trap("between")
            step(inputs, targets)


if __name__ == "__main__":
    os.environ["RANK_PID"] = str(os.getpid())
    loop, strategy, place, _ = sys.argv[1:]
    if place == "start":
        trap(place)
        trap(place)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), Trapped(), nn.Tanh(), nn.Linear(8, 8), Trapped(), nn.Linear(8, 3))
    {"fit": fit, "loop": train_in_own_loop}[loop](layers, strategy)
