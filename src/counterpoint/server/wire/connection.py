"""A connection: one socket to a peer that has the key, letters both ways, and one end that everybody hears of."""

from __future__ import annotations

import fcntl
import os
import socket
import termios
from array import array
from collections.abc import Callable
from enum import Enum
from math import inf
from typing import TypeAlias

from counterpoint.errors import PeerError, ProtocolError
from counterpoint.server.wire.channel import Channel
from counterpoint.server.wire.letter import Letter
from counterpoint.server.wire.limits import Limits
from counterpoint.server.wire.loop import READ, WRITE, Loop
from counterpoint.server.wire.place import refuse_other_users

TURN_BYTES = 1 << 22  # that one connection receives or sends before others have their turn
WAKING_BYTES = 1 << 16  # of what is missing, so many are there before a side looks: packets come one by one


class ConnectionLostError(PeerError):
    """The connection is gone; whether the peer has read what was sent last is not known. A caller may call again."""


class Stage(Enum):
    """How far a connection has come."""

    CALLING = "calling"
    GREETING = "greeting"
    OPEN = "open"
    CLOSING = "closing"
    ENDED = "ended"


class Side(Enum):
    """Which part a side has."""

    ASKS = "asks"
    ANSWERS = "answers"


OnLetter: TypeAlias = Callable[["Connection", Letter], None]
OnEnd: TypeAlias = Callable[["Connection", PeerError | None], None]


class Connection:
    """One side of a connection, looked after by a loop.

    Args:
        loop: that looks after it.
        peer: the socket.
        channel: the state machine, its greeting begun.
        limits: of this side.
        side: which it is.
        name: of the other side, for errors.
    """

    def __init__(
        self, loop: Loop, peer: socket.socket, channel: Channel, limits: Limits, *, side: Side, name: str
    ) -> None:
        self._loop = loop
        self._socket = peer
        self._channel = channel
        self._limits = limits
        self._side = side
        self._stage = Stage.CALLING
        self._moved_s = self._began_s = loop.clock()
        self._is_leaving = self._is_receiving = False
        self._is_packeted, self._waking_bytes = peer.family != socket.AF_UNIX, 1
        self._on_letter: OnLetter | None = None
        self._on_end: OnEnd | None = None
        self.name = name
        self.error: PeerError | None = None

    def begin(self, on_letter: OnLetter | None, on_end: OnEnd | None) -> None:
        """The loop looks after the connection, and these hear of its letters and of its end."""
        with self._loop.lock:
            self._on_letter, self._on_end = on_letter, on_end
            self._loop.watch(self, WRITE)

    @property
    def stage(self) -> Stage:
        """How far it has come."""
        return self._stage

    @property
    def is_ended(self) -> bool:
        """There is no connection any more."""
        return self._stage is Stage.ENDED

    @property
    def unsent_bytes(self) -> int:
        """How much waits for the peer to take it."""
        return self._channel.unsent_bytes

    @property
    def is_moving(self) -> bool:
        """Something is on its way: the peer's system has not taken all that was sent, or half of a frame has come."""
        if self._stage is Stage.ENDED:
            return False
        if self.unsent_bytes or self._channel.is_within_frame:
            return True
        waiting = array("i", [0])
        fcntl.ioctl(self._socket, termios.TIOCOUTQ, waiting)
        return waiting[0] > 0

    @property
    def is_full(self) -> bool:
        """More waits than this side wants to keep; send when it does not."""
        return self._channel.unsent_bytes > self._limits.unsent_bytes

    def send(self, letter: Letter) -> None:
        """The letter is on its way, or will be; its tensors must stay as they are until :attr:`unsent_bytes` is 0.

        Raises:
            PeerError: the connection has ended, or the letter cannot travel.
        """
        with self._loop.lock:
            if self._is_leaving or self._stage is Stage.ENDED:
                raise ConnectionLostError(f"the connection to {self.name} has ended; open another one") from self.error
            if not self._channel.pending():
                self._moved_s = self._loop.clock()
            self._channel.put(letter)
            if self._is_receiving or (not self.is_full and self._loop.defers(self._go_on)):
                return  # answers to what has come together leave together
            self._go_on()

    def close(self) -> None:
        """What was sent before will arrive, and then the other side hears that nothing follows."""
        with self._loop.lock:
            if self._is_leaving or self._stage is Stage.ENDED:
                return
            self._is_leaving = True
            self._channel.put_goodbye()
            if self._stage is Stage.OPEN:
                self._stage = Stage.CLOSING
            self._go_on()

    def abort(self) -> None:
        """The connection is gone, at once."""
        self._end(None)

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._socket.fileno()

    @property
    def due(self) -> float:
        """When the peer will have taken too long."""
        if self._stage in {Stage.CALLING, Stage.GREETING}:
            return self._began_s + self._limits.greeting_s
        if self._channel.has_returned and self._stage is Stage.OPEN:
            return -inf
        is_waiting = self._channel.is_within_frame or self._channel.pending() or self._stage is Stage.CLOSING
        return self._moved_s + self._limits.patience_s if is_waiting else inf

    def expire(self) -> None:
        """The peer has taken too long, or should hear what it gets back."""
        if self._channel.has_returned and self._stage is Stage.OPEN:
            self._go_on()
            return
        if self._stage is Stage.CLOSING:
            self._end(None)
            return
        moved_s = self._moved_s
        if self._stage is Stage.OPEN:
            self._read()  # what has come may be less than what it sleeps for
        if self._stage is Stage.ENDED or self._moved_s > moved_s:
            return
        is_greeting = self._stage in {Stage.CALLING, Stage.GREETING}
        limit_s, what = (
            (self._limits.greeting_s, "did not greet") if is_greeting else
            (self._limits.patience_s, f"neither took one of {self.unsent_bytes} bytes nor went on with its frame")
        )  # fmt: skip
        self._end(
            ConnectionLostError(f"{self.name} {what} within {limit_s} s; look at what it does, or at the network")
        )

    def ready(self, events: int) -> None:
        """The socket can be read or written."""
        if self._stage is Stage.CALLING:
            self._arrive()
        if events & READ:
            self._read()
        self._go_on()

    def _read(self) -> None:
        """What has come has been heard, or the connection has ended."""
        self._is_receiving = True
        try:
            self._receive()
        except ProtocolError as error:
            self._drop(error)
        finally:
            self._is_receiving = False

    def _arrive(self) -> None:
        """The peer is there, and of the same user where the kernel knows, or the connection has ended."""
        if number := self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._end(self._lost(OSError(number, os.strerror(number))))
            return
        try:
            refuse_other_users(self._socket)
        except PeerError as error:
            self._end(error)
            return
        self._stage = Stage.GREETING

    def _receive(self) -> None:
        """What has come, or enough of it, has been read; a ProtocolError where it may not come."""
        left = TURN_BYTES
        while left > 0 and self._stage is not Stage.ENDED and not self._is_paused:
            wanted = self._channel.wanted()
            try:
                num_bytes = (
                    self._socket.recv_into(wanted[0]) if len(wanted) == 1 else self._socket.recvmsg_into(wanted)[0]
                )
            except BlockingIOError:
                break
            except OSError as error:
                self._break(error)
                return
            if not num_bytes:
                self._hear_end()
                return
            left -= num_bytes
            self._moved_s = self._loop.clock()
            self._take(num_bytes)
        if self._stage is not Stage.ENDED:
            self._sleep()

    def _sleep(self) -> None:
        """The socket counts as readable when what is missing has come, or enough of it, or its end."""
        num_bytes = min(sum(map(len, self._channel.wanted())), WAKING_BYTES)
        if self._is_packeted and num_bytes != self._waking_bytes:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
            self._waking_bytes = num_bytes

    @property
    def _is_paused(self) -> bool:
        """This side answers, and reads nothing more before its answers have gone.

        The side that asks always reads: if both stopped, neither would go on.
        """
        return self._side is Side.ANSWERS and self.is_full

    def _take(self, num_bytes: int) -> None:
        """So many bytes have come."""
        letter = self._channel.took(num_bytes)
        if self._stage is Stage.GREETING and self._channel.is_open:
            self._stage = Stage.CLOSING if self._is_leaving else Stage.OPEN
        if letter is not None and self._stage is Stage.OPEN and self._on_letter is not None:
            self._on_letter(self, letter)
        if self._channel.is_over:
            self._end(None)

    def _hear_end(self) -> None:
        """The other side has closed the connection."""
        if self._stage is Stage.CLOSING:
            self._end(None)
            return
        try:
            self._channel.end()
        except ProtocolError as error:
            self._end(ConnectionLostError(f"{self.name} is gone: {error}"))
        else:
            self._end(
                ConnectionLostError(f"{self.name} is gone without a goodbye; look at why it ended, then call again")
            )

    def _go_on(self) -> None:
        """What can be sent has been, and the loop watches for what is left."""
        if self._stage is Stage.ENDED:
            return
        try:
            self._flush()
            is_left = bool(self._channel.pending())
            if self._stage is Stage.CLOSING and not is_left:
                self._socket.shutdown(socket.SHUT_WR)
        except OSError as error:
            self._break(error)
            return
        self._loop.watch(self, (0 if self._is_paused else READ) | (WRITE if is_left else 0))

    def _flush(self) -> None:
        if self._stage in {Stage.CALLING, Stage.ENDED}:
            return
        left = TURN_BYTES
        while left > 0 and (pending := self._channel.pending()):
            try:
                num_bytes = self._socket.sendmsg(pending)
            except BlockingIOError:
                return
            self._channel.sent(num_bytes)
            self._moved_s = self._loop.clock()
            left -= num_bytes

    def _drop(self, error: ProtocolError) -> None:
        """The peer has broken a rule: it hears the last words of a greeting, if there are any, and no more."""
        if self._stage is Stage.GREETING and not self._channel.is_open:
            try:
                self._flush()
            except OSError as cause:
                error.add_note(f"it could not be told: {cause}")
        named = ProtocolError(f"{self.name}: {error}")
        named.__cause__ = error
        self._end(named)

    def _break(self, error: OSError) -> None:
        """The connection is gone; that is no loss if this side has said goodbye, and all before it."""
        is_done = self._stage is Stage.CLOSING and not self._channel.pending()
        self._end(None if is_done else self._lost(error))

    def _lost(self, error: OSError) -> ConnectionLostError:
        why = (error.strerror or str(error)).lower()
        return ConnectionLostError(f"{self.name} is gone ({why}); look at whether it runs, then call again")

    def _end(self, error: PeerError | None) -> None:
        if self._stage is Stage.ENDED:
            return
        self._stage, self.error = Stage.ENDED, error
        self._loop.forget(self)
        self._socket.close()
        self._channel.close()
        if self._on_end is not None:
            self._on_end(self, error)
