"""Run a function on several ranks from a script or notebook, and collect the results; nothing is pickled."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from counterpoint.errors import LaunchError
from counterpoint.launchers.environment import detect
from counterpoint.launchers.local import OnLine, run_command, write_prefixed
from counterpoint.world.cpu_affinity import DEFAULT_BINDING, Binding

if TYPE_CHECKING:
    from torch import Tensor


def write_value(folder: Path, name: str, value: object) -> None:
    """Write a value of JSON types and tensors to ``folder``, to be read with :func:`read_value`.

    Raises a LaunchError that names the part that is neither JSON nor a tensor.
    """
    tensors: dict[str, Tensor] = {}
    tree = _to_tree(value, name, tensors)
    if tensors:
        from safetensors.torch import save_file

        save_file(tensors, folder / f"{name}.safetensors")
    (folder / f"{name}.json").write_text(json.dumps(tree), encoding="utf-8")


def read_value(folder: Path, name: str) -> Any:  # noqa: ANN401 - an argument or result of the user's function
    """Return the value that :func:`write_value` wrote."""
    tree = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    path = folder / f"{name}.safetensors"
    tensors: dict[str, Tensor] = {}
    if path.exists():
        from safetensors.torch import load_file

        tensors = load_file(path)
    return _from_tree(tree, tensors.__getitem__)


def _to_tree(value: object, where: str, tensors: dict[str, Tensor]) -> object:
    """Return JSON in which containers and tensors are tagged: ``["tuple", …]``, ``["tensor", key]``."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list() | tuple():
            items = [_to_tree(item, f"{where}[{index}]", tensors) for index, item in enumerate(value)]
            return ["tuple" if isinstance(value, tuple) else "list", *items]
        case dict() if all(isinstance(key, str) for key in value):
            return {key: _to_tree(item, f"{where}[{key!r}]", tensors) for key, item in value.items()}
        case _ if _is_tensor(value):
            key = f"tensor-{len(tensors)}"
            tensors[key] = value.detach().cpu().contiguous().clone()  # type: ignore[attr-defined]
            return ["tensor", key]
        case _:
            raise LaunchError(
                f"{where} is a {type(value).__name__}, which cannot be sent to another process; "
                f"arguments and results are JSON values (None, numbers, text, lists, tuples, dicts with text keys) "
                f"and tensors; "
                f"pass the values from which it is built, and build it inside the function"
            )


def _from_tree(tree: object, tensor: Callable[[str], Tensor]) -> object:
    if isinstance(tree, dict):
        return {key: _from_tree(item, tensor) for key, item in tree.items()}
    if not isinstance(tree, list):
        return tree
    kind, *items = tree
    if kind == "tensor":
        return tensor(items[0])
    values = [_from_tree(item, tensor) for item in items]
    return tuple(values) if kind == "tuple" else values


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")  # no tensor exists before it is imported
    return torch is not None and isinstance(value, torch.Tensor)


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
        args: JSON values and tensors, the same for every rank.
        threads_per_rank: as ``run_command``.
        bind: as ``run_command``.
        timeout_s: as ``run_command``.
        on_line: called with every line that a rank writes.

    Raises:
        LaunchError: the function cannot be imported, an argument cannot be sent, or a rank failed, which the first line
            names.
        KeyboardInterrupt: after Ctrl-C, when all ranks have ended.
    """
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
