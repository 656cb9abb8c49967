"""Check what may not be in the source: swallowed errors, pickles, code made from data, the environment outside launchers."""

import ast

from tests.house.source import FILES, SOURCE, dotted, imports, name_of, names_in, nodes

PICKLES = {
    "pickle", "_pickle", "cPickle", "pickletools", "cloudpickle", "dill", "joblib", "marshal", "shelve", "copyreg",
    "jsonpickle", "xmlrpc",
}  # fmt: skip
PICKLE_READERS = {
    f"{module}.{name}"
    for module, names in {
        "np": ["load", "lib.npyio.NpzFile"], "numpy": ["load"], "torch.hub": ["load"], "torch.jit": ["load"],
        "torch.package": ["PackageImporter"], "pd": ["read_pickle"], "pandas": ["read_pickle"],
        "concurrent.futures": ["ProcessPoolExecutor"],
        "multiprocessing": ["Manager", "Pipe", "Pool", "Queue", "SimpleQueue", "connection.Client", "connection.Listener"],
    }.items()
    for name in names
}  # fmt: skip
PICKLING_CALLS = {
    "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list",
    "send_object_list", "recv_object_list",
}  # fmt: skip
PIPES = {  # nameless, to processes that the file itself starts
    "src/counterpoint/data/loader.py",
    "src/counterpoint/launchers/worker_pool.py",
}
EXPORT = "src/counterpoint/training/checkpointing/export.py"
DEEPSPEED_FILES = "src/counterpoint/compat/deepspeed/zero_files.py"
CODE_FROM_TEXT = {"eval", "exec", "compile", "__import__"}
IMPORTERS = {"importlib", "runpy", "imp", "pkgutil", "pydoc", "code", "codeop", "zipimport"}
SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "pty.spawn"}
UNSAFE_YAML = {"yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "yaml.Loader", "yaml.UnsafeLoader"}
HARMLESS_IMPORTERS = {"importlib.metadata", "importlib.util.find_spec"}  # they run no module
IMPORTS_BY_NAME = {
    "src/counterpoint/__init__.py": "its own modules, when a name of the package is read first",
    "src/counterpoint/checkpoint/__init__.py": "its own modules, when a name of the package is read first",
    "src/counterpoint/cli/doctor.py": "asks only where torch is",
    "src/counterpoint/cli/main.py": "the module of a command, from a table in the source",
    "src/counterpoint/data/digits.py": "scikit-learn, which may be absent",
    "src/counterpoint/launchers/function_main.py": "the function that `launch` was given by this user's own script",
    "src/counterpoint/launchers/rank_main.py": "the script of this user's own command line",
    "src/counterpoint/launchers/script.py": "the script of this user's own command line",
    "src/counterpoint/partitioning/tracing/lazy_networkx.py": "networkx, when torch first needs it",
    "src/counterpoint/runtime/compiler_import.py": "sympy and torch's symbolic sizes, when torch first needs them",
    "src/counterpoint/spark/module_codec.py": "classes of a model: torch's own from a table, others if the user trusts them",
    "src/counterpoint/testing/claims.py": "the scripts of benchmarks/ in this repository",
}
OPENED_WITHOUT_FILE_READER = {
    "src/counterpoint/checkpoint/folder_lock.py": "files of the kernel",
    "src/counterpoint/cli/doctor.py": "files of the kernel",
    "src/counterpoint/cli/rank_main.py": "the job that the process which started this one has written",
    "src/counterpoint/data/sources.py": "modules of this Python",
    "src/counterpoint/device/inventory.py": "files of the kernel",
    "src/counterpoint/rpc/segments.py": "memory that another process of the job has announced",
    "src/counterpoint/runtime/offload/chunk_file.py": "files of the kernel",
    "src/counterpoint/spark/shard.py": "the task's own temporary folder",
    "src/counterpoint/testing/claims.py": "the claims of benchmarks/ in this repository",
    "src/counterpoint/training/checkpointing/checkpoint_dir.py": "what the ranks have just written there",
    "src/counterpoint/world/process_stat.py": "files of the kernel",
}
WRITTEN_WITHOUT_FILE_WRITER = {
    "src/counterpoint/checkpoint/file_ops.py": "new files in a new folder, and not through links",
    "src/counterpoint/checkpoint/folder_lock.py": "the lock itself, and not through links",
    "src/counterpoint/cli/start.py": "this process's own temporary folder",
    "src/counterpoint/ps/process/disk_layout.py": "new files, and not through links",
    "src/counterpoint/ps/process/wal_writer.py": "logs that grow, and not through links",
    "src/counterpoint/rpc/job_key.py": "a new file",
    "src/counterpoint/spark/sample_readers.py": "the task's own temporary folder",
    "src/counterpoint/spark/task_main.py": "the task's own temporary folder",
    "src/counterpoint/training/callbacks/run_folder.py": "metrics that grow, after they were replaced",
    "src/counterpoint/training/reporting/tensorboard.py": "a new file",
}
ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv"}


def package_of(path):
    """Return the package of counterpoint that a file belongs to."""
    return path.relative_to(SOURCE).parts[0]


def swallows(handler):
    """Tell whether a handler catches everything: by no name at all, or by naming the root and doing nothing."""
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    broad = any(kind is not None and dotted(kind) in {"Exception", "BaseException"} for kind in kinds)
    return handler.type is None or (broad and all(isinstance(node, ast.Pass | ast.Continue) for node in handler.body))


def test_no_error_is_swallowed():
    handlers = [(path, node) for path in FILES for node in nodes(path, ast.ExceptHandler)]
    assert not [f"{name_of(path)}:{handler.lineno}" for path, handler in handlers if swallows(handler)]


def test_nothing_is_pickled():
    pickling = []
    for path in FILES:
        used = imports(path)
        if name_of(path) == DEEPSPEED_FILES:  # decision 116: the class of an error
            used = used - {"pickle.UnpicklingError"}
        pickling += [f"{name_of(path)}: {name}" for name in used if name.split(".")[0] in PICKLES]
        loads = {"torch.save", "torch.load", "torch.serialization"} | PICKLE_READERS
        if name_of(path) == EXPORT:  # decision 77: for other programs, and never read
            loads.remove("torch.save")
        if name_of(path) == DEEPSPEED_FILES:  # decision 116: with weights_only=True, which the next test checks
            loads -= {"torch.load", "torch.serialization"}
        pickling += [
            f"{name_of(path)}: {one}" for one in names_in(path) if one.endswith(".Pipe") and name_of(path) not in PIPES
        ]
        pickling += [f"{name_of(path)}: {name}" for name in names_in(path) & loads]
        pickling += [
            f"{name_of(path)}: {name}" for name in names_in(path) | used if name.split(".")[-1] in PICKLING_CALLS
        ]
    assert not pickling


def test_files_of_deepspeed_are_read_as_weights_only():
    path = next(path for path in FILES if name_of(path) == DEEPSPEED_FILES)
    loads = [call for call in nodes(path, ast.Call) if dotted(call.func) == "torch.load"]
    assert loads
    assert all(
        ("weights_only", True) in {(word.arg, getattr(word.value, "value", None)) for word in call.keywords}
        for call in loads
    )


def keywords_in(path):
    """Return every keyword of a call that is given a constant, with its value."""
    return {
        (word.arg, word.value.value)
        for call in nodes(path, ast.Call)
        for word in call.keywords
        if isinstance(word.value, ast.Constant)
    }


def own_names(path):
    """Return the names that a file imports from somewhere, or defines."""
    defined = {node.name for node in nodes(path, ast.FunctionDef)}
    return defined | {name.rpartition(".")[2] for name in imports(path)}


def test_no_text_becomes_code():
    """``compile`` of counterpoint and methods such as ``model.eval()`` are other functions."""
    found = []
    for path in FILES:
        called = {dotted(node.func) for node in nodes(path, ast.Call)}
        builtin = (called & CODE_FROM_TEXT) - own_names(path) if called & CODE_FROM_TEXT else set()
        found += [f"{name_of(path)}: {name}" for name in builtin | (called & {f"builtins.{n}" for n in CODE_FROM_TEXT})]
        shells = (names_in(path) | imports(path)) & (SHELLS | UNSAFE_YAML)
        wrong = keywords_in(path) & {("shell", True), ("allow_pickle", True), ("weights_only", False)}
        found += [f"{name_of(path)}: {name}" for name in (*shells, *wrong)]
    assert not found


def imports_by_name(path):
    """Tell whether a file can import a module whose name is not in an import statement, or find anything by a path."""
    modules = {name for name in imports(path) if name.split(".")[0] in IMPORTERS}
    harmless = {name for name in modules if any(f"{name}.".startswith(f"{one}.") for one in HARMLESS_IMPORTERS)}
    getters = [
        node
        for node in nodes(path, ast.Call)
        if dotted(node.func) in {"attrgetter", "operator.attrgetter"}
        and not all(isinstance(one, ast.Constant) for one in node.args)
    ]  # fmt: skip
    return bool(modules - harmless or getters)


def test_only_listed_files_import_by_name():
    assert {name_of(path) for path in FILES if imports_by_name(path)} == IMPORTS_BY_NAME.keys()


def reads_files(path):
    """Tell whether a file reads others with methods of ``Path``, which wait for pipes and follow links."""
    methods = [(call.func.attr, call.args) for call in nodes(path, ast.Call) if isinstance(call.func, ast.Attribute)]
    return any(
        name in {"read_text", "read_bytes"} or (name == "open" and args and ast.unparse(args[0]) in {"'r'", "'rb'"})
        for name, args in methods
    )


def test_files_that_may_come_from_elsewhere_are_opened_in_one_place():
    """Launchers and the fabric read files of the kernel, and those of their own temporary folders."""
    outside = [path for path in FILES if package_of(path) not in {"fabric", "launchers"}]
    assert {name_of(path) for path in outside if reads_files(path)} == OPENED_WITHOUT_FILE_READER.keys()


def writes_files(path):
    """Tell whether a file opens others for writing, which may be links, or fail in the middle."""
    methods = [(call.func.attr, call.args) for call in nodes(path, ast.Call) if isinstance(call.func, ast.Attribute)]
    return "os.O_CREAT" in names_in(path) or any(
        name in {"write_text", "write_bytes"}
        or (name == "open" and args and ast.unparse(args[0])[1:2] in {"w", "a", "x"} and ast.unparse(args[0])[0] == "'")
        for name, args in methods
    )


def test_files_are_written_in_one_place():
    """Launchers write to temporary folders of their own."""
    outside = [path for path in FILES if package_of(path) not in {"fabric", "launchers", "file_writer.py"}]
    assert {name_of(path) for path in outside if writes_files(path)} == WRITTEN_WITHOUT_FILE_WRITER.keys()


def test_only_launchers_read_the_environment():
    outside = [path for path in FILES if package_of(path) != "launchers"]
    assert not [name_of(path) for path in outside if (names_in(path) | imports(path)) & ENVIRONMENT]


def test_only_one_file_knows_torch_cuda():
    using = [path for path in FILES if any(f"{name}.".startswith("torch.cuda.") for name in names_in(path))]
    assert [name_of(path) for path in using] == ["src/counterpoint/device/cuda.py"]


def test_only_the_fabric_knows_torch_distributed():
    using = [path for path in FILES if any(f"{name}.".startswith("torch.distributed.") for name in imports(path))]
    assert not [name_of(path) for path in using if package_of(path) != "fabric"]
