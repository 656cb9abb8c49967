"""A model is traced without loading networkx, which other code can import as usual."""

import subprocess
import sys
import threading

import pytest

from counterpoint.partitioning.tracing import lazy_networkx as unloaded
from counterpoint.partitioning.tracing.lazy_networkx import LazyNetworkx, without_networkx

LIBRARY = "stand_in_for"
READING = "import stand_in_for\nclass Reader:\n    def read(self, graph: stand_in_for.DiGraph): ...\n"
"""What a module of torch does while it is loaded."""


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Return ``is_loaded()`` of a library that can be imported, and is not."""
    (tmp_path / f"{LIBRARY}.py").write_text("class DiGraph: ...\nNUMBER = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(unloaded, "LIBRARY", LIBRARY)
    monkeypatch.setattr(unloaded, "IMPORTER", "nowhere")
    monkeypatch.delitem(sys.modules, LIBRARY, raising=False)
    yield lambda: LIBRARY in sys.modules and not isinstance(sys.modules[LIBRARY], LazyNetworkx)
    sys.modules.pop(LIBRARY, None)


def read(name):
    """Return what a module of this name has that reads the library's class in an annotation."""
    result = {"__name__": name}
    exec(READING, result)
    return result


def test_torch_is_loaded_without_it(library):
    with without_networkx():
        assert read("torch.part")["Reader"].read.__annotations__ == {"graph": object}
    assert LIBRARY not in sys.modules


def test_what_torch_has_of_it_becomes_the_library(library):
    with without_networkx():
        result = read("torch.part")[LIBRARY]
    assert result.NUMBER == 3
    assert result.DiGraph is sys.modules[LIBRARY].DiGraph
    assert library()


@pytest.mark.parametrize("name", ["user.part", "torchlike"])
def test_others_get_the_library_meanwhile(library, name):
    with without_networkx():
        result = read(name)["Reader"]
        assert library()
    assert result.read.__annotations__["graph"] is sys.modules[LIBRARY].DiGraph


def test_another_thread_gets_the_library_meanwhile(library):
    result = {}
    with without_networkx():
        thread = threading.Thread(target=lambda: result.update(read("user.part")))
        thread.start()
        thread.join(10)
        assert read("torch.part")["Reader"].read.__annotations__
    assert result["Reader"].read.__annotations__["graph"] is sys.modules[LIBRARY].DiGraph


def test_asking_every_module_for_its_file_loads_nothing(library):
    """The module `inspect` does, for torch."""
    with without_networkx():
        assert str(sys.modules[LIBRARY].__file__).endswith(f"{LIBRARY}.py")
        assert not library()


def test_a_failure_inside_leaves_nothing(library):
    with pytest.raises(KeyError), without_networkx():
        raise KeyError
    assert LIBRARY not in sys.modules


def test_what_is_loaded_already_is_not_touched(library):
    before = __import__(LIBRARY)
    with without_networkx():
        assert sys.modules[LIBRARY] is before
    assert sys.modules[LIBRARY] is before


def test_where_there_is_none_nothing_happens(monkeypatch):
    monkeypatch.setattr(unloaded, "LIBRARY", "no_such_library")
    monkeypatch.setattr(unloaded, "IMPORTER", "nowhere")
    with without_networkx():
        assert "no_such_library" not in sys.modules


TRACING = """
import sys, torch
from counterpoint.partitioning.tracing.export_trace import export_graph
export_graph(torch.nn.Linear(2, 2), (torch.ones(3, 2),), training=True)
assert "torch._functorch.partitioners" in sys.modules
assert not [name for name in sys.modules if name.split(".")[0] == "networkx"]
"""
USING = """
import networkx
assert type(networkx.DiGraph()).__module__ == "networkx.classes.digraph"
assert len(networkx.path_graph(3)) == 3
run = torch.compile(lambda x: (x.sin() * x).sum(), backend="aot_eager")
run(torch.ones(2, requires_grad=True)).backward()
"""


@pytest.mark.slow
@pytest.mark.parametrize("then", ["", USING], ids=["a trace", "its use"])
def test_in_a_fresh_interpreter_a_trace_loads_nothing_of_it_and_it_works_afterwards(then):
    done = subprocess.run([sys.executable, "-c", TRACING + then], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
