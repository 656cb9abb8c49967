"""Torch's words for the operations of a group; two of them where torch has renamed one between its releases."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import ProgramError
from counterpoint.fabric.fabric import Fabric
from counterpoint.fabric.gloo import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    Store,
)
from counterpoint.fabric.meeting import Transport, join
from counterpoint.fabric.torch_group.buckets import Buckets, is_called_by_backward
from counterpoint.fabric.torch_group.collectives import Collectives
from counterpoint.fabric.torch_group.messages import Messages, MessageWork
from counterpoint.fabric.torch_group.work import Options, Queue, Started, TorchWork, seconds_of

NAME = "counterpoint"
ProcessGroup: Any = dist.ProcessGroup  # torch's stubs know overloads that the C++ side never calls on a subclass


def create(store: Store, rank: int, num_ranks: int, timeout: timedelta, transport: Transport = "auto") -> FabricGroup:
    """Return the group of this rank; all of its ranks have come. Torch calls it, once for each of its groups.

    A group has a fabric of its own, in which its ranks are numbered by their places; so do errors number them.

    Args:
        store: what the ranks of the group have in common.
        rank: the own place.
        num_ranks: how many there are.
        timeout: the longest that any wait may last.
        transport: shared memory where all ranks are on one host, unless said otherwise.
    """
    deadline_s = seconds_of(timeout) or dist.default_pg_timeout.total_seconds()
    return FabricGroup(join(store, rank, num_ranks, deadline_s=deadline_s, transport=transport))


class FabricGroup(ProcessGroup):  # type: ignore[misc]  # see above
    """A process group of torch over a fabric of ours, on processors.

    Every operation starts it and returns a work; none waits for another rank but an exchange between all, whose sizes
    the ranks tell each other first.

    Args:
        fabric: of this group alone; closed with it.
    """

    def __init__(self, fabric: Fabric) -> None:
        super().__init__(fabric.rank, fabric.num_ranks)
        self.fabric = fabric
        self._collectives = Collectives(fabric)
        self._buckets = Buckets(fabric)
        self._messages = Messages(fabric)
        self._queue = Queue(fabric)
        self._names = {"name": "", "desc": ""}

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> TorchWork:  # noqa: ANN401 - two kinds of options
        """Start to reduce; DDP's buckets come to lie where they need not be copied."""
        opts = opts or AllreduceOptions()
        for tensor in map(dense, tensors if is_called_by_backward() else ()):
            self._buckets.see(tensor)
        return self._add(opts, *[self._collectives.all_reduce(dense(tensor), opts.reduceOp) for tensor in tensors])

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Sequence[Tensor], opts: ReduceOptions) -> TorchWork:
        """Start to reduce for the root."""
        return self._add(opts, *[self._collectives.reduce(tensor, opts.reduceOp, opts.rootRank) for tensor in tensors])

    def broadcast(self, tensors: Sequence[Tensor], opts: BroadcastOptions) -> TorchWork:
        """Start to copy the root's tensor."""
        return self._add(opts, *[self._collectives.broadcast(tensor, opts.rootRank) for tensor in tensors])

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: AllgatherOptions | None = None
    ) -> TorchWork:
        """Start to collect everybody's tensor in a list."""
        pairs = zip(outputs, inputs, strict=True)
        return self._add(opts, *[self._collectives.all_gather(output, tensor) for output, tensor in pairs])

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: AllgatherOptions | None = None
    ) -> TorchWork:
        """Start to collect several tensors; ``outputs[i]`` are those of member ``i``."""
        return self.allgather(list(zip(*outputs, strict=True)), inputs, opts)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: AllgatherOptions | None = None) -> TorchWork:
        """Start to collect everybody's tensor in one."""
        return self._add(opts, self._collectives.all_gather_whole(output, tensor))

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: AllgatherOptions | None = None
    ) -> TorchWork:
        """Start to collect several tensors."""
        pairs = zip(outputs, inputs, strict=True)
        return self._add(opts, *[self._collectives.all_gather_whole(output, tensor) for output, tensor in pairs])

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: GatherOptions) -> TorchWork:
        """Start to collect everybody's tensor on the root."""
        root = opts.rootRank
        return self._add(opts, self._collectives.gather(outputs[0] if outputs else [], inputs[0], root))

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: ScatterOptions) -> TorchWork:
        """Start to hand out the root's tensors."""
        return self._add(opts, self._collectives.scatter(outputs[0], inputs[0] if inputs else [], opts.rootRank))

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: ReduceScatterOptions | None = None
    ) -> TorchWork:
        """Start to reduce a list, one tensor for each member."""
        opts = opts or ReduceScatterOptions()
        pairs = zip(outputs, inputs, strict=True)
        return self._add(opts, *[self._collectives.reduce_scatter(a, b, opts.reduceOp) for a, b in pairs])

    def reduce_scatter_single(
        self, output: Tensor, tensor: Tensor, opts: ReduceScatterOptions | None = None
    ) -> TorchWork:
        """Start to reduce a tensor, a part for each member."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: ReduceScatterOptions | None = None
    ) -> TorchWork:
        """Start to reduce several tensors, a part of each for each member."""
        opts = opts or ReduceScatterOptions()
        pairs = zip(outputs, inputs, strict=True)
        return self._add(opts, *[self._collectives.reduce_scatter_whole(a, b, opts.reduceOp) for a, b in pairs])

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: AllToAllOptions | None = None
    ) -> TorchWork:
        """Start to exchange tensors."""
        return self._add(opts, self._collectives.all_to_all(outputs, inputs))

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_sizes: Sequence[int] = (),
        input_sizes: Sequence[int] = (),
        opts: AllToAllOptions | None = None,
    ) -> TorchWork:
        """Start to exchange parts of a tensor."""
        return self._add(opts, self._collectives.all_to_all_whole(output, tensor, output_sizes, input_sizes))

    def barrier(self, opts: BarrierOptions | None = None) -> TorchWork:
        """Start to wait for all."""
        return self._add(opts, self._collectives.barrier())

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> MessageWork:
        """Start to send."""
        return self._messages.send(tensors[0], peer, tag)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> MessageWork:
        """Start to receive."""
        return self._messages.recv(tensors[0], peer, tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> MessageWork:
        """Start to receive from whoever sends first."""
        return self._messages.recv_any(tensors[0], tag)

    # the names of torch 2.11; 2.13 takes either
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _start_coalescing(self, device: object) -> None:
        """Nothing changes: what is started before the end is under way at once."""
        return

    def _end_coalescing(self, device: object) -> TorchWork:
        """Return a work that is complete when all that was started before is."""
        return self._add(None)

    def shutdown(self) -> None:
        """What was started is finished, well or not; then nothing of the group is left in this process."""
        self._queue.finish_all()
        if not self._messages.is_quiet:
            self.fabric.stop(f"rank {self.fabric.rank} has destroyed its process group with messages under way")
        self._messages.close()
        self.fabric.close()

    def abort(self) -> None:
        """Nothing of the group is left in this process, and the other ranks know."""
        self.fabric.stop(f"rank {self.fabric.rank} has aborted its process group")
        self.shutdown()

    def getBackendName(self) -> str:  # noqa: N802 - torch's names, here and below
        """Return what it is called in ``init_process_group``."""
        return NAME

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Keep what torch calls the group."""
        self._names["name"] = name

    def getGroupName(self) -> str:  # noqa: N802
        """Return what torch calls the group."""
        return self._names["name"]

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        """Keep what the group is for."""
        self._names["desc"] = desc

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return what the group is for."""
        return self._names["desc"]

    def __repr__(self) -> str:
        return f"<FabricGroup {self._names['name']!r}, rank {self.fabric.rank} of {self.fabric.num_ranks}>"

    def _add(self, opts: Options | None, *started: Started) -> TorchWork:
        works = [work for each in started for work in each.works]
        tensors = [tensor for each in started for tensor in each.tensors]
        endings = [each.after for each in started if each.after is not None]

        def finish() -> None:
            for ending in endings:
                ending()

        return self._queue.add(Started(works, tensors, finish if endings else None), opts)


def dense(tensor: Tensor) -> Tensor:
    """Return the tensor.

    Raises:
        ProgramError: it is sparse.
    """
    if tensor.is_sparse:
        raise ProgramError(
            f"all_reduce of a sparse tensor {tuple(tensor.shape)}: backend counterpoint adds up dense ones; make it "
            "dense (nn.Embedding(..., sparse=False)), or use the gloo backend"
        )
    return tensor
