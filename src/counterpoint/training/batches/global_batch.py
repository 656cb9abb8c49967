"""Global batches: their size, their consistency over ranks, and the microbatches that ranks read."""

from __future__ import annotations

import hashlib
import multiprocessing
import threading
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from counterpoint.data.sampler import split_batch
from counterpoint.errors import DataError
from counterpoint.program.instruction import Commit, Forward
from counterpoint.program.program import Program
from counterpoint.runtime.microbatches import KeptBatch, MicrobatchSource, SlicedBatch, current_autocasts
from counterpoint.runtime.sample_layout import SamplePart
from counterpoint.tensor_bytes import as_bytes
from counterpoint.terminal_text import warn
from counterpoint.world.topology import format_count


@dataclass(frozen=True, slots=True)
class MicrobatchSelection:
    """What a process reads of every batch.

    Args:
        micros: the microbatches that its ranks need.
        num_microbatches: of a batch.
        timeout_s: the longest that a rank waits.
        are_kept: whether a batch is still needed when the next one is read.
    """

    micros: Sequence[int]
    num_microbatches: int
    timeout_s: float
    are_kept: bool = False


def count_samples(inputs: Any, targets: Any, *, may_be_empty: bool = False) -> int:  # noqa: ANN401 - of any form
    """Return the length along dim 0 of all tensors of a batch; 1 if there is no tensor.

    Args:
        inputs: whatever the model takes.
        targets: whatever the loss takes.
        may_be_empty: whether 0 samples are allowed.

    Raises:
        DataError: there is no sample, or tensors have different lengths.

    Example:
        >>> import torch
        >>> count_samples(torch.ones(3, 2), torch.ones(4))
        Traceback (most recent call last):
        counterpoint.errors.DataError: the inputs have 3 samples, the targets 4; samples lie along dim 0...
    """
    are_tensors = isinstance(inputs, Tensor) and isinstance(targets, Tensor) and inputs.dim() and targets.dim()
    if are_tensors and not (inputs.is_meta or targets.is_meta or inputs.is_nested or targets.is_nested):
        input_lengths, target_lengths = {len(inputs)}, {len(targets)}  # the common case, and fast
    else:
        input_lengths, target_lengths = collect_lengths(inputs), collect_lengths(targets)
    if len(input_lengths | target_lengths) > 1:
        require_no_packed_sequence((inputs, targets))
        raise DataError(
            f"the inputs have {format_lengths(input_lengths)} samples, the targets {format_lengths(target_lengths)}; "
            "samples lie along dim 0 of every tensor, and each needs its input and its target: give tensors of one "
            "length, or name what differs: batch_dims={NAME: DIM} if its samples lie along another dim, "
            "shared=(NAME,) if it belongs to all samples"
        )
    count: int = min(input_lengths | target_lengths, default=1)
    if not count and not may_be_empty:
        raise DataError("the batch has 0 samples, which have no mean loss; skip empty batches")
    return count


def require_no_packed_sequence(values: Any) -> None:  # noqa: ANN401 - any nest of tensors
    """Check that a batch has no packed sequence, whose tensors have steps of time along dim 0.

    Raises:
        DataError: it has one.
    """
    if any(is_packed_sequence(leaf) for leaf in tree_leaves(values, is_leaf=is_packed_sequence)):
        raise DataError(
            "the batch has a PackedSequence, whose samples do not lie along dim 0; give the padded tensor "
            "and the lengths, and call pack_padded_sequence in forward"
        )


def is_packed_sequence(value: object) -> bool:
    """Tell whether a value is a packed sequence, which pytree takes for a tuple of tensors."""
    return isinstance(value, PackedSequence)


def batch_digest(*values: Any) -> str:  # noqa: ANN401 - any nests of tensors
    """Return a digest of all tensors of a batch.

    Example:
        >>> import torch
        >>> (
        ...     batch_digest(torch.ones(2)) == batch_digest(torch.ones(2)),
        ...     batch_digest(torch.ones(2)) == batch_digest(torch.zeros(2)),
        ... )
        (True, False)
    """
    hasher = hashlib.sha256()
    parts = [leaf.value if isinstance(leaf, SamplePart) else leaf for leaf in tree_leaves(values)]
    for leaf in tree_leaves(parts):
        if isinstance(leaf, Tensor) and (leaf.is_nested or leaf.layout is not torch.strided):
            hasher.update(f"{leaf.dtype} {leaf.layout} {leaf.size(0)};".encode())
        elif isinstance(leaf, Tensor):
            hasher.update(f"{leaf.dtype} {tuple(leaf.shape)};".encode())
            hasher.update(as_bytes(leaf.cpu()).numpy().tobytes())
    return hasher.hexdigest()[:16]


def make_global_batch(batch: tuple[Any, Any] | KeptBatch, count: int, num_microbatches: int) -> SlicedBatch:
    """Split inputs and targets into microbatches."""
    values, origins = batch if isinstance(batch, KeptBatch) else (batch, None)
    return SlicedBatch(values, tuple(split_batch(count, num_microbatches)), current_autocasts(), origins)


def warn_forked_workers(known_pids: set[int]) -> bool:
    """Warn if this process has forked workers while it has threads, as a DataLoader does by default.

    Args:
        known_pids: processes that were checked before; new ones are added.

    Returns:
        Whether it warned.
    """
    children = [child for child in multiprocessing.active_children() if child.pid not in known_pids]
    if not children:
        return False
    known_pids.update(child.pid for child in children if child.pid is not None)
    default_method = multiprocessing.get_start_method()
    forked = [child for child in children if (getattr(child, "_start_method", None) or default_method) == "fork"]
    tasks = Path("/proc/self/task")  # native threads are only listed here
    num_threads = len(list(tasks.iterdir())) if tasks.is_dir() else threading.active_count()
    if not forked or num_threads == 1:
        return False
    pids = ", ".join(str(child.pid) for child in forked)
    warn(
        f"{format_count(len(forked), 'worker')} (pid {pids}) came from a fork of this "
        f"process, which has {num_threads} threads: a lock that a thread held then stays locked in the copy forever, "
        "so that such a worker may hang at any time; give the DataLoader multiprocessing_context='forkserver', or let "
        "cp.Trainer.fit(dataset, num_workers=...) read the samples",
        RuntimeWarning,
        stacklevel=2,
    )
    return True


def collect_lengths(values: Any) -> set[int]:  # noqa: ANN401 - any nest of tensors
    """Return the lengths along dim 0 of all tensors in a pytree.

    Raises:
        DataError: it contains an array of another library, or a tensor without dims or values.
    """
    leaves = tree_leaves(values)
    for leaf in leaves:
        if isinstance(leaf, Tensor) and not leaf.dim():
            raise DataError(
                "a tensor of the batch has no dims; samples lie along dim 0: give it one, with unsqueeze(0), or name "
                "it in shared=(NAME,) if it belongs to all samples"
            )
        if isinstance(leaf, Tensor) and leaf.is_meta:
            raise DataError(
                f"a tensor of the batch, of shape {tuple(leaf.shape)}, is on the meta device, which has no values; "
                "give it on the CPU, or on the device of the model"
            )
        if isinstance(leaf, Tensor) and leaf.is_nested and leaf.layout is torch.strided:
            raise DataError(
                f"the batch has a nested tensor of {leaf.size(0)} samples in torch's older layout, which has no shape; "
                "make it with layout=torch.jagged, give a list with a tensor for each sample, or pad it"
            )
        if not isinstance(leaf, Tensor) and hasattr(leaf, "__array__"):
            raise DataError(
                f"the batch holds a {type(leaf).__module__}.{type(leaf).__name__}; models compute with tensors: "
                "convert it with torch.as_tensor"
            )
    parts = [leaf.lengths() for leaf in leaves if isinstance(leaf, SamplePart)]
    return {leaf.size(0) for leaf in leaves if isinstance(leaf, Tensor)}.union(*parts)


def format_lengths(lengths: set[int]) -> str:
    """Return the lengths as text."""
    return " and ".join(map(str, sorted(lengths))) or "no"


def require_full_batch(
    rank: int, step: int, num_samples: int, batch: MicrobatchSource, committed: Collection[int]
) -> None:
    """Check that the ranks that commit together have trained on as many samples as this rank's batch has.

    Args:
        rank: this process's first rank.
        step: the number of the step.
        num_samples: that the ranks have counted; 0 if they have not.
        batch: of this rank.
        committed: what :func:`committed_microbatches` returns for it.

    Raises:
        DataError: some had another batch.
    """
    expected = sum(batch.sizes[microbatch] for microbatch in committed)
    if expected and num_samples not in {0, expected}:
        raise DataError(
            f"rank {rank} counts {expected} samples in step {step}, but the ranks together {num_samples}, so they were "
            "given different batches, and the step used a wrong batch; every rank passes the same global batch and "
            "takes its own part of it"
        )


def microbatches_to_read(
    program: Program, ranks: Collection[int], input_blocks: Container[int] = frozenset({0})
) -> list[int]:
    """Return the microbatches of a batch that these ranks read: those of blocks that need inputs or targets.

    Args:
        program: the program of all ranks.
        ranks: the ranks that read.
        input_blocks: the blocks that need the model's inputs; the last block needs the targets.
    """
    num_microbatches = len(program.micros)
    last_block = max(
        (instruction.block for _, instruction in program.instructions() if isinstance(instruction, Forward)), default=0
    )
    forwards = (
        instruction
        for rank in ranks
        for instruction in program.rank_programs[rank].body
        if isinstance(instruction, Forward)
    )
    return sorted(
        {
            instruction.micro % num_microbatches
            for instruction in forwards
            if instruction.block == last_block or instruction.block in input_blocks
        }
    )


def committed_microbatches(program: Program, rank: int) -> list[int]:
    """Return the microbatches whose samples are counted in the commit of this rank, each as often as it is counted."""
    instructions = program.rank_programs[rank].body
    group = next((instruction.group for instruction in instructions if isinstance(instruction, Commit)), ())
    forwards = [
        instruction
        for member in group
        for instruction in program.rank_programs[member].body
        if isinstance(instruction, Forward)
    ]
    last_block = max(
        (instruction.block for _, instruction in program.instructions() if isinstance(instruction, Forward)), default=0
    )
    return [instruction.micro for instruction in forwards if instruction.block == last_block]
