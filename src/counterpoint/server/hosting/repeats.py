"""What has been sent over a connection and not been answered: saying it again there would only be in the way.

The state machines say everything again that has not been answered for a while, since a network may lose it. A
connection loses nothing but with itself, so a repeat waits until nothing is on its way there any more, neither to the
other side nor from it, then longer each time; but what has been refused for now may be said again at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from counterpoint.server.form import Message
from counterpoint.server.messages import Done, Enter, Init, Pull, Pulled, Push, Pushed, Refused, Rest
from counterpoint.server.states import Install, Kept, Replicate

Name: TypeAlias = tuple[str, int, int]


class Repeats:
    """Requests under way over one connection.

    Args:
        first_s: how long the first repeat waits; each further one twice as long as the one before.
    """

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._sent: dict[Name, tuple[int, float, float]] = {}

    def may_send(self, message: Message, now: float, is_moving: Callable[[], bool]) -> bool:
        """Tell whether a message is to be sent; it counts as sent then.

        Args:
            message: to be sent.
            now: what the clock says.
            is_moving: tells whether something is still on its way over the connection; asked before a repeat alone.
        """
        name = _name_of(message)
        if name is None:
            return True
        generation = message.origin.generation  # type: ignore[union-attr]
        known = self._sent.get(name)
        pause_s = self._first_s
        if known is not None and known[0] == generation:
            if now < known[1]:
                return False
            if is_moving():
                self._sent[name] = (generation, now + known[2], known[2])
                return False
            pause_s = 2 * known[2]
        self._sent[name] = (generation, now + pause_s, pause_s)
        return True

    def hear(self, message: Message) -> None:
        """What a message answers is not under way any more."""
        match message:
            case Pushed() | Done():
                self._sent.pop(("change", message.shard, message.sequence), None)
            case Pulled():
                self._sent.pop(("pull", message.shard, message.ticket), None)
            case Kept():
                self._sent = {
                    name: sent
                    for name, sent in self._sent.items()
                    if name[:2] != ("replicate", message.shard) or name[2] >= message.position
                }
                self._sent.pop(("install", message.shard, 0), None)
            case Refused():
                self._sent.clear()
            case _:
                pass


def _name_of(message: Message) -> Name | None:
    """Return what a request is called among those to one server; None for what may be said as often as one likes."""
    match message:
        case Init() | Push() | Enter() | Rest():
            return "change", message.shard, message.origin.sequence
        case Pull():
            return "pull", message.shard, message.ticket
        case Replicate():
            return "replicate", message.shard, message.position
        case Install():
            return "install", message.shard, 0
        case _:
            return None
