"""1-bit Adam (Tang et al., 2021, algorithm 1) as a loop over its workers in turn, with a scale for each 1024 elements."""

import torch

from tests.references.compression import chunks


def one_bit(values):
    """Return the sign of each element times the root mean square of its chunk."""
    return torch.cat(
        [(2.0 * (chunk >= 0).double() - 1.0) * chunk.norm() / len(chunk) ** 0.5 for chunk in chunks(values)]
    )


class Exchange:
    """The momenta of one parameter, and what workers and server have not sent of them."""

    def __init__(self, num_workers):
        self.residuals, self.server_residual = [0.0] * num_workers, 0.0

    def __call__(self, momenta):
        sent = []
        for worker, momentum in enumerate(momenta):
            total = momentum.reshape(-1) + self.residuals[worker]
            sent.append(one_bit(total))
            self.residuals[worker] = total - sent[-1]
        total = sum(sent) / len(sent) + self.server_residual
        result = one_bit(total)
        self.server_residual = total - result
        return result.view(momenta[0].shape)


def train(model, loss, batches, *, num_workers, freeze_step, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
    """Return the losses; each worker has an equal part of each batch, whose samples are in order."""
    params, losses = list(model.parameters()), []
    momenta, squares = ([torch.zeros_like(param) for param in params] for _ in range(2))
    exchanges = [Exchange(num_workers) for _ in params]
    for number, (inputs, targets) in enumerate(batches):
        parts = [loss(model(x), y) for x, y in zip(inputs.chunk(num_workers), targets.chunk(num_workers), strict=True)]
        grads = zip(*(torch.autograd.grad(part, params) for part in parts), strict=True)
        for place, (param, own) in enumerate(zip(params, grads, strict=True)):
            if number < freeze_step:
                mean = sum(own) / num_workers
                momenta[place] = betas[0] * momenta[place] + (1 - betas[0]) * mean
                squares[place] = betas[1] * squares[place] + (1 - betas[1]) * mean**2
            else:
                momenta[place] = exchanges[place]([betas[0] * momenta[place] + (1 - betas[0]) * one for one in own])
            update = momenta[place] / (squares[place].sqrt() + eps) + weight_decay * param.detach()
            param.data -= lr * update
        losses.append(float(sum(parts).detach()) / num_workers)
    return losses
