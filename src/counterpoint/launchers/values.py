"""Arguments and results of a launched function, as JSON with tensors beside it; nothing is pickled."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from counterpoint.errors import LaunchError

if TYPE_CHECKING:
    from torch import Tensor


def write_value(folder: Path, name: str, value: object) -> None:
    """The value is in ``folder`` under ``name``; ``read_value`` gives back an equal one.

    What is neither JSON nor a tensor is a LaunchError that says which part it is.
    """
    tensors: dict[str, Tensor] = {}
    tree = _to_tree(value, name, tensors)
    if tensors:
        from safetensors.torch import save_file

        save_file(tensors, folder / f"{name}.safetensors")
    (folder / f"{name}.json").write_text(json.dumps(tree), encoding="utf-8")


def read_value(folder: Path, name: str) -> Any:  # noqa: ANN401 - whatever the user's function takes or gives
    """Return what ``write_value`` wrote."""
    tree = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    path = folder / f"{name}.safetensors"
    tensors: dict[str, Tensor] = {}
    if path.exists():
        from safetensors.torch import load_file

        tensors = load_file(path)
    return _from_tree(tree, tensors.__getitem__)


def _to_tree(value: object, where: str, tensors: dict[str, Tensor]) -> object:
    """Return JSON in which every container and tensor says what it is: ``["tuple", …]``, ``["tensor", key]``."""
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
                f"{where} is a {type(value).__name__}, which cannot travel between processes; "
                f"arguments and results are JSON values (None, numbers, text, lists, tuples, dicts with text keys) "
                f"and tensors; "
                f"pass what it is made from, and build it inside the function"
            )


def _from_tree(tree: object, tensor: Callable[[str], Tensor]) -> object:
    if isinstance(tree, dict):
        return {key: _from_tree(item, tensor) for key, item in tree.items()}
    if not isinstance(tree, list):
        return tree
    kind, *items = tree
    if kind == "tensor":
        return tensor(items[0])
    found = [_from_tree(item, tensor) for item in items]
    return tuple(found) if kind == "tuple" else found


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")  # no tensor exists before it is imported
    return torch is not None and isinstance(value, torch.Tensor)
