r"""Messages between two ranks on process groups: a frame over the control plane says what follows as raw bytes.

::

    rank 0: frame (label, shapes) ---- control plane ----> rank 1 allocates, and starts to receive
    rank 0: bytes of all tensors  ---- process group ----> rank 1

A device never waits for a frame, only the host that launches its work. Each direction has a process group of its own:
NCCL runs the messages of a process group one after the other, so two that cross would wait for each other.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from threading import Lock, Thread
from typing import Any, Final

import torch
from torch import Tensor

from counterpoint.errors import PeerError
from counterpoint.fabric.c10d import GlooProcessGroup, GlooWork
from counterpoint.fabric.fingerprint import dtype_name
from counterpoint.rpc.tensor_codec import DTYPE_CODES, padded_size
from counterpoint.tensor_bytes import as_bytes

TAG: Final = 3

MAX_PENDING: Final = 64

MAX_PENDING_BYTES: Final = 256 << 20

POLL_S: Final = 0.0002


class PairChannel:
    """The two process groups between this rank and a peer; opened on both ranks when the first of them needs one.

    Args:
        rank: this rank.
        peer: the other one.
        open_group: opens a process group by name; blocks until the peer opens it.
        waits_on_host: whether waits block the host.
    """

    def __init__(
        self,
        rank: int,
        peer: int,
        open_group: Callable[[str, tuple[int, ...]], GlooProcessGroup],
        *,
        waits_on_host: bool,
    ) -> None:
        self.peer = peer
        self._rank = rank
        self._pair = (min(rank, peer), max(rank, peer))
        self._open_group = open_group
        self._waits_on_host = waits_on_host
        self._open_lock = Lock()
        self._send_lock = Lock()
        self._outgoing: GlooProcessGroup | None = None
        self._incoming: GlooProcessGroup | None = None
        self._opener: Thread | None = None
        self._error: Exception | None = None
        self._unsent: deque[tuple[Tensor, AbstractContextManager[Any]]] = deque()
        self._pending: deque[tuple[Tensor, GlooWork]] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether everything sent was seen to leave."""
        return not self._unsent and not self._pending

    def send(self, packed: Tensor, stream: AbstractContextManager[Any], timeout_s: float) -> None:
        """Start to send bytes; the caller does not change them. Bounded: waits for older messages if there are many.

        Args:
            packed: the bytes.
            stream: entered around the start, which may be on another thread.
            timeout_s: the longest wait.

        Raises:
            RuntimeError: the connection failed.
            TimeoutError: older messages did not leave in time.
        """
        self._raise_error()
        with self._send_lock:
            if self._outgoing is None:
                self._unsent.append((packed, stream))
                if self._opener is None:  # the peer may be sending to a third rank that waits for this one
                    self._opener = Thread(target=self._open_in_thread, name="counterpoint connect", daemon=True)
                    self._opener.start()
            else:
                self._start_send(packed, stream)
        self._make_room(timeout_s)

    def recv(self, buffer: Tensor, timeout_s: float) -> GlooWork:
        """Fill the buffer with the bytes of the peer's next message; on a device, make the current stream wait.

        Raises:
            RuntimeError: the connection failed, or it timed out.
        """
        self._raise_error()
        self._open()
        assert self._incoming is not None, "opened"
        work = self._incoming.recv([buffer], self._pair.index(self.peer), TAG)
        if self._waits_on_host:
            work.wait(timedelta(seconds=timeout_s))
        else:
            work.wait()  # type: ignore[call-arg]  # with a timeout it might block the host
        return work

    def flush(self, timeout_s: float) -> None:
        """Wait until everything sent has left this rank.

        Raises:
            RuntimeError: the connection failed.
            TimeoutError: it did not in time.
        """
        end = time.monotonic() + timeout_s
        opener = self._opener
        if opener is not None:
            opener.join(timeout_s)
            if opener.is_alive():
                raise TimeoutError
            self._opener = None
        self._raise_error()
        with self._send_lock:
            while self._pending:
                self._wait_oldest(end - time.monotonic())

    def close(self) -> None:
        """Release the process groups."""
        self._unsent.clear()
        self._pending.clear()
        self._outgoing = self._incoming = None

    def _raise_error(self) -> None:
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error

    def _open_in_thread(self) -> None:
        try:
            self._open()
        except Exception as error:  # noqa: BLE001 - raised by the next call
            self._error = error

    def _open(self) -> None:
        """Open both process groups, in the same order on both ranks, and send what waits for them."""
        with self._open_lock:
            if self._incoming is None:
                low, high = self._pair
                groups = {
                    source: self._open_group(f"{source}>{target}", self._pair)
                    for source, target in ((low, high), (high, low))
                }
                with self._send_lock:
                    self._incoming, self._outgoing = groups[self.peer], groups[self._rank]
                    while self._unsent:
                        self._start_send(*self._unsent.popleft())

    def _start_send(self, packed: Tensor, stream: AbstractContextManager[Any]) -> None:
        assert self._outgoing is not None, "opened"
        with stream:
            self._pending.append((packed, self._outgoing.send([packed], self._pair.index(self.peer), TAG)))

    def _make_room(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        with self._send_lock:
            while not self._waits_on_host and self._pending and self._pending[0][1].is_completed():
                self._pending.popleft()
            while self._pending and (
                len(self._pending) > MAX_PENDING or sum(len(packed) for packed, _ in self._pending) > MAX_PENDING_BYTES
            ):
                self._wait_oldest(end - time.monotonic())

    def _wait_oldest(self, seconds: float) -> None:
        work = self._pending[0][1]
        if self._waits_on_host:
            work.wait(timedelta(seconds=max(seconds, 0.001)))
        else:
            end = time.monotonic() + seconds
            while not work.is_completed():
                if time.monotonic() > end:
                    raise TimeoutError
                time.sleep(POLL_S)
        self._pending.popleft()


def pack(tensors: Sequence[Tensor], places: Sequence[TensorPlace], device: torch.device) -> Tensor:
    """Return copies of the raw tensors as flat bytes on the device."""
    packed = torch.empty(sum(place.num_bytes for place in places), dtype=torch.uint8, device=device)
    start = 0
    for tensor, place in zip(tensors, places, strict=True):
        if place.is_raw:
            values = as_bytes(tensor)
            packed[start : start + len(values)] = values
            start += place.num_bytes
    return packed


def unpack(
    packed: Tensor, in_frame: Sequence[Tensor], places: Sequence[TensorPlace], devices: Mapping[str, torch.device]
) -> tuple[Tensor, ...]:
    """Return all tensors of a message; raw ones share the memory of ``packed``.

    Args:
        packed: the raw bytes.
        in_frame: the other tensors.
        places: of all tensors.
        devices: this rank's, by type; of another type it is the current one.
    """
    start, framed, tensors = 0, iter(in_frame), []
    for place in places:
        if place.is_raw:
            values = packed[start : start + prod(place.shape) * place.dtype.itemsize]
            tensor = values.view(place.dtype).view(place.shape)
            start += place.num_bytes
        else:
            tensor = next(framed)
        wanted = devices.get(place.device_type) or torch.device(place.device_type)
        tensors.append(tensor if wanted.type == tensor.device.type else tensor.to(wanted))
    return tuple(tensors)


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """How one tensor of a message travels.

    Attributes:
        is_raw: whether as raw bytes of the process group; otherwise in the frame.
        device_type: where the receiver wants it.
        dtype: of the tensor.
        shape: of the tensor.
    """

    is_raw: bool
    device_type: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Raw bytes, with those that align the next tensor."""
        return padded_size(prod(self.shape) * self.dtype.itemsize) if self.is_raw else 0


def encode_places(places: Sequence[TensorPlace]) -> Tensor:
    """Return the description of a message, without pickle; empty if all tensors are in the frame and stay there."""
    if not any(place.is_raw or place.device_type != "cpu" for place in places):
        return torch.empty(0, dtype=torch.uint8)
    rows = [[int(place.is_raw), place.device_type, dtype_name(place.dtype), place.shape] for place in places]
    return torch.frombuffer(bytearray(json.dumps(rows).encode()), dtype=torch.uint8)


def decode_places(head: Tensor, peer: int) -> list[TensorPlace]:
    """Return what :func:`encode_places` encoded.

    Raises:
        PeerError: it is malformed.
    """
    try:
        return [
            TensorPlace(bool(is_raw), str(device_type), dtype_of(dtype), tuple(map(int, shape)))
            for is_raw, device_type, dtype, shape in json.loads(head.numpy().tobytes() or b"[]")
        ]
    except (ValueError, TypeError) as error:
        raise PeerError(f"rank {peer} sent a message that cannot be read: {error}") from error


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of this name.

    Raises:
        ValueError: there is none.
    """
    found = [dtype for dtype in DTYPE_CODES if dtype_name(dtype) == name]
    if not found:
        raise ValueError(f"there is no dtype {name!r}")
    return found[0]
