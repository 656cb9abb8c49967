"""torch's collectives and reductions on a fabric: copies before, the fabric's collective, copies after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, pairwise
from typing import Final

import torch
from torch import Tensor

from counterpoint.errors import PeerError, ProgramError
from counterpoint.fabric.c10d import ReduceOp
from counterpoint.fabric.fabric import Fabric, Reduction, Work
from counterpoint.fabric.fingerprint import dtype_name
from counterpoint.fabric.torch_backend.work import StartedCollective

Combine = Callable[[Tensor, Tensor], Tensor]

SUM: Final = ReduceOp.SUM
FABRIC_REDUCTIONS: Final[tuple[tuple[ReduceOp.RedOpType, Reduction], ...]] = (
    (ReduceOp.SUM, "sum"), (ReduceOp.AVG, "mean"), (ReduceOp.MAX, "max"), (ReduceOp.MIN, "min"),
)  # fmt: skip
COMBINES: Final[tuple[tuple[ReduceOp.RedOpType, Combine], ...]] = (
    (ReduceOp.PRODUCT, torch.mul), (ReduceOp.BAND, torch.bitwise_and),
    (ReduceOp.BOR, torch.bitwise_or), (ReduceOp.BXOR, torch.bitwise_xor),
)  # fmt: skip
WIDER: Final = {torch.bool: torch.int32, torch.uint8: torch.int32, torch.int8: torch.int32, torch.int16: torch.int32}


@dataclass(frozen=True, slots=True)
class TorchReduction:
    """How a reduction of torch runs on the fabric, for tensors of one dtype.

    Attributes:
        op: the fabric's reduction, on tensors of ``compute_dtype``.
        compute_dtype: the dtype given to the fabric; a sum of narrower integers wraps as in torch.
        combine: combines two ranks' tensors, if the fabric lacks the reduction; ``op`` is then unused.
        divides: whether to divide a sum by the number of ranks, rounding towards zero: a mean of integers.
    """

    op: Reduction
    compute_dtype: torch.dtype
    combine: Combine | None = None
    divides: bool = False

    @property
    def is_direct(self) -> bool:
        """Whether the fabric's result needs no further step."""
        return self.combine is None and not self.divides

    def finalize(self, reduced: Tensor, num_ranks: int, dtype: torch.dtype) -> Tensor:
        """Return the fabric's result as torch defines it."""
        whole = torch.div(reduced, num_ranks, rounding_mode="trunc") if self.divides else reduced
        return whole if whole.dtype == dtype else whole.to(dtype)

    def combine_rows(self, rows: Tensor) -> Tensor:
        """Combine one row per rank, in rank order."""
        assert self.combine is not None
        return reduce(self.combine, rows.unbind())


def plan_reduction(op: ReduceOp | ReduceOp.RedOpType, dtype: torch.dtype) -> TorchReduction:
    """Return how to run torch's reduction.

    Raises:
        ProgramError: it is not supported.
    """
    for torch_op, fabric_op in FABRIC_REDUCTIONS:
        if op == torch_op:
            compute_dtype = WIDER.get(dtype, dtype)
            if dtype == torch.bool and fabric_op == "sum":  # True + True is True, not 2
                return TorchReduction("max", compute_dtype)
            if fabric_op == "mean" and not compute_dtype.is_floating_point:
                return TorchReduction("sum", compute_dtype, divides=True)
            return TorchReduction(fabric_op, compute_dtype)
    for torch_op, combine in COMBINES:
        if op == torch_op:
            return TorchReduction("sum", dtype, combine)
    raise ProgramError(
        f"backend counterpoint has no reduction {op} of {dtype}; it has sum, avg, max, min, product, band, bor, bxor: "
        "scale the tensor before the all-reduce, or use the gloo backend"
    )


ExchangeCounts = list[list[int]]


class FabricCollectives:
    """The collectives of one group, which is the whole world of its fabric. Only all-to-all waits when it starts.

    Args:
        fabric: of this group alone.
    """

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._rank = fabric.rank
        self._everybody = tuple(range(fabric.num_ranks))

    def all_reduce(self, tensor: Tensor, op: ReduceOp, label: str = "a tensor") -> StartedCollective:
        """Start to reduce the tensor on all members."""
        values, reduction = tensor.detach(), plan_reduction(op, tensor.dtype)
        if reduction.combine is not None:
            return self._gather_and_combine(values, reduction, label)
        if reduction.compute_dtype == values.dtype and reduction.is_direct:
            return StartedCollective([self._fabric.all_reduce(label, values, self._everybody, reduction.op)], [tensor])
        converted = values.to(reduction.compute_dtype, copy=True)
        work = self._fabric.all_reduce(f"{label} of {values.dtype}", converted, self._everybody, reduction.op)
        return StartedCollective(
            [work], [tensor], lambda: values.copy_(reduction.finalize(converted, len(self._everybody), values.dtype))
        )

    def reduce(self, tensor: Tensor, op: ReduceOp, root: int) -> StartedCollective:
        """Start to reduce the root's tensor; the others' are unchanged."""
        label = f"a tensor for rank {root}"
        if self._rank == root:
            return self.all_reduce(tensor, op, label)
        copy = self._scratch(tensor.numel(), tensor.dtype).view(tensor.shape)
        return StartedCollective(self.all_reduce(copy.copy_(tensor.detach()), op, label).works, [tensor])

    def broadcast(self, tensor: Tensor, root: int) -> StartedCollective:
        """Start to copy the root's tensor to all members."""
        return StartedCollective([self._fabric.broadcast("a tensor", tensor.detach(), self._everybody, root)], [tensor])

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> StartedCollective:
        """Start to copy member ``i``'s tensor to ``outputs[i]``.

        Raises:
            ProgramError: there is not one output per member, or the own one does not match the tensor.
        """
        self._check_parts("all_gather", outputs, tensor)
        bounds = [0, *accumulate(output.numel() for output in outputs)]
        whole = self._scratch(bounds[-1], tensor.dtype)
        self._own_part(whole, bounds).copy_(tensor.detach().reshape(-1))
        work = self._fabric.all_gather(f"tensors like {tuple(tensor.shape)}", whole, bounds, self._everybody)
        parts = [whole[start:stop] for start, stop in pairwise(bounds)]
        return StartedCollective([work], outputs, lambda: copy_parts(parts, outputs))

    def all_gather_into_tensor(self, output: Tensor, tensor: Tensor) -> StartedCollective:
        """Start to concatenate all members' tensors in one.

        Raises:
            ProgramError: the sizes do not match.
        """
        own, bounds = tensor.detach(), self._even_bounds("all_gather", output, tensor)
        whole = output.detach().view(-1) if output.is_contiguous() else output.new_empty(output.numel())
        part = self._own_part(whole, bounds)
        if part.data_ptr() != own.data_ptr():
            part.copy_(own.reshape(-1))
        work = self._fabric.all_gather(f"tensors like {tuple(own.shape)}", whole, bounds, self._everybody)
        if output.is_contiguous():
            return StartedCollective([work], [output])
        return StartedCollective([work], [output], lambda: output.detach().copy_(whole.view(output.shape)))

    def reduce_scatter(self, output: Tensor, tensors: Sequence[Tensor], op: ReduceOp) -> StartedCollective:
        """Start to reduce all members' tensors for this member into ``output``; the inputs are unchanged.

        Raises:
            ProgramError: there is not one tensor per member, or the own one does not match the output.
        """
        self._check_parts("reduce_scatter", tensors, output)
        bounds = [0, *accumulate(tensor.numel() for tensor in tensors)]
        through = plan_reduction(op, output.dtype).compute_dtype
        whole = self._scratch(bounds[-1], through)
        for (start, stop), tensor in zip(pairwise(bounds), tensors, strict=True):
            whole[start:stop].copy_(tensor.detach().reshape(-1))
        return self._reduce_scatter(output, whole, bounds, op)

    def reduce_scatter_tensor(self, output: Tensor, tensor: Tensor, op: ReduceOp) -> StartedCollective:
        """Start to reduce this member's part of all members' tensors into ``output``; the inputs are unchanged.

        Raises:
            ProgramError: the sizes do not match.
        """
        bounds = self._even_bounds("reduce_scatter", tensor, output)
        whole = self._scratch(bounds[-1], plan_reduction(op, output.dtype).compute_dtype)
        whole.copy_(tensor.detach().reshape(-1))
        return self._reduce_scatter(output, whole, bounds, op)

    def scatter(self, output: Tensor, tensors: Sequence[Tensor], root: int) -> StartedCollective:
        """Start to copy the root's tensor ``i`` to the output of member ``i``."""
        if self._rank == root:
            self._check_parts("scatter", tensors, output)
        count = output.numel()
        counts = [[count if member == root else 0] * len(self._everybody) for member in self._everybody]
        return self._exchange(f"tensors like {tuple(output.shape)} of rank {root}", [output], tensors, counts)

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> StartedCollective:
        """Start to copy member ``i``'s tensor to the root's output ``i``."""
        if self._rank == root:
            self._check_parts("gather", outputs, tensor)
        count = tensor.numel()
        counts = [[count if member == root else 0 for member in self._everybody] for _ in self._everybody]
        return self._exchange(f"tensors like {tuple(tensor.shape)} for rank {root}", outputs, [tensor], counts)

    def all_to_all(self, outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> StartedCollective:
        """Start to copy tensor ``j`` of member ``i`` to output ``i`` of member ``j``."""
        counts = self._exchange_counts(
            [len(part) for part in map(flatten, tensors)], [part.numel() for part in outputs]
        )
        return self._exchange("tensors", outputs, tensors, counts)

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int]
    ) -> StartedCollective:
        """Start to copy part ``j`` of member ``i``'s tensor to part ``i`` of member ``j``'s output.

        Args:
            output: the destination.
            tensor: the source.
            output_sizes: of the output's parts along dim 0; empty for equal ones.
            input_sizes: of the tensor's parts.
        """
        parts = split_rows(output.detach(), output_sizes, len(self._everybody))
        given = split_rows(tensor.detach(), input_sizes, len(self._everybody))
        started = self.all_to_all(parts, given)
        return StartedCollective(started.works, [output], started.after)

    def barrier(self) -> StartedCollective:
        """Start a barrier."""
        token = torch.zeros(1, dtype=torch.int32)
        return StartedCollective([self._fabric.all_reduce("arrivals at a barrier", token, self._everybody)], [token])

    def _reduce_scatter(self, output: Tensor, whole: Tensor, bounds: Sequence[int], op: ReduceOp) -> StartedCollective:
        reduction, part = plan_reduction(op, output.dtype), self._own_part(whole, bounds)
        what = f"tensors like {tuple(output.shape)}"
        if reduction.combine is None:
            works: Sequence[Work] = [self._fabric.reduce_scatter(what, whole, bounds, self._everybody, reduction.op)]
            after: Callable[[], object] | None = None
        else:
            gathered = self._gather_and_combine(whole, reduction, what)
            works, after = gathered.works, gathered.after

        def finish() -> None:
            if after is not None:
                after()
            result = reduction.finalize(part, len(self._everybody), output.dtype)
            output.detach().copy_(result.view(output.shape))

        return StartedCollective(works, [output], finish)

    def _gather_and_combine(self, own: Tensor, reduction: TorchReduction, label: str) -> StartedCollective:
        name = getattr(reduction.combine, "__name__", "fold")
        bounds = [index * own.numel() for index in range(len(self._everybody) + 1)]
        rows = self._scratch(bounds[-1], own.dtype)
        self._own_part(rows, bounds).copy_(own.reshape(-1))
        work = self._fabric.all_gather(f"{label} of shape {tuple(own.shape)} for {name}", rows, bounds, self._everybody)
        shape = (len(self._everybody), *own.shape)
        return StartedCollective([work], [own], lambda: own.copy_(reduction.combine_rows(rows.view(shape))))

    def _exchange(
        self, label: str, outputs: Sequence[Tensor], tensors: Sequence[Tensor], counts: ExchangeCounts
    ) -> StartedCollective:
        dtype = (*outputs, *tensors)[0].dtype
        flat = [flatten(tensor) for tensor in tensors]
        num_sent = sum(counts[self._rank])
        whole = self._scratch(num_sent, dtype)
        torch.cat(flat, out=whole) if num_sent else whole
        received, work = self._fabric.all_to_all(label, whole, counts, self._everybody)
        receive_counts = [row[self._rank] for row in counts]
        filled = [part for part in torch.split_with_sizes(received, receive_counts) if len(part)]
        targets = [output for output in outputs if output.numel()] if filled else []
        return StartedCollective([work], outputs, lambda: copy_parts(filled, targets))

    def _exchange_counts(self, given: Sequence[int], expected: Sequence[int]) -> ExchangeCounts:
        """Gather the split sizes; return how many elements each member sends to each. Waits for all members.

        Raises:
            PeerError: a member expects another size than its peer sends; all members raise it.
        """
        count = len(self._everybody)
        if not len(given) == len(expected) == count:
            raise ProgramError(
                f"all_to_all with {len(given)} tensors to send and {len(expected)} to receive among {count} ranks; "
                "give one for each rank"
            )
        table = torch.tensor([*given, *expected], dtype=torch.int64).repeat(count)
        bounds = [2 * count * index for index in range(count + 1)]
        self._fabric.all_gather("the sizes of an exchange", table, bounds, self._everybody).wait()
        gives, expects = table.view(count, 2, count).unbind(1)
        if not torch.equal(gives, expects.T):
            source, target = (gives != expects.T).nonzero()[0].tolist()
            raise PeerError(
                f"all_to_all: rank {source} sends {int(gives[source, target])} elements to rank {target}, which "
                "expects "
                f"{int(expects[target, source])}; the two must agree: compare their split sizes"
            )
        return gives.tolist()

    def _even_bounds(self, label: str, whole: Tensor, part: Tensor) -> list[int]:
        count = len(self._everybody)
        if whole.numel() != count * part.numel() or whole.dtype != part.dtype:
            raise ProgramError(
                f"{label} between one tensor {format_tensor(part)} per rank and one {format_tensor(whole)} for "
                f"{count} ranks; "
                f"the second must have {count} times as many numbers, of the same dtype"
            )
        return [index * part.numel() for index in range(count + 1)]

    def _check_parts(self, label: str, parts: Sequence[Tensor], own: Tensor) -> None:
        count = len(self._everybody)
        sizes = [part.numel() for part in parts]
        if len(parts) != count or sizes[self._rank] != own.numel() or parts[self._rank].dtype != own.dtype:
            shown = ", ".join(map(format_tensor, parts))
            raise ProgramError(
                f"{label} on rank {self._rank} between a tensor {format_tensor(own)} and a list of {shown or 'none'}; "
                "the list "
                f"needs one tensor for each of {count} ranks, the own one as large and of the same dtype"
            )

    def _own_part(self, whole: Tensor, bounds: Sequence[int]) -> Tensor:
        return whole[bounds[self._rank] : bounds[self._rank + 1]]

    def _scratch(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return a buffer of the fabric; rounding sizes to four per octave lets few segments serve all of them."""
        step = max(1024, 1 << max(num_elements.bit_length() - 3, 0))
        return self._fabric.empty(-(-num_elements // step) * step, dtype)[:num_elements]


def flatten(tensor: Tensor) -> Tensor:
    """Return a flat view or copy."""
    return tensor.detach().reshape(-1)


def copy_parts(parts: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Copy each part to its output."""
    for part, output in zip(parts, outputs, strict=True):
        output.detach().copy_(part.view(output.shape))


def split_rows(whole: Tensor, sizes: Sequence[int], count: int) -> list[Tensor]:
    """Split a tensor along dim 0 into views; into equal ones if no sizes are given.

    Raises:
        ProgramError: the sizes do not match.
    """
    rows = len(whole) if whole.dim() else 0
    if not sizes and rows % count == 0:
        sizes = [rows // count] * count
    if len(sizes) != count or sum(sizes) != rows:
        raise ProgramError(
            f"all_to_all of a tensor {format_tensor(whole)} in parts of {list(sizes) or 'even size'} among {count} "
            "ranks; "
            "give one size for each rank that add up to its first dim"
        )
    return list(torch.split_with_sizes(whole, list(sizes)))


def format_tensor(tensor: Tensor) -> str:
    """Return dtype and shape for errors."""
    return f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"
