"""Pipelines without a flush as one sequential loop: every stage reads the version of its weights that its rule says."""

import math
from typing import Any

import torch
from torch import nn
from torch.func import functional_call


def async_pipeline(model, *, updates, batches, loss, read, interval, clip=math.inf, weigh=len):
    """Train ``model`` from one flush to the next; return its parameters and the loss of every microbatch.

    Args:
        updates: for each stage its parameters by name, and the optimizer on them.
        batches: one for each microbatch.
        read: from stage and microbatch to the number of updates that the weights it meets have seen.
        interval: from stage to the number of microbatches that it updates after, unless the loss of one is not finite.
        clip: the norm to which each stage's gradient is scaled down.
        weigh: from the targets of a microbatch to its weight in an update: its samples, or tokens.
    """
    history = [[{name: param.detach().clone() for name, param in params.items()}] for params, _ in updates]
    waiting: dict[int, list[Any]] = {s: [] for s in range(len(updates))}
    losses = []
    for micro, (inputs, targets) in enumerate(batches):
        used = {name: value for s, past in enumerate(history) for name, value in past[read(s, micro)].items()}
        leaves = {name: value.clone().requires_grad_() for name, value in used.items()}
        result = loss(functional_call(model, leaves, (inputs,)), targets)
        gradients = dict(zip(leaves, torch.autograd.grad(result, list(leaves.values())), strict=True))
        losses.append(float(result.detach()) if len(targets) else 0.0)
        for s, (params, update) in enumerate(updates):
            waiting[s].append((weigh(targets), gradients))
            if (micro + 1) % interval(s) == 0:
                seen = [(count, given) for count, given in waiting[s] if count]
                total = sum(count for count, _ in seen)
                for name, param in params.items():
                    param.grad = sum((count / total * given[name] for count, given in seen), torch.zeros_like(param))
                if seen and all(map(math.isfinite, losses[-interval(s) :])):
                    nn.utils.clip_grad_norm_(params.values(), clip)
                    update.step()
                history[s].append({name: param.detach().clone() for name, param in params.items()})
                waiting[s].clear()
    return {name: param.detach() for name, param in model.named_parameters()}, losses


def ahead(replicas):
    """How many microbatches of its own each replica of a stage has in flight besides the one it goes back on."""
    return [(sum(replicas) - 1 - sum(replicas[:s])) // count for s, count in enumerate(replicas)]


def stashing(replicas):
    """Weight stashing: a forward meets its stage's newest weights; stage s of n sees gradients n-s-1 updates late."""
    return lambda s, micro: max(0, micro // replicas[s] - ahead(replicas)[s])


def vertical_sync(replicas):
    """Vertical sync: all stages use weights that have seen what those of the first one had when it came there."""
    return lambda s, micro: max(0, micro // replicas[0] - ahead(replicas)[0]) * replicas[0] // replicas[s]


def double_buffer(num_micros):
    """2BW: the weights before the newest ones, on all stages."""
    return lambda s, micro: max(0, micro // num_micros - 1)
