"""Check the shape of functions and tests, and that packages, strategies and interpreters say what they must."""

import ast

from tests.house.source import (
    FILES,
    SOURCE,
    TEST_FILES,
    code_lines,
    dotted,
    functions,
    name_of,
    nodes,
    num_lines,
    parsed,
    public_definitions,
)

NOT_THE_REAL_THING = {"mock", "Mock", "MagicMock", "patch", "sleep"}
PACKAGES = sorted(path.parent for path in FILES if path.name == "__init__.py")
FOLDERS = sorted({path.parent for path in FILES})
INTERPRETERS = [path for path in FILES if path.relative_to(SOURCE).parts[0] in {"runtime", "simulator", "viz"}]
STRATEGIES = [path for path in FILES if path.relative_to(SOURCE).parts[0] == "strategies"]


def test_a_function_fits_a_screen():
    """The signature counts, the docstring does not."""
    lengths = [(path, f, code_lines(f)) for path in [*FILES, *TEST_FILES] for f in functions(path)]
    assert not [f"{name_of(path)}:{f.lineno}: {f.name} has {lines} lines" for path, f, lines in lengths if lines > 60]


def test_a_test_shows_one_behaviour():
    tests = [(path, f) for path in TEST_FILES for f in functions(path) if f.name.startswith("test_")]
    assert not [
        f"{name_of(path)}:{f.lineno}: {f.name} has {num_lines(f)} lines" for path, f in tests if num_lines(f) > 20
    ]


def test_a_test_uses_the_real_thing_and_does_not_sleep():
    """Fakes with behaviour of their own live in counterpoint.testing."""
    names = [(path, node.lineno, node.id) for path in TEST_FILES for node in nodes(path, ast.Name)]
    names += [(path, node.lineno, node.attr) for path in TEST_FILES for node in nodes(path, ast.Attribute)]
    assert not [f"{name_of(path)}:{line}" for path, line, name in names if name in NOT_THE_REAL_THING]


def asserts(parts):
    """Tell whether a function of these nodes has an assert of its own, or expects an exception or a warning."""
    calls = [node.func for node in parts if isinstance(node, ast.Call)]
    return any(isinstance(node, ast.Assert) for node in parts) or any(
        isinstance(call, ast.Attribute) and call.attr in {"raises", "warns", "fail"} for call in calls
    )


def called(parts):
    """Return the names that a function of these nodes calls."""
    calls = [node.func for node in parts if isinstance(node, ast.Call)]
    return {call.id if isinstance(call, ast.Name) else call.attr for call in calls
            if isinstance(call, ast.Name | ast.Attribute)}  # fmt: skip


def test_every_test_can_fail():
    everything = [(f.name, list(ast.walk(f))) for path in TEST_FILES for f in functions(path)]
    checking = {name for name, parts in everything if asserts(parts)} | {"check", "golden"}
    tests = [(name, parts) for name, parts in everything if name.startswith("test_")]
    assert tests
    assert not [name for name, parts in tests if not asserts(parts) and not called(parts) & checking]


def test_every_folder_is_a_package():
    assert not [name_of(folder) for folder in FOLDERS if folder not in [*PACKAGES, SOURCE]]


def test_a_package_says_why_it_exists():
    docstrings = {package: ast.get_docstring(parsed(package / "__init__.py")) or "" for package in PACKAGES}
    assert not [name_of(package) for package, text in docstrings.items() if len(text.split()) < 5]


def test_a_module_says_what_it_is_for():
    assert not [name_of(path) for path in FILES if not ast.get_docstring(parsed(path))]


def test_every_public_name_has_a_docstring():
    assert not [
        f"{name_of(path)}:{node.lineno}: {node.name}"
        for path in FILES
        for node in public_definitions(path)
        if not ast.get_docstring(node)
    ]


def is_strategy(definition):
    """Tell whether a class lowers programs and is not the protocol of those that do."""
    lowers = any(isinstance(node, ast.FunctionDef) and node.name == "lower" for node in definition.body)
    return lowers and "Protocol" not in [dotted(base).split(".")[-1] for base in definition.bases]


def test_a_strategy_states_its_cost_and_its_source():
    strategies = [node for path in STRATEGIES for node in parsed(path).body if isinstance(node, ast.ClassDef)]
    docstrings = {node.name: ast.get_docstring(node) or "" for node in strategies if is_strategy(node)}
    assert docstrings
    assert not [name for name, text in docstrings.items() if "Cost:" not in text or "Source:" not in text]


def test_an_interpreter_names_every_instruction():
    """``case _`` would hide the next instruction from the type checker."""
    cases = [(path, node) for path in INTERPRETERS for node in nodes(path, ast.match_case)]
    assert not [
        f"{name_of(path)}:{case.pattern.lineno}"
        for path, case in cases
        if not case.guard and isinstance(case.pattern, ast.MatchAs) and not case.pattern.pattern
    ]


def only_declares(node):
    """Tell whether others write what a class or function says: a protocol, an abstract class, an overload."""
    match node:
        case ast.ClassDef():
            return {"Protocol", "ABC"} & {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}
        case ast.FunctionDef():
            return "overload" in [dotted(mark) for mark in node.decorator_list]
        case _:
            return False


def is_empty(node):
    """Tell whether the last statement of a function is ``...`` or its own docstring."""
    last = node.body[-1]
    return isinstance(last, ast.Expr) and isinstance(last.value, ast.Constant)


def test_every_function_has_been_written():
    empty = []
    for path in FILES:
        declaring = [node for node in nodes(path, ast.ClassDef, ast.FunctionDef) if only_declares(node)]
        declared = {id(inner) for node in declaring for inner in ast.walk(node)}
        undeclared = [node for node in nodes(path, ast.FunctionDef) if is_empty(node) and id(node) not in declared]
        empty += [f"{name_of(path)}: {ast.unparse(node)}" for node in undeclared]
    assert not empty
