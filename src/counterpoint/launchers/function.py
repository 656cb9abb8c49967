"""Run a function on several ranks from a script or a notebook, and collect what each returned."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from counterpoint.errors import LaunchError
from counterpoint.launchers.environment import detect
from counterpoint.launchers.lines import OnLine, write_prefixed
from counterpoint.launchers.local import run_command
from counterpoint.launchers.values import read_value, write_value
from counterpoint.world.placement import DEFAULT_BINDING, Binding


def launch(  # noqa: PLR0913 - the options of a run, most by keyword
    fn: Callable[..., object],
    *,
    ranks: int,
    args: Sequence[object] = (),
    threads_per_rank: int | None = None,
    bind: Binding = DEFAULT_BINDING,
    deadline_s: float | None = None,
    on_line: OnLine = write_prefixed,
) -> list[Any]:
    """``fn(*args)`` has run on ``ranks`` processes of this host; the list holds what each returned, by rank.

    Args:
        fn: a function that another process can import; see ``can_reach``.
        ranks: how many processes.
        args: JSON values and tensors, the same for every rank.
        threads_per_rank: as ``run_command``.
        bind: as ``run_command``.
        deadline_s: as ``run_command``.
        on_line: takes every line that a rank writes.

    Raises:
        LaunchError: the function or an argument cannot travel, or a rank failed; the first line names it.
        KeyboardInterrupt: Ctrl-C; all ranks have ended.
    """
    inside = detect()
    if inside is not None:
        raise LaunchError(
            f"launch was called inside rank {inside.rank} of {inside.world_size}; ranks do not launch ranks: "
            f"put the call under `if __name__ == '__main__':`, or leave it to the launcher that started this rank"
        )
    target = can_reach(fn)
    if target is None:
        raise LaunchError(
            f"{getattr(fn, '__qualname__', fn)!r} cannot be found by another process: "
            f"it is a lambda, a method of an object, or defined inside a function or a notebook cell; "
            f"define it at the top of a file"
        )
    with tempfile.TemporaryDirectory(prefix="counterpoint-") as name:
        folder = Path(name)
        write_value(folder, "args", list(args))
        write_value(folder, "call", {"target": target, "path": list(sys.path)})
        command = [sys.executable, "-m", "counterpoint.launchers.callee", str(folder)]
        result = run_command(
            command, ranks, threads_per_rank=threads_per_rank, bind=bind, deadline_s=deadline_s, on_line=on_line
        )
        if result.exit_code == 130 and result.culprit is None:
            raise KeyboardInterrupt
        if result.exit_code != 0:
            raise LaunchError(result.report)
        return [read_value(folder, f"result-{rank}") for rank in range(ranks)]


def can_reach(fn: Callable[..., object]) -> str | None:
    """Return how another process finds the function, ``module:name`` or ``path.py:name``, or None if it cannot."""
    module, name = sys.modules.get(getattr(fn, "__module__", "")), getattr(fn, "__qualname__", "")
    if module is None or _member(module, name) is not fn:
        return None
    spec = getattr(module, "__spec__", None)
    if spec is not None:
        return f"{spec.name}:{name}"
    file, code = getattr(module, "__file__", None), getattr(fn, "__code__", None)
    if module.__name__ != "__main__" or file is None or code is None:
        return None
    path = Path(file).resolve()
    return f"{path}:{name}" if path.is_file() and Path(code.co_filename).resolve() == path else None


def _member(module: object, qualified_name: str) -> object:
    """Return what stands under a dotted name; None for names such as ``<lambda>`` that stand nowhere."""
    found = module
    for part in qualified_name.split("."):
        found = getattr(found, part, None)
    return found
