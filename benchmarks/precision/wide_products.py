"""Matrix products of bf16 and fp16 tensors on a CPU, computed in float32 and rounded once.

That is what processors do that multiply these dtypes: they add up products in float32. On other CPUs the kernels of
torch take 10 to 100 times as long as those of float32, so that no training would end. The operators are replaced for
this process, whoever calls them, so that all contenders of a benchmark have the same products.
"""

import warnings
from functools import partial

import torch
from torch.library import Library

NARROW = {torch.bfloat16, torch.float16}
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
ATTENTION = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward")


def in_float32(operator, *args, **options):
    """Return what ``torch.<operator>`` returns, computed in float32, in the dtype of its last tensor."""
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    dtype = tensors[-1].dtype
    widened = [value.float() if isinstance(value, torch.Tensor) and value.dtype in NARROW else value for value in args]
    out = torch.empty(0, dtype=torch.float32 if dtype in NARROW else dtype)
    # with out= it is another operator, whose kernel is not replaced
    return getattr(torch, operator)(*widened, out=out, **options).to(dtype)


def is_slow():
    """Tell whether products of bf16 take more than four times as long as those of float32 on this machine."""
    from time import perf_counter

    def seconds(dtype):
        one, times = torch.ones(256, 256, dtype=dtype), []
        for _ in range(5):
            began = perf_counter()
            one @ one
            times.append(perf_counter() - began)
        return min(times)

    return seconds(torch.bfloat16) > 4 * seconds(torch.float32)


def replace_products():
    """Replace the products of bf16 and fp16 in this process; return the library that keeps them replaced."""
    library = Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that a kernel is replaced
        for operator in PRODUCTS:
            library.impl(operator, partial(in_float32, operator), "CPU")
    return library
