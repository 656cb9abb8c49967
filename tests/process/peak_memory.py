"""Launched processes that train a model of large layers: how much memory they take, or with no more than a limit."""

import gc
import os
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import counterpoint as cp
from counterpoint.launchers.environment import detect
from counterpoint.planner.prepare import storage_sizes
from counterpoint.runtime.malloc import heap_of_process
from counterpoint.simulator.memory import peak_memory_bytes
from counterpoint.training.initialization.materialize import materialize

WIDTH, NUM_SAMPLES, NUM_STEPS = 1024, 8, 4
LAYER_BYTES = 4 * WIDTH * (WIDTH + 1)
STATES = 4  # weights, gradients and Adam's two moments
BESIDES_BYTES = 112 << 20  # of a process that has imported torch and trains a small model
SAMPLING_S = 0.01
SMAPS = Path("/proc/self/smaps_rollup")
CGROUPS = {"/sys/fs/cgroup/memory": "memory.limit_in_bytes", "/sys/fs/cgroup": "memory.max"}  # of version 1, and 2


def proportional_bytes():
    """Return the bytes that this process has; of what others have, too, its part."""
    kib = next(int(line.split()[1]) for line in SMAPS.read_text().splitlines() if line.startswith("Pss:"))
    return kib * 1024


@contextmanager
def sampled():
    """Yield a list of what this process has and when, which grows by a sample every few milliseconds."""
    samples, is_done = [(time.monotonic(), proportional_bytes())], threading.Event()

    def sample():
        while not is_done.wait(SAMPLING_S):
            samples.append((time.monotonic(), proportional_bytes()))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        is_done.set()
        thread.join()


def joint_growth(ranks):
    """Return by how much processes have grown together at their peak, from the samples of each.

    What one of them has of memory that they share depends on how many have read it by then; all together have it once.
    """
    now = [samples[0][1] for samples in ranks]
    start, most = sum(now), 0
    for _, rank, found in sorted((when, rank, found) for rank, samples in enumerate(ranks) for when, found in samples):
        now[rank] = found
        most = max(most, sum(now) - start)
    return most


def meta_model(num_layers, width=WIDTH):
    with torch.device("meta"):
        return nn.Sequential(*(layer for _ in range(num_layers) for layer in (nn.Linear(width, width), nn.Tanh())))


def make_batch(model):
    draw, weight = torch.Generator().manual_seed(0), model[0].weight
    return [torch.randn(NUM_SAMPLES, len(weight), generator=draw, dtype=weight.dtype) for _ in range(2)]


def train(plan, model, read=proportional_bytes, **options):
    """Return the losses, what ``read`` returned before the last step, and the bytes predicted for each rank.

    After it, ranks that have closed their part leave the memory that they shared to the others.
    """
    batch = make_batch(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step = cp.parallelize(model, optimizer, F.mse_loss, strategy=plan, retain_freed_memory=False, **options)
    with step:
        losses = [float(step(*batch)) for _ in range(NUM_STEPS - 1)]
        found = read()
        losses.append(float(step(*batch)))
        compiled = step.local_ranks.compiled
        assert compiled is not None, "steps have run"
        sizes = storage_sizes(compiled.model, NUM_SAMPLES // compiled.plan.global_num_microbatches)
        return losses, found, peak_memory_bytes(compiled.step_variants[-1].full_program, sizes)


def own_rank():
    environment = detect()
    assert environment is not None, "a launcher has started the ranks"
    return environment.rank


def measure(plan, num_layers, options):
    """Return samples of what this process has, and what was predicted for it beyond the first one."""
    train(plan, meta_model(4, 64), **options)  # what a process has once for all trainings
    gc.collect()
    if (heap := heap_of_process()) is not None:
        heap.retain()  # which trims the heap
        heap.restore()
    with sampled() as samples:
        _, found, predicted = train(plan, meta_model(num_layers), read=lambda: list(samples), **options)
    return [found, predicted[own_rank()]]


@contextmanager
def memory_cgroups(count, num_bytes):
    """Yield folders of cgroups that let their processes have so much memory; none if this process cannot make any."""
    made = []
    try:
        for root, limit in CGROUPS.items():
            with suppress(OSError):
                for number in range(count):
                    folder = Path(root, f"counterpoint-test-{os.getpid()}-{number}")
                    folder.mkdir()
                    made.append(folder)
                    (folder / limit).write_text(str(num_bytes))
                break
            remove(made)
        yield [str(folder) for folder in made]
    finally:
        remove(made)


def remove(folders):
    while folders:
        folders.pop().rmdir()


def train_within(folders, plan, num_layers):
    """Return the losses of a plan; memory that this process gets from now on counts in the cgroup of its rank."""
    Path(folders[own_rank()], "cgroup.procs").write_text(str(os.getpid()))
    return train(plan, meta_model(num_layers))[0]


def train_plainly(folders, num_layers):
    """Return the losses of a plain loop, which may be in a cgroup."""
    for folder in folders:
        Path(folder, "cgroup.procs").write_text(str(os.getpid()))
    return plain_losses(meta_model(num_layers))


def plain_losses(model):
    materialize(model)
    optimizer, (x, y) = torch.optim.Adam(model.parameters(), lr=1e-3), make_batch(model)
    losses = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_in_double(plans):
    """Return the losses of plans with so many microbatches, of a small model whose gradient has several pages."""
    return [train(plan, small_double(), num_microbatches=count)[0] for plan, count in plans]


def small_double():
    return meta_model(4, 64).double()
