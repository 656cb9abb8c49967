"""Running statistics of batch norm that change once per mini-batch, however it is cut into microbatches and replicas.

Each microbatch is normalized by its own statistics, and these are noted here. When the mini-batch is decided on, the
mean and the variance of all its values are made of what everybody noted, and the running statistics take that in.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from counterpoint.fabric.fabric import Fabric, Group
from counterpoint.program.instruction import Forward
from counterpoint.program.program import Program
from counterpoint.runtime.norms import pooled
from counterpoint.runtime.together import gather_rows, mean_of


@dataclass(frozen=True, slots=True)
class Kept:
    """What one module keeps of its batches.

    Args:
        path: of the module.
        mean: name of the buffer of running means; its calls are known by it.
        var: name of the buffer of running variances.
        counter: name of the buffer that counts batches; empty where there is none.
        is_cumulative: whether the statistics are means over all batches (``momentum=None``), not moving averages.
    """

    path: str
    mean: str
    var: str
    counter: str
    is_cumulative: bool


def kept_of(model: nn.Module) -> list[Kept]:
    """Return what the modules of batch norm keep, of those that keep anything."""
    names = {id(buffer): name for name, buffer in model.named_buffers()}
    found = []
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:  # noqa: SLF001
            counter = "" if module.num_batches_tracked is None else names[id(module.num_batches_tracked)]
            mean, var = names[id(module.running_mean)], names[id(module.running_var)]
            found.append(Kept(path, mean, var, counter, module.momentum is None))
    return found


class Seen(NamedTuple):
    """What a module saw in one call, in float64: mean and variance by channel, of how many values, the momentum."""

    mean: Tensor
    var: Tensor
    num_values: int
    momentum: float


class Deferred:
    """What one rank's modules have seen since their running statistics changed.

    Args:
        kept: what its modules keep, in the same order on all ranks of the group.
        buffers: the rank's own, by name.
        fabric: its way to the others.
        group: the ranks whose microbatches belong to one mini-batch with this rank's, and which run the same modules.

    Promise:
        after a mini-batch the running statistics are those that batch norm comes to which sees all values of the
        mini-batch in one call: the mean, the variance over ``count - 1``, the counter one higher. Microbatches without
        samples add nothing, and a mini-batch that is left out changes nothing.

    Cost:
        one all-gather of ``2 channels + 2`` numbers of 64 bits per module, rank and mini-batch, among replicas.

    Source:
        torchgpipe, DeferredBatchNorm; Chan, Golub and LeVeque 1979 for the sums.
    """

    def __init__(self, kept: Sequence[Kept], buffers: Mapping[str, Tensor], fabric: Fabric, group: Group) -> None:
        self.kept = kept
        self.buffers = buffers
        self.fabric = fabric
        self.group = group
        self.seen: dict[int, list[tuple[Kept, Seen]]] = {}
        self.counts: dict[str, Tensor] = {}

    def begin(self, *, is_stream: bool) -> None:
        """A step begins; what an earlier one left undecided is forgotten, unless it is a stream's."""
        if not is_stream:
            self.drop()
        if not self.seen:
            self.counts = {one.counter: self.buffers[one.counter].clone() for one in self.kept if one.counter}

    def note(self, kept: Kept, micro: int, statistics: tuple[Tensor, Tensor], count: int, momentum: float) -> None:
        """Note what a call saw of a microbatch: its mean and its variance over ``count - 1``."""
        mean, var = (tensor.detach().double().cpu() for tensor in statistics)
        biased = var * ((count - 1) / count) if count > 1 else torch.zeros_like(var)
        self.seen.setdefault(micro, []).append((kept, Seen(mean, biased, count, momentum)))

    def commit(self, micros: Collection[int], *, is_applied: bool) -> None:
        """Have the running statistics take in a mini-batch; all members of the group call it together."""
        mine = [entry for micro in sorted(self.seen.keys() & set(micros)) for entry in self.seen.pop(micro)]
        if is_applied:
            rows = torch.cat([self.row_of(kept, [seen for one, seen in mine if one == kept]) for kept in self.kept])
            rows = gather_rows(self.fabric, self.group, "running statistics", rows)
            begun = 0
            for kept in self.kept:
                width = 2 * self.buffers[kept.mean].numel() + 2
                self.take_in(kept, rows[:, begun : begun + width])
                begun += width
        self.restore()

    def row_of(self, kept: Kept, found: Sequence[Seen]) -> Tensor:
        """Return what all calls of a module saw together: means, variances, how many values, the momentum."""
        if not found:
            return torch.zeros(2 * self.buffers[kept.mean].numel() + 2, dtype=torch.float64)
        counts = torch.tensor([[seen.num_values] for seen in found], dtype=torch.float64)
        mean, var = pooled(
            torch.stack([seen.mean for seen in found]), torch.stack([seen.var for seen in found]), counts
        )
        return torch.cat([mean, var, torch.tensor([float(counts.sum()), found[-1].momentum], dtype=torch.float64)])

    def take_in(self, kept: Kept, rows: Tensor) -> None:
        """Have one module's running statistics take in what everybody saw."""
        channels = self.buffers[kept.mean].numel()
        counts = rows[:, -2:-1]
        count = float(counts.sum())
        if not count:
            return
        mean, var = pooled(rows[:, :channels], rows[:, channels : 2 * channels], counts)
        momentum = float(rows[counts[:, 0] > 0][0, -1])
        if kept.counter:
            self.counts[kept.counter] += 1
            momentum = 1.0 / float(self.counts[kept.counter]) if kept.is_cumulative else momentum
        with torch.no_grad():
            for name, found in ((kept.mean, mean), (kept.var, var * (count / max(count - 1.0, 1.0)))):
                buffer = self.buffers[name]
                buffer.copy_(buffer.detach().double().cpu() * (1.0 - momentum) + found * momentum)

    def restore(self) -> None:
        """Have the counters count mini-batches; modules count every call."""
        for name, count in self.counts.items():
            self.buffers[name].copy_(count)

    def drop(self) -> None:
        """Forget what was seen of a mini-batch that nobody decided on."""
        if self.seen:
            self.seen.clear()
            self.restore()


def peers_of(program: Program, rank: int) -> Group:
    """Return the ranks whose microbatches belong to one mini-batch with a rank's, and which run the same blocks."""
    own = program.rows[rank]
    blocks = [{word.block for word in row.body if isinstance(word, Forward)} for row in program.rows]
    return tuple(
        other
        for other in mean_of(own, rank)
        if blocks[other] == blocks[rank] and program.rows[other].slice_index == own.slice_index
    )
