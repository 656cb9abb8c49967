"""Flat storage of one unit's parameters: weights in one contiguous buffer, parameters as views of it.

A collective works on a flat buffer, a shard is a range of it, and an elementwise optimizer updates one tensor instead
of many. A unit whose gradient no other rank needs has no flat parameters: autograd's own tensors are used.

::

    layout     | embed.weight | fc.weight      | fc.bias |     slots, one dtype
    weights    [..............|................|.........]     parameters are views of it                   (1)
                      ^ shard_bounds ^
    local_shard       [..............]                         kept while weights are freed (ZeRO-3), or (2)
                                                               master weights of what the rank updates
    read_weights  (1) in the narrower dtype that the model reads, gathered instead of it                    (3)
    grads      this rank's own, or in memory of all replicas of a host                                      (4)
    delayed_grad  another whole gradient, exchanged with the own one a step later                           (5)

:meth:`FlatParams.unshard_weights` and :meth:`FlatParams.reshard_weights` allocate and free (1) next to (2); if weights
are not sharded, (2) is (1). If weights are offloaded, (2) is on disk, and has memory while it is updated. In mixed
precision, where the model casts its parameters, (1) stays free and (3) is gathered from casts of (2): half of the
bytes, and the same values as casts of (1). If ranks hold casts (``FlatLayout.holds_casts``), (1) and (4) are in the
dtype that the model reads, and (1) stays: :meth:`cast_masters` writes (2) to it after an update. The storage (4) is a
:class:`counterpoint.runtime.params.flat_grads.GradStorage`. Several versions of (1) are kept by
:class:`counterpoint.runtime.params.weight_versions.WeightVersions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from counterpoint.fabric.fabric import Fabric, Group, Work
from counterpoint.fabric.quantized_collectives import start_quantized_all_gather
from counterpoint.program.compression import find_codec
from counterpoint.program.instruction import Collective
from counterpoint.runtime.offload.offloaded_state import absent_values
from counterpoint.runtime.offload.offloaded_weights import OffloadedShard, OffloadedWeights
from counterpoint.runtime.params.flat_grads import FlatGrads, GradRange, GradStorage
from counterpoint.runtime.params.flat_layout import WHOLE, FirstValues, FlatLayout, ShardSpan
from counterpoint.runtime.params.grad_check import GradCheck
from counterpoint.runtime.params.shared_params import SharedGrads
from counterpoint.runtime.params.sparse_grads import SparseGrads

Allocate: TypeAlias = Callable[[int, torch.dtype], Tensor]


def allocate_flat(num_elements: int, dtype: torch.dtype) -> Tensor:
    """Return an uninitialized flat tensor in this process's own memory."""
    return torch.empty(num_elements, dtype=dtype)


class FlatParams:
    """The parameters of one unit and dtype, contiguous in one buffer.

    Args:
        layout: the position of each.
        params: the rank's parameters by name; they become views of the buffer, or, if it has another dtype, others
            replace them.
        local_shard: the part whose weights are kept while the full buffer is freed, or as master weights.
        allocate: allocates gradients where the weights are; a fabric's own memory need not be copied by collectives.
        sparse_names: the parameters of the model with sparse gradients.
        grad_check: checks gradients that are moved to flat ones during a backward.
        first_values: of parameters that have none; None if ``params`` have them.
    """

    def __init__(  # noqa: PLR0913 - what a rank keeps of a unit
        self,
        layout: FlatLayout,
        params: Mapping[str, nn.Parameter],
        local_shard: ShardSpan,
        allocate: Allocate = allocate_flat,
        sparse_names: frozenset[str] = frozenset(),
        grad_check: GradCheck | None = None,
        first_values: FirstValues | None = None,
    ) -> None:
        self.layout = layout
        self.params = {slot.name: params[slot.name] for slot in layout.slots}
        self.shard_bounds = layout.element_range(local_shard)
        is_sharded = local_shard != WHOLE and not layout.holds_casts
        shard: Tensor | None = None
        if first_values is None:
            whole = torch.cat([self.params[slot.name].detach().reshape(-1) for slot in layout.slots])
        else:
            whole = torch.empty(layout.num_elements, dtype=layout.dtype)
            start, stop = self.shard_bounds if is_sharded else (0, layout.num_elements)
            filled = torch.empty(stop - start, dtype=layout.dtype) if is_sharded else whole
            first_values.fill(layout.values_in(filled, start), self.params)
            shard = filled if is_sharded else None
        self.weights = whole.to(layout.held_dtype)
        self.local_shard = self.weights
        if layout.holds_casts:
            self.params = {
                name: nn.Parameter(param.detach().to(layout.held_dtype)) for name, param in self.params.items()
            }
        self.rebind_views(self.weights)
        self.allocate = allocate
        allocate_grad = partial(allocate, layout.num_elements, layout.held_dtype)
        rows = SparseGrads(layout, sparse_names, self.weights.device)
        self.own_grads = FlatGrads(layout, self.params, rows, allocate_grad, grad_check)
        self.grads: GradStorage = self.own_grads  # (4)
        self.delayed_grad: Tensor | None = None  # (5)
        self.error_feedbacks: dict[Group, ErrorFeedback] = {}  # of compressed reductions over each group
        self.read_weights: Tensor | None = None  # (3)
        self.offloaded_masters: OffloadedMasters | None = None  # (2), if it is elsewhere
        self.offloaded_shard: OffloadedShard | None = None  # likewise, of weights that are gathered for each use
        if local_shard != WHOLE or layout.holds_casts:
            start, stop = self.shard_bounds
            self.local_shard = whole[start:stop].clone() if shard is None else shard
        if is_sharded:
            if layout.read_dtype is not None:
                self.read_weights = torch.empty_like(self.weights, dtype=layout.read_dtype)
            self.reshard_weights()

    def rebind_views(self, weights: Tensor) -> None:
        """Make the parameters views of these weights."""
        if self.local_shard is self.weights:
            self.local_shard = weights
        self.weights = weights
        for slot in self.layout.slots:
            self.params[slot.name].data = weights[slot.start : slot.stop].view(slot.shape)

    def attach_shared(self, grads: SharedGrads) -> None:
        """Write gradients to memory that the replicas share, where the weights are already."""
        self.own_grads.clear()
        self.grads = grads

    def copy_shared_grads(self) -> None:
        """Copy this rank's shard of the sum of gradients to its own memory, if replicas share gradients."""
        if isinstance(self.grads, SharedGrads):
            self.own_grads.set_shard(self.grads.shard_start, self.grads.reduce_shard().clone())

    def detach_shared(self) -> bool:
        """Move the weights back to this rank's own memory; return whether they were shared."""
        shared = self.grads
        if not isinstance(shared, SharedGrads):
            return False
        self.rebind_views(self.weights.clone())
        shared.detach()
        shared.clear()
        self.grads = self.own_grads
        return True

    def unshard_weights(self) -> None:
        """Allocate the full buffer and copy the local shard into it; the rest is uninitialized."""
        if self._allocate_weights():
            self.weights.data[self.shard_bounds[0] : self.shard_bounds[1]].copy_(self.own_weights())

    def _allocate_weights(self) -> bool:
        """Allocate the full buffer; return whether it was free, so that all of it is uninitialized."""
        storage = self.weights.untyped_storage()
        if self.local_shard is self.weights or storage.size() > 0:
            return False
        storage.resize_(self.layout.num_elements * self.weights.element_size())
        return True

    def _allocate_gathered(self, read_dtypes: Mapping[str, torch.dtype]) -> tuple[Tensor, bool]:
        """Return the buffer for gathered weights, and whether it was free, so that all of it is uninitialized."""
        read = self.read_weights
        if read is None or any(read_dtypes.get(name) != read.dtype for name in self.params):
            is_new = self._allocate_weights()
            return self.weights.data, is_new
        is_new = read.untyped_storage().size() == 0
        if is_new:
            read.untyped_storage().resize_(read.numel() * read.element_size())
        return read.data, is_new

    def reshard_weights(self) -> None:
        """Free the full buffers, unless the rank keeps them; the local shard stays."""
        if self.local_shard is not self.weights and not self.layout.holds_casts:
            self.weights.untyped_storage().resize_(0)
        if self.read_weights is not None:
            self.read_weights.untyped_storage().resize_(0)

    def cast_masters(self) -> None:
        """Write the master weights of what this rank updates to the weights that it holds, if these are casts."""
        if self.layout.holds_casts and self.offloaded_masters is None:
            self.weights.data[self.shard_bounds[0] : self.shard_bounds[1]].copy_(self.local_shard.data)

    def start_all_gather(
        self,
        fabric: Fabric,
        instruction: Collective,
        label: str,
        read_dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
    ) -> Work:
        """Start to gather the shards of the weights, each from the member of the group that keeps it.

        With a codec the whole weights are what all shards decode to, this rank's, too; the shards stay as they are.

        Args:
            fabric: of this rank.
            instruction: the gather, with the ranks that keep the shards.
            label: of the collective.
            read_dtypes: of the parameters that the model reads in a narrower dtype now, in training or evaluation.
        """
        group = instruction.group
        if self.grads.is_shared:
            return fabric.barrier_async(label, group)
        whole, is_new = self._allocate_gathered(read_dtypes)
        if instruction.codec:
            ranges, codec = self.layout.shard_ranges(len(group)), find_codec(instruction.codec)
            work = start_quantized_all_gather(fabric, label, self.own_weights().data, whole, ranges, group, codec)
        else:
            if is_new:
                whole[self.shard_bounds[0] : self.shard_bounds[1]].copy_(self.own_weights())
            work = fabric.all_gather(label, whole, self.layout.shard_bounds(len(group)), group)
        if self.offloaded_shard is not None:
            self.offloaded_shard.finish()  # its values are in the whole weights now, or encoded
        return work

    def own_weights(self) -> Tensor:
        """Return the weights that this rank keeps, from where they are; valid until the next call."""
        return self.local_shard if self.offloaded_shard is None else self.offloaded_shard.read_whole()

    def read_params(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and gathered cast of each parameter; autograd adds the cast's gradient to the parameter's."""
        read = self.read_weights
        if read is not None and read.untyped_storage().size():
            for slot in self.layout.slots:
                values = read[slot.start : slot.stop].view(slot.shape)
                yield slot.name, ReadParam.apply(self.params[slot.name], values)  # type: ignore[no-untyped-call]

    def flat_view(self, start: int, stop: int) -> Tensor:
        """Return the weights of a range that this rank keeps, as one flat view, or a copy if they are offloaded."""
        if self.offloaded_masters is not None:
            return self.offloaded_masters.read(start, stop)
        low = self.shard_bounds[0]
        if self.offloaded_shard is not None and not self.offloaded_shard.is_resident:
            return self.offloaded_shard.read(start - low, stop - low)
        return self.local_shard[start - low : stop - low]

    def replica_view(self, start: int, stop: int) -> Tensor:
        """Return what replicas have alike of a range: the weights that they keep, or casts of offloaded ones."""
        return self.weights.data[start:stop] if self.offloaded_masters is not None else self.flat_view(start, stop)

    def offload_masters(self, masters: OffloadedMasters) -> None:
        """Move the master weights to where they are between updates."""
        masters.write(self.shard_bounds[0], self.local_shard)
        self.offloaded_masters = masters
        self.local_shard = absent_values(self.local_shard)

    def offload_weights(self, offloaded: OffloadedWeights) -> None:
        """Move the shard of the weights that this rank keeps to a file, from where it is fetched for each use."""
        assert self.local_shard is not self.weights, "sharded"
        self.offloaded_shard = offloaded.add(self.local_shard)

    def optimizer_view(self, start: int, stop: int) -> Tensor:
        """Return the weights of a range as the optimizer updates them, in a parameter's shape if it is exactly one."""
        if self.offloaded_masters is not None:
            return absent_values(self.local_shard[start - self.shard_bounds[0] : stop - self.shard_bounds[0]])
        low = self.shard_bounds[0]
        if self.offloaded_shard is not None:
            return self.layout.as_param_shape(self.offloaded_shard.view_shard(start - low, stop - low), start, stop)
        return self.layout.as_param_shape(self.flat_view(start, stop), start, stop)

    def write_param(self, name: str, values: Tensor) -> None:
        """Write a parameter's values into the part of it that is stored here."""
        slot = next(slot for slot in self.layout.slots if slot.name == name)
        start, stop = max(slot.start, self.shard_bounds[0]), min(slot.stop, self.shard_bounds[1])
        own = values.reshape(-1)[start - slot.start : max(stop - slot.start, start - slot.start)]
        if self.offloaded_masters is not None:
            self.offloaded_masters.write(start, own)
        elif start < stop and self.offloaded_shard is not None:
            self.offloaded_shard.write(start - self.shard_bounds[0], own)
        elif start < stop:
            self.flat_view(start, stop).data.copy_(own)
        if self.layout.holds_casts:
            self.weights.data[slot.start : slot.stop].copy_(values.reshape(-1))

    def grad_ranges(self, start: int, stop: int, *, as_rows: bool) -> list[GradRange]:
        """Return what the gradient of a range is the sum of, wherever it is stored."""
        return self.grads.ranges(start, stop, as_rows=as_rows)

    def swap_grad_buffers(self) -> None:
        """Exchange the gradient with the delayed one, if there is one."""
        self.delayed_grad = self.own_grads.swap(self.delayed_grad)

    def undo_swap(self) -> None:
        """Delay again what :meth:`swap_grad_buffers` has taken back, and drop what it has delayed."""
        self.delayed_grad = self.own_grads.flat
        self.own_grads.clear()

    def ensure_delayed_grad(self) -> Tensor:
        """Return the delayed gradient; zeros if it was dropped."""
        if self.delayed_grad is None:
            self.delayed_grad = self.own_grads.allocate().zero_()
        return self.delayed_grad

    def zero_delayed_grad(self) -> None:
        """Zero the delayed gradient, if there is one: another replica has the sum."""
        if self.delayed_grad is not None:
            self.delayed_grad.zero_()

    def drop_delayed_grad(self) -> None:
        """Drop the delayed gradient."""
        self.delayed_grad = None

    def error_feedback_for(self, group: Group) -> ErrorFeedback:
        """Return the error feedback of compressed reductions over a group."""
        return self.error_feedbacks.setdefault(group, ErrorFeedback())


class ReadParam(torch.autograd.Function):
    """A parameter in the dtype in which it was gathered: a cast whose result exists already."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, values: Tensor) -> Tensor:  # noqa: ANN401 - torch's context
        """Return the values, which the caller may free and gather again between forward and backward."""
        ctx.dtype = param.dtype
        ctx.set_materialize_grads(False)
        return values.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:  # noqa: ANN401 - as above
        """Return the gradient in the parameter's dtype; none if a compiled graph has none for it."""
        return None if grad is None else grad.to(ctx.dtype), None


class Momentum(NamedTuple):
    """The momentum of a range of flat parameters: a running mean of gradients.

    Args:
        start: first element of the range.
        stop: one past its last.
        values: flat, of the optimizer's state; None before the first update.
        decay: its decay factor.
    """

    start: int
    stop: int
    values: Tensor | None
    decay: float


class ErrorFeedback:
    """State of one codec between steps, for one unit's flat parameters and one group."""

    def __init__(self) -> None:
        self.residual: Tensor | None = None
        self.server_residual: Tensor | None = None  # of the sum of this rank's range, if that is compressed, too
        self.q_factors: dict[str, Tensor] = {}  # by parameter: the factor that powersgd starts the next step with
        self._initial_q_factors: dict[str, Tensor] = {}
        self._gather_buffer: Tensor | None = None
        self._next_residual: Tensor | None = None
        self._next_server_residual: Tensor | None = None
        self._next_q_factors: dict[str, Tensor] = {}
        self._is_pending = False

    def add_residual(self, grad: Tensor, rows: SparseGrads) -> Tensor:
        """Return gradient plus residual; the caller subtracts what it sends, and the rest is the next residual."""
        self._is_pending, self._next_q_factors = True, {}
        if self._next_residual is None:
            self._next_residual = torch.empty_like(grad)
        if self.residual is None:
            self._next_residual.copy_(grad)
        else:
            torch.add(grad, self.residual, out=self._next_residual)
        for slot in rows.slots.values():
            self._next_residual[slot.start : slot.stop].zero_()
        return self._next_residual

    def add_server_residual(self, total: Tensor) -> Tensor:
        """Return the sum of a range plus its residual; the caller subtracts what it sends."""
        self._next_server_residual = total.clone() if self.server_residual is None else total + self.server_residual
        return self._next_server_residual

    def set_next_q_factor(self, name: str, q_factor: Tensor) -> None:
        """Set the factor of a parameter that the next step starts with."""
        self._next_q_factors[name] = q_factor

    def get_initial_q_factor(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """Return the factor of a parameter that the first step starts with, made once."""
        if name not in self._initial_q_factors:
            self._initial_q_factors[name] = make()
        return self._initial_q_factors[name]

    def restore(self, residual: Tensor, q_factors: dict[str, Tensor], server_residual: Tensor | None = None) -> None:
        """Replace the state by that of a checkpoint."""
        self.residual, self.q_factors, self.server_residual = residual, q_factors, server_residual

    def get_gather_buffer(self, allocate: Callable[[], Tensor]) -> Tensor:
        """Return the buffer of an all-gather, allocated in the first step."""
        if self._gather_buffer is None:
            self._gather_buffer = allocate()
        return self._gather_buffer

    def commit(self, *, applied: bool) -> None:
        """Make the next residual current if the step is applied; else keep the old one."""
        if self._is_pending and applied:
            self.residual, self._next_residual = self._next_residual, self.residual
            self.q_factors.update(self._next_q_factors)
            self.server_residual, self._next_server_residual = self._next_server_residual, None
        self._is_pending = False


class OffloadedMasters:
    """Master weights of one unit and dtype that are elsewhere between updates, with the optimizer state.

    Args:
        offloaded: the rank's offloaded state.
        targets: what an optimizer updates: first element, one past the last, and the tensor.
        dtype: of the master weights.
    """

    def __init__(self, offloaded: MasterStore, targets: Sequence[tuple[int, int, Tensor]], dtype: torch.dtype) -> None:
        self.offloaded, self.targets, self.dtype = offloaded, targets, dtype

    def read(self, start: int, stop: int) -> Tensor:
        """Return a copy of a range."""
        values = torch.empty(stop - start, dtype=self.dtype)
        for low, high, target in self._targets_in(start, stop):
            own = self.offloaded.read_master(target).view(-1)
            first, last = max(low, start), min(high, stop)
            values[first - start : last - start].copy_(own[first - low : last - low])
        return values

    def write(self, start: int, values: Tensor) -> None:
        """Write values from an element on."""
        values, stop = values.detach().cpu(), start + values.numel()
        for low, high, target in self._targets_in(start, stop):
            first, last = max(low, start), min(high, stop)
            self.offloaded.write_master(target, first - low, values[first - start : last - start])

    def _targets_in(self, start: int, stop: int) -> Iterator[tuple[int, int, Tensor]]:
        return (one for one in self.targets if one[0] < stop and start < one[1])


class MasterStore(Protocol):
    """Has master weights between updates, by the tensor that an optimizer updates in place of them."""

    def read_master(self, target: Tensor) -> Tensor:
        """Return the values of a target; valid until the next call."""
        ...

    def write_master(self, target: Tensor, start: int, values: Tensor) -> None:
        """Write flat values to a target, from an element on."""
        ...
