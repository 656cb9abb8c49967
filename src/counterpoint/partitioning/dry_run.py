"""Run a model once to inspect it, without changing its state."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from itertools import chain
from typing import Any, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.weight_norm import WeightNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from counterpoint.device.select import accelerator_for
from counterpoint.errors import DataError, PlanError, first_line
from counterpoint.partitioning.hook_state import preserve_hook_stores
from counterpoint.partitioning.own_generators import find_generators, preserve_generators
from counterpoint.partitioning.stores import find_stores_in, is_store_changed, read_store, write_store

Inputs: TypeAlias = Any
"""The inputs of a model: one tensor, a tuple of positional or a mapping of keyword arguments."""


CallArgs: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
KeyT = TypeVar("KeyT")
"""Positional and keyword arguments."""


def split_call_args(inputs: Inputs) -> CallArgs:
    """Split inputs into positional and keyword arguments."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})


def check_call(model: nn.Module, inputs: Inputs) -> None:
    """Check that the model's forward takes the inputs.

    Raises:
        PlanError: an input is missing, or there is one too many.
    """
    args, kwargs = split_call_args(inputs)
    try:
        signature = inspect.signature(model.forward)
    except ValueError:  # a compiled script has no signature; the first run will fail if it must
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise PlanError(
            f"{type(model).__name__}.forward{signature} cannot be called with {len(args)} positional and "
            f"{len(kwargs)} named inputs ({error}); a model is partitioned for the inputs it is trained on; "
            "give all inputs of forward as a tuple, or as a dict by their names"
        ) from None


def num_samples(values: Inputs) -> int:
    """Return the length of the first dim of the first tensor that has one; 1 if there is none."""
    shapes = [leaf.shape for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.dim()]
    return max(1, shapes[0][0]) if shapes else 1


@contextmanager
def reject_torchscript(model: nn.Module) -> Iterator[None]:
    """Raise a clear error where TorchScript hides the submodules.

    Raises:
        PlanError: a ScriptModule does not let hooks or tracing inside.
    """
    try:
        yield
    except RuntimeError as error:
        scripts = [path for path, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
        if not scripts or "ScriptModule" not in str(error):
            raise
        location = f"module '{scripts[0]}'" if scripts[0] else type(model).__name__
        raise PlanError(
            f"{location} is a TorchScript module, which hides the calls inside it, but to split a model, or to give "
            "each layer its own random numbers, they must be seen; pass the module that it was made from"
        ) from error


def require_initialized(model: nn.Module) -> None:
    """Check that all parameters have values, which those of ``nn.LazyLinear`` get in its first forward.

    Raises:
        PlanError: one has none.
    """
    for name, param in model.named_parameters():
        if is_lazy(param):
            raise PlanError(
                f"{name} has no values before the first forward (a module such as nn.LazyLinear creates them), but "
                "ranks compare and split the model before it; run the model once on a batch before, after "
                "torch.manual_seed(0) on all ranks"
            )


def add_location(error: Exception, location: str) -> None:
    """Add a note with the location to an error of the model's forward, and with the module that raised it.

    Args:
        error: what the model raised.
        location: what was run on which samples.

    Raises:
        DataError: it is batch norm's error about a single value per channel.
    """
    raise_batch_norm_error(error, location)
    error.add_note(f"raised by the model's forward: {location}{_describe_module(error)}")


def _describe_module(error: Exception) -> str:
    """Return which module raised an error, with what its ``repr`` shows of it; empty if none did."""
    modules = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    raised = [module for module in modules if isinstance(module, nn.Module) and not isinstance(module, fx.GraphModule)]
    if not raised:
        return ""
    shown = ""
    with suppress(Exception):  # extra_repr may be the user's own
        shown = raised[-1].extra_repr()
    return f"; it was raised in {type(raised[-1]).__name__}({shown})"


def raise_batch_norm_error(error: Exception, location: str) -> None:
    """Raise a ``DataError`` if the error is batch norm's, which has no variance of a single value.

    Raises:
        DataError: it is.
    """
    if isinstance(error, ValueError) and str(error).startswith("Expected more than 1 value per channel"):
        raise DataError(
            f"batch norm got one value per channel and cannot train on it: {location}; give batches whose every "
            "microbatch has 2 samples or more, the last batch included (another batch_size, fewer microbatches, or "
            "drop the last samples), or use a norm without batch statistics, such as LayerNorm or GroupNorm"
        ) from error


@contextmanager
def explain_input_errors(model: nn.Module, inputs: Inputs) -> Iterator[None]:
    """Raise a clear error if the model's forward fails because of the form or the dtype of its inputs.

    Args:
        model: what runs inside.
        inputs: what it is called with.

    Raises:
        DataError: the inputs are a list, which is one argument, or have other dtypes than the parameters.
    """
    try:
        yield
    except (TypeError, RuntimeError) as error:
        if isinstance(inputs, list) and isinstance(error, TypeError):
            raise DataError(
                f"the forward of {type(model).__name__} failed: {_first_line(error)}; its inputs are a list of "
                f"{len(inputs)} values, which is one argument: give a tuple for several arguments, or what is in the "
                "list"
            ) from error
        raise_dtype_error(error, f"the forward of {type(model).__name__}", inputs, model.parameters())
        tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        described = ", ".join(f"{tuple(leaf.shape)} ({leaf.dtype})" for leaf in tensors)
        add_location(error, f"{type(model).__name__} on an example microbatch, with inputs of the shapes {described}")
        raise


def raise_dtype_error(error: Exception, location: str, inputs: Inputs, params: Iterable[Tensor]) -> None:
    """Raise a ``DataError`` if the error is torch's about inputs that have other dtypes than the parameters.

    Args:
        error: what a forward raised.
        location: what was run.
        inputs: what it was called with.
        params: the parameters that it reads.

    Raises:
        DataError: it is.
    """
    reason = _first_line(error)
    if not isinstance(error, RuntimeError) or "type" not in reason:
        return
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    own, given = {param.dtype for param in params}, {leaf.dtype for leaf in leaves}
    floating = {dtype for dtype in given if dtype.is_floating_point or dtype.is_complex}
    integers = given - floating  # most often indices, so they must be what torch names
    is_integer = any(re.search(rf"\b{INTEGER_NAMES.get(dtype, dtype)}", reason, re.IGNORECASE) for dtype in integers)
    if (own and not floating <= own) or is_integer:
        raise DataError(
            f"{location} failed: {reason}; its inputs are {_join(given)}, its parameters "
            f"{_join(own)}: convert the inputs or the model with .to(dtype), or enter torch.autocast around the step"
        ) from error


INTEGER_NAMES = {
    torch.bool: "bool",
    torch.uint8: "(byte|unsigned char)",
    torch.int8: "char",
    torch.int16: "short",
    torch.int32: "int",
    torch.int64: "long",
}
"""What torch calls other dtypes than floating-point ones in its errors."""


def _first_line(error: Exception) -> str:
    return first_line(error) or type(error).__name__


def _join(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(map(str, dtypes)))


def check_single_sample(model: nn.Module, inputs: Inputs, location: str) -> None:
    """Check that a model with batch norm runs on a single sample; other errors of the run are ignored here.

    Args:
        model: the model; its state is preserved.
        inputs: one sample.
        location: which samples these are, for the message.

    Raises:
        DataError: batch norm has only one value per channel.
    """
    if not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):  # noqa: SLF001
        return
    args, kwargs = split_call_args(inputs)
    with preserve_state(model):
        try:
            model(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the training run itself raises the others
            raise_batch_norm_error(error, location)


class TrainingModes:
    """The training flags as the user set them: a submodule that was put into evaluation mode stays there.

    Args:
        model: a model in evaluation mode as a whole is trained with all submodules in training mode.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.flags = [(module, module.training or not model.training) for module in model.modules()]

    def set(self, *, training: bool) -> None:
        """Restore the user's training flags, or put the whole model into evaluation mode."""
        if not training:
            self.model.eval()
            return
        for module, flag in self.flags:
            module.training = flag


class AllowSingleSampleNorm(TorchFunctionMode):
    """Let some ``SyncBatchNorm`` modules run on a single sample; ranks normalize it together in training.

    Args:
        norms: the modules.
    """

    def __init__(self, norms: Sequence[nn.SyncBatchNorm]) -> None:
        super().__init__()
        self.norms = norms

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        """Call the function; ``F.batch_norm`` of these modules skips its check of the batch size."""
        if func is F.batch_norm:
            arguments = dict(zip(("input", "running_mean", "running_var"), args, strict=False)) | dict(kwargs or {})
            mean, weight = arguments["running_mean"], arguments.get("weight")
            if any(norm.running_mean is mean and norm.weight is weight for norm in self.norms):
                names = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
                values: list[Any] = [arguments[name] for name in names]
                return torch.ops.aten.batch_norm.default(*values, torch.backends.cudnn.enabled)
        return func(*args, **(kwargs or {}))


@contextmanager
def training_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Put the model into training or evaluation mode inside, and restore every module's flag afterwards."""
    modes = TrainingModes(model)
    flags = [(module, module.training) for module in model.modules()]
    modes.set(training=training)
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag


@contextmanager
def preserve_device_rng(devices: Collection[torch.device]) -> Iterator[None]:
    """Restore the random state of the host and of these devices afterwards."""
    with ExitStack() as contexts:
        contexts.enter_context(torch.random.fork_rng(devices=[]))
        for device in devices:
            if device.type not in {"cpu", "meta"}:
                contexts.enter_context(accelerator_for(device).preserve_rng())
        yield


@contextmanager
def preserve_state(
    model: nn.Module, *, training: bool = True, attributes: ModuleAttributes | None = None
) -> Iterator[None]:
    """Restore the model's buffers, plain attributes, training flags, own generators and the random state afterwards.

    What forward hooks have written to is restored, too.

    Args:
        model: the model.
        training: the mode that it is in inside.
        attributes: restores the attributes instead, whenever the caller wants it.
    """
    slots, own_attributes = BufferSlots(model), ModuleAttributes(model) if attributes is None else None
    generators = find_generators(model)
    saved = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = {buffer.device for buffer, _ in saved} | {parameter.device for parameter in model.parameters()}
    norms = [module for module in model.modules() if isinstance(module, nn.SyncBatchNorm)]
    with (
        training_mode(model, training=training),
        preserve_device_rng(devices),
        preserve_generators(generators),
        preserve_hook_stores(model),
        torch.no_grad(),
    ):
        try:
            with AllowSingleSampleNorm(norms) if norms else nullcontext():
                yield
        except Exception as error:
            raise_batch_norm_error(error, f"{type(model).__name__}, run once on an example microbatch")
            raise
        finally:
            slots.restore()
            for buffer, value in saved:
                assign_values(buffer, value)
            if own_attributes is not None:
                own_attributes.restore()


@contextmanager
def replace_tensors(model: nn.Module, values: Mapping[int, Tensor]) -> Iterator[None]:
    """Run with other tensors in the place of parameters and buffers.

    ``torch.func.functional_call`` does not put all of them back if modules occur several times in a model.

    Args:
        model: that has them.
        values: by ``id`` of the parameter or buffer.
    """
    slots = [
        (tensors, name, tensor)
        for module in model.modules()
        for tensors in (module._parameters, module._buffers)  # noqa: SLF001 - setattr takes only parameters
        for name, tensor in tensors.items()
        if id(tensor) in values
    ]
    try:
        for tensors, name, tensor in slots:
            tensors[name] = values[id(tensor)]  # type: ignore[assignment]
        yield
    finally:
        for tensors, name, tensor in slots:
            tensors[name] = tensor  # type: ignore[assignment]


def assign_values(target: Tensor, values: Tensor) -> None:
    """Copy values into a tensor, also into one that ``expand`` has made, whose elements share memory.

    Example:
        >>> target = torch.zeros(1, 2).expand(3, 2)
        >>> assign_values(target, torch.ones(3, 2))
        >>> float(target.sum())
        6.0
    """
    for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if stride == 0 and size > 1:
            target, values = target.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    target.copy_(values)


class BufferSlots:
    """Where the buffers of a model are registered, to find those that a forward has replaced by other tensors.

    Args:
        model: the model, whose buffers are the ones to keep.
    """

    def __init__(self, model: nn.Module) -> None:
        self.slots = [
            (f"{path}.{name}".lstrip("."), module._buffers, name, buffer)  # noqa: SLF001 - where they can be replaced
            for path, module in model.named_modules()
            for name, buffer in module._buffers.items()  # noqa: SLF001 - as above
            if buffer is not None
        ]
        self.replaced: set[str] = set()  # that a forward is known to replace

    def find_replaced(self) -> None:
        """Remember which buffers the forward that has just run has replaced."""
        self.replaced.update(
            full_name for full_name, buffers, name, buffer in self.slots if buffers[name] is not buffer
        )

    def register_copies(self) -> None:
        """Register copies of the buffers that the forward replaces, whose old values autograd may save."""
        if self.replaced:
            for full_name, buffers, name, buffer in self.slots:
                if full_name in self.replaced:
                    buffers[name] = buffer.clone()

    def restore(self) -> None:
        """Register the buffers again that were replaced."""
        for _, buffers, name, buffer in self.slots:
            if buffers.get(name) is not buffer:
                buffers[name] = buffer

    def adopt(self) -> None:
        """Give buffers the values that they were replaced by, and register them again.

        Raises:
            DataError: the shape or the dtype is another one.
        """
        for full_name, buffers, name, buffer in self.slots:
            replacement = buffers.get(name)
            if replacement is buffer or name not in buffers:  # a removed buffer has no value to load
                continue
            if replacement is None or replacement.shape != buffer.shape or replacement.dtype != buffer.dtype:
                self.restore()
                given = "None" if replacement is None else f"{replacement.dtype} {tuple(replacement.shape)}"
                raise DataError(
                    f"the buffer {full_name}, {buffer.dtype} {tuple(buffer.shape)}, was replaced by {given}; ranks and "
                    "checkpoints hold buffers of one shape and dtype: register it in its final shape, or keep what "
                    "changes its shape in a plain attribute"
                )
            with torch.no_grad():
                assign_values(buffer, replacement)
            buffers[name] = buffer


def kept_value_hint(model: nn.Module, attribute: str) -> str:
    """Return a remedy for a value that torch's older ``weight_norm`` keeps in an attribute; empty for others.

    Args:
        model: the module.
        attribute: path of the attribute.
    """
    path, _, name = attribute.rpartition(".")
    hooks = model.get_submodule(path)._forward_pre_hooks.values()  # noqa: SLF001 - there is no other way to see them
    if not any(isinstance(hook, WeightNorm) and hook.name == name for hook in hooks):
        return ""
    return "replace torch.nn.utils.weight_norm by torch.nn.utils.parametrizations.weight_norm, which keeps none; else "


class ModuleAttributes:
    """The plain attributes of a model's modules at one moment, such as a counter that its forward increments.

    What collections, objects, tensors and arrays in them have is kept, too.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        seen: dict[int, int] = {}
        self.saved = [
            (path, vars(module), _own_attributes(module), _read_stores(_own_attributes(module), seen))
            for path, module in model.named_modules()
        ]

    def find_changed(self) -> list[str]:
        """Return the full names of the attributes that have other values, or that are new."""
        return [
            f"{path}.{name}".lstrip(".")
            for path, attributes, values, stores in self.saved
            for name, value in attributes.items()
            if name not in MODULE_ATTRIBUTES
            and (
                value is not values.get(name, self)
                or any(is_store_changed(store, copied) for store, copied in stores.get(name, ()))
            )
        ]

    def restore(self) -> None:
        """Give the attributes their values back."""
        for _, attributes, values, stores in self.saved:
            for name in attributes.keys() - values.keys() - MODULE_ATTRIBUTES:
                del attributes[name]
            attributes.update(values)
            for store, copied in chain.from_iterable(stores.values()):
                if is_store_changed(store, copied):
                    write_store(store, copied)


MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""What every module has, such as its parameters and hooks."""


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in MODULE_ATTRIBUTES}


def _read_stores(attributes: Mapping[KeyT, Any], seen: dict[int, int]) -> dict[KeyT, list[tuple[Any, Any]]]:
    """Return, by attribute, what can be written to in it, each with a copy of what it has.

    Args:
        attributes: to read.
        seen: what other attributes have, see :func:`counterpoint.partitioning.stores.find_stores_in`.
    """
    return {
        name: [(store, read_store(store)) for store in find_stores_in(value, with_shared=False, seen=seen)]
        for name, value in attributes.items()
    }


class KeptValues:
    """Finds the attributes in which a forward keeps differentiable values.

    Args:
        model: before the forward.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        attributes = _plain_attributes(model)
        self.before = {key: (value, _differentiable_leaves(value)) for key, value in attributes.items()}
        self.contents = _read_stores(attributes, {})
        self.found: dict[tuple[str, str], Any] = {}

    @property
    def names(self) -> list[str]:
        """The attributes that were found, by their full names."""
        return [f"{path}.{name}".lstrip(".") for path, name in self.found]

    def find(self) -> None:
        """Find them, after the forward."""
        for key, value in _plain_attributes(self.model).items():
            if not _differentiable_leaves(value) <= self.before.get(key, (None, set()))[1]:
                self.found[key] = value

    def restore(self) -> None:
        """Give the attributes that were found the values back that they had before."""
        for (path, name), value in self.found.items():
            module, first = self.model.get_submodule(path), self.before.get((path, name), (None, set()))[0]
            if (path, name) not in self.before:
                vars(module).pop(name, None)
            elif first is not value:
                setattr(module, name, first)
            for store, copied in self.contents.get((path, name), ()):
                if is_store_changed(store, copied):
                    write_store(store, copied)


def _plain_attributes(model: nn.Module) -> dict[tuple[str, str], Any]:
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if not name.startswith("_")
    }


def _differentiable_leaves(value: object) -> set[int]:
    """Return the ``id`` of each differentiable tensor in a value, and in the objects and collections that it holds."""
    stores = [read_store(one) for one in find_stores_in(value, with_shared=False) if not isinstance(one, Tensor)]
    return {id(leaf) for leaf in tree_leaves([value, stores]) if isinstance(leaf, Tensor) and leaf.requires_grad}
