"""DDP's gradient buckets in shared memory, so that their all-reduces need no copies.

DDP allocates its buckets itself, in private memory, and uses them until it ends. Torch can swap the memory of a
storage, and all views follow; but a raw address, as a NumPy array has, does not. So only storages that no Python code
has handed over are moved: those that C++ passes during a backward pass, as DDP's reducer does.
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

MIN_BYTES = 256 << 10  # smaller tensors are cheap to copy
CAN_SWAP = hasattr(UntypedStorage, "_swap_data_ptr_")  # older torch versions cannot
BACKWARD = getattr(graph, "_engine_run_backward", None)
WeakReference: Any = StorageWeakRef  # untyped in torch


class DdpBuckets:
    """Storages that backward passes have all-reduced over one group.

    A storage is moved when it is seen for the second time: DDP's initial buckets are used once, before it rebuilds
    them.

    Args:
        fabric: of the group.
    """

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._is_enabled = CAN_SWAP and fabric.num_ranks > 1
        self._moved: dict[Any, bool] = {}

    def adopt(self, tensor: Tensor) -> None:
        """Move the tensor's storage into the fabric's memory, if it is a bucket that was seen before.

        Args:
            tensor: passed by C++ to be all-reduced.
        """
        if not self._is_enabled or tensor.nbytes < MIN_BYTES:
            return
        storage = tensor.untyped_storage()
        if storage.nbytes() != tensor.nbytes or not tensor.is_contiguous() or storage.is_shared():
            return
        reference = WeakReference(storage)
        if reference not in self._moved:
            self._moved = {other: moved for other, moved in self._moved.items() if not other.expired()}
            self._moved[reference] = False
        elif not self._moved[reference]:
            self._moved[reference] = self._move(storage)

    def _move(self, storage: UntypedStorage) -> bool:
        target = self._fabric.try_empty(storage.nbytes(), torch.uint8)
        if target is None:  # not enough memory: keep copying
            self._is_enabled = False
            return False
        move_storage(storage, target)
        return True


def is_called_by_backward() -> bool:
    """Return whether the caller was called by a backward pass with no Python code in between."""
    try:
        caller = sys._getframe(2).f_code  # noqa: SLF001 - documented, and only code is kept: a frame would keep tensors
    except ValueError:  # no Python caller: a C++ thread
        return False
    return BACKWARD is not None and caller is BACKWARD.__code__


def move_storage(storage: UntypedStorage, target: Tensor) -> None:
    """Swap the storage's memory for ``target``, which then holds its bytes.

    The former memory stays mapped, without pages, for as long as the new one is used: a raw address into it reads
    zeros, and never other data.

    Args:
        storage: it and all tensors that use it refer to the new memory.
        target: of the same size.
    """
    num_bytes = storage.nbytes()
    buffer_type: Any = type("Target", (ctypes.c_uint8 * num_bytes,), {})
    buffer = buffer_type.from_address(target.data_ptr())
    buffer.target = target
    former = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
    former.copy_(storage, non_blocking=False)
    storage._swap_data_ptr_(former)  # type: ignore[attr-defined]  # unknown to torch's stubs
    discard_private_pages(former.data_ptr(), num_bytes)
    buffer.former = former


def discard_private_pages(address: int, num_bytes: int) -> None:
    """Release whole pages of private memory to the kernel; they read as zeros afterwards."""
    start, stop = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    libc: Any = ctypes.CDLL(None)
    if stop > start and hasattr(libc, "madvise"):
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)
