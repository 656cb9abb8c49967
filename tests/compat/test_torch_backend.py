"""The backend is there without an import, costs nothing until it is used, and does no harm where it cannot be."""

import subprocess
import sys
import tomllib

import pytest

from tests.house.source import ROOT, SOURCE

SEEN = """
import sys, torch
import torch.distributed as dist
heavy = [name for name in sys.modules if name.startswith("counterpoint.") and "compat" not in name]
print(dist.is_backend_available("counterpoint"), dist.Backend.default_device_backend_map["cpu"], heavy)
"""
WITHOUT = """
import sys, types
sys.modules["torch"] = torch = types.ModuleType("torch")
torch.distributed = types.SimpleNamespace(is_available=lambda: False)
from counterpoint.compat.torch_backend import register
print(register())
"""


@pytest.fixture
def installed(tmp_path):
    """Return a folder that makes Python believe that the package is installed, with its entry points."""
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    info = tmp_path / "counterpoint-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: counterpoint\nVersion: 0.1.0\n")
    lines = [
        line for group, result in entries.items() for line in (f"[{group}]", *(" = ".join(e) for e in result.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


def python(code, *paths):
    inserted = "\n".join(f"sys.path.insert(0, {str(path)!r})" for path in paths)
    command = [sys.executable, "-c", f"import sys\n{inserted}\n{code}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=50).stdout.strip()


@pytest.mark.long
def test_importing_torch_is_enough_and_loads_nothing_heavy(installed):
    assert python(SEEN, SOURCE.parent, installed) == "True gloo []"


def test_without_a_distributed_package_registering_does_nothing():
    assert python(WITHOUT, SOURCE.parent) == "None"


@pytest.mark.long
def test_registering_twice_is_registering_once():
    code = "from counterpoint.compat.torch_backend import register\nregister(), register()\n"
    counted = "import torch.distributed as dist; print(dist.Backend.backend_list.count('counterpoint'))"
    assert python(code + counted, SOURCE.parent) == "1"
