"""ZeRO with quantized gathers and reductions as a loop over its ranks in turn, as the paper says it."""

import torch

from tests.references.compression import chunks

LEVELS = {"int8": 127, "int4": 7}


def quantize(values, codec):
    """Return what each chunk of a parameter decodes to: multiples of its scale."""
    levels, decoded = LEVELS[codec], []
    for chunk in chunks(values.reshape(-1)):
        scale = chunk.abs().max() / levels
        decoded.append((chunk / (scale if scale > 0 else 1)).round().clamp(-levels, levels) * scale)
    return torch.cat(decoded).view(values.shape)


def send_of_rank(grads_of_micros, codec, *, once):
    """Return what the others decode of a rank's gradients, each microbatch's or their sum."""
    if not codec:
        return [sum(parts) for parts in zip(*grads_of_micros, strict=True)]
    if once:
        return [quantize(sum(parts), codec) for parts in zip(*grads_of_micros, strict=True)]
    return [sum(quantize(part, codec) for part in parts) for parts in zip(*grads_of_micros, strict=True)]


def train(model, optimizer, loss, batches, *, weights="", gradients="", groups=(), once=False):
    """Return the losses; the model has the exact weights afterwards.

    Args:
        model: in float64.
        optimizer: of its parameters.
        loss: a mean over samples.
        batches: for each step the inputs and targets of all microbatches, in order.
        weights: codec of what forward and backward read.
        gradients: codec of what each rank sends.
        groups: for each group of ranks that reduce-scatters, for each rank its microbatches.
        once: whether a rank sends the sum of its microbatches' gradients instead of each.
    """
    params, losses = list(model.parameters()), []
    for micros in batches:
        masters = [param.detach().clone() for param in params]
        for param in params:
            param.data = quantize(param.data, weights) if weights else param.data
        num_samples = sum(len(inputs) for inputs, _ in micros)
        parts = [loss(model(inputs), targets) * (len(inputs) / num_samples) for inputs, targets in micros]
        grads = [torch.autograd.grad(part, params) for part in parts]
        sent = [
            send_of_rank([grads[micro] for micro in own], gradients, once=once) for ranks in groups for own in ranks
        ]
        for param, master, *own in zip(params, masters, *sent, strict=True):
            param.data, param.grad = master, sum(own)
        optimizer.step()
        losses.append(float(sum(parts).detach()))
    return losses
