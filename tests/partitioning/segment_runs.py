"""Running a model whole and in segments, to compare losses, gradients and buffers."""

from itertools import pairwise

import torch
from torch.utils._pytree import tree_leaves

from counterpoint.partitioning.seed_hooks import SeedHooks


def seed(path):
    """The random state is a function of the path alone, as it is of (seed, step, microbatch, path) in a run."""
    torch.manual_seed(sum(place * ord(letter) for place, letter in enumerate(path, 1)))


def with_samples(shapes, num_samples):
    """Return the shapes of inputs with another number of samples."""
    return tuple((num_samples, *shape[1:]) for shape in shapes)


def compute_loss(output):
    return sum((leaf.double() ** 2).sum() for leaf in tree_leaves(output) if torch.is_tensor(leaf))


def run_eagerly(model, inputs, *, training):
    """Return loss and gradients of the model itself, seeds attached; its buffers change as in training."""
    model.train(training)
    seeding = SeedHooks(model, seed)
    loss = compute_loss(model(**inputs) if isinstance(inputs, dict) else model(*inputs))
    seeding.remove()
    params = dict(model.named_parameters())
    grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    return loss.detach(), dict(zip(params, grads, strict=True))


def clone_tensors(model) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return copies of the parameters and the buffers by name."""
    params = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
    return params, {name: value.clone() for name, value in model.named_buffers()}


def forward(partitioned, bounds, inputs, params, buffers, *, training):
    """Return, for each segment, itself, what it took (detached from what others made) and what it gave."""
    flat_inputs, shapes = partitioned.flatten_inputs(inputs, training=training)
    values = dict(enumerate(flat_inputs))
    steps = []
    for first, stop in pairwise(bounds):
        part = partitioned.segment(first, stop, training=training)
        taken = [values[at].detach() for at in part.inputs]
        taken = [value.requires_grad_() if value.is_floating_point() else value for value in taken]
        torch.manual_seed(first)  # whatever ran before on this rank must not matter
        gave = part(taken, params, buffers, seed, shapes)
        assert stop == bounds[-1] or len(gave) == len(part.outputs)
        values |= dict(zip(part.outputs, gave, strict=stop != bounds[-1]))
        steps.append((part, taken, gave))
    return steps


def backward(steps, loss):
    """Run autograd from the last segment to the first, adding up what readers of a value say of its gradient."""
    gradients: dict[int, torch.Tensor] = {}
    for part, taken, gave in reversed(steps):
        if loss is not None:
            loss.backward()
        else:
            pairs = [(v, gradients[at]) for at, v in zip(part.outputs, gave, strict=True) if at in gradients]
            pairs = [(value, gradient) for value, gradient in pairs if value.requires_grad]
            torch.autograd.backward([value for value, _ in pairs], [gradient for _, gradient in pairs])
        loss = None
        for at, value in zip(part.inputs, taken, strict=True):
            if value.grad is not None:
                gradients[at] = gradients[at] + value.grad if at in gradients else value.grad


def in_segments(partitioned, model, inputs, bounds=None, *, training=True):
    """Return loss, gradients, buffers and output values of the model run layer by layer."""
    params, buffers = clone_tensors(model)
    bounds = bounds or range(len(partitioned.spec.layers) + 1)
    steps = forward(partitioned, bounds, inputs, params, buffers, training=training)
    shapes = partitioned.flatten_inputs(inputs, training=training).shapes
    loss = compute_loss(partitioned.unflatten_output(steps[-1][2], training=training, input_shapes=shapes))
    if loss.requires_grad:
        backward(steps, loss)
    grads = {name: param.grad for name, param in params.items()}
    return loss.detach(), grads, buffers, [value.detach() for value in steps[-1][2]]


def difference(ours, theirs):
    """Return the largest difference, each relative to its tensor's largest value; a missing gradient is zero.

    A tensor far smaller than the largest of all is measured against a thousandth of that: the gradient of a key's
    bias is zero but for rounding, because softmax does not see it.
    """
    sizes = {name: float(value.abs().max()) for name, value in theirs.items() if value is not None and value.numel()}
    floor = max(sizes.values(), default=0.0) / 1000
    worst = 0.0
    for name, value in theirs.items():
        pair = [tensor for tensor in (ours[name], value) if tensor is not None]
        off = pair[0] - pair[1] if len(pair) == 2 else sum(pair)
        if pair and off.numel() and (largest := float(off.abs().max())):
            worst = max(worst, largest / max(sizes.get(name, 0.0), floor))
    return worst


def worst_of(partitioned, model, inputs, bounds=None, *, training=True):
    """Return the largest relative difference of loss, gradients and buffers between segments and the model."""
    ours = in_segments(partitioned, model, inputs, bounds, training=training)
    loss, grads = run_eagerly(model, inputs, training=training)
    buffers = {name: value.double() for name, value in model.named_buffers()}
    return max(
        float(abs(ours[0] - loss) / abs(loss)),
        difference(ours[1], grads),
        difference({name: value.double() for name, value in ours[2].items()}, buffers),
    )
