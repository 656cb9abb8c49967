"""FSDP2's ``fully_shard``, read as a plan: what a script shards module by module becomes one strategy.

::

    for layer in model.layers:                        zero(4, level=3, split_points=layers.0+layers.1+...)
        fully_shard(layer, mesh=mesh)         -->     + overlap + prefetch
    fully_shard(model, mesh=mesh)

``fully_shard`` here only notes what it was called with. :func:`plan_arguments` reads the notes of a model, and returns
the arguments with which ``parallelize`` and ``Trainer`` compute the same losses and weights. Which weights are gathered
together differs in one place: parameters of the outermost module form no unit of their own, but parts of the units that
they run between, so that a rank holds them for a shorter time.

Source: ``torch.distributed.fsdp.fully_shard`` of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import torch
from torch import nn

from counterpoint.errors import PlanError
from counterpoint.launchers.environment import detect
from counterpoint.model.precision import DTYPES, Precision
from counterpoint.optim.validation import shorten
from counterpoint.strategies.data import Data
from counterpoint.strategies.zero import Zero

NOTE = "fully_shard_options"
"""The attribute of a module that has what :func:`fully_shard` was called with."""
PREFETCH_NOTE = "fully_shard_prefetch"
"""The attribute of a module that has, by direction, the modules that are to be gathered while it computes."""
Direction: TypeAlias = Literal["forward", "backward"]
ModuleOrList = TypeVar("ModuleOrList", bound=nn.Module | Sequence[nn.Module])


@dataclass(frozen=True, slots=True)
class MixedPrecisionPolicy:
    """The dtypes that modules compute in, as torch's class of this name, which is accepted as well.

    Args:
        param_dtype: of the gathered parameters and of the computations; None for the parameters' own.
        reduce_dtype: in which gradients are summed over ranks; None for ``param_dtype``.
        output_dtype: of the model's output; None for that of the computations.
        cast_forward_inputs: whether inputs are cast to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True, slots=True)
class OffloadPolicy:
    """Everything stays on the device, as with torch's class of this name."""


@dataclass(frozen=True, slots=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Optimizer state is on the host, where it is updated; torch's class of this name moves parameters there, too.

    Args:
        pin_memory: accepted as torch's class accepts it; host memory is pinned wherever the device needs it.
    """

    pin_memory: bool = True


class DeviceMeshLike(Protocol):
    """What is read of a ``DeviceMesh``."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Ranks along each dimension."""
        ...


@dataclass(frozen=True, slots=True)
class ShardingOptions:
    """What :func:`fully_shard` was called with for one module.

    Args:
        mesh_shape: ranks along each dimension of the mesh; None without one.
        reshard_after_forward: as for :func:`fully_shard`.
        precision: of the policy; None if it casts nothing.
        offloads_state: whether optimizer state is to be on the host.
        joins_previous: whether the module is gathered with the one before it in a list.
    """

    mesh_shape: tuple[int, ...] | None
    reshard_after_forward: bool | None
    precision: Precision | None
    offloads_state: bool
    joins_previous: bool


def fully_shard(
    module: ModuleOrList,
    *,
    mesh: DeviceMeshLike | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: object = MixedPrecisionPolicy(),
    offload_policy: object = OffloadPolicy(),
    **others: object,
) -> ModuleOrList:
    """Note that a module's weights are to be gathered together; nothing is sharded until ranks are built.

    Args:
        module: with a forward of its own; or a list of modules that run one after the other, to be gathered together.
        mesh: of one dimension, whose ranks shard; or of two, whose first one replicates (HSDP). None for all ranks.
        reshard_after_forward: whether weights are freed after the forward, and gathered again for the backward. None
            for True, and False for the outermost module. It has to be the same for all modules but the outermost.
        mp_policy: torch's ``MixedPrecisionPolicy``, or the one of this module; the same for all modules, but for the
            ``output_dtype``, which counts for the outermost one.
        offload_policy: torch's ``OffloadPolicy`` or ``CPUOffloadPolicy``, or those of this module.
        **others: torch's further arguments, of which each may be None only.

    Returns:
        The module, which has no methods of ``FSDPModule``.

    Raises:
        PlanError: an argument is not supported, or a module was given before or has no forward.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> for layer in (model[0], model[2], model):
        ...     _ = fully_shard(layer)
        >>> plan_arguments(model, num_ranks=2)["strategy"]
        'zero(2, level=3, split_points=0+2)'
    """
    _require_no_others(others)
    modules: Any = [module] if isinstance(module, nn.Module) else module
    shape = None if mesh is None else _mesh_shape(mesh)
    precision, offloads_state = _read_precision(mp_policy), _offloads_state(offload_policy)
    reshards = _read_reshard(reshard_after_forward)
    if not isinstance(modules, Sequence) or not modules:
        raise PlanError(f"fully_shard() got {shorten(repr(module))}; give a module, or a list of modules")
    for one in modules:
        _require_forward(one)
    for index, one in enumerate(modules):
        options = ShardingOptions(shape, reshards, precision, offloads_state, index > 0)
        setattr(one, NOTE, options)
    return module


def set_modules_to_forward_prefetch(module: nn.Module, modules: Sequence[nn.Module]) -> None:
    """Note which modules are to be gathered during the forward of this one: with k of them, the pass ``prefetch:k``.

    Args:
        module: that :func:`fully_shard` was called on.
        modules: the modules that follow it, the next one first. All modules list as many, but for those at the end.

    Raises:
        PlanError: :func:`fully_shard` was not called on one of them, or there are none.

    Example:
        >>> model = nn.Sequential(*(fully_shard(nn.Linear(4, 4)) for _ in range(4)))
        >>> for index in range(2):
        ...     set_modules_to_forward_prefetch(model[index], [model[index + 1], model[index + 2]])
        >>> plan_arguments(fully_shard(model), num_ranks=2)["passes"]
        ('overlap', 'prefetch:2')

    Source:
        ``FSDPModule.set_modules_to_forward_prefetch`` of torch 2.13.
    """
    _note_prefetch("forward", module, modules)


def set_modules_to_backward_prefetch(module: nn.Module, modules: Sequence[nn.Module]) -> None:
    """Note which modules are to be gathered during the backward of this one: those before it, the last one first.

    A plan has one depth for both directions.

    Args:
        module: as for :func:`set_modules_to_forward_prefetch`.
        modules: as there, in the order of the backward.

    Raises:
        PlanError: as there.
    """
    _note_prefetch("backward", module, modules)


def plan_arguments(model: nn.Module, *, num_ranks: int | None = None) -> dict[str, Any]:
    """Return the arguments of ``parallelize`` or ``Trainer`` for a model on which :func:`fully_shard` was called.

    Args:
        model: the outermost module that was given to it.
        num_ranks: of the run; None for those of the mesh, else those that a launcher has started.

    Returns:
        ``strategy`` and ``passes``, and ``precision`` if the policy casts. Each of them may be replaced.

    Raises:
        PlanError: parameters are in no module that was given; modules differ in what a plan has once; modules are to be
            prefetched that do not come next; or the number of ranks is unknown, or is not that of the mesh.

    Example:
        >>> model = fully_shard(nn.Linear(4, 4), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        >>> arguments = plan_arguments(model, num_ranks=2)
        >>> arguments["strategy"], arguments["precision"]
        ('zero(2, level=3, reshard_after_forward=off)', 'bf16(norms=compute, output=compute)')

        ``with cp.parallelize(model, optimizer, loss, **plan_arguments(model)) as step:`` trains with them.
    """
    notes = {path: note for path, part in model.named_modules() if (note := vars(part).get(NOTE)) is not None}
    if not notes:
        raise PlanError("fully_shard was called on no module of this model; call it on the model, and on its layers")
    _require_all_params(model, notes)
    inner = {path: note for path, note in notes.items() if path} or notes
    first = next(iter(notes.values()))  # of the outermost module, if it was given
    _require_equal("a mesh of shape", {path: note.mesh_shape for path, note in notes.items()})
    _require_equal("offload_policy to the host", {path: note.offloads_state for path, note in notes.items()})
    _require_equal("mp_policy", {path: _inner_precision(note.precision) for path, note in notes.items()})
    reshards = {path: _reshards(path, note) for path, note in inner.items()}
    _require_equal("reshard_after_forward", reshards)
    num_shards, num_replicas = _find_degrees(first.mesh_shape, num_ranks)
    zero = Zero(
        num_shards,
        level=3,
        reshard_after_forward="on" if next(iter(reshards.values())) else "off",
        split_points=tuple(path for path, note in notes.items() if path and not note.joins_previous),
    )
    strategy = f"{zero} * {Data(num_replicas)}" if num_replicas > 1 else str(zero)
    offload = ("offload:state=host",) if first.offloads_state else ()  # on CPUs a warning says that it changes nothing
    passes = ("overlap", _find_prefetch(model, notes), *offload)
    arguments: dict[str, Any] = {"strategy": strategy, "passes": passes}
    return arguments if first.precision is None else {**arguments, "precision": str(first.precision)}


def _note_prefetch(direction: Direction, module: nn.Module, modules: Any) -> None:  # noqa: ANN401 - whatever is given
    """Note the modules that one lists.

    Raises:
        PlanError: there are none, or ``fully_shard`` was not called on one of them.
    """
    name = f"set_modules_to_{direction}_prefetch()"
    if isinstance(modules, nn.Module) and not isinstance(modules, nn.ModuleList):
        raise PlanError(f"{name} got a {type(modules).__name__}; give a list of modules")
    if not modules:
        raise PlanError(f"{name} got no modules; list those to gather early, or do not call it")
    for one in (module, *modules):
        if NOTE not in vars(one):
            raise PlanError(f"{name} got a {type(one).__name__} on which fully_shard() was not called; call it before")
    setattr(module, PREFETCH_NOTE, {**vars(module).get(PREFETCH_NOTE, {}), direction: tuple(modules)})


def _find_prefetch(model: nn.Module, notes: Mapping[str, ShardingOptions]) -> str:
    """Return the pass that gathers as many modules early as were listed; one by default.

    Raises:
        PlanError: other modules were listed than those that come next, or not as many by each module.
    """
    units = [path for path, note in notes.items() if path and not note.joins_previous]
    listed = [*_listed_modules(model, "forward", ["", *units]), *_listed_modules(model, "backward", units[::-1])]
    place, depth, _ = max(listed, key=lambda one: one[1], default=("", 1, 0))
    for other, count, num_following in listed:
        if count != min(depth, num_following):
            raise PlanError(
                f"{depth} modules are to be prefetched in {place}, and {count} in {other}; a plan has one number for "
                "all modules and both directions, so list as many for each"
            )
    return "prefetch" if depth == 1 else f"prefetch:{depth}"


def _listed_modules(model: nn.Module, direction: Direction, order: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Yield where modules were listed, how many, and how many follow in this order.

    Raises:
        PlanError: they are not those that follow.
    """
    for index, path in enumerate(order):
        following = order[index + 1 :]
        listed = vars(model.get_submodule(path)).get(PREFETCH_NOTE, {}).get(direction, ())
        if any(
            one is not other for one, other in zip_longest(listed, map(model.get_submodule, following[: len(listed)]))
        ):
            names = f"list {following[0]} first" if following else "no module follows it, so do not call it"
            raise PlanError(
                f"set_modules_to_{direction}_prefetch() got other modules for {path or 'the model'} than those that "
                f"follow it, in the order in which the plan gathers them; {names}"
            )
        if listed:
            yield f"the {direction} of {path or 'the model'}", len(listed), len(following)


def _require_no_others(others: Mapping[str, object]) -> None:
    """Check torch's further arguments.

    Raises:
        PlanError: one is given, or is unknown.
    """
    remedies = {
        "shard_placement_fn": "omit it: shards are ranges of flat weights, and no result depends on where they are",
        "ignored_params": "freeze them (requires_grad_(False)), which keeps them whole on every rank, or omit it",
        "dp_mesh_dims": "omit it, and write the plan: tensor(n) * zero(m, level=3)",
    }
    for name, value in others.items():
        if name not in remedies:
            raise PlanError(f"fully_shard() has no argument {name!r}")
        if value is not None:
            raise PlanError(f"fully_shard({name}=...) is not supported; {remedies[name]}")


def _require_forward(module: object) -> None:
    """Check that a module can be a unit.

    Raises:
        PlanError: it was given before, has no forward, or is not a module.
    """
    if not isinstance(module, nn.Module):
        raise PlanError(f"fully_shard() got a {type(module).__name__}; give a module, or a list of modules")
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        raise PlanError(
            f"fully_shard() got a {type(module).__name__}, which has no forward; call it on each of its modules"
        )
    if NOTE in vars(module):
        raise PlanError(f"fully_shard() was called on this {type(module).__name__} before; call it once for a module")


def _read_reshard(value: object) -> bool | None:
    """Return whether weights are freed after the forward; None by default.

    Raises:
        PlanError: weights are to be gathered again among fewer ranks.
    """
    if value is None or isinstance(value, bool):
        return value
    raise PlanError(
        f"fully_shard(reshard_after_forward={shorten(repr(value))}) would gather weights for the backward among fewer "
        "ranks, which no plan does; give True or False, or a mesh of two dimensions, whose second one has as many ranks"
    )


def _mesh_shape(mesh: DeviceMeshLike) -> tuple[int, ...]:
    shape = tuple(mesh.shape)
    if len(shape) not in {1, 2}:
        raise PlanError(
            f"fully_shard() got a mesh of {len(shape)} dimensions; give one of one dimension, or of two, of which the "
            "first replicates; for other dimensions write the plan: tensor(n) * zero(m, level=3)"
        )
    return shape


def _read_precision(policy: Any) -> Precision | None:  # noqa: ANN401 - torch's class, or ours
    """Return the precision of a policy; None if it casts nothing.

    Raises:
        PlanError: it has a dtype that no precision has, or does not cast inputs.
    """
    if not hasattr(policy, "param_dtype"):
        raise PlanError(
            f"fully_shard(mp_policy=...) got a {type(policy).__name__}; give a MixedPrecisionPolicy of torch, or of "
            "counterpoint.compat.fsdp"
        )
    compute = _dtype_name("param_dtype", policy.param_dtype) or "fp32"
    reduce = _dtype_name("reduce_dtype", policy.reduce_dtype) or compute
    output = _dtype_name("output_dtype", policy.output_dtype) or compute
    if compute == reduce == output == "fp32":
        return None
    if output not in {"fp32", compute} or (compute == "fp32" and output != "fp32"):
        raise PlanError(
            f"a MixedPrecisionPolicy has output_dtype={policy.output_dtype}, but computes in {DTYPES[compute]}; give "
            f"output_dtype=torch.float32 or torch.{DTYPES[compute]}"
        )
    if compute != "fp32" and not policy.cast_forward_inputs:
        raise PlanError(
            "a MixedPrecisionPolicy has cast_forward_inputs=False, and a plan casts the inputs of each module with its "
            "parameters; omit it"
        )
    if compute == "fp32":
        return Precision(compute, reduce=reduce)
    return Precision(compute, norms="compute", output="fp32" if output == "fp32" else "compute", reduce=reduce)


def _dtype_name(option: str, dtype: torch.dtype | None) -> str:
    if dtype is None:
        return ""
    names = {f"torch.{full}": name for name, full in DTYPES.items()}
    if str(dtype) not in names:
        raise PlanError(f"a MixedPrecisionPolicy has {option}={dtype}; give one of {', '.join(names)}, or None")
    return names[str(dtype)]


def _offloads_state(policy: object) -> bool:
    """Return whether optimizer state is to be on the host.

    Raises:
        PlanError: the policy is of another class than those of torch.
    """
    name = type(policy).__name__
    if name not in {"OffloadPolicy", "CPUOffloadPolicy"}:
        raise PlanError(f"fully_shard(offload_policy=...) got a {name}; give OffloadPolicy() or CPUOffloadPolicy()")
    return name == "CPUOffloadPolicy"


def _require_all_params(model: nn.Module, paths: Mapping[str, ShardingOptions]) -> None:
    """Check that every trained parameter is in a module that was given.

    Raises:
        PlanError: some are not.
    """
    if "" in paths:
        return
    covered = {id(param) for path in paths for param in model.get_submodule(path).parameters()}
    left = [name for name, param in model.named_parameters() if param.requires_grad and id(param) not in covered]
    if left:
        more = f" and {len(left) - 1} other parameters are" if left[1:] else " is"
        raise PlanError(
            f"{left[0]}{more} in no module that fully_shard() was called on, so that FSDP would not reduce their "
            "gradients; call fully_shard(model) after its layers"
        )


def _require_equal(option: str, values: Mapping[str, object]) -> None:
    """Check that modules have the same value of an option.

    Raises:
        PlanError: two of them differ.
    """
    first, value = next(iter(values.items()))
    for path, other in values.items():
        if other != value:
            raise PlanError(
                f"fully_shard() got {option} {value} for {first or 'the model'}, and {other} for "
                f"{path or 'the model'}; a plan has one for all of its modules, so give the same to each of them"
            )


def _inner_precision(precision: Precision | None) -> Precision | None:
    """Return what modules inside have to share: the next one casts an output back, which loses nothing."""
    return None if precision is None else replace(precision, output="fp32")


def _reshards(path: str, note: ShardingOptions) -> bool:
    """Return whether a module's weights are freed after its forward; by default not those of the outermost one."""
    return bool(path) if note.reshard_after_forward is None else note.reshard_after_forward


def _find_degrees(shape: tuple[int, ...] | None, num_ranks: int | None) -> tuple[int, int]:
    """Return the numbers of shards and of replicas.

    Raises:
        PlanError: the number of ranks is not known, or is not that of the mesh.
    """
    if shape is not None:
        num_shards, num_replicas = shape[-1], shape[0] if len(shape) == 2 else 1
        if num_ranks is not None and num_ranks != num_shards * num_replicas:
            raise PlanError(
                f"the mesh of fully_shard() has {num_shards * num_replicas} ranks, but the run has {num_ranks}; give "
                "the same number to both"
            )
        return num_shards, num_replicas
    environment = detect() if num_ranks is None else None
    if num_ranks is None and environment is None:
        raise PlanError(
            "fully_shard() was called without a mesh, and no launcher has started ranks; give num_ranks= to "
            "plan_arguments(), or start the script with torchrun"
        )
    return (num_ranks if environment is None else environment.world_size) or 1, 1
