"""Explain an error of a model or a loss that computes on the whole batch, but not on a part of it.

A plain loop never sees such an error, so that the text of it (a shape that does not fit, a failed assertion) says
nothing about its cause. Which it is, is tried once after the error: the user's model and loss run on the part, where
they must fail, and on the whole batch, where they must not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import torch
from torch import nn

from counterpoint.device.select import accelerator_for, model_device
from counterpoint.errors import CounterpointError, DataError, first_line
from counterpoint.partitioning.dry_run import preserve_state, raise_batch_norm_error, replace_tensors, split_call_args
from counterpoint.partitioning.partitioned_model import as_call_args
from counterpoint.plan.plan import Plan
from counterpoint.runtime.loss.loss_parameters import find_loss_module
from counterpoint.runtime.loss.loss_reduction import LossFunction
from counterpoint.runtime.microbatches import copy_tensors
from counterpoint.training.model_checks.model_loss_check import Samples


class Failure(NamedTuple):
    """What failed on some samples.

    Args:
        what: the model or the loss.
        error: that it raised.
    """

    what: str
    error: Exception


ReadSamples: TypeAlias = Callable[[], tuple[Samples, Samples, str]]
"""Returns the part of the batch that was computed last, the whole batch, and a name for the part."""


@contextmanager
def explain_division(
    model: nn.Module,
    loss: LossFunction | None,
    plan: Plan,
    read: ReadSamples,
) -> Iterator[None]:
    """Raise a clear error if what runs inside fails only because a batch is divided; leave other errors as they are.

    Args:
        model: the user's.
        loss: the user's; None if only the model runs inside.
        plan: that divides the batch.
        read: returns both.

    Raises:
        DataError: the model or the loss computes on the whole batch, but not on the part.
    """
    try:
        yield
    except torch.OutOfMemoryError:  # a whole batch needs even more
        raise
    except Exception as error:
        cause = (
            error.__cause__ if isinstance(error, DataError) else error
        )  # of batch norm's, which has an error already
        if not isinstance(cause, Exception) or isinstance(cause, CounterpointError):
            raise
        samples = read_samples(read)
        if samples is None:
            raise
        part, whole, name = samples
        counts = f"{part.num_samples} of the {whole.num_samples} samples of the batch"
        raise_batch_norm_error(cause, f"{type(model).__name__} under {plan}, where {name} has {counts}")
        if cause is not error:
            raise
        failure = find_failure(model, loss, part)
        if failure is None or find_failure(model, loss, whole) is not None:
            raise
        what = type(model).__name__ if failure.what == "model" else "the loss"
        reason = first_line(error).strip()
        raise DataError(
            f"{what} computes on the batch of {whole.num_samples} samples, but not on {name}, which has "
            f"{part.num_samples} of them: {type(error).__name__}{f': {reason}' if reason else ''}; {plan} divides a "
            f"batch into {plan.global_num_microbatches} microbatches, and a model and a loss must compute on any "
            "number of samples: write shapes and indices with x.shape[0] in place of the batch size, name with "
            "shared=(NAME,) an input that belongs to all samples, and with batch_dims={NAME: DIM} one whose samples "
            f"lie along another dim; or {suggest_undivided(plan)}"
        ) from error


def read_samples(read: ReadSamples) -> tuple[Samples, Samples, str] | None:
    """Return the part, the whole batch and the name of the part; None if the part is the batch, or cannot be read."""
    try:
        part, whole, name = read()
    except Exception:  # noqa: BLE001 - the error of the step is the one to raise
        return None
    return (part, whole, name) if part.num_samples < whole.num_samples else None


def suggest_undivided(plan: Plan) -> str:
    """Return how to compute a batch at once."""
    if plan.global_num_microbatches == plan.num_microbatches:
        return "give num_microbatches=1"
    return "train without replicas (solo, pipeline or tensor), with num_microbatches=1"


def find_failure(model: nn.Module, loss: LossFunction | None, batch: Samples) -> Failure | None:
    """Run a model in training, and a loss on its output, without gradients; return what failed, None if all ran.

    Nothing runs if it would communicate, or would read weights that this process does not have.

    Args:
        model: the user's; its state is preserved.
        loss: the user's; None for the model alone.
        batch: some samples.
    """
    freed = [param for param in model.parameters() if is_freed(param)]
    module = find_loss_module(loss)
    kinds = (nn.SyncBatchNorm, nn.RNNBase, torch.jit.ScriptModule) if freed else (nn.SyncBatchNorm,)
    if any(isinstance(inner, kinds) for inner in model.modules()) or any(
        is_freed(param) for param in (() if module is None or module is model else module.parameters())
    ):
        return None
    values = {id(param): torch.zeros((), dtype=param.dtype).expand(param.shape) for param in freed}
    to_device = accelerator_for(model_device(model)).to_device
    inputs, targets = (copy_tensors(to_device(own)) for own in batch[:2])
    args, kwargs = split_call_args(as_call_args(inputs))
    what = "model"
    try:
        with preserve_state(model), replace_tensors(model, values):
            output = model(*args, **kwargs)
            if loss is not None:
                what = "loss"
                loss(output, targets)
    except Exception as error:  # noqa: BLE001 - whatever the user's code raises
        return Failure(what, error)
    return None


def is_freed(param: nn.Parameter) -> bool:
    """Tell whether the memory of a parameter is given back, as of one whose shards are not gathered."""
    return bool(param.numel()) and param.device.type != "meta" and not param.untyped_storage().nbytes()
