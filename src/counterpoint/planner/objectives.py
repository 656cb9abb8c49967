"""How PipeDream counts the seconds of a stage: as its papers say, and as the optimizer that was released does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Objective(Protocol):
    """Seconds of a stage and of what stages hand on, for every minibatch in the long run."""

    @property
    def shares_first(self) -> bool:
        """Whether the parts below share the sum of the gradients of a level's first stage."""
        ...

    @property
    def hands_on(self) -> bool:
        """Whether a stage waits for what it hands on, too."""
        ...

    def stage_s(
        self, seconds: NDArray[np.float64], weight_bytes: NDArray[np.float64], replicas: int, bytes_per_s: float
    ) -> NDArray[np.float64]:
        """Return how long so many replicas take for a minibatch and their sum of gradients; endless stays so."""
        ...

    def transfer_s(self, num_bytes: float, replicas: int, bytes_per_s: float) -> float:
        """Return how long an activation and its gradient take on the way into a stage, in proportion to their bytes."""
        ...


@dataclass(frozen=True, slots=True)
class Published:
    """As the papers say: the slower one of computing and of the sum of gradients, and links beside.

    T(i, j, m) = max(A(i, j), 2 (m - 1) / m |w| / B) / m, and 2 a / B for what crosses a cut. A replica sends
    (m - 1) / m of its weights and receives as much, as the text of the paper has it; the formula that is printed beside
    it leaves out the division by m; which configurations each of the two gives, decision 39 says.
    """

    shares_first: bool = False
    hands_on: bool = False

    def stage_s(
        self, seconds: NDArray[np.float64], weight_bytes: NDArray[np.float64], replicas: int, bytes_per_s: float
    ) -> NDArray[np.float64]:
        """Return max(computing, 2 (m - 1) / m |w| / B) / m."""
        return np.maximum(seconds, 2 * (replicas - 1) / replicas * weight_bytes / bytes_per_s) / replicas

    def transfer_s(self, num_bytes: float, replicas: int, bytes_per_s: float) -> float:
        """Return 2 a / B."""
        return 2 * num_bytes / bytes_per_s


@dataclass(frozen=True, slots=True)
class Released:
    """As the released optimizer counts: computing and the sum of gradients one after the other.

    T(i, j, m) = (A(i, j) + 4 (m - 1) |w| / (B m)) / m, where the parts of the level below share the sum of the first
    stage of a level and of no other one. What crosses a cut takes 2 a / (B m) / ``compression`` on both sides of a
    stage, and nothing without that figure.

    Args:
        compression: by how much activations are smaller on the wire; None counts no transfer.
    """

    compression: float | None = None
    shares_first: bool = True
    hands_on: bool = True

    def stage_s(
        self, seconds: NDArray[np.float64], weight_bytes: NDArray[np.float64], replicas: int, bytes_per_s: float
    ) -> NDArray[np.float64]:
        """Return (computing + 4 (m - 1) |w| / (B m)) / m."""
        return (seconds + 4 * (replicas - 1) * weight_bytes / (bytes_per_s * replicas)) / replicas

    def transfer_s(self, num_bytes: float, replicas: int, bytes_per_s: float) -> float:
        """Return 2 a / (B m) by the compression."""
        return 2 * num_bytes / (bytes_per_s * replicas) / self.compression if self.compression else 0.0


@dataclass(frozen=True, slots=True)
class Streamed:
    """As our own stages without a flush spend their time: a replica computes, then adds its gradients up.

    T(i, j, m) = (A(i, j) + 2 (m - 1) / m |w| / B) / m, and 2 a / (B m) for what crosses a cut, on both sides of a
    stage: its replicas take turns with what they send.
    """

    shares_first: bool = False
    hands_on: bool = True

    def stage_s(
        self, seconds: NDArray[np.float64], weight_bytes: NDArray[np.float64], replicas: int, bytes_per_s: float
    ) -> NDArray[np.float64]:
        """Return (computing + 2 (m - 1) / m |w| / B) / m."""
        return (seconds + 2 * (replicas - 1) / replicas * weight_bytes / bytes_per_s) / replicas

    def transfer_s(self, num_bytes: float, replicas: int, bytes_per_s: float) -> float:
        """Return 2 a / (B m)."""
        return 2 * num_bytes / (bytes_per_s * replicas)


@dataclass(frozen=True, slots=True)
class Alone:
    """Of another objective only stages without replicas.

    Args:
        objective: how their seconds are counted.
    """

    objective: Objective

    @property
    def shares_first(self) -> bool:
        """As the objective."""
        return self.objective.shares_first

    @property
    def hands_on(self) -> bool:
        """As the objective."""
        return self.objective.hands_on

    def stage_s(
        self, seconds: NDArray[np.float64], weight_bytes: NDArray[np.float64], replicas: int, bytes_per_s: float
    ) -> NDArray[np.float64]:
        """Return what the objective says of one replica, and that more never end."""
        if replicas > 1:
            return np.full_like(seconds, np.inf)
        return self.objective.stage_s(seconds, weight_bytes, replicas, bytes_per_s)

    def transfer_s(self, num_bytes: float, replicas: int, bytes_per_s: float) -> float:
        """As the objective."""
        return self.objective.transfer_s(num_bytes, replicas, bytes_per_s)
