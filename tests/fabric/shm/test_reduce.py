"""The native kernels reduce exactly as torch does."""

import ctypes
import math
from collections.abc import Callable

import pytest
import torch

from counterpoint.fabric.shm.native import DTYPES, REDUCTIONS, native

pytestmark = pytest.mark.skipif(native().library is None, reason=f"no native part: {native().reason}")
LENGTHS = [0, 1, 7, 8, 63, 1024, 1025, 5000]
REFERENCE: dict[str, Callable[..., torch.Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def reduced(tensors, verb="sum", scale=1.0):
    """Every tensor is an in and an out, as where all ranks share memory."""
    places = (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
    count, dtype = tensors[0].numel(), DTYPES[tensors[0].dtype]
    library = native().library
    assert library is not None
    library.cp_reduce(places, len(tensors), places, len(tensors), count, dtype, REDUCTIONS[verb], scale)
    return tensors


def numbers(dtype, length, num):
    generator = torch.Generator().manual_seed(length)
    return [(torch.randn(length, generator=generator) * 1000).to(dtype) for _ in range(num)]


def wide(dtype):
    return torch.float32 if dtype in {torch.bfloat16, torch.float16} else dtype


@pytest.mark.parametrize("verb", REFERENCE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_lengths_and_dtypes_agree_with_torch_in_order(dtype, verb):
    for length in LENGTHS:
        tensors = numbers(dtype, length, 3)
        expected = tensors[0].to(wide(dtype))
        for tensor in tensors[1:]:
            expected = REFERENCE[verb](expected, tensor.to(wide(dtype)))
        for tensor in reduced(tensors, verb):
            assert torch.equal(tensor, expected.to(dtype))


def test_the_mean_is_scaled_before_it_is_rounded():
    tensors = [torch.full((3,), 40000.0, dtype=torch.float16) for _ in range(2)]  # their sum is not a float16
    assert reduced(tensors, scale=0.5)[0].tolist() == [40000.0] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_what_is_not_finite_stays_so(dtype):
    values = torch.tensor([math.nan, math.inf, -math.inf, math.inf, 1.0], dtype=dtype)
    others = torch.tensor([1.0, 1.0, 1.0, -math.inf, math.nan], dtype=dtype)
    for verb, reference in REFERENCE.items():
        result = reduced([values.clone(), others.clone()], verb)[0]
        assert torch.equal(result.isnan(), reference(values, others).isnan())
        assert torch.equal(result.nan_to_num(), reference(values, others).nan_to_num())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_number_survives_and_is_rounded_as_torch_does(dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    zeros = torch.full_like(every, -0.0)  # adding it changes nothing, not even the sign of zero
    result = reduced([every.clone(), zeros.clone()])[0]
    assert torch.equal(result.nan_to_num(), every.nan_to_num())
    thirds = reduced([every.clone(), zeros.clone()], scale=1 / 3)[0]
    assert torch.equal(thirds.nan_to_num(), (every.float() * torch.tensor(1 / 3)).to(dtype).nan_to_num())
