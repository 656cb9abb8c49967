"""Running statistics of batch norm that change once per mini-batch, however it is split into microbatches and replicas.

Each microbatch is normalized by its own statistics, which are recorded here. While the mini-batch is committed, all
ranks gather the records; the mean and variance over all values of the mini-batch follow from them, and update the
running statistics.
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
from counterpoint.terminal_text import warn

StatsArray: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class BatchNormBuffers:
    """Names of one module's running statistics.

    Args:
        path: of the module.
        mean: buffer of running means; the module's calls are recognized by it.
        var: buffer of running variances.
        counter: buffer that counts batches; empty if there is none.
        is_cumulative: whether the statistics are means over all batches (``momentum=None``), not moving averages.
    """

    path: str
    mean: str
    var: str
    counter: str
    is_cumulative: bool


def find_batch_norm_buffers(model: nn.Module) -> list[BatchNormBuffers]:
    """Return the running statistics of all batch norm modules that keep any."""
    names = {id(buffer): name for name, buffer in model.named_buffers()}
    modules = []
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:  # noqa: SLF001
            counter = "" if module.num_batches_tracked is None else names[id(module.num_batches_tracked)]
            mean, var = names[id(module.running_mean)], names[id(module.running_var)]
            modules.append(BatchNormBuffers(path, mean, var, counter, module.momentum is None))
    return modules


class BatchStats(NamedTuple):
    """Statistics of one call: mean, variance over ``count - 1``, values per channel, and the momentum."""

    mean: Tensor
    var: Tensor
    num_values: int
    momentum: float


class StatsLayout:
    """Positions of all modules' statistics in the row that ranks gather.

    A row has the means of all channels of all modules, their variances, the number of values per channel of each
    module, and the momentum of each.

    Args:
        channels: of each module.
    """

    def __init__(self, channels: Sequence[int]) -> None:
        self.channels = list(channels)
        self.num_channels = sum(channels)
        self.owner = np.arange(len(channels)).repeat(self.channels)

    def split(self, rows: StatsArray) -> tuple[StatsArray, StatsArray, StatsArray, StatsArray]:
        """Return means, variances, counts and momenta of rows ``(row, number)``."""
        ends = self.num_channels, 2 * self.num_channels, 2 * self.num_channels + len(self.channels)
        means, variances, counts, momenta = np.split(rows, ends, axis=-1)
        return means, variances, counts, momenta

    def pack(self, calls_by_module: Sequence[Sequence[BatchStats]]) -> StatsArray:
        """Return the combined statistics of all calls of each module as one row.

        Example:
            >>> stats = BatchStats(torch.tensor([2.0]), torch.tensor([1.0]), 2, 0.1)
            >>> StatsLayout([1]).pack([[stats, stats]]).tolist()
            [2.0, 0.5, 4.0, 0.1]
        """
        depth = max(map(len, calls_by_module), default=0)
        if not depth:
            return np.zeros(2 * (self.num_channels + len(self.channels)))
        like = next(stats[0].mean for stats in calls_by_module if stats)
        calls = [
            stats[index] if index < len(stats) else BatchStats(like.new_zeros(count), like.new_zeros(count), 0, 0.0)
            for index in range(depth)
            for stats, count in zip(calls_by_module, self.channels, strict=True)
        ]
        flat = torch.cat([stats.mean for stats in calls] + [stats.var for stats in calls]).to("cpu", torch.float64)
        means, unbiased = flat.numpy().reshape(2, depth, -1)
        counts = np.array([stats.num_values for stats in calls], dtype=np.float64).reshape(depth, -1)
        factors = ((counts - 1.0) / np.maximum(counts, 1.0))[:, self.owner]
        variances = np.where(factors > 0, unbiased * factors, 0.0)  # one value has no variance
        count, momenta = counts.sum(0), [stats[-1].momentum if stats else 0.0 for stats in calls_by_module]
        return np.concatenate([*self.combine(means, variances, counts), count, momenta])

    def combine(self, means: StatsArray, variances: StatsArray, counts: StatsArray) -> tuple[StatsArray, StatsArray]:
        """Return mean and variance over all parts by channel; zeros if no part has values. Counts are by module."""
        return combine_stats(means, variances, counts[:, self.owner], np.maximum(counts.sum(0), 1.0)[self.owner])


class DeferredBatchNorm:
    """Statistics that one rank's modules have recorded since their running statistics last changed.

    Args:
        modules: its modules, in the same order on all ranks of the group.
        buffers: the rank's own, by name.
        fabric: its connection to the others.
        group: the ranks whose microbatches belong to the same mini-batch, and which run the same modules.

    Promise:
        after a mini-batch the running statistics are those of batch norm over all its values in one call: the mean, the
        variance over ``count - 1``, the counter one higher. Microbatches without samples add nothing, and a skipped
        mini-batch changes nothing.

    Cost:
        one all-gather of ``2 channels + 2`` 64-bit numbers per module, rank and mini-batch, among replicas, concurrent
        with the gather of step reports.

    Source:
        torchgpipe, DeferredBatchNorm; Chan, Golub and LeVeque 1979 for combining statistics.
    """

    def __init__(
        self, modules: Sequence[BatchNormBuffers], buffers: Mapping[str, Tensor], fabric: Fabric, group: Group
    ) -> None:
        self.modules = modules
        self.buffers = buffers
        self.fabric = fabric
        self.group = group
        self.layout = StatsLayout([buffers[module.mean].numel() for module in modules])
        self.index = {module: index for index, module in enumerate(modules)}
        self.records: dict[int, list[tuple[int, BatchStats]]] = {}
        self.counters = [(index, module.counter) for index, module in enumerate(modules) if module.counter]
        self.counts: list[int] = []
        self.pending: PendingAllGather | None = None  # the gather that was started
        self.has_warned_of_calls = False

    def begin_step(self, *, is_async_pipeline: bool) -> None:
        """Start a step; drop uncommitted records of an earlier one, except in an asynchronous pipeline."""
        if not is_async_pipeline:
            self.clear()
        if not self.records and self.counters:
            self.counts = torch.stack([self.buffers[name] for _, name in self.counters]).tolist()

    def record(
        self, module: BatchNormBuffers, micro: int, statistics: tuple[Tensor, Tensor], count: int, momentum: float
    ) -> None:
        """Record the mean and the variance over ``count - 1`` that a call computed from a microbatch."""
        mean, var = (tensor.detach() for tensor in statistics)
        records, index = self.records.setdefault(micro, []), self.index[module]
        if not self.has_warned_of_calls and any(index == known for known, _ in records):
            self.has_warned_of_calls = True
            self.warn_of_calls(module)
        records.append((index, BatchStats(mean, var, count, momentum)))

    def warn_of_calls(self, module: BatchNormBuffers) -> None:
        """Warn that a forward calls a module several times, whose running statistics are updated once."""
        if self.fabric.rank == self.group[0]:
            warn(
                f"batch norm '{module.path}' is called several times in a forward; its running statistics are updated "
                "once per batch, with the values of all calls, where a loop without ranks updates them in every "
                "call: give each call a module of its own, set track_running_stats=False, or pass "
                "batch_norm='microbatch' to update them in every call, on each replica alone",
                stacklevel=2,
            )

    def start_gather(self, micros: Collection[int]) -> None:
        """Start to gather the records of a mini-batch; all members of the group call it together."""
        calls_by_module: list[list[BatchStats]] = [[] for _ in self.modules]
        for micro in sorted(self.records.keys() & set(micros)):
            for index, stats in self.records.pop(micro):
                calls_by_module[index].append(stats)
        with np.errstate(all="ignore"):  # a model's values may be nan or inf
            row = torch.from_numpy(self.layout.pack(calls_by_module))
        self.pending = start_all_gather(self.fabric, self.group, "running statistics", row)

    def finish_gather(self) -> None:
        """Wait for the gather."""
        if self.pending is not None:
            self.pending.wait()

    def commit(self, *, is_applied: bool) -> None:
        """Update the running statistics with what all ranks recorded of the mini-batch, if it is applied."""
        pending, self.pending = self.pending, None
        if is_applied and pending is not None:
            with np.errstate(all="ignore"):
                self.update_running_stats(pending.wait().numpy())
        self.restore_counters()

    def update_running_stats(self, rows: StatsArray) -> None:
        """Update the running statistics from all ranks' rows."""
        means, variances, counts, momenta = self.layout.split(rows)
        count, owner = counts.sum(0), self.layout.owner
        if not count.any():
            return
        mean, var = self.layout.combine(means, variances, counts)
        momentum = momenta[(counts > 0).argmax(0), range(len(count))]
        for counter, (index, _) in enumerate(self.counters):
            if count[index]:
                self.counts[counter] += 1
                momentum[index] = 1.0 / self.counts[counter] if self.modules[index].is_cumulative else momentum[index]
        unbiased = var * (count / np.maximum(count - 1.0, 1.0))[owner]
        names = [module.mean for module in self.modules] + [module.var for module in self.modules]
        flat = torch.cat([self.buffers[name].detach().view(-1) for name in names]).to("cpu", torch.float64)
        before, rate = flat.numpy().reshape(2, -1), momentum[owner]
        after = np.where(count[owner] > 0, before * (1.0 - rate) + np.stack([mean, unbiased]) * rate, before)
        parts = torch.split(torch.from_numpy(after).view(-1), self.layout.channels * 2)
        with torch.no_grad():
            for name, part in zip(names, parts, strict=True):
                self.buffers[name].copy_(part)

    def restore_counters(self) -> None:
        """Set the batch counters to the number of mini-batches; modules count every call."""
        for (_, name), count in zip(self.counters, self.counts, strict=True):
            self.buffers[name].fill_(int(count))

    def clear(self) -> None:
        """Drop the records of a mini-batch that was not committed."""
        if self.records or self.pending is not None:
            self.records.clear()
            self.pending = None
            self.restore_counters()


def find_stats_peers(program: Program, rank: int) -> Group:
    """Return the ranks whose microbatches belong to the same mini-batch as a rank's, and which run the same blocks."""
    rank_program = program.rank_programs[rank]
    blocks = [
        {instruction.block for instruction in other_program.body if isinstance(instruction, Forward)}
        for other_program in program.rank_programs
    ]
    return tuple(
        peer
        for peer in ranks_sharing_loss(rank_program, rank)
        if blocks[peer] == blocks[rank] and program.rank_programs[peer].tp_rank == rank_program.tp_rank
    )
