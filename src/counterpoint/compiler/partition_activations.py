"""The pass that partitions activations: each tensor-parallel rank keeps a part of what blocks are recomputed from."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from counterpoint.compiler.recompute import move_kept_inputs
from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec
from counterpoint.plan.plan import Plan
from counterpoint.program.instruction import Collective, Free
from counterpoint.program.program import Instructions, Program
from counterpoint.strategies.recomputation import PARTITION_PASS, select_blocks


def partition_activations(program: Program, model: ModelSpec, plan: Plan) -> Program:
    """Keep ``1/n`` of each replicated block input on every rank of ``tensor(n)`` until the block is recomputed.

    Ranks of a tensor-parallel group hold the same inputs of blocks. Each frees the input after the forward but for a
    part of its own, and all gather the parts again before the recomputation::

        before   F1.0 all_reduce(y1.0)@0,1 F2.0             ...                        R2.0 B2.0
        after    F1.0 all_reduce(y1.0)@0,1 F2.0 free(x2.0)  ...  all_gather(x2.0)@0,1  R2.0 B2.0

    What the previous recomputation produces is not kept at all, and what later blocks read over skip connections is
    kept whole. So are the inputs of pipeline stages without a tensor-parallel block.

    Args:
        program: with recomputation.
        model: with the blocks of the program.
        plan: which blocks, and for errors.

    Raises:
        PlanError: nothing is recomputed, no ranks hold the same inputs, or all inputs are kept whole.

    Cost:
        Bytes sent per rank and step: ``(n-1)/n`` of each input that is partitioned. Memory per rank: ``1/n`` of them.

    Source:
        Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020, section 6.1.
    """
    _require_partitionable(program, plan)
    blocks = select_blocks(plan.partition_selector or "", model, PARTITION_PASS)
    partitioned = replace(
        program,
        rank_programs=tuple(
            replace(rank_program, body=_keep_parts(rank_program.body, model, blocks))
            for rank_program in program.rank_programs
        ),
    )
    if partitioned == program:
        raise PlanError(
            f"under {plan} the pass {PARTITION_PASS} finds no input that is kept for a recomputation and that the "
            "ranks of a tensor-parallel group share; recompute more blocks, or drop the pass"
        )
    return partitioned


def _require_partitionable(program: Program, plan: Plan) -> None:
    if plan.recomputation is None:
        raise PlanError(
            f"the pass {PARTITION_PASS} partitions the inputs that blocks are recomputed from, but nothing is "
            "recomputed; add the pass recompute, or give the pipeline recompute=always"
        )
    if all(rank_program.tp_degree == 1 for rank_program in program.rank_programs):
        raise PlanError(
            f"the pass {PARTITION_PASS} partitions what tensor-parallel ranks hold several times, but under {plan} no "
            "two ranks hold the same activations; use tensor(n), or drop the pass"
        )
    if program.is_async_pipeline:
        raise PlanError(
            f"under {plan} forwards and recomputations are of different batches, so that the pass {PARTITION_PASS} is "
            "not available; drop it, or give the pipeline schedule=one_f_one_b"
        )


def _keep_parts(body: Instructions, model: ModelSpec, blocks: Collection[int]) -> Instructions:
    """Return a rank's instructions with a free after each forward that reads an input, and a gathering."""
    groups = (one.group for one in body if isinstance(one, Collective) and one.tensor.name in {"y", "dx"})
    group = next(groups, None)  # the ranks with the same inputs
    if group is None:
        return body
    return move_kept_inputs(
        body, model, lambda tensor: (Free(tensor), Collective("all_gather", tensor, group)), blocks=blocks
    )
