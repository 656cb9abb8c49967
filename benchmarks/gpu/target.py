"""The device that a part measures, and how: a GPU, or the stand-in device in a dry run with small sizes."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import torch

from counterpoint.device.accelerator import Accelerator
from counterpoint.device.cuda import CudaAccelerator

SPEED_REASON = "a dry run says nothing about speed"


@dataclass(frozen=True)
class Target:
    """Args:
    accelerator: that is measured.
    is_dry_run: whether it is the stand-in device: sizes are small, and nothing about speed is checked.
    context: starts processes of ranks and of cases.
    num_workers: processes that the survey's cases are divided among; 0 for this one.
    deadline_s: of the part, on the clock of ``time.monotonic``.
    """

    accelerator: Accelerator
    is_dry_run: bool
    context: Any = field(default_factory=lambda: multiprocessing.get_context("spawn"))
    num_workers: int = 0
    deadline_s: float = float("inf")

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    def seconds_left(self) -> float:
        return self.deadline_s - time.monotonic()

    def size(self, on_gpu: Any, in_dry_run: Any) -> Any:
        """Return the value for this kind of run."""
        return in_dry_run if self.is_dry_run else on_gpu

    def median_s(self, run: Callable[[], object], num_runs: int = 10) -> float:
        """Return the median time of a call, until its work on the device is done."""
        num_runs = min(num_runs, self.size(num_runs, 2))
        for _ in range(self.size(3, 1)):
            run()
        times = []
        for _ in range(num_runs):
            self.accelerator.synchronize()
            start = time.perf_counter()
            run()
            self.accelerator.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def facts(self) -> dict[str, Any]:
        """Return what identifies a result: the card, versions, the date."""
        nccl = torch.cuda.nccl.version() if self.device.type == "cuda" else None
        return {
            "card": self.accelerator.name,
            "card_bytes": self.accelerator.memory_stats().total_bytes,
            "driver": driver_version() if self.device.type == "cuda" else None,
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "nccl": None if nccl is None else ".".join(map(str, nccl)),
            "host_cores": len(os.sched_getaffinity(0)),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "is_dry_run": self.is_dry_run,
        }


def driver_version() -> str | None:
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:  # noqa: PTH123 - a file of the kernel
            return file.readline().strip()
    except OSError:
        return None


def make_target(*, is_dry_run: bool, **options: Any) -> Target:
    """Return the stand-in device for a dry run, else the first GPU."""
    if is_dry_run:
        from counterpoint.testing.stand_in_accelerator import StandInAccelerator

        return Target(StandInAccelerator(), is_dry_run=True, **options)
    return Target(CudaAccelerator(0), is_dry_run=False, **options)
