"""Text form of programs: ``parse_program(format_program(p)) == p`` for every program ``p``.

One line per rank, instructions separated by spaces. A prefix ``0/2:`` gives the rank's shard of tensor-parallel blocks;
a rank without instructions is ``0/1:``. An asynchronous pipeline has three parts, ``prologue | body | epilogue``; in
the last two, microbatch indices are relative to the repetition and are written ``F0.+3``.
"""

from __future__ import annotations

import re
from functools import partial
from itertools import accumulate, pairwise
from typing import Literal, assert_never, cast, get_args

from counterpoint.errors import ProgramError
from counterpoint.optim.validation import MAX_QUOTED, parse_digits, renamed_hint, shorten
from counterpoint.program.compression import CODEC_PATTERN, find_codec, why_not_encoded
from counterpoint.program.instruction import (
    ALPHA_PATTERN,
    ApplyPushes,
    Backward,
    Collective,
    Commit,
    Fetch,
    Forward,
    Free,
    Group,
    Instruction,
    Offload,
    OffloadPlace,
    Pull,
    Push,
    Recompute,
    Recv,
    Send,
    SwapGradBuffers,
    TensorRef,
    Update,
    state,
)
from counterpoint.program.program import Instructions, Program, RankProgram

_UNIT = r"\d+(?:\+\d+)*"
_EDGE = r"\d+(?:\+\d+(?:-\d+)?)+"
_TENSOR_REF = rf"(?:grad|delayed_grad|weight|out){_UNIT}|(?:dx|x|g|y)\d+\.\+?\d+|d?s{_EDGE}\.\+?\d+"
_RANKS = r"\d+(?:-\d+(?:/\d+)?)?"
_GROUP = rf"{_RANKS}(?:,{_RANKS})*"
_INSTRUCTION = re.compile(
    r"(?P<opcode>F|R|B[iw]?)(?P<block>\d+)\.\+?(?P<micro>\d+)(?::-(?P<version>\d+))?$"
    rf"|U(?P<unit>{_UNIT})$"
    rf"|commit@(?P<commit_group>{_GROUP})(?::(?P<loss_group>{_GROUP}))?$"
    rf"|swap_grad_buffers\(grad(?P<swapped_unit>{_UNIT})\)$"
    rf"|(?P<collective>all_reduce_mean|all_reduce|reduce_scatter|all_gather|broadcast)(?:_(?P<phase>start|wait))?(?::(?P<codec>{CODEC_PATTERN}))?"
    rf"\((?P<operand>{_TENSOR_REF})\)@(?P<group>{_GROUP})$"
    rf"|(?:(?P<push_op>push_no_reply|push)(?=\S*>)(?::(?P<push_codec>{CODEC_PATTERN}))?|pull(?=\S*<))\((?P<ps_tensor>{_TENSOR_REF})\)[<>](?P<server>\d+)$"
    rf"|(?:apply_and_reply(?::(?P<staleness>\d+))?|(?P<apply>apply)|elastic_average:(?P<alpha>{ALPHA_PATTERN}))\((?P<units>{_UNIT}(?:,{_UNIT})*)\)@(?P<workers>{_GROUP})$"
    rf"|free\((?P<freed>{_TENSOR_REF})\)$"
    rf"|(?P<moved>fetch(?=\S*<)|offload(?=\S*>))\((?P<moved_tensor>(?:state|weight){_UNIT}|x\d+\.\+?\d+)\)[<>](?P<place>{'|'.join(get_args(OffloadPlace))})$"
    rf"|(?P<message_tensor>{_TENSOR_REF})(?::(?P<message_codec>{CODEC_PATTERN}))?(?P<arrow>[<>])(?P<peer>\d+)$"
)
_TENSOR_REF_PARTS = re.compile(r"(grad|delayed_grad|weight|out|dx|ds|x|g|y|s)([\d+-]+)(?:\.\+?(\d+))?$")
_BACKWARD_PARTS: dict[str, Literal["", "input", "weight"]] = {"B": "", "Bi": "input", "Bw": "weight"}
_OPCODES: dict[type, str] = {Forward: "F", Recompute: "R"}
FORMER_NAMES = {
    "sum": "all_reduce",
    "share": "reduce_scatter",
    "join": "all_gather",
    "copy": "broadcast",
    "mean": "all_reduce_mean",
    "tell": "push_no_reply",
    "serve": "apply_and_reply",
    "take": "apply",
    "draw": "elastic_average",
    "swap": "swap_grad_buffers",
    "release": "free",
    "late": "delayed_grad",
}
"""Current names of operations, and of a tensor, by the names that they had before."""
MAX_RANGE = 65_536
"""The largest number of ranks or blocks that one part of a group or a skip connection may stand for."""

MAX_RANGE_OF_PROGRAM = 1024
"""The same for the ranks of a program that has not even so many lines."""

MAX_LINE = 10_000_000
"""The longest line of a program, in characters."""

_EXAMPLES = (
    "F0.2, B0.2, U0, commit@0,1, x1.2>1, all_reduce(grad0)@0,1, push(grad0)>2, apply_and_reply(0)@0,1, free(weight0) "
    "or fetch(state0)<disk"
)


def format_group(group: Group) -> str:
    """Format a group: ``0,1``, or ``0-7`` and ``0-12/4`` for three or more evenly spaced ranks."""
    if len(group) > 2:
        steps = {epilogue - prologue for prologue, epilogue in pairwise(group)}
        if len(steps) == 1:
            step = steps.pop()
            return f"{group[0]}-{group[-1]}" + (f"/{step}" if step > 1 else "")
    return ",".join(map(str, group))


def format_unit(unit: tuple[int, ...]) -> str:
    """Format a unit: ``3``, or ``0+4`` for parameters that blocks 0 and 4 share."""
    return "+".join(map(str, unit))


def format_edge(blocks: tuple[int, ...]) -> str:
    """Format a producer and its consumers: ``2+7``, or ``2+7-9`` for three or more consecutive consumers."""
    parts = [str(blocks[0])]
    readers = list(blocks[1:])
    while readers:
        count = next((at for at, block in enumerate(readers) if block != readers[0] + at), len(readers))
        count = count if count > 2 else 1
        parts.append(str(readers[0]) if count == 1 else f"{readers[0]}-{readers[count - 1]}")
        del readers[:count]
    return "+".join(parts)


def format_tensor_ref(tensor: TensorRef, *, relative: bool = False) -> str:
    """Format a tensor reference.

    Args:
        tensor: the reference.
        relative: whether its microbatch counts from the first one of the repetition, as in ``x3.+1``.
    """
    micro = "" if tensor.micro is None else f".{'+' if relative else ''}{tensor.micro}"
    blocks = format_edge(tensor.blocks) if tensor.name in {"s", "ds"} else format_unit(tensor.blocks)
    return f"{tensor.name}{blocks}{micro}"


def format_instruction(instruction: Instruction, *, relative: bool = False) -> str:  # noqa: C901, PLR0911, PLR0912 - one case each
    """Format one instruction, with ``relative`` as in :func:`format_tensor_ref`."""
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
        case Send(tensor, peer, codec) | Recv(tensor, peer, codec):
            suffix, arrow = f":{codec}" if codec else "", ">" if isinstance(instruction, Send) else "<"
            return f"{format_tensor_ref(tensor, relative=relative)}{suffix}{arrow}{peer}"
        case Collective(_, tensor, group):
            return (
                f"{format_operation(instruction)}({format_tensor_ref(tensor, relative=relative)})@{format_group(group)}"
            )
        case Push(tensor, peer):
            return f"{instruction.op_name}({format_tensor_ref(tensor)})>{peer}"
        case Pull(tensor, peer):
            return f"pull({format_tensor_ref(tensor)})<{peer}"
        case ApplyPushes(units, workers):
            return f"{instruction.op_name}({','.join(map(format_unit, units))})@{format_group(workers)}"
        case Free(tensor):
            return f"free({format_tensor_ref(tensor, relative=relative)})"
        case Fetch(tensor, place):
            return f"fetch({format_tensor_ref(tensor, relative=relative)})<{place}"
        case Offload(tensor, place):
            return f"offload({format_tensor_ref(tensor, relative=relative)})>{place}"
        case _:
            assert_never(instruction)


def format_operation(instruction: Collective) -> str:
    """Write the operation of a collective with its phase and its codec: ``all_reduce_start:int8``."""
    op = f"{instruction.op}_{instruction.phase}" if instruction.phase else instruction.op
    return f"{op}:{instruction.codec}" if instruction.codec else op


MAX_DIGITS = 18
"""The largest number of digits of a number in a program: with these, the length of any range fits into 64 bits."""

_parse_number = partial(parse_digits, name="a number of an instruction", error=ProgramError, max_digits=MAX_DIGITS)


def parse_group(text: str, max_ranks: int = MAX_RANGE) -> Group:
    """Parse a group of at most ``max_ranks`` ranks; the inverse of :func:`format_group`."""
    ranks: list[int] = []
    for part in text.split(","):
        span, _, step = part.partition("/")
        first, _, last = span.partition("-")
        end = _parse_number(last or first)
        run = range(_parse_number(first), end + 1, _parse_number(step or "1") or end + 1)
        if end not in run or (ranks and ranks[-1] >= run[0]):
            raise ProgramError(
                f"{shorten(text)!r} is not a group; write its ranks in ascending order, as 0,1 or 0-7 or 0-12/4"
            )
        if len(run) > max_ranks:
            raise ProgramError(f"{shorten(text)!r} has {len(run)} ranks; a group here has at most {max_ranks}")
        ranks += run
    return tuple(ranks)


def parse_unit(text: str) -> tuple[int, ...]:
    """Parse a unit; the inverse of :func:`format_unit`."""
    return tuple(map(_parse_number, text.split("+")))


def parse_edge(text: str) -> tuple[int, ...]:
    """Parse a producer and its consumers; the inverse of :func:`format_edge`."""
    blocks: list[int] = []
    for part in text.split("+"):
        first, _, last = part.partition("-")
        run = range(_parse_number(first), _parse_number(last or first) + 1)
        if len(blocks) + len(run) > MAX_RANGE:
            raise ProgramError(
                f"{shorten(text)!r} has {len(blocks) + len(run)} blocks; a skip connection has at most {MAX_RANGE}"
            )
        blocks += run
    if sorted(set(blocks)) != blocks or len(blocks) == 1 or blocks[1:] == [blocks[0] + 1]:
        raise ProgramError(
            f"{shorten(text)!r} is not a skip connection; write the producing block and the consuming blocks in "
            "ascending order, as 2+7 or 2+5+7-9; what only the next block reads is x3"
        )
    return tuple(blocks)


def parse_tensor_ref(text: str) -> TensorRef:
    """Parse a tensor reference; the inverse of :func:`format_tensor_ref`."""
    match = _TENSOR_REF_PARTS.match(text)
    if match is None or not re.fullmatch(_TENSOR_REF, text):
        raise ProgramError(f"{text!r} is not a tensor reference; expected one such as x1.2, g0.0, grad3 or weight0+4")
    name = cast("Literal['x', 'g', 's', 'ds', 'y', 'dx', 'out', 'grad', 'delayed_grad', 'weight']", match[1])
    blocks = parse_edge(match[2]) if name in {"s", "ds"} else parse_unit(match[2])
    return TensorRef(name, blocks, None if match[3] is None else _parse_number(match[3]))


def parse_instruction(text: str, max_ranks: int = MAX_RANGE) -> Instruction:
    """Parse one instruction; the inverse of :func:`format_instruction`.

    Args:
        text: without spaces.
        max_ranks: how many ranks a group may have.

    Raises:
        ProgramError: the text is not an instruction; for an instruction of an earlier version, the message has its new
            name.
    """
    match = _INSTRUCTION.match(text)
    if match is None:
        renamed = _rename_instruction(text)
        if renamed is not None:
            raise ProgramError(
                f"{shorten(text)!r} is not an instruction; its name has changed: write {shorten(renamed)}"
            )
        hint = "".join(renamed_hint(name, FORMER_NAMES) for name in dict.fromkeys(re.findall(r"[a-z_]+", text)))
        raise ProgramError(f"{shorten(text)!r} is not an instruction{hint}; expected one such as {_EXAMPLES}")
    if match["opcode"]:
        version = -_parse_number(match["version"] or "0")
        arguments = _parse_number(match["block"]), _parse_number(match["micro"]), version
        if match["opcode"] in "FR":
            return Forward(*arguments) if match["opcode"] == "F" else Recompute(*arguments)
        return Backward(*arguments, _BACKWARD_PARTS[match["opcode"]])
    if match["unit"] or match["swapped_unit"]:
        return (
            Update(parse_unit(match["unit"])) if match["unit"] else SwapGradBuffers(parse_unit(match["swapped_unit"]))
        )
    if match["collective"] or match["commit_group"]:
        return _parse_collective(match, max_ranks)
    if match["units"]:
        return _parse_apply_pushes(match, max_ranks)
    return _parse_message(match)


def _rename_instruction(text: str) -> str | None:
    """Return an instruction that is written with a former name under its current one; None if it has none."""
    head, parenthesis, operand = text.partition("(")
    name, colon, option = head.partition(":")
    op = FORMER_NAMES.get(name, name)
    if parenthesis and operand.endswith(("+", "-")):
        op, operand = op + ("_start" if operand.endswith("+") else "_wait"), operand[:-1]
    renamed = re.sub(r"(?<![a-z_])late(?=\d)", FORMER_NAMES["late"], f"{op}{colon}{option}{parenthesis}{operand}")
    return renamed if renamed != text and _INSTRUCTION.match(renamed) else None


def _parse_collective(match: re.Match[str], max_ranks: int) -> Instruction:
    if match["commit_group"]:
        loss_group = parse_group(match["loss_group"], max_ranks) if match["loss_group"] else ()
        return Commit(parse_group(match["commit_group"], max_ranks), loss_group)
    op = cast(
        "Literal['all_reduce', 'reduce_scatter', 'all_gather', 'broadcast', 'all_reduce_mean']", match["collective"]
    )
    phase = cast("Literal['', 'start', 'wait']", match["phase"] or "")
    codec = match["codec"] or ""
    tensor = parse_tensor_ref(match["operand"])
    if codec and (reason := why_not_encoded(op, tensor.name, codec)):
        raise ProgramError(f"{match[0]!r} cannot have a codec: {reason}; omit :{codec}")
    return Collective(op, tensor, parse_group(match["group"], max_ranks), phase, codec)


def _parse_message(match: re.Match[str]) -> Instruction:
    if match["ps_tensor"]:
        tensor, server = parse_tensor_ref(match["ps_tensor"]), _parse_number(match["server"])
        if not match["push_op"]:
            return Pull(tensor, server)
        op = cast("Literal['push', 'push_no_reply']", match["push_op"])
        return Push(tensor, server, _check_gradient_codec(match, match["push_codec"], tensor), op)
    if match["freed"]:
        return Free(parse_tensor_ref(match["freed"]))
    if match["moved"]:
        move = Fetch if match["moved"] == "fetch" else Offload
        text = match["moved_tensor"]
        tensor = state(parse_unit(text[5:])) if text.startswith("state") else parse_tensor_ref(text)
        return move(tensor, cast("OffloadPlace", match["place"]))
    make = Send if match["arrow"] == ">" else Recv
    tensor = parse_tensor_ref(match["message_tensor"])
    return make(tensor, _parse_number(match["peer"]), _check_gradient_codec(match, match["message_codec"], tensor))


def _parse_apply_pushes(match: re.Match[str], max_ranks: int) -> Instruction:
    units, workers = tuple(map(parse_unit, match["units"].split(","))), parse_group(match["workers"], max_ranks)
    if match["alpha"]:
        return ApplyPushes(units, workers, op="elastic_average", alpha=match["alpha"])
    if match["apply"]:
        return ApplyPushes(units, workers, op="apply")
    return ApplyPushes(units, workers, None if match["staleness"] is None else _parse_number(match["staleness"]))


def _check_gradient_codec(match: re.Match[str], codec: str | None, tensor: TensorRef) -> str:
    """Return the codec of a message; only gradients of units are compressed, by a codec that works point to point."""
    if not codec:
        return ""
    if tensor.name != "grad" or not find_codec(codec).spec.works_point_to_point:
        raise ProgramError(
            f"between two ranks only gradients can be compressed, by a codec that works point to point, which does not "
            f"hold for {match[0]!r}; omit :{codec}"
        )
    return codec


def format_rank_program(rank_program: RankProgram, *, all_parts: bool = False) -> str:
    """Format the instructions of one rank, with ``all_parts`` as ``prologue | body | epilogue``."""
    head = (
        f"{rank_program.tp_rank}/{rank_program.tp_degree}: "
        if rank_program.tp_degree > 1 or not rank_program.body
        else ""
    )
    body = " ".join(format_instruction(instruction, relative=all_parts) for instruction in rank_program.body)
    if not all_parts:
        return (head + body).rstrip()
    prologue = " ".join(map(format_instruction, rank_program.prologue))
    epilogue = " ".join(format_instruction(instruction, relative=True) for instruction in rank_program.epilogue)
    return head + " | ".join((prologue, body, epilogue))


def format_program(program: Program) -> str:
    """Format a program, one line per rank."""
    return "\n".join(
        format_rank_program(rank_program, all_parts=program.is_async_pipeline) for rank_program in program.rank_programs
    )


def parse_program(text: str) -> Program:
    """Parse a program, one line per rank.

    Raises:
        ProgramError: the text has something that is not an instruction; the message shows the line with a caret below
            it.
    """
    lines = text.splitlines()
    max_ranks = max(len(lines), MAX_RANGE_OF_PROGRAM)
    return Program(tuple(_parse_rank_program(line, number, max_ranks) for number, line in enumerate(lines)))


def _parse_rank_program(line: str, number: int, max_ranks: int) -> RankProgram:
    if len(line) > MAX_LINE:
        raise ProgramError(f"line {number + 1} has {len(line)} characters; a line has at most {MAX_LINE}")
    head = re.match(r"(\d+)/(\d+): ?", line)
    rest = line[head.end() :] if head else line
    texts = rest.split("|")
    if len(texts) not in {1, 3}:
        raise ProgramError(
            f"line {number + 1} has {len(texts)} parts; a rank program is a body, or prologue | body | epilogue\n  "
            f"{shorten(line)}"
        )
    starts = accumulate((len(part) + 1 for part in texts), initial=len(line) - len(rest))
    parts = [
        _parse_instructions(part, start, line, number, max_ranks) for part, start in zip(texts, starts, strict=False)
    ]
    prologue, body, epilogue = parts if len(parts) == 3 else ((), parts[0], ())
    index, count = (_parse_number(head[1]), _parse_number(head[2])) if head else (0, 1)
    return RankProgram(body, prologue, epilogue, index, count)


def _parse_instructions(part: str, start: int, line: str, number: int, max_ranks: int) -> Instructions:
    instructions: list[Instruction] = []
    for match in re.finditer(r"\S+", part):
        try:
            instructions.append(parse_instruction(match[0], max_ranks))
        except ProgramError as error:
            marked = _mark_instruction(line, start + match.start(), len(match[0]))
            raise ProgramError(f"line {number + 1}: {error}\n{marked}") from None
    return tuple(instructions)


def _mark_instruction(line: str, start: int, length: int) -> str:
    """Return a line, or the part of a long one around an instruction, and below it a caret for each character of it."""
    begin = max(0, start - MAX_QUOTED // 2) if len(line) > MAX_QUOTED else 0
    shown = line[begin : begin + MAX_QUOTED]
    return f"  {shown}\n  {' ' * (start - begin)}{'^' * min(length, len(shown) - start + begin)}"
