"""Split a backward at its gradient buckets, so that simulated all-reduces start as early as they do in a run.

A model that needs no partitioning is one block of a program, with one backward and one all-reduce. The runtime runs
the backward in one call and starts the all-reduce of each bucket of gradients as soon as the bucket is complete. For
the simulator the backward is split after each of these moments, and the all-reduce into buckets::

    program    B0.0                          all_reduce(grad0)
    simulated  B1.0  B2.0          B3.0      (slices of the backward, up to the end of each bucket)
                     |=grad2=|     |=grad0=| (all-reduces of buckets, on the link)

Every simulated instruction costs a fraction of the instruction that it comes from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from typing import TypeVar

from counterpoint.model.spec import ModelSpec, Unit
from counterpoint.program.grad_overlap import OverlapMap, overlappable_reductions, reductions_after_backward
from counterpoint.program.instruction import (
    Backward,
    Collective,
    Commit,
    Compute,
    Fetch,
    Free,
    Group,
    Instruction,
    Offload,
    Push,
    Send,
    Update,
    grad,
)
from counterpoint.program.program import Instructions, Program, RankProgram
from counterpoint.program.step_variants import StepVariant
from counterpoint.program.verify.symbolic import SymbolicResult
from counterpoint.simulator.cost_model import CostModel
from counterpoint.simulator.network import CommInstruction, P2PInstruction
from counterpoint.strategies.buckets import BucketConfig, ReadyGrad, assign_buckets
from counterpoint.world.cluster import Cluster

InstructionT = TypeVar("InstructionT", bound=Instruction)


@dataclass(frozen=True, slots=True)
class BackwardSlice:
    """The part of a backward until a bucket of gradients is complete.

    Args:
        time_fraction: of the backward's seconds.
        grad_fraction: of the gradient's bytes, those in the bucket; 0 after the last bucket.
    """

    time_fraction: float
    grad_fraction: Fraction


def slice_backward(model: ModelSpec, seconds: Sequence[float], sizes: BucketConfig) -> tuple[BackwardSlice, ...]:
    """Return the slices of the backward of a model in one block, in execution order.

    Args:
        model: its layers run backward from the last to the first.
        seconds: of the backward of each layer, in the order of the model.
        sizes: of buckets.
    """
    ready_s: dict[str, float] = {}
    ends = list(accumulate(reversed(seconds)))
    for layer, end_s in zip(reversed(model.layers), ends, strict=True):
        ready_s |= dict.fromkeys(layer.params, end_s)  # a shared parameter is ready after the first layer that uses it
    params = [param for param in model.params if param.name in ready_s]
    ready_grads = [
        ReadyGrad(index, param.item_bytes, param.num_bytes, ready_s[param.name]) for index, param in enumerate(params)
    ]
    total_s, total_bytes = ends[-1] or 1.0, sum(ready.num_bytes for ready in ready_grads)
    slices, done_s = [], 0.0
    for bucket in assign_buckets(ready_grads, sizes):
        until_s = max(done_s, *(ready_grads[index].ready_s for index in bucket))
        slices.append(
            BackwardSlice(
                (until_s - done_s) / total_s,
                Fraction(sum(ready_grads[index].num_bytes for index in bucket), total_bytes),
            )
        )
        done_s = until_s
    if done_s < ends[-1]:
        slices.append(BackwardSlice((ends[-1] - done_s) / total_s, Fraction(0)))
    return tuple(slices)


@dataclass(frozen=True, slots=True)
class SplitBackward:
    """A step variant whose backward and overlapped reductions are split at buckets.

    Args:
        variant: what is simulated.
        source_indices: for each instruction of each rank the index of the instruction that it comes from.
        slices: of the backward.
    """

    variant: StepVariant
    source_indices: tuple[tuple[int, ...], ...]
    slices: tuple[BackwardSlice, ...]

    def cost_model(self, link_costs: CostModel) -> CostModel:
        """Return the costs of the split instructions, given those of the instructions that they come from."""
        reduced = [index for index, backward_slice in enumerate(self.slices) if backward_slice.grad_fraction]
        fractions = {grad(_bucket_unit(index, reduced)): self.slices[index].grad_fraction for index in reduced}
        accumulates = any(
            isinstance(instruction, Backward) and not instruction.block
            for rank_program in self.variant.program.rank_programs
            for instruction in rank_program.body
        )
        return BackwardSliceCosts(
            self.slices,
            {tensor.blocks: fraction for tensor, fraction in fractions.items()},
            link_costs,
            accumulates=accumulates,
        )


def split_backward(variant: StepVariant, slices: Sequence[BackwardSlice], cluster: Cluster) -> SplitBackward | None:
    """Return a step variant of a model in one block with its backward split; None if nothing can be split.

    All gradient reductions must overlap the backward. Reductions in shared memory are not split: in a run they start
    after the backward.

    Args:
        variant: of a plan.
        slices: of the backward.
        cluster: where it runs.
    """
    if variant.async_pipeline is not None or len(slices) < 2:
        return None
    rank_programs, source_indices = [], []
    for rank, rank_program in enumerate(variant.program.rank_programs):
        split = _split_rank_program(rank_program, overlappable_reductions(variant.program, rank), slices, cluster)
        if split is None:
            return None
        rank_programs.append(split[0])
        source_indices.append(split[1])
    if tuple(rank_programs) == variant.program.rank_programs:
        return None
    return SplitBackward(
        replace(variant, program=replace(variant.program, rank_programs=tuple(rank_programs))),
        tuple(source_indices),
        tuple(slices),
    )


def split_rank_backward(
    rank_program: RankProgram, slices: Sequence[BackwardSlice], cluster: Cluster
) -> SplitBackward | None:
    """Return :func:`split_backward` of a step in which all members of each group have equal rank programs.

    Args:
        rank_program: of the first rank; the result has only this rank.
        slices: of the backward.
        cluster: where it runs; its ranks share no memory.
    """
    split = (
        _split_rank_program(rank_program, reductions_after_backward(rank_program.body), slices, cluster)
        if len(slices) > 1
        else None
    )
    if split is None or split[0] == rank_program:
        return None
    return SplitBackward(StepVariant("step", Program((split[0],)), SymbolicResult(), ()), (split[1],), tuple(slices))


def _split_rank_program(
    rank_program: RankProgram, overlap: OverlapMap, slices: Sequence[BackwardSlice], cluster: Cluster
) -> tuple[RankProgram, tuple[int, ...]] | None:
    """Return a split rank program and its source indices; None if other reductions of gradients remain."""
    overlapped = {instruction for reductions in overlap.values() for instruction in reductions}
    reductions = {
        instruction
        for instruction in rank_program.body
        if isinstance(instruction, Collective) and instruction.tensor.name == "grad"
    }
    if reductions != overlapped | set(map(_matching_wait, overlapped)) or any(
        _share_memory(instruction.group, cluster) for instruction in overlapped
    ):
        return None
    instructions = list(_split_instructions(rank_program.body, overlap, slices))
    return replace(rank_program, body=tuple(instruction for _, instruction in instructions)), tuple(
        index for index, _ in instructions
    )


def _share_memory(group: Group, cluster: Cluster) -> bool:
    """Return whether members of a group share memory, where they reduce and update without the link."""
    return cluster.link_at(0, group).is_shared_memory and len(set(map(cluster.host, group))) < len(group)


def _split_instructions(
    instructions: Instructions, overlap: OverlapMap, slices: Sequence[BackwardSlice]
) -> Iterator[tuple[int, Instruction]]:
    """Yield the split instructions of a rank with the indices of those that they come from."""
    reduced = [slice_index for slice_index, backward_slice in enumerate(slices) if backward_slice.grad_fraction]
    starts = {start for reductions in overlap.values() for start in reductions}
    waits = set(map(_matching_wait, starts))
    for index, instruction in enumerate(instructions):
        if isinstance(instruction, Backward) and overlap.get(index):
            for slice_index, part in enumerate(slices):
                yield index, replace(instruction, block=slice_index + 1)
                for start in overlap[index] if part.grad_fraction else ():
                    yield (
                        instructions.index(start, index),
                        replace(start, tensor=grad(_bucket_unit(slice_index, reduced))),
                    )
        elif isinstance(instruction, Collective) and instruction in waits:
            yield from (
                (index, replace(instruction, tensor=grad(_bucket_unit(slice_index, reduced))))
                for slice_index in reduced
            )
        elif instruction not in starts:
            yield index, instruction


def _matching_wait(start: Collective) -> Collective:
    return replace(start, phase="wait")


def _bucket_unit(index: int, reduced: Sequence[int]) -> Unit:
    """Return the unit that names a bucket's gradient; the last bucket has the name of the whole gradient."""
    return (0,) if index == reduced[-1] else (index + 1,)


@dataclass(frozen=True, slots=True)
class BackwardSliceCosts:
    """Costs of slices of a backward and of reductions of buckets.

    Args:
        slices: of the backward.
        grad_fractions: fraction of the gradient in each bucket, by the bucket's unit.
        base_costs: costs of the whole backward and the whole reduction.
        accumulates: whether the split backward adds to gradients of earlier microbatches.
    """

    slices: tuple[BackwardSlice, ...]
    grad_fractions: dict[Unit, Fraction]
    base_costs: CostModel
    accumulates: bool

    def compute_s(self, instruction: Compute | Update, fraction: Fraction) -> float:
        """Return the slice's fraction of the backward and of adding its gradient to an earlier one."""
        if isinstance(instruction, Backward) and instruction.block:
            backward_slice = self.slices[instruction.block - 1]
            accumulate_s = (
                float(backward_slice.grad_fraction) * self.base_costs.grad_accumulate_s(0) if self.accumulates else 0.0
            )
            return (
                backward_slice.time_fraction * self.base_costs.compute_s(replace(instruction, block=0), fraction)
                + accumulate_s
            )
        return self.base_costs.compute_s(instruction, fraction)

    def grad_accumulate_s(self, block: int) -> float:
        """Return the accumulation of a whole backward; that of a slice is part of its compute time."""
        return 0.0 if block else self.base_costs.grad_accumulate_s(0)

    def launch_overhead_s(self, instruction: Instruction) -> float:
        """Return the launch overhead, that of a split backward with its first slice."""
        if isinstance(instruction, Backward) and instruction.block:
            return self.base_costs.launch_overhead_s(replace(instruction, block=0)) if instruction.block == 1 else 0.0
        return self.base_costs.launch_overhead_s(instruction)

    def link_s(self, instruction: Send | Push | Collective | Commit, fraction: Fraction, rank: int) -> float:
        """Return the link time of the bucket."""
        return self.base_costs.link_s(*self._unsliced(instruction, fraction), rank)

    def shared_link_s(self, instruction: Send | Push | Collective | Commit, fraction: Fraction, rank: int) -> float:
        """Return the shared part of the link time of the bucket."""
        return self.base_costs.shared_link_s(*self._unsliced(instruction, fraction), rank)

    def cpu_s(
        self, instruction: CommInstruction, fraction: Fraction, rank: int, *, shares_memory: bool = False
    ) -> float:
        """Return the CPU time of the bucket."""
        return self.base_costs.cpu_s(*self._unsliced(instruction, fraction), rank, shares_memory=shares_memory)

    def is_streamed(self, instruction: P2PInstruction, rank: int) -> bool:
        """Return the value of ``base_costs``."""
        return self.base_costs.is_streamed(instruction, rank)

    def memory_pass_s(self, instruction: CommInstruction | Free) -> float:
        """Return the time of a pass over the bucket."""
        if isinstance(instruction, Collective):
            whole, bucket_fraction = self._unsliced(instruction, Fraction(1))
            return float(bucket_fraction) * self.base_costs.memory_pass_s(whole)
        return self.base_costs.memory_pass_s(instruction)

    def offload_s(self, instruction: Fetch | Offload, fraction: Fraction) -> float:
        """Return the value of ``base_costs``."""
        return self.base_costs.offload_s(instruction, fraction)

    def server_update_s(self, unit: Unit, server: int, worker: int) -> tuple[float, float]:
        """Return the value of ``base_costs``."""
        return self.base_costs.server_update_s(unit, server, worker)

    def _unsliced(self, instruction: InstructionT, fraction: Fraction) -> tuple[InstructionT, Fraction]:
        """Return the instruction for the whole gradient, and the fraction of it that is communicated."""
        if (
            isinstance(instruction, Collective)
            and instruction.tensor.name in {"grad", "reduced_grad"}
            and instruction.tensor.blocks in self.grad_fractions
        ):
            whole = replace(instruction.tensor, blocks=(0,))
            return replace(instruction, tensor=whole), fraction * self.grad_fractions[instruction.tensor.blocks]
        return instruction, fraction
