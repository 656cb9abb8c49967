"""All errors that Counterpoint raises on purpose; the type says who is at fault.

* CounterpointError
  + PlanError        the request is impossible; change the plan
  + ProgramError     a strategy or pass generated a wrong program; report it to its author
  + PeerError        another rank failed or stopped responding; this rank is not at fault

    - ProtocolError  invalid bytes or an invalid request arrived; state is unchanged

  + CheckpointError  a checkpoint is damaged, or of another model

    - CheckpointWriteError  the disk did not take a checkpoint; earlier ones are intact

  + DataError        a batch, a loss or a gradient cannot be used
  + LaunchError      ranks could not be started, or one of them exited early

* StoppedBySignal    a run was asked to stop, and has; no error, but an exit of the process with 128 + the signal
"""

from __future__ import annotations

from counterpoint.terminal_text import escape_text


def error_text(error: BaseException) -> str:
    """Return an error's text, also of one that cannot make its text.

    Example:
        >>> error_text(ValueError("no data here"))
        'no data here'
    """
    try:
        return str(error)
    except Exception as failure:  # noqa: BLE001 - a user's class may do anything
        return f"its text could not be made: {type(failure).__name__} in __str__"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, without the space around it; empty if it has none."""
    return "".join(error_text(error).strip().splitlines()[:1])


class CounterpointError(Exception):
    """Base class of all errors raised on purpose by this package; control characters in their text are escaped."""

    def __str__(self) -> str:
        return escape_text(super().__str__())


class PlanError(CounterpointError, ValueError):
    """The plan cannot be carried out on this model and mesh."""


class ProgramError(CounterpointError):
    """The program violates a rule that every program must obey.

    Args:
        message: what is wrong, with the instructions around the place.
        rule: number of the violated rule of :mod:`counterpoint.program.verify.verifier`; 0 if it is not about a rule.
    """

    def __init__(self, message: str, rule: int = 0) -> None:
        super().__init__(f"verifier rule {rule} violated: {message}" if rule else message)
        self.rule = rule


class PeerError(CounterpointError):
    """Another rank failed or stopped responding; the message names it."""


class ProtocolError(PeerError):
    """Invalid bytes or an invalid request arrived; the state here is unchanged."""


class CheckpointError(CounterpointError):
    """A checkpoint is incomplete, damaged, or of another model."""


class CheckpointWriteError(CheckpointError):
    """The disk did not take a checkpoint; earlier ones are intact."""


class OffloadError(CounterpointError):
    """What a rank keeps on disk between updates could not be written, or not be read back as it was written."""


class DataError(CounterpointError, ValueError):
    """A batch, a loss or a gradient cannot be used."""


class LaunchError(CounterpointError):
    """Ranks could not be started, or one of them exited before the others."""


class StoppedBySignal(SystemExit):
    """A signal has asked a run to stop, which it did after a step; without a handler the process exits.

    Args:
        message: what was done.
        number: of the signal; the exit code is 128 more.
    """

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number
        self.code = 128 + number
