"""Asynchronous elastic averaging as a sequential loop (Zhang et al. 2015, algorithm 1): meetings in a given order."""

import copy


def easgd(model, *, units, journals, parts, loss, optimizer, alpha, tau):
    """Train workers from ``model`` and draw them to a center, in the order of ``journals``: ``(unit, worker)`` each.

    ``parts[worker]`` holds its inputs and targets step by step. It meets the center in its steps tau, 2 tau and so on,
    with the weights at which it has taken the gradient of that step. Returns the center and the workers.
    """
    center, workers = copy.deepcopy(model), {worker: copy.deepcopy(model) for worker in parts}
    updates = {worker: optimizer(own.parameters()) for worker, own in workers.items()}
    done, left = dict.fromkeys(parts, 0), [list(journal) for journal in journals]

    def run_until(worker, until):
        """Take the worker's steps up to its next meeting, whose gradient is there then."""
        while done[worker] < until:
            inputs, targets = parts[worker][done[worker]]
            workers[worker].zero_grad()
            loss(workers[worker](inputs), targets).backward()
            done[worker] += 1
            if done[worker] % tau:
                updates[worker].step()

    meeting: dict[int, set[tuple[int, ...]]] = {worker: set() for worker in parts}
    while any(left):
        journal = next(j for j in left if j and (not meeting[j[0][1]] or j[0][0] in meeting[j[0][1]]))
        unit, worker = journal.pop(0)
        if not meeting[worker]:
            run_until(worker, (done[worker] // tau + 1) * tau)
            meeting[worker] = set(units)
        own, kept = dict(workers[worker].named_parameters()), dict(center.named_parameters())
        for name in units[unit]:
            step = (own[name].data - kept[name].data) * alpha
            kept[name].data += step
            own[name].data -= step
        meeting[worker].remove(unit)
        if not meeting[worker]:
            updates[worker].step()
    for worker, part in parts.items():
        run_until(worker, len(part))
    return center, workers
