"""What a refused request is for the program that made it: an error by the name of whose fault it is."""

from __future__ import annotations

from typing import assert_never

from torch import Tensor

from counterpoint.errors import CounterpointError, DataError, LaunchError, PeerError, PlanError
from counterpoint.server.messages import Refused


def error_of(refused: Refused, values: Tensor | None = None) -> CounterpointError:
    """Return the error for a refusal that asking again would not change.

    Args:
        refused: what was answered.
        values: what was pushed, if it was a push.

    Example:
        >>> error_of(Refused(0, 3, False, "full", "there is no room", 1))
        PlanError('there is no room')
    """
    if values is not None and not bool(values.isfinite().all()):
        return DataError(refused.text)
    match refused.reason:
        case "request" | "full":
            return PlanError(refused.text)
        case "identity":
            return LaunchError(refused.text)
        case "generation" | "later" | "lost" | "over":
            return PeerError(refused.text)
        case _:
            assert_never(refused.reason)
