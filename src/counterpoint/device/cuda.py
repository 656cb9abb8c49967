"""NVIDIA and AMD GPUs by ``torch.cuda``; nothing else names it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import combinations
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from counterpoint.device.accelerator import (
    Accelerator,
    DeviceIdentity,
    Event,
    MemoryStats,
    Stream,
    Values,
    copy_to_device,
)
from counterpoint.device.inventory import DeviceInventory, GpuInfo, GpuLibraries, read_driver, read_lanes

TF32_CAPABILITY = (8, 0)
NO_GPU = "torch finds no GPU or driver, or CUDA_VISIBLE_DEVICES hides them"


@final
class CudaAccelerator(Accelerator):
    """One GPU.

    Args:
        index: of the GPU among the visible ones.
    """

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self.is_host = False
        self.name = torch.cuda.get_device_name(index)
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._generator = torch.cuda.default_generators[index]

    def empty(self, *size: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor on the GPU."""
        return torch.empty(size, dtype=dtype, device=self.device)

    def empty_pinned(self, *size: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor in page-locked memory, which torch keeps until copies have ended."""
        return torch.empty(size, dtype=dtype, pin_memory=True)

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether a tensor of the host is in page-locked memory."""
        return tensor.is_pinned()

    def new_stream(self) -> Stream:
        """Return a new stream."""
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def current_stream(self) -> Stream:
        """Return the stream of this thread's work."""
        return torch.cuda.current_stream(self.device)

    def stream(self, stream: Any) -> AbstractContextManager[object]:  # noqa: ANN401 - a torch.cuda.Stream
        """Return a context in which this thread's work is done on a stream."""
        return torch.cuda.stream(stream)

    def new_event(self, *, enable_timing: bool = False) -> Event:
        """Return a new event."""
        return torch.cuda.Event(enable_timing=enable_timing)  # type: ignore[no-untyped-call]

    def record_stream(self, tensor: Tensor, stream: Any) -> None:  # noqa: ANN401 - as above
        """Keep the memory of a tensor, once it is dropped, until a stream has done its work so far."""
        tensor.record_stream(stream)

    def synchronize(self) -> None:
        """Wait on the host for all work on the GPU."""
        torch.cuda.synchronize(self.device)

    def manual_seed(self, seed: int) -> None:
        """Seed the GPU's own random numbers."""
        self._generator.manual_seed(seed)

    def get_rng_state(self) -> Tensor:
        """Return the state of the GPU's own random numbers."""
        return self._generator.get_state()

    def set_rng_state(self, state: Tensor) -> None:
        """Restore that state."""
        self._generator.set_state(state)

    def preserve_rng(self, *, enabled: bool = True) -> AbstractContextManager[object]:
        """Return a context that restores the random state of the host and of this GPU at its end."""
        return torch.random.fork_rng(devices=[self.device.index], device_type="cuda", enabled=enabled)

    def memory_stats(self) -> MemoryStats:
        """Return how much of the GPU's memory is used."""
        return MemoryStats(
            torch.cuda.memory_allocated(self.device),
            torch.cuda.max_memory_allocated(self.device),
            torch.cuda.memory_reserved(self.device),
            *torch.cuda.mem_get_info(self.device),
        )

    def identity(self) -> DeviceIdentity:
        """Return the GPU's UUID, its driver, and NCCL's version."""
        properties, nccl = torch.cuda.get_device_properties(self.device), _nccl_version()
        return DeviceIdentity(
            self.name,
            properties.total_memory,
            str(properties.uuid),
            read_driver(Path("/"))[0] or "",
            "" if nccl is None else f"NCCL {nccl}",
        )

    def reset_peak_memory_stats(self) -> None:
        """Let ``peak_allocated_bytes`` start again from what is allocated now."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def calling_thread(self) -> AbstractContextManager[object]:
        """Return a context in which backward runs in the thread that calls it."""
        return torch.autograd.set_multithreading_enabled(False)

    def to_device(self, values: Values) -> Values:
        """Return any nest of values with all its tensors on the GPU."""
        return copy_to_device(self, values)


def count_gpus() -> int:
    """Return how many GPUs this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def describe_absence() -> str:
    """Return why no GPU is seen."""
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return f"torch {torch.__version__} is built without CUDA"
    return NO_GPU


def take_inventory(visible: Sequence[tuple[str, str]]) -> DeviceInventory:
    """Return the GPUs of this host.

    Args:
        visible: the variables that choose among them, by name, as a launcher or the user has set them.
    """
    root, num_gpus = Path("/"), count_gpus()
    gpus = [_describe_gpu(index) for index in range(num_gpus)]
    driver, num_on_host = read_driver(root)
    return DeviceInventory(
        gpus=gpus,
        num_on_host=num_on_host,
        driver=driver,
        runtime=_describe_runtime(),
        nccl=_nccl_version() if num_gpus else None,
        visible=visible,
        without_peer_access=[
            pair for pair in combinations(range(num_gpus), 2) if not torch.cuda.can_device_access_peer(*pair)
        ],
        lanes=[read_lanes(root, gpu.pci_address) for gpu in gpus],
    )


def read_gpu_libraries() -> GpuLibraries | None:
    """Return what torch's build has for GPUs; None if nothing. It starts no work on a GPU that is not used yet."""
    runtime = _describe_runtime()
    if runtime is None:
        return None
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    gpus = range(count_gpus() if is_used and torch.version.cuda is not None else 0)
    return GpuLibraries(
        runtime=runtime,
        cudnn=_cudnn_version(),
        uses_cudnn=torch.backends.cudnn.enabled,
        nccl=_nccl_version(),
        matmul=torch.backends.cuda.matmul.fp32_precision,
        has_tf32=any(torch.cuda.get_device_capability(index) >= TF32_CAPABILITY for index in gpus),
    )


def _nccl_version() -> str | None:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    except AttributeError:  # a build without NCCL lacks the function that it calls
        return None


def _cudnn_version() -> str | None:
    try:
        version = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    except RuntimeError:  # the library that is found is older than the one of the build
        return None
    return None if version is None else str(version)


def _describe_gpu(index: int) -> GpuInfo:
    properties = torch.cuda.get_device_properties(index)
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    place = [getattr(properties, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]
    pci_address = None if -1 in place else "{:04x}:{:02x}:{:02x}.0".format(*place)
    return GpuInfo(properties.name, total_bytes, free_bytes, pci_address)


def _describe_runtime() -> str | None:
    if torch.version.cuda is not None:
        return f"CUDA {torch.version.cuda}"
    hip = getattr(torch.version, "hip", None)
    return None if hip is None else f"ROCm {hip}"
