"""A number that a device computes, and the host waits for when it is read."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any, final


@final
class LateNumber(numbers.Real):
    """A float whose value is read from a device when it is used: printed, compared, computed with or converted.

    Args:
        read: waits for the device and returns the value; called once.

    Example:
        >>> loss = LateNumber(lambda: 0.25)
        >>> f"{loss:.3f}", loss < 1, loss + 1, float(loss), [loss]
        ('0.250', True, 1.25, 0.25, [0.25])
    """

    __slots__ = ("_read", "_value")

    def __init__(self, read: Callable[[], float]) -> None:
        self._read: Callable[[], float] | None = read
        self._value = 0.0

    def __float__(self) -> float:
        if self._read is not None:
            self._value, self._read = self._read(), None
        return self._value

    def item(self) -> float:
        """Return the value, as ``Tensor.item()``."""
        return float(self)

    def __repr__(self) -> str:
        return repr(float(self))

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)

    def __hash__(self) -> int:  # type: ignore[override]  # numbers.Real has none
        return hash(float(self))

    def __bool__(self) -> bool:
        return bool(float(self))

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        return float, (float(self),)  # a copy in another process is a plain number

    def __eq__(self, other: object) -> bool:
        return float(self) == (float(other) if isinstance(other, LateNumber) else other)

    def __lt__(self, other: Any) -> bool:  # noqa: ANN401 - any number
        return bool(float(self) < other)

    def __le__(self, other: Any) -> bool:  # noqa: ANN401 - any number
        return bool(float(self) <= other)

    def __gt__(self, other: Any) -> bool:  # noqa: ANN401 - any number
        return bool(float(self) > other)

    def __ge__(self, other: Any) -> bool:  # noqa: ANN401 - any number
        return bool(float(self) >= other)

    def __add__(self, other: Any) -> Any:  # noqa: ANN401 - any number
        return float(self) + other

    def __radd__(self, other: Any) -> Any:  # noqa: ANN401 - any number
        return other + float(self)

    def __sub__(self, other: Any) -> Any:  # noqa: ANN401 - any number
        return float(self) - other

    def __rsub__(self, other: Any) -> Any:  # noqa: ANN401 - any number
        return other - float(self)

    def __mul__(self, other: Any) -> Any:  # noqa: ANN401 - any number
        return float(self) * other

    def __rmul__(self, other: Any) -> Any:  # noqa: ANN401 - any number
        return other * float(self)

    def __truediv__(self, other: Any) -> Any:  # noqa: ANN401 - any number
        return float(self) / other

    def __rtruediv__(self, other: Any) -> Any:  # noqa: ANN401 - any number
        return other / float(self)

    def __floordiv__(self, other: Any) -> Any:  # noqa: ANN401 - any number
        return float(self) // other

    def __rfloordiv__(self, other: Any) -> Any:  # noqa: ANN401 - any number
        return other // float(self)

    def __mod__(self, other: Any) -> Any:  # noqa: ANN401 - any number
        return float(self) % other

    def __rmod__(self, other: Any) -> Any:  # noqa: ANN401 - any number
        return other % float(self)

    def __pow__(self, other: Any) -> Any:  # noqa: ANN401 - any number
        return float(self) ** other

    def __rpow__(self, other: Any) -> Any:  # noqa: ANN401 - any number
        return other ** float(self)

    def __neg__(self) -> float:
        return -float(self)

    def __pos__(self) -> float:
        return float(self)

    def __abs__(self) -> float:
        return abs(float(self))

    def __trunc__(self) -> int:
        return int(float(self))

    def __floor__(self) -> int:
        return float(self).__floor__()

    def __ceil__(self) -> int:
        return float(self).__ceil__()

    def __round__(self, ndigits: int | None = None) -> Any:  # noqa: ANN401 - as of a float
        return round(float(self), ndigits)
