"""The native part of the fabric, if it has been built: a plain C library, called through ctypes.

Calls that wait return after a slice of time, so that Python can serve signals in between.
"""

from __future__ import annotations

import ctypes
from ctypes import CDLL, POINTER, Structure, c_char_p, c_double, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path

import torch

LAYOUT_VERSION = 4
SIGNATURE_BYTES = 256
REASON_BYTES = 1024
SLICE_NS = 100_000_000  # the longest that a call waits
LIBRARY = Path(__file__).with_name("_native.so")

DTYPES = {
    torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3, torch.int64: 4, torch.int32: 5,
}  # fmt: skip
BYTES = 6
REDUCTIONS = {"sum": 0, "mean": 0, "max": 1, "min": 2}


class CollectiveKind(IntEnum):
    """A collective's number in the library."""

    ALL_REDUCE = 0
    REDUCE_SCATTER = 1
    ALL_GATHER = 2
    BROADCAST = 3
    ALL_TO_ALL = 4
    BARRIER = 5


class NativeStatus(IntEnum):
    """What a call says instead of a result."""

    DONE = 0
    NOT_YET = -1
    STOPPED = -2
    LOST = -3
    DISAGREE = -4
    BROKEN = -5
    COMPLETE = -6


class CollectiveRequest(Structure):
    """A collective as the library is asked for it; ``native/collectives.h`` says what each field is."""

    _fields_ = (
        ("group", c_void_p),
        ("kind", c_uint32),
        ("dtype", c_uint32),
        ("verb", c_uint32),
        ("root", c_int32),
        ("scale", c_double),
        ("data", c_void_p),
        ("out", c_void_p),
        ("count", c_uint64),
        ("bounds", POINTER(c_uint64)),
        ("out_bounds", POINTER(c_uint64)),
        ("longest", c_uint64),
        ("segment", c_int32),
        ("reading_bytes", c_uint32),
        ("offset", c_uint64),
        ("fingerprint", c_char_p),
        ("reading", c_char_p),
    )


class OptimizerStep(Structure):
    """One step of an optimizer on one tensor; ``native/update.h`` says what each field is."""

    _fields_ = (
        ("kind", c_int32),
        ("dtype", c_uint32),
        ("num_parts", c_int32),
        ("is_first", c_int32),
        ("nesterov", c_int32),
        ("decoupled", c_int32),
        ("maximize", c_int32),
        ("unused", c_int32),
        ("parts", POINTER(c_void_p)),
        ("weights", c_void_p),
        ("state0", c_void_p),
        ("state1", c_void_p),
        ("state2", c_void_p),
        ("count", c_uint64),
        ("lr", c_double),
        ("weight_decay", c_double),
        ("beta1", c_double),
        ("beta2", c_double),
        ("eps", c_double),
        ("turn", c_double),
    )


class SparseRowsPart(Structure):
    """What one replica adds to rows of a table; ``native/rows.h`` says what each field is."""

    _fields_ = (
        ("rows", c_void_p),
        ("at", c_void_p),
        ("values", c_void_p),
        ("count", c_uint64),
        ("each", c_uint64),
    )


class EmbeddingBagArgs(Structure):
    """Sums of values that are added to rows of a table; ``native/bags.h`` says what each field is."""

    _fields_ = (
        ("dtype", c_uint32),
        ("unused", c_uint32),
        ("part", c_void_p),
        ("places", c_void_p),
        ("members", c_void_p),
        ("starts", c_void_p),
        ("num_members", c_uint64),
        ("num_lists", c_uint64),
        ("width", c_uint64),
        ("values", c_void_p),
        ("factor", c_double),
    )


class LinearArgs(Structure):
    """A linear layer's call as the library is asked for it; ``native/linear.h`` says what each field is."""

    _fields_ = (
        ("x", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("y", c_void_p),
        ("rows", c_uint64),
        ("inputs", c_uint64),
        ("outputs", c_uint64),
    )


class CrossEntropyArgs(Structure):
    """Rows of scores and their classes; ``native/entropy.h`` says what each field is."""

    _fields_ = (
        ("scores", c_void_p),
        ("targets", c_void_p),
        ("sums", c_void_p),
        ("gradient", c_void_p),
        ("rows", c_uint64),
        ("classes", c_uint64),
        ("ignored", c_int64),
        ("factor", c_double),
    )


class LossSum(Structure):
    """What all rows of scores lose together, and how many of them count."""

    _fields_ = (("sum", c_double), ("count", c_uint64))


class SparseRowsArgs(Structure):
    """Rows of a table and what is added to them; ``native/rows.h`` says what each field is."""

    _fields_ = (
        ("dtype", c_uint32),
        ("num_parts", c_int32),
        ("is_clearing", c_int32),
        ("unused", c_int32),
        ("parts", POINTER(SparseRowsPart)),
        ("into", c_void_p),
        ("width", c_uint64),
        ("low", c_uint64),
        ("high", c_uint64),
        ("factor", c_double),
    )


SIGNATURES: dict[str, tuple[object, tuple[object, ...] | None]] = {
    "cp_layout_version": (c_uint32, ()),
    "cp_instruction_set": (c_char_p, ()),
    "cp_world_bytes": (c_uint64, (c_uint32,)),
    "cp_group_bytes": (c_uint64, (c_uint32, c_uint64)),
    "cp_format_world": (None, (c_void_p, c_uint32, c_char_p)),
    "cp_format_group": (None, (c_void_p, c_uint32, c_uint64)),
    "cp_is_world": (c_int32, (c_void_p, c_uint32, c_char_p)),
    "cp_open_world": (c_void_p, (c_void_p, c_int32, c_int32, c_int32, POINTER(c_int32), c_int32, c_int64)),
    "cp_close_world": (None, (c_void_p,)),
    "cp_lost": (c_int32, (c_void_p,)),
    "cp_has_left": (c_int32, (c_void_p, c_int32)),
    "cp_stop": (None, (c_void_p, c_char_p, c_uint64)),
    "cp_stopped": (c_int32, (c_void_p, c_char_p, c_uint64)),
    "cp_register_segment": (c_int64, (c_void_p, c_int32, c_uint64, c_uint64)),
    "cp_await_segment": (c_int64, (c_void_p, c_int32, c_uint64)),
    "cp_map_segment": (c_void_p, (c_void_p, c_int32, c_int32)),
    "cp_await_members": (c_int64, (c_void_p, c_void_p)),
    "cp_open_group": (c_void_p, (c_void_p, c_void_p, POINTER(c_int32), c_int32)),
    "cp_close_group": (None, (c_void_p,)),
    "cp_start": (c_int64, None),  # always of a byref, which costs least where no types are given
    "cp_wait": (c_int64, (c_void_p, c_int64)),
    "cp_pause": (c_int64, (c_void_p, c_int64, c_int64)),
    "cp_num_done": (c_int64, (c_void_p,)),
    "cp_status": (c_int64, (c_void_p,)),
    "cp_advance": (c_int32, (c_void_p,)),
    "cp_notice": (c_int64, (c_void_p, c_int32, c_int64, c_char_p, c_char_p)),
    "cp_send": (c_int64, (c_void_p, c_int32, c_void_p, c_uint64, c_int32)),
    "cp_recv": (c_int64, (c_void_p, c_int32, c_void_p, c_uint64, c_int64)),
    "cp_await_any": (c_int64, (c_void_p, POINTER(c_int32), c_int32, c_int64)),
    "cp_reduce": (
        None,
        (POINTER(c_void_p), c_int32, POINTER(c_void_p), c_int32, c_uint64, c_uint32, c_uint32, c_double),
    ),
    "cp_update": (None, (POINTER(OptimizerStep),)),
    "cp_linear": (c_int32, (POINTER(LinearArgs),)),
    "cp_entropy": (c_int32, (POINTER(CrossEntropyArgs), POINTER(LossSum))),
    "cp_entropy_gradient": (None, (POINTER(CrossEntropyArgs),)),
    "cp_add_rows": (None, (POINTER(SparseRowsArgs),)),
    "cp_add_sums": (None, (POINTER(EmbeddingBagArgs),)),
    "cp_distinct": (c_int64, (c_void_p, c_uint64, c_void_p, c_void_p)),
}


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The library, or why there is none.

    Args:
        library: with its functions' types; None where it cannot be used.
        reason: why not; empty where it can.
    """

    library: CDLL | None
    reason: str

    @property
    def instruction_set(self) -> str:
        """Which vectors it computes with: ``avx512``, ``avx2`` or ``portable``."""
        return str(self.library.cp_instruction_set().decode()) if self.library is not None else "none"


@cache
def native() -> NativeLibrary:
    """Return the library, loaded once."""
    if not LIBRARY.exists():
        return NativeLibrary(None, "it was not built: the package was installed without a C++ compiler")
    try:
        library = ctypes.CDLL(str(LIBRARY))
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        return NativeLibrary(None, f"{LIBRARY.name} cannot be loaded: {error}")
    version = library.cp_layout_version()
    if version != LAYOUT_VERSION:
        return NativeLibrary(
            None, f"{LIBRARY.name} was built from other sources (layout {version}, not {LAYOUT_VERSION})"
        )
    return NativeLibrary(library, "")
