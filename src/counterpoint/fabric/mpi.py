"""Transport ``mpi``: the gloo transport's protocol over mpi4py communicators, for ranks started by mpirun.

Frames, announcements, timeouts and error texts are those of gloo; only the bytes and the reductions use MPI. The store
remains, for the rendezvous and for abort reasons: MPI cannot report that a member will not come.
"""

from __future__ import annotations

import atexit
import socket
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from itertools import accumulate
from threading import Lock
from typing import Any

from torch import Tensor

from counterpoint.errors import LaunchError, PeerError
from counterpoint.fabric.c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    GlooWork,
    ReduceOp,
    Store,
)  # fmt: skip
from counterpoint.fabric.gloo.connections import Rendezvous, read_abort_reason
from counterpoint.fabric.gloo.transport import GlooFabric
from counterpoint.fabric.shm.memory import RankContext
from counterpoint.rpc.job_key import JobKey, new_key

NUM_TAGS = 1 << 15  # the least that the MPI standard guarantees
ADDRESS_BYTES = 256
MIN_PAUSE_S, MAX_PAUSE_S = 1e-5, 1e-3  # between two polls of a request
ABORT_CHECK_S = 0.25  # between two reads of the abort reason
REMEDY = (
    "install Open MPI and `pip install 'counterpoint[mpi]'` and start the ranks with mpirun, or use another transport"
)


class MpiFabric(GlooFabric):
    """One rank among those of mpirun; created by :func:`~counterpoint.fabric.rendezvous.connect`.

    Cost:
        as the gloo transport; reductions are MPI's own, and progress during computation only as often as the progress
        thread polls.
    """

    def __init__(self, context: RankContext, job: int, generation: int) -> None:
        world = mpi_world()
        check_same_rank(world, context.rank, context.num_ranks)
        super().__init__(
            context.rank,
            context.num_ranks,
            context.timeout_s,
            Rendezvous(context.store, world.connect, job, generation),
        )
        self.progress_callbacks.append(world.advance)


class MpiWorld:
    """This process's MPI, initialized once; finalized at exit unless a connection failed.

    Attributes:
        mpi: the module ``mpi4py.MPI``.
        connections: all connections.
    """

    def __init__(self, mpi: Any) -> None:  # noqa: ANN401 - mpi4py comes without types
        self.mpi = mpi
        self.connections: list[MpiConnection] = []

    def connect(self, store: Store, place: str, group: tuple[int, ...], rank: int, timeout_s: float) -> MpiConnection:
        """Return a connection among the members, all of which call it."""
        del rank, timeout_s
        world = self.mpi.COMM_WORLD
        comm = world.Create_group(world.group.Incl(list(group)), zlib.crc32(place.encode()) % NUM_TAGS)
        link = MpiConnection(self.mpi, comm, lambda: read_abort_reason(store) is not None)
        self.connections.append(link)
        return link

    def advance(self) -> bool:
        """Let MPI make progress; return whether any request needs it."""
        return any(list(map(MpiConnection.advance, self.connections)))  # a list: advance all, without short-circuit

    def finalize(self) -> None:
        """Finalize MPI, unless a connection failed: then it would wait for ranks that are gone."""
        if not any(link.is_aborted or link.works for link in self.connections):
            self.mpi.Finalize()


class MpiWork:
    """A pending MPI request.

    Args:
        connection: its connection.
        request: MPI's.
        tensors: buffers that the request uses.
        after: called once, at completion.
        is_message: whether it is point-to-point.
    """

    def __init__(
        self,
        connection: MpiConnection,
        request: Any,  # noqa: ANN401
        tensors: Sequence[Tensor],
        after: Callable[[], object] | None,
        *,
        is_message: bool = False,
    ) -> None:
        self._link, self._request, self._tensors, self._after = connection, request, tensors, after
        self._status = connection.mpi.Status()
        self._lock = Lock()
        self._is_complete = False
        self.is_message = is_message

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        if self._link.is_aborted:
            return True
        with self._lock:
            if not self._is_complete and self._request.Test(self._status):
                if self._after is not None:
                    self._after()
                self._tensors, self._after, self._is_complete = (), None, True
                self._link.works.discard(self)
        return self._is_complete

    def wait(self, timeout: timedelta) -> bool:
        """Block until complete; a message that times out aborts its connection.

        Raises:
            RuntimeError: it timed out, a rank has aborted, or the connection was aborted.
        """
        now_s = time.monotonic()
        end, look_s, pause_s = now_s + timeout.total_seconds(), now_s + ABORT_CHECK_S, MIN_PAUSE_S
        while not self.is_completed():
            now_s = time.monotonic()
            if now_s >= look_s:
                self._link.check_not_aborted()
                look_s = now_s + ABORT_CHECK_S
            if now_s >= end:
                self._link.on_timeout(self)
                raise RuntimeError("not complete in time")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
        if not self._is_complete:
            raise RuntimeError("the connection was aborted")
        return True

    def _source_rank(self) -> int:
        return int(self._status.Get_source())


class MpiConnection:
    """A communicator with the methods of gloo's process group; ranks are indices in the group.

    Args:
        mpi: the module.
        comm: of the members.
        has_stopped: whether a rank has posted an abort reason.
    """

    def __init__(self, mpi: Any, comm: Any, has_stopped: Callable[[], bool]) -> None:  # noqa: ANN401
        self.mpi, self._comm, self._has_stopped = mpi, comm, has_stopped
        self.works: set[MpiWork] = set()
        self.is_aborted = False
        self.alltoall_base = self._exchange  # gloo has it as an attribute, too
        self._ops = ((ReduceOp.SUM, mpi.SUM), (ReduceOp.MAX, mpi.MAX), (ReduceOp.MIN, mpi.MIN))

    def rank(self) -> int:
        """Return the own index."""
        return int(self._comm.Get_rank())

    def size(self) -> int:
        """Return the number of members."""
        return int(self._comm.Get_size())

    def advance(self) -> bool:
        """Let MPI make progress; return whether a request other than a receive is pending."""
        left = [work for work in list(self.works) if not work.is_completed()]
        return not self.is_aborted and any(not work.is_message for work in left)

    def check_not_aborted(self) -> None:
        """Raise if a rank has aborted.

        Raises:
            RuntimeError: a rank has aborted.
        """
        if self._has_stopped():
            self.is_aborted = True
            raise RuntimeError("a rank has aborted")

    def on_timeout(self, work: MpiWork) -> None:
        """Abort the connection if a message was not complete in time."""
        self.is_aborted = self.is_aborted or work.is_message

    def send(self, tensors: Sequence[Tensor], dst_rank: int, tag: int, /) -> MpiWork:
        """Start to send bytes."""
        request = self._comm.Isend([tensors[0].numpy(), self.mpi.BYTE], dst_rank, tag)
        return self._track(request, tensors, message=True)

    def recv(self, tensors: Sequence[Tensor], src_rank: int, tag: int, /) -> MpiWork:
        """Start to receive bytes."""
        request = self._comm.Irecv([tensors[0].numpy(), self.mpi.BYTE], src_rank, tag)
        return self._track(request, tensors, message=True)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int, /) -> MpiWork:
        """Start to receive bytes from any source."""
        return self.recv(tensors, self.mpi.ANY_SOURCE, tag)

    def allreduce(self, tensors: Sequence[Tensor], opts: AllreduceOptions, /) -> MpiWork:
        """Start an all-reduce."""
        requested: Any = opts.reduceOp  # torch's types take it for the class; it can be compared, but not hashed
        op = next(mpi_op for kind, mpi_op in self._ops if requested == kind)
        return self._track(self._comm.Iallreduce(self.mpi.IN_PLACE, tensors[0].numpy(), op), tensors)

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: AllgatherOptions, /
    ) -> MpiWork:
        """Start an all-gather."""
        del opts
        input_ = inputs[0].contiguous()
        whole = input_.new_empty((len(outputs[0]), input_.numel()))

        def copy_out() -> None:
            for row, gathered in zip(outputs[0], whole, strict=True):
                row.copy_(gathered)

        return self._track(self._comm.Iallgather(input_.numpy(), whole.numpy()), [input_, whole], copy_out)

    def broadcast(self, tensors: Sequence[Tensor], opts: BroadcastOptions, /) -> MpiWork:
        """Start a broadcast."""
        return self._track(self._comm.Ibcast(tensors[0].numpy(), int(opts.rootRank)), tensors)

    def _exchange(
        self, output: Tensor, given: Tensor, incoming: list[int], outgoing: list[int], opts: AllToAllOptions, /
    ) -> GlooWork:
        del opts
        received, sent = ([0, *accumulate(sizes)][:-1] for sizes in (incoming, outgoing))
        request = self._comm.Ialltoallv(
            [given.numpy(), (outgoing, sent), self.mpi.BYTE], [output.numpy(), (incoming, received), self.mpi.BYTE]
        )
        return self._track(request, [output, given])

    def _track(
        self,
        request: Any,  # noqa: ANN401
        tensors: Sequence[Tensor],
        after: Callable[[], object] | None = None,
        *,
        message: bool = False,
    ) -> MpiWork:
        work = MpiWork(self, request, tensors, after, is_message=message)
        self.works.add(work)
        return work


@cache
def mpi_world() -> MpiWorld:
    """Return this process's initialized MPI.

    Raises:
        LaunchError: there is no MPI, or it does not support several threads.
    """
    initialized_here = "mpi4py.MPI" not in sys.modules
    try:
        import mpi4py

        if initialized_here:
            mpi4py.rc.finalize = False  # it would wait at the exit of a rank that has failed
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(f"transport 'mpi' is unavailable: {error}; {REMEDY}") from error
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        raise LaunchError(
            "this MPI is single-threaded, but a rank has several threads; use one with MPI_THREAD_MULTIPLE"
        )
    world = MpiWorld(MPI)
    if initialized_here:
        atexit.register(world.finalize)
    return world


def check_same_rank(world: MpiWorld, rank: int, num_ranks: int) -> None:
    """Check that MPI and the launcher's environment agree on this process's rank.

    Raises:
        LaunchError: they do not.
    """
    comm = world.mpi.COMM_WORLD
    if (comm.Get_rank(), comm.Get_size()) != (rank, num_ranks):
        raise LaunchError(
            f"this is rank {rank} of {num_ranks}, but rank {comm.Get_rank()} of {comm.Get_size()} for MPI; transport "
            "'mpi' is for ranks started by mpirun: use mpirun, or another transport"
        )


def mpi_address(rank: int, num_ranks: int, host: str, timeout_s: float) -> tuple[str, int, int | None, JobKey]:
    """Return the rendezvous address, on rank 0 a socket that listens there, and a key; rank 0 broadcasts them over MPI.

    Args:
        rank: the own rank.
        num_ranks: the world size.
        host: of rank 0, if it is known.
        timeout_s: the longest that this may last.

    Raises:
        LaunchError: MPI is unavailable, or rank 0 cannot listen.
        PeerError: ranks are missing at the timeout.
    """
    world, listener = mpi_world(), None
    check_same_rank(world, rank, num_ranks)
    message = bytearray(ADDRESS_BYTES)
    if rank == 0:
        try:
            listener = socket.create_server((host or socket.gethostname(), 0), backlog=1024)
        except OSError as error:
            raise LaunchError(
                f"rank 0 cannot listen on its host {host or socket.gethostname()}: {error}; make that name resolve to "
                "one of its addresses, or set MASTER_ADDR"
            ) from error
        text = f"{listener.getsockname()[0]} {listener.getsockname()[1]} {new_key().secret.hex()}".encode()
        message[: len(text)] = text
    request, end_s = world.mpi.COMM_WORLD.Ibcast(message, 0), time.monotonic() + timeout_s
    while not request.Test():
        if time.monotonic() > end_s:
            raise PeerError(f"rank {rank} waited {timeout_s:.1f} s for {num_ranks} ranks of MPI; look at the others")
        time.sleep(MAX_PAUSE_S)
    host_address, port, key = message.rstrip(b"\0").decode().split()
    listen_fd = None if listener is None else listener.detach()
    return host_address, int(port), listen_fd, JobKey(bytes.fromhex(key))
