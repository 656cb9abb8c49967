"""Choices for a key on the server: the optimizer rule that applies gradients, and the initial values of rows."""

from __future__ import annotations

from math import inf
from typing import TypeAlias

from msgspec import Struct

from counterpoint.errors import ProtocolError


class Assign(Struct, frozen=True, forbid_unknown_fields=True, tag=str.lower):
    """No optimizer: the pushed value replaces the stored one (under bsp, the sum of a step); workers update locally."""


class Sgd(Struct, frozen=True, forbid_unknown_fields=True, tag=str.lower):
    """``torch.optim.SGD``; with momentum, the momentum of rows that are not pushed does not decay.

    Source:
        Sutskever et al., On the importance of initialization and momentum in deep learning, ICML 2013.
    """

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        check_request(min(self.lr, self.momentum, self.weight_decay) >= 0, f"{self} has a negative option")
        check_request(
            not self.nesterov or (self.momentum > 0 and self.dampening == 0),
            f"{self}: Nesterov momentum needs a momentum and zero dampening",
        )


class Adagrad(Struct, frozen=True, forbid_unknown_fields=True, tag=str.lower):
    """``torch.optim.Adagrad``, for dense keys and for rows.

    Source:
        Duchi et al., Adaptive subgradient methods, JMLR 2011; on the server: Dean et al., NIPS 2012.
    """

    lr: float = 0.01
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    def __post_init__(self) -> None:
        options = (self.lr, self.lr_decay, self.weight_decay, self.initial_accumulator_value, self.eps)
        check_request(min(options) >= 0, f"{self} has a negative option")


class Adam(Struct, frozen=True, forbid_unknown_fields=True, tag=str.lower):
    """``torch.optim.Adam`` for dense keys, ``torch.optim.SparseAdam`` for rows.

    Source:
        Kingma and Ba, Adam, ICLR 2015.
    """

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_request(min(self.lr, self.eps, self.weight_decay) >= 0, f"{self} has a negative option")
        check_request(0 <= self.beta1 < 1 and 0 <= self.beta2 < 1, f"{self} has a beta outside [0, 1)")


UpdateRule: TypeAlias = Assign | Sgd | Adagrad | Adam


class ConstantInit(Struct, frozen=True, forbid_unknown_fields=True, tag=str.lower):
    """Initialize every element of a row to one value."""

    value: float = 0.0


class UniformInit(Struct, frozen=True, forbid_unknown_fields=True, tag=str.lower):
    """Initialize a row uniformly in ``[low, high)``, as a function of (seed, key, row, column) only."""

    low: float
    high: float
    seed: int = 0

    def __post_init__(self) -> None:
        check_request(-inf < self.low <= self.high < inf, f"{self} is not a finite, ordered range")


class NormalInit(Struct, frozen=True, forbid_unknown_fields=True, tag=str.lower):
    """Initialize a row from a normal distribution, as a function of (seed, key, row, column) only."""

    mean: float
    std: float
    seed: int = 0

    def __post_init__(self) -> None:
        check_request(0 <= self.std < inf, f"{self} has a standard deviation that is not finite and non-negative")


Initializer: TypeAlias = ConstantInit | UniformInit | NormalInit


def check_request(condition: bool, message: str) -> None:  # noqa: FBT001 - a condition, as in assert
    """Raise ProtocolError unless the condition holds."""
    if not condition:
        raise invalid_request(message)


def invalid_request(message: str) -> ProtocolError:
    """Return the error for a request that is invalid whatever the state of the server."""
    return ProtocolError(
        f"invalid request: {message}; it was rejected and no state changed; check the client that sent it"
    )
