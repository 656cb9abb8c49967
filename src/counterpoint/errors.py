"""Every error Counterpoint raises on purpose; the type says whose fault it is.

* CounterpointError
  + PlanError        you asked for something that cannot be done; change the plan
  + ProgramError     a strategy or pass wrote a wrong program; report it to its author
  + PeerError        another rank failed or fell silent; this rank is innocent

    - ProtocolError  bytes or a request came that nobody may send; they changed nothing

  + CheckpointError  a checkpoint is damaged, or belongs to another model
  + DataError        a batch, a loss or a gradient cannot be used
  + LaunchError      ranks could not be started, or one of them ended
"""

from __future__ import annotations


class CounterpointError(Exception):
    """Root of every error raised on purpose by this package."""


class PlanError(CounterpointError, ValueError):
    """The plan cannot be carried out on this model and mesh."""


class ProgramError(CounterpointError):
    """The program breaks a rule that every program must keep.

    Args:
        message: what is wrong, with the rows and the place marked.
        law: the number of the broken law of :mod:`counterpoint.program.verify.verifier`; 0 when it is not about a law.
    """

    def __init__(self, message: str, rule: int = 0) -> None:
        super().__init__(f"verifier rule {rule} violated: {message}" if rule else message)
        self.rule = rule


class PeerError(CounterpointError):
    """Another rank failed or fell silent; the message names it."""


class ProtocolError(PeerError):
    """Bytes or a request came that nobody may send; they changed nothing here."""


class CheckpointError(CounterpointError):
    """A checkpoint is incomplete, damaged, or of another model."""


class DataError(CounterpointError, ValueError):
    """A batch, a loss or a gradient cannot be used."""


class LaunchError(CounterpointError):
    """Ranks could not be started, or one of them ended before the others."""
