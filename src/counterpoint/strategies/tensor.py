"""Tensor parallelism: the ranks of one group hold slices of the same layers and run the same samples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec
from counterpoint.program.instruction import ApplyPushes, Backward, Collective, Forward, Instruction, TensorRef
from counterpoint.program.program import Program
from counterpoint.program.rewrite import expand, replicate, widen_commits
from counterpoint.strategies.strategy import CostEstimate, Granularity, RankCost, ring_fraction, tp_allreduce_bytes


@dataclass(frozen=True, slots=True)
class Tensor:
    """Slice the named dims of layers over ``degree`` ranks; partial results are summed where slices meet.

    A column-split and a row-split linear layer make one sliced block: forward ends with the sum of its partial
    outputs, backward with the sum of its partial input gradients. All other blocks run whole on every rank.

    Args:
        degree: ranks along the new axis.
        dims: names of the dims that are sliced over it, as rules "dim -> this axis".

    Cost:
        Bytes sent per rank and step: ``2 (n-1)/n`` of the outputs and inputs of all sliced blocks, for every
        microbatch. Memory per rank: sliced parameters ``1/n``, all others whole.

    Source:
        Shazeer et al., Mesh-TensorFlow: Deep Learning for Supercomputers, NeurIPS 2018; Shoeybi et al.,
        Megatron-LM, 2019, section 3.
    """

    degree: int
    dims: tuple[str, ...] = ("hidden", "heads")

    axis: ClassVar[str] = "tensor"
    splits_batch: ClassVar[bool] = False
    granularity: ClassVar[Granularity] = "tensor_parallel"

    def __str__(self) -> str:
        """Write the strategy as in a plan."""
        if self.dims == ("hidden", "heads"):
            return f"tensor({self.degree})"
        return f"tensor({self.degree}, dims={'+'.join(self.dims)})"

    def num_ranks(self, inner: int) -> int:
        """Return ``degree`` times as many ranks."""
        return inner * self.degree

    def split_model(self, model: ModelSpec) -> ModelSpec:
        """Return the model with every layer that is sliced as a block of its own.

        Raises:
            PlanError: nothing can be sliced along these dims, or a size does not divide.
        """
        if self.degree == 1:
            return model
        known = {piece.tp.dim: piece for piece in model.layers if piece.tp is not None}
        if not known.keys() & set(self.dims):
            has = f"the dims {', '.join(sorted(known))}" if known else "no pair of linear layers that can be sliced"
            raise PlanError(
                f"{self} slices {' and '.join(self.dims)}, but the model has {has}; "
                "name its dims with dims=..., or choose data, zero or pipeline"
            )
        for piece in model.layers:
            if piece.tp is not None and piece.tp.dim in self.dims and piece.tp.dim_size % self.degree:
                raise PlanError(
                    f"{self} cannot slice {piece.tp.dim} of {piece.name}: {piece.tp.dim_size} does not divide by "
                    f"{self.degree}; give a number of ranks that divides it"
                )
        return model.split_out_tp_blocks(self.dims, self.degree)

    def lower(self, program: Program, model: ModelSpec) -> Program:
        """Return the program for ``degree`` ranks with one slice each.

        Raises:
            PlanError: the program is sliced already, or is served asynchronously.
        """
        if any(isinstance(word, ApplyPushes) for _, word in program.instructions()):
            raise PlanError(
                f"{self} stands behind an asynchronous server; each slice would have a server that takes pushes in an "
                "order of its own, and what is not sliced would drift apart; give consistency=bsp, or leave out tensor"
            )
        if any(row.tp_degree > 1 for row in program.rank_programs):
            raise PlanError(f"{self} stands in a plan that is sliced already; write one tensor(...) with all dims")
        if self.degree == 1:
            return program
        stride = program.num_ranks
        copies = widen_commits(replicate(program, self.degree, same_samples=True), self.degree)
        sliced = {index for index, block in enumerate(model.blocks) if block.tp is not None}

        def rule(rank: int, word: Instruction) -> Iterable[Instruction]:
            """Yield the word and, where a block is sliced, the sum of its partial outputs or input gradients."""
            yield word
            if isinstance(word, Forward | Backward) and word.block in sliced:
                group = tuple(range(rank % stride, stride * self.degree, stride))
                if isinstance(word, Forward):
                    yield Collective("all_reduce", TensorRef("y", (word.block,), word.micro), group)
                elif word.block > 0 and word.computes_input_grad:
                    yield Collective("all_reduce", TensorRef("dx", (word.block,), word.micro), group)

        spread = expand(copies, rule)
        return Program(
            tuple(
                replace(row, slice_index=rank // stride, num_slices=self.degree)
                for rank, row in enumerate(spread.rank_programs)
            )
        )

    def estimate_cost(self, inner: CostEstimate, model: ModelSpec) -> CostEstimate:
        """Return the forecast with one ring all-reduce per sliced block, direction and microbatch."""
        if self.degree == 1:
            return inner
        ranks = tuple(self._rank_cost(rank, inner.samples_per_microbatch, model) for rank in inner.ranks)
        sliced = frozenset(index for index, block in enumerate(model.blocks) if block.tp is not None)
        return replace(inner, ranks=ranks * self.degree, tp_blocks=sliced)

    def _rank_cost(self, rank: RankCost, samples: int, model: ModelSpec) -> RankCost:
        sent = 2 * ring_fraction(self.degree) * tp_allreduce_bytes(model, rank.blocks) * samples * rank.num_micros
        return replace(rank, other_bytes=rank.other_bytes + sent)
