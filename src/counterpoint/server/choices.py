"""What a user chooses for a key: the rule that updates it on the server, and how rows begin that nobody has written."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TypeAlias

from counterpoint.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class Aggregate:
    """What is pushed is the value: of bsp the sum of a step's portions. Workers update by themselves."""


@dataclass(frozen=True, slots=True)
class Sgd:
    """``torch.optim.SGD``; with a momentum, rows that are not pushed keep theirs as it is.

    Source:
        Sutskever et al., On the importance of initialization and momentum in deep learning, ICML 2013.
    """

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    is_nesterov: bool = False

    def __post_init__(self) -> None:
        require(min(self.lr, self.momentum, self.weight_decay) >= 0, f"{self} has a number below 0")
        require(
            not self.is_nesterov or (self.momentum > 0 and self.dampening == 0),
            f"{self} has Nesterov's step, which needs a momentum and no dampening",
        )


@dataclass(frozen=True, slots=True)
class Adagrad:
    """``torch.optim.Adagrad``, for ranges and for rows.

    Source:
        Duchi et al., Adaptive subgradient methods, JMLR 2011; on the server: Dean et al., NIPS 2012.
    """

    lr: float = 0.01
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    first_sum: float = 0.0
    eps: float = 1e-10

    def __post_init__(self) -> None:
        numbers = (self.lr, self.lr_decay, self.weight_decay, self.first_sum, self.eps)
        require(min(numbers) >= 0, f"{self} has a number below 0")


@dataclass(frozen=True, slots=True)
class Adam:
    """``torch.optim.Adam`` for ranges, ``torch.optim.SparseAdam`` for rows.

    Source:
        Kingma and Ba, Adam, ICLR 2015.
    """

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        require(min(self.lr, self.eps, self.weight_decay) >= 0, f"{self} has a number below 0")
        require(0 <= self.beta1 < 1 and 0 <= self.beta2 < 1, f"{self} has a beta that is not from 0 to below 1")


Rule: TypeAlias = Aggregate | Sgd | Adagrad | Adam


@dataclass(frozen=True, slots=True)
class Constant:
    """A row begins as one number everywhere."""

    number: float = 0.0


@dataclass(frozen=True, slots=True)
class Uniform:
    """A row begins evenly distributed from ``low`` to ``high``, by (seed, key, row, column) alone."""

    low: float
    high: float
    seed: int = 0

    def __post_init__(self) -> None:
        require(-inf < self.low <= self.high < inf, f"{self} is no range")


@dataclass(frozen=True, slots=True)
class Normal:
    """A row begins normally distributed, by (seed, key, row, column) alone."""

    mean: float
    std: float
    seed: int = 0

    def __post_init__(self) -> None:
        require(0 <= self.std < inf, f"{self} has no spread")


Start: TypeAlias = Constant | Uniform | Normal


def require(holds: bool, found: str) -> None:  # noqa: FBT001 - a condition, as in assert
    """Nothing has happened when what must hold does.

    Raises:
        ProtocolError: it does not.
    """
    if not holds:
        raise unmeant(found)


def unmeant(found: str) -> ProtocolError:
    """Return the error for a request that nobody can mean."""
    return ProtocolError(f"a request cannot be meant: {found}; nothing was changed: look at who sends it")
