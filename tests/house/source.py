"""Read the tree for the rules of tests/house: files, their syntax, and what they define."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "counterpoint"
FILES = sorted(SOURCE.rglob("*.py"))
TEST_FILES = [*sorted((ROOT / "tests").rglob("*.py")), ROOT / "conftest.py"]
PAGES = [
    *(page for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md") if page.is_file()),
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts),
]

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return everything in a file, in the order of :func:`ast.walk`."""
    return tuple(ast.walk(parsed(path)))


def functions(path: Path) -> list[Function]:
    return [node for node in nodes(path) if isinstance(node, Function)]


def definitions(path: Path) -> list[Definition]:
    return [node for node in nodes(path) if isinstance(node, Definition)]


def num_lines(function: Function) -> int:
    """Return the lines of the body, without signature and docstring."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


def code_lines(definition: Definition) -> int:
    """Return the lines from ``def`` or ``class`` to the end without the docstring, which users of the API need."""
    first = definition.body[0]
    docstring = (first.end_lineno or 0) - first.lineno + 1 if ast.get_docstring(definition) else 0
    return (definition.end_lineno or 0) - definition.lineno + 1 - docstring


def inside_functions(path: Path) -> list[Definition]:
    """Return the functions and classes that are defined inside functions."""
    return [
        node
        for function in functions(path)
        for node in ast.walk(function)
        if isinstance(node, Definition) and node is not function
    ]


def dotted(node: ast.AST) -> str:
    """Return ``os.environ`` for the expression that reads it; empty for anything but names and dots."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            return f"{head}.{attr}" if (head := dotted(value)) else ""
        case _:
            return ""


def imports(path: Path) -> Iterator[str]:
    """Yield every module, and every name of a module, that a file imports anywhere in it."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def words(identifier: str) -> list[str]:
    """Return ``["ring", "all", "reduce"]`` for ring_all_reduce as for RingAllReduce."""
    parts = re.split(r"_+|(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", identifier)
    return [part.lower() for part in parts if part]
