"""Check the model, optimizer, dataset and scheduler of a run before its first step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn, optim
from torch.utils._pytree import tree_leaves

from counterpoint.compiler.compile import CompiledPlan
from counterpoint.errors import CheckpointError, DataError, PlanError
from counterpoint.file_reader import find_file_kind
from counterpoint.model.precision import Precision
from counterpoint.optim.low_bit_adam import LowBitAdam
from counterpoint.optim.validation import shorten
from counterpoint.partitioning.dry_run import TrainingModes
from counterpoint.partitioning.own_generators import find_reachable
from counterpoint.plan.parser import published_optimizers
from counterpoint.plan.plan import Plan
from counterpoint.runtime.batch_norm.sync import find_sync_modules, forward_microbatches
from counterpoint.runtime.chained_optimizer import chain_optimizers
from counterpoint.runtime.loss.loss_parameters import LOSS_PREFIX, find_trained_modules, trainable_loss_params
from counterpoint.runtime.microbatches import current_autocasts
from counterpoint.runtime.optimizer_spec import OptimizerSpec, TorchOptimizerFactory
from counterpoint.runtime.rank_builder import BatchNormRule
from counterpoint.terminal_text import warn
from counterpoint.training.model_tensors import find_shared_memory, named_tensors
from counterpoint.training.options import TrainingOptions


def require_directory_path(path: Path | None) -> None:
    """Check that a path for checkpoints is not below a file.

    Raises:
        CheckpointError: it is, or it cannot be a path.
    """
    for folder in () if path is None else (path, *path.parents):
        try:
            kind = find_file_kind(folder)
        except OSError as error:
            raise CheckpointError(
                f"{folder} cannot be a folder for checkpoints: {error.strerror}; choose another path"
            ) from None
        if kind == "file":
            raise CheckpointError(f"{folder} is a file, but checkpoints need a folder; choose another path")
        if kind == "folder":
            return


OptimizerArgument: TypeAlias = optim.Optimizer | Sequence[optim.Optimizer] | TorchOptimizerFactory
"""A torch optimizer, several that update parts of the model together, or a factory."""


def require_loss_function(loss: object) -> None:
    """Check that the loss can be called with outputs and targets.

    Raises:
        PlanError: it is a text, a class or something else.

    Example:
        >>> require_loss_function(torch.nn.CrossEntropyLoss)
        Traceback (most recent call last):
        counterpoint.errors.PlanError: loss=CrossEntropyLoss is a class; give an instance, loss=CrossEntropyLoss(), ...
    """
    rule = "a function of outputs and targets, such as torch.nn.functional.cross_entropy"
    if isinstance(loss, type):
        raise PlanError(f"loss={loss.__name__} is a class; give an instance, loss={loss.__name__}(), or {rule}")
    if not callable(loss):
        raise PlanError(f"loss={shorten(repr(loss))} cannot be called; give {rule}")


def wrap_optimizer(
    optimizer: OptimizerArgument, model: nn.Module, loss: object = None, strategy: object = ""
) -> OptimizerSpec:
    """Wrap the user's optimizer or factory; warn if the plan names a system that was published with another optimizer.

    Args:
        optimizer: the user's.
        model: the user's.
        loss: the user's, whose parameters are trained, too.
        strategy: the plan.

    Raises:
        PlanError: it is neither, or does not fit the model.
    """
    if isinstance(optimizer, list | tuple):
        optimizer = chain_optimizers(optimizer)
    if not isinstance(optimizer, optim.Optimizer) and not callable(optimizer):
        raise PlanError(
            f"optimizer={optimizer!r} is neither an optimizer nor a way to make one; pass a torch optimizer on the "
            "model's parameters, or a factory such as partial(torch.optim.Adam, lr=1e-3)"
        )
    given = optimizer if isinstance(optimizer, optim.Optimizer) else None
    trained = dict(find_trained_modules(model, loss, given).named_parameters())
    untrained = [name for name in trainable_loss_params(model, loss) if f"{LOSS_PREFIX}{name}" not in trained]
    if untrained:
        warn(
            f"the optimizer does not hold {', '.join(untrained[:5])} of the loss, so they are not trained; build it "
            "from [*model.parameters(), *loss.parameters()], or freeze them with requires_grad_(False)",
            stacklevel=3,
        )
    optimizer_spec = OptimizerSpec(optimizer, trained)
    require_eps_above_zero(optimizer_spec.optimizer)
    require_updatable(trained)
    require_no_grad_scaler(model, loss)
    for system, published in published_optimizers(strategy).items() if isinstance(strategy, str) else ():
        if optimizer_spec.optimizer_class.__name__ != published:
            warn(
                f"{system} is published with {published} on its servers, and this run has "
                f"{optimizer_spec.optimizer_class.__name__}; pass optimizer=torch.optim.{published} to train as there, "
                f"or write the strategies that it is composed of (counterpoint strategies {system}), for any optimizer",
                RuntimeWarning,
                stacklevel=3,
            )
    return optimizer_spec


def require_no_grad_scaler(*roots: object) -> None:
    """Check that neither a model nor its loss has a ``GradScaler`` of the user.

    Raises:
        PlanError: one has; its scale would be part of the loss, and of gradients, which nothing divides by it.
    """
    scalers = [one for root in roots for one in find_reachable(root, lambda one: isinstance(one, torch.amp.GradScaler))]
    if any(isinstance(one, torch.amp.GradScaler) and one.is_enabled() for one in scalers):
        raise PlanError(
            "the model or the loss has a GradScaler in an attribute, a closure or a global variable; if it scales the "
            "loss, nothing divides the gradients by its scale, because the step runs backward and the update itself; "
            "remove it, or create it with enabled=False, and pass loss_scale='dynamic' (part of precision='fp16')"
        )


def require_updatable(params: Mapping[str, nn.Parameter]) -> None:
    """Check that parameters that are trained have a dtype in which gradients can be summed.

    Raises:
        PlanError: one is in float8.
    """
    for name, param in params.items():
        if param.requires_grad and param.dtype.is_floating_point and param.dtype.itemsize == 1:
            raise PlanError(
                f"{name} is in {str(param.dtype).removeprefix('torch.')}, in which torch neither sums gradients nor "
                "updates weights; keep it in float32 or bf16 and convert its layer with torchao's "
                "convert_to_float8_training, which computes products in fp8, or freeze it with requires_grad_(False)"
            )


def require_eps_above_zero(optimizer: optim.Optimizer) -> None:
    """Check that the optimizer's eps is a number above 0 in the dtype of its parameters.

    Raises:
        PlanError: it rounds to 0, so that the update of an element with a small gradient divides by zero.
    """
    for group in optimizer.param_groups:
        eps = group.get("eps")
        is_number = isinstance(eps, float | int) and eps >= 0
        if not is_number or group.get("fused") or isinstance(optimizer, LowBitAdam):  # which compute in float32
            continue
        for dtype in {param.dtype for param in group["params"] if param.is_floating_point()}:
            if torch.tensor(eps, dtype=dtype) == 0 and (eps or dtype == torch.float16):  # 0 is a choice elsewhere
                name = str(dtype).removeprefix("torch.")
                wide = "keep the model in float32 and pass precision='fp16', or " if dtype == torch.float16 else ""
                raise PlanError(
                    f"eps={eps:g} of {type(optimizer).__name__} is 0 in {name}, the dtype of its parameters, so its "
                    f"update would divide by zero where a gradient is small; {wide}give "
                    f"eps={1e3 * torch.finfo(dtype).tiny * torch.finfo(dtype).eps:.0e} or more"
                )


def warn_of_evaluation_mode(model: nn.Module) -> None:
    """Warn if a model is in evaluation mode before its first step in a loop, and computes something else in training.

    A plain loop would train it in evaluation mode. Between steps it may stay there after an evaluation.
    """
    readers = [] if model.training else [path for path, module in model.named_modules() if _reads_mode(module)]
    if readers:
        first = f"module {readers[0]!r}" if readers[0] else type(model).__name__
        warn(
            f"{type(model).__name__} is in evaluation mode before its first step, but steps train in training mode, in "
            f"which {first} computes something else; call model.train() before, and then eval() on the modules that "
            "are to stay in evaluation mode",
            stacklevel=2,
        )


def _reads_mode(module: nn.Module) -> bool:
    """Tell whether the forward of a module reads its mode; not of one whose dropout is 0."""
    code = getattr(type(module).forward, "__code__", None)
    rate = getattr(module, "p", getattr(module, "dropout", None))
    return code is not None and "training" in code.co_names and not (isinstance(rate, float) and rate == 0.0)


def require_no_autocast(precision: Precision | None) -> None:
    """Check that no autocast of the caller is active where a run has a precision of its own.

    Raises:
        PlanError: one is.
    """
    if precision is None:
        return
    active = [f"{device}, {dtype}" for device, is_enabled, dtype in current_autocasts() if is_enabled]
    if active:
        raise PlanError(
            f"the step is called inside torch.autocast({active[0]}), but precision={precision} says what it computes "
            "in; leave the autocast, or drop precision="
        )


def require_no_shared_memory(model: nn.Module, plan: Plan, replaced: Collection[str] = ()) -> None:
    """Check that no parameter shares memory with another tensor of the model, if ranks move parameters.

    One parameter may have two names.

    Args:
        model: the user's model, with its loss.
        plan: of the ranks.
        replaced: attributes that a forward replaces before it reads them, as ``torch.nn.utils.spectral_norm`` does.

    Raises:
        PlanError: one does.
    """
    if plan.num_ranks == 1:
        return
    params = dict(model.named_parameters())
    known = {id(param) for param in params.values()}
    others = [(name, one) for name, one in named_tensors(model) if id(one) not in known and name not in replaced]
    named: list[tuple[str, Tensor, bool]] = [(name, tensor, True) for name, tensor in params.items()]
    named += [(name, tensor, False) for name, tensor in others]
    for (name, is_param), (other, is_other_param) in find_shared_memory(named):
        if is_param and is_other_param:
            raise PlanError(
                f"{name} and {other} are two parameters in one piece of memory, but under {plan} ranks move each "
                "parameter to memory of its own, where they would diverge; make them one parameter "
                "(second.weight = first.weight), which may have several names and is reduced and updated once, or give "
                "one of them a copy (nn.Parameter(weight.detach().clone()))"
            )
        if is_param != is_other_param:
            param, view = (name, other) if is_param else (other, name)
            raise PlanError(
                f"{view} is not a parameter, but has the memory of {param}, and under {plan} ranks move each parameter "
                f"to memory of its own, where {view} would keep the first values; use the parameter itself, or a copy "
                "if the first values are meant (weight.detach().clone())"
            )


def require_no_other_name(model: nn.Module, replaced: Collection[str]) -> None:
    """Check that no other tensor of the model has the memory of a buffer that its forward replaces.

    Ranks copy the new values into the memory that the buffer had, where the other tensor keeps the old ones in a loop.

    Args:
        model: the user's model.
        replaced: the full names of the buffers that a forward replaces by other tensors.

    Raises:
        PlanError: one has.
    """
    if not replaced:
        return
    named = [(name, tensor, name in replaced) for name, tensor in named_tensors(model)]
    for (one, is_replaced), (two, is_other_replaced) in find_shared_memory(named):
        if is_replaced != is_other_replaced:
            name, other = (one, two) if is_replaced else (two, one)
            raise PlanError(
                f"the forward of {type(model).__name__} replaces the buffer {name} by another tensor, and {other} has "
                f"the memory of the one that it was, into which ranks copy the new values, so that {other} would "
                f"change with it; give {other} a copy (self.{name.rpartition('.')[2]}.clone()), or change the buffer "
                "in place (copy_(...)) if both are meant to change"
            )


def require_values(inputs: object) -> None:
    """Check that the tensors of a batch have values.

    Raises:
        DataError: one is on torch's meta device.
    """
    if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves(inputs)):
        raise DataError(
            "a tensor of the first batch is on the meta device, where tensors have shapes, but no values; give tensors "
            "on the model's device, or on the CPU"
        )


def require_step_scheduler(lr_scheduler: object) -> None:
    """Check that a scheduler depends on the number of steps alone.

    Raises:
        PlanError: it depends on a metric.
    """
    if isinstance(lr_scheduler, optim.lr_scheduler.ReduceLROnPlateau):
        raise PlanError(
            "ReduceLROnPlateau steps by a metric, but a trainer steps its scheduler after every step, without one; "
            "use a scheduler of the number of steps (CosineAnnealingLR, MultiStepLR), or step this one on "
            "trainer.optimizer in a callback's on_evaluation"
        )


def require_scheduler_batch(lr_scheduler: object, batch_size: int, steps_per_epoch: int | None) -> None:
    """Check that a scheduler that was made for a batch size gets this one; other schedulers are not checked.

    Raises:
        PlanError: it was made for another batch size, or for epochs of another length.
    """
    expected = (
        getattr(lr_scheduler, "batch_size", batch_size),
        getattr(lr_scheduler, "steps_per_epoch", steps_per_epoch),
    )
    if expected[0] != batch_size:
        raise PlanError(
            f"the scheduler scales the learning rate for global batches of {expected[0]} samples, but they have "
            f"{batch_size}; batch_size is that of the global batch, over all ranks, independent of their number: "
            "give the scheduler and fit(...) the same one"
        )
    if steps_per_epoch is not None and expected[1] != steps_per_epoch:
        raise PlanError(
            f"the scheduler counts {expected[1]} steps per epoch, but with batches of {batch_size} samples this "
            f"dataset has {steps_per_epoch}; give it steps_per_epoch=math.ceil(len(dataset) / batch_size)"
        )


ALTERNATIVES = "or use a norm without batch statistics (GroupNorm, LayerNorm)"
BATCH_NORM_CHOICES: dict[BatchNormRule | None, str] = {
    None: (
        "its running statistics are those of the whole batch: pass batch_norm='deferred' if that is intended, "
        "'microbatch' to update them after every microbatch, 'sync' to normalize replicas together"
    ),
    "sync": (
        "batch_norm='sync' normalizes together what replicas run at the same time, not the microbatches that one runs "
        "after each other: give as many microbatches as there are replicas, 'deferred' if that is intended"
    ),
}
"""What to choose, by the rule that was given."""


def uses_sync_batch_norm(model: nn.Module, options: TrainingOptions) -> bool:
    """Tell whether batch norm modules of several ranks may normalize together."""
    return bool(find_sync_modules(model, all_modules=options.batch_norm == "sync"))


def training_batch_norms(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the batch norm modules that normalize by batch statistics in training, with their paths."""
    is_training = {id(module): flag for module, flag in TrainingModes(model).flags}
    batch_norm_class = nn.modules.batchnorm._BatchNorm  # noqa: SLF001 - their common base class
    return [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, batch_norm_class) and is_training[id(module)]
    ]


def min_microbatch_size(model: nn.Module) -> int:
    """Return the smallest automatic microbatch size: 2 with batch norm, which has no variance of a single value."""
    return 2 if training_batch_norms(model) else 1


def check_batch_norm(
    model: nn.Module, compiled: CompiledPlan, num_samples: int, rule: BatchNormRule | None, rank: int
) -> None:
    """Warn once if batch norm does not normalize the whole batch, unless a rule by which it does not was chosen.

    Args:
        model: the user's model.
        compiled: the plan for it.
        num_samples: of a microbatch.
        rule: the option ``batch_norm``.
        rank: the first of this process; only rank 0 warns.

    Raises:
        PlanError: the rule makes it an error.
    """
    batch_norms = training_batch_norms(model)
    if not batch_norms or rule in {"deferred", "microbatch"}:
        return
    num_microbatches = len(compiled.program.micros)
    microbatches_per_replica = max(
        (
            len(group)
            for rank_program in compiled.program.rank_programs
            for group in forward_microbatches(rank_program.body).values()
        ),
        default=0,
    )
    is_synchronized = rule == "sync" or all(isinstance(module, nn.SyncBatchNorm) for _, module in batch_norms)
    if num_microbatches <= 1 or (is_synchronized and microbatches_per_replica <= 1):
        return
    described = describe_batch_norm(*batch_norms[0], compiled, num_samples)
    if rule == "error":
        raise PlanError(
            f"{described}, which batch_norm='error' forbids; pass 'deferred' for running statistics of the whole "
            f"batch, 'sync' to normalize replicas together, {ALTERNATIVES}"
        )
    if rank == 0:
        warn(f"{described}; {BATCH_NORM_CHOICES[rule]}, {ALTERNATIVES}", stacklevel=2)


def describe_batch_norm(path: str, module: nn.Module, compiled: CompiledPlan, num_samples: int) -> str:
    """Describe which module normalizes which part of a batch."""
    num_microbatches = len(compiled.program.micros)
    samples = f"{num_samples} sample{'s' if num_samples != 1 else ''}"
    return (
        f"{type(module).__name__} '{path}' normalizes microbatches of {samples}, {num_microbatches} to a batch under "
        f"{compiled.plan}, so its outputs differ from those on the whole batch"
    )
