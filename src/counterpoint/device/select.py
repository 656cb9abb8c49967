"""Which device a run computes on: from words, from a model, and from what there is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn, optim

from counterpoint.device.accelerator import Accelerator
from counterpoint.device.cuda import CudaAccelerator, count_gpus, describe_absence
from counterpoint.device.host import HostAccelerator
from counterpoint.errors import PlanError

CPU = torch.device("cpu")
_COMPUTES_NOTHING: ContextVar[bool] = ContextVar("_COMPUTES_NOTHING", default=False)
"""Whether a command only looks at a model, so that it may have no values and its device may be absent."""
DEVICE_TEXT = re.compile(r"auto|[a-z_]+(:[0-9]+)?")
DeviceArgument: TypeAlias = str | torch.device | Accelerator
"""``cpu``, ``cuda``, ``cuda:1``, or ``auto`` for a GPU if there is one."""


@dataclass(frozen=True, slots=True)
class LocalRank:
    """A process among those of its host.

    Args:
        number: from 0.
        count: how many there are.
    """

    number: int = 0
    count: int = 1


def select_accelerator(argument: DeviceArgument, local_rank: LocalRank) -> Accelerator:
    """Return the accelerator that a process computes on.

    Args:
        argument: what the user asked for.
        local_rank: takes the GPU of its number, if none is named.

    Raises:
        PlanError: there is no such device, or not enough of them.
    """
    if isinstance(argument, Accelerator):
        return argument
    text = str(argument)
    if not DEVICE_TEXT.fullmatch(text):
        raise PlanError(f"device={argument!r} is not a device; give 'cpu', 'cuda', 'cuda:1' or 'auto'")
    if text == "auto":
        return CudaAccelerator(choose_gpu(local_rank)) if count_gpus() else HostAccelerator()
    if text == "cuda":
        return CudaAccelerator(choose_gpu(local_rank))
    try:
        device = torch.device(text)
    except RuntimeError:
        raise PlanError(
            f"device={text!r} is not a device that torch knows; give 'cpu', 'cuda', 'cuda:1' or 'auto'"
        ) from None
    return accelerator_for(device)


def choose_gpu(local_rank: LocalRank) -> int:
    """Return the GPU of a process among those of its host.

    A process that sees one GPU takes it: the launcher may have given each its own, as Ray and Slurm's --gpus-per-task
    do. If it is the same one for several processes, they find that when they compare what they compute on.

    Raises:
        PlanError: there are fewer of them than processes.
    """
    num_gpus = require_gpus()
    if num_gpus == 1:
        return 0
    if local_rank.count > num_gpus:
        raise PlanError(
            f"{local_rank.count} processes of this host each need a GPU, but this one, local rank "
            f"{local_rank.number}, sees {num_gpus}; start at most {num_gpus} on this host, or let CUDA_VISIBLE_DEVICES "
            "name as many GPUs as there are processes"
        )
    return local_rank.number


def require_gpus() -> int:
    """Return how many GPUs there are.

    Raises:
        PlanError: none.
    """
    num_gpus = count_gpus()
    if not num_gpus:
        raise PlanError(
            f"device='cuda' needs a GPU, but {describe_absence()}; give device='cpu', or 'auto' for a GPU only where "
            "there is one"
        )
    return num_gpus


@contextmanager
def computing_nothing() -> Iterator[None]:
    """Take models on torch's meta device, and devices that are not there, as long as nothing is computed."""
    token = _COMPUTES_NOTHING.set(True)
    try:
        yield
    finally:
        _COMPUTES_NOTHING.reset(token)


def computes_nothing() -> bool:
    """Return whether this is inside :func:`computing_nothing`."""
    return _COMPUTES_NOTHING.get()


def accelerator_for(device: torch.device) -> Accelerator:
    """Return the accelerator of a device.

    Raises:
        PlanError: the device does not exist, or is of a kind that training does not know.
    """
    if device.type == "cpu" or (device.type == "meta" and computes_nothing()):
        return HostAccelerator(device)
    if device.type == "cuda":
        num_gpus = require_gpus()
        if (device.index or 0) >= num_gpus:
            raise PlanError(
                f"device={str(device)!r} does not exist: this process sees {num_gpus} "
                f"{'GPU, cuda:0' if num_gpus == 1 else f'GPUs, cuda:0 to cuda:{num_gpus - 1}'}; give one of them, or "
                "change CUDA_VISIBLE_DEVICES"
            )
        return CudaAccelerator(device.index or 0)
    module = getattr(torch, device.type, None)
    make_accelerator = getattr(module, "make_accelerator", None)
    if make_accelerator is None:
        raise PlanError(
            f"device={str(device)!r} is of a kind that Counterpoint cannot train on; give 'cpu' or 'cuda', or an "
            "Accelerator for it"
        )
    made: Accelerator = make_accelerator(device)
    return made


def model_device(model: nn.Module) -> torch.device:
    """Return the device of a model's parameters; the CPU for a model without any.

    Raises:
        PlanError: they are on several devices, or on torch's meta device.

    Example:
        >>> model_device(nn.Linear(2, 1))
        device(type='cpu')
    """
    require_param_values(model)
    return require_one_device((*model.named_parameters(), *model.named_buffers()))


def require_param_values(model: nn.Module) -> None:
    """Check that a model's parameters have values.

    Raises:
        PlanError: the model is on torch's meta device.
    """
    params = [*model.parameters()]
    if params and all(param.is_meta for param in params) and not computes_nothing():
        raise PlanError(
            f"the parameters of {type(model).__name__} are on the meta device, where tensors have shapes, but no "
            "values to train from; build the model on the CPU, or call model.to_empty(device='cpu') and then "
            "initialize its parameters and buffers, or load them with load_state_dict(...)"
        )


def require_one_device(named_tensors: Iterable[tuple[str, Tensor]]) -> torch.device:
    """Return the device of tensors; the CPU if there is none.

    Raises:
        PlanError: they are on several devices.
    """
    first_on: dict[torch.device, str] = {}
    for name, tensor in named_tensors:
        first_on.setdefault(tensor.device, name)
    if len(first_on) > 1:
        found = ", ".join(f"{name} on {device}" for device, name in first_on.items())
        raise PlanError(
            f"the model's parameters and buffers are on {len(first_on)} devices: {found}; move the whole model to one "
            "with model.to(device), and let pipeline(n) divide it into stages"
        )
    return next(iter(first_on), CPU)


def require_device(model: nn.Module, device: torch.device) -> None:
    """Raise unless a model is on the device that its run was prepared for.

    Raises:
        PlanError: it is on another, or on several.
    """
    found = model_device(model)
    if found != device and any(True for _ in model.parameters()):
        raise PlanError(
            f"the model is on {found}, but the run was prepared for {device}; do not move the model afterwards, or "
            f"give device={str(found)!r}"
        )


def require_transport(device: torch.device, num_ranks: int, *, takes_device_tensors: bool, missing: str = "") -> None:
    """Raise if ranks would have to exchange tensors on a device by a transport between memories of hosts.

    Args:
        device: of the model.
        num_ranks: of the job.
        takes_device_tensors: whether the transport does.
        missing: what other transports need and there is not; empty for nothing.

    Raises:
        PlanError: they would.
    """
    if device.type != "cpu" and num_ranks > 1 and not takes_device_tensors:
        remedy = (
            "choose transport='process_group' (--transport process_group of the command), which takes those of devices"
        )
        if missing:
            remedy = "install a build of torch with it on all hosts"
        raise PlanError(
            f"the model is on {device}, but the {num_ranks} processes of this job exchange tensors in host memory "
            f"only{missing and f', as {missing}'}; {remedy}, move the model with model.cpu(), or train all ranks in "
            "one process, without a launcher"
        )


def move_model(modules: Iterable[nn.Module], optimizers: Iterable[optim.Optimizer], device: torch.device) -> None:
    """Move parameters, buffers and the state of optimizers to a device, in place.

    Parameters stay the same objects, so that optimizers, and modules that share one, keep it.

    Raises:
        PlanError: parameters have no values.
    """
    modules = [*modules]
    for module in modules:
        require_param_values(module)
    for part in (part for module in modules for part in module.modules()):
        for param in part.parameters(recurse=False):
            if param.device != device:
                _move_param(param, device)
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = buffer.to(device)  # noqa: SLF001 - as torch's own Module.to() does
    for owner, state in (item for optimizer in optimizers for item in optimizer.state.items()):
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == owner.shape:
                state[key] = value.to(device)


def _move_param(param: nn.Parameter, device: torch.device) -> None:
    grad, param.grad = param.grad, None
    moved = nn.Parameter(param.detach().to(device), requires_grad=param.requires_grad)
    if torch._has_compatible_shallow_copy_type(param, moved):  # noqa: SLF001 - as torch's own Module.to() does
        param.data = moved.data
    else:
        torch.utils.swap_tensors(param, moved)  # type: ignore[no-untyped-call]
    param.grad = None if grad is None else grad.to(device)
