"""Training with ``DistributedOptimizer``, each way as a scenario; and the same training by one rank on all data."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import counterpoint.compat.horovod.torch as hvd

WIDE = torch.float64
STEPS, ROWS = 4, 6


class Net(nn.Module):
    """Layers of which some are frozen, shared, and left out by some ranks or all."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.same = nn.Linear(5, 7, dtype=WIDE), nn.Linear(7, 7, dtype=WIDE)
        self.frozen, self.left_out = nn.Linear(7, 7, dtype=WIDE), nn.Linear(3, 3, dtype=WIDE)
        self.sometimes, self.last = nn.Linear(7, 7, dtype=WIDE), nn.Linear(7, 3, dtype=WIDE)
        self.frozen.requires_grad_(False)

    def trained(self):
        return [param for param in self.parameters() if param.requires_grad]

    def forward(self, x, rank):
        x = self.same(self.same(torch.tanh(self.first(x))))
        x = self.frozen(x)
        return self.last(x if rank == 0 else self.sometimes(x))


def batch(rank, step):
    draw = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(ROWS, 5, generator=draw, dtype=WIDE), torch.randint(0, 3, (ROWS,), generator=draw)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)


def values(model):
    return torch.cat([param.detach().flatten() for param in model.parameters()]).tolist()


def loss_of(model, rank, step):
    x, y = batch(rank, step)
    return nn.functional.cross_entropy(model(x, rank), y)


def trained(*, passes=1, clip=None, make=sgd, **options):
    """Train on this rank's data; return what the parameters come to."""
    model = Net()
    optimizer = hvd.DistributedOptimizer(
        make(model.parameters()), model.named_parameters(), backward_passes_per_step=passes, **options
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(passes):
            loss_of(model, hvd.rank(), passes * step + part).backward()
        if clip is None:
            optimizer.step()
            continue
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        with optimizer.skip_synchronize():
            optimizer.step()
    return values(model)


def solo(size, *, passes=1, clip=None, make=sgd, factor=1.0):
    """Return what one rank comes to that has the data of all; the mean over ranks is multiplied by the factor."""
    model = Net()
    optimizer = make(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for param in model.parameters():
            param.grad = torch.zeros_like(param) if param.requires_grad else None
        for part in range(passes):
            losses = [loss_of(model, rank, passes * step + part) for rank in range(size)]
            (sum(losses) * (factor / size)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return values(model)


def plainly():
    return trained()


def added_up():
    return trained(op=hvd.Sum)


def accumulated():
    return trained(passes=2)


def clipped():
    return trained(clip=0.1)


def predivided():
    return trained(gradient_predivide_factor=4.0)


def in_groups():
    return trained(groups=3)


def by_adam():
    return trained(make=partial(torch.optim.Adam, lr=0.01))


def with_gradients_kept():
    """Gradients are set to zero in place: the next backward pass adds up where they are reduced."""
    model = Net()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
    return values(model)


def descend(optimizer, loss):
    """Take steps with an optimizer that computes the loss itself, as often as it likes."""
    for step in range(STEPS):

        def closure(step=step):
            optimizer.zero_grad()
            result = loss(step)
            result.backward()
            return result

        optimizer.step(closure)


def lbfgs(params):
    return torch.optim.LBFGS(params, lr=0.5, max_iter=3)


def by_closures():
    model = Net()
    optimizer = hvd.DistributedOptimizer(lbfgs(model.trained()), model.named_parameters())
    descend(optimizer, lambda step: loss_of(model, hvd.rank(), step))
    return values(model)


def solo_by_closures(size):
    model = Net()
    descend(lbfgs(model.trained()), lambda step: sum(loss_of(model, rank, step) for rank in range(size)) / size)
    return values(model)


REFERENCES: dict[Callable[[], object], dict[str, Any]] = {
    plainly: {}, accumulated: {"passes": 2}, clipped: {"clip": 0.1}, predivided: {}, in_groups: {},
    by_adam: {"make": partial(torch.optim.Adam, lr=0.01)}, with_gradients_kept: {},
}  # fmt: skip


def embedded(*, as_dense):
    """Train a sparse embedding; rank 1 uses no row of it in the first step."""
    torch.manual_seed(0)
    table = nn.Embedding(10, 2, sparse=True, dtype=WIDE)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=0.1), table.named_parameters(), sparse_as_dense=as_dense
    )
    for step in range(3):
        optimizer.zero_grad()
        if (step, hvd.rank()) != (0, 1):
            table(rows_of(hvd.rank(), step)).square().sum().backward()
        optimizer.step()
    grad = table.weight.grad
    return [values(table), grad is not None and grad.is_sparse]


def sparse():
    return embedded(as_dense=False)


def sparse_as_dense():
    return embedded(as_dense=True)


def rows_of(rank, step):
    return torch.arange(4) * (rank + 2) % 9 + torch.tensor([0, 0, step, 0]) % 2


def solo_embedded(size):
    torch.manual_seed(0)
    table = nn.Embedding(10, 2, dtype=WIDE)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        losses = [table(rows_of(rank, step)).square().sum() for rank in range(size) if (step, rank) != (0, 1)]
        (sum(losses) / size).backward()
        optimizer.step()
    return values(table)


def by_adasum():
    """Return the parameters after one step, and the step that this rank would have taken alone."""
    model, alone = Net(), Net()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), op=hvd.Adasum)
    own = sgd(alone.parameters())
    for net, each in [(model, optimizer), (alone, own)]:
        loss_of(net, hvd.rank(), 0).backward()
        each.step()
    start = Net()
    steps = [after.detach() - before for after, before in zip(alone.parameters(), start.parameters(), strict=True)]
    moved = [after.detach() - before for after, before in zip(model.parameters(), start.parameters(), strict=True)]
    return [steps, moved]


def with_half_the_bytes():
    """Return how far compressed gradients lead from exact ones."""
    exact, lossy = torch.tensor(trained()), torch.tensor(trained(compression=hvd.Compression.fp16))
    return [(exact - lossy).abs().max().item() < 1e-3, bool((exact != lossy).any())]


def by_a_schedule():
    """A scheduler of the old optimizer, and one of the new, both set the learning rate of the same parameters."""
    model = Net()
    old = torch.optim.SGD(model.parameters(), lr=1.0)
    first = torch.optim.lr_scheduler.ExponentialLR(old, 0.5)
    optimizer = hvd.DistributedOptimizer(old, model.named_parameters())
    second = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    loss_of(model, hvd.rank(), 0).backward()
    optimizer.step()
    old.step()
    first.step()
    second.step()
    return [optimizer.param_groups[0]["lr"], type(optimizer).__name__, isinstance(optimizer, torch.optim.SGD)]


def train_adversaries(make, ranks):
    """Train a generator, then its discriminator, on the data of some ranks."""
    torch.manual_seed(0)
    generator, discriminator = nn.Linear(5, 5, dtype=WIDE), nn.Linear(5, 1, dtype=WIDE)
    optimizers = [make(model) for model in (generator, discriminator)]
    for step in range(STEPS):
        inputs = torch.cat([batch(rank, step)[0] for rank in ranks])
        optimizers[0].zero_grad()
        discriminator.requires_grad_(False)
        discriminator(generator(inputs)).square().mean().backward()
        discriminator.requires_grad_(True)
        optimizers[0].step()
        optimizers[1].zero_grad()
        (discriminator(inputs) - discriminator(generator(inputs).detach()) - 1).square().mean().backward()
        optimizers[1].step()
    return values(generator) + values(discriminator)


def adversaries():
    return train_adversaries(
        lambda model: hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters()), [hvd.rank()]
    )


def solo_adversaries(size):
    return train_adversaries(lambda model: sgd(model.parameters()), range(size))


def misused():
    """Each mistake of the order of calls, and of the arguments."""
    result = []
    model = nn.Linear(2, 2)

    def said(call):
        try:
            call()
        except (AssertionError, ValueError, AttributeError) as error:
            result.append(str(error))

    def build(**options):
        return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)

    optimizer = build(named_parameters=model.named_parameters())
    model(torch.ones(1, 2)).sum().backward()
    said(optimizer.zero_grad)
    said(model(torch.ones(1, 2)).sum().backward)
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    said(lambda: build(named_parameters=[("w", model.weight), ("w", model.bias)]))
    said(lambda: build(named_parameters=[("w", model.weight)]))
    said(lambda: build(op=hvd.Sum, gradient_predivide_factor=2.0))
    said(lambda: build(backward_passes_per_step=0))
    said(lambda: build(op=hvd.Max))
    said(lambda: build(groups=[[model.weight], [model.weight]]))
    said(build(op=hvd.Adasum).skip_synchronize)
    said(lambda: hvd.elastic.TorchState)
    said(lambda: hvd.allreduce(torch.ones(2), average=True, op=hvd.Sum))
    said(lambda: hvd.alltoall(torch.ones(3), [1, 1]))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(5))]})
    said(optimizer.step)
    said(lambda: hvd.allreduce(torch.ones(2), process_set=hvd.ProcessSet([0])))
    return result


SCENARIOS = (
    *REFERENCES, added_up, by_closures, sparse, sparse_as_dense, by_adasum, with_half_the_bytes, by_a_schedule, misused,
    adversaries,
)  # fmt: skip
