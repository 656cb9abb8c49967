"""The accelerator of the stand-in device, with the streams, events and pinned memory that torch has not for it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, final

import torch
from torch import Tensor

from counterpoint.device.accelerator import (
    Accelerator,
    DeviceIdentity,
    Event,
    MemoryStats,
    Stream,
    Values,
    copy_to_device,
)
from counterpoint.testing.stand_in_device import DEVICE, NAME, StandInTensor
from counterpoint.testing.stand_in_streams import Clock


@final
class StandInEvent:
    """What a stream of the stand-in device had been given at some point, and when it will have done that.

    Args:
        enable_timing: whether its time may be asked for.
    """

    def __init__(self, *, enable_timing: bool = False) -> None:
        self.clock: Clock = {}
        self.num_launches = 0
        self.time_ms = 0.0
        self.enable_timing = enable_timing

    def record(self, stream: StandInStream) -> None:
        """Set it to what a stream has been given so far."""
        self.num_launches = DEVICE.num_launches
        self.clock, self.time_ms = DEVICE.order.snapshot(stream.number), DEVICE.order.time_ms(stream.number)

    def wait(self, stream: StandInStream) -> None:
        """Let a stream wait for it."""
        DEVICE.order.wait(stream.number, self.clock, self.time_ms)

    def query(self) -> bool:
        """Return whether the host has waited for it; the device may be as late as it likes, if it has no limit."""
        if DEVICE.has_passed(self.num_launches):
            DEVICE.order.wait_on_host(self.clock, self.time_ms)
        return self.is_reached()

    def is_reached(self) -> bool:
        """Return whether the host has waited for it."""
        return all(DEVICE.order.host_clock.get(stream, 0) >= number for stream, number in self.clock.items())

    def synchronize(self) -> None:
        """Let the host wait for it."""
        DEVICE.wait_on_host("event", self.clock, self.time_ms)

    def elapsed_time(self, end_event: StandInEvent) -> float:
        """Return the milliseconds from here to a later event.

        Raises:
            ValueError: an event was made without timing.
            RuntimeError: the device may not have reached one, as the host has not waited for it.
        """
        if not (self.enable_timing and end_event.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not (self.is_reached() and end_event.is_reached()):
            raise RuntimeError("device not ready: the host has not waited for the events whose times it reads")
        return end_event.time_ms - self.time_ms


@final
class StandInStream:
    """A stream of the stand-in device.

    Args:
        number: of the stream.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def record_event(self, event: StandInEvent | None = None) -> StandInEvent:
        """Record an event, by default a new one, and return it."""
        recorded = StandInEvent() if event is None else event
        recorded.record(self)
        return recorded

    def wait_event(self, event: StandInEvent) -> None:
        """Let this stream wait for an event."""
        event.wait(self)

    def wait_stream(self, stream: StandInStream) -> None:
        """Let this stream wait for all that another one has been given so far."""
        self.wait_event(stream.record_event())

    def query(self) -> bool:
        """Return whether the host has waited for all its work."""
        return self.record_event().query()

    def synchronize(self) -> None:
        """Let the host wait for all its work."""
        DEVICE.wait_on_host("stream", DEVICE.order.snapshot(self.number))


@final
class StandInAccelerator(Accelerator):
    """The stand-in device."""

    def __init__(self, device: torch.device | None = None) -> None:
        del device
        self.device = DEVICE.device
        self.is_host = False
        self.name = NAME

    def empty(self, *size: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor on the device."""
        return torch.empty(size, dtype=dtype, device=self.device)

    def empty_pinned(self, *size: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor in host memory that asynchronous copies may use."""
        return DEVICE.empty_pinned(size, dtype)

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether asynchronous copies may use the memory of a tensor of the host."""
        return DEVICE.is_pinned(tensor)

    def new_stream(self) -> Stream:
        """Return a new stream."""
        stream = StandInStream(DEVICE.order.new_stream())
        weakref.finalize(stream, DEVICE.order.release_stream, stream.number)
        return stream

    def current_stream(self) -> Stream:
        """Return the stream of this thread's work."""
        return StandInStream(DEVICE.order.current)

    def stream(self, stream: Any) -> AbstractContextManager[object]:  # noqa: ANN401 - a StandInStream
        """Return a context in which this thread's work is done on a stream."""
        return DEVICE.use(stream.number)

    def new_event(self, *, enable_timing: bool = False) -> Event:
        """Return a new event."""
        return StandInEvent(enable_timing=enable_timing)

    def record_stream(self, tensor: Tensor, stream: Any) -> None:  # noqa: ANN401 - as above
        """Keep the memory of a tensor, once it is dropped, until a stream has done its work so far."""
        assert isinstance(tensor, StandInTensor), "on this device"
        assert tensor.allocation is not None, "dense"
        tensor.allocation.accesses.recorded_streams.add(stream.number)

    def synchronize(self) -> None:
        """Let the host wait for all streams."""
        DEVICE.synchronize()

    def manual_seed(self, seed: int) -> None:
        """Seed the device's own random numbers."""
        DEVICE.manual_seed_all(seed)

    def get_rng_state(self) -> Tensor:
        """Return the state of the device's own random numbers."""
        return DEVICE.get_rng_state()

    def set_rng_state(self, state: Tensor) -> None:
        """Restore that state."""
        DEVICE.set_rng_state(state)

    @contextmanager
    def preserve_rng(self, *, enabled: bool = True) -> Iterator[None]:
        """Restore the random state of the host and of the device at the end."""
        with ExitStack() as contexts:
            if enabled:
                contexts.enter_context(torch.random.fork_rng(devices=[]))
                contexts.callback(self.set_rng_state, self.get_rng_state())
            yield

    def memory_stats(self) -> MemoryStats:
        """Return how much memory is used."""
        used_bytes = DEVICE.allocated_bytes
        total_bytes = DEVICE.total_bytes
        return MemoryStats(used_bytes, DEVICE.peak_bytes, used_bytes, total_bytes - used_bytes, total_bytes)

    def identity(self) -> DeviceIdentity | None:
        """Return what a test has said."""
        identity: DeviceIdentity | None = DEVICE.identity
        return identity

    def reset_peak_memory_stats(self) -> None:
        """Let ``peak_allocated_bytes`` start again from what is allocated now."""
        DEVICE.peak_bytes = DEVICE.allocated_bytes

    def calling_thread(self) -> AbstractContextManager[object]:
        """Return a context in which backward runs in the thread that calls it."""
        return torch.autograd.set_multithreading_enabled(False)

    def to_device(self, values: Values) -> Values:
        """Return any nest of values with all its tensors on the device."""
        return copy_to_device(self, values)


DEVICE.make_accelerator = StandInAccelerator
