"""Measured combinations: three models, the plans of each, and the simulated networks."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim

from counterpoint.jobs.registry import find_job
from counterpoint.plan.plan import Plan
from counterpoint.training.plan_resolution import DEFAULT_PASSES

MOST_SAMPLES = 256
"""Maximum number of samples; batches are taken from them repeatedly."""


@dataclass(frozen=True)
class PlannerWorkload:
    """One model and its training options.

    Args:
        build: returns the untrained model, always bit-identical.
        samples: inputs and targets from which batches are taken.
        loss: mean over the samples.
        optimizer: factory from parameters.
        batch: samples of a global batch.
        reference: samples per step of the reference loop, which measures the current speed of the machine.
    """

    build: Callable[[], nn.Module]
    samples: tuple[torch.Tensor, torch.Tensor]
    loss: Callable[[Any, Any], torch.Tensor]
    optimizer: Callable[[Any], optim.Optimizer]
    batch: int
    reference: int

    def batches(self, size):
        """Yield batches of this size forever."""
        inputs, targets = self.samples
        starts = range(0, len(inputs) - size + 1, size)
        while True:
            for start in starts:
                yield inputs[start : start + size], targets[start : start + size]


def _load_workloads(name):
    """Return the module of another benchmark, whose folder is not a Python package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "data-parallel" / "workloads.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _data_parallel_workload(letter, reference):
    found = _load_workloads("data_parallel_workloads")
    workload = found.WORKLOADS[letter]
    samples = workload.batch(torch.Generator().manual_seed(1), MOST_SAMPLES)
    return PlannerWorkload(
        lambda: found.build_model(workload), samples, workload.loss, workload.optimizer, workload.size, reference
    )


def _digits_workload():
    job = find_job("digits")
    samples = job.build_data()[0].fetch(range(MOST_SAMPLES))
    return PlannerWorkload(lambda: job.build_model(0), samples, job.loss, job.optimizer, job.batch_size, 64)


WORKLOADS = {
    "A": lambda: _data_parallel_workload("A", 64),
    "B": lambda: _data_parallel_workload("B", 4),
    "digits": _digits_workload,
}


@dataclass(frozen=True, order=True)
class Cell:
    """One plan for one model on one host or on several.

    Args:
        letter: of the model.
        strategy: as a user writes it.
        micros: microbatches.
    """

    letter: str
    strategy: str
    micros: int = 1

    @property
    def plan(self):
        """The plan that a user gets, before replicas share parameters."""
        return replace(Plan.parse(self.strategy, num_microbatches=self.micros), passes=DEFAULT_PASSES)

    @property
    def ranks(self):
        """The number of ranks."""
        return self.plan.num_ranks


PLANS = (
    ("solo", 1),
    ("data(2)", 1),
    ("zero(2, level=1)", 1),
    ("zero(2, level=3)", 1),
    ("pipeline(2, schedule=gpipe)", 4),
    ("pipeline(2)", 4),
    ("tensor(2)", 1),
    ("pipeline(3)", 4),
    ("server(2, servers=1)", 1),
    ("data(4)", 1),
    ("zero(4, level=2)", 1),
    ("pipeline(2) * data(2)", 2),
)
CELLS = [Cell(letter, strategy, micros) for letter in WORKLOADS for strategy, micros in PLANS]

LAB_RATES = (None, "1gbit", "100mbit")
PLANS_BETWEEN = {
    2: (
        ("data(2)", 1),
        ("zero(2, level=1)", 1),
        ("pipeline(2)", 4),
        ("pipeline(2, schedule=gpipe)", 4),
        ("tensor(2)", 1),
    ),
    4: (("data(4)", 1), ("zero(4, level=1)", 1), ("pipeline(4)", 4), ("pipeline(2) * data(2)", 2)),
}
"""By the number of hosts, each with one rank: data parallelism, the reference, and other plans."""
