"""What a user chooses for a key: the rule that updates it on the server, and how rows begin that nobody has written."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TypeAlias

from counterpoint.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class Assign:
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
    nesterov: bool = False

    def __post_init__(self) -> None:
        check_request(min(self.lr, self.momentum, self.weight_decay) >= 0, f"{self} has a number below 0")
        check_request(
            not self.nesterov or (self.momentum > 0 and self.dampening == 0),
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
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    def __post_init__(self) -> None:
        numbers = (self.lr, self.lr_decay, self.weight_decay, self.initial_accumulator_value, self.eps)
        check_request(min(numbers) >= 0, f"{self} has a number below 0")


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
        check_request(min(self.lr, self.eps, self.weight_decay) >= 0, f"{self} has a number below 0")
        check_request(0 <= self.beta1 < 1 and 0 <= self.beta2 < 1, f"{self} has a beta that is not from 0 to below 1")


UpdateRule: TypeAlias = Assign | Sgd | Adagrad | Adam


@dataclass(frozen=True, slots=True)
class ConstantInit:
    """A row begins as one number everywhere."""

    value: float = 0.0


@dataclass(frozen=True, slots=True)
class UniformInit:
    """A row begins evenly distributed from ``low`` to ``high``, by (seed, key, row, column) alone."""

    low: float
    high: float
    seed: int = 0

    def __post_init__(self) -> None:
        check_request(-inf < self.low <= self.high < inf, f"{self} is no range")


@dataclass(frozen=True, slots=True)
class NormalInit:
    """A row begins normally distributed, by (seed, key, row, column) alone."""

    mean: float
    std: float
    seed: int = 0

    def __post_init__(self) -> None:
        check_request(0 <= self.std < inf, f"{self} has no spread")


Initializer: TypeAlias = ConstantInit | UniformInit | NormalInit


def check_request(condition: bool, message: str) -> None:  # noqa: FBT001 - a condition, as in assert
    """Nothing has happened when what must hold does.

    Raises:
        ProtocolError: it does not.
    """
    if not condition:
        raise invalid_request(message)


def invalid_request(message: str) -> ProtocolError:
    """Return the error for a request that nobody can mean."""
    return ProtocolError(f"a request cannot be meant: {message}; nothing was changed: look at who sends it")
