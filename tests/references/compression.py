"""Data parallelism with lossy sums as a sequential loop: every worker in turn, in float64, as the papers say it."""

import math

import torch

CHUNK = 1024


def chunks(flat):
    return [flat[at : at + CHUNK] for at in range(0, len(flat), CHUNK)]


def int8(flat, _):
    """To the nearest of 255 steps between the largest of a chunk and its opposite."""
    actual = []
    for chunk in chunks(flat):
        scale = float(chunk.abs().max()) / 127
        actual.append((chunk / (scale or 1)).round().clamp(-127, 127) * scale)
    return torch.cat(actual)


def twobit(flat, threshold):
    """MXNet: the threshold, its opposite, or nothing."""
    return threshold * ((flat >= threshold).double() - (flat <= -threshold).double())


def sign(flat, _):
    """EF-SGD: the sign times the mean magnitude of a chunk."""
    return torch.cat([(2.0 * (chunk >= 0).double() - 1.0) * chunk.abs().mean() for chunk in chunks(flat)])


def topk(flat, part):
    """The largest ones as they are, nothing for all others."""
    kept = torch.argsort(flat.abs(), descending=True)[: math.ceil(len(flat) * part)]
    return torch.zeros_like(flat).index_copy(0, kept, flat[kept])


ONE_BY_ONE = {"int8": int8, "twobit": twobit, "sign": sign, "topk": topk}
NARROW = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Codec:
    """One parameter's sum over the workers, and what each of them has not sent."""

    def __init__(self, name, number=None):
        self.name, self.number = name, number
        self.residuals = {}
        self.columns = None

    def __call__(self, gradients):
        totals = [gradient + self.residuals.get(at, 0.0) for at, gradient in enumerate(gradients)]
        result, sent = self.powersgd(totals) if self.name == "powersgd" else self.compress_all(totals)
        self.residuals = {at: total - own for at, (total, own) in enumerate(zip(totals, sent, strict=True))}
        return result

    def compress_all(self, totals):
        """Every worker's in turn; casts are added up in float32, and the sum is rounded to the narrow dtype."""
        if self.name in NARROW:
            sent = [total.to(NARROW[self.name]).float() for total in totals]
            return sum(sent).to(NARROW[self.name]).double(), [one.double() for one in sent]
        code = ONE_BY_ONE[self.name]
        sent = [code(total.reshape(-1), self.number).view(total.shape) for total in totals]
        return sum(sent), sent

    def powersgd(self, totals):
        """Vogels et al., algorithm 1, with sums instead of means."""
        shape = totals[0].shape
        rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (0, 0)
        rank = min(self.number, rows, columns)
        if rank * (rows + columns) >= rows * columns:
            return sum(totals), totals
        matrices = [total.view(rows, columns) for total in totals]
        if self.columns is None:
            self.columns = torch.randn(columns, rank, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        basis, upper = torch.linalg.qr(sum(matrix @ self.columns for matrix in matrices))
        basis = torch.where(upper.diagonal().abs() > 1e-14 * upper.abs().max(), basis, 0.0)
        factors = [matrix.t() @ basis for matrix in matrices]
        summed = sum(factors)
        fresh = torch.randn(columns, rank, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.columns = torch.where(summed.norm(dim=0) > 0, summed, fresh)
        return (basis @ summed.t()).view(shape), [(basis @ factor.t()).view(shape) for factor in factors]


def adasum(first, second):
    """Maleki et al.: what is parallel is averaged, what is orthogonal is added."""
    product = float((first * second).sum())
    shares = [1 - product / (2 * float((one * one).sum())) if one.any() else 1.0 for one in (first, second)]
    return shares[0] * first + shares[1] * second


def adasum_tree(vectors):
    """In pairs, then the results in pairs; an odd one waits."""
    while len(vectors) > 1:
        pairs = [adasum(*vectors[at : at + 2]) for at in range(0, len(vectors) - 1, 2)]
        vectors = pairs + vectors[2 * len(pairs) :]
    return vectors[0]


def train(model, *, batches, loss, optimizer, combine, scaled=True):
    """Train with ``combine[name](gradients)`` in place of the sum; return the loss of every step.

    Args:
        batches: for every step the inputs and targets of every worker.
        combine: for every parameter from the workers' gradients to the one that is applied.
        scaled: whether a gradient is a worker's part of the mean over all samples, or the mean over its own; then
            workers without samples are left out.
    """
    updates, losses = optimizer(model.parameters()), []
    for parts in batches:
        count = sum(len(inputs) for inputs, _ in parts)
        gradients: dict[str, list[torch.Tensor]] = {name: [] for name in combine}
        total = 0.0
        for inputs, targets in parts:
            model.zero_grad()
            if len(inputs):
                value = loss(model(inputs), targets)
                (value * (len(inputs) / count if scaled else 1)).backward()
                total += float(value.detach()) * len(inputs)
            for name, param in model.named_parameters() if scaled or len(inputs) else ():
                gradients[name].append(torch.zeros_like(param) if param.grad is None else param.grad.clone())
        for name, param in model.named_parameters():
            param.grad = combine[name](gradients[name])
        updates.step()
        losses.append(total / count)
    return losses
