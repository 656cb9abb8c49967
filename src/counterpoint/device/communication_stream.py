"""A stream of a device for communication, in addition to the stream that it computes on.

::

    computing      | backward, start ---.   backward ...      wait <---.  update
    communication  |              waits '-> all-reduce, end -----------'
    host           | launches all of this, and waits for none of it

Each side waits for an event that the other one has recorded. Whoever starts communication keeps its tensors until the
computing stream waits for the end: torch's allocator gives memory that is dropped before to the next tensor of the
computing stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import final

from torch import Tensor

from counterpoint.device.accelerator import Accelerator, Event


@final
class CommunicationStream:
    """A stream for communication; it owns the stream, and nothing else launches work there.

    Args:
        accelerator: of the stream.

    Example:
        >>> import torch
        >>> from counterpoint.device.host import HostAccelerator
        >>> communication, gradient = CommunicationStream(HostAccelerator()), torch.ones(2)
        >>> with communication.after_current():
        ...     _ = gradient.mul_(2.0)
        >>> end = communication.record_end()
        >>> communication.wait_for(end)
        >>> gradient
        tensor([2., 2.])
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self._stream = accelerator.new_stream()

    def holds_any(self, tensors: Iterable[object]) -> bool:
        """Return whether any of these is a tensor on the device."""
        return any(isinstance(tensor, Tensor) and tensor.device == self.accelerator.device for tensor in tensors)

    @contextmanager
    def after_current(self) -> Iterator[None]:
        """Launch this thread's work inside here, after all that its current stream has been given."""
        self._stream.wait_stream(self.accelerator.current_stream())
        with self.accelerator.stream(self._stream):
            yield

    def record_end(self, *, enable_timing: bool = False) -> Event:
        """Return an event of all that was launched here so far."""
        end: Event = self._stream.record_event(self.accelerator.new_event(enable_timing=enable_timing))
        return end

    def wait_for(self, end: Event) -> None:
        """Let this thread's current stream wait for an event of this one."""
        self.accelerator.current_stream().wait_event(end)

    def wait_for_all(self) -> None:
        """Let this thread's current stream wait for all that was launched here."""
        self.accelerator.current_stream().wait_stream(self._stream)
