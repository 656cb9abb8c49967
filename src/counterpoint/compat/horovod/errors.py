"""Errors with the built-in types that Horovod scripts catch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from counterpoint.errors import CounterpointError, PeerError, PlanError


class HorovodInternalError(PeerError, RuntimeError):
    """A collective failed: another rank disagrees, has exited, or did not arrive in time."""


class CallOrderError(CounterpointError, AssertionError):
    """The calls of a training step came in an order in which gradients would be lost."""


class HorovodUnsupportedError(PlanError, AttributeError):
    """A part of Horovod is not supported; the message names a replacement."""


@contextmanager
def translate_peer_errors() -> Iterator[None]:
    """Raise the failure of another rank as Horovod's error.

    Raises:
        HorovodInternalError: another rank failed.
    """
    try:
        yield
    except HorovodInternalError:
        raise
    except PeerError as error:
        raise HorovodInternalError(str(error)) from error
