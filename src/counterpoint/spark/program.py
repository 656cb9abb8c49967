"""How two Spark jobs carry out a program: which words are computed where, and which collective is which shuffle.

``F B share(grad)`` is the first job: tasks compute, and its shuffle shares gradients out. ``commit`` is the driver,
between the jobs. ``U join(weight)`` is the second: tasks update their slices, and its shuffle hands out the weights.
"""

from __future__ import annotations

from torch import nn

from counterpoint.compiler.compile import Compiled, compile as compile_plan
from counterpoint.cutting.cut import params_of
from counterpoint.errors import PlanError
from counterpoint.model.spec import Block, ModelSpec, Piece
from counterpoint.plan import Plan
from counterpoint.program.instruction import Backward, Collective, Commit, Forward, Instruction, Update
from counterpoint.program.program import Row
from counterpoint.program.text import format_instruction
from counterpoint.runtime.optimizers import Face
from counterpoint.strategies.systems.bigdl import bigdl
from counterpoint.training.trained import trainable


def compiled_for(model: nn.Module, face: Face, num_places: int, micros: int) -> Compiled:
    """Return the program of a training on Spark: ZeRO of level 1 over partitions, proved.

    Args:
        model: called as a whole.
        face: its optimizer.
        num_places: partitions.
        micros: into how many microbatches a partition cuts its share of a batch.
    """
    params = params_of(model)
    whole = Piece("model", tuple(param.name for param in params))
    spec = trainable(ModelSpec((Block((whole,), 0),), params), face)
    return compile_plan(Plan(bigdl(num_places), num_microbatches=micros), spec)


def micros_of(compiled: Compiled) -> tuple[tuple[int, ...], ...]:
    """Return the microbatches of each row of a program that two jobs can carry out.

    Raises:
        PlanError: they cannot: a row goes another way than compute, share, commit, update, join.

    Example:
        >>> from counterpoint.model.spec import chain
        >>> micros_of(compile_plan(Plan(bigdl(2), num_microbatches=2), chain(1)))
        ((0, 1), (2, 3))
    """
    num_places = compiled.program.num_ranks
    return tuple(_micros_of_row(row, num_places) for row in compiled.program.rows)


def _micros_of_row(row: Row, num_places: int) -> tuple[int, ...]:
    everyone, before = tuple(range(num_places)), 0
    if row.prologue or row.epilogue:
        raise PlanError("a plan without a flush has no steps that end, but a step on Spark is two jobs; take zero(n)")
    for word in row.body:
        stage = stage_of(word, everyone)
        if stage < before:
            raise PlanError(
                f"{format_instruction(word)} cannot be carried out by two Spark jobs, which compute, share gradients "
                "out, agree, update and join weights, in this order and among all partitions; take zero(n, level=1)"
            )
        before = stage
    return tuple(word.micro for word in row.body if isinstance(word, Forward))


def stage_of(word: Instruction, everyone: tuple[int, ...]) -> int:
    """Return how far a step is when a word comes; -1 for one that has no place in it."""
    match word:
        case Forward(block=0, version=0) | Backward(block=0, version=0, part=""):
            return 0
        case Collective(verb="reduce_scatter", value=value, group=group) if value.name == "grad" and group == everyone:
            return 1
        case Commit(group=group) if group == everyone:
            return 2
        case Update():
            return 3
        case Collective(verb="all_gather", value=value, group=group) if value.name == "weight" and group == everyone:
            return 4
        case _:
            return -1
