"""Every collective of torch in the words of the fabric: what is copied before, what is started, what is copied then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from counterpoint.errors import PeerError, ProgramError
from counterpoint.fabric.fabric import Fabric, Work
from counterpoint.fabric.fingerprint import dtype_name
from counterpoint.fabric.gloo import ReduceOp
from counterpoint.fabric.torch_group.reductions import Reduction, reduction_of
from counterpoint.fabric.torch_group.work import Started

Counts = list[list[int]]


class Collectives:
    """The collectives of one group, which is the whole world of its fabric; only an exchange between all waits here.

    Args:
        fabric: of this group alone.
    """

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._rank = fabric.rank
        self._everybody = tuple(range(fabric.num_ranks))

    def all_reduce(self, tensor: Tensor, op: ReduceOp, what: str = "a tensor") -> Started:
        """Start to replace the tensor by what becomes of all ranks'."""
        own, reduction = tensor.detach(), reduction_of(op, tensor.dtype)
        if reduction.fold is not None:
            return self._fold(own, reduction, what)
        if reduction.through == own.dtype and reduction.is_direct:
            return Started([self._fabric.all_reduce(what, own, self._everybody, reduction.verb)], [tensor])
        wide = own.to(reduction.through, copy=True)
        work = self._fabric.all_reduce(f"{what} of {own.dtype}", wide, self._everybody, reduction.verb)
        return Started([work], [tensor], lambda: own.copy_(reduction.ended(wide, len(self._everybody), own.dtype)))

    def reduce(self, tensor: Tensor, op: ReduceOp, root: int) -> Started:
        """Start to replace the root's tensor; the others keep theirs."""
        what = f"a tensor for rank {root}"
        if self._rank == root:
            return self.all_reduce(tensor, op, what)
        given = self._scratch(tensor.numel(), tensor.dtype).view(tensor.shape)
        return Started(self.all_reduce(given.copy_(tensor.detach()), op, what).works, [tensor])

    def broadcast(self, tensor: Tensor, root: int) -> Started:
        """Start to replace the tensor by the root's."""
        return Started([self._fabric.broadcast("a tensor", tensor.detach(), self._everybody, root)], [tensor])

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> Started:
        """Start to copy member ``i``'s tensor to ``outputs[i]``.

        Raises:
            ProgramError: there is not one output per member, or the own one has another size than the tensor.
        """
        self._require_parts("all_gather", outputs, tensor)
        bounds = [0, *accumulate(output.numel() for output in outputs)]
        whole = self._scratch(bounds[-1], tensor.dtype)
        self._part(whole, bounds).copy_(tensor.detach().reshape(-1))
        work = self._fabric.all_gather(f"tensors like {tuple(tensor.shape)}", whole, bounds, self._everybody)
        parts = [whole[start:stop] for start, stop in pairwise(bounds)]
        return Started([work], outputs, lambda: put(parts, outputs))

    def all_gather_whole(self, output: Tensor, tensor: Tensor) -> Started:
        """Start to copy all members' tensors to one, back to back.

        Raises:
            ProgramError: the sizes do not fit.
        """
        own, bounds = tensor.detach(), self._even("all_gather", output, tensor)
        whole = output.detach().view(-1) if output.is_contiguous() else output.new_empty(output.numel())
        part = self._part(whole, bounds)
        if part.data_ptr() != own.data_ptr():
            part.copy_(own.reshape(-1))
        work = self._fabric.all_gather(f"tensors like {tuple(own.shape)}", whole, bounds, self._everybody)
        if output.is_contiguous():
            return Started([work], [output])
        return Started([work], [output], lambda: output.detach().copy_(whole.view(output.shape)))

    def reduce_scatter(self, output: Tensor, tensors: Sequence[Tensor], op: ReduceOp) -> Started:
        """Start to put into ``output`` what becomes of all members' tensors for this one; the tensors stay as they are.

        Raises:
            ProgramError: there is not one tensor per member, or the own one has another size than the output.
        """
        self._require_parts("reduce_scatter", tensors, output)
        bounds = [0, *accumulate(tensor.numel() for tensor in tensors)]
        through = reduction_of(op, output.dtype).through
        whole = self._scratch(bounds[-1], through)
        for (start, stop), tensor in zip(pairwise(bounds), tensors, strict=True):
            whole[start:stop].copy_(tensor.detach().reshape(-1))
        return self._reduce_scatter(output, whole, bounds, op)

    def reduce_scatter_whole(self, output: Tensor, tensor: Tensor, op: ReduceOp) -> Started:
        """Start to put into ``output`` what becomes of this member's part of all tensors, which stay as they are.

        Raises:
            ProgramError: the sizes do not fit.
        """
        bounds = self._even("reduce_scatter", tensor, output)
        whole = self._scratch(bounds[-1], reduction_of(op, output.dtype).through)
        whole.copy_(tensor.detach().reshape(-1))
        return self._reduce_scatter(output, whole, bounds, op)

    def scatter(self, output: Tensor, tensors: Sequence[Tensor], root: int) -> Started:
        """Start to copy the root's tensor number ``i`` to the output of member ``i``."""
        if self._rank == root:
            self._require_parts("scatter", tensors, output)
        count = output.numel()
        counts = [[count if member == root else 0] * len(self._everybody) for member in self._everybody]
        return self._exchange(f"tensors like {tuple(output.shape)} of rank {root}", [output], tensors, counts)

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> Started:
        """Start to copy member ``i``'s tensor to the root's output number ``i``."""
        if self._rank == root:
            self._require_parts("gather", outputs, tensor)
        count = tensor.numel()
        counts = [[count if member == root else 0 for member in self._everybody] for _ in self._everybody]
        return self._exchange(f"tensors like {tuple(tensor.shape)} for rank {root}", outputs, [tensor], counts)

    def all_to_all(self, outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> Started:
        """Start to copy tensor number ``j`` of member ``i`` to output number ``i`` of member ``j``."""
        counts = self._agree([len(part) for part in map(flat, tensors)], [part.numel() for part in outputs])
        return self._exchange("tensors", outputs, tensors, counts)

    def all_to_all_whole(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int]
    ) -> Started:
        """Start to copy part ``j`` of member ``i``'s tensor to part ``i`` of member ``j``'s output.

        Args:
            output: where to.
            tensor: where from.
            output_sizes: of the output's parts, along its first dim; even ones where there are none.
            input_sizes: of the tensor's parts.
        """
        parts = split(output.detach(), output_sizes, len(self._everybody))
        given = split(tensor.detach(), input_sizes, len(self._everybody))
        started = self.all_to_all(parts, given)
        return Started(started.works, [output], started.after)

    def barrier(self) -> Started:
        """Start to wait for all members."""
        arrived = torch.zeros(1, dtype=torch.int32)
        return Started([self._fabric.all_reduce("arrivals at a barrier", arrived, self._everybody)], [arrived])

    def _reduce_scatter(self, output: Tensor, whole: Tensor, bounds: Sequence[int], op: ReduceOp) -> Started:
        reduction, part = reduction_of(op, output.dtype), self._part(whole, bounds)
        what = f"tensors like {tuple(output.shape)}"
        if reduction.fold is None:
            works: Sequence[Work] = [self._fabric.reduce_scatter(what, whole, bounds, self._everybody, reduction.verb)]
            after: Callable[[], object] | None = None
        else:
            folding = self._fold(whole, reduction, what)
            works, after = folding.works, folding.after

        def finish() -> None:
            if after is not None:
                after()
            ended = reduction.ended(part, len(self._everybody), output.dtype)
            output.detach().copy_(ended.view(output.shape))

        return Started(works, [output], finish)

    def _fold(self, own: Tensor, reduction: Reduction, what: str) -> Started:
        name = getattr(reduction.fold, "__name__", "fold")
        bounds = [index * own.numel() for index in range(len(self._everybody) + 1)]
        rows = self._scratch(bounds[-1], own.dtype)
        self._part(rows, bounds).copy_(own.reshape(-1))
        work = self._fabric.all_gather(f"{what} of shape {tuple(own.shape)} for {name}", rows, bounds, self._everybody)
        shape = (len(self._everybody), *own.shape)
        return Started([work], [own], lambda: own.copy_(reduction.folded(rows.view(shape))))

    def _exchange(self, what: str, outputs: Sequence[Tensor], tensors: Sequence[Tensor], counts: Counts) -> Started:
        dtype = (*outputs, *tensors)[0].dtype
        pieces = [flat(tensor) for tensor in tensors]
        given = sum(counts[self._rank])
        whole = self._scratch(given, dtype)
        torch.cat(pieces, out=whole) if given else whole
        received, work = self._fabric.all_to_all(what, whole, counts, self._everybody)
        theirs = [row[self._rank] for row in counts]
        filled = [part for part in torch.split_with_sizes(received, theirs) if len(part)]
        targets = [output for output in outputs if output.numel()] if filled else []
        return Started([work], outputs, lambda: put(filled, targets))

    def _agree(self, given: Sequence[int], expected: Sequence[int]) -> Counts:
        """Return how many numbers go from whom to whom; all ranks have told, and waited for it.

        Raises:
            PeerError: one expects other than another gives; all ranks raise it.
        """
        count = len(self._everybody)
        if not len(given) == len(expected) == count:
            raise ProgramError(
                f"all_to_all with {len(given)} tensors to give and {len(expected)} to receive among {count} ranks; "
                "give one for each rank"
            )
        table = torch.tensor([*given, *expected], dtype=torch.int64).repeat(count)
        bounds = [2 * count * index for index in range(count + 1)]
        self._fabric.all_gather("the sizes of an exchange", table, bounds, self._everybody).wait()
        gives, expects = table.view(count, 2, count).unbind(1)
        if not torch.equal(gives, expects.T):
            source, target = (gives != expects.T).nonzero()[0].tolist()
            raise PeerError(
                f"all_to_all: rank {source} gives {int(gives[source, target])} numbers to rank {target}, which expects "
                f"{int(expects[target, source])}; the sizes of the two must be equal: compare their split sizes"
            )
        return gives.tolist()

    def _even(self, what: str, whole: Tensor, part: Tensor) -> list[int]:
        count = len(self._everybody)
        if whole.numel() != count * part.numel() or whole.dtype != part.dtype:
            raise ProgramError(
                f"{what} between one tensor {looks(part)} per rank and one {looks(whole)} for {count} ranks; "
                f"the second must have {count} times as many numbers, of the same dtype"
            )
        return [index * part.numel() for index in range(count + 1)]

    def _require_parts(self, what: str, parts: Sequence[Tensor], own: Tensor) -> None:
        count = len(self._everybody)
        sizes = [part.numel() for part in parts]
        if len(parts) != count or sizes[self._rank] != own.numel() or parts[self._rank].dtype != own.dtype:
            shown = ", ".join(map(looks, parts))
            raise ProgramError(
                f"{what} on rank {self._rank} between a tensor {looks(own)} and a list of {shown or 'none'}; the list "
                f"needs one tensor for each of {count} ranks, the own one as large and of the same dtype"
            )

    def _part(self, whole: Tensor, bounds: Sequence[int]) -> Tensor:
        return whole[bounds[self._rank] : bounds[self._rank + 1]]

    def _scratch(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return memory of the fabric; sizes are rounded up to four per octave, so that few segments serve all."""
        step = max(1024, 1 << max(num_elements.bit_length() - 3, 0))
        return self._fabric.empty(-(-num_elements // step) * step, dtype)[:num_elements]


def flat(tensor: Tensor) -> Tensor:
    """Return the numbers in one row."""
    return tensor.detach().reshape(-1)


def put(parts: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Each part is in its output."""
    for part, output in zip(parts, outputs, strict=True):
        output.detach().copy_(part.view(output.shape))


def split(whole: Tensor, sizes: Sequence[int], count: int) -> list[Tensor]:
    """Return the parts of a tensor along its first dim, as views; even ones where no sizes are given.

    Raises:
        ProgramError: the sizes do not fit.
    """
    rows = len(whole) if whole.dim() else 0
    if not sizes and rows % count == 0:
        sizes = [rows // count] * count
    if len(sizes) != count or sum(sizes) != rows:
        raise ProgramError(
            f"all_to_all of a tensor {looks(whole)} in parts of {list(sizes) or 'even size'} among {count} ranks; "
            "give one size for each rank that add up to its first dim"
        )
    return list(torch.split_with_sizes(whole, list(sizes)))


def looks(tensor: Tensor) -> str:
    """Return dtype and shape, as errors show them."""
    return f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"
