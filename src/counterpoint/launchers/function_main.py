"""What runs inside a rank that was launched with a function: find it, call it, leave its result."""

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
    """The function that ``folder`` names has run, and its result is there."""
    order = read_value(folder, "call")
    sys.path[:] = order["path"]
    fn = find_function(order["target"])
    write_value(folder, f"result-{os.environ['RANK']}", fn(*read_value(folder, "args")))


def find_function(target: str) -> Any:  # noqa: ANN401 - the user's
    """Return what ``module:name`` or ``path.py:name`` names; what it stands in has been imported."""
    place, _, name = target.rpartition(":")
    module = _import_script(place) if place.endswith(".py") or os.sep in place else importlib.import_module(place)
    return attrgetter(name)(module)


def _import_script(path: str) -> ModuleType:
    """Return the script as a module under the name that multiprocessing gives it, so its main part does not run."""
    module = ModuleType("__mp_main__")
    module.__dict__.update(runpy.run_path(path, run_name="__mp_main__"))
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    return module


if __name__ == "__main__":
    sys.exit(run_with_error_report(lambda: call(Path(sys.argv[1]))))
