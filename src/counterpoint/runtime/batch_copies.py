"""The microbatches of a rank that are copied to its device before it reads them, on a stream of their own.

All copies of a batch are started at once, in the order in which the rank reads them: when its step begins, while the
device still computes the one before, or earlier, if the batch is known earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from torch.utils._pytree import tree_leaves

from counterpoint.device.copy_stream import CopyStream, StartedCopies
from counterpoint.device.event_clock import DeviceSpan
from counterpoint.partitioning.partitioned_model import FlatInputs, as_call_args
from counterpoint.runtime.microbatches import AsyncPipelineBatches, MicrobatchSource

BatchPart: TypeAlias = Literal["inputs", "targets"]


class MicrobatchRead(NamedTuple):
    """What a rank reads of each batch: the inputs or the targets of the microbatch with this index."""

    part: BatchPart
    micro: int

    def __str__(self) -> str:
        return f"copy({self.part}.{self.micro})"


@dataclass(frozen=True, slots=True)
class CopiedBatch:
    """A batch whose copies were started.

    Args:
        batch: it, in host memory.
        copies: of what the rank reads.
    """

    batch: MicrobatchSource
    copies: Mapping[MicrobatchRead, StartedCopies]


class BatchCopies:
    """The copies of one rank's batches.

    Args:
        stream: on which they are made.
        reads: what the rank reads of each batch, in this order.
        flatten_inputs: from a microbatch's inputs, as the arguments of a call, to their values.
        inputs: the positions of those that the rank needs; None for all.
    """

    def __init__(
        self,
        stream: CopyStream,
        reads: Iterable[MicrobatchRead],
        flatten_inputs: Callable[[Any], FlatInputs],
        inputs: Collection[int] | None = None,
    ) -> None:
        self.stream = stream
        self.reads = tuple(dict.fromkeys(reads))
        self._flatten_inputs = flatten_inputs
        self._inputs = inputs
        self._batches: dict[int, CopiedBatch] = {}  # by the step that finishes them
        self._timed: list[tuple[MicrobatchRead, DeviceSpan]] | None = None

    def start_step(self, number: int, batch: MicrobatchSource) -> None:
        """Start the copies of all that a step may read, unless they were started.

        Args:
            number: of the step.
            batch: what it reads: its own batch, or those in flight.
        """
        for step, own in find_batches(number, batch).items():
            self.start(step, own)

    def start(self, step: int, batch: MicrobatchSource) -> None:
        """Start the copies of the batch that a step finishes, unless they were started."""
        if step in self._batches and self._batches[step].batch is batch:
            return
        copies = {read: self._start_read(read, batch) for read in self.reads if batch.sizes.get(read.micro)}
        self._batches[step] = CopiedBatch(batch, copies)

    def _start_read(self, read: MicrobatchRead, batch: MicrobatchSource) -> StartedCopies:
        is_timed = self._timed is not None
        if read.part == "targets":
            copies = self.stream.start(tree_leaves(batch.targets(read.micro)), is_timed=is_timed)
        else:
            values = self._flatten_inputs(as_call_args(batch.inputs(read.micro))).values
            copies = self.stream.start(values, self._inputs, is_timed=is_timed)
        if self._timed is not None and copies.span is not None:
            self._timed.append((read, copies.span))
        return copies

    def record_spans(self, *, enabled: bool) -> None:
        """Record when the device makes the copies that are started from now on, or stop to."""
        self._timed = [] if enabled else None

    @property
    def spans(self) -> Sequence[tuple[MicrobatchRead, DeviceSpan]]:
        """What was recorded."""
        return self._timed or ()

    def start_ahead(self, step: int, batch: MicrobatchSource) -> None:
        """Start the copies of a batch before its step begins, which raises an error of reading it."""
        with suppress(Exception):  # of the user's dataset, of any kind; the batch raises it again
            self.start(step, batch)

    def find(self, step: int, read: MicrobatchRead) -> StartedCopies:
        """Return the copies of what is read of a batch; none if none were started."""
        batch = self._batches.get(step)
        return StartedCopies() if batch is None else batch.copies.get(read, StartedCopies())

    def end_step(self, number: int) -> None:
        """Drop what is left of the batches up to this step's."""
        self._batches = {step: batch for step, batch in self._batches.items() if step > number}


def find_batches(number: int, batch: MicrobatchSource) -> Mapping[int, MicrobatchSource]:
    """Return the batches that a step reads, by the step that finishes each of them."""
    return batch.batches if isinstance(batch, AsyncPipelineBatches) else {number: batch}
