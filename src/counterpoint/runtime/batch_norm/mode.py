"""The calls of batch norm in a model's forward, as a function mode sees them, whichever way the model was cut.

What happens in a call of batch norm while blocks run: whom it meets, and where its running statistics go.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from counterpoint.fabric.fabric import Group
from counterpoint.runtime.batch_norm.deferred import BatchNormBuffers, DeferredBatchNorm
from counterpoint.runtime.batch_norm.sync import ReplicaStatsGroup, RunningStats, SyncBatchNormGroups, sync_batch_norm
from counterpoint.runtime.kernels.function_mode import FunctionReplacement, TorchFunction
from counterpoint.runtime.params.param_store import ParamStore


class BatchNormCall(NamedTuple):
    """The arguments of batch norm."""

    values: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    training: bool
    momentum: float
    eps: float

    @property
    def tensor_id(self) -> int:
        """The identity of the tensor by which the module is known that is called; 0 where it has none."""
        mark = self.running_mean if self.running_mean is not None else self.weight
        return 0 if mark is None else id(mark)

    @property
    def num_values(self) -> int:
        """How many values there are by channel."""
        return self.values.numel() // max(self.values.shape[1], 1)


def parse_functional(  # noqa: PLR0913 - torch's own
    input: Tensor,  # noqa: A002
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,  # noqa: FBT001, FBT002
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> BatchNormCall:
    """Return the arguments of ``torch.nn.functional.batch_norm``."""
    return BatchNormCall(input, running_mean, running_var, weight, bias, training, momentum, eps)


def parse_aten(values: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any) -> BatchNormCall:  # noqa: ANN401
    """Return the arguments of the operation as a traced model calls it."""
    running_mean, running_var, training, momentum, eps, _ = rest
    return BatchNormCall(values, running_mean, running_var, weight, bias, training, momentum, eps)


def run_batch_norm(call: BatchNormCall) -> Tensor:
    """Return the values that batch norm makes of these arguments."""
    return F.batch_norm(*call)


BATCH_NORM_FNS: Mapping[Callable[..., Any], Callable[..., BatchNormCall]] = {
    F.batch_norm: parse_functional,
    torch.ops.aten.batch_norm.default: parse_aten,
}
"""The functions that normalize, and how their arguments are read."""

COUNTER_FNS: frozenset[Callable[..., Any]] = frozenset({Tensor.add_, torch.ops.aten.add_.Tensor})
"""The functions by which a module counts its batches."""


class BatchNormState:
    """The modules of batch norm of one rank.

    Args:
        kept: what they keep of their batches.
        store: the rank's parameters and buffers.
        together: how some meet those of other ranks; None where none do.
        deferred: where running statistics wait for the end of a mini-batch; None where every call changes them.
    """

    def __init__(
        self,
        buffers: Sequence[BatchNormBuffers],
        store: ParamStore,
        sync_groups: SyncBatchNormGroups | None,
        deferred: DeferredBatchNorm | None,
    ) -> None:
        self.buffers_by_id = {id(store.buffers[one.mean]): one for one in buffers}
        self.counter_ids = {id(store.buffers[one.counter]) for one in buffers if one.counter}
        self.sync_groups = sync_groups
        self.deferred = deferred

    def replacements(
        self, block: int, micro: int, sizes: Mapping[int, int], *, is_recompute: bool = False
    ) -> Mapping[TorchFunction, FunctionReplacement]:
        """Return what the modules' functions do in this plan, while a microbatch goes through blocks.

        Args:
            block: the first of them.
            micro: the microbatch.
            sizes: of every microbatch.
            is_again: whether the blocks were run on it before, so that nothing is taken into running statistics.
        """
        group = self.sync_groups.group(block, micro, sizes) if self.sync_groups is not None else ()
        if not group and not is_recompute and self.deferred is None:
            return {}
        return BatchNormInterceptor(self, micro, group, is_recompute=is_recompute).replacements

    def broadcast_stats(self, names: Sequence[str], block: int, micro: int, sizes: Mapping[int, int]) -> None:
        """Bring running statistics that have changed to members without samples; all call it after a forward."""
        if self.sync_groups is not None and self.deferred is None:
            self.sync_groups.broadcast_stats(names, block, micro, sizes)

    def begin_step(self, *, is_async_pipeline: bool) -> None:
        """A step begins."""
        if self.deferred is not None:
            self.deferred.begin_step(is_async_pipeline=is_async_pipeline)

    def start_gather(self, micros: Collection[int]) -> None:
        """A mini-batch is about to be decided on, which everybody of the commit does at this place."""
        if self.deferred is not None:
            self.deferred.start_gather(micros)

    def finish_gather(self) -> None:
        """What others tell of it is here."""
        if self.deferred is not None:
            self.deferred.finish_gather()

    def commit(self, *, is_applied: bool) -> None:
        """It has been decided on."""
        if self.deferred is not None:
            self.deferred.commit(is_applied=is_applied)

    def clear(self) -> None:
        """Forget what was seen of a mini-batch that nobody decided on, because a step failed."""
        if self.deferred is not None:
            self.deferred.clear()


class BatchNormInterceptor:
    """What calls of batch norm come to that are those of a microbatch in a plan.

    Args:
        norms: the rank's modules.
        micro: the microbatch.
        group: the ranks that some of the modules meet; none if they meet nobody.
        is_again: whether nothing is taken into running statistics.
    """

    def __init__(self, state: BatchNormState, micro: int, group: Group, *, is_recompute: bool) -> None:
        self.state = state
        self.micro = micro
        self.group = group
        self.is_recompute = is_recompute

    @property
    def replacements(self) -> dict[TorchFunction, FunctionReplacement]:
        """What functions do."""
        return {
            **dict.fromkeys(COUNTER_FNS if self.is_recompute else (), self.count_batch),
            **dict.fromkeys(BATCH_NORM_FNS, self.call),
        }

    def count_batch(self, func: TorchFunction, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """Call the function, but count no batch again."""
        return args[0] if id(args[0]) in self.state.counter_ids else func(*args, **kwargs)

    def call(self, func: TorchFunction, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """Call the function, or normalize as the plan says."""
        call = BATCH_NORM_FNS[func](*args, **kwargs)
        return self.normalize(call, lambda: func(*args, **kwargs)) if call.training else func(*args, **kwargs)

    def normalize(self, call: BatchNormCall, fallback: Callable[[], Tensor]) -> Tensor:
        """Return the normalized values of one call.

        Args:
            call: its arguments.
            plainly: the call as the module makes it.
        """
        together, deferred = self.state.sync_groups, self.state.deferred
        path = together.paths.get(call.tensor_id) if together is not None and self.group else None
        kept = self.state.buffers_by_id.get(call.tensor_id)
        is_apart = kept is not None and (self.is_recompute or deferred is not None)
        if path is None and not is_apart:
            return fallback()
        mean, var, momentum = call.running_mean, call.running_var, call.momentum
        if is_apart and mean is not None and var is not None:
            mean, var, momentum = torch.zeros_like(mean), torch.zeros_like(var), 1.0
        count = call.num_values
        if path is None or together is None:
            result = run_batch_norm(call._replace(running_mean=mean, running_var=var, momentum=momentum))
        else:
            union = ReplicaStatsGroup(together.fabric, self.group, path)
            running = RunningStats(mean, var, momentum) if mean is not None and var is not None else None
            result = sync_batch_norm(call.values, call.weight, call.bias, running=running, eps=call.eps, group=union)
            count = union.count
        is_noted_here = path is None or together is None or together.fabric.rank == self.group[0]
        if kept is not None and deferred is not None and not self.is_recompute and is_noted_here:
            assert mean is not None, "what is kept has a mean"
            assert var is not None, "what is kept has a variance"
            deferred.record(kept, self.micro, (mean, var), count, call.momentum)
        return result
