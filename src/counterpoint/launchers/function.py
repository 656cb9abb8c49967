"""Run a function on several ranks from a script or notebook, and collect the results; nothing is pickled."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from counterpoint.errors import LaunchError
from counterpoint.launchers.environment import detect
from counterpoint.launchers.local import OnLine, run_command, write_prefixed
from counterpoint.launchers.script import require_no_running_script
from counterpoint.optim.validation import renamed_parameters
from counterpoint.value_codec import decode_value, encode_value
from counterpoint.world.cpu_affinity import DEFAULT_BINDING, Binding


def write_value(folder: Path, name: str, value: object) -> None:
    """Write a value to ``folder``, to be read with :func:`read_value`; see ``format_value``."""
    (folder / f"{name}.value").write_bytes(format_value(value, name))


def read_value(folder: Path, name: str) -> Any:  # noqa: ANN401 - an argument or result of the user's function
    """Return the value that :func:`write_value` wrote."""
    return decode_value((folder / f"{name}.value").read_bytes())


def format_value(value: object, name: str) -> bytes:
    """Return an argument or a result as bytes; see :func:`~counterpoint.value_codec.encode_value`.

    Raises:
        LaunchError: a part of it cannot be encoded; the message names it.
    """
    return encode_value(value, name, _unsupported)


def _unsupported(name: str, part: object) -> LaunchError:
    return LaunchError(
        f"{name} is a {type(part).__name__}, which cannot be sent to another process; arguments and results are "
        f"None, numbers, text, bytes, lists, tuples, sets, dicts, dense tensors and numpy arrays; pass what it is made "
        f"from, and build it inside the function"
    )


@renamed_parameters({"deadline_s": "timeout_s"})
def launch(  # noqa: PLR0913 - the options of a run, most by keyword
    fn: Callable[..., object],
    *,
    ranks: int,
    args: Sequence[object] = (),
    threads_per_rank: int | None = None,
    bind: Binding = DEFAULT_BINDING,
    timeout_s: float | None = None,
    on_line: OnLine = write_prefixed,
) -> list[Any]:
    """Run ``fn(*args)`` on ``ranks`` processes of this host; return the results by rank.

    Args:
        fn: a function that another process can import; see ``import_path``.
        ranks: number of processes.
        args: None, numbers, text, bytes, lists, tuples, sets, dicts, dense tensors and numpy arrays, the same for every
            rank. Results may be of the same types.
        threads_per_rank: as ``run_command``.
        bind: as ``run_command``.
        timeout_s: as ``run_command``.
        on_line: called with every line that a rank writes.

    Raises:
        LaunchError: the function cannot be imported, an argument cannot be sent, or a rank failed, which the first line
            names.
        KeyboardInterrupt: after Ctrl-C, when all ranks have ended.
    """
    require_no_running_script("cp.launch")
    inside = detect()
    if inside is not None:
        raise LaunchError(
            f"launch was called inside rank {inside.rank} of {inside.world_size}; ranks do not launch ranks: "
            f"put the call under `if __name__ == '__main__':`, or leave it to the launcher that started this rank"
        )
    target = import_path(fn)
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
        command = [sys.executable, "-m", "counterpoint.launchers.function_main", str(folder)]
        result = run_command(
            command, ranks, threads_per_rank=threads_per_rank, bind=bind, timeout_s=timeout_s, on_line=on_line
        )
        if result.exit_code == 130 and result.failed_rank is None:
            raise KeyboardInterrupt
        if result.exit_code != 0:
            raise LaunchError(result.report)
        return [read_value(folder, f"result-{rank}") for rank in range(ranks)]


def import_path(fn: Callable[..., object]) -> str | None:
    """Return how another process imports the function, ``module:name`` or ``path.py:name``; None if it cannot."""
    module, name = sys.modules.get(getattr(fn, "__module__", "")), getattr(fn, "__qualname__", "")
    if module is None or _lookup(module, name) is not fn:
        return None
    spec = getattr(module, "__spec__", None)
    if spec is not None:
        return f"{spec.name}:{name}"
    file, code = getattr(module, "__file__", None), getattr(fn, "__code__", None)
    if module.__name__ != "__main__" or file is None or code is None:
        return None
    path = Path(file).resolve()
    return f"{path}:{name}" if path.is_file() and Path(code.co_filename).resolve() == path else None


def _lookup(module: object, qualified_name: str) -> object:
    """Return the object with a dotted name; None for names such as ``<lambda>``."""
    target = module
    for part in qualified_name.split("."):
        target = getattr(target, part, None)
    return target
