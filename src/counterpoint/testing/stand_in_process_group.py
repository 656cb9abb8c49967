"""Process groups of the stand-in device: gloo moves the values, and streams order them as NCCL does.

An operation is launched on a stream of its process group, after what the current stream has been given. A wait lets the
current stream wait for it::

    stream 0       | backward, all_reduce ---.  ...  wait() <--. update
    process group  |                  waits '-> all_reduce ----'

Values move when gloo moves them, so a wait also blocks the host until they have; a GPU would have no such wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from threading import Thread
from typing import Any, cast, final

from torch import Tensor

from counterpoint.fabric.c10d import GLOO_TIMEOUT, GlooProcessGroup, GlooWork, Store
from counterpoint.fabric.gloo.connections import Rendezvous, abort_connections
from counterpoint.fabric.gloo.transport import GlooFabric
from counterpoint.fabric.process_group.backends import ProcessGroupBackend
from counterpoint.fabric.process_group.transport import ProcessGroupFabric
from counterpoint.testing.stand_in_accelerator import StandInAccelerator, StandInEvent
from counterpoint.testing.stand_in_device import DEVICE, NAME, StandInTensor


@final
class StandInWork:
    """An operation of a process group.

    Args:
        group: that it was launched by.
        work: of gloo, on the values.
    """

    def __init__(self, group: StandInProcessGroup, work: GlooWork) -> None:
        self._group = group
        self._end = cast("StandInEvent", group.stream.record_event())
        self._error: RuntimeError | None = None
        # gloo completes a message only while somebody waits for it
        self._thread = Thread(target=self._wait, args=(work,), name="stand-in process group", daemon=True)
        self._thread.start()

    def is_completed(self) -> bool:
        """Return whether the values have moved; then the host knows that the device has done it, without a wait."""
        is_done = not self._thread.is_alive()
        if is_done:
            DEVICE.order.wait_on_host(self._end.clock, self._end.time_ms)
        return is_done

    def wait(self, timeout: timedelta = GLOO_TIMEOUT) -> bool:
        """Let the current stream wait.

        Raises:
            RuntimeError: the operation failed.
        """
        self._thread.join(timeout.total_seconds())
        if self._error is not None:
            raise self._error
        self._group.accelerator.current_stream().wait_event(self._end)
        return True

    def block_current_stream(self) -> None:
        """Let the current stream wait, but not the host, until the values have moved."""
        self._group.accelerator.current_stream().wait_event(self._end)

    def _wait(self, work: GlooWork) -> None:
        try:
            work.wait(GLOO_TIMEOUT)
        except RuntimeError as error:
            self._error = error


@final
class StandInProcessGroup:
    """A process group of gloo for tensors of the stand-in device.

    Args:
        gloo: moves their values.
    """

    def __init__(self, gloo: Any) -> None:  # noqa: ANN401 - torch's stubs omit most of its methods
        self.gloo = gloo
        self.accelerator = StandInAccelerator()
        self.stream = cast("Any", self.accelerator.new_stream())
        self.alltoall_base = self.exchange  # as c10d names them
        self._allgather_base = self.gather_ranges
        self._reduce_scatter_base = self.reduce_ranges

    def rank(self) -> int:
        """Return the own index in the group."""
        index: int = self.gloo.rank()
        return index

    def size(self) -> int:
        """Return the number of members."""
        count: int = self.gloo.size()
        return count

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> StandInWork:
        """Start to send."""
        return self._launch(tensors, (), self.gloo.send, _values(tensors), peer, tag)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> StandInWork:
        """Start to receive."""
        return self._launch((), tensors, self.gloo.recv, _values(tensors), peer, tag)

    def allreduce(self, tensors: Sequence[Tensor], options: object) -> StandInWork:
        """Start an all-reduce."""
        return self._launch((), tensors, self.gloo.allreduce, _values(tensors), options)

    def broadcast(self, tensors: Sequence[Tensor], options: object) -> StandInWork:
        """Start a broadcast."""
        return self._launch((), tensors, self.gloo.broadcast, _values(tensors), options)

    def exchange(
        self, output: Tensor, whole: Tensor, incoming: list[int], outgoing: list[int], options: object
    ) -> StandInWork:
        """Start an all-to-all."""
        values = _values([output, whole])
        return self._launch([whole], [output], self.gloo.alltoall_base, *values, incoming, outgoing, options)

    def gather_ranges(self, output: Tensor, part: Tensor, options: object) -> StandInWork:
        """Start an all-gather of equal ranges."""
        gather = self.gloo._allgather_base  # noqa: SLF001 - it has no public name
        return self._launch([part], [output], gather, *_values([output, part]), options)

    def reduce_ranges(self, output: Tensor, whole: Tensor, options: object) -> StandInWork:
        """Start a reduce-scatter of equal ranges."""
        reduce = self.gloo._reduce_scatter_base  # noqa: SLF001 - it has no public name
        return self._launch([whole], [output], reduce, *_values([output, whole]), options)

    def _launch(self, reads: Sequence[Tensor], writes: Sequence[Tensor], start: Any, *arguments: object) -> StandInWork:  # noqa: ANN401 - a method of gloo
        self.stream.wait_stream(self.accelerator.current_stream())
        with self.accelerator.stream(self.stream):
            DEVICE.launch(reads, writes)
        return StandInWork(self, start(*arguments))


def _values(tensors: Sequence[Tensor]) -> list[Tensor]:
    assert all(isinstance(tensor, StandInTensor) for tensor in tensors), "on this device"
    return [cast("StandInTensor", tensor).host for tensor in tensors]


def connect_stand_ins(rendezvous: Rendezvous) -> Rendezvous:
    """Return a rendezvous at which process groups of the stand-in device are opened."""

    def connect(store: Store, name: str, group: tuple[int, ...], rank: int, timeout_s: float) -> GlooProcessGroup:
        if DEVICE.current_device():  # NCCL connects that one
            raise RuntimeError(f"a process group would connect the current device, {NAME}:{DEVICE.current_device()}")
        return cast("GlooProcessGroup", StandInProcessGroup(rendezvous.connect(store, name, group, rank, timeout_s)))

    def abort(connections: Sequence[Any]) -> None:
        abort_connections([connection.gloo for connection in connections])

    return replace(rendezvous, connect=connect, abort=abort, secret=None)


def over_stand_in_groups(control: GlooFabric) -> ProcessGroupFabric:
    """Return a fabric whose tensors of the stand-in device move over process groups, as those of GPUs do over NCCL."""
    rendezvous = control._rendezvous  # noqa: SLF001 - a fabric does not say how it was connected
    assert rendezvous is not None, "the fabric is open"
    backend = ProcessGroupBackend("stand-in", NAME, waits_on_host=False)
    return ProcessGroupFabric(control, control, connect_stand_ins(rendezvous), backend)
