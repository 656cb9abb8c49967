"""The pass for a loss of the whole batch: outputs are gathered after the last forward, before the first backward."""

from __future__ import annotations

from dataclasses import replace

from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec
from counterpoint.plan.plan import Plan
from counterpoint.program.instruction import Backward, Collective, Commit, Forward, Group, TensorRef
from counterpoint.program.program import Instructions, Program

USE_OTHERS = "use solo, data, zero, tensor, tree, server(consistency=bsp) or gpipe"
OR_A_MEAN = "or return a loss that is a mean over samples"
REMEDY = f"{USE_OTHERS}, {OR_A_MEAN}"
REMEDY_FOR_SCHEDULES = f"{USE_OTHERS}, give num_microbatches=1, {OR_A_MEAN}"


def gather_outputs(program: Program, model: ModelSpec, plan: Plan) -> Program:
    """Insert an all-gather of the outputs after the last forward of the last block on every rank that runs it.

    Its members have the same shard of the model and different microbatches, those of the whole batch. Each evaluates
    the loss and takes its gradient with respect to its own outputs, so nothing is sent back::

        before   F0.0 F0.1 B0.0 B0.1                        F0.2 F0.3 B0.2 B0.3
        after    F0.0 F0.1 all_gather(out0)@0,1 B0.0 B0.1   F0.2 F0.3 all_gather(out0)@0,1 B0.2 B0.3

    Args:
        program: with all strategies applied.
        model: with the blocks of the program.
        plan: for errors.

    Raises:
        PlanError: a backward of the last block comes before a forward of it, or the batch of an update is not the
            whole batch.
    """
    last_block = model.num_blocks - 1
    if program.is_async_pipeline:
        raise PlanError(
            f"a loss of the whole batch is evaluated between its forwards and its backwards, but under {plan} a batch "
            f"begins before the update of the one before; {REMEDY}"
        )
    members: dict[int, list[int]] = {}  # the ranks with the last block, by shard
    for rank, rank_program in enumerate(program.rank_programs):
        if any(isinstance(one, Forward) and one.block == last_block for one in rank_program.body):
            members.setdefault(rank_program.tp_rank, []).append(rank)
    bodies = list[Instructions]()
    for rank, rank_program in enumerate(program.rank_programs):
        group = tuple(members.get(rank_program.tp_rank, ()))
        if rank in group:
            _require_one_batch(rank_program.body, group, rank, plan)
            bodies.append(
                _insert_gather(rank_program.body, Collective("all_gather", out(last_block), group), rank, plan)
            )
        else:
            bodies.append(rank_program.body)
    pairs = zip(program.rank_programs, bodies, strict=True)
    return replace(program, rank_programs=tuple(replace(rank_program, body=body) for rank_program, body in pairs))


def out(last_block: int) -> TensorRef:
    """Return a reference to the outputs of all microbatches."""
    return TensorRef("out", (last_block,))


def _insert_gather(body: Instructions, gather: Collective, rank: int, plan: Plan) -> Instructions:
    """Insert the gathering after the last forward of the last block, or after the sum of its partial outputs."""
    (block,) = gather.tensor.blocks
    forwards = [i for i, one in enumerate(body) if isinstance(one, Forward) and one.block == block]
    backwards = [i for i, one in enumerate(body) if isinstance(one, Backward) and one.block == block]
    stop = forwards[-1] + 1
    if backwards and backwards[0] < stop:
        first, last = body[backwards[0]], body[forwards[-1]]
        assert isinstance(first, Backward), "the index of a backward"
        assert isinstance(last, Forward), "the index of a forward"
        raise PlanError(
            f"a loss of the whole batch needs the outputs of all microbatches before the first backward, but under "
            f"{plan} rank {rank} runs microbatch {first.micro} backward before it runs microbatch {last.micro} "
            f"forward; {REMEDY_FOR_SCHEDULES}"
        )
    while stop < len(body) and isinstance(one := body[stop], Collective) and one.tensor.name == "y":
        stop += 1
    return (*body[:stop], gather, *body[stop:])


def _require_one_batch(body: Instructions, group: Group, rank: int, plan: Plan) -> None:
    """Check that all members of a gathering commit to one update.

    Raises:
        PlanError: they do not.
    """
    for commit in (one for one in body if isinstance(one, Commit)):
        together = commit.loss_group or commit.group
        if not set(group) <= set(together):
            alone = f"rank {rank} updates" if together == (rank,) else f"ranks {', '.join(map(str, together))} update"
            raise PlanError(
                f"a loss of the whole batch is that of all {len(group)} ranks with outputs, but under {plan} {alone} "
                f"without the others; {REMEDY}"
            )
