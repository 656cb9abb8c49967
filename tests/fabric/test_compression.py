"""Compression codecs on tensors: error feedback is exact, and the sizes are those of the formula."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings, strategies as st

from counterpoint.fabric.compression import CAST_DTYPES, cast_clamped, compress, decompress, orthonormalize
from counterpoint.program.compression import find_codec

GATHERED = ["int8", "int4", "sign", "twobit:0.5", "topk:0.3"]
DTYPES = [torch.float64, torch.float32]
numbers = st.floats(-1e6, 1e6) | st.floats(-1e-6, 1e-6) | st.sampled_from([0.0, 0.5, -0.5, 1.0, 3.0])
vectors = st.lists(numbers, min_size=1, max_size=40)
PROPERTY = settings(max_examples=60)


def sent(code, total):
    """What a rank's own gradient has become for all members."""
    if code in CAST_DTYPES:
        return cast_clamped(total, CAST_DTYPES[code], 2).to(total.dtype)
    result = find_codec(code)
    return decompress(result, compress(result, total), total)


def exact(tensor):
    return [Fraction(number) for number in tensor.tolist()]


@PROPERTY
@given(vectors, st.sampled_from(["fp16", "bf16", "int8", "int4", "twobit:0.5", "topk:0.3"]), st.sampled_from(DTYPES))
def test_what_was_sent_and_what_stays_are_what_there_was_bit_for_bit(values, code, dtype):
    total = torch.tensor(values, dtype=dtype)
    own = sent(code, total)
    residual = total - own
    assert [a + b for a, b in zip(exact(own), exact(residual), strict=True)] == exact(total)


@PROPERTY
@given(vectors, st.sampled_from(["sign", "twobit:0.3"]))
def test_where_the_difference_is_rounded_it_is_rounded_once(values, code):
    total = torch.tensor(values, dtype=torch.float64)
    own = sent(code, total)
    residual = total - own
    for before, a, b in zip(exact(total), exact(own), exact(residual), strict=True):
        assert abs(before - a - b) <= Fraction(math.ulp(float(b))) / 2


@PROPERTY
@given(st.lists(vectors.filter(lambda result: len(result) > 2), min_size=1, max_size=6), st.sampled_from(GATHERED))
def test_over_many_steps_all_is_sent_or_still_there(steps, code):
    length = min(map(len, steps))
    residual, all_sent = torch.zeros(length, dtype=torch.float64), torch.zeros(length, dtype=torch.float64)
    gradients = [torch.tensor(step[:length], dtype=torch.float64) for step in steps]
    for gradient in gradients:
        total = gradient + residual
        own = sent(code, total)
        residual, all_sent = total - own, all_sent + own
    scale = sum(gradient.abs().max() for gradient in gradients) + residual.abs().max() + 1
    assert torch.allclose(all_sent + residual, torch.stack(gradients).sum(0), rtol=0, atol=float(scale) * 1e-14)


@pytest.mark.parametrize("code", [*GATHERED, "adasum"])
@pytest.mark.parametrize("count", [1, 7, 8, 9, 1023, 1024, 1025, 3000])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
def test_the_bytes_are_those_of_the_formula(code, count, dtype):
    result, values = find_codec(code), torch.linspace(-1, 1, count).to(dtype)
    written = compress(result, values)
    assert written.numel() == result.encoded_bytes((count,), dtype.itemsize)
    back = decompress(result, written, values)
    assert (back.dtype, len(back)) == (dtype, count)


@pytest.mark.parametrize("code", [*GATHERED, *CAST_DTYPES])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_is_none_for_its_readers_either(code, bad):
    assert not sent(code, torch.tensor([1.0, bad, 2.0, 0.0])).isfinite().all()


def test_every_code_says_what_it_says_it_does():
    values = torch.tensor([127.0, -1.4, 0.4, -0.6])
    assert sent("int8", values).tolist() == [127.0, -1.0, 0.0, -1.0]
    assert sent("sign", values).tolist() == pytest.approx([32.35, -32.35, 32.35, -32.35])
    assert sent("twobit:0.5", values).tolist() == [0.5, -0.5, 0.0, -0.5]
    assert sent("topk:0.5", values).tolist() == pytest.approx([127.0, -1.4, 0.0, 0.0])
    assert sent("bf16", torch.tensor([1.0 + 2**-9])).tolist() == [1.0]


@pytest.mark.parametrize("num_members", [2, 3, 7, 8])
def test_values_too_large_for_a_narrow_sum_are_clamped_and_the_rest_is_the_residual(num_members):
    clamped = cast_clamped(torch.tensor([1e6, -1e6, 3.0]), torch.float16, num_members)
    total = clamped.clone()
    for _ in range(num_members - 1):
        total += clamped
    assert total.isfinite().all()
    assert float(clamped[2]) == 3.0
    assert 65504 / 2 / num_members <= float(clamped[0]) == -float(clamped[1])


def test_a_basis_is_orthonormal_and_leaves_out_columns_that_add_nothing():
    columns = torch.tensor([[1.0, 2.0, 0.0, 1.0], [1.0, 2.0, 0.0, -1.0], [0.0, 0.0, 0.0, 3.0]], dtype=torch.float64)
    basis = orthonormalize(columns)
    assert torch.allclose(basis.t() @ basis, torch.diag(torch.tensor([1.0, 0.0, 0.0, 1.0])).double(), atol=1e-14)
