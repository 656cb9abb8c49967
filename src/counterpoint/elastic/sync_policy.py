"""How often a worker pushes and fetches, and what it is computing just now."""

from __future__ import annotations

from dataclasses import dataclass

from counterpoint.errors import PlanError
from counterpoint.ps.job_config import Asp, Bsp, Consistency
from counterpoint.ps.messages import NO_SLICE


@dataclass(frozen=True, slots=True)
class SyncPolicy:
    """How often a worker pushes and fetches, counted in minibatches.

    Args:
        push_every: a portion is so many minibatches, whose gradients are added up on the worker and pushed as one.
        fetch_every: weights are fetched anew after so many minibatches; rows of tables for every one.
        local_lr: between two fetches the worker moves its own weights by so much of each minibatch's gradient.
        fetch_ahead: a minibatch does not wait for so many of the worker's pushes before it: weights are fetched while
            one is computed, for that which comes so many after the next, and rows that are expected so far ahead.

    Source:
        Dean et al., Large Scale Distributed Deep Networks, NIPS 2012, appendix: Downpour SGD, whose names for these are
        n_push, n_fetch and alpha; its workers fetch ahead.
    """

    push_every: int = 1
    pull_every: int = 1
    local_lr: float = 0.0
    pull_ahead: int = 0

    def __post_init__(self) -> None:
        if min(self.push_every, self.pull_every) < 1 or self.pull_ahead < 0 or not self.local_lr >= 0:
            raise PlanError(
                f"{self} has a number below what it can be; give 1 or more, and a rate and a fetch_ahead of 0 or more"
            )

    def check_consistency(self, consistency: Consistency) -> None:
        """Check that a job can be worked on in this rhythm.

        Raises:
            PlanError: its servers would refuse what was computed from weights so old.
        """
        is_plain = self.pull_every == 1 and self.local_lr == 0 and not self.pull_ahead
        if not is_plain and not isinstance(consistency, Asp):
            raise PlanError(
                f"{self} computes from weights of before, which {consistency} does not count; give Asp(), or "
                "fetch_every=1, local_lr=0 and fetch_ahead=0"
            )


@dataclass(slots=True)
class StepContext:
    """What is being computed.

    Attributes:
        portion: of the whole run.
        step: that it belongs to; 0 where there are no steps.
        following: the step after it; 0 where there are no steps.
        is_last: whether this is the portion's last minibatch, after which its gradient is pushed.
        fetches: whether the next minibatch is computed from newer weights.
        is_open: whether gradients that are made now are the portion's.
        ahead: how many minibatches begin before what is fetched now is waited for.
    """

    slice_index: int = NO_SLICE
    step: int = 0
    next_step: int = 0
    is_last_minibatch: bool = True
    pulls_next: bool = True
    is_open: bool = False
    pull_ahead: int = 0


def find_step(consistency: Consistency, slice_index: int) -> tuple[int, int]:
    """Return the step that a portion of the run belongs to, and the one after it; 0 and 0 where there are no steps.

    Example:
        >>> step_of(Bsp(4), 9)
        (2, 3)
    """
    if not isinstance(consistency, Bsp):
        return 0, 0
    step = slice_index // consistency.slices_per_step
    return step, step + 1
