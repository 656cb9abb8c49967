"""Batch norm whose mean and variance are those of several ranks' samples together, forwards and backwards.

What ``torch.nn.SyncBatchNorm`` means in a plan: replicas normalize the microbatches that they run side by side.

Its statistics are needed in the middle of a forward, in an exchange that no word of the program shows: a function mode
that is active while blocks run (:mod:`counterpoint.runtime.batch_norm.mode`) sees the calls of batch norm that belong to
such modules, and has them meet those of the other replicas. That no rank waits for ever in one is proved by a walk of
the program, into which the meetings are put for that.
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

StatsT = TypeVar("Figures", Tensor, np.ndarray[tuple[int, ...], np.dtype[np.float64]])


class StatsGroup(Protocol):
    """Those whose samples are normalized together."""

    def gather(self, row: Tensor) -> Tensor:
        """Return everybody's row of float64, this rank's ``(1, number)`` among them, as ``(rank, number)``."""

    def all_reduce(self, sums: Tensor) -> None:
        """Replace the tensor by its sum over everybody."""


class RunningStats(NamedTuple):
    """What a module keeps of the statistics of its batches; it is changed in place.

    Args:
        mean: by channel.
        var: by channel.
        momentum: the part of the newest batch.
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
    """Return values ``(sample, channel, ...)`` normalized as batch norm in training does for all members' samples.

    The gradient of the values is that of the sum of all members' losses; those of weight and bias are this rank's part
    of theirs, as of any other parameter.

    Args:
        values: this rank's; any number of samples, also none.
        weight: by channel, or None.
        bias: by channel, or None.
        running: what is kept; the same afterwards on all members, if it was before.
        eps: added to the variance.
        union: the members; all of them call this together, and go backward together.

    Raises:
        DataError: no member has a value.
        ValueError: there is one value by channel in all, in the words of torch's own batch norm.

    Cost:
        one all-gather of ``2 channel + 1`` float64 per rank forwards, one sum of ``2 channel`` backwards.

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
            ctx: what is kept for backward.
            values: ``(sample, channel, ...)``; the result has their shape and dtype.
            weight: ``(channel,)``, or None.
            bias: ``(channel,)``, or None.
            eps: added to the variance.
            union: the members. Mean and variance are ``(channel,)`` and have no gradient.
        """
        mean, var, count = group_statistics(values, group)
        shape = [1, -1, *[1] * (values.dim() - 2)]
        wide = torch.promote_types(values.dtype, torch.float32)
        scale = (var + eps).rsqrt()
        normal = (values.to(wide) - mean.to(wide).view(shape)) * scale.to(wide).view(shape)
        result = normal
        if weight is not None:
            result = result * weight.to(wide).view(shape)
        if bias is not None:
            result = result + bias.to(wide).view(shape)
        ctx.save_for_backward(normal, scale, weight)
        ctx.count, ctx.dtype, ctx.has_bias, ctx.union = count, values.dtype, bias is not None, group
        ctx.mark_non_differentiable(mean, var)
        return result.to(values.dtype), mean, var, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: object) -> Any:  # noqa: ANN401 - torch's own
        """Return the gradients of values, of all members' losses, and this rank's part of those of weight and bias."""
        normal, scale, weight = ctx.saved_tensors
        wide, shape = normal.dtype, [1, -1, *[1] * (normal.dim() - 2)]
        dims = [dim for dim in range(normal.dim()) if dim != 1]
        given = grad.to(wide)
        sums = torch.cat([given.sum(dims), (given * normal).sum(dims)])
        own_bias, own_weight = sums.clone().chunk(2)
        ctx.union.add(sums)
        mean_grad, mean_product = (part.view(shape) / ctx.count for part in sums.chunk(2))
        factor = scale.to(wide) if weight is None else scale.to(wide) * weight.to(wide)
        result = (given - mean_grad - normal * mean_product) * factor.view(shape)
        own = None if weight is None else own_weight.to(weight.dtype)
        return result.to(ctx.dtype), own, own_bias.to(ctx.dtype) if ctx.has_bias else None, None, None


def group_statistics(values: Tensor, group: StatsGroup) -> tuple[Tensor, Tensor, int]:
    """Return mean and variance by channel, in float64, and the number of values by channel, of all members' samples.

    Raises:
        DataError: no member has a value.
        ValueError: there is one value by channel in all.
    """
    channels = values.shape[1]
    flat = values.detach().transpose(0, 1).reshape(channels, -1).to(torch.promote_types(values.dtype, torch.float32))
    own = torch.zeros(1, 2 * channels + 1, dtype=torch.float64)
    if flat.shape[1]:
        variance, mean = torch.var_mean(flat, dim=1, correction=0)
        own[0] = torch.cat([mean.double(), variance.double(), torch.tensor([flat.shape[1]], dtype=torch.float64)])
    rows = group.gather(own)
    means, variances, counts = rows[:, :channels], rows[:, channels:-1], rows[:, -1:]
    count = int(counts.sum())
    if not count:
        raise DataError("SyncBatchNorm: no rank has a sample; a batch of all ranks together needs at least one")
    if count == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {values.size()} on one rank alone"
        )
    return *combine_stats(means, variances, counts, counts.sum()), count


def combine_stats(means: StatsT, variances: StatsT, counts: StatsT, total: StatsT) -> tuple[StatsT, StatsT]:
    """Return mean and variance by channel of all values, from those of parts ``(part, channel)``.

    Args:
        means: of each part; of one without values anything finite.
        variances: over ``count``, not ``count - 1``.
        counts: values by channel of each part, ``(part, 1)`` or ``(part, channel)``.
        total: of all parts; not 0.
    """
    mean = (means * counts).sum(0) / total
    beyond = means - mean
    return mean, ((variances + beyond * beyond) * counts).sum(0) / total


SyncPartners: TypeAlias = tuple[tuple[int, int], ...]
"""The ranks that normalize together, each with the microbatch that it brings."""


@dataclass(frozen=True, slots=True)
class SyncBatchNormModule:
    """One module that normalizes with those of other replicas.

    Args:
        path: of the module.
        mark: the parameter or buffer by which its calls are known.
        buffers: what it keeps of its batches; none if it keeps nothing.
        kind: what it is, for errors.
    """

    path: str
    tensor_name: str
    buffers: tuple[str, ...]
    kind: str = "SyncBatchNorm"

    @property
    def remedy(self) -> str:
        """What to do for each replica to normalize its own microbatches."""
        return "take BatchNorm" if self.kind == "SyncBatchNorm" else "leave batch_norm='sync' out"


def find_sync_modules(model: nn.Module, *, all_modules: bool = False) -> list[SyncBatchNormModule]:
    """Return the modules of a model that normalize with those of other replicas.

    Args:
        model: any.
        every: whether all modules of batch norm do; otherwise those of SyncBatchNorm.

    Raises:
        PlanError: one has neither running statistics nor a weight, so that its calls cannot be told from others.
    """
    names = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    found = []
    wanted = nn.modules.batchnorm._BatchNorm if all_modules else nn.SyncBatchNorm  # noqa: SLF001 - what all of them are
    for path, module in model.named_modules():
        if not isinstance(module, wanted):
            continue
        is_own = isinstance(module, nn.SyncBatchNorm)
        kind = "SyncBatchNorm" if is_own else f"{type(module).__name__} under batch_norm='sync'"
        own = [tensor for tensor in (module.running_mean, module.weight) if tensor is not None]
        if not own:
            raise PlanError(
                f"{path} is a {kind} with affine=False and track_running_stats=False, which has no tensor to know it "
                "by; leave one of the two at its default"
            )
        found.append(
            SyncBatchNormModule(path, names[id(own[0])], tuple(names[id(buffer)] for buffer in module.buffers()), kind)
        )
    return found


class ReplicaStatsGroup:
    """The ranks that normalize together in one module; see :class:`counterpoint.runtime.batch_norm.sync.StatsGroup`.

    Args:
        fabric: the way to them.
        group: their ranks.
        path: of the module.
    """

    def __init__(self, fabric: Fabric, group: Group, path: str) -> None:
        self.fabric = fabric
        self.group = group
        self.path = path
        self.count = 0  # values by channel of everybody, once gathered

    def gather(self, row: Tensor) -> Tensor:
        """Return everybody's row."""
        rows = start_all_gather(self.fabric, self.group, f"statistics of {self.path}", row[0]).wait()
        self.count = int(rows[:, -1].sum())
        return rows

    def all_reduce(self, sums: Tensor) -> None:
        """Replace the tensor by its sum over everybody."""
        self.fabric.all_reduce(f"gradient of {self.path}", sums, self.group).wait()


class PendingAllGather:
    """Rows of a group's members, which are on their way.

    Args:
        whole: where they will be, one after the other.
        count: members.
        work: brings them; None where there is nothing to bring.
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
    """Begin to bring the rows ``(number,)`` of all members of a group to all of them, which call it together."""
    count, width = len(group), row.numel()
    whole = row.new_zeros(count * width)
    at = group.index(fabric.rank)
    whole[at * width : (at + 1) * width] = row
    bounds = range(0, (count + 1) * width, width)
    return PendingAllGather(whole, count, fabric.all_gather(label, whole, bounds, group) if count > 1 else None)


class SyncBatchNormGroups:
    """How one rank's SyncBatchNorm modules meet those of other ranks.

    Args:
        norms: the modules.
        store: the rank's parameters and buffers.
        fabric: its way to the others.
        seats: who normalizes together, by block and microbatch of this rank.
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
        self.paths = {id(tensors[norm.tensor_name]): norm.path for norm in modules if norm.tensor_name in tensors}

    def group(self, block: int, micro: int, sizes: Mapping[int, int]) -> Group:
        """Return who meets while a microbatch goes through blocks: those that have samples; none if that is one."""
        group = tuple(rank for rank, theirs in self.partners.get((block, micro), ()) if sizes[theirs])
        return group if len(group) > 1 else ()

    def broadcast_stats(self, names: Sequence[str], block: int, micro: int, sizes: Mapping[int, int]) -> None:
        """Give the running statistics to members without samples; all members call it after a forward, or instead.

        Args:
            names: of the buffers that the blocks may change.
            block: the first of them.
            micro: the microbatch that this rank brings.
            sizes: of every microbatch.
        """
        seats = self.partners.get((block, micro), ())
        roots = [rank for rank, theirs in seats if sizes[theirs]]
        kept = [name for norm in self.modules for name in norm.buffers if name in set(names)]
        if not kept or not roots or len(roots) == len(seats):
            return
        buffers = [self.store.buffers[name] for name in kept]
        flat = torch.cat([buffer.detach().reshape(-1).double() for buffer in buffers])
        group = tuple(rank for rank, _ in seats)
        self.fabric.broadcast(f"running statistics of block {block}", flat, group, roots[0]).wait()
        if self.fabric.rank in roots:
            return  # they have them, and a backward may still look at the very tensors
        begun = 0
        for buffer in buffers:
            buffer.copy_(flat[begun : begun + buffer.numel()].view(buffer.shape))
            begun += buffer.numel()


def find_sync_partners(program: Program, rank: int) -> dict[tuple[int, int], SyncPartners]:
    """Return who normalizes together with a rank, by its blocks and microbatches.

    Those are the ranks whose samples share one mean with this one's, and which hold the same slices: each brings the
    first microbatch that it runs, then the second one, and so on.
    """
    row = program.rank_programs[rank]
    members = [other for other in ranks_sharing_loss(row, rank) if program.rank_programs[other].tp_rank == row.tp_rank]
    micros = {other: forward_microbatches(program.rank_programs[other].body) for other in members}
    return {
        (block, micro): tuple((other, micros[other][block][at]) for other in members if at < len(micros[other][block]))
        for block, own in micros[rank].items()
        for at, micro in enumerate(own)
    }


def ranks_sharing_loss(rank_program: RankProgram, rank: int) -> Group:
    """Return the ranks whose samples share one mean with a rank's."""
    commit = next((word for word in rank_program.body if isinstance(word, Commit)), Commit((rank,)))
    return commit.loss_group or commit.group


def forward_microbatches(instructions: Sequence[Instruction]) -> defaultdict[int, list[int]]:
    """Return the microbatches that each block runs on, in order."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    for word in instructions:
        if isinstance(word, Forward):
            found[word.block].append(word.micro)
    return found


def require_no_sync_in_async_pipeline(program: Program, modules: Sequence[SyncBatchNormModule]) -> None:
    """Check that nobody has to normalize together with other ranks in the body of a stream.

    Raises:
        PlanError: somebody has.
    """
    for rank, row in enumerate(program.rank_programs):
        if len(ranks_sharing_loss(row, rank)) > row.tp_degree:
            raise PlanError(
                f"{modules[0].path} is a {modules[0].kind}, which replicas normalize together, but those of a stage do not "
                f"meet in the middle of a forward in a pipeline without a flush; {modules[0].remedy}, so that each "
                "normalizes its own microbatches, or take schedule=one_f_one_b"
            )


def require_not_recomputed(program: Program, modules: Sequence[SyncBatchNormModule]) -> None:
    """Check that replicas which normalize together do not have to meet again where one recomputes.

    Raises:
        PlanError: they would.
    """
    for rank, row in enumerate(program.rank_programs):
        again = {(word.block, word.micro) for word in row.body if isinstance(word, Recompute)}
        seats = find_sync_partners(program, rank) if again else {}
        if any(len(seats.get(place, ())) > 1 for place in again):
            raise PlanError(
                f"{modules[0].path} is a {modules[0].kind}, which replicas normalize together, and rank {rank} computes "
                f"its block again at a time of its own; {modules[0].remedy}, so that each normalizes its own "
                "microbatches, or give recompute=never"
            )


def require_no_deadlock(program: Program, modules: Sequence[SyncBatchNormModule]) -> None:
    """Prove that replicas which meet in every block, forwards and backwards, never wait for ever.

    Raises:
        PlanError: they might.
    """
    rows = []
    for rank, row in enumerate(program.rank_programs):
        seats, words = find_sync_partners(program, rank), list[Instruction]()
        counts: Counter[tuple[type, int]] = Counter()
        for word in row.body:
            words.append(word)
            if isinstance(word, Forward | Backward):
                at = counts[type(word), word.block]
                counts[type(word), word.block] += 1
                group = tuple(member for member, _ in seats.get((word.block, word.micro), ()))
                value = TensorRef("y" if isinstance(word, Forward) else "dx", (word.block,), at)
                words += [Collective("all_reduce", value, group)] if len(group) > 1 else []
        rows.append(tuple(words))
    try:
        for _ in execution_order(rows):
            pass
    except ProgramError as error:
        raise PlanError(
            f"{modules[0].path} is a {modules[0].kind}, in which replicas wait for each other, but in this plan they would "
            "wait for ever, because they run their microbatches in different orders; give all stages as many replicas "
            f"(pipeline(p) * data(r)), or {modules[0].remedy}"
        ) from error
