"""Point-to-point messages of torch programs: concurrent in both directions and with several peers, matched by tag.

A fabric's ``send`` blocks while the peer's pipe is full, and programs let two ranks send to each other before they
receive. So each direction of each peer has a thread of its own, started by its first message.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError as FutureTimeoutError, wait
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future as TorchFuture

from counterpoint.errors import CounterpointError, PeerError
from counterpoint.fabric.fabric import Fabric
from counterpoint.fabric.fingerprint import dtype_name
from counterpoint.fabric.torch_backend.work import timeout_seconds
from counterpoint.tensor_bytes import as_bytes

LABEL = "a message"
JOIN_S = 2.0

P2PTask = Callable[[], int]


class SerialExecutor:
    """A daemon thread that runs tasks one after the other.

    Not a ``ThreadPoolExecutor(1)``, whose thread the interpreter joins at exit: it would wait for a missing message.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[tuple[P2PTask, Future[int]] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: P2PTask) -> Future[int]:
        """Return a future of the task."""
        future: Future[int] = Future()
        self._tasks.put((task, future))
        return future

    def close(self) -> None:
        """End the thread after its pending tasks."""
        self._tasks.put(None)
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        while (item := self._tasks.get()) is not None:
            errand, future = item
            try:
                future.set_result(errand())
            except Exception as error:  # noqa: BLE001 - raised by the message's wait
                future.set_exception(error)
            del item, errand, future  # or they would keep the last message's tensor alive


class P2PMessages:
    """The messages of one rank in one group.

    Args:
        fabric: of the group.
    """

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._senders: dict[int, SerialExecutor] = {}
        self._receivers: dict[int, SerialExecutor] = {}
        self._any_source: SerialExecutor | None = None
        self._received: defaultdict[int, list[tuple[int, Tensor]]] = defaultdict(list)
        self._pending: set[Future[int]] = set()

    def send(self, tensor: Tensor, peer: int, tag: int) -> P2PWork:
        """Start to send; the tensor may be overwritten after a wait."""
        executor = self._senders.get(peer) or SerialExecutor(f"to rank {peer}")
        self._senders[peer] = executor
        values = tensor.detach()
        head = json.dumps([tag, dtype_name(values.dtype), list(values.shape)]).encode()

        def task() -> int:
            raw = as_bytes(values)
            self._fabric.send(peer, LABEL, [torch.frombuffer(bytearray(head), dtype=torch.uint8), raw])
            return peer

        return self._work(executor.submit(task), tensor)

    def recv(self, tensor: Tensor, peer: int, tag: int) -> P2PWork:
        """Start to receive the peer's next message with this tag."""
        return self._work(self._receiver(peer).submit(lambda: self._match(tensor, [peer], tag)), tensor)

    def recv_any(self, tensor: Tensor, tag: int) -> P2PWork:
        """Start to receive the next message with this tag from any peer, after all receives started before."""
        peers = [rank for rank in range(self._fabric.num_ranks) if rank != self._fabric.rank]
        receivers = [self._receiver(peer) for peer in peers]
        earlier = [receiver.submit(lambda: 0) for receiver in receivers]
        self._any_source = self._any_source or SerialExecutor("from any rank")

        def task() -> int:
            wait(earlier)
            return self._match(tensor, peers, tag)

        future = self._any_source.submit(task)
        for receiver in receivers:  # only one thread may read a pipe at a time
            receiver.submit(lambda: len(wait([future]).done))
        return self._work(future, tensor)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is pending."""
        return not any(not future.done() for future in self._pending)

    def close(self) -> None:
        """End the threads; those that wait for a message end when the fabric aborts."""
        any_source = [] if self._any_source is None else [self._any_source]
        for executor in (*self._senders.values(), *self._receivers.values(), *any_source):
            executor.close()
        self._senders.clear()
        self._receivers.clear()
        self._any_source = None

    def _receiver(self, peer: int) -> SerialExecutor:
        executor = self._receivers.get(peer) or SerialExecutor(f"from rank {peer}")
        self._receivers[peer] = executor
        return executor

    def _match(self, tensor: Tensor, peers: Sequence[int], tag: int) -> int:
        while True:
            for peer in peers:
                for index, (message_tag, message) in enumerate(self._received[peer]):
                    if message_tag == tag:
                        del self._received[peer][index]
                        self._copy_into(tensor, peer, message)
                        return peer
            if len(peers) == 1:
                peer, (head, raw) = peers[0], self._fabric.recv(peers[0], LABEL)
            else:
                peer, _, (head, raw) = self._fabric.recv_any(peers)
            message_tag, dtype, shape = json.loads(head.numpy().tobytes())
            self._received[peer].append((message_tag, raw.view(getattr(torch, dtype)).view(shape)))

    def _copy_into(self, tensor: Tensor, peer: int, message: Tensor) -> None:
        if (message.dtype, message.numel()) != (tensor.dtype, tensor.numel()):
            raise PeerError(
                f"rank {self._fabric.rank} expects {dtype_name(tensor.dtype)} {tuple(tensor.shape)} from rank {peer}, "
                f"but its next message is {dtype_name(message.dtype)} {tuple(message.shape)}; compare what rank {peer} "
                f"sends with what rank {self._fabric.rank} receives"
            )
        tensor.detach().copy_(message.view(tensor.shape))

    def _work(self, future: Future[int], tensor: Tensor) -> P2PWork:
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        return P2PWork(future, tensor)


class P2PWork(dist._Work):  # type: ignore[name-defined,misc]  # noqa: SLF001 - torch's own name for what is subclassed
    """A pending message, for torch.

    Args:
        future: the peer's rank.
        tensor: the message's.
    """

    def __init__(self, future: Future[int], tensor: Tensor) -> None:
        super().__init__()
        self._future = future
        self._tensor = tensor

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the message was received or sent.

        Raises:
            PeerError: it failed, or timed out.
        """
        seconds = timeout_seconds(timeout)
        try:
            self._future.result(seconds)
        except FutureTimeoutError as error:
            raise PeerError(
                f"a message was not transferred within {seconds} s; check what the peer does instead, or raise the "
                "timeout"
            ) from error
        return True

    def get_future(self) -> TorchFuture[Any]:
        """Return a torch future that completes with the message."""
        result: TorchFuture[Any] = TorchFuture()

        def copy_result(future: Future[int]) -> None:
            error = future.exception()
            if isinstance(error, Exception):
                result.set_exception(error)
            else:
                result.set_result([self._tensor])

        self._future.add_done_callback(copy_result)
        return result

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    def is_success(self) -> bool:
        """Whether it has succeeded."""
        return self._future.done() and self._future.exception() is None

    def exception(self) -> CounterpointError | None:
        """Return its error, if it failed."""
        error = self._future.exception() if self._future.done() else None
        return error if isinstance(error, CounterpointError) else None

    def result(self) -> list[Tensor]:
        """Return the tensor."""
        return [self._tensor]

    def source_rank(self) -> int:
        """Return the sender."""
        return self._future.result()

    def _source_rank(self) -> int:
        return self.source_rank()
