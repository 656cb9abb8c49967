"""Intercept calls of batch norm while segments run: whose statistics they use, and where running statistics go.

A call normalizes by the statistics of its own microbatch, or of all replicas
(:mod:`counterpoint.runtime.batch_norm.sync`). Running statistics are updated by the call, or once per mini-batch
(:mod:`counterpoint.runtime.batch_norm.deferred`), and not at all by recomputation.
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
    """The arguments of batch norm, however the model was partitioned."""

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
        """The ``id`` of the tensor that identifies the calling module; 0 if it has none."""
        mark = self.running_mean if self.running_mean is not None else self.weight
        return 0 if mark is None else id(mark)

    @property
    def num_values(self) -> int:
        """Number of values per channel."""
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
    """Return the arguments of the operator that a traced model calls."""
    running_mean, running_var, training, momentum, eps, _ = rest
    return BatchNormCall(values, running_mean, running_var, weight, bias, training, momentum, eps)


def run_batch_norm(call: BatchNormCall) -> Tensor:
    """Return the result of torch's batch norm for these arguments."""
    return F.batch_norm(*call)


BATCH_NORM_FNS: Mapping[Callable[..., Any], Callable[..., BatchNormCall]] = {
    F.batch_norm: parse_functional,
    torch.ops.aten.batch_norm.default: parse_aten,
}
"""Functions that normalize, and how to parse their arguments."""

COUNTER_FNS: frozenset[Callable[..., Any]] = frozenset({Tensor.add_, torch.ops.aten.add_.Tensor})
"""Functions by which a module counts its batches."""


class BatchNormState:
    """The batch norm modules of one rank.

    Args:
        buffers: their running statistics.
        store: the rank's parameters and buffers.
        sync_groups: the ranks that some modules normalize with; None if there are none.
        deferred: collects statistics until the end of a mini-batch; None if every call updates running statistics.
    """

    def __init__(
        self,
        buffers: Sequence[BatchNormBuffers],
        store: ParamStore,
        sync_groups: SyncBatchNormGroups | None,
        deferred: DeferredBatchNorm | None,
    ) -> None:
        self.buffers_by_id = {id(store.buffers[module.mean]): module for module in buffers}
        self.counter_ids = {id(store.buffers[module.counter]) for module in buffers if module.counter}
        self.sync_groups = sync_groups
        self.deferred = deferred

    def replacements(
        self, block: int, micro: int, sizes: Mapping[int, int], *, is_recompute: bool = False
    ) -> Mapping[TorchFunction, FunctionReplacement]:
        """Return the functions to be replaced while a microbatch runs through blocks.

        Args:
            block: the first of them.
            micro: the microbatch.
            sizes: number of samples of every microbatch.
            is_recompute: whether the blocks ran on it before, so that running statistics stay unchanged.
        """
        group = self.sync_groups.group(block, micro, sizes) if self.sync_groups is not None else ()
        if not group and not is_recompute and self.deferred is None:
            return {}
        return BatchNormInterceptor(self, micro, group, is_recompute=is_recompute).replacements

    def broadcast_stats(self, names: Sequence[str], block: int, micro: int, sizes: Mapping[int, int]) -> None:
        """Send changed running statistics to members without samples; all call it after a forward."""
        if self.sync_groups is not None and self.deferred is None:
            self.sync_groups.broadcast_stats(names, block, micro, sizes)

    def begin_step(self, *, is_async_pipeline: bool) -> None:
        """Start a step."""
        if self.deferred is not None:
            self.deferred.begin_step(is_async_pipeline=is_async_pipeline)

    def start_gather(self, micros: Collection[int]) -> None:
        """Start to gather the statistics of a mini-batch; all members of its commit call it together."""
        if self.deferred is not None:
            self.deferred.start_gather(micros)

    def finish_gather(self) -> None:
        """Wait for the gather."""
        if self.deferred is not None:
            self.deferred.finish_gather()

    def commit(self, *, is_applied: bool) -> None:
        """Update running statistics if the mini-batch is applied."""
        if self.deferred is not None:
            self.deferred.commit(is_applied=is_applied)

    def clear(self) -> None:
        """Drop the statistics of a mini-batch that was not committed, because a step failed."""
        if self.deferred is not None:
            self.deferred.clear()


class BatchNormInterceptor:
    """Replacements of batch norm's functions for one microbatch.

    Args:
        state: the rank's modules.
        micro: the microbatch.
        group: the ranks that some of the modules normalize with; empty if there are none.
        is_recompute: whether running statistics stay unchanged.
    """

    def __init__(self, state: BatchNormState, micro: int, group: Group, *, is_recompute: bool) -> None:
        self.state = state
        self.micro = micro
        self.group = group
        self.is_recompute = is_recompute

    @property
    def replacements(self) -> dict[TorchFunction, FunctionReplacement]:
        """The replacement of each function."""
        return {
            **dict.fromkeys(COUNTER_FNS if self.is_recompute else (), self.count_batch),
            **dict.fromkeys(BATCH_NORM_FNS, self.call),
        }

    def count_batch(self, func: TorchFunction, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """Call the function, but do not count a recomputed batch."""
        return args[0] if id(args[0]) in self.state.counter_ids else func(*args, **kwargs)

    def call(self, func: TorchFunction, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """Call the function; in training, normalize as the plan requires."""
        call = BATCH_NORM_FNS[func](*args, **kwargs)
        return self.normalize(call, lambda: func(*args, **kwargs)) if call.training else func(*args, **kwargs)

    def normalize(self, call: BatchNormCall, fallback: Callable[[], Tensor]) -> Tensor:
        """Return the normalized values of one call.

        Args:
            call: its arguments.
            fallback: the call as the module makes it.
        """
        sync_groups, deferred = self.state.sync_groups, self.state.deferred
        path = sync_groups.paths.get(call.tensor_id) if sync_groups is not None and self.group else None
        module = self.state.buffers_by_id.get(call.tensor_id)
        uses_scratch_stats = module is not None and (self.is_recompute or deferred is not None)
        if path is None and not uses_scratch_stats:
            return fallback()
        mean, var, momentum = call.running_mean, call.running_var, call.momentum
        if uses_scratch_stats and mean is not None and var is not None:
            mean, var, momentum = torch.zeros_like(mean), torch.zeros_like(var), 1.0
        count = call.num_values
        if path is None or sync_groups is None:
            result = run_batch_norm(call._replace(running_mean=mean, running_var=var, momentum=momentum))
        else:
            group = ReplicaStatsGroup(sync_groups.fabric, self.group, path)
            running = RunningStats(mean, var, momentum) if mean is not None and var is not None else None
            result = sync_batch_norm(call.values, call.weight, call.bias, running=running, eps=call.eps, group=group)
            count = group.count
        records_here = path is None or sync_groups is None or sync_groups.fabric.rank == self.group[0]
        if module is not None and deferred is not None and not self.is_recompute and records_here:
            assert mean is not None, "the module has running statistics"
            assert var is not None, "the module has running statistics"
            deferred.record(module, self.micro, (mean, var), count, call.momentum)
        return result
