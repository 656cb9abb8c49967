"""Questions to one server that answers each in its turn, and waits with a deadline and a name."""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import Self

from counterpoint.errors import PeerError, ProtocolError
from counterpoint.server.wire.connect import connect
from counterpoint.server.wire.connection import Connection, ConnectionLostError, Stage
from counterpoint.server.wire.greeting import Secret
from counterpoint.server.wire.letter import Letter
from counterpoint.server.wire.limits import DEFAULTS, Limits
from counterpoint.server.wire.loop import Loop
from counterpoint.server.wire.place import Place


class Question:
    """A letter that was sent, and the answer when it has come."""

    def __init__(self, client: Client, kind: str) -> None:
        self._client = client
        self.kind = kind
        self.found: Letter | None = None

    def answer(self, deadline_s: float) -> Letter:
        """Return the answer.

        Args:
            deadline_s: the longest that this lasts.

        Raises:
            ConnectionLostError: the server is gone; whether it has read the question is not known.
            PeerError: it has not answered.
        """
        return self._client.await_answer(self, deadline_s)


class Client:
    """Asks a server that answers every letter; see :func:`counterpoint.server.wire.server.replying`.

    Args:
        loop: that looks after the connection.
        place: where the server is.
        secret: of the job.
        limits: of this side.
    """

    def __init__(self, loop: Loop, place: Place, secret: Secret, limits: Limits = DEFAULTS) -> None:
        self._loop = loop
        self._limits = limits
        self._open: deque[Question] = deque()
        self._connection = connect(loop, place, secret, self._take, limits=limits)

    @property
    def is_open(self) -> bool:
        """The server has proved that it has the key, and has not gone."""
        return self._connection.stage is Stage.OPEN

    def await_open(self) -> None:
        """The server has proved that it has the key; a PeerError says why not."""
        what = f"the greeting of {self._connection.name}"
        self._loop.wait_for(lambda: self.is_open or self._connection.is_ended, 2 * self._limits.greeting_s, what)
        if self._connection.is_ended:
            raise self._why("instead of a greeting")

    def ask(self, letter: Letter) -> Question:
        """Return the question, which is on its way; several may be.

        Raises:
            ConnectionLostError: the server is gone.
            PeerError: it has not taken what was sent before.
        """
        what = f"{self._connection.name} to take what was sent before {letter.kind!r}"
        self._loop.wait_for(
            lambda: not self._connection.is_full or self._connection.is_ended, self._limits.patience_s, what
        )
        question = Question(self, letter.kind)
        with self._loop.lock:
            if self._connection.is_ended:
                raise self._why(f"before {letter.kind!r} was asked")
            self._open.append(question)
            self._connection.send(letter)
        return question

    def await_answer(self, question: Question, deadline_s: float) -> Letter:
        """Return the answer to a question; a PeerError says why there is none."""
        what = f"the answer of {self._connection.name} to {question.kind!r}, {len(self._open)} being open"
        self._loop.wait_for(lambda: question.found is not None or self._connection.is_ended, deadline_s, what)
        if question.found is None:
            raise self._why(f"before it answered {question.kind!r}")
        return question.found

    def close(self) -> None:
        """What was asked has been sent, and the connection is closed."""
        self._connection.close()
        what = f"{self._connection.name} to take the goodbye"
        self._loop.wait_for(lambda: self._connection.is_ended, self._limits.patience_s + 1.0, what)

    def _why(self, when: str) -> PeerError:
        """Return why the connection has ended."""
        return self._connection.error or ConnectionLostError(
            f"{self._connection.name} said goodbye {when}; look at why, then call again"
        )

    def _take(self, _: Connection, letter: Letter) -> None:
        if not self._open:
            raise ProtocolError(f"an answer {letter.kind!r} to nothing that was asked; look at what the server runs")
        self._open.popleft().found = letter

    def __enter__(self) -> Self:
        self.await_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._connection.abort()
