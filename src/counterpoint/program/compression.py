"""Compression codecs for gradients and weights: their names, parameters and encoded sizes.

A codec is described by pure data here; ``counterpoint.fabric.compression`` applies it to tensors. Every parameter of
a unit is encoded separately, so that the encoded size follows from its shape. Shards that are encoded end after whole
chunks of a parameter, so that those of all ranks together have the size of the whole.
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
"""Number of consecutive elements of a parameter that share one scale; the last chunk of a parameter may be shorter."""

INDEX_BYTES = 4
_NUMBER = r"[0-9]{1,18}(?:\.[0-9]{1,40})?"
CODEC_PATTERN = rf"[a-z][a-z0-9]*(?::{_NUMBER})?"
"""Regular expression for the text of a codec, such as ``int8`` or ``topk:0.01``."""

ReductionMethod: TypeAlias = Literal["reduce", "reduce twice", "gather"]
EncodedSize: TypeAlias = Callable[[tuple[int, ...], int, Fraction], int]
"""Function of a parameter's shape, its bytes per element and the codec's number that returns the encoded bytes."""


@dataclass(frozen=True, slots=True)
class CodecSpec:
    """Specification of the codecs of one name.

    Args:
        summary: what is sent, in one line; ``{}`` is replaced by the number.
        reduction: ``reduce`` sends encoded parts and encoded sums of them, ``reduce twice`` in two rounds, ``gather``
            sends the encoded values of each member to all others, which decode and add them in the order of the group.
        encoded_size: encoded bytes of one parameter, as one member sends it to one other.
        number: name and default of the codec's number; None if it has none.
        has_error_feedback: whether the part of a gradient that is not sent is added to the next gradient.
        works_point_to_point: whether the encoded gradient of one member can be decoded alone, so that it can be sent to
            a peer.
        works_on_shards: whether chunks of a parameter are encoded independently, each element to within a known
            fraction of its chunk's scale, so that shards can be gathered and reduce-scattered without error feedback.
    """

    summary: str
    reduction: ReductionMethod
    encoded_size: EncodedSize
    number: tuple[str, Fraction] | None = None
    has_error_feedback: bool = True
    works_point_to_point: bool = True
    works_on_shards: bool = False


@dataclass(frozen=True, slots=True)
class Codec:
    """A codec with its number."""

    name: str
    number: Fraction
    spec: CodecSpec

    def encoded_bytes(self, shape: tuple[int, ...], item_bytes: int) -> int:
        """Return the encoded size of a parameter."""
        return self.spec.encoded_size(shape, item_bytes, self.number)

    @property
    def summary(self) -> str:
        """What is sent, in one line."""
        number = 100 * self.number if self.name == "topk" else self.number
        return self.spec.summary.format(f"{float(number):g}")


def topk_count(num_elements: int, ratio: Fraction) -> int:
    """Return how many elements of a parameter ``topk`` sends: ``ceil(ratio n)``."""
    return math.ceil(num_elements * ratio)


def powersgd_rank(shape: tuple[int, ...], max_rank: int) -> int:
    """Return the rank with which ``powersgd`` approximates a parameter; 0 if it sends the parameter uncompressed.

    A parameter is seen as a matrix of its first dim by all others. Parameters with fewer than two dims, and those that
    factors would not make smaller, are sent uncompressed.
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
    "fp16": CodecSpec("every element as a float of 16 bits, 5 of them its exponent", "reduce", _half_precision_bytes),
    "bf16": CodecSpec("every element as a float of 16 bits, 8 of them its exponent", "reduce", _half_precision_bytes),
    "int8": CodecSpec(
        "every element rounded to one of 255 steps between the largest magnitude of "
        f"{CHUNK_ELEMENTS} elements and its negative",
        "gather",
        _chunked_bytes(8),
        works_on_shards=True,
    ),
    "int4": CodecSpec(
        "every element rounded to one of 15 steps between the largest magnitude of "
        f"{CHUNK_ELEMENTS} elements and its negative",
        "gather",
        _chunked_bytes(4),
        works_on_shards=True,
    ),
    "twobit": CodecSpec("-{0}, 0 or {0} for every element", "gather", _two_bit_bytes, ("threshold", Fraction(1, 2))),
    "sign": CodecSpec(
        f"the sign of every element, and the mean magnitude of each {CHUNK_ELEMENTS}", "gather", _chunked_bytes(1)
    ),
    "onebit": CodecSpec(
        f"of the momentum of 1-bit Adam the sign of every element, and the root mean square of each {CHUNK_ELEMENTS}",
        "reduce",
        _chunked_bytes(1),
        works_point_to_point=False,
    ),
    "topk": CodecSpec(
        "the largest {}% of each parameter's elements, with their indices",
        "gather",
        _topk_bytes,
        ("fraction", Fraction(1, 100)),
    ),
    "powersgd": CodecSpec(
        "two factors of rank {} for each matrix, all else uncompressed",
        "reduce twice",
        _powersgd_bytes,
        ("rank", Fraction(1)),
        works_point_to_point=False,
    ),
    "adasum": CodecSpec(
        "every element uncompressed; parallel gradients are averaged, orthogonal ones added",
        "gather",
        _uncompressed_bytes,
        has_error_feedback=False,
        works_point_to_point=False,
    ),
}
"""All codecs by name."""


@cache
def find_codec(text: str) -> Codec:
    """Return the codec with a text such as ``topk:0.01``.

    Raises:
        ProgramError: there is no codec of that name, or its number is out of range.
    """
    name, colon, written = text.partition(":")
    spec = CODECS.get(name)
    if spec is not None and spec.number is not None and colon and not re.fullmatch(_NUMBER, written):
        usual = f"{name}:{float(spec.number[1]):g}"
        raise ProgramError(
            f"the {spec.number[0]} of {text!r} must be a positive number in digits; write {usual}, for example"
        )
    if spec is None or not re.fullmatch(CODEC_PATTERN, text):
        raise ProgramError(
            f"there is no codec {text!r}; the codecs are {', '.join(CODECS)}, written as int8 or topk:0.01"
        )
    if spec.number is None:
        if colon:
            raise ProgramError(f"the codec {name} takes no number, but {text!r} has one; write {name}")
        return Codec(name, Fraction(0), spec)
    meaning, default = spec.number
    number = Fraction(written) if colon else default
    if number <= 0 or (meaning == "fraction" and number > 1) or (meaning == "rank" and number.denominator > 1):
        allowed = {"fraction": "between 0 and 1", "rank": "a whole number from 1"}.get(meaning, "above 0")
        raise ProgramError(f"the {meaning} of {text!r} is {written}, but must be {allowed}")
    return Codec(name, number, spec)


SHARD_CODECS: tuple[str, ...] = tuple(name for name, spec in CODECS.items() if spec.works_on_shards)
"""Codecs of gathered weights and of reduce-scattered gradients."""


def exchanges_momentum(codec: str) -> bool:
    """Return whether a codec sums the momenta of 1-bit Adam, which ranks have parts of, in place of gradients."""
    return bool(codec) and find_codec(codec).name == "onebit"


def encodes_shards(op: str, codec: str) -> bool:
    """Return whether a collective encodes shards, so that no rank keeps what its codec drops.

    Example:
        >>> encodes_shards("reduce_scatter", "int8"), encodes_shards("all_reduce", "int8")
        (True, False)
    """
    return bool(codec) and op in {"reduce_scatter", "all_gather"}


@cache
def why_not_encoded(op: str, tensor_name: str, codec: str) -> str:
    """Return why a collective cannot have a codec; empty if it can.

    Raises:
        ProgramError: there is no such codec.
    """
    name, spec = find_codec(codec).name, find_codec(codec).spec
    if (op, tensor_name) == ("all_reduce", "grad"):
        return ""
    if (op, tensor_name) not in {("reduce_scatter", "grad"), ("all_gather", "weight")}:
        return "only sums of gradients and gathers of weights can be compressed"
    if not spec.works_on_shards:
        return f"{name} is for all-reduces; gathers and reduce-scatters have {' or '.join(SHARD_CODECS)}"
    return ""


@cache
def ring_volume_factor(codec: str, num_members: int) -> Fraction:
    """Return how many times its encoded value a member of a ring all-reduce sends; ``""`` means no compression.

    Returns:
        ``2 (n-1)/n`` if encoded values can be added, ``n-1`` if every member needs the encoded values of all others.
    """
    if codec and find_codec(codec).spec.reduction == "gather":
        return Fraction(num_members - 1)
    return Fraction(2 * (num_members - 1), num_members)
