"""Shapes of a model's inputs, and for which of them a trace with symbolic dims is right.

torch traces a dim that varies as a symbol, and records what the forward has assumed about it: that a length is at most
that of a table of positions, or that two inputs have one length. A trace serves all shapes of which this is true::

    input_ids (s0, s1)      s0 >= 2, s1 <= 64        (4, 9) and (7, 12): yes     (4, 65) and (1, 9): no
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import SymBool, SymFloat, SymInt, Tensor, fx
from torch.utils._pytree import tree_leaves

from counterpoint.partitioning.dry_run import Inputs, split_call_args

InputShapes: TypeAlias = tuple[tuple[int, ...], ...]
"""The shape of every tensor among the inputs of a call; empty where a partition runs any shapes alike."""

Size: TypeAlias = int | float | bool
"""A number that depends on the shapes of the inputs."""


def list_input_shapes(inputs: Inputs) -> InputShapes:
    """Return the shape of every tensor among the inputs of a call.

    Example:
        >>> import torch
        >>> list_input_shapes({"x": torch.ones(2, 3), "flag": True, "y": torch.ones(2)})
        (torch.Size([2, 3]), torch.Size([2]))
    """
    return tuple([leaf.shape for leaf in tree_leaves(split_call_args(inputs)) if isinstance(leaf, Tensor)])


def pack_shapes(shapes: InputShapes) -> list[int]:
    """Return shapes as one list of numbers; :func:`unpack_shapes` is the inverse.

    Example:
        >>> pack_shapes(((2, 3), (), (4,)))
        [2, 2, 3, 0, 1, 4]
        >>> unpack_shapes([2, 2, 3, 0, 1, 4])
        ((2, 3), (), (4,))
    """
    return [number for shape in shapes for number in (len(shape), *shape)]


def unpack_shapes(numbers: Sequence[int]) -> InputShapes:
    """Return the shapes that a list of numbers stands for."""
    shapes, start = [], 0
    while start < len(numbers):
        stop = start + 1 + numbers[start]
        shapes.append(tuple(numbers[start + 1 : stop]))
        start = stop
    return tuple(shapes)


def format_shapes(shapes: InputShapes) -> str:
    """Return shapes as text."""
    return ", ".join(str(tuple(shape)) for shape in shapes)


def find_differing_dims(first: InputShapes, second: InputShapes) -> Iterator[tuple[int, int]]:
    """Yield tensor and dim of every size that differs; nothing if a tensor has another number of dims."""
    if list(map(len, first)) == list(map(len, second)):
        for index, (shape, other_shape) in enumerate(zip(first, second, strict=True)):
            for dim, (size, other_size) in enumerate(zip(shape, other_shape, strict=True)):
                if size != other_size:
                    yield index, dim


@dataclass(frozen=True, slots=True)
class ShapeGuards:
    """What must be true of the shapes of the inputs for a trace to be right.

    Args:
        dims: the dims of every input tensor, as numbers or expressions of symbols.
        conditions: what the forward has assumed of the symbols.
        bounds: expressions, each with its smallest and its largest value.
    """

    dims: tuple[tuple[Any, ...], ...]
    conditions: tuple[Any, ...] = ()
    bounds: tuple[tuple[Any, Any, Any], ...] = ()

    @staticmethod
    def read(inputs: Iterable[fx.Node]) -> ShapeGuards:
        """Return the guards of a trace, from the nodes of its inputs."""
        values = [value for node in inputs if isinstance(value := node.meta.get("val"), Tensor)]
        dims = tuple(tuple(to_expression(size) for size in value.shape) for value in values)
        sizes: list[Any] = [size for value in values for size in value.shape]
        symbolic = next((size for size in sizes if isinstance(size, SymInt)), None)
        if symbolic is None:
            return ShapeGuards(dims)
        environment = symbolic.node.shape_env

        def resolve(expression: Any) -> Any:  # noqa: ANN401 - an expression of sympy
            while (simpler := expression.xreplace(environment.replacements)) != expression:
                expression = simpler
            return expression

        return ShapeGuards(
            dims,
            tuple(resolve(guard.expr) for guard in environment.guards),
            tuple((resolve(symbol), bound.lower, bound.upper) for symbol, bound in environment.var_to_range.items()),
        )

    def bind(self, shapes: InputShapes) -> dict[Any, int] | None:
        """Return the value of each symbol for these shapes; None if the trace is not right for them."""
        if list(map(len, shapes)) != list(map(len, self.dims)):
            return None
        pairs = [pair for dims, shape in zip(self.dims, shapes, strict=True) for pair in zip(dims, shape, strict=True)]
        symbols: dict[Any, int] = {}
        for expression, size in pairs:
            if getattr(expression, "is_Symbol", False):
                symbols.setdefault(expression, size)
        expressions = [
            *(expression for expression, _ in pairs),
            *self.conditions,
            *(expression for expression, _, _ in self.bounds),
        ]
        if any(not free_symbols(expression) <= symbols.keys() for expression in expressions):
            return None
        is_right = (
            all(evaluate(expression, symbols) == size for expression, size in pairs)
            and all(evaluate(condition, symbols) for condition in self.conditions)
            and all(low <= evaluate(expression, symbols) <= high for expression, low, high in self.bounds)
        )
        return symbols if is_right else None

    def is_symbolic(self, index: int, dim: int) -> bool:
        """Return whether a dim of an input may have more than one size."""
        return bool(free_symbols(self.dims[index][dim]))


def to_expression(value: Any) -> Any:  # noqa: ANN401 - a number or an expression of sympy
    """Return a number of a trace: itself, or its expression if it is symbolic."""
    return value.node.expr if isinstance(value, SymInt | SymFloat | SymBool) else value


def free_symbols(expression: Any) -> frozenset[Any]:  # noqa: ANN401 - a number or an expression of sympy
    """Return the symbols in an expression."""
    return frozenset(getattr(expression, "free_symbols", ()))


def evaluate(expression: Any, symbols: Mapping[Any, int]) -> Size:  # noqa: ANN401 - a number or an expression of sympy
    """Return the value of an expression, with Python's arithmetic, as the forward itself would compute it."""
    if isinstance(expression, int | float):
        return expression
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    value: Size = sympy_interp(PythonReferenceAnalysis, dict(symbols), expression)
    return value


def lift_sizes(graph: fx.Graph, inputs: Iterable[fx.Node]) -> dict[fx.Node, Any]:
    """Replace what a graph computes from sizes of its inputs by constants; return the expression of each.

    Without them, an operation on sizes alone, such as ``arange(length)``, depends on no input, as in a trace with
    fixed dims, and no size has to be passed between layers.
    """
    values = [value for node in inputs if isinstance(value := node.meta.get("val"), Tensor)]
    symbols = {symbol for value in values for size in value.shape for symbol in free_symbols(to_expression(size))}
    sizes: dict[fx.Node, Any] = {}
    replaced: list[fx.Node] = []
    for node in list(graph.nodes):
        value = node.meta.get("val")
        is_size = node.op == "call_function" and isinstance(value, SymInt | SymFloat | SymBool | int | float)
        if symbols and is_size and free_symbols(to_expression(value)) <= symbols:
            node.replace_all_uses_with(_make_size_node(graph, sizes, value))
            replaced.append(node)
    for node in reversed(replaced):
        graph.erase_node(node)
    return sizes


def size_argument(graph: fx.Graph, sizes: dict[fx.Node, Any], size: Any) -> Any:  # noqa: ANN401 - a node or a number
    """Return a size as an argument of an operation: a number itself, else the node of its expression."""
    return _make_size_node(graph, sizes, size) if isinstance(size, SymInt) else size


def _make_size_node(graph: fx.Graph, sizes: dict[fx.Node, Any], value: object) -> fx.Node:
    expression = to_expression(value)
    known = next(
        (node for node, other in sizes.items() if type(other) is type(expression) and other == expression), None
    )
    if known is not None:
        return known
    with graph.inserting_before(next(iter(graph.nodes))):
        node = graph.create_node("get_attr", f"size_{len(sizes)}")
    node.meta["val"] = value
    sizes[node] = expression
    return node
