"""The asynchronous server as a sequential loop: every push is an update, its worker goes on with what came out."""

import copy


def asp(model, *, units, journals, parts, loss, optimizer):
    """Train ``model``, the servers', by their journals: ``(unit, worker)`` of every push, in order.

    ``units`` names the parameters of each unit, ``parts[worker]`` holds a worker's inputs and targets step by step.
    A worker without samples has no gradient, which an optimizer passes over; it gets the weights all the same.
    """
    updates, replicas = optimizer(model.parameters()), {worker: copy.deepcopy(model) for worker in parts}
    batches = {worker: iter(part) for worker, part in parts.items()}
    waiting: dict[int, set[tuple[int, ...]]] = {worker: set() for worker in parts}
    left = [list(journal) for journal in journals]
    while any(left):
        journal = next(j for j in left if j and (not waiting[j[0][1]] or j[0][0] in waiting[j[0][1]]))
        unit, worker = journal.pop(0)
        if not waiting[worker]:  # it has pulled every unit: the next gradient, at what it has pulled
            inputs, targets = next(batches[worker])
            replicas[worker].zero_grad(set_to_none=not len(inputs))
            if len(inputs):
                loss(replicas[worker](inputs), targets).backward()
            waiting[worker] = set(units)
        served, pulled = dict(model.named_parameters()), dict(replicas[worker].named_parameters())
        for name in units[unit]:
            served[name].grad = pulled[name].grad
        updates.step()
        for name in units[unit]:
            served[name].grad = None
            pulled[name].data.copy_(served[name].data)
        waiting[worker].remove(unit)
    return model
