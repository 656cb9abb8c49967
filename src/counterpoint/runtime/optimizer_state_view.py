"""The ``state`` of the user's optimizer while ranks have it: loaded, or refused, when it is first used after a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

USES = (
    "__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__reversed__", "__len__", "__eq__",
    "__ne__", "__or__", "__ror__", "__ior__", "__repr__", "keys", "values", "items", "get", "pop", "popitem",
    "setdefault", "update", "clear",
)  # fmt: skip
"""Methods of a mapping that read or change what it has."""


class StateOfRanks(defaultdict[Tensor, dict[str, Any]]):
    """A mapping like the ``state`` of torch's optimizers, which is filled before anything uses it.

    Args:
        load: calls :meth:`fill`, or raises if ranks in other processes would have to take part.

    Example:
        >>> param = Tensor([1.0])
        >>> state = StateOfRanks(lambda: state.fill({param: {"step": 3}}))
        >>> state.is_loaded, state[param], state.is_loaded
        (False, {'step': 3}, True)
    """

    def __init__(self, load: Callable[[], None]) -> None:
        super().__init__(dict)
        self._load = load
        self.is_loaded = False

    def fill(self, states: Mapping[Any, dict[str, Any]]) -> None:
        """Have these states from now on."""
        self.is_loaded = True
        self.clear()
        self.update(states)

    def drop(self) -> None:
        """Be empty until the next use, which loads again."""
        self.is_loaded = True
        self.clear()
        self.is_loaded = False

    def load(self) -> None:
        """Be filled."""
        if not self.is_loaded:
            self._load()

    def __copy__(self) -> Any:  # noqa: ANN401 - an ordinary mapping
        return defaultdict(dict, self)

    copy = __copy__

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle an ordinary mapping."""
        return (defaultdict, (dict,), None, None, iter(self.items()))


def _loading(name: str) -> Callable[..., Any]:
    """Return a method of a mapping that loads first."""
    plain = getattr(defaultdict, name)

    def method(self: StateOfRanks, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the mapping's
        self.load()
        return plain(self, *args, **kwargs)

    method.__name__, method.__doc__ = name, plain.__doc__
    return method


for _name in USES:
    setattr(StateOfRanks, _name, _loading(_name))
