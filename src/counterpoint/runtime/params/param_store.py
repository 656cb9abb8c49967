"""Store of all parameters, buffers and optimizers of one rank.

A program names units, such as ``U3`` and ``all_reduce(grad3)``; the store has one :class:`UnitParams` for each::

    ParamStore.units[unit] -> UnitParams
      flat_params   FlatParams for each dtype, if other ranks need the gradient: weights, gradients, shard
      own_params    else autograd's own tensors

    UnitParams.update_ranges  what this rank updates of them: all, a shard, or nothing
      | optimizer_targets     tensors that an optimizer gets, views of the weights
      v grads                 their gradients
    ParamStore.optimizer(units) --> ParamStore.update(units): one step of one optimizer
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn, optim

from counterpoint.device.accelerator import Accelerator
from counterpoint.fabric.fabric import Fabric, Group
from counterpoint.model.spec import Unit
from counterpoint.runtime.offload.offloaded_state import MASTER, OffloadedState, StateDtypes
from counterpoint.runtime.offload.offloaded_weights import OffloadedShard, OffloadedWeights
from counterpoint.runtime.optimizer_spec import OptimizerSpec, clip_by_value, scale_grad, step_without_closure
from counterpoint.runtime.params.flat_layout import (
    WHOLE,
    FirstValues,
    ParamRange,
    ParamValues,
    build_layouts,
    limit_targets,
)
from counterpoint.runtime.params.flat_params import Allocate, FlatParams, Momentum, OffloadedMasters, allocate_flat
from counterpoint.runtime.params.fused_optimizer import (
    GRAD_OF,
    LAYOUT_OF,
    GradSource,
    are_contiguous,
    find_fused_groups,
    fused_update,
    require_finite_options,
)
from counterpoint.runtime.params.grad_check import CollectedGrads, GradCheck
from counterpoint.runtime.params.grad_sinks import FlatGradSink, ParamGradSink, find_flat_sinks, find_param_sinks
from counterpoint.runtime.params.host_targets import HostState, HostTargets, make_host_target
from counterpoint.runtime.params.shared_params import (
    SharedGrads,
    SparseGradExchange,
    aligned_elements,
    header_elements,
    table_slots,
)
from counterpoint.runtime.params.unit_roles import UnitRole
from counterpoint.runtime.params.weight_versions import WeightVersions

StateAllocator: TypeAlias = Callable[[], AbstractContextManager[None]]


class WeightRounding(Protocol):
    """Rounds updated weights in another way than to the nearest."""

    def widen(
        self,
        tensors: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        ranges: Sequence[Sequence[ParamRange]],
        step: int,
    ) -> AbstractContextManager[None]:
        """Return a context in which tensors that are rounded are wider; see :class:`StochasticRounding`."""


MAX_LARGE = 4
"""The most gradients that leave their shard in place."""


class UpdateRange(NamedTuple):
    """A range of flat parameters that an optimizer updates as one tensor.

    Args:
        flat_params: which.
        option_group: of the optimizer, whose learning rate and other options the range has.
        start: its first element.
        stop: one past its last.
    """

    flat_params: FlatParams
    option_group: int
    start: int
    stop: int


class UnitParams:
    """One unit's parameters on one rank.

    Args:
        unit: which unit.
        role: what the rank does with it.
        params: its parameters by name; views of the flat parameters, if there are any.
        flat_params: one for each dtype; none if the gradient stays on this rank.

    Attributes:
        update_ranges: what the rank updates of flat parameters.
        grad_sources: the gradient of each of :meth:`optimizer_targets`; None for a parameter's own.
        skipped: the parameters that this step's update leaves as they are.
    """

    def __init__(
        self, unit: Unit, role: UnitRole, params: Mapping[str, nn.Parameter], flat_params: Sequence[FlatParams] = ()
    ) -> None:
        self.unit, self.role, self.params, self.flat_params = unit, role, params, flat_params
        self.own_params = {} if flat_params else params  # those whose gradient is autograd's own tensor
        self.is_strided = {*map(LAYOUT_OF, self.own_params.values())} <= {torch.strided}  # torch keeps it
        span = role.update_shard
        self.update_ranges = [
            UpdateRange(one, *target_range)
            for one in (flat_params if span is not None else ())
            for target_range in one.layout.optimizer_ranges(span or WHOLE)
        ]
        self.grad_sources: list[GradSource | None] = [
            partial(flat_params.grad_ranges, start, stop) for flat_params, _, start, stop in self.update_ranges
        ]
        if span is not None:
            self.grad_sources += [None] * len(self.own_params)
        self.skipped: set[str] = set()

    def skip_params(self, names: Collection[str]) -> None:
        """Leave these parameters as they are in this step's update; without any, all are updated."""
        self.skipped = self.params.keys() & names

    def skipped_targets(self) -> list[bool]:
        """Return for each of :meth:`optimizer_targets` whether its parameter is skipped, if each has one of its own."""
        first_names = [flat_params.layout.name_at(start) for flat_params, _, start, _ in self.update_ranges]
        names = [*first_names, *(self.own_params if self.role.update_shard is not None else ())]
        return [name in self.skipped for name in names]

    def optimizer_targets(self, optimizer_spec: OptimizerSpec) -> list[tuple[int, Tensor]]:
        """Return the tensors that an optimizer updates for this unit, with their option groups."""
        if self.role.update_shard is None:
            return []
        targets: list[tuple[int, Tensor]] = [
            (group, nn.Parameter(flat_params.optimizer_view(start, stop), requires_grad=False))
            for flat_params, group, start, stop in self.update_ranges
        ]
        return targets + [(optimizer_spec.group_index[name], param) for name, param in self.own_params.items()]

    def target_ranges(self) -> list[list[ParamRange]]:
        """Return for each of :meth:`optimizer_targets` the parameters that it consists of."""
        if self.role.update_shard is None:
            return []
        flat = [flat_params.layout.params_in(start, stop) for flat_params, _, start, stop in self.update_ranges]
        return flat + [[ParamRange(name, 0, 0, param.numel())] for name, param in self.own_params.items()]

    def is_contiguous(self, collected: CollectedGrads | None) -> bool:
        """Return whether weights and gradients are contiguous, in the same order of elements.

        Args:
            collected: gradients that are.
        """
        if not self.is_strided:
            return False
        if collected is not None and collected.group.has_all(self.own_params):  # usually
            return collected.find_weights()
        grads = map(GRAD_OF, self._own_params_without(collected).values())
        return are_contiguous([*self.own_params.values(), *(grad for grad in grads if grad is not None)])

    def _own_params_without(self, collected: CollectedGrads | None) -> Mapping[str, nn.Parameter]:
        """Return the parameters with a gradient of their own that was not collected, if they have one."""
        if collected is None:
            return self.own_params
        if collected.group.has_all(self.own_params):  # usually
            return {}
        return {name: param for name, param in self.own_params.items() if name not in collected.group.params}

    def grads(self, *, in_place: bool = False) -> list[Tensor]:
        """Return the gradients of :meth:`optimizer_targets`, without parameters that have none.

        Args:
            in_place: whether to leave out copies in a wider dtype, whose changes would be lost.
        """
        if self.role.update_shard is None:
            return []
        flat = [
            flat_params.grads.optimizer_grad(start, stop)
            for flat_params, _, start, stop in self.update_ranges
            if not (in_place and flat_params.layout.holds_casts)
        ]
        return flat + [param.grad for param in self.own_params.values() if param.grad is not None]

    def clip_grads(self, scale: Tensor | float, bound: float | None) -> None:
        """Scale :meth:`grads`, then clip each element; those that are read in a wider dtype when they are read.

        Args:
            scale: what they are multiplied with.
            bound: the largest magnitude of an element; None for no bound.
        """
        for flat_params in self.flat_params:
            if flat_params.layout.holds_casts:
                flat_params.own_grads.scale, flat_params.own_grads.bound = scale, bound
        for grad in self.grads(in_place=True):
            if isinstance(scale, Tensor) or scale != 1.0:
                scale_grad(grad, scale)
            if bound is not None:
                clip_by_value(grad, bound)

    def params_without_grad(self, collected: CollectedGrads | None) -> list[str]:
        """Return the parameters without a gradient from autograd in this step.

        Args:
            collected: gradients of those that have one.
        """
        flat = [name for flat_params in self.flat_params for name in flat_params.grads.params_without_grad()]
        return flat + [name for name, param in self._own_params_without(collected).items() if param.grad is None]

    def fill_missing_grads(self) -> None:
        """Set missing gradients to zeros; flat parameters do so themselves."""
        for name, param in self.own_params.items():
            if param.grad is None and name not in self.skipped:
                param.grad = torch.zeros_like(param)

    def grad_of(self, name: str, start: int, stop: int) -> Tensor | None:
        """Return the gradient of a range of a parameter that this rank updates, flat; None if there is none.

        Args:
            name: of the parameter.
            start: the range's first element in the flat parameters.
            stop: one past its last.
        """
        if name in self.skipped:
            return None
        flat_params = next((flat_params for flat_params in self.flat_params if name in flat_params.params), None)
        grad = self.params[name].grad if flat_params is None else flat_params.grads.optimizer_grad(start, stop)
        return None if grad is None else (grad.to_dense() if grad.is_sparse else grad).detach().reshape(-1)

    def has_shared_rows(self) -> bool:
        """Return whether replicas share rows of tables, which the next backward of any of them may overwrite."""
        return any(flat_params.grads.has_shared_rows for flat_params in self.flat_params)

    def clear_grads(self) -> None:
        """Drop all gradients of the unit except delayed ones."""
        for param in self.own_params.values():
            param.grad = None
        for flat_params in self.flat_params:
            flat_params.grads.clear()


class ParamStore:
    """Parameters, buffers and optimizers of one rank.

    Args:
        units: the rank's role for each unit.
        params: the rank's own parameters by name; shards, where blocks are tensor-parallel.
        buffers: the rank's own buffers by name.
        unit_param_names: the parameters of each unit.
        optimizer_spec: the user's optimizer.
        allocate: allocates gradients that other ranks need.
        tables: the embedding tables, and whether their gradients are sparse.
        num_weight_versions: versions of the weights, each in its own memory; all start equal to the current one.
        state_allocator: active while optimizer state is allocated.
        grad_check: checks the gradients of backwards.
        keeps_grads: whether the gradients of a step are kept until the next one.
        read_dtypes: of parameters that the model reads in a narrower dtype, if they are freed after use or held in it.
        rounding: of updated weights in bf16; None for that to the nearest.
        reduce_dtype: in which gradients are summed over ranks, unless theirs is no wider; None for theirs.
        holds_casts: whether the parameters in ``read_dtypes`` are held in that dtype, with master weights of what the
            rank updates.
        first_values: of parameters that have none; None if ``params`` have them.
        offloaded: the optimizer state, if it is elsewhere between updates; gradients are then flat, and those of a
            device are applied on the host.
        accelerator: that the parameters are on; None for the host.
        offloaded_weights: the file of weights that are elsewhere between uses, and the units that they belong to.
        split_size: of the layouts of flat parameters; 0 for that of the optimizer.
    """

    def __init__(  # noqa: PLR0913 - the parts of one rank
        self,
        units: Mapping[Unit, UnitRole],
        params: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
        unit_param_names: Mapping[Unit, tuple[str, ...]],
        optimizer_spec: OptimizerSpec,
        allocate: Allocate = allocate_flat,
        tables: Mapping[str, bool] = MappingProxyType({}),
        num_weight_versions: int = 1,
        state_allocator: StateAllocator = nullcontext,
        grad_check: GradCheck | None = None,
        *,
        keeps_grads: bool = False,
        read_dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
        rounding: WeightRounding | None = None,
        reduce_dtype: torch.dtype | None = None,
        holds_casts: bool = False,
        first_values: FirstValues | None = None,
        offloaded: OffloadedState | HostState | None = None,
        accelerator: Accelerator | None = None,
        offloaded_weights: tuple[OffloadedWeights, Collection[Unit]] | None = None,
        split_size: int | None = 0,
    ) -> None:
        self.params, self.offloaded = dict(params), offloaded
        self.offloaded_weights = None if offloaded_weights is None else offloaded_weights[0]
        self.units_of_weights = () if offloaded_weights is None else offloaded_weights[1]
        self.accelerator, self.state_allocator = accelerator, state_allocator
        self.host_targets: dict[tuple[Unit, ...], HostTargets] = {}  # of a device, by the units of an optimizer
        self.read_dtypes, self.rounding, self.reduce_dtype = read_dtypes, rounding, reduce_dtype
        self.holds_casts, self.split_size = holds_casts, optimizer_spec.split_size if split_size == 0 else split_size
        self.grad_check = grad_check or GradCheck()
        self.keeps_grads = keeps_grads
        self.buffers = dict(buffers)
        self.optimizer_spec = optimizer_spec
        self.allocate = allocate
        self.tables = tables
        self.sparse_names = frozenset(name for name, is_sparse in tables.items() if is_sparse)
        self.units = {
            unit: self._build_unit(
                unit, role, {name: self.params[name] for name in unit_param_names[unit]}, first_values
            )
            for unit, role in units.items()
        }
        self._swapped_units: list[Unit] = []  # whose gradient buffers this step has swapped
        self.is_shared_on_host = False
        self.in_backward = False  # whether gradients computed now belong to a step
        self.has_checked_options = False  # in this step
        self.optimizers: dict[tuple[Unit, ...], tuple[optim.Optimizer | None, list[Tensor]]] = {}
        self._known_state_dtypes: dict[tuple[int, torch.dtype, int], StateDtypes] = {}
        self._have_state: set[tuple[Unit, ...]] = set()  # whose optimizer has allocated its state
        self.num_host_commits = 0  # applied since the ranks were built, or have got other state
        self.skips: Tensor | None = (
            None  # on a device, 1 if updates are skipped; None if the host knows that they are not
        )
        self.weight_versions: WeightVersions | None = None
        if num_weight_versions > 1:
            self.weight_versions = WeightVersions(self.params, list(self.flat_params()), num_weight_versions)
        self.flat_sinks, self.param_sinks = self._find_flat_sinks(), self._find_param_sinks()
        self.clear_grads()  # of steps before

    def _find_flat_sinks(self) -> dict[int, FlatGradSink]:
        return find_flat_sinks(self.flat_params(), self, has_weight_versions=self.weight_versions is not None)

    def _find_param_sinks(self) -> dict[int, ParamGradSink]:
        shared = {name for flat_params in self.flat_params() for name in flat_params.params} | self.sparse_names
        names = () if self.weight_versions is not None else self.params.keys() - shared
        return find_param_sinks({name: self.params[name] for name in names}, self)

    def weights(self, version: int) -> Mapping[str, Tensor]:
        """Return the parameters by name as they were ``-version`` updates ago."""
        return self.params if self.weight_versions is None else self.weight_versions.read(version)

    def weights_for_forward(self, version: int) -> Mapping[str, Tensor]:
        """Return :meth:`weights`, with casts in place of the parameters that were gathered in a narrower dtype."""
        weights = self.weights(version)
        if not self.read_dtypes or self.holds_casts:
            return weights
        return {
            **weights,
            **{name: value for flat_params in self.flat_params() for name, value in flat_params.read_params()},
        }

    def fold_version_grads(self, version: int) -> None:
        """Add gradients on the parameters of a version to those of the newest one."""
        if self.weight_versions is not None:
            self.weight_versions.fold_grads(version)

    def begin_version(self, *, is_new: bool) -> None:
        """Keep the current weights as a version before an update; without one, the version counts twice."""
        if self.weight_versions is not None:
            self.weight_versions.advance(is_new=is_new)
            self._repoint_optimizers()

    def begin_step(self) -> None:
        """Start a step without gradients: drop those that other code has left, as ``zero_grad()`` does."""
        for param in self.params.values():
            param.grad = None
        for flat_params in self.flat_params() if self.keeps_grads else ():
            flat_params.grads.clear()
        self._swapped_units.clear()
        self.skips, self.has_checked_options = None, False
        self.grad_check.begin_step()
        for unit_params in self.units.values():
            unit_params.skipped.clear()
            for flat_params in unit_params.flat_params:
                flat_params.grads.begin_step()

    def commit_error_feedback(self, *, applied: bool) -> None:
        """Make this step's error feedback current if the step is applied; else keep the previous one."""
        for unit_params in self.units.values():
            for flat_params in unit_params.flat_params:
                for error_feedback in flat_params.error_feedbacks.values():
                    error_feedback.commit(applied=applied)

    def share_on_host(self, fabric: Fabric) -> None:
        """Move weights and gradients to memory that replicas share, where they can; all ranks call it together."""
        if self.is_shared_on_host:
            return
        self.is_shared_on_host = True
        for unit_params in self.units.values():
            group = unit_params.role.host_replicas
            for index, flat_params in enumerate(unit_params.flat_params if group is not None else ()):
                assert group is not None, "only units with replicas are iterated"
                share_params(flat_params, fabric, group, f"weights of {unit_params.unit} {index}")
        self._repoint_optimizers()
        self.flat_sinks = self._find_flat_sinks()

    def copy_shared_grads(self) -> None:
        """Copy this rank's shards of kept gradients out of memory that replicas share, before they leave it."""
        for unit_params in self.units.values():
            for flat_params in unit_params.flat_params if not unit_params.has_shared_rows() else ():
                flat_params.copy_shared_grads()

    def unshare(self, fabric: Fabric | None) -> None:
        """Move weights and gradients back to this rank's own memory.

        Args:
            fabric: all ranks call it together; None if the others are gone or have failed.
        """
        self.is_shared_on_host = False
        for flat_params in self.flat_params() if fabric is not None else ():
            if isinstance(flat_params.grads, SharedGrads):
                flat_params.grads.drop_grad_pages()  # so that there is room for the copies of the weights
        detached = [
            (unit_params, flat_params.detach_shared())
            for unit_params in self.units.values()
            for flat_params in unit_params.flat_params
        ]
        self.flat_sinks = self._find_flat_sinks()
        self._repoint_optimizers()
        for unit_params, was_shared in detached:  # shared memory is reused only after all have left it
            if was_shared and fabric is not None and unit_params.role.host_replicas is not None:
                fabric.barrier_async(f"leaving weights of {unit_params.unit}", unit_params.role.host_replicas).wait()

    def _repoint_optimizers(self) -> None:
        """Point the optimizers' tensors at the current memory of the weights."""
        for units, (_, tensors) in self.optimizers.items():
            if units in self.host_targets:
                continue  # which are not memory of weights
            targets = [
                target for unit in units for _, target in self.units[unit].optimizer_targets(self.optimizer_spec)
            ]
            for tensor, target in zip(tensors, targets, strict=True):
                tensor.data = target.data

    def flat_params(self) -> Iterator[FlatParams]:
        """Yield the flat parameters of all units."""
        for unit_params in self.units.values():
            yield from unit_params.flat_params

    def _build_unit(
        self, unit: Unit, role: UnitRole, params: Mapping[str, nn.Parameter], first_values: FirstValues | None
    ) -> UnitParams:
        has_masters = self.holds_casts and not self.read_dtypes.keys().isdisjoint(params)
        if not role.is_communicated and not has_masters and self.offloaded is None:
            if first_values is not None:
                allocate_first(params, first_values)
            return UnitParams(unit, role, params)
        described = [
            (name, tuple(param.shape), param.dtype, self.optimizer_spec.group_index[name])
            for name, param in params.items()
        ]
        layouts = build_layouts(
            described,
            split_size=self.split_size,
            merges_params=self.optimizer_spec.merges_params,
            read_dtypes=self.read_dtypes,
            reduce_dtype=self.reduce_dtype,
            holds_casts=self.holds_casts,
        )
        if self.offloaded is not None:
            layouts = limit_targets(layouts, self.offloaded.config.max_target_elements)
        shards = [(role.update_shard or WHOLE) if layout.holds_casts else role.local_shard for layout in layouts]
        flat_params = [
            FlatParams(layout, params, shard, self.allocate, self.sparse_names, self.grad_check, first_values)
            for layout, shard in zip(layouts, shards, strict=True)
        ]
        if self.offloaded_weights is not None and unit in self.units_of_weights:
            for one in flat_params:
                one.offload_weights(self.offloaded_weights)
        for one in flat_params if self.keeps_grads else ():
            one.own_grads.shard_allocator = self.state_allocator
        params = {**params, **{name: param for one in flat_params for name, param in one.params.items()}}
        self.params.update(params)
        return UnitParams(unit, role, params, flat_params)

    def optimizer(self, units: tuple[Unit, ...]) -> tuple[optim.Optimizer | None, list[Tensor]]:
        """Return the optimizer over some units and the tensors it updates, built on first use.

        A rank whose shards of them are empty has none.
        """
        if units not in self.optimizers:
            targets = [target for unit in units for target in self.units[unit].optimizer_targets(self.optimizer_spec)]
            if self.offloaded is not None and self.accelerator is not None and not self.accelerator.is_host:
                targets = [(group, make_host_target(tensor)) for group, tensor in targets]
                ranges = [own for unit in units for own in self.units[unit].update_ranges]
                places = [(own.flat_params, own.start, own.stop) for own in ranges]
                self.host_targets[units] = HostTargets(self.accelerator, places, [tensor for _, tensor in targets])
            tensors = [tensor for _, tensor in targets]
            optimizer = self.optimizer_spec.build(targets) if targets else None
            self.optimizers[units] = (optimizer, tensors)
            if self.offloaded is not None and optimizer is not None:
                layouts = [own.flat_params.layout for unit in units for own in self.units[unit].update_ranges]
                dtypes = [
                    self.state_dtypes(*target, has_masters=layout.holds_casts)
                    for target, layout in zip(targets, layouts, strict=True)
                ]
                self.offloaded.add(units, optimizer, tensors, dtypes)
        return self.optimizers[units]

    def momenta(self, unit: Unit, flat_params: FlatParams) -> list[Momentum]:
        """Return the running means of gradients of flat parameters that this rank updates."""
        states: dict[tuple[FlatParams, int], Mapping[str, Any]] = {}
        for units, (optimizer, tensors) in self.optimizers.items():
            places = [place for one in units for place in self.units[one].update_ranges]
            for tensor, place in zip(tensors, places, strict=False):  # tensors of units without flat parameters follow
                if optimizer is not None:
                    states[place.flat_params, place.start] = optimizer.state.get(tensor, {})
        return [
            Momentum(
                place.start,
                place.stop,
                states.get((flat_params, place.start), {}).get("exp_avg"),
                self.optimizer_spec.options(place.option_group)["betas"][0],
            )
            for place in self.units[unit].update_ranges
            if place.flat_params is flat_params
        ]

    def state_dtypes(self, group: int, tensor: Tensor, *, has_masters: bool) -> StateDtypes:
        """Return the entries of a tensor's state; weights that are rounded stochastically are updated in float32."""
        is_widened = self.rounding is not None and tensor.dtype == torch.bfloat16
        dtype = torch.float32 if is_widened else tensor.dtype
        num_dims = tensor.dim()
        if (group, dtype, num_dims) not in self._known_state_dtypes:
            found = self.optimizer_spec.list_state_dtypes(group, dtype, num_dims)
            self._known_state_dtypes[group, dtype, num_dims] = found
        dtypes = self._known_state_dtypes[group, dtype, num_dims]
        return {**dtypes, MASTER: dtype} if has_masters else dtypes

    def open_offloaded(self, optimizer_groups: Iterable[tuple[Unit, ...]]) -> None:
        """Make all optimizers if state or weights are offloaded, and room for their state.

        Args:
            optimizer_groups: the units of each optimizer.
        """
        if self.offloaded is not None or self.offloaded_weights is not None:
            for units in optimizer_groups:
                self.optimizer(units)
        if self.offloaded is not None:
            if self.state_on_disk is not None:
                self.state_on_disk.open()
            self._offload_masters(self.offloaded)

    def _offload_masters(self, offloaded: OffloadedState | HostState) -> None:
        """Move the master weights of all units to the offloaded state."""
        targets: dict[FlatParams, list[tuple[int, int, Tensor]]] = {}
        for units, (_, tensors) in self.optimizers.items():
            places = [place for unit in units for place in self.units[unit].update_ranges]
            for tensor, (flat_params, _, low, high) in zip(tensors, places, strict=True):
                if flat_params.layout.holds_casts:
                    targets.setdefault(flat_params, []).append((low, high, tensor))
        for flat_params, own in targets.items():
            flat_params.offload_masters(OffloadedMasters(offloaded, own, flat_params.layout.dtype))
        if self.state_on_disk is not None:
            self.state_on_disk.flush()

    @property
    def state_on_disk(self) -> OffloadedState | None:
        """The optimizer state if it is on disk, else None."""
        return self.offloaded if isinstance(self.offloaded, OffloadedState) else None

    def fetch(self, units: tuple[Unit, ...]) -> None:
        """Start to read the state of some units; a host has its own already."""
        if self.state_on_disk is not None:
            self.state_on_disk.fetch(units)

    def offload(self, units: tuple[Unit, ...]) -> None:
        """Wait until the state of some units is written."""
        if self.state_on_disk is not None:
            self.state_on_disk.offload(units)

    def offloaded_shards(self, unit: Unit) -> list[OffloadedShard]:
        """Return the shards of the weights of a unit that are on disk."""
        shards = [flat_params.offloaded_shard for flat_params in self.units[unit].flat_params]
        return [shard for shard in shards if shard is not None]

    def fetch_weights(self, unit: Unit) -> None:
        """Start to read the shard of the weights of a unit."""
        for shard in self.offloaded_shards(unit):
            shard.start_read()

    def offload_weights(self, unit: Unit) -> None:
        """Wait until the shard of the weights of a unit is written, if it was updated, and free its memory."""
        for shard in self.offloaded_shards(unit):
            shard.finish()

    def read_state(self, optimizer: optim.Optimizer, tensor: Tensor) -> dict[str, Any]:
        """Return the state of a tensor that an optimizer of this rank updates, wherever it is."""
        if self.offloaded is None:
            return dict(optimizer.state.get(tensor, {}))
        return self.offloaded.read_state(optimizer, tensor)

    def write_state(self, optimizer: optim.Optimizer, tensor: Tensor, state: Mapping[str, Any]) -> None:
        """Replace the state of a tensor that an optimizer of this rank updates, wherever it is."""
        if self.offloaded is not None:
            self.offloaded.write_state(optimizer, tensor, state)
        elif state:
            optimizer.state[tensor] = dict(state)
        else:
            optimizer.state.pop(tensor, None)

    def params_without_grad(self, units: Iterable[Unit]) -> list[str]:
        """Return the parameters of some units without a gradient from autograd in this step."""
        collected = self.grad_check.collected
        return [name for unit in units for name in self.units[unit].params_without_grad(collected)]

    def update(self, units: tuple[Unit, ...], step: int = 0) -> None:
        """Take one optimizer step on some units, and clear their gradients unless they are kept.

        Args:
            units: which.
            step: its number, for the random numbers of stochastic rounding.
        """
        optimizer, tensors = self.optimizer(units)
        if self.offloaded_weights is not None and not self.has_checked_options:
            self._require_finite_options()
        shards = [shard for unit in units for shard in self.offloaded_shards(unit)]
        for shard in shards:
            shard.load()
        if optimizer is not None:
            self.optimizer_spec.sync_options(optimizer, self.skips)
            if self.offloaded is not None:
                if find_fused_groups(optimizer) is not None:
                    require_finite_options(optimizer)  # of all chunks, before the first one is changed
                self.offloaded.update(units, partial(self._update_targets, optimizer, units, step))
            else:
                with nullcontext() if units in self._have_state else self.state_allocator():
                    self._update_whole(optimizer, tensors, units, step)
                self._have_state.add(units)
            self.optimizer_spec.note_step(optimizer)
            for flat_params in [one for unit in units for one in self.units[unit].flat_params]:
                flat_params.cast_masters()
        for shard in shards:
            shard.start_write()
        self.grad_check.drop_collected()
        for unit in units:
            if not self.keeps_grads or self.units[unit].has_shared_rows():
                self.units[unit].clear_grads()

    def _require_finite_options(self) -> None:
        """Check the options of all optimizers before the first one updates, which one optimizer of all units would do.

        Raises:
            PlanError: an option is not a finite number.
        """
        self.has_checked_options = True
        for optimizer, _ in self.optimizers.values():
            if optimizer is not None and find_fused_groups(optimizer) is not None:
                self.optimizer_spec.sync_options(optimizer, self.skips)
                require_finite_options(optimizer)

    def _update_whole(
        self, optimizer: optim.Optimizer, tensors: list[Tensor], units: tuple[Unit, ...], step: int
    ) -> None:
        """Update all that an optimizer has, in one step of it."""
        if self.rounding is not None:
            grads = [grad for unit in units for grad in self._grads_in_order(unit)]
            ranges = [own for unit in units for own in self.units[unit].target_ranges()]
            with self.rounding.widen(tensors, grads, ranges, step):
                step_without_closure(optimizer)
        elif not self._try_fused_update(optimizer, tensors, units):
            self._update_with_optimizer(optimizer, tensors, units)

    def _update_targets(
        self, optimizer: optim.Optimizer, units: tuple[Unit, ...], step: int, first: int, stop: int
    ) -> None:
        """Update the targets of flat parameters from one index up to another, which the optimizer has now."""
        members, host_targets = [self.units[unit] for unit in units], self.host_targets.get(units)
        skipped = [is_skipped for one in members for is_skipped in one.skipped_targets()]
        if host_targets is not None:
            for index in range(first, min(stop + stop - first, len(skipped))):
                host_targets.start(index, is_skipped=skipped[index])
            for index in range(first, stop):
                host_targets.load(index)
        self._step_targets(optimizer, units, step, skipped, slice(first, stop))
        if host_targets is not None:
            for index in range(first, stop):
                host_targets.store(index)
            return
        places = [place for one in members for place in one.update_ranges][first:stop]
        for tensor, (flat_params, _, low, high) in zip(self.optimizers[units][1][first:stop], places, strict=True):
            if flat_params.layout.holds_casts:
                flat_params.weights.data[low:high].copy_(tensor.data.view(-1))

    def _step_targets(
        self, optimizer: optim.Optimizer, units: tuple[Unit, ...], step: int, skipped: Sequence[bool], chosen: slice
    ) -> None:
        """Step the targets of flat parameters that the optimizer has now."""
        tensors, members = self.optimizers[units][1][chosen], [self.units[unit] for unit in units]
        places = [place for one in members for place in one.update_ranges][chosen]
        flags = skipped[chosen]
        has_grads = units in self.host_targets  # of their own, on the host
        if self.rounding is None and (groups := find_fused_groups(optimizer)) is not None:
            updated = [] if has_grads else zip(tensors, places, flags, strict=True)
            sources = {
                id(one): partial(at[0].grad_ranges, *at[2:]) for one, at, is_skipped in updated if not is_skipped
            }
            fused_update(optimizer, groups, sources)
            return
        if has_grads:
            grads = [tensor.grad for tensor in tensors]
        else:
            grads = [
                None if is_skipped else flat_params.grads.optimizer_grad(low, high)
                for (flat_params, _, low, high), is_skipped in zip(places, flags, strict=True)
            ]
        if self.rounding is None:
            context: AbstractContextManager[None] = give_grads(tensors, grads)
        else:
            ranges = [own for one in members for own in one.target_ranges()][chosen]
            context = self.rounding.widen(tensors, grads, ranges, step)
        with context:
            step_without_closure(optimizer)

    def _try_fused_update(self, optimizer: optim.Optimizer, tensors: list[Tensor], units: tuple[Unit, ...]) -> bool:
        """Sum gradients and update weights in one pass over memory; return False if that is not possible here."""
        collected = self.grad_check.collected
        groups = find_fused_groups(optimizer, collected)
        if groups is None or not all(self.units[unit].is_contiguous(collected) for unit in units):
            return False
        known_sources = {}
        if any(self.units[unit].flat_params for unit in units):  # other tensors have gradients of their own
            sources = [source for unit in units for source in self.units[unit].grad_sources]
            if any(self.units[unit].skipped for unit in units):
                is_skipped = [flag for unit in units for flag in self.units[unit].skipped_targets()]
                sources = [None if flag else source for source, flag in zip(sources, is_skipped, strict=True)]
            pairs = zip(tensors, sources, strict=True)
            known_sources = {id(tensor): source for tensor, source in pairs if source is not None}
        fused_update(optimizer, groups, known_sources, collected)
        return True

    def _update_with_optimizer(
        self, optimizer: optim.Optimizer, tensors: list[Tensor], units: tuple[Unit, ...]
    ) -> None:
        has_flat_params = any(self.units[unit].flat_params for unit in units)
        if has_flat_params:
            grads = [grad for unit in units for grad in self._grads_in_order(unit)]
            for tensor, grad in zip(tensors, grads, strict=True):
                tensor.grad = grad
        step_without_closure(optimizer)
        for tensor in tensors if has_flat_params else ():
            tensor.grad = None

    def _grads_in_order(self, unit: Unit) -> list[Tensor | None]:
        unit_params = self.units[unit]
        if unit_params.flat_params:
            grads = zip(unit_params.grads(), unit_params.skipped_targets(), strict=True)
            return [None if is_skipped else grad for grad, is_skipped in grads]
        return [param.grad for param in unit_params.params.values()]

    def clear_grads(self) -> None:
        """Drop all gradients."""
        for unit_params in self.units.values():
            unit_params.clear_grads()

    def drop_delayed_grads(self) -> None:
        """Drop all delayed gradients."""
        for flat_params in self.flat_params():
            flat_params.drop_delayed_grad()

    def swap_grad_buffers(self, unit: Unit) -> None:
        """Exchange the gradient of a unit with the delayed one of the step before."""
        self._swapped_units.append(unit)
        for flat_params in self.units[unit].flat_params:
            flat_params.swap_grad_buffers()

    def rollback(self, summed_elsewhere: Sequence[FlatParams] = ()) -> None:
        """Discard what a failed step has left, without communication; weights and optimizer states are unchanged.

        Args:
            summed_elsewhere: those whose delayed gradient is part of a sum that another replica keeps.
        """
        for unit in self._swapped_units:
            for flat_params in self.units[unit].flat_params:
                flat_params.undo_swap()
        for flat_params in summed_elsewhere:
            flat_params.zero_delayed_grad()
        self.commit_error_feedback(applied=False)
        self.grad_check.clear()
        for flat_params in self.flat_params():
            flat_params.reshard_weights()
        if self.offloaded_weights is not None:
            self.offloaded_weights.clear()
        self.unshare(None)
        self.clear_grads()
        if self.weight_versions is not None:
            self.weight_versions.reset()

    def keep_shards_in_place(self) -> None:
        """Copy no shard of the largest gradients from now on: each would exist next to its whole gradient."""
        for storage in find_largest(self.flat_params()):
            storage.own_grads.keeps_shard_in_place = storage.weights.is_cpu

    def close(self) -> None:
        """Give up the optimizer state and the weights that are on disk."""
        if self.state_on_disk is not None:
            self.state_on_disk.close()
        if self.offloaded_weights is not None:
            self.offloaded_weights.close()

    def begin_backward(self) -> None:
        """Let sinks take the gradients that are computed from now on: they belong to a step."""
        self.in_backward = True

    def end_backward(self) -> None:
        """Let sinks take no more gradients."""
        self.in_backward = False


def find_largest(flat_params: Iterable[FlatParams]) -> list[FlatParams]:
    """Return those whose gradient is at least a quarter of all, so that a copy of its shard would be a large addition.

    They are few, as the memory blocks that the ranks of a host can share.
    """
    sizes = {storage: storage.layout.num_elements * storage.layout.held_dtype.itemsize for storage in flat_params}
    return [storage for storage, size in sizes.items() if MAX_LARGE * size >= sum(sizes.values())]


@contextmanager
def give_grads(tensors: Sequence[Tensor], grads: Sequence[Tensor | None]) -> Iterator[None]:
    """Let tensors have gradients inside."""
    for tensor, grad in zip(tensors, grads, strict=True):
        tensor.grad = grad
    try:
        yield
    finally:
        for tensor in tensors:
            tensor.grad = None


def share_params(flat_params: FlatParams, fabric: Fabric, group: Group, label: str) -> None:
    """Move flat parameters to memory that a group shares, if it can; all members call it together.

    The weights' old memory is freed before gradients are allocated.
    """
    count, dtype = flat_params.layout.num_elements, flat_params.layout.dtype
    weights = fabric.shared_zeros(label, count, dtype, group)
    if weights is None:
        return
    if fabric.rank == group[0]:
        weights.copy_(flat_params.weights)
    flat_params.rebind_views(weights)  # its values are complete after the next collective
    grads = fabric.shared_zeros(f"gradients of {label}", len(group) * aligned_elements(count, dtype), dtype, group)
    assert grads is not None, "these ranks share memory"
    exchange = allocate_grad_exchange(flat_params, fabric, group, f"row gradients of {label}")
    flat_params.attach_shared(
        SharedGrads(
            grads.view(len(group), -1),
            flat_params.layout,
            flat_params.params,
            exchange,
            flat_params.own_grads.grad_check,
        )
    )


def allocate_grad_exchange(flat_params: FlatParams, fabric: Fabric, group: Group, label: str) -> SparseGradExchange:
    """Return where replicas publish row gradients of a unit's tables; all of them call it together."""
    layout = flat_params.layout
    tables, dtype = table_slots(layout, flat_params.own_grads.rows.slots), layout.dtype
    if not tables:
        return SparseGradExchange(
            torch.zeros(len(group), 0, dtype=torch.int64), tables, dtype, group.index(fabric.rank)
        )
    headers = fabric.shared_zeros(label, len(group) * header_elements(len(tables)), torch.int64, group)
    assert headers is not None, "these ranks share memory"
    return SparseGradExchange(headers.view(len(group), -1), tables, dtype, group.index(fabric.rank))


def allocate_first(params: Mapping[str, nn.Parameter], first_values: FirstValues) -> None:
    """Give parameters that have no values yet memory of their own, with their first values."""
    new = {name: param for name, param in params.items() if name in first_values.names}
    for param in new.values():
        param.data = torch.empty(param.shape, dtype=param.dtype)
    first_values.fill([ParamValues(name, 0, param.data.view(-1)) for name, param in new.items()], new)
