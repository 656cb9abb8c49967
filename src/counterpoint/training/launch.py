"""Run a function on several ranks from a script or a notebook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from counterpoint.launchers import function


def launch(fn: Callable[..., object], *, ranks: int, args: Sequence[object] = ()) -> list[Any]:
    """Run ``fn(*args)`` on so many processes of this host and return what each returned, by rank.

    Args:
        fn: a function that another process can import: defined at the top of a file.
        ranks: how many processes.
        args: JSON values and tensors, the same for every rank.

    Raises:
        LaunchError: the function or an argument cannot travel, or a rank failed; the first line names it.
    """
    return function.launch(fn, ranks=ranks, args=args)
