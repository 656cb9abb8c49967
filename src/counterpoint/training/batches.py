"""How many samples a batch has, if its tensors agree, and whether all ranks have the same one."""

from __future__ import annotations

import hashlib
import multiprocessing
import threading
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from counterpoint.data.sampler import split
from counterpoint.errors import DataError
from counterpoint.fabric.fabric import Fabric
from counterpoint.runtime.casting import casts_here
from counterpoint.runtime.feed import BatchFeed
from counterpoint.world.topology import counted


def count_samples(inputs: Any, targets: Any, *, may_be_empty: bool = False) -> int:  # noqa: ANN401 - of any form
    """Return the length along dim 0 of all tensors of a batch; 1 where there is no tensor.

    Args:
        inputs: whatever the model takes.
        targets: whatever the loss takes.
        may_be_empty: whether there may be no sample.

    Raises:
        DataError: there is no sample, or not all tensors have as many.

    Example:
        >>> import torch
        >>> count_samples(torch.ones(3, 2), torch.ones(4))
        Traceback (most recent call last):
        counterpoint.errors.DataError: the inputs have 3 samples, the targets 4; samples lie along dim 0...
    """
    if isinstance(inputs, Tensor) and isinstance(targets, Tensor) and inputs.dim() and targets.dim():
        lengths, others = {len(inputs)}, {len(targets)}  # as most are, and fast
    else:
        lengths, others = lengths_of(inputs), lengths_of(targets)
    if len(lengths | others) > 1:
        raise DataError(
            f"the inputs have {listed(lengths)} samples, the targets {listed(others)}; samples lie along dim 0 of "
            "every tensor, and each needs its input and its target: give tensors of one length"
        )
    count: int = min(lengths | others, default=1)
    if not count and not may_be_empty:
        raise DataError("the batch has 0 samples, which have no mean loss; leave empty batches out")
    return count


def digest(*values: Any) -> str:  # noqa: ANN401 - any nests of tensors
    """Return a text that is the same for batches of the same tensors, and another for any others.

    Example:
        >>> import torch
        >>> digest(torch.ones(2)) == digest(torch.ones(2)), digest(torch.ones(2)) == digest(torch.zeros(2))
        (True, False)
    """
    found = hashlib.sha256()
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            found.update(f"{leaf.dtype} {tuple(leaf.shape)};".encode())
            found.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def whole_batch(batch: tuple[Any, Any], count: int, num_micros: int) -> BatchFeed:
    """Return inputs and targets of so many samples as a step is fed them, cut into microbatches."""
    return BatchFeed(batch, tuple(split(count, num_micros)), casts_here())


def warn_of_forks(known: set[int]) -> bool:
    """Warn of processes that this one has forked although it has threads: a loader's workers, most likely.

    Args:
        known: the processes that were looked at before; new ones are added.

    Returns:
        Whether there was something to warn of.
    """
    children = [child for child in multiprocessing.active_children() if child.pid not in known]
    if not children:
        return False
    known.update(child.pid for child in children if child.pid is not None)
    usual = multiprocessing.get_start_method()
    forked = [child for child in children if (getattr(child, "_start_method", None) or usual) == "fork"]
    tasks = Path("/proc/self/task")  # threads of native code are seen only here
    num_threads = len(list(tasks.iterdir())) if tasks.is_dir() else threading.active_count()
    if not forked or num_threads == 1:
        return False
    pids = ", ".join(str(child.pid) for child in forked)
    warnings.warn(
        f"{counted(len(forked), 'worker')} (pid {pids}) came of a fork of this "
        f"process, which has {num_threads} threads: a lock that a thread held then stays locked in the copy for ever, "
        "so that such a worker may hang at any time; give the DataLoader multiprocessing_context='forkserver', or let "
        "cp.Trainer.fit(dataset, workers=...) read the samples",
        RuntimeWarning,
        stacklevel=2,
    )
    return True


def lengths_of(values: Any) -> set[int]:  # noqa: ANN401 - any nest of tensors
    """Return the lengths along dim 0 of all tensors in a nest.

    Raises:
        DataError: something in it is an array of another library, or a tensor without dims.
    """
    leaves = tree_leaves(values)
    for leaf in leaves:
        if isinstance(leaf, Tensor) and not leaf.dim():
            raise DataError(
                "a tensor of the batch has no dims; samples lie along dim 0: give it one, with unsqueeze(0)"
            )
        if not isinstance(leaf, Tensor) and hasattr(leaf, "__array__"):
            raise DataError(
                f"the batch holds a {type(leaf).__module__}.{type(leaf).__name__}; models compute with tensors: "
                "convert it with torch.as_tensor"
            )
    return {len(leaf) for leaf in leaves if isinstance(leaf, Tensor)}


def listed(lengths: set[int]) -> str:
    """Return the lengths as text."""
    return " and ".join(map(str, sorted(lengths))) or "no"


def require_same_batches(fabric: Fabric, count: int, content: str) -> None:
    """Check that all ranks begin with the same batch; all ranks call it together.

    Args:
        fabric: the way to the others.
        count: samples of this rank's batch.
        content: what :func:`digest` says of it.

    Raises:
        DataError: they do not.
    """
    for rank, theirs in enumerate(fabric.gather_values("batch", [count, content], tuple(range(fabric.num_ranks)))):
        assert isinstance(theirs, list), "what every rank sends"
        if theirs[0] != count:
            raise DataError(
                f"rank {fabric.rank} was given a batch of {count} samples, rank {rank} one of {theirs[0]}; every rank "
                "passes the same global batch and takes its own part of it: leave the sharding of batches away, or "
                "pass batches='own' to parallelize"
            )
        if theirs[1] != content:
            raise DataError(
                f"rank {fabric.rank} and rank {rank} were given different batches of {count} samples; every rank "
                "passes the same global batch and takes its own part of it: leave a DistributedSampler away, shuffle "
                "with the same seed on every rank, and draw no noise that differs; or pass batches='own' to parallelize"
            )
