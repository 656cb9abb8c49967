"""Programs that train as torch's own examples do; what each comes to is compared with the same program on gloo."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

SMALL_BUCKETS_MB = 0.001


def make_model():
    torch.manual_seed(0)
    layers = [nn.BatchNorm1d(12), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)]
    return nn.Sequential(*layers)


def fit(module, optimizer, rank, num_steps=4):
    """Return the losses; every rank has other data."""
    draw, losses = torch.Generator().manual_seed(rank + 1), []
    for _ in range(num_steps):
        optimizer.zero_grad()
        x, y = torch.randn(8, 12, generator=draw), torch.randint(0, 3, (8,), generator=draw)
        loss = nn.functional.cross_entropy(module(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def losses_and_params(module, losses):
    full = [param.full_tensor() if hasattr(param, "full_tensor") else param for param in module.parameters()]
    return losses, [param.detach().flatten().tolist() for param in full]


def ddp(rank, _, **settings):
    replicas = DistributedDataParallel(make_model(), bucket_cap_mb=SMALL_BUCKETS_MB, **settings)
    return losses_and_params(
        replicas, fit(replicas, torch.optim.SGD(replicas.parameters(), lr=0.1, momentum=0.9), rank)
    )


def ddp_views(rank, size):
    return ddp(rank, size, gradient_as_bucket_view=True, static_graph=True)


def ddp_on_half(rank, _):
    """With a communication hook, and gradients accumulated over two batches."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    replicas = DistributedDataParallel(make_model())
    replicas.register_comm_hook(None, default_hooks.fp16_compress_hook)
    with replicas.no_sync():
        replicas(torch.randn(4, 12, generator=torch.Generator().manual_seed(rank))).sum().backward()
    return losses_and_params(replicas, fit(replicas, torch.optim.Adam(replicas.parameters(), lr=0.01), rank))


def zero(rank, _):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of torch's own when it is imported

    replicas = DistributedDataParallel(make_model())
    optimizer = ZeroRedundancyOptimizer(replicas.parameters(), torch.optim.Adam, lr=0.01)
    return losses_and_params(replicas, fit(replicas, optimizer, rank))


def fsdp(rank, size, mesh=None):
    module = make_model()
    for layer in module:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh or init_device_mesh("cpu", (size,)))
    fully_shard(module, mesh=mesh or init_device_mesh("cpu", (size,)))
    return losses_and_params(module, fit(module, torch.optim.Adam(module.parameters(), lr=0.01), rank))


def hybrid(rank, size):
    """Replicas of shards: sub-groups of a mesh."""
    return fsdp(rank, size, init_device_mesh("cpu", (size, 1), mesh_dim_names=("replicate", "shard")))


PROGRAMS: list[Callable[..., object]] = [ddp, ddp_views, ddp_on_half, zero, fsdp, hybrid]


def run_all(rank, size):
    result = {}
    for program in PROGRAMS:
        result[program.__name__] = program(rank, size)
        dist.barrier()
    return result
