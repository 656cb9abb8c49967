"""Law 1: whatever is sent is received, once and in its order."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from counterpoint.errors import ProgramError
from counterpoint.program.instruction import Instruction, Pull, Push, Recv, Send, Serve, Value
from counterpoint.program.program import Words
from counterpoint.program.text import format_value
from counterpoint.program.walk import show_places

_Message: TypeAlias = tuple[str, Value, int, int, str]
"""A send or a push: which, of what, from whom, to whom, in which code."""
_MESSAGES = {Send, Recv, Push, Pull, Serve}


def law_1_messages_pair_up(rows: Sequence[Words]) -> None:
    """Prove that sends and receives, pushes and pulls come in pairs, and messages between two ranks in their order.

    Raises:
        ProgramError: law 1; a word has no counterpart, or another one's.
    """
    balance: defaultdict[_Message, int] = defaultdict(int)
    for rank, row in enumerate(rows):
        for word in row:
            if type(word) in _MESSAGES:
                for key, weight in _messages(rank, word):
                    balance[key] += weight
    for key, count in balance.items():
        if count:
            kind, value, source, target, code = key
            coded = f" in {code}" if code else ""
            excess = "is never received" if count > 0 else "is never sent"
            if kind == "push":
                excess = "is never answered by a pull" if count > 0 else "is pulled without a push"
            elif kind == "push_no_reply":
                excess = "is never applied" if count > 0 else "is applied, but never pushed"
            rank, index = max(
                (at, index)
                for at, row in enumerate(rows)
                for index, word in enumerate(row)
                if any(found == key for found, _ in _messages(at, word))
            )
            raise ProgramError(
                f"{format_value(value)}{coded} from rank {source} to rank {target} {excess}; every {kind} has exactly "
                f"one counterpart\n{show_places(rows, {rank: index}, 'here')}",
                law=1,
            )

    _judge_sequences(rows)


def _judge_sequences(rows: Sequence[Words]) -> None:
    """Prove that each rank takes what another one sends it in the order in which that sends it."""
    sent: defaultdict[tuple[int, int], list[Value]] = defaultdict(list)
    for rank, row in enumerate(rows):
        for word in row:
            if type(word) is Send:
                sent[rank, word.peer].append(word.value)
    taken: Counter[tuple[int, int]] = Counter()
    for rank, row in enumerate(rows):
        for index, word in enumerate(row):
            if type(word) is not Recv:
                continue
            expected = sent[word.peer, rank][taken[word.peer, rank]]
            taken[word.peer, rank] += 1
            if word.value != expected:
                raise ProgramError(
                    f"rank {rank} receives {format_value(word.value)} where rank {word.peer} has sent "
                    f"{format_value(expected)} before; messages from one rank to another are received in the order in "
                    f"which they are sent\n{show_places(rows, {rank: index}, 'here')}",
                    law=1,
                )


def _messages(rank: int, word: Instruction) -> Iterator[tuple[_Message, int]]:
    """Yield what a word says, 1, or takes, -1. What is pulled is told apart by its unit alone."""
    match word:
        case Send(value, peer, code):
            yield ("send", value, rank, peer, code), 1
        case Recv(value, peer, code):
            yield ("send", value, peer, rank, code), -1
        case Push(value, peer, verb="push_no_reply"):
            yield ("push_no_reply", value, rank, peer, ""), 1
        case Push(value, peer):
            yield ("push", Value("grad", value.blocks), rank, peer, ""), 1
        case Pull(value, peer):
            yield ("push", Value("grad", value.blocks), rank, peer, ""), -1
        case Serve(units, workers, verb="apply"):
            yield from (
                (("push_no_reply", Value("grad", unit), worker, rank, ""), -1) for worker in workers for unit in units
            )
        case _:
            pass
