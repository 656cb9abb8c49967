"""Entry point of the ranks of ``launch``: import the function, call it, and write its result."""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from counterpoint.launchers.function import read_value, write_value
from counterpoint.launchers.rank_main import run_with_error_report


def call(folder: Path) -> None:
    """Call the function that ``folder`` describes, and write its result there."""
    call_spec = read_value(folder, "call")
    sys.path[:] = call_spec["path"]
    fn = find_function(call_spec["target"])
    write_value(folder, f"result-{os.environ['RANK']}", fn(*read_value(folder, "args")))


def find_function(target: str) -> Any:  # noqa: ANN401 - the user's
    """Import and return the function ``module:name`` or ``path.py:name``."""
    module_name, _, name = target.rpartition(":")
    module = (
        _import_script(module_name)
        if module_name.endswith(".py") or os.sep in module_name
        else importlib.import_module(module_name)
    )
    return attrgetter(name)(module)


def _import_script(path: str) -> ModuleType:
    """Import a script under multiprocessing's name for the main module, so that its main block does not run."""
    module = ModuleType("__mp_main__")
    module.__dict__.update(runpy.run_path(path, run_name="__mp_main__"))
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    return module


if __name__ == "__main__":
    sys.exit(run_with_error_report(lambda: call(Path(sys.argv[1]))))
