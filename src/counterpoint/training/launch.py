"""Run a function on several ranks from a script or a notebook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from counterpoint.launchers import function
from counterpoint.world.cpu_affinity import DEFAULT_BINDING, Binding


def launch(
    fn: Callable[..., object], *, ranks: int, args: Sequence[object] = (), bind: Binding = DEFAULT_BINDING
) -> list[Any]:
    """Run ``fn(*args)`` on so many processes of this host and return what each returned, by rank.

    Args:
        fn: a function that another process can import: defined at the top of a file.
        ranks: how many processes.
        args: JSON values and tensors, the same for every rank.
        bind: on which cores each rank may compute: ``none``, ``core``, ``numa``, ``compact`` or ``spread``; see
            :func:`counterpoint.world.cpu_affinity.place_ranks`.

    Raises:
        LaunchError: the function or an argument cannot travel, or a rank failed; the first line names it.
    """
    return function.launch(fn, ranks=ranks, args=args, bind=bind)
