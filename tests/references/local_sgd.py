"""Local SGD as a sequential loop: replicas update apart, and average their weights after every so many steps."""

import copy


def local_sgd(model, *, batches, weigh, loss, optimizer, every, first=0, clip=None):
    """Train a copy of ``model`` for each replica; return their mean, and the mean loss of every step.

    ``batches[step][replica]`` is a replica's inputs and targets; ``weigh(step)`` is each one's part of all samples. A
    replica without samples updates nothing in that step, and counts in the means all the same. In the ``first`` steps
    the gradients are added up, so that all replicas make the update of the whole batch.
    """
    replicas = [copy.deepcopy(model) for _ in batches[0]]
    updates = [optimizer(replica.parameters()) for replica in replicas]
    losses = []
    for step, parts in enumerate(batches):
        weights, total = weigh(step), 0.0
        for replica, update, weight, (inputs, targets) in zip(replicas, updates, weights, parts, strict=True):
            update.zero_grad()
            if len(inputs):
                result = loss(replica(inputs), targets)
                (result * weight if step < first else result).backward()
                total += float(result.detach()) * weight
        losses.append(total)
        if step < first:
            sum_gradients(replicas)
        for replica, update, (inputs, _) in zip(replicas, updates, parts, strict=True):
            if len(inputs) or step < first:
                clip_gradients(replica, clip)
                update.step()
        if step >= first and (step + 1 - first) % every == 0:
            for params in zip(*(replica.parameters() for replica in replicas), strict=True):
                mean = sum(param.detach() for param in params) / len(params)
                for param in params:
                    param.data.copy_(mean)
    return mean_weights(replicas), losses


def sum_gradients(replicas):
    for params in zip(*(replica.parameters() for replica in replicas), strict=True):
        total = sum(param.grad for param in params if param.grad is not None)
        for param in params:
            param.grad = total.clone()


def clip_gradients(replica, norm):
    if norm is not None:
        result = sum(float(param.grad.square().sum()) for param in replica.parameters()) ** 0.5
        for param in replica.parameters():
            param.grad.mul_(min(1.0, norm / (result + 1e-6)))


def mean_weights(replicas):
    named = [dict(replica.named_parameters()) for replica in replicas]
    return {name: sum(one[name].detach() for one in named) / len(named) for name in named[0]}
