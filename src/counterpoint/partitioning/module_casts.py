"""Compute a model in a narrower dtype than that of its parameters, module by module.

While a module of the model runs, also when ``torch.utils.checkpoint`` runs a part of it again, reading a parameter
gives a cast of it, which autograd differentiates: gradients reach the parameters themselves, in their own dtype.
Outside of forwards everything is as before::

    x --cast--> Linear ----> LayerNorm ----> Linear --cast--> output
                  |              |              |
            weight.to(bf16)    float32    weight.to(bf16)       norms: inputs to float32, outputs back to bf16
                  |              |              |
                weight         weight         weight            float32, as are their gradients

A module with parameters of its own gets its floating-point inputs in the dtype it computes in, so that a float32 buffer
that has been added to an activation does not spread. Casts are operations of the forward: a trace has them, and each
stays with the module that reads the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from counterpoint.errors import DataError, PlanError
from counterpoint.model.precision import DTYPES, Precision
from counterpoint.partitioning.compiled_modules import describe_module, find_compiled, is_compiled_in_place
from counterpoint.partitioning.pytree import register_dataclasses
from counterpoint.partitioning.seed_hooks import is_plain_sequential

NORMS = (
    *(nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm),
    *(nn.modules.batchnorm._NormBase,),  # noqa: SLF001 - what all batch and instance norms are
)
"""Modules that stay in float32 by default."""


CastFn: TypeAlias = Callable[[Tensor], Tensor]
"""Casts a tensor, or leaves it."""


class RunningForward:
    """The forward of one model that runs now, if any: the depth of its nested calls, and the casts it has read."""

    def __init__(self) -> None:
        self.depth = 0
        self.is_uncast = False  # whether forwards compute in the dtype of the parameters
        self.casts: list[tuple[str, Tensor]] = []  # with the names of their parameters
        self.hooks: list[ModuleHooks] = []  # of its modules

    def enter(self) -> None:
        """Begin the call of a module."""
        self.depth += 1

    def leave(self) -> None:
        """End the call of a module; a graph is not checked, the same forward has run eagerly before.

        Raises:
            DataError: the forward has changed a cast in place, which would not reach the parameter.
        """
        self.depth -= 1
        if self.depth == 0:
            changed = next((name for name, cast in self.casts if cast._version), None)  # noqa: SLF001 - torch's only way
            self.casts.clear()
            if changed is not None:
                raise DataError(
                    f"the forward changes the parameter {changed} in place, but with precision= it reads a cast of "
                    "it, so that the change would be lost; make it a buffer, which is not cast, or give "
                    "cp.Precision(..., autocast=True)"
                )

    def abort(self) -> None:
        """Forget the calls that an error has ended without hooks."""
        self.depth = 0
        self.casts.clear()
        for hooks in self.hooks:
            hooks.num_calls = 0


class TableReads:
    """Whether a module looks up rows now, which are cast instead of its table.

    An object without items: torch follows its changes inside of ``torch.utils.checkpoint``, and not those of a dict.
    """

    def __init__(self) -> None:
        self.is_lookup = False


class CastParameters(dict[str, "nn.Parameter | None"]):
    """The parameters of one module, which are read in another dtype while the model runs.

    Only a lookup by name is cast, which is what an attribute of a module is; iteration gives the parameters themselves.
    ZeRO-3 may put casts here for a call, if no forward has read the parameters themselves.

    Args:
        params: by name, as in the module.
        path: of the module, for errors.
        dtype: that they are read in, unless they are no wider; with ``widens``, unless they are no narrower.
        forward: of the model.
        widens: whether the module computes in a wider dtype than the rest, as norms do.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter | None],
        path: str,
        dtype: torch.dtype,
        forward: RunningForward,
        *,
        widens: bool = False,
    ) -> None:
        super().__init__(params)
        self.path, self.dtype, self.forward, self.widens = path, dtype, forward, widens
        self.read_uncast: set[str] = set()  # what a forward has read without a cast
        self.reads = TableReads()
        self.own_dtypes = {name: None if param is None else param.dtype for name, param in params.items()}

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - a parameter, None, or a cast
        """Return a parameter, or its cast while the model runs."""
        param = super().__getitem__(name)
        if param is None or (self.forward.depth == 0 and not is_recomputing()):
            return param
        if self.reads.is_lookup:
            self.require_own_dtype(name, param)
            return param
        cast = widen(self.dtype, param) if self.widens else narrow(self.dtype, param)
        # no graph checks them, and torch lets none collect them inside of torch.utils.checkpoint
        if cast is not param and self.forward.depth and not torch.compiler.is_compiling():
            self.forward.casts.append((f"{self.path}.{name}" if self.path else name, cast))
        return cast

    def items(self) -> Any:  # noqa: ANN401 - as of a dict
        """Return names and parameters; note that a forward reads them without a cast."""
        for name, param in super().items() if self.forward.depth else ():
            self.note_read(name, param)
        return super().items()

    def values(self) -> Any:  # noqa: ANN401 - as of a dict
        """Return parameters; note that a forward reads them without a cast."""
        return dict(self.items()).values()

    def note_read(self, name: str, param: Tensor | None) -> None:
        """Note that a forward reads a parameter without a cast.

        Raises:
            DataError: it is a cast that was gathered, because no forward before has done so.
        """
        if param is not None:
            self.require_own_dtype(name, param)
            self.read_uncast.add(name)

    def require_own_dtype(self, name: str, param: Tensor) -> None:
        """Check that a parameter that is read without a cast has its own dtype.

        Raises:
            DataError: it has another one.
        """
        if param.dtype != self.own_dtypes.get(name, param.dtype):
            raise DataError(
                f"the forward reads {self.path}.{name} without a cast, as iterating over parameters() does, which it "
                f"did not on the first batch, so that ranks hold it, or have gathered it, in {param.dtype}; read it by "
                "its attribute, or give zero(..., level=2) and a precision without weights=compute"
            )

    def raw_items(self) -> list[tuple[str, nn.Parameter | None]]:
        """Return names and parameters, without noting it."""
        return list(super().items())

    def __reduce__(self) -> tuple[Any, ...]:
        """Let copies of the model have copies of this."""
        own = partial(type(self), widens=self.widens)
        return own, (dict(self.raw_items()), self.path, self.dtype, self.forward)


def is_recomputing() -> bool:
    """Return whether code runs a part of a forward again within a backward, as ``torch.utils.checkpoint`` does.

    What is recomputed may be a method that reads parameters of its own module, outside of any call of a module. Hooks
    that a backward calls run without recording gradients.
    """
    in_backward = torch._C._current_graph_task_id() != -1  # noqa: SLF001 - it has no public name
    return in_backward and torch.is_grad_enabled()


def narrow(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """Return a floating-point tensor in another dtype, unless it is no wider; others as they are."""
    return tensor.to(dtype) if is_narrower(dtype, tensor.dtype) else tensor


def widen(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """Return a floating-point tensor in another dtype, unless it is no narrower; others as they are."""
    is_narrower = tensor.is_floating_point() and tensor.dtype.itemsize < dtype.itemsize
    return tensor.to(dtype) if is_narrower else tensor


TABLES = (nn.Embedding, nn.EmbeddingBag)
"""Modules that read their table in its own dtype: the rows that they return are cast."""


class ModuleHooks:
    """Hooks of one module: note that it runs, and cast its inputs and outputs.

    Args:
        forward: of the model.
        inputs: the casts of its inputs, in this order.
        outputs: the casts of its outputs, likewise.
    """

    def __init__(
        self,
        forward: RunningForward,
        inputs: Sequence[CastFn] = (),
        outputs: Sequence[CastFn] = (),
    ) -> None:
        self.forward, self.inputs, self.outputs = forward, inputs, outputs
        self.num_calls = 0  # of the module that run now
        forward.hooks.append(self)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """Begin the module's forward; return its inputs."""
        if self.forward.is_uncast:
            return None
        self.forward.enter()
        self.num_calls += 1
        state = vars(module)
        if isinstance(module, nn.RNNBase):
            state["_flat_weights"] = [state["_parameters"][name] for name in state["_flat_weights_names"]]
        elif isinstance(module, TABLES):
            state["_parameters"].reads.is_lookup = True
        return apply_casts(self.inputs, (args, kwargs)) if self.inputs else None

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:  # noqa: ANN401
        """End the module's forward, also after an error; return its output."""
        if self.num_calls == 0:  # without casts, or another hook has raised an error before the forward began here
            return None
        self.num_calls -= 1
        restore_reads(module)
        self.forward.leave()
        return apply_casts(self.outputs, output) if self.outputs and output is not None else None


def restore_reads(module: nn.Module) -> None:
    """Let a module with casts read its parameters as outside of a forward."""
    state = vars(module)
    if isinstance(module, nn.RNNBase):
        params = dict(state["_parameters"].raw_items())
        state["_flat_weights"] = [params[name] for name in state["_flat_weights_names"]]
    elif isinstance(module, TABLES):
        state["_parameters"].reads.is_lookup = False


def abort_forward(model: nn.Module) -> None:
    """Forget the forward of a model that an error has ended while torch traced it: then no hook runs after an error."""
    for module in model.modules():
        table = vars(module)["_parameters"]
        if isinstance(table, CastParameters):
            restore_reads(module)
            table.forward.abort()


def apply_casts(casts: Sequence[CastFn], values: Any) -> Any:  # noqa: ANN401 - any nest
    """Return a nest with its tensors cast."""
    register_dataclasses(values)
    for cast in casts:
        values = tree_map_only(Tensor, cast, values)
    return values


class ModuleCasts:
    """Makes a model compute in a precision, until removed.

    Args:
        model: the user's model; its parameters and their names stay.
        precision: one that casts modules.

    Raises:
        PlanError: modules were compiled by their method ``compile``, which compiles their hooks.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        >>> casts = ModuleCasts(model, Precision("bf16", output="compute"))
        >>> model(torch.ones(1, 2)).dtype, model[0].weight.dtype
        (torch.bfloat16, torch.float32)
        >>> casts.remove()
        >>> model(torch.ones(1, 2)).dtype
        torch.float32
    """

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        require_no_compiled_calls(model, precision)
        self.model, self.precision = model, precision
        self.forward = RunningForward()
        self.handles: list[RemovableHandle] = []
        last = find_output_module(model)
        for path, module in model.named_modules():
            if not is_plain_sequential(module):
                self.install(path, module, is_last=module is last)

    def install(self, path: str, module: nn.Module, *, is_last: bool) -> None:
        """Cast the parameters, inputs and outputs of one module."""
        dtype, params = compute_dtype(self.precision), vars(module)["_parameters"]
        inputs: list[CastFn] = []
        outputs: list[CastFn] = []
        if stays_wide(module, self.precision):
            own = [param.dtype for param in params.values() if param is not None and param.is_floating_point()]
            # torch's batch norm takes inputs in the dtype of its statistics
            statistics = [one.dtype for one in module.buffers(recurse=False) if one.is_floating_point()]
            wide = max(statistics or [torch.float32, *own], key=lambda one: one.itemsize)
            inputs.append(partial(widen, wide))
            outputs.append(partial(narrow, dtype))
            if any(is_narrower(one, wide) for one in own):  # weights that are in bf16 themselves
                vars(module)["_parameters"] = CastParameters(params, path, wide, self.forward, widens=True)
        elif module is self.model or any(param is not None for param in params.values()):
            (outputs if isinstance(module, TABLES) else inputs).append(partial(narrow, dtype))
            vars(module)["_parameters"] = CastParameters(params, path, dtype, self.forward)
        if is_last and self.precision.output == "fp32":
            outputs.append(partial(widen, torch.float32))
        hooks = ModuleHooks(self.forward, inputs, outputs)
        self.handles += [
            module.register_forward_pre_hook(hooks.before, with_kwargs=True),
            module.register_forward_hook(hooks.after, always_call=True),
        ]

    def remove(self) -> None:
        """Let the model compute in the dtype of its parameters again. Idempotent."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        for module in self.model.modules():
            params = vars(module)["_parameters"]
            if isinstance(params, CastParameters) and params.forward is self.forward:
                vars(module)["_parameters"] = dict(params.raw_items())


@contextmanager
def cast_modules(model: nn.Module, precision: Precision | None) -> Iterator[None]:
    """Let a model compute in a precision inside, if it casts modules."""
    with ExitStack() as stack:
        if precision is not None and precision.casts_modules:
            stack.callback(ModuleCasts(model, precision).remove)
        yield


@contextmanager
def without_casts(model: nn.Module) -> Iterator[None]:
    """Let a model compute in the dtype of its parameters inside, whatever the precision and the caller's autocast."""
    tables = [vars(module)["_parameters"] for module in model.modules()]
    forwards = {id(one.forward): one.forward for one in tables if isinstance(one, CastParameters)}
    with ExitStack() as stack:
        for device_type in {"cpu", *(param.device.type for param in model.parameters())}:
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        for forward in forwards.values():
            stack.callback(setattr, forward, "is_uncast", forward.is_uncast)
            forward.is_uncast = True
        yield


def find_cast_reads(model: nn.Module, names: Mapping[int, str]) -> dict[str, torch.dtype]:
    """Return the parameters that forwards so far have read as casts only, with the dtype of these.

    Args:
        model: the user's, with its casts.
        names: of its parameters, by ``id``.
    """
    found = find_read_dtypes(model, names)
    return {name: dtype for name, dtypes in found.items() for dtype in dtypes if len(dtypes) == 1 and dtype is not None}


def find_casts(model: nn.Module) -> dict[str, torch.dtype]:
    """Return the parameters of which forwards read casts, whatever else they read, with the dtype of these."""
    found = find_read_dtypes(model, {id(param): name for name, param in model.named_parameters()})
    return {name: dtype for name, dtypes in found.items() for dtype in dtypes if dtype is not None}


def find_read_dtypes(model: nn.Module, names: Mapping[int, str]) -> dict[str, set[torch.dtype | None]]:
    """Return for each parameter the dtypes of its casts in the modules that have it; None among them for no cast.

    Args:
        model: as for :func:`find_cast_reads`.
        names: likewise.
    """
    found: dict[str, set[torch.dtype | None]] = {}
    for module in model.modules():
        table = vars(module)["_parameters"]
        items = table.raw_items() if isinstance(table, CastParameters) else table.items()
        for attribute, param in items:
            if id(param) in names and param is not None:
                is_cast = isinstance(table, CastParameters) and attribute not in table.read_uncast
                is_cast = is_cast and not isinstance(module, TABLES) and is_narrower(table.dtype, param.dtype)
                found.setdefault(names[id(param)], set()).add(table.dtype if is_cast else None)
    return found


def is_narrower(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Return whether a floating-point dtype has fewer bytes than another one."""
    return dtype.is_floating_point and other.is_floating_point and dtype.itemsize < other.itemsize


def require_no_compiled_calls(model: nn.Module, precision: Precision) -> None:
    """Check that no module was compiled by ``module.compile()``, which compiles its hooks, too.

    Raises:
        PlanError: one was.
    """
    compiled = next((path for path in find_compiled(model) if is_compiled_in_place(model.get_submodule(path))), None)
    if compiled is not None:
        raise PlanError(
            f"{describe_module(model, compiled)} is compiled by its method compile(), but precision={precision} casts "
            "parameters in hooks, which torch.compile cannot trace there; compile the whole model by "
            f"torch.compile(model), or give precision='{precision.compute}(autocast=true)'"
        )


def compute_dtype(precision: Precision) -> torch.dtype:
    """Return torch's dtype that a precision computes in."""
    return torch_dtype(precision.compute)


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype by the name that precisions have for it."""
    dtype: torch.dtype = getattr(torch, DTYPES[name])
    return dtype


def autocast_dtype(precision: Precision | None) -> torch.dtype | None:
    """Return torch's dtype of the autocast of a precision; None for one without."""
    return compute_dtype(precision) if precision is not None and precision.autocast else None


def stays_wide(module: nn.Module, precision: Precision) -> bool:
    """Return whether a module is a norm that computes in float32, or with running statistics in their dtype."""
    has_statistics = any(buffer is not None for buffer in vars(module)["_buffers"].values())
    return isinstance(module, NORMS) and (precision.norms == "fp32" or has_statistics)


def find_output_module(model: nn.Module) -> nn.Module:
    """Return the module whose output is that of the model: its last child if it only calls its children in order."""
    while is_plain_sequential(model) and len(list(model.children())):
        model = list(model.children())[-1]
    return model
