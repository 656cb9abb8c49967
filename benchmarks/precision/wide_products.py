"""Matrix products of bf16 and fp16 tensors on a CPU, computed in float32 and rounded once.

That is what processors do that multiply these dtypes: they add up products in float32. On other CPUs the kernels of
torch take 10 to 100 times as long as those of float32, so that no training would end. The operators are replaced for
this process, whoever calls them, so that all contenders of a benchmark have the same products.
"""

import warnings
from functools import partial
from time import perf_counter

import torch
from torch.library import Library

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
SLOW_FACTOR = 4  # times as long as in float32


def in_float32(operator, dtypes, *args, **options):
    """Return what ``torch.<operator>`` returns, computed in float32 if its last tensor has one of some dtypes."""
    dtype = next(value.dtype for value in reversed(args) if isinstance(value, torch.Tensor))
    if dtype in dtypes:
        args = [value.float() if isinstance(value, torch.Tensor) else value for value in args]
    out = torch.empty(0, dtype=torch.float32 if dtype in dtypes else dtype)
    # with out= it is another operator, whose kernel is not replaced
    return getattr(torch, operator)(*args, out=out, **options).to(dtype)


def find_slow_dtypes():
    """Return which of bf16 and fp16 this machine multiplies much more slowly than float32."""

    def seconds(dtype):
        one, times = torch.ones(256, 256, dtype=dtype), []
        for _ in range(5):
            began = perf_counter()
            one @ one
            times.append(perf_counter() - began)
        return min(times)

    return {dtype for dtype in (torch.bfloat16, torch.float16) if seconds(dtype) > SLOW_FACTOR * seconds(torch.float32)}


def replace_products(dtypes):
    """Replace the products of some dtypes in this process; return the library that keeps them replaced."""
    library = Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that a kernel is replaced
        for operator in PRODUCTS if dtypes else ():
            library.impl(operator, partial(in_float32, operator, dtypes), "CPU")
    return library
