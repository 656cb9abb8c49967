"""What may not be in the source at all: swallowed errors, pickles, the environment outside the launchers."""

import ast

import pytest

from tests.house.source import FILES, SOURCE, dotted, imports, name_of, parsed

PICKLES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
PICKLING_CALLS = {
    "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list",
    "send_object_list", "recv_object_list",
}  # fmt: skip
ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv"}
OUTSIDE_LAUNCHERS = [path for path in FILES if path.relative_to(SOURCE).parts[0] != "launchers"]


def swallows(handler):
    """It catches everything, by no name at all or by naming the root and doing nothing."""
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    broad = any(kind is not None and dotted(kind) in {"Exception", "BaseException"} for kind in kinds)
    return handler.type is None or (broad and all(isinstance(node, ast.Pass | ast.Continue) for node in handler.body))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_error_is_swallowed(path):
    handlers = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.ExceptHandler)]
    assert not [f"line {handler.lineno}" for handler in handlers if swallows(handler)]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_is_pickled(path):
    names = {dotted(node) for node in ast.walk(parsed(path)) if isinstance(node, ast.Attribute | ast.Name)}
    assert not {name for name in imports(path) if name.split(".")[0] in PICKLES}
    assert not names & {"torch.save", "torch.load", "torch.serialization"}
    assert not {name for name in [*names, *imports(path)] if name.split(".")[-1] in PICKLING_CALLS}


@pytest.mark.parametrize("path", OUTSIDE_LAUNCHERS, ids=name_of)
def test_only_launchers_read_the_environment(path):
    read = {dotted(node) for node in ast.walk(parsed(path)) if isinstance(node, ast.Attribute)} & ENVIRONMENT
    assert not read | (set(imports(path)) & ENVIRONMENT)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_only_the_fabric_knows_torch_distributed(path):
    used = {name for name in imports(path) if f"{name}.".startswith("torch.distributed.")}
    assert not used or path.relative_to(SOURCE).parts[0] == "fabric"
