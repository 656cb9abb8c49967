"""Running statistics of batch norm that change once per mini-batch, however it is cut into microbatches and replicas.

Each microbatch is normalized by its own statistics, and these are noted here. While the mini-batch is decided on, all
tell each other what they noted; then the mean and the variance of all its values are made of that, and the running
statistics take them in.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from counterpoint.fabric.fabric import Fabric, Group
from counterpoint.program.instruction import Forward
from counterpoint.program.program import Program
from counterpoint.runtime.batch_norm.sync import PendingAllGather, combine_stats, ranks_sharing_loss, start_all_gather

StatsArray: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class BatchNormBuffers:
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


def find_batch_norm_buffers(model: nn.Module) -> list[BatchNormBuffers]:
    """Return what the modules of batch norm keep, of those that keep anything."""
    names = {id(buffer): name for name, buffer in model.named_buffers()}
    found = []
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:  # noqa: SLF001
            counter = "" if module.num_batches_tracked is None else names[id(module.num_batches_tracked)]
            mean, var = names[id(module.running_mean)], names[id(module.running_var)]
            found.append(BatchNormBuffers(path, mean, var, counter, module.momentum is None))
    return found


class BatchStats(NamedTuple):
    """What a module saw in one call: mean, variance over ``count - 1``, of how many values by channel, the momentum."""

    mean: Tensor
    var: Tensor
    num_values: int
    momentum: float


class StatsLayout:
    """Where the figures of all modules are among the numbers that ranks tell each other.

    Those are the means of all channels of all modules, their variances, the values by channel of each module, and the
    momentum of each.

    Args:
        channels: of each module.
    """

    def __init__(self, channels: Sequence[int]) -> None:
        self.channels = list(channels)
        self.num_channels = sum(channels)
        self.owner = np.arange(len(channels)).repeat(self.channels)

    def split(self, rows: StatsArray) -> tuple[StatsArray, StatsArray, StatsArray, StatsArray]:
        """Return means, variances, counts and momenta of rows of numbers ``(row, number)``."""
        ends = self.num_channels, 2 * self.num_channels, 2 * self.num_channels + len(self.channels)
        means, variances, counts, momenta = np.split(rows, ends, axis=-1)
        return means, variances, counts, momenta

    def pack(self, found: Sequence[Sequence[BatchStats]]) -> StatsArray:
        """Return what all calls of each module saw together, as one row of numbers.

        Example:
            >>> seen = Seen(torch.tensor([2.0]), torch.tensor([1.0]), 2, 0.1)
            >>> Layout([1]).row([[seen, seen]]).tolist()
            [2.0, 0.5, 4.0, 0.1]
        """
        depth = max(map(len, found), default=0)
        if not depth:
            return np.zeros(2 * (self.num_channels + len(self.channels)))
        like = next(seen[0].mean for seen in found if seen)
        calls = [
            seen[at] if at < len(seen) else BatchStats(like.new_zeros(count), like.new_zeros(count), 0, 0.0)
            for at in range(depth)
            for seen, count in zip(found, self.channels, strict=True)
        ]
        flat = torch.cat([seen.mean for seen in calls] + [seen.var for seen in calls]).to("cpu", torch.float64)
        means, unbiased = flat.numpy().reshape(2, depth, -1)
        counts = np.array([seen.num_values for seen in calls], dtype=np.float64).reshape(depth, -1)
        factors = ((counts - 1.0) / np.maximum(counts, 1.0))[:, self.owner]
        variances = np.where(factors > 0, unbiased * factors, 0.0)  # of one value, and of none, there is none
        count, momenta = counts.sum(0), [seen[-1].momentum if seen else 0.0 for seen in found]
        return np.concatenate([*self.combine(means, variances, counts), count, momenta])

    def combine(self, means: StatsArray, variances: StatsArray, counts: StatsArray) -> tuple[StatsArray, StatsArray]:
        """Return mean and variance of all parts by channel; zeros where no part has values, ``counts`` by module."""
        return combine_stats(means, variances, counts[:, self.owner], np.maximum(counts.sum(0), 1.0)[self.owner])


class DeferredBatchNorm:
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
        one all-gather of ``2 channels + 2`` numbers of 64 bits per module, rank and mini-batch, among replicas, which
        is under way while the commit's ballots are.

    Source:
        torchgpipe, DeferredBatchNorm; Chan, Golub and LeVeque 1979 for the sums.
    """

    def __init__(
        self, modules: Sequence[BatchNormBuffers], buffers: Mapping[str, Tensor], fabric: Fabric, group: Group
    ) -> None:
        self.modules = modules
        self.buffers = buffers
        self.fabric = fabric
        self.group = group
        self.layout = StatsLayout([buffers[one.mean].numel() for one in modules])
        self.index = {one: at for at, one in enumerate(modules)}
        self.seen: dict[int, list[tuple[int, BatchStats]]] = {}
        self.counters = [(at, one.counter) for at, one in enumerate(modules) if one.counter]
        self.counts: list[int] = []
        self.pending: PendingAllGather | None = None  # what the group has begun to tell

    def begin_step(self, *, is_async_pipeline: bool) -> None:
        """A step begins; what an earlier one left undecided is forgotten, unless it is a stream's."""
        if not is_async_pipeline:
            self.clear()
        if not self.seen and self.counters:
            self.counts = torch.stack([self.buffers[name] for _, name in self.counters]).tolist()

    def record(
        self, module: BatchNormBuffers, micro: int, statistics: tuple[Tensor, Tensor], count: int, momentum: float
    ) -> None:
        """Note what a call saw of a microbatch: its mean and its variance over ``count - 1``."""
        mean, var = (tensor.detach() for tensor in statistics)
        self.seen.setdefault(micro, []).append((self.index[module], BatchStats(mean, var, count, momentum)))

    def start_gather(self, micros: Collection[int]) -> None:
        """Begin to tell the group what was seen here of a mini-batch; all its members call it together."""
        found: list[list[BatchStats]] = [[] for _ in self.modules]
        for micro in sorted(self.seen.keys() & set(micros)):
            for at, seen in self.seen.pop(micro):
                found[at].append(seen)
        with np.errstate(all="ignore"):  # what a model has computed may be no number any more
            row = torch.from_numpy(self.layout.pack(found))
        self.pending = start_all_gather(self.fabric, self.group, "running statistics", row)

    def finish_gather(self) -> None:
        """What the group has begun to tell is here."""
        if self.pending is not None:
            self.pending.wait()

    def commit(self, *, is_applied: bool) -> None:
        """The mini-batch has been decided on: if it counts, the running statistics take in what all have seen of it."""
        rows, self.pending = self.pending, None
        if is_applied and rows is not None:
            with np.errstate(all="ignore"):
                self.update_running_stats(rows.wait().numpy())
        self.restore_counters()

    def update_running_stats(self, rows: StatsArray) -> None:
        """Have the running statistics take in what everybody saw."""
        means, variances, counts, momenta = self.layout.split(rows)
        count, owner = counts.sum(0), self.layout.owner
        if not count.any():
            return
        mean, var = self.layout.combine(means, variances, counts)
        momentum = momenta[(counts > 0).argmax(0), range(len(count))]
        for place, (at, _) in enumerate(self.counters):
            if count[at]:
                self.counts[place] += 1
                momentum[at] = 1.0 / self.counts[place] if self.modules[at].is_cumulative else momentum[at]
        unbiased = var * (count / np.maximum(count - 1.0, 1.0))[owner]
        names = [one.mean for one in self.modules] + [one.var for one in self.modules]
        flat = torch.cat([self.buffers[name].detach().view(-1) for name in names]).to("cpu", torch.float64)
        before, rate = flat.numpy().reshape(2, -1), momentum[owner]
        after = np.where(count[owner] > 0, before * (1.0 - rate) + np.stack([mean, unbiased]) * rate, before)
        parts = torch.split(torch.from_numpy(after).view(-1), self.layout.channels * 2)
        with torch.no_grad():
            for name, part in zip(names, parts, strict=True):
                self.buffers[name].copy_(part)

    def restore_counters(self) -> None:
        """Have the counters count mini-batches; modules count every call."""
        for (_, name), count in zip(self.counters, self.counts, strict=True):
            self.buffers[name].fill_(int(count))

    def clear(self) -> None:
        """Forget what was seen of a mini-batch that nobody decided on."""
        if self.seen or self.pending is not None:
            self.seen.clear()
            self.pending = None
            self.restore_counters()


def find_stats_peers(program: Program, rank: int) -> Group:
    """Return the ranks whose microbatches belong to one mini-batch with a rank's, and which run the same blocks."""
    own = program.rank_programs[rank]
    blocks = [{word.block for word in row.body if isinstance(word, Forward)} for row in program.rank_programs]
    return tuple(
        other
        for other in ranks_sharing_loss(own, rank)
        if blocks[other] == blocks[rank] and program.rank_programs[other].tp_rank == own.tp_rank
    )
