"""Requests under way: their parts at several shards, and whoever waits until all of them have been answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Generic, Protocol, TypeAlias, TypeVar

from torch import Tensor

from counterpoint.errors import CounterpointError, PeerError
from counterpoint.server.actions import Action
from counterpoint.server.messages import Done, Pulled, Pushed, Refused
from counterpoint.server.refusals import error_of

PartAnswer: TypeAlias = Pushed | Pulled | Done
Result = TypeVar("Result")


class Carrier(Protocol):
    """What carries a session's messages, in this process or to others."""

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Whoever holds it is alone with the session."""

    def act(self, actions: Sequence[Action]) -> None:
        """Messages are on their way; called with the lock."""

    def together(self) -> AbstractContextManager[None]:
        """Return a block whose messages leave in one go at its end."""

    def wait(self, holds: Callable[[], bool], deadline_s: float) -> bool:
        """Tell whether the condition holds, or comes to hold within the time; called without the lock."""

    def has_room(self) -> bool:
        """Tell whether more may be sent: what was sent before has been taken, but for a bounded rest."""

    @property
    def trouble(self) -> CounterpointError | None:
        """What stood in the way of messages last; a ProtocolError where trying again would not help."""

    def close(self) -> None:
        """Nothing of it is left."""


class Asked(Generic[Result]):
    """A request to some shards.

    Args:
        carrier: of the session.
        what: was asked, for errors.
        num_parts: answers that it takes.
        finish: makes the result of them, when somebody waits for it.
        deadline_s: the longest that one waits who does not say.
        values: what was pushed, if it is a push.
    """

    def __init__(
        self,
        carrier: Carrier,
        what: str,
        num_parts: int,
        finish: Callable[[list[PartAnswer]], Result],
        deadline_s: float,
        values: Tensor | None = None,
    ) -> None:
        self._carrier = carrier
        self._what = what
        self._finish = finish
        self._deadline_s = deadline_s
        self._values = values
        self._answers: list[PartAnswer | None] = [None] * num_parts
        self._num_missing = num_parts
        self._error: CounterpointError | None = None
        self._result: Result | None = None

    def answer(self, part: int, found: PartAnswer | Refused) -> None:
        """One shard has answered."""
        if isinstance(found, Refused):
            self.fail(error_of(found, self._values))
            return
        self._num_missing -= self._answers[part] is None
        self._answers[part] = found

    def fail(self, error: CounterpointError) -> None:
        """There will be no result."""
        self._error = self._error or error

    def done(self) -> bool:
        """Tell whether all have answered, or one has refused."""
        return self._error is not None or not self._num_missing

    def wait(self, deadline_s: float | None = None) -> Result:
        """Return the result; see :class:`counterpoint.server.session.Pending`."""
        limit_s = self._deadline_s if deadline_s is None else deadline_s
        if not self._carrier.wait(self.done, limit_s):
            missing = f"{self._num_missing} of {len(self._answers)} parts of which are missing"
            raise PeerError(
                f"waited {limit_s:g} s for {self._what}, {missing}; look at whether the servers run, and whom they "
                "wait for"
            )
        if self._error is not None:
            raise self._error
        if self._result is None:
            self._result = self._finish([one for one in self._answers if one is not None])
            self._answers = list(self._answers[:0])
        return self._result
