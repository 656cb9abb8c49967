"""The model that ``initialize`` returns: forward, backward and step are calls of their own, as in DeepSpeed.

The update happens in the ``step()`` of every ``gradient_accumulation_steps``-th microbatch, its boundary::

    forward  backward  step    forward  backward  step
    (loss / 2).backward()      (loss / 2).backward()    | reduce | finite? | clip | update | schedule
"""

from __future__ import annotations

import math
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from counterpoint.compat.deepspeed.checkpoint import load_checkpoint, save_checkpoint
from counterpoint.compat.deepspeed.config import BatchSizes
from counterpoint.compat.deepspeed.grad_update import GradientUpdate
from counterpoint.errors import DataError
from counterpoint.launchers.environment import detect
from counterpoint.model.precision import Precision
from counterpoint.partitioning.module_casts import autocast_dtype, cast_modules
from counterpoint.runtime.loss.loss_scale import LossScaler

if TYPE_CHECKING:
    from counterpoint.fabric.fabric import Fabric

CLIP_EPS = 1e-6
"""Added to the norm before the division, as ``torch.nn.utils.clip_grad_norm_`` does."""


@dataclass(frozen=True, slots=True)
class StepOptions:
    """What a step does besides the update.

    Args:
        batch_sizes: of the configuration.
        clip_norm: the largest norm of the gradient; None for no clipping.
        precision: of forwards; None for the dtype of the parameters.
        skips_nonfinite: whether a gradient that is not finite skips the step, instead of an error.
    """

    batch_sizes: BatchSizes
    clip_norm: float | None = None
    precision: Precision | None = None
    skips_nonfinite: bool = False


class DeepSpeedModel(nn.Module):
    """A model with the methods of DeepSpeed's engine; ``initialize`` returns it.

    Args:
        module: the user's model.
        update: of its parameters.
        lr_scheduler: stepped after each update that is not skipped; None if the script has one of its own.
        options: of steps.
        scaler: of the loss.

    Attributes:
        module: the user's model.
        optimizer: from stage 1 on, its groups have this rank's shards.
        lr_scheduler: as above.
        global_steps: updates, skipped ones among them.
        skipped_steps: updates that were skipped, because gradients were not finite.
        micro_steps: calls of :meth:`step`.
    """

    def __init__(
        self,
        module: nn.Module,
        update: GradientUpdate,
        lr_scheduler: LRScheduler | None,
        options: StepOptions,
        scaler: LossScaler,
    ) -> None:
        super().__init__()
        self.module = module
        self.update, self.lr_scheduler, self.options, self.scaler = update, lr_scheduler, options, scaler
        self.global_steps = self.skipped_steps = self.micro_steps = 0
        self.grad_norm: float | None = None
        self.has_backward = False  # since the last call of step()
        self.casts = ExitStack()
        self.casts.enter_context(cast_modules(module, options.precision))

    @property
    def fabric(self) -> Fabric:
        """This rank's connection to the others."""
        return self.update.fabric

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, whose options may be changed between steps."""
        return self.update.optimizer

    @property
    def global_rank(self) -> int:
        """The number of this rank."""
        return self.fabric.rank

    @property
    def local_rank(self) -> int:
        """The number of this rank on its host."""
        environment = detect()
        return 0 if environment is None else environment.local_rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.fabric.num_ranks

    @property
    def global_samples(self) -> int:
        """The samples of all updates over all ranks, skipped updates among them."""
        return self.global_steps * self.train_batch_size()

    @property
    def cur_scale(self) -> float:
        """The present scale of the loss."""
        return self.scaler.scale

    @property
    def device(self) -> torch.device:
        """The device of the model's parameters."""
        return next((param.device for param in self.module.parameters()), torch.device("cpu"))

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the model takes and returns
        """Call the model, in the configured precision."""
        dtype = autocast_dtype(self.options.precision)
        with nullcontext() if dtype is None else torch.autocast(self.device.type, dtype):
            return self.module(*args, **kwargs)

    def backward(self, loss: Any, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:  # noqa: ANN401, FBT001, FBT002 - checked; DeepSpeed's
        """Compute the gradients of a microbatch's mean loss, and add them to those of the step.

        Args:
            loss: of this rank's microbatch, without dims.
            retain_graph: as for ``torch.Tensor.backward``.
            scale_wrt_gas: whether the loss is divided by the microbatches of a step.

        Returns:
            The loss, divided by the microbatches of a step.

        Raises:
            DataError: the loss is not a tensor without dims, or has no gradient; or the script has changed gradients.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            what = f"is a {type(loss).__name__}"
            if isinstance(loss, Tensor):
                what = f"has the shape {tuple(loss.shape)} and requires_grad={loss.requires_grad}"
            raise DataError(
                f"backward() was called with a loss that {what}; it takes the mean loss of the microbatch, one number "
                "that depends on the parameters"
            )
        self.update.require_own_grads()
        divided: Tensor = loss / self.gradient_accumulation_steps() if scale_wrt_gas else loss
        root = divided.float() if divided.dtype in {torch.float16, torch.bfloat16} else divided
        torch.autograd.backward(root * (self.scaler.scale / self.fabric.num_ranks), retain_graph=retain_graph)
        self.update.end_backward()
        self.has_backward = True
        return divided

    def step(self) -> None:
        """End a microbatch; at the boundary, update the weights and step the schedule.

        Raises:
            DataError: no ``backward`` was called before, the gradients are not finite and such steps are not skipped,
                or gradients, options or the set of parameters are not those of this update; the weights are unchanged.
        """
        if not self.has_backward:
            raise DataError(
                f"step() was called after {self.micro_steps} microbatches without a backward() since the last one; "
                "call backward(loss) and step() once for each microbatch"
            )
        is_boundary = self.is_gradient_accumulation_boundary()
        if is_boundary:
            self.update.require_same_params()
            self.update.require_own_grads()
        self.has_backward = False
        self.micro_steps += 1
        if is_boundary:
            self.take_step()

    def take_step(self) -> None:
        """Reduce the gradients and update, unless they are not finite.

        Raises:
            DataError: they are not finite, and such steps are not skipped.
        """
        norm = math.sqrt(self.update.reduce()) * self.scaler.inverse
        is_finite = math.isfinite(norm)
        self.grad_norm = norm
        may_skip = self.options.skips_nonfinite or self.scaler.may_shrink
        if is_finite:
            clip_norm = self.options.clip_norm
            factor = 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + CLIP_EPS))
            self.update.apply(factor * self.scaler.inverse)
            self.update.weight_changes.remember()
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        else:
            self.skipped_steps += may_skip
        self.zero_grad()
        scale = self.scaler.scale
        self.scaler.update(is_finite=is_finite)
        if not is_finite and not may_skip:
            raise DataError(
                f"step {self.global_steps} cannot be applied: the norm of its gradient is {norm} at loss scale "
                f"{scale:g}; the parameters are unchanged; check the samples of this step, lower the learning rate or "
                "set gradient_clipping"
            )
        self.global_steps += 1

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's
        """Drop all gradients since the last update."""
        self.update.clear()
        self.module.zero_grad(set_to_none=set_to_none)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the next call of :meth:`step` updates the weights."""
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def gradient_accumulation_steps(self) -> int:
        """Return the microbatches of one step on one rank."""
        return self.options.batch_sizes.gradient_accumulation_steps

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples of one microbatch on one rank."""
        return self.options.batch_sizes.train_micro_batch_size_per_gpu

    def train_batch_size(self) -> int:
        """Return the samples of one step over all ranks."""
        return self.options.batch_sizes.train_batch_size

    def zero_optimization_stage(self) -> int:
        """Return the stage of ZeRO."""
        return self.update.rule.stage

    def module_state_dict(self) -> dict[str, Any]:
        """Return the state dict of the model."""
        return self.module.state_dict()

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last step's gradient over all ranks, before clipping; None before the first step."""
        return self.grad_norm

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def save_checkpoint(
        self, save_dir: str | PathLike[str], tag: str | None = None, client_state: dict[str, Any] | None = None
    ) -> bool:
        """Write a checkpoint that any number of ranks, at any of the stages here, continues from; a collective call.

        Args:
            save_dir: the folder of all checkpoints.
            tag: the name of this one; ``global_step`` with the number of updates by default.
            client_state: what else to keep: numbers, text, lists, dicts and tensors, of rank 0.

        Returns:
            True.

        Raises:
            CheckpointError: the folder cannot be written, or ranks give other tags.
            DataError: the client state has something else.
        """
        return save_checkpoint(self, Path(save_dir), tag, client_state or {})

    def load_checkpoint(self, load_dir: str | PathLike[str], tag: str | None = None) -> tuple[str | None, Any]:
        """Continue from a checkpoint of :meth:`save_checkpoint`; a collective call.

        Args:
            load_dir: the folder of all checkpoints.
            tag: the name of one; that of the latest by default.

        Returns:
            The folder of the checkpoint and the client state; ``(None, None)`` without a latest one.

        Raises:
            CheckpointError: it cannot be read, or is of another model or optimizer.
        """
        return load_checkpoint(self, Path(load_dir), tag)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the model has it
        """Return an attribute of the model, as DeepSpeed's engine does.

        Raises:
            AttributeError: neither has it; the message has the replacement of a method that is missing here.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in MISSING_METHODS:
                raise AttributeError(f"DeepSpeedModel has no {name}; {MISSING_METHODS[name]}") from None
            if name == "module":
                raise
            return getattr(self.module, name)


MISSING_METHODS = {
    "allreduce_gradients": "the step() of the last microbatch reduces",
    "compile": "call torch.compile(model) before initialize",
    "destroy": "nothing is to be released: leave it out",
    "eval_batch": "pipelines are plans: cp.parallelize(..., strategy='pipeline(n)')",
    "generate": "call module.generate(...) of the model",
    "no_sync": "gradients are reduced at the boundary: set gradient_accumulation_steps",
    "save_16bit_model": "write torch.save(model.state_dict()) on one rank: every rank has all weights",
    "save_fp16_model": "write torch.save(model.state_dict()) on one rank: every rank has all weights",
    "set_gradient_accumulation_boundary": "set gradient_accumulation_steps",
    "set_lr": "set group['lr'] for group in optimizer.param_groups",
    "set_train_micro_batch_size": "call initialize again with other batch sizes",
    "set_train_batch_size": "call initialize again with other batch sizes",
    "train_batch": "pipelines are plans: cp.parallelize(..., strategy='pipeline(n)')",
}
"""Methods of DeepSpeed's engine that do not exist here, and what to do instead."""
