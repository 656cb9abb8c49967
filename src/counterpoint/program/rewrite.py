"""The moves from which strategies are made; each is a pure function from program to program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

from counterpoint.program.instruction import (
    ApplyPushes,
    Backward,
    Collective,
    Commit,
    Forward,
    Free,
    Group,
    Instruction,
    Pull,
    Push,
    Recv,
    Send,
    TensorRef,
    grad,
)
from counterpoint.program.program import Instructions, Program, RankProgram, shift_microbatch


def shift_ranks(word: Instruction, by: int) -> Instruction:
    """Return the instruction with every rank it names moved up by ``by``."""
    if by == 0:
        return word
    match word:
        case Send() | Recv() | Push() | Pull():
            return replace(word, peer=word.peer + by)
        case Collective():
            return replace(word, group=tuple(member + by for member in word.group))
        case Commit(group, own):
            return Commit(tuple(member + by for member in group), tuple(member + by for member in own))
        case ApplyPushes():
            return replace(word, workers=tuple(member + by for member in word.workers))
        case _:
            return word


def replicate(program: Program, times: int, *, same_samples: bool = False) -> Program:
    """Set ``times`` copies side by side; copy ``c`` of rank ``r`` is rank ``c * num_ranks + r``.

    Where rows are folded, copies are counted and not written down.

    Args:
        program: what is copied.
        times: how many copies stand there afterwards.
        same_samples: whether the copies read the same microbatches; else each copy reads its own.
    """
    if program.num_identical_copies:
        return replace(program, num_identical_copies=program.num_identical_copies * times)
    stride = 0 if same_samples else len(program.micros)
    return Program(
        tuple(
            map_row(row, partial(_shift_copy, by=(copy * program.num_ranks, copy * stride), seen={}))
            for copy in range(times)
            for row in program.rank_programs
        )
    )


def _shift_copy(words: Instructions, by: tuple[int, int], seen: dict[int, Group]) -> Iterator[Instruction]:
    """Yield the words moved by so many ranks and microbatches; words of one group go on sharing it as an object."""
    ranks, micros = by
    if ranks == 0:
        yield from (shift_microbatch(word, micros) for word in words)
        return
    for word in words:
        match word:
            case Forward(block, micro, version):
                yield Forward(block, micro + micros, version)
            case Backward(block, micro, version, part):
                yield Backward(block, micro + micros, version, part)
            case Collective(verb, value, group, phase, code):
                yield Collective(verb, _shift_tensor(value, micros), _shift_group(group, ranks, seen), phase, code)
            case Commit(group, own):
                yield Commit(_shift_group(group, ranks, seen), _shift_group(own, ranks, seen))
            case Send(value, peer, code):
                yield Send(_shift_tensor(value, micros), peer + ranks, code)
            case Recv(value, peer, code):
                yield Recv(_shift_tensor(value, micros), peer + ranks, code)
            case _:
                yield shift_microbatch(shift_ranks(word, ranks), micros)


def _shift_tensor(value: TensorRef, micros: int) -> TensorRef:
    return value if value.micro is None or micros == 0 else TensorRef(value.name, value.blocks, value.micro + micros)


def _shift_group(group: Group, ranks: int, seen: dict[int, Group]) -> Group:
    if id(group) not in seen:
        seen[id(group)] = tuple(member + ranks for member in group)
    return seen[id(group)]


def map_row(row: RankProgram, change: Callable[[Instructions], Iterable[Instruction]]) -> RankProgram:
    """Return the row with ``change`` applied to each of its three parts."""
    return replace(
        row,
        prologue=tuple(change(row.prologue)),
        body=tuple(change(row.body)),
        epilogue=tuple(change(row.epilogue)),
    )


def expand(program: Program, rule: Callable[[int, Instruction], Iterable[Instruction]]) -> Program:
    """Replace every instruction by the ones that ``rule(rank, instruction)`` gives."""

    def spread(words: Instructions, rank: int) -> Iterable[Instruction]:
        return (new for old in words for new in rule(rank, old))

    rows = (map_row(row, partial(spread, rank=rank)) for rank, row in enumerate(program.rank_programs))
    return replace(program, rank_programs=tuple(rows))


def insert_before_commit(program: Program, extra: Callable[[int, RankProgram], Sequence[Instruction]]) -> Program:
    """Put ``extra(rank, row)`` before the first commit of every body that updates anything."""
    rows = []
    for rank, row in enumerate(program.rank_programs):
        at = next((i for i, word in enumerate(row.body) if isinstance(word, Commit)), None)
        new = extra(rank, row)
        if at is None or not new:
            rows.append(row)
            continue
        rows.append(replace(row, body=row.body[:at] + tuple(new) + row.body[at:]))
    return replace(program, rank_programs=tuple(rows))


def widen_commits(program: Program, times: int) -> Program:
    """Let the ``times`` copies of a replicated program commit together."""
    stride = program.num_ranks // times
    by_identity: dict[int, tuple[Group, Commit]] = {}
    by_members: dict[Group, Commit] = {}

    def widened(word: Instruction) -> Instruction:
        """Return the word; a commit is of all copies' members, one object for all ranks that share it."""
        if not isinstance(word, Commit):
            return word
        if id(word.group) not in by_identity:
            inner = tuple(sorted(member % stride for member in word.group))
            if inner not in by_members:
                by_members[inner] = Commit(
                    tuple(sorted(member + copy * stride for copy in range(times) for member in inner))
                )
            by_identity[id(word.group)] = (word.group, by_members[inner])
        return by_identity[id(word.group)][1]

    return replace(program, rank_programs=tuple(map_row(row, partial(map, widened)) for row in program.rank_programs))


def order_by_grad_completion(row: RankProgram, units: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the units in the order in which their gradients are complete at the end of the row's body."""
    last = {word.block: i for i, word in enumerate(row.body) if isinstance(word, Backward)}
    return sorted(units, key=lambda unit: (max((last.get(block, -1) for block in unit), default=-1), unit))


def grad_completion_index(words: Instructions, unit: tuple[int, ...]) -> int | None:
    """Return the index of the last word that adds to a unit's gradient; None where none does."""
    found = None
    for index, word in enumerate(words):
        match word:
            case Backward(block) if block in unit:
                found = index
            case Recv(value) | Collective(_, value) if value == grad(unit):
                found = index
            case _:
                pass
    return found


def forward_blocks(row: RankProgram) -> set[int]:
    """Return the blocks that a row runs forward."""
    return {word.block for word in row.prologue + row.body if isinstance(word, Forward)}


def backward_runs(row: RankProgram) -> tuple[range, ...]:
    """Return the blocks of a row in runs that always go backward together, each right behind the one above it."""
    computes = [word for word in row.prologue + row.body + row.epilogue if isinstance(word, Forward | Backward)]
    if not computes:
        return ()
    apart: set[int] = set()
    for word, following in zip(computes, [*computes[1:], None], strict=True):
        if (
            isinstance(word, Backward)
            and word.computes_weight_grad
            and replace(word, block=word.block - 1) != following
        ):
            apart.add(word.block)
    blocks = sorted({word.block for word in computes})
    starts = [at for at, block in enumerate(blocks) if block in apart or block - 1 != blocks[at - 1] or at == 0]
    return tuple(range(blocks[a], blocks[b - 1] + 1) for a, b in pairwise([*starts, len(blocks)]))


def is_free_of(word: Instruction, name: str) -> bool:
    """Tell whether an instruction releases a value of that name."""
    return isinstance(word, Free) and word.tensor.name == name
