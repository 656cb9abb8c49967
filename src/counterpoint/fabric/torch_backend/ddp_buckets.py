"""DDP's buckets in memory of the fabric: what every backward pass adds up again is not copied every time.

DDP allocates its buckets itself, in private memory, and uses them until it ends. Torch can exchange the memory under a
storage, and all views of it follow; but whoever has an address, as a NumPy array has, does not follow. So only what no
Python code has handed over is moved: a storage that C++ gives, in the middle of a backward pass, as DDP's reducer does.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.autograd import graph
from torch.multiprocessing.reductions import StorageWeakRef

from counterpoint.fabric.fabric import Fabric

MIN_BYTES = 256 << 10  # what is smaller is copied in one piece, and needs no memory of its own
CAN_SWAP = hasattr(UntypedStorage, "_swap_data_ptr_")  # an older torch cannot
BACKWARD = getattr(graph, "_engine_run_backward", None)
WeakReference: Any = StorageWeakRef  # untyped in torch


class DdpBuckets:
    """The storages that backward passes have added up over one group.

    A storage moves when it comes for the second time: the buckets that DDP begins with come once, before it makes those
    that it keeps.

    Args:
        fabric: of the group.
    """

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._is_enabled = CAN_SWAP and fabric.num_ranks > 1
        self._moved: dict[Any, bool] = {}

    def adopt(self, tensor: Tensor) -> None:
        """The tensor and all views of its storage are in memory of the fabric, if it is a bucket that has come before.

        Args:
            tensor: what C++ has handed over to be added up.
        """
        if not self._is_enabled or tensor.nbytes < MIN_BYTES:
            return
        storage = tensor.untyped_storage()
        if storage.nbytes() != tensor.nbytes or not tensor.is_contiguous() or storage.is_shared():
            return
        known = WeakReference(storage)
        if known not in self._moved:
            self._moved = {ref: moved for ref, moved in self._moved.items() if not ref.expired()}
            self._moved[known] = False
        elif not self._moved[known]:
            self._moved[known] = self._move(storage)

    def _move(self, storage: UntypedStorage) -> bool:
        room = self._fabric.try_empty(storage.nbytes(), torch.uint8)
        if room is None:  # what stays where it is goes on being copied
            self._is_enabled = False
            return False
        move_storage(storage, room)
        return True


def is_called_by_backward() -> bool:
    """Whether a backward pass, with no Python code in between, has called the function that asks."""
    try:
        caller = sys._getframe(2).f_code  # noqa: SLF001 - documented, and only code is kept: a frame would keep tensors
    except ValueError:  # no Python code at all: a thread of C++
        return False
    return BACKWARD is not None and caller is BACKWARD.__code__


def move_storage(storage: UntypedStorage, target: Tensor) -> None:
    """The storage has its bytes in the room, which is its own from now on.

    Its former memory lives as long as the room is used, without its pages: an address into it that somebody has kept
    reads zeros, and never what belongs to others.

    Args:
        storage: it and all tensors that use it find their bytes in the room.
        room: as many bytes.
    """
    num_bytes = storage.nbytes()
    room_type: Any = type("Room", (ctypes.c_uint8 * num_bytes,), {})
    lasting = room_type.from_address(target.data_ptr())
    lasting.room = target
    former = torch.frombuffer(lasting, dtype=torch.uint8).untyped_storage()
    former.copy_(storage, non_blocking=False)
    storage._swap_data_ptr_(former)  # type: ignore[attr-defined]  # unknown to torch's stubs
    discard_private_pages(former.data_ptr(), num_bytes)
    lasting.former = former


def discard_private_pages(address: int, num_bytes: int) -> None:
    """The whole pages of this private memory are the kernel's again; they are zeros when they are touched."""
    start, stop = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    libc: Any = ctypes.CDLL(None)
    if stop > start and hasattr(libc, "madvise"):
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)
