"""Batch norm under microbatches as a sequential loop: each normalized by itself, running statistics once per batch."""

import torch
from torch import nn


def train(model, *, batches, loss, optimizer):
    """Train ``model`` on batches that are lists of microbatches; return the losses.

    After each batch a module of batch norm sees, in one call, all that its microbatches brought it in the batch.
    """
    norms = [one for one in model.modules() if isinstance(one, nn.modules.batchnorm._BatchNorm) and one.training]
    brought: dict[nn.Module, list[torch.Tensor]] = {norm: [] for norm in norms}
    hooks = [
        norm.register_forward_pre_hook(lambda norm, args: brought[norm].append(args[0].detach())) for norm in norms
    ]
    update, losses = optimizer(model.parameters()), []
    for micros in batches:
        before = [[buffer.clone() for buffer in norm.buffers()] for norm in norms]
        update.zero_grad()
        total = sum(len(x) for x, _ in micros)
        parts = [loss(model(x), y) * (len(x) / total) for x, y in micros if len(x)]
        sum(parts).backward()
        update.step()
        losses.append(float(sum(parts).detach()))
        for norm, kept in zip(norms, before, strict=True):
            seen = torch.cat(brought[norm]).detach()
            for buffer, value in zip(norm.buffers(), kept, strict=True):
                buffer.data.copy_(value)
            with torch.no_grad():
                norm(seen)
            brought[norm].clear()
    for hook in hooks:
        hook.remove()
    return losses
