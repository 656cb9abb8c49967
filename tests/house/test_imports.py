"""Check what importing costs: the pure packages never load torch, and `import counterpoint` is fast."""

import importlib
import json
import re
import subprocess
import sys
import tomllib

from tests.house.source import FILES, ROOT, SOURCE, imports

PURE = ["world", "program", "model", "strategies", "plan", "compiler", "simulator", "viz", "planner"]
MODULES = {
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES
}
LIGHT = [name for name in MODULES if name.split(".")[1:2] and name.split(".")[1] in PURE]

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
WHAT_TRACING_NEEDS = """
import sys
from functools import partial
import torch
import counterpoint as cp
model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
make_optimizer, loss = partial(torch.optim.SGD, lr=0.1), torch.nn.functional.mse_loss
with cp.parallelize(model, make_optimizer, loss, strategy="data(2)") as step:
    step(torch.ones(4, 2), torch.ones(4, 2))
print(*{"sympy", "networkx"} & set(sys.modules))
"""
HOW_LONG = "import time; t = time.process_time(); import counterpoint; print(time.process_time() - t)"


def python(*arguments):
    """Return what a fresh interpreter prints that can import the package of this tree."""
    code = f"import sys; sys.path.insert(0, {str(SOURCE.parent)!r})\n{arguments[0]}"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments[1:]], capture_output=True, text=True, check=True, timeout=50
    ).stdout


def sort_key(name):
    """Sort constants, then classes, then functions, as ruff sorts ``__all__``."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def test_importing_the_pure_packages_never_loads_torch():
    entry_points = [name for name in ("counterpoint", "counterpoint.cli", "counterpoint.cli.main") if name in MODULES]
    assert json.loads(python(WHO_LOADS_TORCH, json.dumps([*entry_points, *LIGHT]))) == []


def test_no_pure_package_imports_torch_inside_a_function():
    assert not [name for name in LIGHT if any(result.split(".")[0] == "torch" for result in imports(MODULES[name]))]


def test_the_import_contracts_name_every_pure_package():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (above, packages), *others = [
        c["layers"] for c in settings["tool"]["importlinter"]["contracts"] if "torch" in c["name"]
    ]
    assert (above, others) == ("(torch)", [])
    assert set(re.findall(r"counterpoint\.(\w+)", packages)) == set(PURE)


def test_importing_counterpoint_takes_less_than_a_fifth_of_a_second():
    """Processor time counts, so that a busy machine cannot fail it."""
    assert min(float(python(HOW_LONG)) for _ in range(3)) < 0.2


def test_a_rank_loads_what_traces_a_model_only_when_it_traces_one():
    """Sympy alone takes 0.6 s and 36 MB; looking for branches on the number of samples once loaded it, too."""
    assert python(WHAT_TRACING_NEEDS).split() == []


def test_the_public_names_are_few_and_in_order():
    names = [name for name in importlib.import_module("counterpoint").__all__ if not name.startswith("__")]
    assert 0 < len(names) <= 40
    assert names == sorted(names, key=sort_key)


def test_every_public_name_can_be_imported():
    package = importlib.import_module("counterpoint")
    assert not [name for name in package.__all__ if getattr(package, name, None) is None]


def test_the_package_is_marked_as_typed():
    assert (SOURCE / "py.typed").is_file()
