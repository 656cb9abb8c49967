"""Copy batches to a device on a stream of their own, while its computing stream runs the step before.

::

    copies    | batch 2, end ---.    batch 3, end ---.
    computing | ... step 1 .... '-> step 2 ......... '-> step 3
    host      | launches step 2   launches step 3        and waits for neither copy

A copy waits for nothing: it reads host memory, and writes memory that the copy stream has allocated. The computing
stream waits for its end before it reads the result, and is recorded as a user of that memory: without that, torch's
allocator would give it to the next batch while the step still reads it. Host memory that was pinned for a copy is kept
by torch's allocator until the copy has ended; pinned memory of the caller is the caller's again after
:meth:`CopyStream.wait_for_sources`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from counterpoint.device.accelerator import Accelerator, Event
from counterpoint.device.event_clock import DeviceSpan


@dataclass(slots=True)
class StartedCopies:
    """Copies of tensors to a device that may not have ended.

    Args:
        end: the event that is recorded after the last copy; None if nothing is copied.
        tensors: the copies that nobody has taken, by the position of their source.
        span: when the device makes them, if that was asked for.
    """

    end: Event | None = None
    tensors: dict[int, Tensor] = field(default_factory=dict)
    span: DeviceSpan | None = None


@final
class CopyStream:
    """A stream for copies to the device; it owns the stream, and nothing else launches work there.

    Args:
        accelerator: of the stream.

    Example:
        >>> import torch
        >>> from counterpoint.device.host import HostAccelerator
        >>> stream = CopyStream(HostAccelerator())
        >>> copies = stream.start([torch.ones(2)])
        >>> stream.take(copies, 0), stream.take(copies, 0)
        (tensor([1., 1.]), None)
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self._stream = accelerator.new_stream()
        self._last_borrowing: Event | None = None  # the end of the last copy from pinned memory of the caller

    def start(
        self, values: Sequence[object], positions: Collection[int] | None = None, *, is_timed: bool = False
    ) -> StartedCopies:
        """Start to copy those values that are dense tensors in host memory and need no gradient.

        Args:
            values: of any type.
            positions: of the values that are wanted; None for all.
            is_timed: whether to record when the device makes the copies.
        """
        copies, borrows = StartedCopies(), False
        began = self._record(enable_timing=True) if is_timed else None
        for position, value in enumerate(values):
            is_wanted = positions is None or position in positions
            if not is_wanted or not isinstance(value, Tensor) or not _is_plain(value):
                continue
            is_borrowed = value.is_contiguous() and self.accelerator.is_pinned(value)
            source = value if is_borrowed else self.accelerator.empty_pinned(*value.shape, dtype=value.dtype)
            if not is_borrowed:
                source.copy_(value)
            with self.accelerator.stream(self._stream):
                copies.tensors[position] = source.to(self.accelerator.device, non_blocking=True)
            borrows |= is_borrowed
        if copies.tensors:
            copies.end = self._record(enable_timing=is_timed)
            copies.span = DeviceSpan(began, copies.end) if is_timed else None
        if borrows:
            self._last_borrowing = copies.end
        return copies

    def _record(self, *, enable_timing: bool) -> Event:
        event: Event = self._stream.record_event(self.accelerator.new_event(enable_timing=enable_timing))
        return event

    def take(self, copies: StartedCopies, position: int) -> Tensor | None:
        """Return a copy for this thread's current stream, which waits for it; None if there is none, or not any more.

        Each is given once, so that nobody else sees what its taker changes in place.
        """
        tensor = copies.tensors.pop(position, None)
        if tensor is not None:
            stream = self.accelerator.current_stream()
            stream.wait_event(copies.end)
            self.accelerator.record_stream(tensor, stream)
        return tensor

    def wait_for_sources(self) -> None:
        """Wait on the host until pinned memory that the caller gave has been read, so that it may be changed again.

        The computing stream has usually long been given work by then, and the copies have ended.
        """
        end, self._last_borrowing = self._last_borrowing, None
        if end is not None and not end.query():
            end.synchronize()


def _is_plain(tensor: Tensor) -> bool:
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    return tensor.device.type == "cpu" and is_dense and not tensor.requires_grad
