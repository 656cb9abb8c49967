"""Design of the house: why each room exists, what a strategy states, what an interpreter names."""

import ast

import pytest

from tests.house.source import (
    FILES,
    SOURCE,
    all_lines,
    definitions,
    dotted,
    inside_functions,
    name_of,
    parsed,
)

PACKAGES = sorted(path.parent for path in FILES if path.name == "__init__.py")
FOLDERS = sorted({path.parent for path in FILES})
INTERPRETERS = [path for path in FILES if path.relative_to(SOURCE).parts[0] in {"runtime", "simulator", "drawing"}]
STRATEGIES = [path for path in FILES if path.relative_to(SOURCE).parts[0] == "strategies"]


def test_every_folder_is_a_package():
    assert not [name_of(folder) for folder in FOLDERS if folder not in [*PACKAGES, SOURCE]]


@pytest.mark.parametrize("package", PACKAGES, ids=name_of)
def test_a_room_says_why_it_exists(package):
    docstring = ast.get_docstring(parsed(package / "__init__.py")) or ""
    assert len(docstring.split()) >= 5, "say in one sentence what lives here and why it is a room of its own"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_says_why_it_exists(path):
    assert ast.get_docstring(parsed(path))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_what_has_a_name_for_others_says_what_is_true_afterwards(path):
    """Methods of private classes, too; a function inside another may leave it out if it has at most seven lines."""
    short = {id(one) for one in inside_functions(path) if all_lines(one) <= 7}
    named = [one for one in definitions(path) if not one.name.startswith("_") and id(one) not in short]
    assert not [f"{one.name}:{one.lineno}" for one in named if not ast.get_docstring(one)]


def is_strategy(definition):
    """A class that lowers programs and is not the protocol of those that do."""
    lowers = any(isinstance(node, ast.FunctionDef) and node.name == "lower" for node in definition.body)
    return lowers and "Protocol" not in [dotted(base).split(".")[-1] for base in definition.bases]


@pytest.mark.parametrize("path", STRATEGIES, ids=name_of)
def test_a_strategy_states_its_cost_and_its_source(path):
    for definition in parsed(path).body:
        if isinstance(definition, ast.ClassDef) and is_strategy(definition):
            docstring = ast.get_docstring(definition) or ""
            assert "Cost:" in docstring, f"what does {definition.name} cost, in bytes and in time?"
            assert "Source:" in docstring, f"where is {definition.name} published?"


@pytest.mark.parametrize("path", INTERPRETERS, ids=name_of)
def test_an_interpreter_names_every_instruction(path):
    cases = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.match_case) and not node.guard]
    wild = [f"line {c.pattern.lineno}" for c in cases if isinstance(c.pattern, ast.MatchAs) and not c.pattern.pattern]
    assert not wild, "`case _` would hide the next instruction from the type checker"


def only_declares(node):
    """Protocols and abstract classes say what others write; so does an overload."""
    match node:
        case ast.ClassDef():
            return {"Protocol", "ABC"} & {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}
        case ast.FunctionDef():
            return "overload" in [dotted(mark) for mark in node.decorator_list]
        case _:
            return False


def is_empty(node):
    """A function whose last statement is ``...`` or its own docstring."""
    last = node.body[-1] if isinstance(node, ast.FunctionDef) else None
    return isinstance(last, ast.Expr) and isinstance(last.value, ast.ConstantInit)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_function_has_been_written(path):
    nodes = list(ast.walk(parsed(path)))
    declared = {id(inner) for node in nodes if only_declares(node) for inner in ast.walk(node)}
    assert not [ast.unparse(node) for node in nodes if is_empty(node) and id(node) not in declared]
