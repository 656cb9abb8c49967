"""A program that is given instead of strategies, for instance one that was read from text: verified, then run."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar

from counterpoint.compiler.compile import count_bytes
from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec
from counterpoint.program.instruction import Backward, Forward, Update
from counterpoint.program.program import Program, RankProgram, weight_versions_needed
from counterpoint.program.text import format_program
from counterpoint.strategies.strategy import CostEstimate, Granularity, RankCost, Strategy
from counterpoint.strategies.tensor import Tensor


@dataclass(frozen=True, slots=True)
class GivenProgram(Strategy):
    """Run a program as it is; it is verified like those of strategies, except that its bytes have no other formula.

    Args:
        program: of one kind of step, without a prologue and an epilogue.

    Cost:
        Counted from the program.

    Source:
        Whoever wrote the program.
    """

    program: Program

    axis: ClassVar[str] = "rank"
    splits_batch: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.program.is_async_pipeline or not self.num_blocks:
            what = "is an asynchronous pipeline" if self.num_blocks else "has no forward"
            raise PlanError(
                f"the program {what}, and only a step with a flush can be run as a program; give one line of "
                "instructions for each rank, or the strategy, such as 'pipedream(4)'"
            )

    @property
    def degree(self) -> int:  # type: ignore[override]  # a field of other strategies
        """Number of ranks."""
        return self.program.num_ranks

    @property
    def num_blocks(self) -> int:
        """Number of blocks that the program computes."""
        blocks = (one.block for _, one in self.program.instructions() if isinstance(one, Forward))
        return max(blocks, default=-1) + 1

    @property
    def granularity(self) -> Granularity:
        """Tensor-parallel shards where ranks have some, blocks where there are several, else the whole model."""
        if self.tp_degree > 1:
            return "tensor_parallel"
        return "blocks" if self.num_blocks > 1 else "whole"

    @property
    def tp_degree(self) -> int:
        """Number of ranks that hold shards of tensor-parallel blocks; 1 if there are none."""
        return max(rank_program.tp_degree for rank_program in self.program.rank_programs)

    def split_model(self, model: ModelSpec) -> ModelSpec:
        """Return the model with every sharded layer in a block of its own, if ranks hold shards."""
        return Tensor(self.tp_degree).split_model(model)

    def __str__(self) -> str:
        """Return the number of ranks and a digest of the text, which differs between different programs."""
        digest = hashlib.sha256(format_program(self.program).encode()).hexdigest()[:8]
        return f"program({self.degree}, sha256={digest})"

    def lower(self, program: Program, model: ModelSpec) -> Program:
        """Return the given program.

        Raises:
            PlanError: it is not alone in its plan, or is for another number of blocks or microbatches.
        """
        if program.num_ranks != 1:
            raise PlanError(f"{self} is the program of all ranks; give it alone, without strategies before it")
        for what, given, needed in (
            ("blocks", self.num_blocks, model.num_blocks),
            ("microbatches", len(self.program.micros), len(program.micros)),
        ):
            if given != needed:
                owner = "the model has" if what == "blocks" else "the plan has"
                raise PlanError(
                    f"the program computes {given} {what}, but {owner} {needed}; write it for as many, from "
                    "cp.format_program(trainer.compiled.program) of a plan of this model, for instance"
                )
        return self.program

    def estimate_cost(self, inner: CostEstimate, model: ModelSpec) -> CostEstimate:
        """Return the cost of the program as counted."""
        sent = count_bytes(self.program, model, inner.samples_per_microbatch)
        ranks = [estimate_rank(rank_program, model) for rank_program in self.program.rank_programs]
        sharded = frozenset(
            index for index, block in enumerate(model.blocks) if self.tp_degree > 1 and block.tp is not None
        )
        costs = (replace(rank, other_bytes=num_bytes) for rank, num_bytes in zip(ranks, sent, strict=True))
        return replace(inner, ranks=tuple(costs), tp_blocks=sharded)


def estimate_rank(rank_program: RankProgram, model: ModelSpec) -> RankCost:
    """Return what a rank computes, updates and holds."""
    forwards = [one for one in rank_program.body if isinstance(one, Forward)]
    blocks = tuple(sorted({one.block for one in forwards}))
    units = [one.unit for one in rank_program.body if isinstance(one, Update)]
    in_flight = peak = 0
    for one in rank_program.body:
        if isinstance(one, Forward | Backward) and one.block == blocks[0]:
            in_flight += 1 if isinstance(one, Forward) else -one.computes_weight_grad
            peak = max(peak, in_flight)
    return RankCost(
        blocks,
        len({one.micro for one in forwards}),
        {unit: Fraction(model.unit_bytes(unit)) for unit in units if unit in model.units},
        in_flight=peak,
        chunk_starts=blocks[:1] or (0,),
        weight_versions=weight_versions_needed(rank_program.body),
    )
