"""A device for tests, where there is no GPU: torch computes for it on the host, but it behaves as a GPU.

Every tensor of the device ``stand_in`` wraps a tensor of the host, on which operations run. What a GPU cannot do raises
an error: operations on tensors of several devices, ``numpy()``, the address of a tensor in native code. What lets the
host wait for a GPU is counted with its source line: reading a number, copies, operations whose output's size depends on
values. The device has random numbers of its own, and streams whose order is checked. There is one, but a
test may let another one be the current one of threads, as cuda:0 is for a process that computes on cuda:1.

It is torch's backend ``PrivateUse1``, which torch allows one of in a process, implemented in Python. Torch 2.13 has no
streams, generators or pinned memory for such a backend; ``StandInAccelerator`` has them.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial, total_ordering
from threading import local
from types import CodeType, FrameType
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from counterpoint.testing.stand_in_streams import (
    Access,
    AccessedBytes,
    HostTransfer,
    RaceError,
    SourceLine,
    StreamOrder,
)

NAME = "stand_in"
Library: Any = torch.library.Library  # which has no types
COPIES = frozenset({"copy_", "_copy_from"})
HOST_SIZED = frozenset(
    {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal", "repeat_interleave"}
)
"""Operators for which the host waits: the size of the output depends on values, or the output is on the host."""
HOST_INDEXED = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})
"""Operators that take index tensors of the host, too, and copy them."""


VIEWS = frozenset({"detach", "alias", "lift_fresh"})
"""Operators that return a view, and are not described so."""
RESIZING_FACTORIES = ("arange", "arange.start", "arange.start_step", "eye", "eye.m", "linspace")
"""Operators that torch otherwise writes as the change of an empty tensor's size."""


@total_ordering
class DeviceAddress:
    """Address of a tensor on the device: it can be compared, but is not a number that native code would take.

    Args:
        value: the number.
    """

    __slots__ = ("_value",)

    def __init__(self, value: int) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceAddress) and self._value == other._value

    def __lt__(self, other: DeviceAddress) -> bool:
        return self._value < other._value

    def __add__(self, num_bytes: int) -> DeviceAddress:
        return DeviceAddress(self._value + num_bytes)

    def __hash__(self) -> int:
        return hash(self._value)


class Allocation:
    """Memory on the device, of one tensor and its views.

    Args:
        storage: the host's, that its values are in.
        device: that it belongs to.
    """

    __slots__ = ("__weakref__", "accesses", "device", "num_bytes", "storage")

    def __init__(self, storage: torch.UntypedStorage, device: StandInDevice) -> None:
        self.storage, self.device = storage, device
        self.accesses = device.order.new_accesses()
        self.num_bytes = 0
        self._count(storage.nbytes())

    def resize(self, num_bytes: int) -> None:
        """Change the size; 0 frees the memory, and what is allocated afterwards is other memory."""
        self.device.order.free(self.accesses)
        self.accesses = self.device.order.new_accesses()
        self._count(num_bytes)
        self.storage.resize_(num_bytes)

    def _count(self, num_bytes: int) -> None:
        self.device.count_bytes(num_bytes - self.num_bytes)
        self.num_bytes = num_bytes

    def __del__(self) -> None:
        self.device.count_bytes(-self.num_bytes)
        self.device.order.free(self.accesses)


class StandInStorage:
    """The storage of a tensor on the device: its size can be read and changed, its bytes cannot.

    Args:
        allocation: the memory.
    """

    def __init__(self, allocation: Allocation) -> None:
        self._allocation = allocation
        self.device = DEVICE.device

    def nbytes(self) -> int:
        """Return the size in bytes."""
        return self._allocation.storage.nbytes()

    size = nbytes

    @property
    def _cdata(self) -> int:
        """The identity of a storage."""
        identity: int = cast("Any", self._allocation.storage)._cdata  # noqa: SLF001 - it has no public name
        return identity

    def _weak_ref(self) -> int:
        """Return what ``StorageWeakRef`` keeps of a storage."""
        weak_ref: int = cast("Any", self._allocation.storage)._weak_ref()  # noqa: SLF001 - it has no public name
        return weak_ref

    def resize_(self, num_bytes: int) -> None:
        """Change the size; 0 frees the memory."""
        self._allocation.resize(num_bytes)

    def data_ptr(self) -> DeviceAddress:
        """Return the address."""
        return DeviceAddress(self._allocation.storage.data_ptr())


class StandInTensor(Tensor):
    """A tensor on the device.

    Args:
        host: its values.

    Attributes:
        allocation: its memory; None for a sparse tensor, which has none of its own.
    """

    host: Tensor
    allocation: Allocation | None
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001 - documented for subclasses

    def __new__(cls, host: Tensor) -> Self:  # noqa: D102 - the class describes it
        is_dense = host.layout == torch.strided
        tensor = Tensor._make_wrapper_subclass(  # noqa: SLF001 - documented for subclasses
            cls,
            host.size(),
            strides=host.stride() if is_dense else None,
            storage_offset=host.storage_offset() if is_dense else None,
            dtype=host.dtype,
            layout=host.layout,
            device=DEVICE.device,
        )
        tensor.host = host
        tensor.allocation = DEVICE.find_allocation(host) if is_dense else None
        return tensor

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"StandInTensor({tuple(self.shape)}, {self.dtype})"

    @property
    def data(self) -> StandInTensor:
        """The same memory without its history."""
        return StandInTensor(self.host)

    @data.setter
    def data(self, new: Tensor) -> None:
        """Replace the memory by another tensor's.

        Raises:
            TypeError: it is on another device.
            RuntimeError: it has another shape or dtype.
        """
        if not isinstance(new, StandInTensor):
            raise TypeError(f"the data of a tensor on {self.device} was replaced by that of one on {new.device}")
        if new.shape != self.shape or new.dtype != self.dtype:
            raise RuntimeError("the data of a stand-in tensor can only be replaced by one of the same shape")
        self.host, self.allocation = new.host, new.allocation

    def data_ptr(self) -> DeviceAddress:  # type: ignore[override]  # no number
        """Return the address, which native code does not take."""
        return DeviceAddress(self.host.data_ptr())

    def untyped_storage(self) -> StandInStorage:  # type: ignore[override]  # has the methods that are used
        """Return the storage."""
        assert self.allocation is not None, "dense"
        return StandInStorage(self.allocation)

    def numpy(self, **_: Any) -> Any:  # noqa: ANN401 - never returns
        """Raise as a GPU's tensor does.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first")

    def is_shared(self) -> bool:
        """Return True, as for a tensor on a GPU."""
        return True

    def tolist(self) -> Any:  # noqa: ANN401 - a nested list
        """Return the values, for which the host waits."""
        return self.cpu().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copy: Tensor = self.detach().clone()
            if isinstance(self, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, requires_grad=self.requires_grad)
            memo[id(self)] = copy.requires_grad_(self.requires_grad)
        return cast("Tensor", memo[id(self)])

    @classmethod
    def __torch_dispatch__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # noqa: ANN401 - torch's protocol
        return DEVICE.run(func, args, kwargs or {})


class StandInDevice:
    """State of the device: memory, random numbers, the order of its streams, and how often the host waited.

    Attributes:
        host_waits: by kind and source line, how often the host waited for the device.
        num_launches: operations so far.
        max_operations_behind: how many operations the device is behind the host at most; None for any number.
        total_bytes: memory of the device.
        identity: what its accelerator says of it; None for nothing.
        default_number: of the device that is the current one where no stream was chosen; 0 is this one.
    """

    make_accelerator: Callable[[torch.device], object] | None = None
    """Makes the accelerator of the device, as ``device.select`` asks of a device that it does not know itself."""

    def __init__(self) -> None:
        self.order = StreamOrder(find_line)
        self.host_waits: Counter[tuple[str, str]] = Counter()
        self.num_launches = 0
        self.max_operations_behind: int | None = None
        self.allocated_bytes = self.peak_bytes = 0
        self.total_bytes = 1 << 30
        self._recorded: list[str] | None = None
        self._generator = torch.Generator()
        self.identity: Any = None
        self.default_number = 0
        self._current = local()
        self._allocations: weakref.WeakValueDictionary[int, Allocation] = weakref.WeakValueDictionary()
        self._pinned: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        _setup_privateuseone_for_python_backend(NAME, backend_module=self)
        self._library = Library("_", "IMPL")
        self._library.fallback(lambda func, *args, **kwargs: self.run(func, args, kwargs), "PrivateUse1")
        self._factories = Library("aten", "IMPL")
        for name in RESIZING_FACTORIES:
            func = getattr(torch.ops.aten, name.partition(".")[0])
            overload = getattr(func, name.partition(".")[2] or "default")
            self._factories.impl(name, partial(self._make, overload), "PrivateUse1")
        self.device = torch.device(NAME, 0)

    # What torch asks of the module of a device.

    def is_initialized(self) -> bool:
        """Return True: there is nothing to initialize."""
        return True

    is_available = is_initialized

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        """Return the number of this thread's current device: this one inside :meth:`use`."""
        return 0 if getattr(self._current, "is_chosen", False) else self.default_number

    def device_count(self) -> int:
        """Return how many there are; only the first one can be used."""
        return self.default_number + 1

    def get_device_name(self, device: torch.device | None = None) -> str:
        """Return its name."""
        del device
        return NAME

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the dtypes of autocast."""
        return [torch.float16, torch.bfloat16]

    def manual_seed_all(self, seed: int) -> None:
        """Seed the device's random numbers."""
        self._generator.manual_seed(seed)

    def get_rng_state(self, device: torch.device | int | None = None) -> Tensor:
        """Return the state of the device's random numbers."""
        del device
        return self._generator.get_state()

    def set_rng_state(self, state: Tensor, device: torch.device | int | None = None) -> None:
        """Restore the state of the device's random numbers."""
        del device
        self._generator.set_state(state)

    def synchronize(self, device: torch.device | int | None = None) -> None:
        """Let the host wait for all streams."""
        del device
        self.wait_on_host("synchronize")

    # What tests and the accelerator ask of it.

    @contextmanager
    def use(self, stream: int) -> Iterator[None]:
        """Launch this thread's operations on a stream of this device inside, which is the current one there."""
        former, self._current.is_chosen = getattr(self._current, "is_chosen", False), True
        try:
            with self.order.use(stream):
                yield
        finally:
            self._current.is_chosen = former

    def require_itself(self, device: Any) -> None:  # noqa: ANN401 - an argument of an operator
        """Raise if a tensor is to be made on another device than this one.

        Raises:
            RuntimeError: the device is named without a number, and this one is not the current one.
        """
        if device is not None and torch.device(device) == torch.device(NAME) and self.current_device():
            raise RuntimeError(
                f"a tensor would be made on the current device, {NAME}:{self.current_device()}, but all others are on "
                f"{self.device}"
            )

    @contextmanager
    def count_host_waits(self, max_operations_behind: int | None = None) -> Iterator[Counter[tuple[str, str]]]:
        """Yield a counter of the host's waits inside, by kind and source line.

        Args:
            max_operations_behind: how many operations the device is behind the host at most. The host need not wait for
                an event that is further back. By default it waits for every event.
        """
        before, inside = self.host_waits.copy(), Counter[tuple[str, str]]()
        former, self.max_operations_behind = self.max_operations_behind, max_operations_behind
        try:
            yield inside
        finally:
            self.max_operations_behind = former
            inside.update(self.host_waits - before)

    @contextmanager
    def record_operators(self) -> Iterator[list[str]]:
        """Yield a list of the operators that are launched inside, with numbers, and shapes and dtypes of tensors.

        A device that compiles what a step launches, as XLA does, compiles again if one of these differs.
        """
        former, self._recorded = self._recorded, list[str]()
        try:
            yield self._recorded
        finally:
            self._recorded = former

    def has_passed(self, num_launches: int) -> bool:
        """Return whether the device has surely done its first operations, as it is not so far behind the host."""
        return self.max_operations_behind is not None and self.num_launches - num_launches > self.max_operations_behind

    def require_no_races(self) -> None:
        """Raise the first race that was found where memory was freed.

        Raises:
            RaceError: there is one.
        """
        errors, self.order.errors = self.order.errors, []
        for error in errors:
            raise error

    def wait_on_host(self, kind: str, clock: dict[int, int] | None = None, time_ms: float | None = None) -> None:
        """Count one wait of the host, for what an event has recorded or for all streams."""
        self.host_waits[kind, str(find_line())] += 1
        if clock is not None and time_ms is None:
            time_ms = self.order.time_ms(self.order.current)
        self.order.wait_on_host(clock, time_ms)

    def empty_pinned(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return uninitialized host memory, which asynchronous copies may use."""
        tensor = torch.empty(size, dtype=dtype)
        self._pinned.add(tensor.untyped_storage())
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether a tensor of the host is in memory that asynchronous copies may use."""
        return tensor.untyped_storage() in self._pinned

    def count_bytes(self, num_bytes: int) -> None:
        """Add to the allocated bytes.

        Raises:
            torch.OutOfMemoryError: the device has not so many.
        """
        if num_bytes > 0 and self.allocated_bytes + num_bytes > self.total_bytes:
            raise torch.OutOfMemoryError(f"{NAME} out of memory. Tried to allocate {num_bytes} bytes")
        self.allocated_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)

    def find_allocation(self, host: Tensor) -> Allocation:
        """Return the memory that a tensor's values are in."""
        storage = host.untyped_storage()
        key = storage._cdata  # noqa: SLF001 - the identity of a storage
        found = self._allocations.get(key)
        if found is None:
            found = self._allocations[key] = Allocation(storage, self)
        return found

    # Operators.

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - of any operator
        """Run an operator of which a tensor is on the device, or the result is to be."""
        operator = _describe(func)
        name = operator.name
        if self._recorded is not None:
            self._recorded.append(f"{func} {_describe_values((args, kwargs))}")
        if name in COPIES:
            return self._copy(*(args if name == "copy_" else reversed(args[:2])), **kwargs)
        if name == "_to_copy":
            return self._to_copy(args[0], kwargs)
        self.require_itself(kwargs.get("device"))
        leaves = _find_tensors((*args, *kwargs.values()))
        self._require_one_device(name, leaves)
        if name == "_local_scalar_dense":
            self.launch(leaves, ())
            self.wait_on_host("read a number", self.order.snapshot(self.order.current))
            return func(args[0].host)
        out = self._run_on_host(func, args, kwargs, draws=operator.draws and kwargs.get("generator") is None)
        if name in HOST_SIZED:
            self.launch(leaves, ())
            self.wait_on_host(name, self.order.snapshot(self.order.current))
        written = operator.find_written(args, kwargs)
        if operator.num_results == 1:
            key = operator.result_keys[0]
            result = _wrap(out) if key is None else written[key]
        else:
            result = tuple(
                _wrap(one) if key is None else written[key]
                for one, key in zip(out or (), operator.result_keys, strict=True)
            )
        if not operator.is_view:
            changed = _find_tensors(written.values())
            made = [] if name.startswith("empty") else _find_tensors((result,))
            self.launch([leaf for leaf in leaves if all(leaf is not one for one in changed)], [*changed, *made])
        return result if operator.num_results else None

    def _make(self, func: Any, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401 - any factory
        self.require_itself(kwargs.get("device"))
        out = StandInTensor(self._run_on_host(func, args, kwargs, draws=False))
        self.launch([], [out])
        return out

    def _run_on_host(self, func: Any, args: Any, kwargs: Any, *, draws: bool) -> Any:  # noqa: ANN401 - of any operator
        args, kwargs = _unwrap(args), {key: _unwrap(value) for key, value in kwargs.items() if key != "pin_memory"}
        if draws:
            former = torch.default_generator.get_state()
            torch.default_generator.set_state(self._generator.get_state())
        try:
            with torch.no_grad():
                return func(*args, **kwargs)
        finally:
            if draws:
                self._generator.set_state(torch.default_generator.get_state())
                torch.default_generator.set_state(former)

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:  # noqa: FBT001, FBT002 - torch's signature
        """Copy within the device, or between it and the host."""
        if isinstance(target, StandInTensor) and isinstance(source, StandInTensor):
            target.host.copy_(source.host)
            self.launch([source], [target])
        elif isinstance(target, StandInTensor):
            target.host.copy_(source)
            access = self.launch([], [target])
            self._end_upload(source, access, is_asynchronous=non_blocking)
        else:
            assert isinstance(source, StandInTensor), "one is on the device"
            access = self.launch([source], [])
            if non_blocking and self.is_pinned(target):
                arriving = source.host.to(target.dtype).clone()
                target.fill_(torch.nan if target.is_floating_point() else -1)
                self.order.add_transfer(HostTransfer(access, lambda: cast("None", target.copy_(arriving))))
            else:
                target.copy_(source.host)
                self.wait_on_host("copy to the host", self.order.snapshot(self.order.current))
        return target

    def _to_copy(self, source: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Return a copy of another dtype, layout or device."""
        given = kwargs.get("device")
        to_host = torch.device(given).type == "cpu" if given is not None else not isinstance(source, StandInTensor)
        options = {key: value for key, value in kwargs.items() if key not in {"device", "pin_memory", "non_blocking"}}
        host = source.host if isinstance(source, StandInTensor) else source
        with torch.no_grad():
            copy: Tensor = torch.ops.aten._to_copy.default(host, **options)  # noqa: SLF001 - an operator
        if not to_host:
            self.require_itself(given)
            target = StandInTensor(copy)
            if isinstance(source, StandInTensor):
                self.launch([source], [target])
                return target
            access = self.launch([], [target])
            self._end_upload(host, access, is_asynchronous=bool(kwargs.get("non_blocking")))
            return target
        self.launch([source], [])
        self.wait_on_host("copy to the host", self.order.snapshot(self.order.current))
        return copy

    def _end_upload(self, source: Tensor, access: Access, *, is_asynchronous: bool) -> None:
        """Let the host wait for a copy to the device, unless the device reads pinned memory by itself."""
        if is_asynchronous and source.layout == torch.strided and self.is_pinned(source):
            self.order.add_transfer(HostTransfer(access, _UnchangedSource(source, access.line)))
        else:
            self.wait_on_host("copy from the host", self.order.snapshot(self.order.current))

    def _require_one_device(self, name: str, leaves: list[Tensor]) -> None:
        """Raise for operands on the host; torch lets numbers be there, and indices."""
        on_host = [leaf for leaf in leaves if not isinstance(leaf, StandInTensor)]
        if not on_host or len(on_host) == len(leaves):
            return
        if name in HOST_INDEXED and isinstance(leaves[0], StandInTensor):
            self.wait_on_host("copy from the host", self.order.snapshot(self.order.current))
        elif any(leaf.dim() for leaf in on_host):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {self.device} and "
                f"{on_host[0].device}! ({name})"
            )

    def launch(self, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> Access:
        """Launch an operation on the current stream, which reads and writes the memory of tensors.

        Raises:
            RaceError: it is not ordered with another one.
        """
        self.num_launches += 1
        return self.order.launch(_accesses(reads), _accesses(writes))


class _UnchangedSource:
    """Checks, when the host has waited for a copy to the device, that its source was not changed before."""

    def __init__(self, source: Tensor, line: SourceLine) -> None:
        self.source, self.copy, self.line = source.detach(), source.detach().clone(), line

    def __call__(self) -> None:
        """Compare.

        Raises:
            RaceError: it was.
        """
        if not torch.equal(self.source.nan_to_num(), self.copy.nan_to_num()):  # nan is not equal to itself
            raise RaceError(
                f"the host changed memory that a copy at {self.line} reads, without waiting for it; wait for an event "
                "that was recorded after the copy"
            )


def find_line() -> SourceLine:
    """Return the source line that torch was called from."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - its public form builds the whole stack
    while frame is not None and _is_inner(frame.f_code):
        frame = frame.f_back
    return (
        SourceLine("(a thread of torch)", 0) if frame is None else SourceLine(frame.f_code.co_filename, frame.f_lineno)
    )


@lru_cache(None)
def _is_inner(code: CodeType) -> bool:
    """Return whether code is torch's or the stand-in device's own."""
    return any(part in code.co_filename for part in ("/torch/", "/testing/stand_in", "/contextlib.py"))


@dataclass(frozen=True, slots=True)
class Operator:
    """What a schema tells of an operator.

    Args:
        name: without its namespace and overload.
        draws: whether it draws random numbers.
        is_view: whether its result is a view of an argument.
        written: position, name and key of each argument that it changes.
        result_keys: for each result the key of the argument that it is; None for one that it makes.
    """

    name: str
    draws: bool
    is_view: bool
    written: tuple[tuple[int, str, frozenset[str]], ...]
    result_keys: tuple[frozenset[str] | None, ...]

    @property
    def num_results(self) -> int:
        """How many there are."""
        return len(self.result_keys)

    def find_written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[frozenset[str], Any]:
        """Return the arguments that it changes, by key.

        Raises:
            RuntimeError: it has changed the shape of one.
        """
        if not self.written:
            return {}
        found = {key: args[index] if index < len(args) else kwargs.get(name) for index, name, key in self.written}
        for tensor in _find_tensors(found.values()):
            if isinstance(tensor, StandInTensor) and tensor.host.shape != tensor.shape:
                raise RuntimeError(f"{self.name} changes the shape of a tensor, which the stand-in device cannot")
        return found


@lru_cache(None)
def _describe(func: Any) -> Operator:  # noqa: ANN401 - an operator
    schema, name = func._schema, func._schema.name.partition("::")[2]  # noqa: SLF001 - an operator's only description
    aliases = [one.alias_info for one in schema.returns]
    return Operator(
        name,
        torch.Tag.nondeterministic_seeded in func.tags,
        name in VIEWS or any(alias is not None and not alias.is_write for alias in aliases),
        tuple(
            (index, one.name, frozenset(one.alias_info.before_set))
            for index, one in enumerate(schema.arguments)
            if one.alias_info is not None and one.alias_info.is_write
        ),
        tuple(None if alias is None or not alias.is_write else frozenset(alias.before_set) for alias in aliases),
    )


def _find_tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among values, and in lists of them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [one for one in value if isinstance(one, Tensor)]
    return found


def _describe_values(value: Any) -> Any:  # noqa: ANN401 - any argument of an operator
    """Return arguments of an operator with shapes and dtypes in place of tensors."""
    if isinstance(value, Tensor):
        return f"{value.dtype}{[*value.shape]}"
    if isinstance(value, dict):
        return {key: _describe_values(one) for key, one in value.items()}
    return [*map(_describe_values, value)] if isinstance(value, list | tuple) else value


def _unwrap(value: Any) -> Any:  # noqa: ANN401 - any argument of an operator
    if isinstance(value, StandInTensor):
        return value.host
    if isinstance(value, list | tuple):
        return [_unwrap(one) for one in value]
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value


def _wrap(value: Any) -> Any:  # noqa: ANN401 - any result of an operator
    if isinstance(value, Tensor):
        return StandInTensor(value)
    return [_wrap(one) for one in value] if isinstance(value, list | tuple) else value


def _accesses(tensors: Iterable[Tensor]) -> list[AccessedBytes]:
    found: dict[AccessedBytes, None] = {}
    for one in tensors:
        if isinstance(one, StandInTensor) and one.allocation is not None and one.host.numel():
            size, offset = one.host.element_size(), int(one.host.storage_offset())
            extent = 1 + sum((count - 1) * step for count, step in zip(one.host.shape, one.host.stride(), strict=True))
            found[AccessedBytes(one.allocation.accesses, offset * size, (offset + extent) * size)] = None
    return list(found)


DEVICE = StandInDevice()
"""The only one: torch lets a process register one such device."""
