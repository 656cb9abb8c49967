"""All that one rank holds of the model: parameters, buffers, and for each unit where its gradients go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn, optim

from counterpoint.fabric.fabric import Fabric, Group
from counterpoint.model.spec import Unit
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.runtime.params.flat_layout import build_layouts
from counterpoint.runtime.params.flat_params import Allocate, FlatParams, allocate_flat
from counterpoint.runtime.params.fused_optimizer import (
    GradSource,
    fused_update,
    is_param_contiguous,
    own_grad,
    supports_fused_update,
)
from counterpoint.runtime.params.grad_sinks import FlatGradSink, ParamGradSink, find_flat_sinks, find_param_sinks
from counterpoint.runtime.params.shared_params import (
    SharedParams,
    SparseGradExchange,
    aligned_elements,
    header_elements,
    table_slots,
)
from counterpoint.runtime.params.unit_roles import UnitRole
from counterpoint.runtime.params.weight_versions import WeightVersions


@dataclass(slots=True)
class UnitParams:
    """One unit on one rank.

    Args:
        unit: which unit.
        role: what the row does with it.
        params: its parameters by name; views of the arenas where there are any.
        arenas: one for each dtype; none when the gradient stays on this rank.
    """

    unit: Unit
    role: UnitRole
    params: dict[str, nn.Parameter]
    flat_params: list[FlatParams] = field(default_factory=list)
    _grad_sources: list[GradSource] | None = field(default=None, init=False)

    def optimizer_targets(self, optimizer_spec: OptimizerSpec) -> list[tuple[int, Tensor]]:
        """Return the tensors an optimizer updates for this unit, with their option groups."""
        span = self.role.update_shard
        if span is None:
            return []
        if not self.flat_params:
            return [(optimizer_spec.group_index[name], param) for name, param in self.params.items()]
        return [
            (group, nn.Parameter(arena.optimizer_view(start, stop), requires_grad=False))
            for arena in self.flat_params
            for group, start, stop in arena.layout.optimizer_ranges(span)
        ]

    def grad_sources(self) -> list[GradSource]:
        """Return for each of :meth:`targets` what tells what adds up to its gradient; made once."""
        span = self.role.update_shard
        if self._grad_sources is None and span is not None:
            self._grad_sources = [
                partial(one.grad_ranges, *at[1:], span)
                for one in self.flat_params
                for at in one.layout.optimizer_ranges(span)
            ]
            self._grad_sources += [partial(own_grad, param) for param in self.params.values() if not self.flat_params]
        return self._grad_sources or []

    def is_contiguous(self) -> bool:
        """Tell whether weights and gradients are flat memory, element by element in the same order."""
        return bool(self.flat_params) or all(map(is_param_contiguous, self.params.values()))

    def grads(self) -> list[Tensor]:
        """Return the gradients that belong to :meth:`targets`; parameters without one are left out."""
        span = self.role.update_shard
        if span is None:
            return []
        if not self.flat_params:
            return [param.grad for param in self.params.values() if param.grad is not None]
        return [
            arena.optimizer_grad(start, stop, span)
            for arena in self.flat_params
            for _, start, stop in arena.layout.optimizer_ranges(span)
        ]

    def params_without_grad(self) -> list[str]:
        """Return the parameters on which autograd has put no gradient in this step."""
        if not self.flat_params:
            return [name for name, param in self.params.items() if param.grad is None]
        return [name for arena in self.flat_params for name in arena.params_without_grad()]

    def fill_missing_grads(self) -> None:
        """Give zeros to the parameters without a gradient, as an arena does by itself."""
        for param in self.params.values() if not self.flat_params else ():
            if param.grad is None:
                param.grad = torch.zeros_like(param)

    def swap_grad_buffers(self) -> None:
        """Exchange the gradient with the one that was set aside a step ago."""
        for arena in self.flat_params:
            arena.swap_grad_buffers()

    def clear_grads(self) -> None:
        """Forget all gradients of the unit but those set aside."""
        for param in self.params.values() if not self.flat_params else ():
            param.grad = None
        for arena in self.flat_params:
            arena.clear_grads()


class ParamStore:
    """The parameters, buffers and optimizers of one rank.

    Args:
        units: what the row does with each unit.
        params: the rank's own parameters by name, sliced where blocks are sliced.
        buffers: the rank's own buffers by name.
        names_of: the parameters of each unit.
        face: the user's optimizer.
        empty: makes memory for gradients that other ranks need.
        tables: the parameters that are looked up in, and whether their gradients are sparse.
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
    ) -> None:
        self.params = dict(params)
        self.buffers = dict(buffers)
        self.optimizer_spec = optimizer_spec
        self.allocate = allocate
        self.tables = tables
        self.sparse_names = frozenset(name for name, is_sparse in tables.items() if is_sparse)
        self.units = {
            unit: UnitParams(unit, role, {name: self.params[name] for name in unit_param_names[unit]})
            for unit, role in units.items()
        }
        for store in self.units.values():
            if store.role.is_communicated:
                store.flat_params = self._build_flat_params(store)
        self.is_shared_on_host = False
        self.in_backward = False  # whether gradients that are made now are those of a step
        self.optimizers: dict[tuple[Unit, ...], tuple[optim.Optimizer | None, list[Tensor]]] = {}
        self.weight_versions: WeightVersions | None = None
        self.flat_sinks, self.param_sinks = (
            self._find_flat_sinks(),
            self._find_param_sinks(),
        )  # where gradients may be written straight to
        self.state_allocator: Callable[[], AbstractContextManager[None]] = (
            nullcontext  # in what to make optimizers' state
        )

    def keep_weight_versions(self, count: int) -> None:
        """From now on the weights of so many versions are there, in memory of their own; all are as the newest."""
        self.weight_versions = WeightVersions(self.params, list(self.flat_params()), count) if count > 1 else None
        self.flat_sinks, self.param_sinks = self._find_flat_sinks(), self._find_param_sinks()

    def _find_flat_sinks(self) -> dict[int, FlatGradSink]:
        return find_flat_sinks(self.flat_params(), self, has_weight_versions=self.weight_versions is not None)

    def _find_param_sinks(self) -> dict[int, ParamGradSink]:
        shared = {name for arena in self.flat_params() for name in arena.params} | self.sparse_names
        names = () if self.weight_versions is not None else self.params.keys() - shared
        return find_param_sinks((self.params[name] for name in names), self)

    def weights(self, version: int) -> Mapping[str, Tensor]:
        """Return the parameters by name as they stood so many updates ago."""
        return self.params if self.weight_versions is None else self.weight_versions.read(version)

    def fold_version_grads(self, version: int) -> None:
        """Gradients that autograd has put on the parameters of a version are those of the newest ones."""
        if self.weight_versions is not None:
            self.weight_versions.fold_grads(version)

    def begin_version(self, *, is_new: bool) -> None:
        """An update begins: the weights as they are stay a version; without anything new, it is the same again."""
        if self.weight_versions is not None:
            self.weight_versions.advance(is_new=is_new)
            self._repoint_optimizers()

    def begin_step(self) -> None:
        """Start a step, in which no parameter has got a gradient or missed one."""
        for store in self.units.values():
            for arena in store.flat_params:
                arena.begin_step()

    def commit_error_feedback(self, *, applied: bool) -> None:
        """What codes have left unsent in this step stays behind if the step is applied; else all is as it was."""
        for store in self.units.values():
            for arena in store.flat_params:
                for left in arena.error_feedbacks.values():
                    left.commit(applied=applied)

    def share_on_host(self, fabric: Fabric) -> None:
        """Where replicas have memory in common, their weights and gradients live there; all ranks call it together."""
        if self.is_shared_on_host:
            return
        self.is_shared_on_host = True
        for store in self.units.values():
            group = store.role.host_replicas
            for index, arena in enumerate(store.flat_params if group is not None else ()):
                assert group is not None, "it has arenas to go through"
                commons = allocate_shared_params(arena, fabric, group, f"weights of {store.unit} {index}")
                if commons is not None:
                    arena.attach_shared(commons)
        self._repoint_optimizers()
        self.flat_sinks = self._find_flat_sinks()

    def unshare(self, fabric: Fabric | None) -> None:
        """Weights and gradients live in this rank's own memory again.

        Args:
            fabric: all ranks call it together; None where the others are gone or have failed.
        """
        self.is_shared_on_host = False
        for arena in self.flat_params() if fabric is not None else ():
            if arena.shared is not None:
                arena.shared.drop_grad_pages()  # there is room for the weights that come into this rank's own memory
        left = [(store, arena.detach_shared()) for store in self.units.values() for arena in store.flat_params]
        self.flat_sinks = self._find_flat_sinks()
        self._repoint_optimizers()
        for store, commons in left:  # nobody's memory is used for something else before all have left it
            if commons is not None and fabric is not None and store.role.host_replicas is not None:
                fabric.barrier_async(f"leaving weights of {store.unit}", store.role.host_replicas).wait()

    def _repoint_optimizers(self) -> None:
        """What optimizers update is where the weights are now."""
        for units, (_, tensors) in self.optimizers.items():
            now = [target for unit in units for _, target in self.units[unit].optimizer_targets(self.optimizer_spec)]
            for tensor, target in zip(tensors, now, strict=True):
                tensor.data = target.data

    def flat_params(self) -> Iterator[FlatParams]:
        """Yield the arenas of all units."""
        for store in self.units.values():
            yield from store.flat_params

    def _build_flat_params(self, unit_params: UnitParams) -> list[FlatParams]:
        described = [
            (name, tuple(param.shape), param.dtype, self.optimizer_spec.group_index[name])
            for name, param in unit_params.params.items()
        ]
        layouts = build_layouts(described, may_split_params=self.optimizer_spec.is_elementwise)
        return [
            FlatParams(layout, unit_params.params, unit_params.role.local_shard, self.allocate, self.sparse_names)
            for layout in layouts
        ]

    def optimizer(self, units: tuple[Unit, ...]) -> tuple[optim.Optimizer | None, list[Tensor]]:
        """Return the optimizer over some units and the tensors it updates, made when first asked for.

        A rank whose shares of them are empty has none.
        """
        if units not in self.optimizers:
            targets = [target for unit in units for target in self.units[unit].optimizer_targets(self.optimizer_spec)]
            tensors = [tensor for _, tensor in targets]
            self.optimizers[units] = (self.optimizer_spec.build(targets) if targets else None, tensors)
        return self.optimizers[units]

    def update(self, units: tuple[Unit, ...]) -> None:
        """Take one optimizer step on some units with the gradients that they hold, and clear them."""
        made, tensors = self.optimizer(units)
        if made is not None:
            self.optimizer_spec.sync_options(made)
            with nullcontext() if made.state else self.state_allocator():
                if not self._try_fused_update(made, tensors, units):
                    self._update_with_optimizer(made, tensors, units)
        for unit in units:
            self.units[unit].clear_grads()

    def _try_fused_update(self, optimizer: optim.Optimizer, tensors: list[Tensor], units: tuple[Unit, ...]) -> bool:
        """Add up gradients and update weights in one pass over memory; return whether that is possible here."""
        if not supports_fused_update(optimizer) or not all(self.units[unit].is_contiguous() for unit in units):
            return False
        found = [sums for unit in units for sums in self.units[unit].grad_sources()]
        fused_update(optimizer, {id(tensor): sums for tensor, sums in zip(tensors, found, strict=True)})
        return True

    def _update_with_optimizer(
        self, optimizer: optim.Optimizer, tensors: list[Tensor], units: tuple[Unit, ...]
    ) -> None:
        in_arenas = any(self.units[unit].flat_params for unit in units)
        if in_arenas:
            gradients = [gradient for unit in units for gradient in self._grads_in_order(unit)]
            for tensor, gradient in zip(tensors, gradients, strict=True):
                tensor.grad = gradient
        optimizer.step()
        for tensor in tensors if in_arenas else ():
            tensor.grad = None

    def _grads_in_order(self, unit: Unit) -> list[Tensor | None]:
        store = self.units[unit]
        if store.flat_params:
            return list(store.grads())
        return [param.grad for param in store.params.values()]

    def clear_grads(self) -> None:
        """Forget all gradients."""
        for store in self.units.values():
            store.clear_grads()


def allocate_shared_params(flat_params: FlatParams, fabric: Fabric, group: Group, label: str) -> SharedParams | None:
    """Return memory that replicas have in common, with an arena's weights; None where they can have none.

    All of them call it together. What weights were in before is free before there is memory for gradients.
    """
    count, dtype = flat_params.layout.num_elements, flat_params.layout.dtype
    weights = fabric.shared_zeros(label, count, dtype, group)
    if weights is None:
        return None
    if fabric.rank == group[0]:
        weights.copy_(flat_params.weights)
    flat_params.rebind_views(weights)  # its values are there when all have met for what comes next
    gradients = fabric.shared_zeros(
        f"gradients beside {label}", len(group) * aligned_elements(count, dtype), dtype, group
    )
    assert gradients is not None, "these ranks have memory in common"
    board = allocate_grad_exchange(flat_params, fabric, group, f"notes of {label}")
    return SharedParams(weights, gradients.view(len(group), -1), flat_params.layout, group.index(fabric.rank), board)


def allocate_grad_exchange(flat_params: FlatParams, fabric: Fabric, group: Group, label: str) -> SparseGradExchange:
    """Return where replicas show each other rows of an arena's tables; all of them call it together."""
    tables, dtype = table_slots(flat_params.layout, flat_params.sparse_names), flat_params.layout.dtype
    if not tables:
        return SparseGradExchange(
            torch.zeros(len(group), 0, dtype=torch.int64), tables, dtype, group.index(fabric.rank)
        )
    notes = fabric.shared_zeros(label, len(group) * header_elements(len(tables)), torch.int64, group)
    assert notes is not None, "these ranks have memory in common"
    return SparseGradExchange(notes.view(len(group), -1), tables, dtype, group.index(fabric.rank))
