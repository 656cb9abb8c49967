"""How many samples a batch has, if its tensors agree, and whether all ranks have the same one.

Global batches of a dataset, read microbatch by microbatch, each at most once per process.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import threading
import warnings
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from counterpoint.data.fetch import Fields, MapDataset
from counterpoint.data.microbatch_reader import read_with_seeded_rng
from counterpoint.data.sampler import Indices, split_batch
from counterpoint.errors import DataError
from counterpoint.fabric.fabric import Fabric
from counterpoint.program.instruction import Commit, Forward
from counterpoint.program.program import Program
from counterpoint.runtime.microbatches import SlicedBatch, current_autocasts
from counterpoint.world.topology import format_count


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
        lengths, others = collect_lengths(inputs), collect_lengths(targets)
    if len(lengths | others) > 1:
        raise DataError(
            f"the inputs have {format_lengths(lengths)} samples, the targets {format_lengths(others)}; samples lie along dim 0 of "
            "every tensor, and each needs its input and its target: give tensors of one length"
        )
    count: int = min(lengths | others, default=1)
    if not count and not may_be_empty:
        raise DataError("the batch has 0 samples, which have no mean loss; leave empty batches out")
    return count


def batch_digest(*values: Any) -> str:  # noqa: ANN401 - any nests of tensors
    """Return a text that is the same for batches of the same tensors, and another for any others.

    Example:
        >>> import torch
        >>> (
        ...     batch_digest(torch.ones(2)) == batch_digest(torch.ones(2)),
        ...     batch_digest(torch.ones(2)) == batch_digest(torch.zeros(2)),
        ... )
        (True, False)
    """
    found = hashlib.sha256()
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            found.update(f"{leaf.dtype} {tuple(leaf.shape)};".encode())
            found.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def make_global_batch(batch: tuple[Any, Any], count: int, num_microbatches: int) -> SlicedBatch:
    """Return inputs and targets of so many samples as a step is fed them, cut into microbatches."""
    return SlicedBatch(batch, tuple(split_batch(count, num_microbatches)), current_autocasts())


def warn_forked_workers(known_pids: set[int]) -> bool:
    """Warn of processes that this one has forked although it has threads: a loader's workers, most likely.

    Args:
        known: the processes that were looked at before; new ones are added.

    Returns:
        Whether there was something to warn of.
    """
    children = [child for child in multiprocessing.active_children() if child.pid not in known_pids]
    if not children:
        return False
    known_pids.update(child.pid for child in children if child.pid is not None)
    usual = multiprocessing.get_start_method()
    forked = [child for child in children if (getattr(child, "_start_method", None) or usual) == "fork"]
    tasks = Path("/proc/self/task")  # threads of native code are seen only here
    num_threads = len(list(tasks.iterdir())) if tasks.is_dir() else threading.active_count()
    if not forked or num_threads == 1:
        return False
    pids = ", ".join(str(child.pid) for child in forked)
    warnings.warn(
        f"{format_count(len(forked), 'worker')} (pid {pids}) came of a fork of this "
        f"process, which has {num_threads} threads: a lock that a thread held then stays locked in the copy for ever, "
        "so that such a worker may hang at any time; give the DataLoader multiprocessing_context='forkserver', or let "
        "cp.Trainer.fit(dataset, num_workers=...) read the samples",
        RuntimeWarning,
        stacklevel=2,
    )
    return True


def collect_lengths(values: Any) -> set[int]:  # noqa: ANN401 - any nest of tensors
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


def format_lengths(lengths: set[int]) -> str:
    """Return the lengths as text."""
    return " and ".join(map(str, sorted(lengths))) or "no"


def require_same_batches(fabric: Fabric, count: int, digest: str) -> None:
    """Check that all ranks begin with the same batch; all ranks call it together.

    Args:
        fabric: the way to the others.
        count: samples of this rank's batch.
        content: what :func:`digest` says of it.

    Raises:
        DataError: they do not.
    """
    for rank, theirs in enumerate(fabric.gather_values("batch", [count, digest], tuple(range(fabric.num_ranks)))):
        assert isinstance(theirs, list), "what every rank sends"
        if theirs[0] != count:
            raise DataError(
                f"rank {fabric.rank} was given a batch of {count} samples, rank {rank} one of {theirs[0]}; every rank "
                "passes the same global batch and takes its own part of it: leave the sharding of batches away, or "
                "pass batches='per_rank' to parallelize"
            )
        if theirs[1] != digest:
            raise DataError(
                f"rank {fabric.rank} and rank {rank} were given different batches of {count} samples; every rank "
                "passes the same global batch and takes its own part of it: leave a DistributedSampler away, shuffle "
                "with the same seed on every rank, and draw no noise that differs; or pass batches='per_rank' to parallelize"
            )


class DatasetBatch:
    """One global batch of a dataset.

    Args:
        dataset: any map-style dataset whose samples are ``(inputs..., target)``.
        indices: the samples of the batch, in order.
        num_micros: into how many microbatches it is cut.
        seed: of what samples draw.
        epoch: likewise.
        reader: gives a microbatch's fields where something else than this process reads them.
    """

    def __init__(
        self,
        dataset: MapDataset,
        indices: Indices,
        num_microbatches: int,
        *,
        seed: int = 0,
        epoch: int = 0,
        reader: Callable[[int], Fields] | None = None,
    ) -> None:
        self.indices = indices
        self.sample_ranges = split_batch(len(indices), num_microbatches)
        self.sizes: Mapping[int, int] = {micro: stop - start for micro, (start, stop) in enumerate(self.sample_ranges)}
        self.fields_cache: dict[int, tuple[Tensor, ...]] = {}
        self.reader = reader
        self.read_in_process = partial(read_with_seeded_rng, dataset, seed=seed, epoch=epoch)

    def fields(self, micro: int) -> Sequence[Tensor]:
        """Return the fields of a microbatch's samples, stacked."""
        if micro not in self.fields_cache:
            if self.reader is not None:
                self.fields_cache[micro] = self.reader(micro)
            else:
                start, stop = self.sample_ranges[micro]
                self.fields_cache[micro] = self.read_in_process(self.indices[start:stop])
        return self.fields_cache[micro]

    def inputs(self, micro: int) -> Any:  # noqa: ANN401 - one tensor or a tuple of them
        """Return all fields but the last: one tensor, or a tuple of several."""
        fields = self.fields(micro)[:-1]
        return fields[0] if len(fields) == 1 else tuple(fields)

    def targets(self, micro: int) -> Tensor:
        """Return the last field."""
        return self.fields(micro)[-1]


def microbatches_to_read(
    program: Program, ranks: Collection[int], input_blocks: Container[int] = frozenset({0})
) -> list[int]:
    """Return the microbatches of a batch whose samples these ranks read: those of blocks that read inputs or targets.

    Args:
        program: what ranks do.
        ranks: who reads.
        fed_blocks: the blocks that read the model's inputs; the last one reads the targets.
    """
    stride = len(program.micros)
    last = max((word.block for _, word in program.instructions() if isinstance(word, Forward)), default=0)
    words = (word for rank in ranks for word in program.rank_programs[rank].body if isinstance(word, Forward))
    return sorted({word.micro % stride for word in words if word.block == last or word.block in input_blocks})


def committed_microbatches(program: Program, rank: int) -> list[int]:
    """Return the microbatches whose samples the ranks that commit with this one count, each as often as it is."""
    words = program.rank_programs[rank].body
    group = next((word.group for word in words if isinstance(word, Commit)), ())
    bodies = [word for member in group for word in program.rank_programs[member].body if isinstance(word, Forward)]
    last = max((word.block for _, word in program.instructions() if isinstance(word, Forward)), default=0)
    return [word.micro for word in bodies if word.block == last]
