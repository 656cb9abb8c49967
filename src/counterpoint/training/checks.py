"""What is asked of a run, checked before its first step: whatever cannot be is said now, not when hours are spent."""

from __future__ import annotations

import warnings
from itertools import pairwise
from pathlib import Path

from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from counterpoint.data.fetch import MapDataset
from counterpoint.errors import CheckpointError, DataError, PlanError
from counterpoint.plan import Plan
from counterpoint.runtime.optimizers import Face, Factory
from counterpoint.strategies.terms import optimizers_in


def require_folder(path: Path | None) -> None:
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
            f"pass the dataset itself, not a loader: batches, order and sharding are the trainer's{instead_of(dataset)}"
        )


def instead_of(loader: object) -> str:
    """Return what to pass instead of a torch DataLoader; nothing to add for what is none."""
    if not isinstance(loader, DataLoader):
        return ""
    call = f"fit(loader.dataset, batch_size={loader.batch_size} x ranks, workers={loader.num_workers})"
    if hasattr(loader.sampler, "num_replicas"):
        call += f", without the {type(loader.sampler).__name__} and its set_epoch"
    return f": {call}"


def make_face(optimizer: optim.Optimizer | Factory, model: nn.Module, strategy: str | Plan = "") -> Face:
    """Return the user's optimizer as the ranks see it; warn where a plan names a system that is published with another.

    Raises:
        PlanError: it is none, or does not fit the model.
    """
    if not isinstance(optimizer, optim.Optimizer) and not callable(optimizer):
        raise PlanError(
            f"optimizer={optimizer!r} is neither an optimizer nor a way to make one; pass a torch optimizer on the "
            "model's parameters, or a factory such as partial(torch.optim.Adam, lr=1e-3)"
        )
    face = Face(optimizer, dict(model.named_parameters()))
    for system, wanted in optimizers_in(strategy).items() if isinstance(strategy, str) else ():
        if face.kind.__name__ != wanted:
            warnings.warn(
                f"{system} is published with {wanted} on its servers, and this run has {face.kind.__name__}; pass "
                f"optimizer=torch.optim.{wanted} to train as there, or write the strategies that it stands for, which "
                f"counterpoint strategies {system} shows, for any optimizer",
                RuntimeWarning,
                stacklevel=3,
            )
    return face


def require_own_memory(model: nn.Module, plan: Plan) -> None:
    """Check that no two parameters lie in the same memory where ranks move them; one with two names is one parameter.

    Raises:
        PlanError: two do.
    """
    if plan.num_ranks == 1:
        return
    places = sorted((*extent_of(param), name) for name, param in model.named_parameters() if param.numel())
    for (_, stop, name), (start, _, other) in pairwise(places):
        if stop > start:
            raise PlanError(
                f"{name} and {other} are two parameters in one piece of memory, but under {plan} ranks move each "
                "parameter to memory of its own, where they would come to differ; make them one parameter "
                "(second.weight = first.weight), which may have several names and is summed and updated once, or give "
                "one of them a copy (nn.Parameter(weight.detach().clone()))"
            )


def extent_of(tensor: Tensor) -> tuple[int, int]:
    """Return the first address of a tensor and the one behind its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def require_schedule(schedule: object) -> None:
    """Check that a schedule goes by the number of steps alone.

    Raises:
        PlanError: it waits for a metric.
    """
    if isinstance(schedule, optim.lr_scheduler.ReduceLROnPlateau):
        raise PlanError(
            "ReduceLROnPlateau steps by a metric, but a trainer steps its schedule after every step, without one; "
            "take a schedule that goes by the number of steps (CosineAnnealingLR, MultiStepLR), or step this one on "
            "trainer.optimizer in a callback's on_evaluation"
        )


def require_same_batch(schedule: object, batch_size: int, steps_per_epoch: int) -> None:
    """Check that a schedule that was made for a batch gets this batch; any other schedule is taken as it is.

    Raises:
        PlanError: it was made for another batch, or for epochs of another length.
    """
    made_for = getattr(schedule, "batch_size", batch_size), getattr(schedule, "steps_per_epoch", steps_per_epoch)
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
