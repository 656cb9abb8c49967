"""Pipelines without a flush as one sequential loop: every stage reads the version of its weights that its rule says."""

from typing import Any

import torch
from torch.func import functional_call


def stream(model, *, stages, replicas, batches, loss, optimizer, read, interval):
    """Train ``model`` on one segment between two flushes; return its parameters and the loss of every microbatch.

    Args:
        stages: the names of each stage's parameters.
        replicas: of each stage, which updates after so many microbatches times ``interval(stage)``.
        batches: one for each microbatch.
        read: from stage and microbatch to the number of updates that the weights it meets have seen.
    """
    params = dict(model.named_parameters())
    updates = [optimizer([params[name] for name in names]) for names in stages]
    history = [[{name: params[name].detach().clone() for name in names}] for names in stages]
    waiting: dict[int, list[Any]] = {s: [] for s in range(len(stages))}
    losses = []
    for micro, (inputs, targets) in enumerate(batches):
        used = {name: value for s, past in enumerate(history) for name, value in past[read(s, micro)].items()}
        leaves = {name: value.clone().requires_grad_() for name, value in used.items()}
        found = loss(functional_call(model, leaves, (inputs,)), targets)
        gradients = dict(zip(leaves, torch.autograd.grad(found, list(leaves.values())), strict=True))
        losses.append(float(found.detach()))
        for s, names in enumerate(stages):
            waiting[s].append((len(inputs), gradients))
            if (micro + 1) % (replicas[s] * interval(s)) == 0:
                total = sum(count for count, _ in waiting[s])
                for name in names:
                    params[name].grad = sum(count / total * found[name] for count, found in waiting[s])
                updates[s].step()
                history[s].append({name: params[name].detach().clone() for name in names})
                waiting[s].clear()
    return {name: param.detach() for name, param in params.items()}, losses


def stashed(replicas):
    """Weight stashing: a stage's forward meets its newest weights, as many updates old as it is ahead."""
    ahead = [(sum(replicas) - 1 - sum(replicas[:s])) // count for s, count in enumerate(replicas)]
    return lambda s, micro: max(0, micro // replicas[s] - ahead[s])


def synced(replicas):
    """Vertical sync: all stages use weights that have seen what those of the first one had when it came there."""
    ahead = (sum(replicas) - 1) // replicas[0]
    return lambda s, micro: max(0, micro // replicas[0] - ahead) * replicas[0] // replicas[s]


def double(num_micros):
    """2BW: the weights before the newest ones, on all stages."""
    return lambda s, micro: max(0, micro // num_micros - 1)
