"""How a right program is made wrong: a plan, the words to replace on some ranks, and the law that must say so."""

from dataclasses import dataclass

from counterpoint.compiler.compile import count_bytes, promise_of
from counterpoint.program.laws import Promise, check
from counterpoint.program.text import format_program, parse_program
from tests.laws.compositions import compiled

ALL = -1


@dataclass(frozen=True)
class Damage:
    """One way to break the program of a plan.

    Args:
        name: what was done to it.
        law: the law that is broken by it.
        plan: whose program it is.
        edits: rank (or ALL that have the words), words, and what stands there instead.
        said: words of the message.
        given: microbatches, blocks, passes of the plan.
    """

    name: str
    law: int
    plan: str
    edits: tuple[tuple[int, str, str], ...]
    said: str = ""
    given: tuple[tuple[str, object], ...] = ()


def edited(text, edits):
    rows = text.splitlines()
    for rank, words, instead in edits:
        hit = [at for at, row in enumerate(rows) if words in row and rank in {at, ALL}]
        assert hit, f"{words!r} does not stand in\n{text}"
        for at in hit:
            rows[at] = " ".join(rows[at].replace(words, instead, 1).split())
    return "\n".join(rows)


def judge(damage):
    """Check the damaged program against what the whole one promised."""
    made = compiled(damage.plan, **dict(damage.given))
    program = parse_program(edited(format_program(made.program), damage.edits))
    assert program != made.program
    check(program, promise_of(made.forecast), made.model.units, count_bytes(program, made.model, 1))


def judge_text(text, *, staleness=0, in_flight=None, units=None):
    program = parse_program(text)
    blocks = {word.block for _, word in program.words() if hasattr(word, "block")}
    return check(program, Promise(staleness, in_flight), units or [(block,) for block in sorted(blocks)])
