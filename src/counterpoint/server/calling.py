"""A worker's talk with the coordinator: one question at a time, and tasks that came when nobody waited for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from counterpoint.errors import CounterpointError, PeerError
from counterpoint.server.actions import Action
from counterpoint.server.asking import Carrier
from counterpoint.server.calls import Lease, Leased, Promised, Task
from counterpoint.server.client import Call, Client
from counterpoint.server.messages import Done, Origin, Refused
from counterpoint.server.refusals import error_of
from counterpoint.server.session import LATER, Later

Told: TypeAlias = Leased | Promised | Done | Refused

FIRST_S, MOST_S = 0.005, 0.1
"""After so long one asks again whether there is data by now: at first, and at most; twice as long each time."""


class Calling:
    """What has been asked of the coordinator, and what it said.

    Args:
        client: the worker's side of the protocol.
        carrier: of its messages.
    """

    def __init__(self, client: Client, carrier: Carrier) -> None:
        self._client, self._carrier = client, carrier
        self._make: Callable[[Origin], Call] | None = None
        self._is_lease = False
        self._told: Told | None = None
        self._spare: list[Leased] = []
        self.error: CounterpointError | None = None

    def hear(self, told: Told) -> list[Action]:
        """Take in what the coordinator says; return what is to be sent.

        A task that comes when none is waited for, because an earlier question was still open, is kept for later.
        """
        if isinstance(told, Leased) and not self._is_lease:
            self._spare.append(told)
            return [] if self._make is None else self._client.ask(self._make)
        if isinstance(told, Refused) and not self._client.presence.is_welcome:
            self.error = error_of(told)
        elif self._is_lease or not _is_later(told):
            self._told = told
        return []

    def lease(self, wait_s: float) -> Task | Later | None:
        """Return data to work on; None where all is done."""
        if not self._spare:
            told = self._ask(Lease, wait_s)
            if not isinstance(told, Leased):
                return LATER
            return told.task
        return self._spare.pop(0).task

    def ask(self, make: Callable[[Origin], Call]) -> Told:
        """Return what the coordinator says.

        Raises:
            PeerError: the job has stopped, or nobody has answered in time.
        """
        return self._ask(make, 0.0)

    def begin(self, make: Callable[[Origin], Call]) -> None:
        """The question is on its way."""
        with self._carrier.lock:
            self._make, self._is_lease, self._told = make, make is Lease, None
            self._carrier.act(self._client.ask(make))

    def await_answer(self, deadline_s: float) -> bool:
        """Tell whether there is an answer in time."""
        return self._carrier.wait(lambda: self._told is not None or self.error is not None, deadline_s)

    def _ask(self, make: Callable[[Origin], Call], wait_s: float) -> Told:
        limit_s = self._client.job.patience.lease_s
        self.begin(make)
        try:
            self.await_answer(limit_s)
            self._ask_again(make, wait_s)
        finally:
            with self._carrier.lock:
                told, self._make, self._is_lease = self._told, None, False
        if told is None and self.error is not None:  # who has left is told that it does not belong to the job any more
            raise self.error
        if told is None:
            raise PeerError(
                f"waited {limit_s:g} s for the coordinator of {self._client.job.name} to answer {self._client.name}; "
                "look at whether it runs"
            )
        if isinstance(told, Refused) and told.reason != "later":
            raise error_of(told)
        return told

    def _ask_again(self, make: Callable[[Origin], Call], wait_s: float) -> None:
        """Ask for data again and again while none may be begun: nobody is told when others are done with theirs."""
        left_s, pause_s = wait_s, FIRST_S
        while left_s > 0 and self._is_waiting():
            if self._carrier.wait(lambda: not self._is_waiting(), min(pause_s, left_s)):
                return
            left_s, pause_s = left_s - pause_s, min(2 * pause_s, MOST_S)
            with self._carrier.lock:
                if self._is_waiting():
                    self._carrier.act(self._client.ask(make))

    def _is_waiting(self) -> bool:
        return _is_later(self._told) and self.error is None


def _is_later(told: Told | None) -> bool:
    return isinstance(told, Refused) and told.reason == "later"
