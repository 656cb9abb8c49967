"""Every error Counterpoint raises on purpose; the type says whose fault it is.

* CounterpointError
  + PlanError        you asked for something that cannot be done; change the plan
  + ProgramError     a strategy or pass wrote a wrong program; report it to its author
  + PeerError        another rank failed or fell silent; this rank is innocent
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
    """The program breaks a rule that every program must keep."""


class PeerError(CounterpointError):
    """Another rank failed or fell silent; the message names it."""


class CheckpointError(CounterpointError):
    """A checkpoint is incomplete, damaged, or of another model."""


class DataError(CounterpointError, ValueError):
    """A batch, a loss or a gradient cannot be used."""


class LaunchError(CounterpointError):
    """Ranks could not be started, or one of them ended before the others."""
