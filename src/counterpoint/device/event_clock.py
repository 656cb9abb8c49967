"""The time of a device: events that streams pass while they work, which are read when the device has done so.

A clock of the host would tell when work was launched. Reading it after a wait for the device would tell more, but the
wait takes the device's work away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from counterpoint.device.accelerator import Accelerator, Event


@dataclass(eq=False, slots=True)
class DeviceSpan:
    """Work on one stream of a device, from one event to another.

    Args:
        began: the event before it; None until it is launched.
        ended: the event after it, likewise.
    """

    began: Event | None = None
    ended: Event | None = None


@final
class EventClock:
    """Marks points of the current stream's work, whose times are read later.

    Args:
        accelerator: of the device.

    Example:
        >>> from counterpoint.device.host import HostAccelerator
        >>> clock = EventClock(HostAccelerator())
        >>> began, ended = clock(), clock()
        >>> began_s, ended_s = clock.read([began, ended])
        >>> 0.0 <= began_s <= ended_s
        True
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        # on a stream without work, so that it is before all others, also if the computing stream has much to do
        self._origin = accelerator.new_event(enable_timing=True)
        self._origin.record(accelerator.new_stream())

    def __call__(self) -> Event:
        """Return an event at this point of the current stream."""
        event = self.accelerator.new_event(enable_timing=True)
        event.record(self.accelerator.current_stream())
        return event

    def read(self, events: Sequence[Event]) -> list[float]:
        """Return when the device has reached each event, in seconds; wait for it if necessary."""
        if not all(event.query() for event in (self._origin, *events)):
            self.accelerator.synchronize()
        return [self._origin.elapsed_time(event) / 1e3 for event in events]
