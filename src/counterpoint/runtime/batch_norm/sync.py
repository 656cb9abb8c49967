"""SyncBatchNorm in a plan: replicas normalize the microbatches that they run at the same time by common statistics.

The statistics are exchanged in the middle of a forward, which no instruction of the program shows. While segments run,
the function mode of :mod:`counterpoint.runtime.batch_norm.mode` intercepts the calls of batch norm that belong to such
modules and gathers the statistics of all replicas. That no rank waits forever in one of these exchanges is verified
before the first step, by inserting them into the program as collectives and running its execution-order check.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function

from counterpoint.errors import DataError, PlanError, ProgramError
from counterpoint.fabric.fabric import Fabric, Group, Work
from counterpoint.program.execution_order import execution_order
from counterpoint.program.instruction import Backward, Collective, Commit, Forward, Instruction, Recompute, TensorRef
from counterpoint.program.program import Program, RankProgram
from counterpoint.runtime.params.param_store import ParamStore

StatsT = TypeVar("StatsT", Tensor, np.ndarray[tuple[int, ...], np.dtype[np.float64]])


class StatsGroup(Protocol):
    """The members whose samples are normalized together."""

    def gather(self, row: Tensor) -> Tensor:
        """Return all members' float64 rows as ``(rank, number)``, given this rank's as ``(1, number)``."""

    def all_reduce(self, sums: Tensor) -> None:
        """Replace the tensor by its sum over all members."""


class RunningStats(NamedTuple):
    """Running statistics of a module, updated in place.

    Args:
        mean: by channel.
        var: by channel.
        momentum: the weight of the newest batch.
    """

    mean: Tensor
    var: Tensor
    momentum: float


def sync_batch_norm(
    values: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    running: RunningStats | None,
    eps: float,
    group: StatsGroup,
) -> Tensor:
    """Return values ``(sample, channel, ...)`` normalized as batch norm in training does, over all members' samples.

    The gradient of the values is that of the sum of all members' losses; those of weight and bias are this rank's part
    of theirs, as of any other parameter.

    Args:
        values: this rank's; any number of samples, also none.
        weight: by channel, or None.
        bias: by channel, or None.
        running: running statistics; equal afterwards on all members if they were before.
        eps: added to the variance.
        group: the members; all call this together, and go backward together.

    Raises:
        DataError: no member has a value.
        ValueError: there is one value per channel in all, with the message of torch's own batch norm.

    Cost:
        one all-gather of ``2 channel + 1`` float64 per rank in forward, one all-reduce of ``2 channel`` in backward.

    Source:
        Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for computing sample variances, 1979.
    """
    result, mean, var, count = _SyncBatchNormFunction.apply(values, weight, bias, eps, group)  # type: ignore[no-untyped-call]
    if running is not None:
        with torch.no_grad():
            unbiased = var * (count / max(count - 1, 1))
            running.mean.lerp_(mean.to(running.mean.dtype), running.momentum)
            running.var.lerp_(unbiased.to(running.var.dtype), running.momentum)
    return result  # type: ignore[no-any-return]


class _SyncBatchNormFunction(Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's own
        values: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: StatsGroup,
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        """Return the normalized values, and the mean, variance and number of all members' values.

        Args:
            ctx: what is saved for backward.
            values: ``(sample, channel, ...)``; the result has their shape and dtype.
            weight: ``(channel,)``, or None.
            bias: ``(channel,)``, or None.
            eps: added to the variance.
            group: the members. Mean and variance are ``(channel,)`` and have no gradient.
        """
        mean, var, count = group_statistics(values, group)
        shape = [1, -1, *[1] * (values.dim() - 2)]
        dtype = torch.promote_types(values.dtype, torch.float32)
        scale = (var + eps).rsqrt()
        normalized = (values.to(dtype) - mean.to(dtype).view(shape)) * scale.to(dtype).view(shape)
        result = normalized
        if weight is not None:
            result = result * weight.to(dtype).view(shape)
        if bias is not None:
            result = result + bias.to(dtype).view(shape)
        ctx.save_for_backward(normalized, scale, weight)
        ctx.count, ctx.dtype, ctx.has_bias, ctx.group = count, values.dtype, bias is not None, group
        ctx.mark_non_differentiable(mean, var)
        return result.to(values.dtype), mean, var, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: object) -> Any:  # noqa: ANN401 - torch's own
        """Return the gradient of values, of all members' losses, and this rank's part of those of weight and bias."""
        normalized, scale, weight = ctx.saved_tensors
        dtype, shape = normalized.dtype, [1, -1, *[1] * (normalized.dim() - 2)]
        dims = [dim for dim in range(normalized.dim()) if dim != 1]
        wide_grad = grad.to(dtype)
        sums = torch.cat([wide_grad.sum(dims), (wide_grad * normalized).sum(dims)])
        bias_grad, own_product_sum = sums.clone().chunk(2)
        ctx.group.all_reduce(sums)
        mean_grad, mean_product = (part.view(shape) / ctx.count for part in sums.chunk(2))
        factor = scale.to(dtype) if weight is None else scale.to(dtype) * weight.to(dtype)
        values_grad = (wide_grad - mean_grad - normalized * mean_product) * factor.view(shape)
        weight_grad = None if weight is None else own_product_sum.to(weight.dtype)
        return values_grad.to(ctx.dtype), weight_grad, bias_grad.to(ctx.dtype) if ctx.has_bias else None, None, None


def group_statistics(values: Tensor, group: StatsGroup) -> tuple[Tensor, Tensor, int]:
    """Return mean and variance by channel, in float64, and the number of values per channel, over all members' samples.

    Raises:
        DataError: no member has a value.
        ValueError: there is one value per channel in all.
    """
    channels = values.shape[1]
    flat = values.detach().transpose(0, 1).reshape(channels, -1).to(torch.promote_types(values.dtype, torch.float32))
    own_stats = values.new_zeros(1, 2 * channels + 1, dtype=torch.float64)
    if flat.shape[1]:
        variance, mean = torch.var_mean(flat, dim=1, correction=0)
        own_stats[0, :-1] = torch.cat([mean, variance])
        own_stats[0, -1] = flat.shape[1]
    gathered = group.gather(own_stats)
    means, variances, counts = gathered[:, :channels], gathered[:, channels:-1], gathered[:, -1:]
    count = int(counts.sum())
    if not count:
        raise DataError("SyncBatchNorm: no rank has a sample; the global batch needs at least one")
    if count == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {values.size()} on one rank alone"
        )
    return *combine_stats(means, variances, counts, counts.sum()), count


def combine_stats(means: StatsT, variances: StatsT, counts: StatsT, total: StatsT) -> tuple[StatsT, StatsT]:
    """Return mean and variance by channel of all values, from those of parts ``(part, channel)``.

    Args:
        means: of each part; anything finite for a part without values.
        variances: over ``count``, not ``count - 1``.
        counts: values per channel of each part, ``(part, 1)`` or ``(part, channel)``.
        total: of all parts; not 0.
    """
    mean = (means * counts).sum(0) / total
    deviation = means - mean
    return mean, ((variances + deviation * deviation) * counts).sum(0) / total


SyncPartners: TypeAlias = tuple[tuple[int, int], ...]
"""The ranks that normalize together, each with its microbatch."""


@dataclass(frozen=True, slots=True)
class SyncBatchNormModule:
    """One module that normalizes together with those of other replicas.

    Args:
        path: of the module.
        tensor_name: the parameter or buffer by which its calls are recognized.
        buffers: its running statistics, if it keeps any.
        kind: what it is, for errors.
    """

    path: str
    tensor_name: str
    buffers: tuple[str, ...]
    kind: str = "SyncBatchNorm"

    @property
    def remedy(self) -> str:
        """What to do for each replica to normalize its own microbatches."""
        return "use BatchNorm" if self.kind == "SyncBatchNorm" else "drop batch_norm='sync'"


def find_sync_modules(model: nn.Module, *, all_modules: bool = False) -> list[SyncBatchNormModule]:
    """Return the modules of a model that normalize together with those of other replicas.

    Args:
        model: any.
        all_modules: whether every module of batch norm does; else only SyncBatchNorm.

    Raises:
        PlanError: one has neither running statistics nor a weight, so that its calls cannot be recognized.
    """
    names = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    modules = []
    module_class = nn.modules.batchnorm._BatchNorm if all_modules else nn.SyncBatchNorm  # noqa: SLF001 - the base class of all
    for path, module in model.named_modules():
        if not isinstance(module, module_class):
            continue
        is_sync = isinstance(module, nn.SyncBatchNorm)
        kind = "SyncBatchNorm" if is_sync else f"{type(module).__name__} under batch_norm='sync'"
        tensors = [tensor for tensor in (module.running_mean, module.weight) if tensor is not None]
        if not tensors:
            raise PlanError(
                f"{path} is a {kind} with affine=False and track_running_stats=False, so it has no tensor to "
                "recognize its calls by; leave one of the two at its default"
            )
        modules.append(
            SyncBatchNormModule(
                path, names[id(tensors[0])], tuple(names[id(buffer)] for buffer in module.buffers()), kind
            )
        )
    return modules


class ReplicaStatsGroup:
    """The ranks that normalize together in one module; a :class:`StatsGroup`.

    Args:
        fabric: this rank's connection to them.
        group: their ranks.
        path: of the module.
    """

    def __init__(self, fabric: Fabric, group: Group, path: str) -> None:
        self.fabric = fabric
        self.group = group
        self.path = path
        self.count = 0  # values by channel of all members, once gathered

    def gather(self, row: Tensor) -> Tensor:
        """Return all members' rows."""
        gathered = start_all_gather(self.fabric, self.group, f"statistics of {self.path}", row[0]).wait()
        self.count = int(gathered[:, -1].sum())
        return gathered

    def all_reduce(self, sums: Tensor) -> None:
        """Replace the tensor by its sum over all members."""
        self.fabric.all_reduce(f"gradient of {self.path}", sums, self.group).wait()


class PendingAllGather:
    """An all-gather of one row per member that has been started.

    Args:
        whole: where the rows will be, concatenated.
        count: members.
        work: the collective; None if there is one member only.
    """

    def __init__(self, whole: Tensor, count: int, work: Work | None) -> None:
        self._whole = whole
        self._count = count
        self._work = work

    def wait(self) -> Tensor:
        """Return all rows as ``(rank, number)``."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._whole.view(self._count, -1)


def start_all_gather(fabric: Fabric, group: Group, label: str, row: Tensor) -> PendingAllGather:
    """Start an all-gather of one row ``(number,)`` per member; all members call it together."""
    count, width = len(group), row.numel()
    whole = row.new_zeros(count * width)
    position = group.index(fabric.rank)
    whole[position * width : (position + 1) * width] = row
    bounds = range(0, (count + 1) * width, width)
    return PendingAllGather(whole, count, fabric.all_gather(label, whole, bounds, group) if count > 1 else None)


class SyncBatchNormGroups:
    """Which ranks one rank's SyncBatchNorm modules normalize with.

    Args:
        modules: those modules.
        store: the rank's parameters and buffers.
        fabric: its connection to the others.
        partners: the ranks that normalize together, by block and microbatch of this rank.
    """

    def __init__(
        self,
        modules: Sequence[SyncBatchNormModule],
        store: ParamStore,
        fabric: Fabric,
        partners: Mapping[tuple[int, int], SyncPartners],
    ) -> None:
        self.modules = modules
        self.store = store
        self.fabric = fabric
        self.partners = partners
        tensors: dict[str, Tensor] = {**store.params, **store.buffers}
        self.paths = {
            id(tensors[module.tensor_name]): module.path for module in modules if module.tensor_name in tensors
        }

    def group(self, block: int, micro: int, sizes: Mapping[int, int]) -> Group:
        """Return the ranks with samples that normalize together with a microbatch; empty if there is only one."""
        group = tuple(rank for rank, member_micro in self.partners.get((block, micro), ()) if sizes[member_micro])
        return group if len(group) > 1 else ()

    def broadcast_stats(self, names: Sequence[str], block: int, micro: int, sizes: Mapping[int, int]) -> None:
        """Send running statistics to members without samples; all members call it after a forward, or instead of one.

        Args:
            names: of the buffers that the blocks may change.
            block: the first of them.
            micro: this rank's microbatch.
            sizes: number of samples of every microbatch.
        """
        partners = self.partners.get((block, micro), ())
        roots = [rank for rank, member_micro in partners if sizes[member_micro]]
        changed = [name for module in self.modules for name in module.buffers if name in set(names)]
        if not changed or not roots or len(roots) == len(partners):
            return
        buffers = [self.store.buffers[name] for name in changed]
        flat = torch.cat([buffer.detach().reshape(-1).double() for buffer in buffers])
        group = tuple(rank for rank, _ in partners)
        self.fabric.broadcast(f"running statistics of block {block}", flat, group, roots[0]).wait()
        if self.fabric.rank in roots:
            return  # their values are current, and backward may still need these very tensors
        offset = 0
        for buffer in buffers:
            buffer.copy_(flat[offset : offset + buffer.numel()].view(buffer.shape))
            offset += buffer.numel()


def find_sync_partners(program: Program, rank: int) -> dict[tuple[int, int], SyncPartners]:
    """Return who normalizes together with a rank, by its blocks and microbatches.

    These are the ranks whose samples are in the same mean loss and which hold the same tensor-parallel shard: each
    brings the first microbatch that it runs, then the second one, and so on.
    """
    rank_program = program.rank_programs[rank]
    members = [
        member
        for member in ranks_sharing_loss(rank_program, rank)
        if program.rank_programs[member].tp_rank == rank_program.tp_rank
    ]
    micros = {member: forward_microbatches(program.rank_programs[member].body) for member in members}
    return {
        (block, micro): tuple(
            (member, micros[member][block][position]) for member in members if position < len(micros[member][block])
        )
        for block, own_micros in micros[rank].items()
        for position, micro in enumerate(own_micros)
    }


def ranks_sharing_loss(rank_program: RankProgram, rank: int) -> Group:
    """Return the ranks whose samples are in the same mean loss as a rank's."""
    commit = next(
        (instruction for instruction in rank_program.body if isinstance(instruction, Commit)), Commit((rank,))
    )
    return commit.loss_group or commit.group


def forward_microbatches(instructions: Sequence[Instruction]) -> defaultdict[int, list[int]]:
    """Return the microbatches that each block runs on, in order."""
    micros: defaultdict[int, list[int]] = defaultdict(list)
    for instruction in instructions:
        if isinstance(instruction, Forward):
            micros[instruction.block].append(instruction.micro)
    return micros


def require_no_sync_in_async_pipeline(program: Program, modules: Sequence[SyncBatchNormModule]) -> None:
    """Raise if ranks would have to normalize together in an asynchronous pipeline.

    Raises:
        PlanError: they would.
    """
    for rank, rank_program in enumerate(program.rank_programs):
        if len(ranks_sharing_loss(rank_program, rank)) > rank_program.tp_degree:
            raise PlanError(
                f"{modules[0].path} is a {modules[0].kind}, which replicas normalize together, but the replicas of a "
                f"stage do not run at the same time in an asynchronous pipeline; {modules[0].remedy}, so that each "
                "normalizes its own microbatches, or use schedule=one_f_one_b"
            )


def require_not_recomputed(program: Program, modules: Sequence[SyncBatchNormModule]) -> None:
    """Raise if replicas that normalize together would have to exchange statistics again where one recomputes.

    Raises:
        PlanError: they would.
    """
    for rank, rank_program in enumerate(program.rank_programs):
        recomputed = {
            (instruction.block, instruction.micro)
            for instruction in rank_program.body
            if isinstance(instruction, Recompute)
        }
        partners = find_sync_partners(program, rank) if recomputed else {}
        if any(len(partners.get(key, ())) > 1 for key in recomputed):
            raise PlanError(
                f"{modules[0].path} is a {modules[0].kind}, which replicas normalize together, and rank {rank} "
                f"recomputes its block when the others do not; {modules[0].remedy}, so that each normalizes its own "
                "microbatches, or set recompute=never"
            )


def require_no_deadlock(program: Program, modules: Sequence[SyncBatchNormModule]) -> None:
    """Raise if replicas that exchange statistics in every forward and backward could wait forever.

    Raises:
        PlanError: they could.
    """
    programs = []
    for rank, rank_program in enumerate(program.rank_programs):
        partners, instructions = find_sync_partners(program, rank), list[Instruction]()
        counts: Counter[tuple[type, int]] = Counter()
        for instruction in rank_program.body:
            instructions.append(instruction)
            if isinstance(instruction, Forward | Backward):
                index = counts[type(instruction), instruction.block]
                counts[type(instruction), instruction.block] += 1
                group = tuple(member for member, _ in partners.get((instruction.block, instruction.micro), ()))
                tensor = TensorRef("y" if isinstance(instruction, Forward) else "dx", (instruction.block,), index)
                instructions += [Collective("all_reduce", tensor, group)] if len(group) > 1 else []
        programs.append(tuple(instructions))
    try:
        for _ in execution_order(programs):
            pass
    except ProgramError as error:
        raise PlanError(
            f"{modules[0].path} is a {modules[0].kind}, in which replicas wait for each other, and in this plan they "
            "would deadlock, because they run their microbatches in different orders; give all stages equally many "
            f"replicas (pipeline(p) * data(r)), or {modules[0].remedy}"
        ) from error
