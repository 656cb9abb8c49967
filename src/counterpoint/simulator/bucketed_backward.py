"""A backward in portions: sums of gradients that begin while it goes on, bucket by bucket, as they do in a run.

A model that needs no cut is one block of a program, with one backward and one sum. The runtime carries the backward out
in one call, and begins the sum of each bucket of gradients as soon as it is complete. For the clock the backward is cut
in two behind each of these moments, and the sum into the buckets; what each word of this costs is a part of what the
word costs that it comes from.
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
    Free,
    Group,
    Instruction,
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

InstructionT = TypeVar("Word", bound=Instruction)


@dataclass(frozen=True, slots=True)
class BackwardSlice:
    """What a backward does until a bucket of gradients is complete.

    Args:
        work: the part of its seconds.
        part: of the gradient's bytes those that are summed then; nothing behind the last bucket.
    """

    time_fraction: float
    grad_fraction: Fraction


def slice_backward(model: ModelSpec, seconds: Sequence[float], sizes: BucketConfig) -> tuple[BackwardSlice, ...]:
    """Return the portions of the backward of a model in one block, in the order in which they are done.

    Args:
        model: its pieces go backward from the last to the first.
        seconds: of each piece backward, in the order of the model.
        sizes: of buckets.
    """
    ready_s: dict[str, float] = {}
    ends = list(accumulate(reversed(seconds)))
    for piece, end_s in zip(reversed(model.layers), ends, strict=True):
        ready_s |= dict.fromkeys(piece.params, end_s)  # of several pieces that read it the first one is the last
    params = [param for param in model.params if param.name in ready_s]
    made = [ReadyGrad(at, one.item_bytes, one.num_bytes, ready_s[one.name]) for at, one in enumerate(params)]
    whole_s, whole_bytes = ends[-1] or 1.0, sum(one.num_bytes for one in made)
    found, done_s = [], 0.0
    for places in assign_buckets(made, sizes):
        until_s = max(done_s, *(made[at].ready_s for at in places))
        found.append(
            BackwardSlice((until_s - done_s) / whole_s, Fraction(sum(made[at].num_bytes for at in places), whole_bytes))
        )
        done_s = until_s
    if done_s < ends[-1]:
        found.append(BackwardSlice((ends[-1] - done_s) / whole_s, Fraction(0)))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class SplitBackward:
    """One kind of step with its early sums in buckets.

    Args:
        turn: what is played.
        origins: for each word of each row the place of the word that it comes from.
        portions: of the backward.
    """

    variant: StepVariant
    source_indices: tuple[tuple[int, ...], ...]
    slices: tuple[BackwardSlice, ...]

    def cost_model(self, link_costs: CostModel) -> CostModel:
        """Return what its words cost, given what the words cost that they come from."""
        summed = [at for at, one in enumerate(self.slices) if one.grad_fraction]
        parts = {grad(_bucket_unit(at, summed)): self.slices[at].grad_fraction for at in summed}
        adds = any(
            isinstance(word, Backward) and not word.block
            for row in self.variant.program.rank_programs
            for word in row.body
        )
        return BackwardSliceCosts(
            self.slices, {value.blocks: part for value, part in parts.items()}, link_costs, accumulates=adds
        )


def split_backward(variant: StepVariant, slices: Sequence[BackwardSlice], cluster: Cluster) -> SplitBackward | None:
    """Return a kind of step of a model in one block with its early sums in buckets; None where it has none, or others.

    Sums in memory that members see stay whole: in a run they do not begin early.

    Args:
        turn: of a plan.
        portions: of the backward.
        cluster: where it runs.
    """
    if variant.async_pipeline is not None or len(slices) < 2:
        return None
    rows, origins = [], []
    for rank, row in enumerate(variant.program.rank_programs):
        found = _split_rank_program(row, overlappable_reductions(variant.program, rank), slices, cluster)
        if found is None:
            return None
        rows.append(found[0])
        origins.append(found[1])
    if tuple(rows) == variant.program.rank_programs:
        return None
    return SplitBackward(
        replace(variant, program=replace(variant.program, rows=tuple(rows))), tuple(origins), tuple(slices)
    )


def split_rank_backward(
    rank_program: RankProgram, slices: Sequence[BackwardSlice], cluster: Cluster
) -> SplitBackward | None:
    """Return what :func:`spread` makes of a step in which all members of the row's groups have rows like this one.

    Args:
        row: of the first rank, the only one that is in what is returned.
        portions: of the backward.
        cluster: where it runs; its ranks see no memory of others.
    """
    found = (
        _split_rank_program(rank_program, reductions_after_backward(rank_program.body), slices, cluster)
        if len(slices) > 1
        else None
    )
    if found is None or found[0] == rank_program:
        return None
    return SplitBackward(StepVariant("step", Program((found[0],)), SymbolicResult(), ()), (found[1],), tuple(slices))


def _split_rank_program(
    rank_program: RankProgram, early: OverlapMap, slices: Sequence[BackwardSlice], cluster: Cluster
) -> tuple[RankProgram, tuple[int, ...]] | None:
    """Return a row with its early sums in buckets, and where its words come from; None where it has others, too."""
    begun = {word for sums in early.values() for word in sums}
    sums = {word for word in rank_program.body if isinstance(word, Collective) and word.tensor.name == "grad"}
    if sums != begun | set(map(_matching_wait, begun)) or any(_share_memory(word.group, cluster) for word in begun):
        return None
    made = list(_split_instructions(rank_program.body, early, slices))
    return replace(rank_program, body=tuple(word for _, word in made)), tuple(at for at, _ in made)


def _share_memory(group: Group, cluster: Cluster) -> bool:
    """Tell whether members see each other's memory, and so share their sum and their update there."""
    return cluster.link_at(0, group).is_shared_memory and len(set(map(cluster.host, group))) < len(group)


def _split_instructions(
    instructions: Instructions, early: OverlapMap, slices: Sequence[BackwardSlice]
) -> Iterator[tuple[int, Instruction]]:
    """Yield the words of a row with the places of those that they come from."""
    summed = [at for at, one in enumerate(slices) if one.grad_fraction]
    starts = {start for sums in early.values() for start in sums}
    waits = set(map(_matching_wait, starts))
    for index, word in enumerate(instructions):
        if isinstance(word, Backward) and early.get(index):
            for at, portion in enumerate(slices):
                yield index, replace(word, block=at + 1)
                for start in early[index] if portion.grad_fraction else ():
                    yield instructions.index(start, index), replace(start, value=grad(_bucket_unit(at, summed)))
        elif isinstance(word, Collective) and word in waits:
            yield from ((index, replace(word, value=grad(_bucket_unit(at, summed)))) for at in summed)
        elif word not in starts:
            yield index, word


def _matching_wait(start: Collective) -> Collective:
    return replace(start, phase="wait")


def _bucket_unit(at: int, summed: Sequence[int]) -> Unit:
    """Return what a bucket's gradient is called: the last one as the whole, which its members share out, or not."""
    return (0,) if at == summed[-1] else (at + 1,)


@dataclass(frozen=True, slots=True)
class BackwardSliceCosts:
    """Costs of a backward in portions, and of sums in buckets.

    Args:
        portions: of the backward.
        parts: of the gradient, by what the bucket is called.
        others: costs of the whole backward and the whole sum.
        adds: whether earlier microbatches, whose backwards are whole, have left a gradient.
    """

    slices: tuple[BackwardSlice, ...]
    grad_fractions: dict[Unit, Fraction]
    base_costs: CostModel
    accumulates: bool

    def compute_s(self, instruction: Compute | Update, fraction: Fraction) -> float:
        """Return the portion's part of the whole backward, and of adding its gradient to an earlier one."""
        if isinstance(instruction, Backward) and instruction.block:
            portion = self.slices[instruction.block - 1]
            added_s = float(portion.grad_fraction) * self.base_costs.grad_accumulate_s(0) if self.accumulates else 0.0
            return portion.time_fraction * self.base_costs.compute_s(replace(instruction, block=0), fraction) + added_s
        return self.base_costs.compute_s(instruction, fraction)

    def grad_accumulate_s(self, block: int) -> float:
        """Return it for a whole backward; that of a portion is in what it takes."""
        return 0.0 if block else self.base_costs.grad_accumulate_s(0)

    def launch_overhead_s(self, instruction: Instruction) -> float:
        """Return the cost of the call with its first portion."""
        if isinstance(instruction, Backward) and instruction.block:
            return self.base_costs.launch_overhead_s(replace(instruction, block=0)) if instruction.block == 1 else 0.0
        return self.base_costs.launch_overhead_s(instruction)

    def link_s(self, instruction: Send | Push | Collective | Commit, fraction: Fraction, rank: int) -> float:
        """Return what a sum of the bucket's part costs."""
        return self.base_costs.link_s(*self._unsliced(instruction, fraction), rank)

    def shared_link_s(self, instruction: Send | Push | Collective | Commit, fraction: Fraction, rank: int) -> float:
        """Return of these seconds those on shared links."""
        return self.base_costs.shared_link_s(*self._unsliced(instruction, fraction), rank)

    def cpu_s(
        self, instruction: CommInstruction, fraction: Fraction, rank: int, *, shares_memory: bool = False
    ) -> float:
        """Return what a sum of the bucket's part costs."""
        return self.base_costs.cpu_s(*self._unsliced(instruction, fraction), rank, shares_memory=shares_memory)

    def is_streamed(self, instruction: P2PInstruction, rank: int) -> bool:
        """Tell what the other costs say."""
        return self.base_costs.is_streamed(instruction, rank)

    def memory_pass_s(self, instruction: CommInstruction | Free) -> float:
        """Return what a pass over the bucket's part takes."""
        if isinstance(instruction, Collective):
            whole, part = self._unsliced(instruction, Fraction(1))
            return float(part) * self.base_costs.memory_pass_s(whole)
        return self.base_costs.memory_pass_s(instruction)

    def server_update_s(self, unit: Unit, server: int, worker: int) -> tuple[float, float]:
        """Return what it costs by the other costs."""
        return self.base_costs.server_update_s(unit, server, worker)

    def _unsliced(self, instruction: InstructionT, fraction: Fraction) -> tuple[InstructionT, Fraction]:
        """Return the word about the whole gradient, and which part of it is at hand."""
        if (
            isinstance(instruction, Collective)
            and instruction.tensor.name == "grad"
            and instruction.tensor.blocks in self.grad_fractions
        ):
            return replace(instruction, value=grad((0,))), fraction * self.grad_fractions[instruction.tensor.blocks]
        return instruction, fraction
