"""Check what may not be in the source at all: swallowed errors, pickles, the environment outside the launchers."""

import ast

from tests.house.source import FILES, SOURCE, dotted, imports, name_of, parsed

PICKLES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
PICKLING_CALLS = {
    "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list",
    "send_object_list", "recv_object_list",
}  # fmt: skip
EXPORT = "src/counterpoint/training/checkpointing/export.py"
ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv"}


def package_of(path):
    """Return the package of counterpoint that a file belongs to."""
    return path.relative_to(SOURCE).parts[0]


def names_in(path):
    """Return every name and dotted name that a file reads."""
    return {dotted(node) for node in ast.walk(parsed(path)) if isinstance(node, ast.Attribute | ast.Name)}


def swallows(handler):
    """Tell whether a handler catches everything: by no name at all, or by naming the root and doing nothing."""
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    broad = any(kind is not None and dotted(kind) in {"Exception", "BaseException"} for kind in kinds)
    return handler.type is None or (broad and all(isinstance(node, ast.Pass | ast.Continue) for node in handler.body))


def test_no_error_is_swallowed():
    handlers = [
        (path, node) for path in FILES for node in ast.walk(parsed(path)) if isinstance(node, ast.ExceptHandler)
    ]
    assert not [f"{name_of(path)}:{handler.lineno}" for path, handler in handlers if swallows(handler)]


def test_nothing_is_pickled():
    pickling = []
    for path in FILES:
        used = set(imports(path))
        pickling += [f"{name_of(path)}: {name}" for name in used if name.split(".")[0] in PICKLES]
        loads = {"torch.save", "torch.load", "torch.serialization"}
        if name_of(path) == EXPORT:  # decision 77: for other programs, and never read
            loads.remove("torch.save")
        pickling += [f"{name_of(path)}: {name}" for name in names_in(path) & loads]
        pickling += [
            f"{name_of(path)}: {name}" for name in names_in(path) | used if name.split(".")[-1] in PICKLING_CALLS
        ]
    assert not pickling


def test_only_launchers_read_the_environment():
    outside = [path for path in FILES if package_of(path) != "launchers"]
    assert not [name_of(path) for path in outside if (names_in(path) | set(imports(path))) & ENVIRONMENT]


def test_only_the_fabric_knows_torch_distributed():
    using = [path for path in FILES if any(f"{name}.".startswith("torch.distributed.") for name in imports(path))]
    assert not [name_of(path) for path in using if package_of(path) != "fabric"]
