"""What training asks of a device, in the words of ``torch.cuda``; implemented once for each kind of device.

An accelerator is passed to what needs it, so that tests can pass another one. Work on a device is launched by the host
and done later, in the order of its stream. So these methods do not wait for the device, unless they say so: every wait
leaves the device without work.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

Values = TypeVar("Values")


class Event(Protocol):
    """A point in the work of a stream, as ``torch.cuda.Event``.

    The stream is always named: by default torch takes one of the thread's current device, which may be another GPU.
    """

    def record(self, stream: Any) -> None:  # noqa: ANN401 - a Stream of the same device
        """Set it to what a stream has been given so far."""
        ...

    def wait(self, stream: Any) -> None:  # noqa: ANN401 - as above
        """Let a stream wait for it."""
        ...

    def query(self) -> bool:
        """Return whether the device has reached it."""
        ...

    def synchronize(self) -> None:
        """Wait on the host until the device has reached it."""
        ...

    def elapsed_time(self, end_event: Any) -> float:  # noqa: ANN401 - an Event of the same device
        """Return the milliseconds from here to a later event; both must have been reached."""
        ...


class Stream(Protocol):
    """Work that a device does in order, as ``torch.cuda.Stream``."""

    def record_event(self, event: Any = None) -> Any:  # noqa: ANN401 - an Event of the same device
        """Record an event, by default a new one, and return it."""
        ...

    def wait_event(self, event: Any) -> None:  # noqa: ANN401 - as above
        """Let this stream wait for an event."""
        ...

    def wait_stream(self, stream: Any) -> None:  # noqa: ANN401 - a Stream of the same device
        """Let this stream wait for all that another one has been given so far."""
        ...

    def query(self) -> bool:
        """Return whether all its work is done."""
        ...

    def synchronize(self) -> None:
        """Wait on the host until all its work is done."""
        ...


class MemoryStats(NamedTuple):
    """Memory of a device in bytes.

    Args:
        allocated_bytes: of tensors of this process.
        peak_allocated_bytes: the most that these have been.
        reserved_bytes: what torch's allocator has taken from the device.
        free_bytes: what the device has left for all processes.
        total_bytes: what it has.
    """

    allocated_bytes: int
    peak_allocated_bytes: int
    reserved_bytes: int
    free_bytes: int
    total_bytes: int


class DeviceIdentity(NamedTuple):
    """Which device it is, for a comparison of what ranks compute on.

    Args:
        name: of the hardware.
        total_bytes: its memory.
        unique_id: the same in all processes that use the device, and no other device's.
        driver: its version; empty if it does not say.
        library: that moves tensors between such devices, with its version; empty for none.
    """

    name: str
    total_bytes: int
    unique_id: str
    driver: str
    library: str


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A copy of a tensor in host memory that may still be arriving.

    Args:
        tensor: the copy.
        arrival: when it has arrived; None if it has.
    """

    tensor: Tensor
    arrival: Event | None = None

    def wait(self) -> Tensor:
        """Return the copy; wait on the host until it has arrived."""
        if self.arrival is not None and not self.arrival.query():
            self.arrival.synchronize()
        return self.tensor


class Accelerator(ABC):
    """One device of this process.

    Attributes:
        device: it, with its index; ``cpu`` for the host.
        is_host: whether its tensors are in host memory, where native code and other processes can read them.
        name: of the hardware.
    """

    device: torch.device
    is_host: bool
    name: str

    @abstractmethod
    def empty(self, *size: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor on the device."""

    @abstractmethod
    def empty_pinned(self, *size: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor in host memory from and to which the device copies by itself."""

    @abstractmethod
    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether the device copies by itself from and to the memory of a tensor of the host."""

    @abstractmethod
    def new_stream(self) -> Stream:
        """Return a new stream."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """Return the stream of this thread's work."""

    @abstractmethod
    def stream(self, stream: Stream) -> AbstractContextManager[object]:
        """Return a context in which this thread's work is done on a stream; its device is the current one there."""

    @abstractmethod
    def new_event(self, *, enable_timing: bool = False) -> Event:
        """Return a new event."""

    @abstractmethod
    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """Keep the memory of a tensor, once it is dropped, until a stream has done its work so far."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait on the host for all work on the device."""

    @abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed the random numbers that the device draws itself."""

    @abstractmethod
    def get_rng_state(self) -> Tensor:
        """Return the state of these random numbers, in host memory."""

    @abstractmethod
    def set_rng_state(self, state: Tensor) -> None:
        """Restore that state."""

    @abstractmethod
    def preserve_rng(self, *, enabled: bool = True) -> AbstractContextManager[object]:
        """Return a context that restores the random state of the host and of the device at its end."""

    @abstractmethod
    def memory_stats(self) -> MemoryStats:
        """Return how much memory is used."""

    def identity(self) -> DeviceIdentity | None:
        """Return which device it is; None if it is the host, or does not say."""
        return None

    @abstractmethod
    def reset_peak_memory_stats(self) -> None:
        """Let ``peak_allocated_bytes`` start again from what is allocated now."""

    @abstractmethod
    def calling_thread(self) -> AbstractContextManager[object]:
        """Return a context in which backward runs in the thread that calls it.

        Autograd has one thread for each device but the host's. It would run the backwards of a process's ranks one
        after the other, and a backward that waits for another rank would wait forever.
        """

    @abstractmethod
    def to_device(self, values: Values) -> Values:
        """Return any nest of values with all its tensors on the device."""

    def as_current(self) -> AbstractContextManager[object]:
        """Return a context in which this is the thread's current device: that of tensors on just ``"cuda"``."""
        return self.stream(self.current_stream())

    def start_copy_to_host(self, tensor: Tensor) -> HostCopy:
        """Start to copy a tensor to host memory."""
        if self.is_host:
            return HostCopy(tensor.detach().clone())
        pinned = self.empty_pinned(*tensor.shape, dtype=tensor.dtype)
        pinned.copy_(tensor.detach(), non_blocking=True)
        arrival = self.new_event()
        arrival.record(self.current_stream())
        return HostCopy(pinned, arrival)


def copy_to_device(accelerator: Accelerator, values: Values) -> Values:
    """Return values with their tensors on the device; those of the host are copied through pinned memory.

    From other memory the host would wait for all earlier work of the stream before it copies.
    """

    def copy(leaf: Any) -> Any:  # noqa: ANN401 - any leaf
        if not isinstance(leaf, Tensor) or leaf.device == accelerator.device:
            return leaf
        if leaf.device.type == "cpu" and leaf.layout == torch.strided and not leaf.requires_grad:
            pinned = accelerator.empty_pinned(*leaf.shape, dtype=leaf.dtype)
            leaf = pinned.copy_(leaf)
        return leaf.to(accelerator.device, non_blocking=True)

    moved: Values = copy(values) if isinstance(values, Tensor) else tree_map(copy, values)
    return moved
