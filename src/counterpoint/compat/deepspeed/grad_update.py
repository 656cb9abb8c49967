"""Sum the gradients of all ranks and update: whole on every rank (stage 0), or each rank its own shard (1 and 2).

::

    weights of a group, flat   [ w0 w0 w0 w1 w1 | w1 b1 b1 b1 b1 ]    parameters are views of it, on both ranks
    optimizer's parameter        shard of rank 0  shard of rank 1      its state has the size of the shard

    stage 0    backward, ..., backward | all_reduce(grad)     | update of everything
    stage 1    backward, ..., backward | reduce_scatter(grad) | update of the shard | all_gather(weight)
    stage 2    reduce_scatter(grad) after each backward; only the sum of the shards stays

The optimizer is the user's own. From stage 1 on its groups hold shards instead of parameters, so that schedulers and
options work as before.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from counterpoint.compat.deepspeed.rank_agreement import gather_norms
from counterpoint.compat.deepspeed.weight_changes import WeightChanges
from counterpoint.errors import DataError, PlanError
from counterpoint.fabric.cast_reductions import start_cast_all_reduce, start_cast_reduce_scatter
from counterpoint.fabric.fabric import Fabric, Work
from counterpoint.partitioning.module_casts import is_narrower
from counterpoint.runtime.optimizer_spec import ELEMENTWISE_OPTIMIZERS


class GradientUpdate(ABC):
    """The gradients of a step, from each backward to the update."""

    def __init__(self, fabric: Fabric, optimizer: Optimizer, rule: GradientRule, module: nn.Module) -> None:
        self.fabric, self.optimizer, self.rule = fabric, optimizer, rule
        self.names = {id(param): name for name, param in module.named_parameters()}
        self.weight_changes = WeightChanges(fabric, module)
        self.ranks = tuple(range(fabric.num_ranks))
        self.given = [(param, param.requires_grad) for group in optimizer.param_groups for param in group["params"]]
        self.param_ids = read_param_ids(optimizer)
        self.grad_versions: dict[int, tuple[int, int]] = {}  # after the last backward, by the parameter's id
        self.is_applying = False
        optimizer.register_step_pre_hook(self._require_applying)

    def _require_applying(self, optimizer: Optimizer, *_: object) -> None:
        """Check that the optimizer steps with the gradients of all ranks.

        Raises:
            DataError: the script has called its ``step``.
        """
        if not self.is_applying:
            raise DataError(
                f"{type(optimizer).__name__}.step() was called by the script, which would update with gradients of "
                "this rank alone; call step() of the model that initialize returned"
            )

    def require_same_params(self) -> None:
        """Check that the parameters that train, and the groups of the optimizer, are those of ``initialize``.

        Raises:
            DataError: one was frozen, unfrozen, added or removed.
        """
        for param, required_grad in self.given:
            if param.requires_grad != required_grad:
                raise DataError(
                    f"{self.names[id(param)]} has requires_grad={param.requires_grad}, and had {required_grad} in "
                    "initialize(), which decides what is trained; call initialize again after the change, with a new "
                    "optimizer"
                )
        found = read_param_ids(self.optimizer)
        if found != self.param_ids:
            known = {key for ids in self.param_ids for key in ids}
            added = [self.names.get(key, "another tensor") for ids in found for key in ids if key not in known]
            raise DataError(
                f"the groups of the optimizer are not those of initialize(): {', '.join(added) or 'nothing'} was "
                "added; call initialize again after the change, with a new optimizer"
            )

    def end_backward(self) -> None:
        """Take the gradients of a backward, and remember their versions."""
        self.take_grads()
        self.grad_versions = {
            id(param): read_version(param.grad) for param in self._updated() if param.grad is not None
        }

    def require_own_grads(self) -> None:
        """Check that gradients are those that ``backward`` has left; dropping them, or setting zeros, is possible.

        Raises:
            DataError: the script has changed or added some, or has called the ``backward`` of a loss.
        """
        for param in self._updated():
            grad = param.grad
            if grad is None or self.grad_versions.get(id(param)) == read_version(grad):
                continue
            if grad.count_nonzero():
                raise DataError(
                    f"the gradient of {self.names.get(id(param), 'a shard')} was changed outside of backward() of the "
                    "model that initialize returned, but it is not yet the mean over ranks; set gradient_clipping "
                    "instead of clipping it, add losses before backward(loss), or drop it by zero_grad()"
                )

    def _updated(self) -> Iterator[Tensor]:
        """Yield the parameters that train, and this rank's shards of them."""
        yield from (param for param, required_grad in self.given if required_grad)

    @abstractmethod
    def take_grads(self) -> None:
        """Take the gradients of a backward."""

    @abstractmethod
    def reduce(self) -> float:
        """Complete the gradients of the step, which are sums over all ranks, and return the square of their norm."""

    @abstractmethod
    def grads(self) -> list[Tensor]:
        """Return the gradients that the optimizer applies on this rank."""

    def clear(self) -> None:
        """Drop the gradients."""
        self.grad_versions = {}
        for param in self._updated():
            param.grad = None

    def apply(self, factor: float) -> None:
        """Multiply the gradients by a factor and update the weights with them."""
        grads = self.grads()
        if factor != 1.0 and grads:
            torch._foreach_mul_(grads, factor)
        self.is_applying = True
        try:
            self.optimizer.step()
        finally:
            self.is_applying = False
        self.clear()

    def share_norm(self, squared: float) -> list[float]:
        """Return the squared norm of each rank, and compare the options of the optimizer with the other ranks'.

        Raises:
            DataError: an option differs, or weights that a script has set.
        """
        try:
            norms, were_set = gather_norms(
                self.fabric, self.optimizer, squared, has_set_weights=self.weight_changes.has_changes()
            )
            if were_set:
                self.weight_changes.require_equal()
        except DataError:
            self.clear()
            raise
        return norms

    def cast(self, flat: Tensor) -> Tensor | None:
        """Return a copy in the narrower dtype that is sent; None if gradients are sent in their own."""
        dtype = self.rule.reduce_dtype
        if dtype is None or not is_narrower(dtype, flat.dtype) or self.fabric.num_ranks == 1:
            return None
        return flat.to(dtype)


@dataclass(frozen=True, slots=True)
class GradientRule:
    """How gradients become an update.

    Args:
        stage: of ZeRO.
        reduce_dtype: in which gradients are sent; None for their own.
        unused: what happens with a parameter that has no gradient: ``zero`` or ``error``.
    """

    stage: int
    reduce_dtype: torch.dtype | None = None
    unused: str = "zero"


@dataclass(slots=True)
class FlatGroup:
    """Parameters of one dtype whose gradients are sent in one flat tensor.

    Args:
        names: of the parameters, for errors.
        params: the parameters.
    """

    names: Sequence[str]
    params: Sequence[nn.Parameter]

    @property
    def label(self) -> str:
        """A name for messages between ranks."""
        return f"{self.names[0]} to {self.names[-1]}"

    @property
    def offsets(self) -> list[int]:
        """Where each parameter begins in the flat tensor, and where the last one ends."""
        return [0, *accumulate(param.numel() for param in self.params)]

    def slices(self, flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each parameter with its part of a flat tensor, in the shape of the parameter."""
        for param, start in zip(self.params, self.offsets, strict=False):
            yield param, flat[start : start + param.numel()].view(param.shape)

    def pack_grads(self, unused: str) -> Tensor:
        """Return the gradients as one flat tensor, and release them.

        Raises:
            DataError: a parameter has none, and that is an error.
        """
        flat = self.params[0].new_empty(self.offsets[-1])
        for name, (param, part) in zip(self.names, self.slices(flat), strict=True):
            if param.grad is None and unused == "error":
                raise DataError(
                    f"{name} got no gradient in this step; set zero_optimization.ignore_unused_parameters to true for "
                    "a gradient of zeros, or use the parameter in the loss"
                )
            if param.grad is None:
                part.zero_()
            else:
                part.copy_(param.grad)
            param.grad = None
        return flat


def make_flat_groups(optimizer: Optimizer, names: Mapping[int, str]) -> Iterator[tuple[int, FlatGroup]]:
    """Yield the trained parameters of each group of an optimizer, one flat group for each dtype and device.

    Args:
        optimizer: the optimizer.
        names: the name of a parameter by its ``id``.

    Yields:
        The index of the group in the optimizer, and the flat group.
    """
    for index, group in enumerate(optimizer.param_groups):
        by_kind: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = defaultdict(list)
        for param in group["params"]:
            if param.requires_grad:
                by_kind[param.dtype, param.device].append(param)
        for params in by_kind.values():
            yield index, FlatGroup([names[id(param)] for param in params], params)


def read_version(grad: Tensor) -> tuple[int, int]:
    """Return what differs after an operation in place, and for another tensor."""
    return id(grad), grad._version  # noqa: SLF001 - there is no other way to see it


def read_param_ids(optimizer: Optimizer) -> list[list[int]]:
    """Return the ``id`` of each parameter of each group."""
    return [[id(param) for param in group["params"]] for group in optimizer.param_groups]


def squared_norm(tensors: Sequence[Tensor]) -> float:
    """Return the sum of all squares, computed in float64."""
    return math.fsum(float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2 for tensor in tensors)


class WholeUpdate(GradientUpdate):
    """Stage 0: every rank has all gradients and updates all weights."""

    def __init__(self, fabric: Fabric, optimizer: Optimizer, rule: GradientRule, module: nn.Module) -> None:
        super().__init__(fabric, optimizer, rule, module)
        self.groups = [group for _, group in make_flat_groups(optimizer, self.names)]

    def take_grads(self) -> None:
        """Keep the gradients where autograd adds them up."""
        return

    @torch.no_grad()
    def reduce(self) -> float:
        """All-reduce the gradients."""
        flats = [group.pack_grads(self.rule.unused) for group in self.groups]
        works = [self._start(group, flat) for group, flat in zip(self.groups, flats, strict=True)]
        for work, group, flat in zip(works, self.groups, flats, strict=True):
            work.wait()
            for param, part in group.slices(flat):
                param.grad = part
        return self.share_norm(squared_norm(flats))[0]

    def _start(self, group: FlatGroup, flat: Tensor) -> Work:
        label, narrow = f"gradients of {group.label}", self.cast(flat)
        if narrow is None:
            return self.fabric.all_reduce(label, flat, self.ranks)
        return start_cast_all_reduce(self.fabric, label, flat, narrow, self.ranks)

    def grads(self) -> list[Tensor]:
        """Return all gradients."""
        return [param.grad for group in self.groups for param in group.params if param.grad is not None]


@dataclass(slots=True)
class Shard:
    """This rank's part of a flat group.

    Args:
        group: the parameters.
        weights: all of them, flat; the parameters are views of it.
        views: the part of each parameter.
        bounds: where the shard of each rank begins, and where the last one ends.
        param: the shard of this rank, a view of ``weights``.
    """

    group: FlatGroup
    weights: Tensor
    views: list[Tensor]
    bounds: list[int]
    param: nn.Parameter

    def ranges(self, rank: int) -> Iterator[tuple[str, int, int, int]]:
        """Yield each parameter that a rank's shard has a part of: its name, the part, and where that lies in the group.

        Args:
            rank: the rank.

        Yields:
            The name, the first element of the parameter, the one after the last, and where the first one is in the
            flat group.
        """
        first, last = self.bounds[rank : rank + 2]
        for name, param, offset in zip(self.group.names, self.group.params, self.group.offsets, strict=False):
            start, stop = max(first, offset), min(last, offset + param.numel())
            if start < stop:
                yield name, start - offset, stop - offset, start


class ShardedUpdate(GradientUpdate):
    """Stages 1 and 2: each rank keeps the optimizer's state of its shard, and updates it.

    Raises:
        PlanError: the optimizer has state already, or its update is not elementwise.
    """

    def __init__(self, fabric: Fabric, optimizer: Optimizer, rule: GradientRule, module: nn.Module) -> None:
        super().__init__(fabric, optimizer, rule, module)
        known = {cls.__name__ for cls in ELEMENTWISE_OPTIMIZERS}
        if type(optimizer) not in ELEMENTWISE_OPTIMIZERS:
            raise PlanError(
                f"{type(optimizer).__name__} may compute norms or more of whole parameters, of which ranks have shards "
                f"at stage {rule.stage}; use stage 0, or exactly one of these classes: {', '.join(sorted(known))}"
            )
        if optimizer.state:
            raise PlanError(
                f"{type(optimizer).__name__} has state of whole parameters, from earlier steps or from its constructor "
                f"(Adagrad), and ranks have shards at stage {rule.stage}; use stage 0, or pass a new optimizer of "
                "another class and load its state with load_checkpoint"
            )
        parts: dict[int, list[nn.Parameter]] = {index: [] for index, _ in enumerate(optimizer.param_groups)}
        self.shards: list[Shard] = []
        for index, group in make_flat_groups(optimizer, self.names):
            self.shards.append(self._make_shard(group))
            parts[index].append(self.shards[-1].param)
        for index, params in parts.items():
            optimizer.param_groups[index]["params"] = params
        self.param_ids = read_param_ids(optimizer)
        self.weight_changes.remember()  # parameters have been moved
        optimizer.zero_grad = self._zero_grad  # type: ignore[method-assign]  # its own would clear the shards only

    def _zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's
        """Drop all gradients, in place of the optimizer's method."""
        del set_to_none
        self.clear()

    def _updated(self) -> Iterator[Tensor]:
        """Yield the parameters that train, and this rank's shards of them."""
        yield from super()._updated()
        yield from (shard.param for shard in self.shards)

    @torch.no_grad()
    def restore_views(self) -> None:
        """Move weights that the script has set by ``param.data = ...`` to their places in the flat tensors.

        Raises:
            DataError: one has another shape, dtype or device now.
        """
        for shard in self.shards:
            for name, param, view in zip(shard.group.names, shard.group.params, shard.views, strict=True):
                if param.data_ptr() == view.data_ptr() and param.shape == view.shape and param.dtype == view.dtype:
                    continue
                if (param.shape, param.dtype, param.device) != (view.shape, view.dtype, view.device):
                    raise DataError(
                        f"{name} was set to {param.dtype} of shape {tuple(param.shape)} on {param.device}, and was "
                        f"{view.dtype} of shape {tuple(view.shape)} on {view.device} in initialize(); call initialize "
                        "again after the change, with a new optimizer"
                    )
                view.copy_(param)
                param.data = view
                self.weight_changes.note_move()

    @torch.no_grad()
    def _make_shard(self, group: FlatGroup) -> Shard:
        """Move the weights of a group into one flat tensor, and return the part of this rank."""
        numel, num_ranks, first = group.offsets[-1], self.fabric.num_ranks, group.params[0]
        weights = self.fabric.empty(numel, first.dtype) if first.device.type == "cpu" else first.new_empty(numel)
        views = []
        for param, part in group.slices(weights):
            part.copy_(param)
            param.data = part
            views.append(part)
        bounds = [numel * rank // num_ranks for rank in range(num_ranks + 1)]
        start, stop = bounds[self.fabric.rank : self.fabric.rank + 2]
        return Shard(group, weights, views, bounds, nn.Parameter(weights[start:stop]))

    def take_grads(self) -> None:
        """At stage 2, reduce the gradients of this backward and keep the shard of their sum."""
        if self.rule.stage > 1:
            self._reduce_scatter()

    def reduce(self) -> float:
        """Reduce the gradients, unless each backward did."""
        self.restore_views()
        if self.rule.stage == 1:
            self._reduce_scatter()
        return math.fsum(self.share_norm(squared_norm(self.grads())))

    @torch.no_grad()
    def _reduce_scatter(self) -> None:
        """Add the shard of the sum over ranks to what this rank has."""
        self.restore_views()
        flats = [shard.group.pack_grads(self.rule.unused) for shard in self.shards]
        works = [self._start(shard, flat) for shard, flat in zip(self.shards, flats, strict=True)]
        for work, shard, flat in zip(works, self.shards, flats, strict=True):
            work.wait()
            start, stop = shard.bounds[self.fabric.rank : self.fabric.rank + 2]
            part = flat[start:stop]
            if shard.param.grad is None:
                shard.param.grad = part.clone()
            else:
                shard.param.grad += part

    def _start(self, shard: Shard, flat: Tensor) -> Work:
        label, narrow = f"gradients of {shard.group.label}", self.cast(flat)
        if narrow is None:
            return self.fabric.reduce_scatter(label, flat, shard.bounds, self.ranks)
        return start_cast_reduce_scatter(self.fabric, label, flat, narrow, shard.bounds, self.ranks)

    def grads(self) -> list[Tensor]:
        """Return the gradients of this rank's shards."""
        return [shard.param.grad for shard in self.shards if shard.param.grad is not None]

    @torch.no_grad()
    def apply(self, factor: float) -> None:
        """Update this rank's shards, and gather the weights of all ranks."""
        super().apply(factor)
        works = [
            self.fabric.all_gather(f"weights of {shard.group.label}", shard.weights, shard.bounds, self.ranks)
            for shard in self.shards
        ]
        for work in works:
            work.wait()


def require_new_optimizer(optimizer: Optimizer) -> None:
    """Check that an optimizer can be stepped with gradients, and belongs to no other update.

    Raises:
        PlanError: it belongs to one, or needs a closure or sparse gradients.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, optim.LBFGS | optim.SparseAdam):
        needs = "a function that computes the loss again" if isinstance(optimizer, optim.LBFGS) else "sparse gradients"
        raise PlanError(f"{name} needs {needs}, and step() has dense gradients only; pass AdamW or SGD")
    hooks = optimizer._optimizer_step_pre_hooks.values()  # noqa: SLF001 - there is no other way to see them
    if any(isinstance(getattr(hook, "__self__", None), GradientUpdate) for hook in hooks):
        raise PlanError(f"this {name} belongs to the model that an earlier initialize() returned; pass a new optimizer")


def make_update(fabric: Fabric, optimizer: Optimizer, rule: GradientRule, module: nn.Module) -> GradientUpdate:
    """Return the update of a stage; on one rank there is nothing to shard.

    Raises:
        PlanError: the stage shards weights among several ranks.
    """
    if rule.stage == 3 and fabric.num_ranks > 1:
        raise PlanError(
            f"zero_optimization.stage=3 on {fabric.num_ranks} ranks frees weights between the layers of a forward, "
            "which only a program does whose forward and backward are one call; write step = cp.parallelize(model, "
            "optimizer, loss, **read_config(...).arguments), or use stage 2 here"
        )
    if rule.stage == 0 or fabric.num_ranks == 1:
        return WholeUpdate(fabric, optimizer, rule, module)
    return ShardedUpdate(fabric, optimizer, rule, module)
