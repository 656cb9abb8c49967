"""Downpour SGD of one worker as a sequential loop, after the appendix of Dean et al., NIPS 2012."""

import copy


def downpour(model, batches, *, n_push, n_fetch, alpha, loss, optimizer, behind=0):
    """Train ``model``, the servers', from one replica; ``alpha`` is the replica's own step between two fetches.

    What is fetched is used ``behind`` steps later.
    """
    updates, replica, fetched = optimizer(model.parameters()), copy.deepcopy(model), {}
    accrued = [0.0 for _ in model.parameters()]
    for step, (inputs, targets) in enumerate(batches):
        if step and step % n_fetch == 0:
            fetched[step + behind] = copy.deepcopy(model.state_dict())
        replica.load_state_dict(fetched.pop(step, replica.state_dict()))
        replica.zero_grad()
        loss(replica(inputs), targets).backward()
        gradients = [parameter.grad for parameter in replica.parameters()]
        accrued = [total + gradient for total, gradient in zip(accrued, gradients, strict=True)]
        for parameter in replica.parameters():
            parameter.data -= alpha * parameter.grad
        if (step + 1) % n_push == 0:
            for parameter, gradient in zip(model.parameters(), accrued, strict=True):
                parameter.grad = gradient
            updates.step()
            accrued = [0.0 for _ in accrued]
    return model
