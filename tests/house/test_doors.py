"""What importing costs: the rooms that decide never load torch, and the front door opens at once."""

import importlib
import json
import re
import subprocess
import sys
import tomllib

import pytest

from tests.house.source import FILES, ROOT, SOURCE, imports

PURE = ["world", "program", "model", "strategies", "plan", "compiler", "simulator", "drawing", "planner"]
MODULES = {
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES
}
LIGHT = [name for name in MODULES if name.split(".")[1:2] and name.split(".")[1] in PURE]
DOOR = pytest.mark.skipif("counterpoint" not in MODULES, reason="there is no front door yet")

WHO_LOADS_TORCH = """
import importlib, json, sys
loads = []
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
    if "torch" in sys.modules:
        loads.append(name)
        break
print(json.dumps(loads))
"""
HOW_LONG = "import time; t = time.process_time(); import counterpoint; print(time.process_time() - t)"


def python(*arguments):
    """What a fresh interpreter prints, this tree's package importable in it."""
    code = f"import sys; sys.path.insert(0, {str(SOURCE.parent)!r})\n{arguments[0]}"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments[1:]], capture_output=True, text=True, check=True, timeout=50
    ).stdout


def sort_key(name):
    """Constants, then classes, then functions, as ruff sorts ``__all__``."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def test_importing_the_pure_rooms_never_loads_torch():
    entrances = [name for name in ("counterpoint", "counterpoint.cli", "counterpoint.cli.main") if name in MODULES]
    assert json.loads(python(WHO_LOADS_TORCH, json.dumps([*entrances, *LIGHT]))) == []


@pytest.mark.parametrize("name", LIGHT)
def test_a_pure_room_does_not_import_torch_late_either(name):
    assert not [found for found in imports(MODULES[name]) if found.split(".")[0] == "torch"]


def test_the_import_contracts_name_every_pure_room():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (above, rooms), *others = [
        c["layers"] for c in settings["tool"]["importlinter"]["contracts"] if "torch" in c["name"]
    ]
    assert (above, others) == ("(torch)", [])
    assert set(re.findall(r"counterpoint\.(\w+)", rooms)) == set(PURE)


def test_the_front_door_opens_in_a_fifth_of_a_second():
    """In seconds of this process, not of the clock: a busy machine cannot fail it."""
    assert min(float(python(HOW_LONG)) for _ in range(3)) < 0.2


@DOOR
def test_the_front_door_is_small_and_in_order():
    names = [name for name in importlib.import_module("counterpoint").__all__ if not name.startswith("__")]
    assert 0 < len(names) <= 40
    assert names == sorted(names, key=sort_key)


@DOOR
def test_every_name_on_the_door_leads_somewhere():
    door = importlib.import_module("counterpoint")
    assert not [name for name in door.__all__ if getattr(door, name, None) is None]


def test_the_package_says_that_it_is_typed():
    assert (SOURCE / "py.typed").is_file()
