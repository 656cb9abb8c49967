"""Calls that are left out of the source code of this package for a while, so that a test shows what they are for.

A function gets the code that Python compiles from its source without the call: what is called on, and the arguments,
are evaluated all the same. Threads that are inside of the function go on with the former code.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import counterpoint

SOURCE = Path(counterpoint.__file__).parent


@dataclass(frozen=True, slots=True)
class SourceCall:
    """A call of a method in the source code.

    Args:
        path: of the file, below the package.
        function: that calls, with the names of its classes.
        method: that is called.
        number: among the calls of such a method in this function, from 0.
        line: of the call; where the source moves, it is another one.
    """

    path: str
    function: str
    method: str
    number: int
    line: int

    @property
    def place(self) -> str:
        """The file and the function."""
        return f"{self.path}:{self.function}"

    def __str__(self) -> str:
        return f"{self.place} {self.method}[{self.number}]"


def find_calls(methods: Collection[str], root: str = "") -> list[SourceCall]:
    """Return all calls of methods with these names, of the package or of one file or folder of it.

    Example:
        >>> [call.method for call in find_calls({"wait_stream"}, "device/communication_stream.py")]
        ['wait_stream', 'wait_stream']
    """
    top = SOURCE / root
    paths = [top] if top.suffix else sorted(top.rglob("*.py"))
    return [call for path in paths for call, _ in _calls_in(path) if call.method in methods]


@contextmanager
def left_out(call: SourceCall) -> Iterator[None]:
    """Leave out a call inside.

    Raises:
        LookupError: the source has no such call.
    """
    path = SOURCE / call.path
    node = next((node for other, node in _calls_in(path) if other == call), None)
    if node is None:
        raise LookupError(f"{call} is not in the source")
    tree = _LeaveOut(node.lineno, node.col_offset, node.end_col_offset or 0).visit(ast.parse(path.read_text()))
    code = _find_code(compile(ast.fix_missing_locations(tree), str(path), "exec"), call.function)
    function = _find_function(call)
    former, function.__code__ = function.__code__, code
    try:
        yield
    finally:
        function.__code__ = former


@lru_cache(None)
def _calls_in(path: Path) -> list[tuple[SourceCall, ast.Call]]:
    """Return the calls of methods in functions of a file, with their nodes."""
    found: list[tuple[SourceCall, ast.Call]] = []
    for name, function in _functions_of(ast.parse(path.read_text())):
        numbers: dict[str, int] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                method = node.func.attr
                number = numbers[method] = numbers.get(method, -1) + 1
                found.append((SourceCall(str(path.relative_to(SOURCE)), name, method, number, node.lineno), node))
    return found


def _functions_of(module: ast.AST, outer: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield functions and methods with their names; not those inside of functions, which belong to these."""
    for node in ast.iter_child_nodes(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{outer}{node.name}", node
        elif isinstance(node, ast.ClassDef):
            yield from _functions_of(node, f"{outer}{node.name}.")
        elif isinstance(node, ast.If | ast.Try):
            yield from _functions_of(node, outer)


class _LeaveOut(ast.NodeTransformer):
    def __init__(self, line: int, first_column: int, end_column: int) -> None:
        self._place = line, first_column, end_column

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Return the values that the call is made of, of which the last one is None."""
        if (node.lineno, node.col_offset, node.end_col_offset) != self._place:
            return self.generic_visit(node)
        assert isinstance(node.func, ast.Attribute), "a method"
        values = [node.func.value, *node.args, *(keyword.value for keyword in node.keywords), ast.Constant(None)]
        return ast.Subscript(ast.Tuple(values, ast.Load()), ast.Constant(-1), ast.Load())


def _find_code(module: CodeType, name: str) -> CodeType:
    code = module
    for part in name.split("."):
        code = next(one for one in code.co_consts if isinstance(one, CodeType) and one.co_name == part)
    return code


def _find_function(call: SourceCall) -> FunctionType:
    module = importlib.import_module(f"counterpoint.{call.path.removesuffix('.py').replace('/', '.')}")
    found: Any = module
    for part in call.function.split("."):
        found = inspect.getattr_static(found, part)
    found = getattr(found, "fget", None) or getattr(found, "__func__", found)
    function: FunctionType = inspect.unwrap(found)
    return function
