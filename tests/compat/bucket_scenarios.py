"""What happens to the memory of DDP's buckets, and to memory that must stay where it is."""

import gc
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from counterpoint.fabric.torch_backend.ddp_buckets import MIN_BYTES
from counterpoint.rpc import segments

WIDTH = 300
BUCKET_BYTES = 4 * WIDTH * (WIDTH + 1)
assert BUCKET_BYTES > MIN_BYTES


def replicas(**settings):
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Linear(WIDTH, WIDTH), gradient_as_bucket_view=True, **settings)


def backward(module, rank, num_steps=4):
    """Return the gradient of the weight after some steps."""
    draw = torch.Generator().manual_seed(rank)
    for _ in range(num_steps):
        module.zero_grad(set_to_none=True)
        module(torch.randn(2, WIDTH, generator=draw)).square().sum().backward()
    return module.module.weight.grad


def is_shared(tensor):
    """Whether it lies in memory that the ranks share."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    spans = [line.split()[0].split("-") for line in lines if "memfd:counterpoint tensors" in line]
    return any(int(start, 16) <= tensor.data_ptr() < int(stop, 16) for start, stop in spans)


def moves_to_shared_memory(rank, _):
    """Return whether the bucket is shared after each step, and the sum of the gradients of a last one."""
    module = replicas()
    result = [is_shared(backward(module, rank, 1)) for _ in range(4)]
    return result, backward(module, rank).double().sum().item()


def reuses_memory(rank, _):
    """One model after the other: return where each has its gradients, as an order of their first appearance."""
    places = []
    for _ in range(3):
        module = replicas()
        places.append(backward(module, rank).data_ptr())
        del module
        gc.collect()
    return [places.index(place) for place in places]


def outlives_group(rank, _):
    """A model goes on being read when its group is gone, and does not trouble what is allocated after it."""
    module = replicas()
    grad = backward(module, rank)
    before = grad.clone()
    dist.destroy_process_group()
    same = torch.equal(module.module.weight.grad, before)
    del module, grad
    gc.collect()
    others = [torch.full((WIDTH, WIDTH), float(index)) for index in range(50)]
    return same, all(bool((other == index).all()) for index, other in enumerate(others))


def keeps_addresses(rank, _):
    """An array of the gradient, taken before it moves, is memory of its own until the model is gone."""
    module = replicas()
    array = backward(module, rank, 2).detach().numpy()
    backward(module, rank, 2)
    others = [torch.ones(WIDTH, WIDTH) for _ in range(50)]
    array[:] = 7.0
    return all(bool((other == 1).all()) for other in others), float(array.min()), is_shared(backward(module, rank, 1))


def keeps_python_memory(rank, size):
    """What Python hands over stays where it is: an array that shares its memory sees the sum."""
    tensor = torch.ones(WIDTH, WIDTH)
    array = tensor.numpy()
    for _ in range(3):
        dist.all_reduce(tensor)
    return not is_shared(tensor), float(array.max()) == size**3


def runs_out_of_memory(rank, _):
    """Return whether the bucket is shared, and the sum, where there is no memory to share."""
    module = replicas(process_group=dist.new_group())
    available, segments.available_bytes = segments.available_bytes, lambda root=Path("/"): 0
    try:
        backward(module, rank)
        return is_shared(backward(module, rank)), module.module.weight.grad.double().sum().item()
    finally:
        segments.available_bytes = available


SCENARIOS = [
    moves_to_shared_memory,
    reuses_memory,
    keeps_addresses,
    keeps_python_memory,
    runs_out_of_memory,
    outlives_group,
]


def run_all(rank, size):
    return {scenario.__name__: scenario(rank, size) for scenario in SCENARIOS}
