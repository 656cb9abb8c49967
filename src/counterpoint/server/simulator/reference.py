"""The update rules of bsp, ssp and asp in sequence: of the server's, nothing is used but the order of its journal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from counterpoint.server.choices import Adagrad, Adam, Aggregate, Sgd
from counterpoint.server.job import Bsp, Job
from counterpoint.server.messages import Push, Spec
from counterpoint.server.placement import shard_of_row
from counterpoint.server.shard import Shard
from counterpoint.server.simulator.history import name_of
from counterpoint.server.simulator.trainer import first_range, gradient, specs
from counterpoint.server.tables import begin_of


def check_numbers(job: Job, index: int, pushes: Sequence[Push], shard: Shard) -> Iterator[str]:
    """Yield where gradients in a journal, or a shard in the end, are not what one machine with torch's optimizer makes.

    Args:
        job: what was done.
        index: the shard.
        pushes: of its journal, in order.
        shard: as it is in the end.
    """
    is_bsp = isinstance(job.consistency, Bsp)
    for spec in specs(job, index):
        rows = torch.arange(spec.high)
        param = nn.Parameter(begin_of(spec, rows) if spec.width else first_range(spec))
        optimizer = optimizer_of(spec, param)
        versions = [param.detach().clone()]
        for update in _updates(job, [push for push in pushes if push.key == spec.key]):
            yield from _check_gradients(index, update, versions)
            param.grad = _sum(update, param)
            with torch.sparse.check_sparse_tensor_invariants(enable=False):  # type: ignore[no-untyped-call]
                optimizer.step()
            versions.append(param.detach().clone())
        own = rows[shard_of_row(rows, job.num_shards) == index] if spec.width else None
        found, wanted = shard.keys[spec.key].table.read(own), param.detach() if own is None else param.detach()[own]
        is_same = torch.allclose(found, wanted, rtol=1e-12, atol=1e-14) if is_bsp else torch.equal(found, wanted)
        if not is_same:
            yield f"{spec.key} of shard {index} is {found.tolist()}, and its rule says {wanted.tolist()}"


def _updates(job: Job, pushes: Sequence[Push]) -> Iterator[list[Push]]:
    """Yield the pushes that make one update, each portion once."""
    first: dict[int, Push] = {}
    for push in pushes:
        first.setdefault(push.portion, push)
    if not isinstance(job.consistency, Bsp):
        yield from ([push] for push in first.values())
        return
    size = job.consistency.portions
    for start in range(0, len(first), size):
        yield [first[portion] for portion in range(start, start + size) if portion in first]


def _check_gradients(index: int, update: Sequence[Push], versions: Sequence[Tensor]) -> Iterator[str]:
    for push in update:
        read = versions[push.read] if push.rows is None else versions[push.read][push.rows]
        if not torch.equal(gradient(read, push.portion), push.values):
            yield f"push {name_of(push)} of {push.key} on shard {index} is not the gradient at version {push.read}"


def _sum(update: Sequence[Push], param: Tensor) -> Tensor:
    """Return the gradient of one update."""
    total = torch.zeros_like(param)
    for push in update:
        if push.rows is None:
            total = total + push.values if len(update) > 1 else push.values
        else:
            total[push.rows] += push.values
    named = [push.rows for push in update if push.rows is not None]
    if not named:
        return total
    rows = torch.cat(named).unique()  # type: ignore[no-untyped-call]
    return torch.sparse_coo_tensor(rows[None], total[rows], total.shape, check_invariants=False, is_coalesced=True)


def optimizer_of(spec: Spec, param: nn.Parameter) -> torch.optim.Optimizer:
    """Return torch's own optimizer for the rule of a key."""
    match spec.rule:
        case Aggregate():
            return torch.optim.SGD([param], 1.0)
        case Sgd():
            return torch.optim.SGD([param], spec.rule.lr, spec.rule.momentum, foreach=False)
        case Adagrad():
            return torch.optim.Adagrad([param], spec.rule.lr, foreach=False)
        case Adam():
            return torch.optim.Adam([param], spec.rule.lr, (spec.rule.beta1, spec.rule.beta2), foreach=False)
