"""Bindings of the native library, a plain C library called through ctypes; absent if it was not built.

Its functions that wait return after a slice of time, so that Python can serve signals in between. Each ``Structure``
mirrors the C++ struct of its name.
"""

from __future__ import annotations

import ctypes
from ctypes import CDLL, POINTER, Structure, c_char_p, c_double, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path

import torch

LAYOUT_VERSION = 5
SIGNATURE_BYTES = 256
REASON_BYTES = 1024
SLICE_NS = 100_000_000  # default duration of a wait
LIBRARY = Path(__file__).with_name("_native.so")

DTYPES = {
    torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3, torch.int64: 4, torch.int32: 5,
}  # fmt: skip
BYTES = 6
REDUCTIONS = {"sum": 0, "mean": 0, "max": 1, "min": 2}


class CollectiveKind(IntEnum):
    """Number of a collective in the library."""

    ALL_REDUCE = 0
    REDUCE_SCATTER = 1
    ALL_GATHER = 2
    BROADCAST = 3
    ALL_TO_ALL = 4
    BARRIER = 5


class NativeStatus(IntEnum):
    """Status that a function returns instead of a result."""

    DONE = 0
    NOT_YET = -1
    STOPPED = -2
    LOST = -3
    DISAGREE = -4
    BROKEN = -5
    COMPLETE = -6


class CollectiveRequest(Structure):
    """A collective to start; the fields are documented in ``native/collectives.h``."""

    _fields_ = (
        ("group", c_void_p),
        ("kind", c_uint32),
        ("dtype", c_uint32),
        ("op", c_uint32),
        ("root", c_int32),
        ("scale", c_double),
        ("data", c_void_p),
        ("out", c_void_p),
        ("count", c_uint64),
        ("bounds", POINTER(c_uint64)),
        ("out_bounds", POINTER(c_uint64)),
        ("max_range", c_uint64),
        ("segment", c_int32),
        ("description_bytes", c_uint32),
        ("offset", c_uint64),
        ("fingerprint", c_char_p),
        ("description", c_char_p),
    )


class OptimizerStep(Structure):
    """One optimizer step on many tensors; the fields are documented in ``native/optimizers.h``."""

    _fields_ = (
        ("kind", c_int32),
        ("dtype", c_uint32),
        ("is_first", c_int32),
        ("nesterov", c_int32),
        ("decoupled", c_int32),
        ("maximize", c_int32),
        ("max_threads", c_int32),
        ("unused", c_int32),
        ("num_tensors", c_uint64),
        ("counts", POINTER(c_uint64)),
        ("num_parts", POINTER(c_uint64)),
        ("parts", POINTER(c_void_p)),
        ("weights", POINTER(c_void_p)),
        ("state0", POINTER(c_void_p)),
        ("state1", POINTER(c_void_p)),
        ("state2", POINTER(c_void_p)),
        ("lr", c_double),
        ("weight_decay", c_double),
        ("beta1", c_double),
        ("beta2", c_double),
        ("eps", c_double),
        ("step_number", c_double),
    )


class SparseRowsPart(Structure):
    """The rows of one replica's sparse gradient; the fields are documented in ``native/sparse_rows.h``."""

    _fields_ = (
        ("rows", c_void_p),
        ("at", c_void_p),
        ("values", c_void_p),
        ("count", c_uint64),
        ("each", c_uint64),
    )


class EmbeddingBagArgs(Structure):
    """Sums of values to add to rows of a table; the fields are documented in ``native/embedding_bag.h``."""

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
    """Arguments of a linear layer; the fields are documented in ``native/linear.h``."""

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
    """Arguments of a cross entropy loss; the fields are documented in ``native/cross_entropy.h``."""

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
    """Total loss, and the number of rows that are not ignored."""

    _fields_ = (("sum", c_double), ("count", c_uint64))


class PhiloxArgs(Structure):
    """Random numbers to write; the fields are documented in ``native/philox.h``."""

    _fields_ = (
        ("out", c_void_p),
        ("element_bytes", c_uint64),
        ("samples", c_uint64),
        ("width", c_uint64),
        ("first_sample", c_uint64),
        ("key", c_uint64),
        ("bound", c_uint64),
        ("value", c_uint64),
        ("max_threads", c_uint64),
    )


class SparseRowsArgs(Structure):
    """Rows to add to a table; the fields are documented in ``native/sparse_rows.h``."""

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
    "cp_host_bytes": (c_uint64, (c_uint32,)),
    "cp_group_bytes": (c_uint64, (c_uint32, c_uint64)),
    "cp_format_host": (None, (c_void_p, c_uint32, c_char_p)),
    "cp_format_group": (None, (c_void_p, c_uint32, c_uint64)),
    "cp_is_host": (c_int32, (c_void_p, c_uint32, c_char_p)),
    "cp_open_host": (c_void_p, (c_void_p, c_int32, c_int32, c_int32, POINTER(c_int32), c_int32, c_int64)),
    "cp_close_host": (None, (c_void_p,)),
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
    "cp_start": (c_int64, None),  # called with a byref; without argument types the call is faster
    "cp_wait": (c_int64, (c_void_p, c_int64)),
    "cp_wait_for": (c_int64, (c_void_p, c_int64, c_int64)),
    "cp_num_done": (c_int64, (c_void_p,)),
    "cp_status": (c_int64, (c_void_p,)),
    "cp_advance": (c_int32, (c_void_p,)),
    "cp_announcement": (c_int64, (c_void_p, c_int32, c_int64, c_char_p, c_char_p)),
    "cp_send": (c_int64, (c_void_p, c_int32, c_void_p, c_uint64, c_int32)),
    "cp_recv": (c_int64, (c_void_p, c_int32, c_void_p, c_uint64, c_int64)),
    "cp_await_any": (c_int64, (c_void_p, POINTER(c_int32), c_int32, c_int64)),
    "cp_reduce": (
        None,
        (POINTER(c_void_p), c_int32, POINTER(c_void_p), c_int32, c_uint64, c_uint32, c_uint32, c_double),
    ),
    "cp_optimizer_step": (None, (POINTER(OptimizerStep),)),
    "cp_read_addresses": (c_uint64, None),  # called by :class:`AddressReader`, with Python's lock held
    "cp_copy_tensors": (None, None),  # without argument types the call is faster
    "cp_find_magnitudes": (c_double, None),  # as above
    "cp_find_edge_magnitudes": (None, None),
    "cp_linear": (c_int32, (POINTER(LinearArgs),)),
    "cp_cross_entropy": (c_int32, (POINTER(CrossEntropyArgs), POINTER(LossSum))),
    "cp_cross_entropy_backward": (None, (POINTER(CrossEntropyArgs),)),
    "cp_philox_fill": (None, (POINTER(PhiloxArgs),)),
    "cp_add_rows": (None, (POINTER(SparseRowsArgs),)),
    "cp_add_embedding_bags": (None, (POINTER(EmbeddingBagArgs),)),
    "cp_unique": (c_int64, (c_void_p, c_uint64, c_void_p, c_void_p)),
}


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The library, or why it is unavailable.

    Args:
        library: with argument and result types set; None if unavailable.
        reason: why; empty if available.
    """

    library: CDLL | None
    reason: str

    @property
    def instruction_set(self) -> str:
        """The vector instructions that it uses: ``avx512``, ``avx2``, ``portable``, or ``none`` without the library."""
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
