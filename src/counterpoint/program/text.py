"""The text form of a program. ``parse_program(format_program(p)) == p`` for every program ``p``.

One line per rank, one word per instruction. ``0/2:`` before a row says which slice of sliced blocks it holds; a row
that does nothing is ``0/1:``.
A stream has three parts, ``prologue | body | epilogue``, and writes microbatches of the last two as ``F0.+3``.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Literal, assert_never, cast

from counterpoint.errors import ProgramError
from counterpoint.program.compression import CODEC_PATTERN, find_codec
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
    Recompute,
    Recv,
    Send,
    SwapGradBuffers,
    TensorRef,
    Update,
)
from counterpoint.program.program import Instructions, Program, RankProgram

_UNIT = r"\d+(?:\+\d+)*"
_EDGE = r"\d+(?:\+\d+(?:-\d+)?)+"
_TENSOR_REF = rf"(?:grad|delayed_grad|weight){_UNIT}|(?:dx|x|g|y)\d+\.\+?\d+|d?s{_EDGE}\.\+?\d+"
_GROUP = r"\d+(?:[,-]\d+(?:/\d+)?)*"
_INSTRUCTION = re.compile(
    r"(?P<op>F|R|B[iw]?)(?P<block>\d+)\.\+?(?P<micro>\d+)(?::(?P<version>-\d+))?$"
    rf"|U(?P<unit>{_UNIT})$"
    rf"|commit@(?P<all>{_GROUP})(?::(?P<own>{_GROUP}))?$"
    rf"|swap_grad_buffers\(grad(?P<swapped>{_UNIT})\)$"
    rf"|(?P<verb>all_reduce_mean|all_reduce|reduce_scatter|all_gather|broadcast)(?:_(?P<phase>start|wait))?(?::(?P<code>{CODEC_PATTERN}))?"
    rf"\((?P<whole>{_TENSOR_REF})\)@(?P<group>{_GROUP})$"
    rf"|(?:(?P<push>push_no_reply|push)(?=\S*>)(?::(?P<pushed>{CODEC_PATTERN}))?|pull(?=\S*<))\((?P<asked>{_TENSOR_REF})\)[<>](?P<server>\d+)$"
    rf"|(?:apply_and_reply(?::(?P<ahead>\d+))?|(?P<take>apply)|elastic_average:(?P<part>0\.\d+))\((?P<units>{_UNIT}(?:,{_UNIT})*)\)@(?P<workers>{_GROUP})$"
    rf"|free\((?P<released>{_TENSOR_REF})\)$"
    rf"|(?P<value>{_TENSOR_REF})(?::(?P<how>{CODEC_PATTERN}))?(?P<arrow>[<>])(?P<peer>\d+)$"
)
_TENSOR_REF_PARTS = re.compile(r"(grad|delayed_grad|weight|dx|ds|x|g|y|s)([\d+-]+)(?:\.\+?(\d+))?$")
_BACKWARD_PARTS: dict[str, Literal["", "input", "weight"]] = {"B": "", "Bi": "input", "Bw": "weight"}
_OPCODES: dict[type, str] = {Forward: "F", Recompute: "R"}
_EXAMPLES = (
    "F0.2, B0.2, U0, commit@0,1, x1.2>1, all_reduce(grad0)@0,1, push(grad0)>2, apply_and_reply(0)@0,1 or free(weight0)"
)


def format_group(group: Group) -> str:
    """Write a group: ``0,1``, or ``0-7`` and ``0-12/4`` for three and more evenly spaced ranks."""
    if len(group) > 2:
        steps = {after - before for before, after in pairwise(group)}
        if len(steps) == 1:
            step = steps.pop()
            return f"{group[0]}-{group[-1]}" + (f"/{step}" if step > 1 else "")
    return ",".join(map(str, group))


def format_unit(unit: tuple[int, ...]) -> str:
    """Write a unit: ``3``, or ``0+4`` for parameters that blocks 0 and 4 both use."""
    return "+".join(map(str, unit))


def format_edge(blocks: tuple[int, ...]) -> str:
    """Write a maker and its readers: ``2+7``, or ``2+7-9`` for three and more readers in a row."""
    parts = [str(blocks[0])]
    readers = list(blocks[1:])
    while readers:
        count = next((at for at, block in enumerate(readers) if block != readers[0] + at), len(readers))
        count = count if count > 2 else 1
        parts.append(str(readers[0]) if count == 1 else f"{readers[0]}-{readers[count - 1]}")
        del readers[:count]
    return "+".join(parts)


def format_tensor_ref(value: TensorRef, *, relative: bool = False) -> str:
    """Write a value; ``ahead`` marks its microbatch as counted from the repetition's first."""
    micro = "" if value.micro is None else f".{'+' if relative else ''}{value.micro}"
    blocks = format_edge(value.blocks) if value.name in {"s", "ds"} else format_unit(value.blocks)
    return f"{value.name}{blocks}{micro}"


def format_instruction(instruction: Instruction, *, relative: bool = False) -> str:  # noqa: C901, PLR0911, PLR0912 - one case each
    """Write one instruction as one word; ``ahead`` as in :func:`format_value`."""
    match instruction:
        case Forward(block, micro, version) | Recompute(block, micro, version) | Backward(block, micro, version):
            letter = f"B{instruction.part[:1]}" if isinstance(instruction, Backward) else _OPCODES[type(instruction)]
            return f"{letter}{block}.{'+' if relative else ''}{micro}" + (f":{version}" if version else "")
        case Update(unit):
            return f"U{format_unit(unit)}"
        case Commit(group, own):
            return f"commit@{format_group(group)}" + (f":{format_group(own)}" if own else "")
        case SwapGradBuffers(unit):
            return f"swap_grad_buffers(grad{format_unit(unit)})"
        case Send(value, peer, code) | Recv(value, peer, code):
            coded, arrow = f":{code}" if code else "", ">" if isinstance(instruction, Send) else "<"
            return f"{format_tensor_ref(value, relative=relative)}{coded}{arrow}{peer}"
        case Collective(_, value, group):
            return (
                f"{format_operation(instruction)}({format_tensor_ref(value, relative=relative)})@{format_group(group)}"
            )
        case Push(value, peer):
            return f"{instruction.op_name}({format_tensor_ref(value)})>{peer}"
        case Pull(value, peer):
            return f"pull({format_tensor_ref(value)})<{peer}"
        case ApplyPushes(units, workers):
            return f"{instruction.op_name}({','.join(map(format_unit, units))})@{format_group(workers)}"
        case Free(value):
            return f"free({format_tensor_ref(value, relative=relative)})"
        case _:
            assert_never(instruction)


def format_operation(word: Collective) -> str:
    """Write the operation of a collective with its phase and its codec: ``all_reduce_start:int8``."""
    op = f"{word.op}_{word.phase}" if word.phase else word.op
    return f"{op}:{word.codec}" if word.codec else op


def parse_group(text: str) -> Group:
    """Read a group; the inverse of :func:`format_group`."""
    ranks: list[int] = []
    for part in text.split(","):
        span, _, step = part.partition("/")
        first, _, last = span.partition("-")
        end = int(last or first)
        run = range(int(first), end + 1, int(step or 1) or end + 1)
        if end not in run or (ranks and ranks[-1] >= run[0]):
            raise ProgramError(f"{text!r} is not a group; write its ranks upwards, as 0,1 or 0-7 or 0-12/4")
        ranks += run
    return tuple(ranks)


def parse_unit(text: str) -> tuple[int, ...]:
    """Read a unit; the inverse of :func:`format_unit`."""
    return tuple(map(int, text.split("+")))


def parse_edge(text: str) -> tuple[int, ...]:
    """Read a maker and its readers; the inverse of :func:`format_edge`."""
    blocks: list[int] = []
    for part in text.split("+"):
        first, _, last = part.partition("-")
        blocks += range(int(first), int(last or first) + 1)
    if sorted(set(blocks)) != blocks or len(blocks) == 1 or blocks[1:] == [blocks[0] + 1]:
        raise ProgramError(
            f"{text!r} is not a strand; write the block that makes it and the blocks that read it upwards, as 2+7 or "
            "2+5+7-9; what only the next block reads is x3"
        )
    return tuple(blocks)


def parse_tensor_ref(text: str) -> TensorRef:
    """Read a value; the inverse of :func:`format_tensor_ref`."""
    found = _TENSOR_REF_PARTS.match(text)
    if found is None or not re.fullmatch(_TENSOR_REF, text):
        raise ProgramError(f"{text!r} is not a value; expected one such as x1.2, g0.0, grad3 or weight0+4")
    name = cast("Literal['x', 'g', 's', 'ds', 'y', 'dx', 'grad', 'delayed_grad', 'weight']", found[1])
    blocks = parse_edge(found[2]) if name in {"s", "ds"} else parse_unit(found[2])
    return TensorRef(name, blocks, None if found[3] is None else int(found[3]))


def parse_instruction(text: str) -> Instruction:
    """Read one word; the inverse of :func:`format_instruction`."""
    found = _INSTRUCTION.match(text)
    if found is None:
        raise ProgramError(f"{text!r} is not an instruction; expected a word such as {_EXAMPLES}")
    if found["op"]:
        place = int(found["block"]), int(found["micro"]), int(found["version"] or 0)
        if found["op"] in "FR":
            return Forward(*place) if found["op"] == "F" else Recompute(*place)
        return Backward(*place, _BACKWARD_PARTS[found["op"]])
    if found["unit"] or found["swapped"]:
        return Update(parse_unit(found["unit"])) if found["unit"] else SwapGradBuffers(parse_unit(found["swapped"]))
    if found["verb"] or found["all"]:
        return _parse_collective(found)
    if found["units"]:
        return _parse_apply_pushes(found)
    return _parse_message(found)


def _parse_collective(found: re.Match[str]) -> Instruction:
    if found["all"]:
        return Commit(parse_group(found["all"]), parse_group(found["own"]) if found["own"] else ())
    verb = cast("Literal['all_reduce', 'reduce_scatter', 'all_gather', 'broadcast', 'all_reduce_mean']", found["verb"])
    phase = cast("Literal['', 'start', 'wait']", found["phase"] or "")
    code = found["code"] or ""
    if code and (verb, found["whole"][:4]) != ("all_reduce", "grad"):
        raise ProgramError(f"only sums of gradients have a code, but {found[0]!r} is none; leave out :{code}")
    if code:
        find_codec(code)
    return Collective(verb, parse_tensor_ref(found["whole"]), parse_group(found["group"]), phase, code)


def _parse_message(found: re.Match[str]) -> Instruction:
    if found["asked"]:
        value, server = parse_tensor_ref(found["asked"]), int(found["server"])
        if not found["push"]:
            return Pull(value, server)
        verb = cast("Literal['push', 'push_no_reply']", found["push"])
        return Push(value, server, _check_gradient_codec(found, found["pushed"], value), verb)
    if found["released"]:
        return Free(parse_tensor_ref(found["released"]))
    make = Send if found["arrow"] == ">" else Recv
    value = parse_tensor_ref(found["value"])
    return make(value, int(found["peer"]), _check_gradient_codec(found, found["how"], value))


def _parse_apply_pushes(found: re.Match[str]) -> Instruction:
    units, workers = tuple(map(parse_unit, found["units"].split(","))), parse_group(found["workers"])
    if found["part"]:
        return ApplyPushes(units, workers, op="elastic_average", alpha=found["part"])
    if found["take"]:
        return ApplyPushes(units, workers, op="apply")
    return ApplyPushes(units, workers, None if found["ahead"] is None else int(found["ahead"]))


def _check_gradient_codec(found: re.Match[str], code: str | None, value: TensorRef) -> str:
    """Return the code of a message; only gradients of units travel in one that can be read alone."""
    if not code:
        return ""
    if value.name != "grad" or not find_codec(code).spec.works_point_to_point:
        raise ProgramError(
            f"only gradients travel in a code from rank to rank, and in none that is about a sum, but {found[0]!r} "
            f"does; leave out :{code}"
        )
    return code


def format_rank_program(row: RankProgram, *, all_parts: bool = False) -> str:
    """Write one row; ``stream`` writes all three parts."""
    head = f"{row.tp_rank}/{row.tp_degree}: " if row.tp_degree > 1 or not row.body else ""
    body = " ".join(format_instruction(word, relative=all_parts) for word in row.body)
    if not all_parts:
        return (head + body).rstrip()
    before = " ".join(map(format_instruction, row.prologue))
    after = " ".join(format_instruction(word, relative=True) for word in row.epilogue)
    return head + " | ".join((before, body, after))


def format_program(program: Program) -> str:
    """Write a program, one line per rank."""
    return "\n".join(format_rank_program(row, all_parts=program.is_async_pipeline) for row in program.rank_programs)


def parse_program(text: str) -> Program:
    """Read a program, one line per rank.

    Raises:
        ProgramError: a word is none; the message shows its line with a caret under the word.
    """
    return Program(tuple(_parse_rank_program(line, number) for number, line in enumerate(text.splitlines())))


def _parse_rank_program(line: str, number: int) -> RankProgram:
    head = re.match(r"(\d+)/(\d+): ?", line)
    rest = line[head.end() :] if head else line
    texts = rest.split("|")
    parts = [
        _parse_instructions(part, len(line) - len("|".join(texts[at:])), line, number) for at, part in enumerate(texts)
    ]
    if len(parts) not in {1, 3}:
        raise ProgramError(
            f"line {number + 1} has {len(parts)} parts; a row is a body, or prologue | body | epilogue\n  {line}"
        )
    prologue, body, epilogue = parts if len(parts) == 3 else ((), parts[0], ())
    index, count = (int(head[1]), int(head[2])) if head else (0, 1)
    return RankProgram(body, prologue, epilogue, index, count)


def _parse_instructions(part: str, start: int, line: str, number: int) -> Instructions:
    words: list[Instruction] = []
    for found in re.finditer(r"\S+", part):
        try:
            words.append(parse_instruction(found[0]))
        except ProgramError as wrong:
            caret = " " * (start + found.start()) + "^" * len(found[0])
            raise ProgramError(f"line {number + 1}: {wrong}\n  {line}\n  {caret}") from None
    return tuple(words)
