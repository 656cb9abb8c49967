"""torch's process group interface on a fabric; two names where torch renamed a method between releases."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import ProgramError
from counterpoint.fabric.c10d import (
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
from counterpoint.fabric.fabric import Fabric
from counterpoint.fabric.rendezvous import Transport, connect_over_store
from counterpoint.fabric.torch_backend.collectives import FabricCollectives
from counterpoint.fabric.torch_backend.ddp_buckets import DdpBuckets, is_called_by_backward
from counterpoint.fabric.torch_backend.p2p import P2PMessages, P2PWork
from counterpoint.fabric.torch_backend.work import (
    OpOptions,
    ProcessGroupWork,
    StartedCollective,
    WorkQueue,
    timeout_seconds,
)

NAME = "counterpoint"
ProcessGroup: Any = dist.ProcessGroup  # torch's stubs know overloads that the C++ side never calls on a subclass


def create_process_group(
    store: Store, rank: int, num_ranks: int, timeout: timedelta, transport: Transport = "auto"
) -> FabricProcessGroup:
    """Return this rank's process group. torch calls it once per group, on all of its ranks.

    Each group has its own fabric, whose ranks are indices in the group; errors use these, too.

    Args:
        store: shared by the group's ranks.
        rank: the own index.
        num_ranks: the size of the group.
        timeout: the longest that any wait may last.
        transport: by default, shared memory if all ranks are on one host.
    """
    deadline_s = timeout_seconds(timeout) or dist.default_pg_timeout.total_seconds()
    return FabricProcessGroup(connect_over_store(store, rank, num_ranks, timeout_s=deadline_s, transport=transport))


class FabricProcessGroup(ProcessGroup):  # type: ignore[misc]  # see above
    """A process group of torch on a fabric, for CPU tensors.

    Every operation returns a work at once, except all-to-all, which first exchanges the split sizes.

    Args:
        fabric: of this group alone; closed with it.
    """

    def __init__(self, fabric: Fabric) -> None:
        super().__init__(fabric.rank, fabric.num_ranks)
        self.fabric = fabric
        self._collectives = FabricCollectives(fabric)
        self._buckets = DdpBuckets(fabric)
        self._p2p = P2PMessages(fabric)
        self._queue = WorkQueue(fabric)
        self._names = {"name": "", "desc": ""}

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> ProcessGroupWork:  # noqa: ANN401 - two types of options
        """Start to reduce; moves DDP's buckets into memory that need not be copied."""
        opts = opts or AllreduceOptions()
        for tensor in map(require_dense, tensors if is_called_by_backward() else ()):
            self._buckets.adopt(tensor)
        return self._enqueue(
            opts, *[self._collectives.all_reduce(require_dense(tensor), opts.reduceOp) for tensor in tensors]
        )

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Sequence[Tensor], opts: ReduceOptions) -> ProcessGroupWork:
        """Start to reduce to the root."""
        return self._enqueue(
            opts, *[self._collectives.reduce(tensor, opts.reduceOp, opts.rootRank) for tensor in tensors]
        )

    def broadcast(self, tensors: Sequence[Tensor], opts: BroadcastOptions) -> ProcessGroupWork:
        """Start to broadcast."""
        return self._enqueue(opts, *[self._collectives.broadcast(tensor, opts.rootRank) for tensor in tensors])

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: AllgatherOptions | None = None
    ) -> ProcessGroupWork:
        """Start to gather all members' tensors into a list."""
        pairs = zip(outputs, inputs, strict=True)
        return self._enqueue(opts, *[self._collectives.all_gather(output, tensor) for output, tensor in pairs])

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: AllgatherOptions | None = None
    ) -> ProcessGroupWork:
        """Start to gather several tensors; ``outputs[i]`` are those of member ``i``."""
        return self.allgather(list(zip(*outputs, strict=True)), inputs, opts)

    def all_gather_single(
        self, output: Tensor, tensor: Tensor, opts: AllgatherOptions | None = None
    ) -> ProcessGroupWork:
        """Start to gather all members' tensors into one."""
        return self._enqueue(opts, self._collectives.all_gather_into_tensor(output, tensor))

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: AllgatherOptions | None = None
    ) -> ProcessGroupWork:
        """Start to gather several tensors."""
        pairs = zip(outputs, inputs, strict=True)
        return self._enqueue(
            opts, *[self._collectives.all_gather_into_tensor(output, tensor) for output, tensor in pairs]
        )

    def gather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: GatherOptions
    ) -> ProcessGroupWork:
        """Start to gather on the root."""
        root = opts.rootRank
        return self._enqueue(opts, self._collectives.gather(outputs[0] if outputs else [], inputs[0], root))

    def scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: ScatterOptions
    ) -> ProcessGroupWork:
        """Start to scatter the root's tensors."""
        return self._enqueue(opts, self._collectives.scatter(outputs[0], inputs[0] if inputs else [], opts.rootRank))

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: ReduceScatterOptions | None = None
    ) -> ProcessGroupWork:
        """Start to reduce-scatter a list with one tensor per member."""
        opts = opts or ReduceScatterOptions()
        pairs = zip(outputs, inputs, strict=True)
        return self._enqueue(opts, *[self._collectives.reduce_scatter(a, b, opts.reduceOp) for a, b in pairs])

    def reduce_scatter_single(
        self, output: Tensor, tensor: Tensor, opts: ReduceScatterOptions | None = None
    ) -> ProcessGroupWork:
        """Start to reduce-scatter a tensor."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: ReduceScatterOptions | None = None
    ) -> ProcessGroupWork:
        """Start to reduce-scatter several tensors."""
        opts = opts or ReduceScatterOptions()
        pairs = zip(outputs, inputs, strict=True)
        return self._enqueue(opts, *[self._collectives.reduce_scatter_tensor(a, b, opts.reduceOp) for a, b in pairs])

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: AllToAllOptions | None = None
    ) -> ProcessGroupWork:
        """Start an all-to-all of lists."""
        return self._enqueue(opts, self._collectives.all_to_all(outputs, inputs))

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_sizes: Sequence[int] = (),
        input_sizes: Sequence[int] = (),
        opts: AllToAllOptions | None = None,
    ) -> ProcessGroupWork:
        """Start an all-to-all of parts of a tensor."""
        return self._enqueue(opts, self._collectives.all_to_all_single(output, tensor, output_sizes, input_sizes))

    def barrier(self, opts: BarrierOptions | None = None) -> ProcessGroupWork:
        """Start a barrier."""
        return self._enqueue(opts, self._collectives.barrier())

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> P2PWork:
        """Start to send."""
        return self._p2p.send(tensors[0], peer, tag)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> P2PWork:
        """Start to receive."""
        return self._p2p.recv(tensors[0], peer, tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> P2PWork:
        """Start to receive from any source."""
        return self._p2p.recv_any(tensors[0], tag)

    # the names of torch 2.11; 2.13 takes either
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _start_coalescing(self, device: object) -> None:
        """Do nothing: operations start at once, also inside of a coalescing block."""
        return

    def _end_coalescing(self, device: object) -> ProcessGroupWork:
        """Return a work that is complete when all earlier ones are."""
        return self._enqueue(None)

    def shutdown(self) -> None:
        """Finish pending operations, well or not, and release everything."""
        self._queue.finish_all()
        if not self._p2p.is_idle:
            self.fabric.abort(f"rank {self.fabric.rank} has destroyed its process group with messages under way")
        self._p2p.close()
        self.fabric.close()

    def abort(self) -> None:
        """Abort on all ranks, and release everything."""
        self.fabric.abort(f"rank {self.fabric.rank} has aborted its process group")
        self.shutdown()

    def getBackendName(self) -> str:  # noqa: N802 - torch's names, here and below
        """Return the backend's name in ``init_process_group``."""
        return NAME

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set torch's name of the group."""
        self._names["name"] = name

    def getGroupName(self) -> str:  # noqa: N802
        """Return torch's name of the group."""
        return self._names["name"]

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        """Set the group's description."""
        self._names["desc"] = desc

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return the group's description."""
        return self._names["desc"]

    def __repr__(self) -> str:
        return f"<FabricGroup {self._names['name']!r}, rank {self.fabric.rank} of {self.fabric.num_ranks}>"

    def _enqueue(self, opts: OpOptions | None, *started: StartedCollective) -> ProcessGroupWork:
        works = [work for each in started for work in each.works]
        tensors = [tensor for each in started for tensor in each.tensors]
        endings = [each.after for each in started if each.after is not None]

        def finish() -> None:
            for ending in endings:
                ending()

        return self._queue.add(StartedCollective(works, tensors, finish if endings else None), opts)


def require_dense(tensor: Tensor) -> Tensor:
    """Return the tensor.

    Raises:
        ProgramError: it is sparse.
    """
    if tensor.is_sparse:
        raise ProgramError(
            f"all_reduce of a sparse tensor {tuple(tensor.shape)}: backend counterpoint reduces dense tensors only; "
            "make "
            "it dense (nn.Embedding(..., sparse=False)), or use the gloo backend"
        )
    return tensor
