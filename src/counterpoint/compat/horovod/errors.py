"""The errors that scripts of Horovod catch by their built-in type, as ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from counterpoint.errors import CounterpointError, PeerError, PlanError


class HorovodInternalError(PeerError, RuntimeError):
    """A collective failed: another rank disagrees, is gone or late; Horovod raises its error of this name then."""


class CallOrderError(CounterpointError, AssertionError):
    """The calls of a training step came in an order in which gradients would be lost."""


class HorovodUnsupportedError(PlanError, AttributeError):
    """This part of Horovod does not exist here; the message says what does."""


@contextmanager
def translate_peer_errors() -> Iterator[None]:
    """A failure of another rank is raised as Horovod's error.

    Raises:
        HorovodInternalError: another rank failed.
    """
    try:
        yield
    except HorovodInternalError:
        raise
    except PeerError as error:
        raise HorovodInternalError(str(error)) from error
