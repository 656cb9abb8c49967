"""The host as a device: every operation is done when it returns, so that streams and events have nothing to order."""

from __future__ import annotations

import os
import resource
import time
from contextlib import AbstractContextManager, nullcontext
from typing import final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from counterpoint.device.accelerator import Accelerator, Event, MemoryStats, Stream, Values


@final
class HostEvent:
    """The time of a point in the host's work."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def record(self, stream: object) -> None:
        """Set it to now."""
        del stream
        self.time_s = time.perf_counter()

    def wait(self, stream: object) -> None:
        """Do nothing: what was before it is done."""
        return

    def query(self) -> bool:
        """Return True."""
        return True

    def synchronize(self) -> None:
        """Do nothing."""
        return

    def elapsed_time(self, end_event: HostEvent) -> float:
        """Return the milliseconds from here to a later event."""
        return (end_event.time_s - self.time_s) * 1e3


@final
class HostStream:
    """The host's work, in the order of the program."""

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        """Record an event, by default a new one, and return it."""
        recorded = HostEvent() if event is None else event
        recorded.record(self)
        return recorded

    def wait_event(self, event: object) -> None:
        """Do nothing."""
        return

    def wait_stream(self, stream: object) -> None:
        """Do nothing."""
        return

    def query(self) -> bool:
        """Return True."""
        return True

    def synchronize(self) -> None:
        """Do nothing."""
        return


@final
class HostAccelerator(Accelerator):
    """The host.

    Args:
        device: ``cpu``; or ``meta``, whose tensors have no values, where nothing is computed.

    Example:
        >>> host = HostAccelerator()
        >>> host.to_device([torch.ones(2), "text"])
        [tensor([1., 1.]), 'text']
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = torch.device("cpu") if device is None else device
        self.is_host = True
        self.name = "cpu"

    def empty(self, *size: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor."""
        return torch.empty(size, dtype=dtype)

    empty_pinned = empty

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in page-locked memory, which makes no difference here."""
        return tensor.is_pinned()

    def new_stream(self) -> Stream:
        """Return a stream."""
        return HostStream()

    current_stream = new_stream

    def stream(self, stream: Stream) -> AbstractContextManager[object]:
        """Return a context that does nothing."""
        return nullcontext(stream)

    def new_event(self, *, enable_timing: bool = False) -> Event:
        """Return an event, which has a time in either case."""
        del enable_timing
        return HostEvent()

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """Do nothing: work on the tensor is done."""
        return

    def synchronize(self) -> None:
        """Do nothing."""
        return

    def manual_seed(self, seed: int) -> None:
        """Seed torch's default generator."""
        torch.default_generator.manual_seed(seed)

    def get_rng_state(self) -> Tensor:
        """Return the state of torch's default generator."""
        return torch.default_generator.get_state()

    def set_rng_state(self, state: Tensor) -> None:
        """Restore that state."""
        torch.default_generator.set_state(state)

    def preserve_rng(self, *, enabled: bool = True) -> AbstractContextManager[object]:
        """Return a context that restores the state of torch's default generator at its end."""
        return torch.random.fork_rng(devices=[], enabled=enabled)

    def memory_stats(self) -> MemoryStats:
        """Return the memory of this process, of which the system tells the peak only, and of the host."""
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        free_bytes, total_bytes = (os.sysconf(name) * page_bytes for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"))
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        return MemoryStats(peak_bytes, peak_bytes, peak_bytes, free_bytes, total_bytes)

    def reset_peak_memory_stats(self) -> None:
        """Do nothing: the system keeps the peak of a process."""
        return

    def calling_thread(self) -> AbstractContextManager[object]:
        """Return a context that does nothing: backward runs there anyway."""
        return nullcontext()

    def to_device(self, values: Values) -> Values:
        """Return the values as they are; on ``meta``, their shapes."""
        return values if self.device.type == "cpu" else tree_map_only(Tensor, _drop_values, values)


def _drop_values(tensor: Tensor) -> Tensor:
    return tensor.to("meta")
