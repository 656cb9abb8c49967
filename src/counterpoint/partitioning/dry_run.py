"""Running a model once to look at it, without leaving a mark on it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from counterpoint.errors import DataError, PlanError

Inputs: TypeAlias = Any
"""What a model is called with: one tensor, a tuple of positional or a mapping of keyword arguments."""


def split_call_args(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments of a call."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})


def check_call(model: nn.Module, inputs: Inputs) -> None:
    """Refuse inputs that the model's forward does not take.

    Raises:
        PlanError: an input is missing, or there is one too many.
    """
    args, kwargs = split_call_args(inputs)
    try:
        signature = inspect.signature(model.forward)
    except ValueError:  # as that of a compiled script; the first run will tell
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise PlanError(
            f"{type(model).__name__}.forward{signature} cannot be called with {len(args)} positional and "
            f"{len(kwargs)} named inputs ({error}); a model is cut for the inputs it is trained on; "
            "give all inputs of forward as a tuple, or as a dict by their names"
        ) from None


def num_samples(values: Inputs) -> int:
    """Return the length of the first dim of the first tensor that has one; 1 where there is none."""
    shapes = [leaf.shape for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.dim()]
    return max(1, shapes[0][0]) if shapes else 1


@contextmanager
def reject_torchscript(model: nn.Module) -> Iterator[None]:
    """Refuse compiled scripts where the model's inside must be looked into.

    Raises:
        PlanError: torch would not let us.
    """
    try:
        yield
    except RuntimeError as error:
        scripts = [path for path, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
        if not scripts or "ScriptModule" not in str(error):
            raise
        where = f"module '{scripts[0]}'" if scripts[0] else type(model).__name__
        raise PlanError(
            f"{where} is a TorchScript module, which hides the calls inside it, but to cut a model, or to give each "
            "layer its own random numbers, they must be seen; pass the module that it was made from"
        ) from error


def add_location(error: Exception, where: str) -> None:
    """Note on an error of the model's forward where it came up.

    Args:
        error: what the model raised.
        where: what was run on which samples.

    Raises:
        DataError: it is batch norm's, which has no variance of a single value.
    """
    raise_batch_norm_error(error, where)
    error.add_note(f"raised by the model's forward: {where}")


def raise_batch_norm_error(error: Exception, where: str) -> None:
    """Check that an error is not batch norm's, which has no variance of a single value.

    Raises:
        DataError: it is.
    """
    if isinstance(error, ValueError) and str(error).startswith("Expected more than 1 value per channel"):
        raise DataError(
            f"batch norm got one value per channel and cannot train on it: {where}; give batches whose every "
            "microbatch has 2 samples or more, the last batch included (another batch_size, fewer microbatches, or "
            "leave the last samples out), or take a norm that needs no batch, as LayerNorm or GroupNorm"
        ) from error


def check_single_sample(model: nn.Module, inputs: Inputs, where: str) -> None:
    """Check that a model with batch norm runs on a single sample; other errors of such a run come up in time.

    Args:
        model: the model; it stays as it is.
        inputs: one sample.
        where: which samples these will be.

    Raises:
        DataError: batch norm has only one value per channel.
    """
    if not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):  # noqa: SLF001
        return
    args, kwargs = split_call_args(inputs)
    with preserve_state(model):
        try:
            model(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - only one of them is asked for here
            raise_batch_norm_error(error, where)


class TrainingModes:
    """The training mode as its user left it: a module that was put into evaluation mode inside stays there.

    Args:
        model: a model in evaluation mode as a whole is taken to be wholly in training mode while it is trained.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.flags = [(module, module.training or not model.training) for module in model.modules()]

    def set(self, *, training: bool) -> None:
        """Put the model into the user's training mode, or into evaluation mode."""
        if not training:
            self.model.eval()
            return
        for module, flag in self.flags:
            module.training = flag


class AllowSingleSampleNorm(TorchFunctionMode):
    """While this is active, some norms take a lone sample, which they will not normalize alone when it counts.

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
        """Call the function, or what is behind its check of the number of samples."""
        if func is F.batch_norm:
            named = dict(zip(("input", "running_mean", "running_var"), args, strict=False)) | dict(kwargs or {})
            mean, weight = named["running_mean"], named.get("weight")
            if any(norm.running_mean is mean and norm.weight is weight for norm in self.norms):
                order = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
                given: list[Any] = [named[name] for name in order]
                return torch.ops.aten.batch_norm.default(*given, torch.backends.cudnn.enabled)
        return func(*args, **(kwargs or {}))


@contextmanager
def training_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Have the model in training or evaluation mode inside, and every module as it was afterwards."""
    modes = TrainingModes(model)
    before = [(module, module.training) for module in model.modules()]
    modes.set(training=training)
    try:
        yield
    finally:
        for module, flag in before:
            module.training = flag


@contextmanager
def preserve_state(model: nn.Module, *, training: bool = True) -> Iterator[None]:
    """Have the model's buffers, its modes and the random state afterwards as they were before."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = {buffer.device for buffer, _ in kept} | {parameter.device for parameter in model.parameters()}
    others = [device for device in devices if device.type == "cuda"]
    norms = [module for module in model.modules() if isinstance(module, nn.SyncBatchNorm)]
    with training_mode(model, training=training), torch.random.fork_rng(others), torch.no_grad():
        try:
            with AllowSingleSampleNorm(norms) if norms else nullcontext():
                yield
        except Exception as error:
            raise_batch_norm_error(error, f"{type(model).__name__}, run once on an example microbatch")
            raise
        finally:
            for buffer, value in kept:
                buffer.copy_(value)
