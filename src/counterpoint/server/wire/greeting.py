"""The greeting: both sides prove that they have the job's key, and nobody learns it.

Each is a generator without effects: it yields what to send and how many bytes to wait for, and returns the session.
Caller and server say hello with a fresh nonce each; then the caller proves first, so that a stranger gets no proof.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Generator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TypeAlias

from counterpoint.errors import ProtocolError
from counterpoint.server.wire.derive import DIGEST_BYTES, expand, extract
from counterpoint.server.wire.key import JobKey
from counterpoint.server.wire.place import Place, UnixPlace
from counterpoint.server.wire.records import (
    KEY_BYTES,
    CheckedOpener,
    CheckedSealer,
    KeyedOpener,
    KeyedSealer,
    Opener,
    Sealer,
)  # fmt: skip

MAGIC: Final = b"CPWS"
VERSION: Final = 1
NONCE_BYTES: Final = 32
HELLO = struct.Struct(f"<4sBB2x{NONCE_BYTES}s")  # magic, version, guard, nonce
REFUSAL: Final = bytes(DIGEST_BYTES)


class Guard(IntEnum):
    """Who keeps others out of a connection when the greeting is over."""

    NOBODY = 0
    """There is no key; checksums find faults, and no forgery."""
    CIPHER = 1
    """There is a key, and a network in between."""
    KERNEL = 2
    """There is a key, and a UNIX socket of one user: whoever could reach into it can reach into the process."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What to send, and how many bytes of the peer to come back with."""

    send: bytes
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Session:
    """What makes and reads this side's records; ``last`` is still to be sent before them."""

    sealer: Sealer
    opener: Opener
    last: bytes = b""


@dataclass(frozen=True, slots=True)
class Secret:
    """What both sides must have in common.

    Args:
        key: the job's; None among processes of one host that trust it.
        job: its name and generation; not a secret, but another one leads to other keys.
    """

    key: JobKey | None
    job: str = ""

    def guard(self, place: Place) -> Guard:
        """Return who keeps others out of a connection to that place."""
        if self.key is None:
            return Guard.NOBODY
        return Guard.KERNEL if isinstance(place, UnixPlace) else Guard.CIPHER


Greeting: TypeAlias = Generator[Turn, bytes, Session]


def call(secret: Secret, guard: Guard, nonce: bytes) -> Greeting:
    """Greet as the one who connects.

    Args:
        secret: of the job.
        guard: of the connection.
        nonce: fresh random bytes.

    Raises:
        ProtocolError: the other side is no server of ours, or has another key.
    """
    mine = hello(guard, nonce)
    theirs = yield Turn(mine, HELLO.size)
    check_hello(theirs, guard)
    keys = _Derived(secret, guard, mine, theirs)
    proof = yield Turn(keys.proof_of_caller, DIGEST_BYTES)
    if not hmac.compare_digest(proof, keys.proof_of_server):
        raise refused()
    return keys.session(sends=b"caller", receives=b"server")


def answer(secret: Secret, guard: Guard, nonce: bytes) -> Greeting:
    """Greet as the one who listens.

    Args:
        secret: of the job.
        guard: of the connection.
        nonce: fresh random bytes.

    Raises:
        ProtocolError: the other side is no caller of ours, or has another key.
    """
    theirs = yield Turn(b"", HELLO.size)
    check_magic(theirs)
    mine = hello(guard, nonce)
    proof = yield Turn(mine, DIGEST_BYTES)
    check_hello(theirs, guard)
    keys = _Derived(secret, guard, theirs, mine)
    if not hmac.compare_digest(proof, keys.proof_of_caller):
        yield Turn(REFUSAL, 0)
        raise refused()
    return keys.session(sends=b"server", receives=b"caller", last=keys.proof_of_server)


def hello(guard: Guard, nonce: bytes) -> bytes:
    """Return the first words of a side."""
    return HELLO.pack(MAGIC, VERSION, guard, nonce)


def check_magic(theirs: bytes) -> None:
    """Somebody greets; whoever says something else is told nothing.

    Raises:
        ProtocolError: it is no greeting.
    """
    if not theirs.startswith(MAGIC):
        raise ProtocolError(f"a peer begins with {theirs[:4]!r}, which is no greeting: look for another program there")


def check_hello(theirs: bytes, guard: Guard) -> None:
    """The other side speaks this version, has a key if this one has, and sees the same kind of connection.

    Raises:
        ProtocolError: it does not.
    """
    check_magic(theirs)
    _, version, other, _ = HELLO.unpack(theirs)
    if version != VERSION or theirs[6:8] != bytes(2):
        raise ProtocolError(
            f"a peer speaks version {version} of the wire, and this side version {VERSION}: install one"
        )
    if (other == Guard.NOBODY) != (guard == Guard.NOBODY):
        has, lacks = ("the peer", "this side") if guard == Guard.NOBODY else ("this side", "the peer")
        raise ProtocolError(
            f"{has} has a job key and {lacks} has none; all processes of a job get the same: give it one"
        )
    if other != guard:
        raise ProtocolError(
            f"a peer sees a connection of kind {other} where this side sees {guard}: look for what is in between"
        )


def refused() -> ProtocolError:
    """Return the error for a key that is not the same on both sides."""
    return ProtocolError(
        "the greeting was refused: the two sides have not the same job key, or are not of the same job and generation; "
        "nothing was said after it: give both the key of one job"
    )


class _Derived:
    """What both sides compute from the key and from all that was said in the open."""

    def __init__(self, secret: Secret, guard: Guard, of_caller: bytes, of_server: bytes) -> None:
        job = hashlib.sha256(secret.job.encode()).digest()
        self._said = hashlib.sha256(of_caller + of_server + job).digest()
        self._guard = guard
        self._root = extract(self._said, secret.key.secret if secret.key else b"")
        self.proof_of_caller = self._for(b"proof of caller")
        self.proof_of_server = self._for(b"proof of server")

    def _for(self, purpose: bytes) -> bytes:
        return expand(self._root, b"counterpoint wire " + purpose + self._said)

    def session(self, *, sends: bytes, receives: bytes, last: bytes = b"") -> Session:
        """Return what seals in one direction and opens in the other."""
        if self._guard is not Guard.CIPHER:
            return Session(CheckedSealer(), CheckedOpener(), last)
        keys = [self._for(b"records of " + side)[:KEY_BYTES] for side in (sends, receives)]
        return Session(KeyedSealer(keys[0]), KeyedOpener(keys[1]), last)
