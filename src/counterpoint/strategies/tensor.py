"""Tensor parallelism: the ranks of a group hold shards of the same layers and compute the same samples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec
from counterpoint.program.instruction import ApplyPushes, Backward, Collective, Forward, Instruction, TensorRef
from counterpoint.program.program import Program
from counterpoint.program.rewrite import expand, replicate, widen_commits
from counterpoint.strategies.options import changed_options, format_term
from counterpoint.strategies.replica_groups import replica_group
from counterpoint.strategies.strategy import CostEstimate, Granularity, Strategy, ring_fraction, tp_allreduce_bytes


@dataclass(frozen=True, slots=True)
class Tensor(Strategy):
    """Shard the named dims of layers over ``degree`` ranks; all-reduce partial results.

    A column-parallel linear layer and the row-parallel one after it make one tensor-parallel block: its forward ends
    with the all-reduce of partial outputs, its backward with that of partial input gradients. All other blocks run
    whole on every rank.

    Args:
        degree: number of ranks along the new axis.
        dims: names of the dims that are sharded, as rules "dim -> this axis".

    Cost:
        Bytes sent per rank and step: ``2 (n-1)/n`` of the outputs and inputs of all tensor-parallel blocks, for every
        microbatch. Memory per rank: ``1/n`` of the sharded parameters, and all others.

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
        return format_term("tensor", self.degree, changed_options(self, "dims"))

    def split_model(self, model: ModelSpec) -> ModelSpec:
        """Return the model with every sharded layer in a block of its own.

        Raises:
            PlanError: nothing can be sharded along these dims, or a size is not divisible.
        """
        if self.degree == 1:
            return model
        known = {layer.tp.dim for layer in model.layers if layer.tp is not None}
        if not known & set(self.dims):
            has = f"the dims {', '.join(sorted(known))}" if known else "no pair of linear layers that can be sharded"
            raise PlanError(
                f"{self} shards {' and '.join(self.dims)}, but the model has {has}; "
                "name its dims with dims=..., or choose data, zero or pipeline"
            )
        for layer in model.layers:
            if layer.tp is not None and layer.tp.dim in self.dims and layer.tp.dim_size % self.degree:
                raise PlanError(
                    f"{self} cannot shard {layer.tp.dim} of {layer.name}: {layer.tp.dim_size} is not divisible by "
                    f"{self.degree}; give a number of ranks that divides it"
                )
        return model.split_out_tp_blocks(self.dims, self.degree)

    def lower(self, program: Program, model: ModelSpec) -> Program:
        """Return the program for ``degree`` ranks with one shard each.

        Raises:
            PlanError: the program is tensor-parallel already, or has an asynchronous server.
        """
        if any(isinstance(instruction, ApplyPushes) for _, instruction in program.instructions()):
            raise PlanError(
                f"{self} comes after an asynchronous server: the server of each shard would apply pushes in an order "
                "of its own, and replicated parameters would diverge; give consistency=bsp, or drop tensor"
            )
        if any(rank_program.tp_degree > 1 for rank_program in program.rank_programs):
            raise PlanError(f"{self} is in a plan with tensor already; write one tensor(...) with all dims")
        if self.degree == 1:
            return program
        stride = program.num_ranks
        replicated = widen_commits(replicate(program, self.degree, same_samples=True), self.degree)
        tp_blocks = _tp_blocks(model)

        def add_all_reduce(rank: int, instruction: Instruction) -> Iterable[Instruction]:
            yield instruction
            if isinstance(instruction, Forward | Backward) and instruction.block in tp_blocks:
                group, block = replica_group(rank, stride, self.degree), instruction.block
                if isinstance(instruction, Forward):
                    yield Collective("all_reduce", TensorRef("y", (block,), instruction.micro), group)
                elif block > 0 and instruction.computes_input_grad:
                    yield Collective("all_reduce", TensorRef("dx", (block,), instruction.micro), group)

        expanded = expand(replicated, add_all_reduce)
        return Program(
            tuple(
                replace(rank_program, tp_rank=rank // stride, tp_degree=self.degree)
                for rank, rank_program in enumerate(expanded.rank_programs)
            )
        )

    def estimate_cost(self, inner: CostEstimate, model: ModelSpec) -> CostEstimate:
        """Return the cost with one ring all-reduce per tensor-parallel block, direction and microbatch."""
        if self.degree == 1:
            return inner
        factor = 2 * ring_fraction(self.degree) * inner.samples_per_microbatch
        sent = inner.add_sent_bytes(lambda rank: factor * rank.num_micros * tp_allreduce_bytes(model, rank.blocks))
        return replace(sent, ranks=sent.ranks * self.degree, tp_blocks=_tp_blocks(model))


def _tp_blocks(model: ModelSpec) -> frozenset[int]:
    return frozenset(index for index, block in enumerate(model.blocks) if block.tp is not None)
