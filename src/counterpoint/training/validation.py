"""What is asked of a run, checked before its first step: whatever cannot be is said now, not when hours are spent.

What is said of batch norm where a plan makes several microbatches of a batch.
"""

from __future__ import annotations

import warnings
from itertools import pairwise
from pathlib import Path

from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from counterpoint.compiler.compile import CompiledPlan
from counterpoint.data.fetch import MapDataset
from counterpoint.errors import CheckpointError, DataError, PlanError
from counterpoint.partitioning.dry_run import TrainingModes
from counterpoint.plan.parser import published_optimizers
from counterpoint.plan.plan import Plan
from counterpoint.runtime.batch_norm.sync import find_sync_modules, forward_microbatches
from counterpoint.runtime.optimizer_spec import OptimizerSpec, TorchOptimizerFactory
from counterpoint.runtime.rank_builder import BatchNormRule
from counterpoint.training.options import TrainingOptions


def require_directory_path(path: Path | None) -> None:
    """Check that nothing stands where a folder of checkpoints will be.

    Raises:
        CheckpointError: something does.
    """
    for folder in () if path is None else (path, *path.parents):
        if folder.exists():
            if not folder.is_dir():
                raise CheckpointError(f"{folder} is a file, but checkpoints need a folder; choose another path")
            return


def require_map_style(dataset: MapDataset) -> None:
    """Check that samples can be asked for by their index.

    Raises:
        DataError: they cannot.
    """
    if not (hasattr(dataset, "__len__") and (hasattr(dataset, "__getitem__") or hasattr(dataset, "fetch"))):
        raise DataError(
            f"a {type(dataset).__name__} is no map-style dataset: it has no length, or no sample for an index; "
            f"pass the dataset itself, not a loader: batches, order and sharding are the trainer's{dataloader_hint(dataset)}"
        )


def dataloader_hint(loader: object) -> str:
    """Return what to pass instead of a torch DataLoader; nothing to add for what is none."""
    if not isinstance(loader, DataLoader):
        return ""
    call = f"fit(loader.dataset, batch_size={loader.batch_size} x ranks, num_workers={loader.num_workers})"
    if hasattr(loader.sampler, "num_replicas"):
        call += f", without the {type(loader.sampler).__name__} and its set_epoch"
    return f": {call}"


def wrap_optimizer(
    optimizer: optim.Optimizer | TorchOptimizerFactory, model: nn.Module, strategy: str | Plan = ""
) -> OptimizerSpec:
    """Return the user's optimizer as the ranks see it; warn where a plan names a system that is published with another.

    Raises:
        PlanError: it is none, or does not fit the model.
    """
    if not isinstance(optimizer, optim.Optimizer) and not callable(optimizer):
        raise PlanError(
            f"optimizer={optimizer!r} is neither an optimizer nor a way to make one; pass a torch optimizer on the "
            "model's parameters, or a factory such as partial(torch.optim.Adam, lr=1e-3)"
        )
    face = OptimizerSpec(optimizer, dict(model.named_parameters()))
    for system, wanted in published_optimizers(strategy).items() if isinstance(strategy, str) else ():
        if face.optimizer_class.__name__ != wanted:
            warnings.warn(
                f"{system} is published with {wanted} on its servers, and this run has {face.optimizer_class.__name__}; pass "
                f"optimizer=torch.optim.{wanted} to train as there, or write the strategies that it stands for, which "
                f"counterpoint strategies {system} shows, for any optimizer",
                RuntimeWarning,
                stacklevel=3,
            )
    return face


def require_no_shared_memory(model: nn.Module, plan: Plan) -> None:
    """Check that no two parameters lie in the same memory where ranks move them; one with two names is one parameter.

    Raises:
        PlanError: two do.
    """
    if plan.num_ranks == 1:
        return
    places = sorted((*memory_extent(param), name) for name, param in model.named_parameters() if param.numel())
    for (_, stop, name), (start, _, other) in pairwise(places):
        if stop > start:
            raise PlanError(
                f"{name} and {other} are two parameters in one piece of memory, but under {plan} ranks move each "
                "parameter to memory of its own, where they would come to differ; make them one parameter "
                "(second.weight = first.weight), which may have several names and is summed and updated once, or give "
                "one of them a copy (nn.Parameter(weight.detach().clone()))"
            )


def memory_extent(tensor: Tensor) -> tuple[int, int]:
    """Return the first address of a tensor and the one behind its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def require_step_scheduler(lr_scheduler: object) -> None:
    """Check that a schedule goes by the number of steps alone.

    Raises:
        PlanError: it waits for a metric.
    """
    if isinstance(lr_scheduler, optim.lr_scheduler.ReduceLROnPlateau):
        raise PlanError(
            "ReduceLROnPlateau steps by a metric, but a trainer steps its schedule after every step, without one; "
            "take a schedule that goes by the number of steps (CosineAnnealingLR, MultiStepLR), or step this one on "
            "trainer.optimizer in a callback's on_evaluation"
        )


def require_scheduler_batch(lr_scheduler: object, batch_size: int, steps_per_epoch: int) -> None:
    """Check that a schedule that was made for a batch gets this batch; any other schedule is taken as it is.

    Raises:
        PlanError: it was made for another batch, or for epochs of another length.
    """
    made_for = (
        getattr(lr_scheduler, "batch_size", batch_size),
        getattr(lr_scheduler, "steps_per_epoch", steps_per_epoch),
    )
    if made_for[0] != batch_size:
        raise PlanError(
            f"the schedule scales the learning rate for global batches of {made_for[0]} samples, but they have "
            f"{batch_size}; batch_size is of the global batch, over all ranks, and stays the same when their number "
            "changes: give the schedule and fit(...) the same one"
        )
    if made_for[1] != steps_per_epoch:
        raise PlanError(
            f"the schedule counts {made_for[1]} steps per epoch, but {batch_size} samples at once make "
            f"{steps_per_epoch} of this dataset; give it steps_per_epoch=math.ceil(len(dataset) / batch_size)"
        )


ALTERNATIVES = "or take a norm that needs no batch (GroupNorm, LayerNorm)"


def uses_sync_batch_norm(model: nn.Module, options: TrainingOptions) -> bool:
    """Tell whether modules of batch norm of several ranks may normalize together."""
    return bool(find_sync_modules(model, all_modules=options.batch_norm == "sync"))


def training_batch_norms(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules of batch norm that go by the values that they are given, with their paths."""
    is_training = {id(module): flag for module, flag in TrainingModes(model).flags}
    kind = nn.modules.batchnorm._BatchNorm  # noqa: SLF001 - what all of them are
    return [(path, one) for path, one in model.named_modules() if isinstance(one, kind) and is_training[id(one)]]


def min_microbatch_size(model: nn.Module) -> int:
    """Return how many samples a microbatch has at least where nobody says how many there are.

    Batch norm has no variance of one value, which is all that a channel may have of one sample.
    """
    return 2 if training_batch_norms(model) else 1


def check_batch_norm(
    model: nn.Module, compiled: CompiledPlan, num_samples: int, rule: BatchNormRule | None, rank: int
) -> None:
    """Say once where batch norm does not go by the whole batch, unless it was said what it shall do.

    Args:
        model: as its user built it.
        compiled: the plan for it.
        num_samples: of a microbatch.
        rule: what was asked for.
        rank: the first of this process; only rank 0 gives notice.

    Raises:
        PlanError: it was said that this is an error.
    """
    found = training_batch_norms(model)
    if not found or rule not in {None, "error"}:
        return
    micros = len(compiled.program.micros)
    runs = max(
        (len(run) for row in compiled.program.rank_programs for run in forward_microbatches(row.body).values()),
        default=0,
    )
    path, module = found[0]
    if rule == "error" and micros > 1 and (runs > 1 or not all(isinstance(one, nn.SyncBatchNorm) for _, one in found)):
        raise PlanError(
            f"{describe_batch_norm(path, module, compiled, num_samples)}, which batch_norm='error' refuses; pass 'deferred' for "
            f"running statistics of the whole batch, 'sync' to normalize replicas together, {ALTERNATIVES}"
        )
    if rule is None and runs > 1 and rank == 0:
        warnings.warn(
            f"{describe_batch_norm(path, module, compiled, num_samples)}; its running statistics are: pass batch_norm='deferred' "
            "where that is meant, 'microbatch' to change them after every microbatch, 'sync' to normalize replicas "
            f"together, {ALTERNATIVES}",
            stacklevel=2,
        )


def describe_batch_norm(path: str, module: nn.Module, compiled: CompiledPlan, num_samples: int) -> str:
    """Return which module goes by how much of a batch."""
    micros = len(compiled.program.micros)
    samples = f"{num_samples} sample{'s' if num_samples != 1 else ''}"
    return (
        f"{type(module).__name__} '{path}' normalizes microbatches of {samples}, {micros} to a batch under "
        f"{compiled.plan}, so that its outputs are not those on the whole batch"
    )
