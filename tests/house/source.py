"""Read the tree for the rules of tests/house: files, their syntax, and what they define."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeVar

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
Node = TypeVar("Node", bound=ast.AST)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_by_type(path: Path) -> dict[type[ast.AST], list[ast.AST]]:
    """Return everything in a file, read and walked once for all rules."""
    found = defaultdict(list)
    for node in ast.walk(parsed(path)):
        found[type(node)].append(node)
    return dict(found)


def nodes(path: Path, *types: type[Node]) -> list[Node]:
    """Return all nodes of some types in a file, type by type."""
    found = nodes_by_type(path)
    return [node for one in types for node in found.get(one, ()) if isinstance(node, one)]


def functions(path: Path) -> list[Function]:
    return nodes(path, ast.FunctionDef, ast.AsyncFunctionDef)


def definitions(path: Path) -> list[Definition]:
    return nodes(path, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def public_definitions(path: Path) -> Iterator[Definition]:
    """Yield the definitions that other modules may use: not in a function, and no name on the way begins with ``_``."""
    outer: list[ast.AST] = [parsed(path)]
    for node in outer:  # it grows meanwhile
        for inner in ast.iter_child_nodes(node):
            if not isinstance(inner, Definition):
                outer += [inner] if isinstance(inner, ast.stmt | ast.ExceptHandler | ast.match_case) else []
            elif not inner.name.startswith("_"):
                yield inner
                outer += [inner] if isinstance(inner, ast.ClassDef) else []


def num_lines(function: Function) -> int:
    """Return the lines of the body, without signature and docstring."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


def code_lines(definition: Definition) -> int:
    """Return the lines from ``def`` or ``class`` to the end without the docstring, which users of the API need."""
    first = definition.body[0]
    docstring = (first.end_lineno or 0) - first.lineno + 1 if ast.get_docstring(definition) else 0
    return (definition.end_lineno or 0) - definition.lineno + 1 - docstring


def dotted(node: ast.AST) -> str:
    """Return ``os.environ`` for the expression that reads it; empty for anything but names and dots."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            return f"{head}.{attr}" if (head := dotted(value)) else ""
        case _:
            return ""


@cache
def names_in(path: Path) -> frozenset[str]:
    """Return every name and dotted name that a file reads."""
    return frozenset(dotted(node) for node in nodes(path, ast.Attribute, ast.Name))


@cache
def imports(path: Path) -> frozenset[str]:
    """Return every module, and every name of a module, that a file imports anywhere in it."""
    modules = {alias.name for node in nodes(path, ast.Import) for alias in node.names}
    return frozenset(
        modules | {f"{node.module}.{alias.name}" for node in nodes(path, ast.ImportFrom) for alias in node.names}
    )


def strings(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the strings of a file, parts of f-strings among them, with their lines."""
    yield from ((node.value, node.lineno) for node in nodes(path, ast.Constant) if isinstance(node.value, str))


@cache
def words(identifier: str) -> tuple[str, ...]:
    """Return ``("ring", "all", "reduce")`` for ring_all_reduce as for RingAllReduce."""
    parts = re.split(r"_+|(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", identifier)
    return tuple(part.lower() for part in parts if part)
