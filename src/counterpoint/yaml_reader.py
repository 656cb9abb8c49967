"""YAML texts of users: their nodes with lines, and their values; whatever is wrong with a text is a ``PlanError``."""

from __future__ import annotations

import re
from typing import Any

import yaml

from counterpoint.errors import PlanError
from counterpoint.optim.validation import MAX_DIGITS, MAX_QUOTED, parse_digits, shorten

MAX_CHARACTERS = 1_000_000
"""The longest text that is parsed."""

MAX_NODES = 20_000
"""The largest number of values of a text, each counted as often as an alias repeats it: 0.6 s of reading."""

MAX_DEPTH = 50
"""How deeply lists and mappings may be nested."""


MAX_TYPED_CHARACTERS = 10_000
"""The longest value that may be something else than a text; to tell times from texts takes memory."""


class _Loader(yaml.SafeLoader):
    """A loader that reads 1e-3 as a number, as YAML 1.2 does, and has one kind of error for all wrong values."""

    depth = 0  # of the node that is being composed
    num_nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Return the next node of the text.

        Raises:
            RecursionError: it is nested too deeply. The scanner's time grows with the square of the depth, so it stops
                here.
            OverflowError: there are too many. A node takes a kilobyte, so that a text is not read to its end first.
        """
        self.depth += 1
        self.num_nodes += 1
        if self.num_nodes > MAX_NODES:
            raise OverflowError
        if self.depth > MAX_DEPTH:
            raise RecursionError
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:  # noqa: ANN401 - as in yaml
        """Return the tag of a node that has none."""
        is_text = kind is yaml.ScalarNode and implicit[0] and len(value) > MAX_TYPED_CHARACTERS
        tag: str = super().resolve(kind, value, (False, True) if is_text else implicit)  # type: ignore[no-untyped-call]
        return tag

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:  # noqa: ANN401, FBT001, FBT002 - as in yaml
        """Return the value of a node.

        Raises:
            ConstructorError: its text is not of the type that it has, or that its tag gives it.
        """
        kind = node.tag.rpartition(":")[2]
        try:
            if kind == "int" and len(node.value) > MAX_DIGITS + 1:  # with a sign
                parse_digits(node.value, "a whole number")
            return super().construct_object(node, deep)
        except PlanError as error:
            problem = str(error)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            problem = f"{shorten(str(node.value))} is not of the type {kind}; put quotes around a text"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def compose_yaml(text: object, file: str, what: str) -> yaml.Node | None:
    """Return the root of a text, whose keys are all scalars; None for an empty text.

    Args:
        text: one YAML document.
        file: its name, for errors; empty if the text is not from a file.
        what: what errors call it, such as ``the plan file``.

    Raises:
        PlanError: the text is not YAML, too long, too deeply nested or of too many values, a value contains itself, or
            a key is a list.
    """
    if not isinstance(text, str) or len(text) > MAX_CHARACTERS:
        fact = f"has {len(text)} characters" if isinstance(text, str) else f"is of the type {type(text).__name__}"
        raise _error_at(None, file, f"{what} {fact}; give a text of at most {MAX_CHARACTERS} characters")
    try:
        root = yaml.compose(text, Loader=_Loader)
    except RecursionError:
        raise _error_at(None, file, f"{what} is nested more than {MAX_DEPTH} levels deep; give a flat one") from None
    except OverflowError:
        raise _error_at(None, file, f"{what} has more than {MAX_NODES} values; write less") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise _error_at(mark, file, f"{what} is not YAML: {str(error)[: 5 * MAX_QUOTED]}") from None
    if root is not None:
        _check_node(root, file, 1, {})
    return root


def construct_value(node: yaml.Node, file: str) -> Any:  # noqa: ANN401 - any type that YAML has
    """Return the value of a node of :func:`compose_yaml`.

    Raises:
        PlanError: a part of it is not of the type that its text or its tag gives it.
    """
    loader = _Loader("")
    try:
        return loader.construct_document(node)
    except yaml.constructor.ConstructorError as error:
        raise _error_at(error.problem_mark, file, shorten(str(error.problem))) from None
    finally:
        loader.dispose()


def _error_at(mark: yaml.Mark | None, file: str, problem: str) -> PlanError:
    return PlanError(f"{file}:{1 if mark is None else mark.line + 1}: {problem}" if file else problem)


def _check_node(node: yaml.Node, file: str, depth: int, checked: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """Return the number of values in a node, and how deeply they are nested.

    Args:
        node: of any kind.
        file: its name, for errors.
        depth: of the node.
        checked: results by the id of a node; None for the nodes around this one.
    """
    if isinstance(node, yaml.ScalarNode):
        return 1, 1
    if id(node) not in checked and depth <= MAX_DEPTH:
        checked[id(node)] = None
        pairs = node.value if isinstance(node, yaml.MappingNode) else [(None, item) for item in node.value]
        for key, _ in pairs:
            if key is not None and not isinstance(key, yaml.ScalarNode):
                raise _error_at(key.start_mark, file, "a key is a list or a mapping; give it a name")
        children = [_check_node(child, file, depth + 1, checked) for _, child in pairs]
        checked[id(node)] = (
            1 + sum(size for size, _ in children),
            1 + max((height for _, height in children), default=0),
        )
    result = checked.get(id(node), (1, MAX_DEPTH + 1))
    if result is None:
        raise _error_at(node.start_mark, file, "a value contains itself, by its alias; write it without")
    size, height = result
    if size > MAX_NODES or height > MAX_DEPTH:
        fact = f"nested more than {MAX_DEPTH} levels deep" if height > MAX_DEPTH else f"more than {MAX_NODES} values"
        raise _error_at(node.start_mark, file, f"this is {fact}; write less")
    return result
