"""Damaged programs: a plan, the instructions to replace on some ranks, and the rule that must be violated."""

from dataclasses import dataclass

from counterpoint.compiler.compile import bounds_from, count_bytes
from counterpoint.program.text import format_program, parse_program
from counterpoint.program.verify.verifier import Bounds, verify
from tests.program.verify.random_plans import compile_text

ALL_RANKS = -1


@dataclass(frozen=True)
class DamagedProgram:
    """One way to break the program of a plan.

    Args:
        name: what was done to it.
        rule: the rule that is broken by it.
        plan: whose program it is.
        edits: rank (or ALL that have the words), words, and what stands there instead.
        said: words of the message.
        given: microbatches, blocks, passes of the plan.
    """

    name: str
    rule: int
    plan: str
    edits: tuple[tuple[int, str, str], ...]
    message: str = ""
    options: tuple[tuple[str, object], ...] = ()


def edit(text, edits):
    rows = text.splitlines()
    for rank, words, instead in edits:
        hit = [at for at, row in enumerate(rows) if words in row and rank in {at, ALL_RANKS}]
        assert hit, f"{words!r} does not stand in\n{text}"
        for at in hit:
            rows[at] = " ".join(rows[at].replace(words, instead, 1).split())
    return "\n".join(rows)


def verify_damaged(damaged):
    """Check the damaged program against what the whole one promised."""
    compiled = compile_text(damaged.plan, **dict(damaged.options))
    program = parse_program(edit(format_program(compiled.program), damaged.edits))
    assert program != compiled.program
    verify(program, bounds_from(compiled.cost), compiled.model.units, count_bytes(program, compiled.model, 1))


def verify_text(text, *, staleness=0, in_flight=None, units=None):
    program = parse_program(text)
    blocks = {instruction.block for _, instruction in program.instructions() if hasattr(instruction, "block")}
    return verify(program, Bounds(staleness, in_flight), units or [(block,) for block in sorted(blocks)])
