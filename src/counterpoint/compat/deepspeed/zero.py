"""``zero.Init`` and ``zero.GatheredParameters``, as far as weights that are whole on every rank need them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from counterpoint.compat.deepspeed.start import open_fabric
from counterpoint.errors import PlanError
from counterpoint.launchers.environment import detect


@contextmanager
def Init(*_args: object, enabled: bool = True, **_options: object) -> Iterator[None]:  # noqa: N802 - DeepSpeed's name
    """Make a model inside; on one rank there is nothing to shard.

    Args:
        enabled: False for a context that does nothing.

    Raises:
        PlanError: there are several ranks.
    """
    environment = detect()
    if enabled and environment is not None and environment.world_size > 1:
        raise PlanError(
            f"zero.Init on {environment.world_size} ranks would shard weights while the model is made, but "
            "initialize() keeps them whole on each rank; pass enabled=False, or train with "
            "cp.parallelize(strategy='zero3')"
        )
    yield


@contextmanager
def GatheredParameters(  # noqa: N802 - DeepSpeed's name
    params: Iterable[Tensor] | Tensor = (),
    modifier_rank: int | None = None,
    fwd_module: object = None,
    enabled: bool = True,  # noqa: FBT001, FBT002 - DeepSpeed's
) -> Iterator[None]:
    """Read or change parameters inside: at stages 0, 1 and 2 every rank has all of them.

    With ``modifier_rank`` all ranks enter it, and leave it with the values of that rank, as at stage 3 of DeepSpeed.
    Without, what is changed inside is to be changed on all ranks: the next ``step()`` compares checksums of all
    weights, also if nothing was changed.

    Args:
        params: the parameters, or one.
        modifier_rank: the rank whose values all ranks get at the end.
        fwd_module: not used.
        enabled: False for a context that does nothing.

    Raises:
        PlanError: there is no such rank.
    """
    del fwd_module
    tensors = [params] if isinstance(params, Tensor) else list(params)
    environment = detect()
    num_ranks = 1 if environment is None else environment.world_size
    if modifier_rank is not None and not 0 <= modifier_rank < num_ranks:
        raise PlanError(
            f"GatheredParameters has modifier_rank={modifier_rank}, but there are {num_ranks} ranks; give one from 0 "
            f"to {num_ranks - 1}, or None"
        )
    yield
    if enabled and num_ranks > 1:
        if modifier_rank is None:
            increment_version(tensors)  # torch has not counted what was changed by way of .data
        else:
            _send_values(tensors, modifier_rank)


@torch.no_grad()
def _send_values(tensors: Sequence[Tensor], root: int) -> None:
    """Copy the values of one rank to all."""
    fabric = open_fabric()
    ranks = tuple(range(fabric.num_ranks))
    for index, tensor in enumerate(tensors):
        flat = tensor.detach().clone(memory_format=torch.contiguous_format)
        fabric.broadcast(f"parameter {index} of GatheredParameters", flat, ranks, root).wait()
        tensor.copy_(flat)
