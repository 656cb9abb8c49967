"""Codes: how a sum of gradients may be written on the wire, and how many bytes that takes.

A code is pure data: a name, perhaps a number, and the formula of its bytes. What it does with tensors is written in
``fabric/compression.py``. Every parameter of a unit is written apart, so that the bytes follow from its shape.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Literal, TypeAlias

from counterpoint.errors import ProgramError

CHUNK_ELEMENTS = 1024
"""So many numbers of a parameter share a scale; the last chunk of a parameter may be shorter."""

INDEX_BYTES = 4
CODEC_PATTERN = r"[a-z][a-z0-9]*(?::\d+(?:\.\d+)?)?"
"""The text of a code, as a regular expression."""

ReductionMethod: TypeAlias = Literal["reduce", "reduce twice", "gather"]
EncodedSize: TypeAlias = Callable[[tuple[int, ...], int, Fraction], int]
"""From a parameter's shape, the bytes of one of its numbers, and the code's number to the bytes on the wire."""


@dataclass(frozen=True, slots=True)
class CodecSpec:
    """What all codes of one name have in common.

    Args:
        summary: what is sent, in one line; ``{}`` stands for the number.
        way: ``reduce`` adds up what is sent, ``reduce twice`` in two goes, ``gather`` brings every member what each one
            sends, to be added up there in the order of the group.
        size: the bytes of one parameter, as one member sends it to one other.
        number: what the number means, and its value where none is written; None where there is none.
        keeps: whether what was not sent is kept and added to the next gradient.
        is_readable_alone: whether one member's bytes say its gradient, so that it can be sent to one other.
    """

    summary: str
    reduction: ReductionMethod
    encoded_size: EncodedSize
    number: tuple[str, Fraction] | None = None
    has_error_feedback: bool = True
    works_point_to_point: bool = True


@dataclass(frozen=True, slots=True)
class Codec:
    """One code with its number."""

    name: str
    number: Fraction
    spec: CodecSpec

    def encoded_bytes(self, shape: tuple[int, ...], item_bytes: int) -> int:
        """Return the bytes that a parameter takes on the wire."""
        return self.spec.encoded_size(shape, item_bytes, self.number)

    @property
    def summary(self) -> str:
        """What is sent, in one line."""
        shown = 100 * self.number if self.name == "topk" else self.number
        return self.spec.summary.format(f"{float(shown):g}")


def topk_count(num_elements: int, ratio: Fraction) -> int:
    """Return how many of a parameter's numbers ``topk`` sends: ``ceil(ratio n)``."""
    return math.ceil(num_elements * ratio)


def powersgd_rank(shape: tuple[int, ...], max_rank: int) -> int:
    """Return the rank with which ``powersgd`` approximates a parameter; 0 where it sends the parameter as it is.

    A parameter is a matrix of its first dim by all others. One with fewer dims, or that the factors would not make
    smaller, is sent as it is.
    """
    if len(shape) < 2 or math.prod(shape) == 0:
        return 0
    rows, columns = shape[0], math.prod(shape[1:])
    rank = min(max_rank, rows, columns)
    return rank if rank * (rows + columns) < rows * columns else 0


def _half_precision_bytes(shape: tuple[int, ...], item_bytes: int, number: Fraction) -> int:
    return 2 * math.prod(shape)


def _chunked_bytes(num_bits: int) -> EncodedSize:
    def size(shape: tuple[int, ...], item_bytes: int, number: Fraction) -> int:
        count = math.prod(shape)
        return -(-count * num_bits // 8) + -(-count // CHUNK_ELEMENTS) * item_bytes

    return size


def _two_bit_bytes(shape: tuple[int, ...], item_bytes: int, number: Fraction) -> int:
    return -(-math.prod(shape) // 4)


def _topk_bytes(shape: tuple[int, ...], item_bytes: int, number: Fraction) -> int:
    return topk_count(math.prod(shape), number) * (INDEX_BYTES + item_bytes)


def _powersgd_bytes(shape: tuple[int, ...], item_bytes: int, number: Fraction) -> int:
    rank = powersgd_rank(shape, int(number))
    sent = rank * (shape[0] + math.prod(shape[1:])) if rank else math.prod(shape)
    return sent * item_bytes


def _uncompressed_bytes(shape: tuple[int, ...], item_bytes: int, number: Fraction) -> int:
    return math.prod(shape) * item_bytes


CODECS: dict[str, CodecSpec] = {
    "fp16": CodecSpec("every number as a float of 16 bits, 5 of them its exponent", "reduce", _half_precision_bytes),
    "bf16": CodecSpec("every number as a float of 16 bits, 8 of them its exponent", "reduce", _half_precision_bytes),
    "int8": CodecSpec(f"every number as one of 255 steps between the largest and its opposite of {CHUNK_ELEMENTS}, to the nearest",
                 "gather", _chunked_bytes(8)),
    "twobit": CodecSpec("for every number one of -{0}, 0 and {0}", "gather", _two_bit_bytes, ("threshold", Fraction(1, 2))),
    "sign": CodecSpec(f"for every number its sign, for {CHUNK_ELEMENTS} of them their mean magnitude", "gather", _chunked_bytes(1)),
    "topk": CodecSpec("the largest {}% of each parameter, with their places", "gather", _topk_bytes,
                 ("part", Fraction(1, 100))),
    "powersgd": CodecSpec("two thin factors of rank {} for each matrix, all else as it is", "reduce twice", _powersgd_bytes,
                     ("rank", Fraction(1)), works_point_to_point=False),
    "adasum": CodecSpec("every number as it is; what is parallel is averaged, what is orthogonal is added", "gather", _uncompressed_bytes,
                   has_error_feedback=False, works_point_to_point=False),
}  # fmt: skip
"""All codes by name."""


@cache
def find_codec(text: str) -> Codec:
    """Return the code that a text such as ``topk:0.01`` names.

    Raises:
        ProgramError: there is none of that name, or its number makes no sense.
    """
    name, colon, written = text.partition(":")
    kind = CODECS.get(name)
    if kind is not None and kind.number is not None and colon and not re.fullmatch(r"\d+(\.\d+)?", written):
        usual = f"{name}:{float(kind.number[1]):g}"
        raise ProgramError(f"the {kind.number[0]} of {text!r} is no positive number in digits; write {usual}, for one")
    if kind is None or not re.fullmatch(CODEC_PATTERN, text):
        raise ProgramError(
            f"there is no code {text!r}; the codes are {', '.join(CODECS)}, written as int8 or topk:0.01"
        )
    if kind.number is None:
        if colon:
            raise ProgramError(f"the code {name} takes no number, so {text!r} is none; write {name}")
        return Codec(name, Fraction(0), kind)
    meaning, default = kind.number
    number = Fraction(written) if colon else default
    if number <= 0 or (meaning == "part" and number > 1) or (meaning == "rank" and number.denominator > 1):
        allowed = {"part": "between 0 and 1", "rank": "a whole number from 1"}.get(meaning, "above 0")
        raise ProgramError(f"the {meaning} of {text!r} is {written}, but must be {allowed}")
    return Codec(name, number, kind)


@cache
def ring_volume_factor(codec: str, num_members: int) -> Fraction:
    """Return how many times its encoded value a member of a sum sends, on a ring; ``""`` is a sum as it is.

    Returns:
        ``2 (n-1)/n`` where encoded values can be added up, ``n-1`` where every member needs what each one sends.
    """
    if codec and find_codec(codec).spec.reduction == "gather":
        return Fraction(num_members - 1)
    return Fraction(2 * (num_members - 1), num_members)
