"""The bounded server as a sequential loop: as asp, but who is too far ahead waits for its weights."""

import copy
from typing import Any


def ssp(model, *, units, journals, parts, loss, optimizer, staleness=10**9, sent=None, pull_every=1):
    """Train ``model``, the servers', by their journals: ``(unit, worker)`` of every push, in order.

    ``units`` names the parameters of each unit, ``parts[worker]`` holds a worker's inputs and targets step by step,
    ``pull_every`` in how many steps it is given weights once, ``sent(worker, name, gradient)`` is what a gradient
    becomes on its way. A worker without samples has no gradient.
    Returns the model, and how many updates of others came between any reading and its own update, at most.
    """
    updates, replicas = optimizer(model.parameters()), {worker: copy.deepcopy(model) for worker in parts}
    batches = {worker: iter(part) for worker, part in parts.items()}
    missing: dict[Any, Any] = {worker: set() for worker in parts}  # its units that are under way
    pushed = {unit: dict.fromkeys(parts, 0) for unit in units}
    held: dict[Any, Any] = {unit: [] for unit in units}
    version, read, oldest = dict.fromkeys(units, 0), {(u, w): 0 for u in units for w in parts}, 0
    left = [list(journal) for journal in journals]
    due: dict[Any, Any] = {worker: set() for worker in parts}  # of these, not applied yet
    while any(left):
        journal = next(j for j in left if j and (not missing[j[0][1]] or j[0][0] in due[j[0][1]]))
        unit, worker = journal.pop(0)
        if not missing[worker]:
            inputs, targets = next(batches[worker])
            replicas[worker].zero_grad(set_to_none=not len(inputs))
            if len(inputs):
                loss(replicas[worker](inputs), targets).backward()
            missing[worker], due[worker] = set(units), set(units)
        served, own = dict(model.named_parameters()), dict(replicas[worker].named_parameters())
        has_gradient = own[units[unit][0]].grad is not None
        for name in units[unit] if has_gradient else ():
            served[name].grad = own[name].grad if sent is None else sent(worker, name, own[name].grad)
        updates.step()
        for name in units[unit]:
            served[name].grad = None
        oldest = max(oldest, version[unit] - read[unit, worker])
        version[unit] += has_gradient
        due[worker].remove(unit)
        pushed[unit][worker] += 1
        if pushed[unit][worker] % pull_every == 0:
            held[unit].append(worker)
        else:
            missing[worker].remove(unit)
        for one in [w for w in held[unit] if pushed[unit][w] - min(pushed[unit].values()) <= staleness]:
            held[unit].remove(one)
            missing[one].remove(unit)
            read[unit, one] = version[unit]
            for name in units[unit]:
                dict(replicas[one].named_parameters())[name].data.copy_(served[name].data)
    return model, oldest
