"""How often a worker pushes and pulls, and the context of the minibatch it is computing."""

from __future__ import annotations

from dataclasses import dataclass

from counterpoint.errors import PlanError
from counterpoint.ps.consistency import NO_SLICE, Asp, Consistency


@dataclass(frozen=True, slots=True)
class SyncPolicy:
    """Push and pull intervals of a worker, in minibatches (Downpour SGD).

    Args:
        push_every: minibatches of a data slice, whose gradients are summed locally and pushed once.
        pull_every: pull weights after this many minibatches; rows of tables are pulled for each.
        local_lr: between two pulls, apply each minibatch's gradient to the local weights with this learning rate.
        pull_ahead: a minibatch does not wait for this many preceding pushes of the worker: weights and expected rows
            are pulled that many minibatches ahead.

    Source:
        Dean et al., Large Scale Distributed Deep Networks, NIPS 2012, appendix: Downpour SGD, where these are called
        n_push, n_fetch and alpha; its workers fetch ahead.
    """

    push_every: int = 1
    pull_every: int = 1
    local_lr: float = 0.0
    pull_ahead: int = 0

    def __post_init__(self) -> None:
        if min(self.push_every, self.pull_every) < 1 or self.pull_ahead < 0 or not self.local_lr >= 0:
            raise PlanError(
                f"{self} is invalid; push_every and pull_every are 1 or more, local_lr and pull_ahead 0 or more"
            )

    def check_consistency(self, consistency: Consistency) -> None:
        """Check that a job's consistency allows this policy.

        Raises:
            PlanError: its servers would reject gradients of weights that stale.
        """
        is_synchronous = self.pull_every == 1 and self.local_lr == 0 and not self.pull_ahead
        if not is_synchronous and not isinstance(consistency, Asp):
            raise PlanError(
                f"{self} uses stale weights, which {consistency} does not accept; give "
                "consistency=asp, or pull_every=1, local_lr=0 and pull_ahead=0"
            )


@dataclass(slots=True)
class StepContext:
    """What is being computed.

    Attributes:
        slice_index: data slice, counted over the whole run.
        step: that it belongs to; 0 if there are no steps.
        next_step: the step after it; 0 if there are no steps.
        is_last_minibatch: whether the slice ends with this minibatch, so that its gradient is pushed.
        pulls_next: whether the next minibatch uses newer weights.
        is_open: whether gradients computed now belong to the slice.
        pull_ahead: minibatches that start before what is pulled now is awaited.
    """

    slice_index: int = NO_SLICE
    step: int = 0
    next_step: int = 0
    is_last_minibatch: bool = True
    pulls_next: bool = True
    is_open: bool = False
    pull_ahead: int = 0
