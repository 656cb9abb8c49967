"""Values that are stored in 8 bits are as close to the exact ones as the documentation says."""

import pytest
import torch

from counterpoint.optim.blockwise import BLOCK_SIZE, code_table, dequantize, find_codes, list_code_values, quantize

NEAR_ONE = {True: 0.0071, False: 0.0036}
"""The largest error of values above a tenth of their scale, divided by the scale; by whether there are signs."""


def spread_values(signed, dtype=torch.float32):
    """Return values of all magnitudes up to 1, with 1 as the largest of each block."""
    draw = torch.Generator().manual_seed(3)
    values = 10 ** (-9 * torch.rand(200 * BLOCK_SIZE, generator=draw, dtype=torch.float64))
    values[::BLOCK_SIZE] = 1
    if signed:
        values *= torch.randint(0, 2, values.shape, generator=draw) * 2 - 1
    return values.to(dtype)


def documented_error(magnitudes, signed):
    """Return the bound for values divided by their scale: a fifth for each power of ten that they are below 1."""
    decades = (-magnitudes.double().log10()).floor().clamp(0, 6)
    return (NEAR_ONE[signed] / 5**decades).clamp(min=4.6e-7)


def test_there_are_256_values_half_as_many_in_each_decade():
    for signed, largest in ((True, 64), (False, 128)):
        values = list_code_values(signed=signed)
        counts = [sum(10.0 ** -(decade + 1) < value < 10.0**-decade for value in values) for decade in range(7)]
        assert len(set(values)) == 256
        assert counts == [largest >> decade for decade in range(7)]


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("scale", [1.0, 2.0**-100, 2.0**90])
def test_the_error_of_every_element_is_within_the_documented_bound(signed, scale):
    values = spread_values(signed) * scale
    errors = (dequantize(*quantize(values, signed=signed), signed=signed) - values).abs().double() / scale
    bound = documented_error(values.abs() / scale, signed)
    assert (errors <= bound).all()
    assert (errors / bound).max() > 0.97


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_a_search_among_all_bounds(signed):
    table = code_table(signed, torch.float32, torch.device("cpu"))
    numbers = spread_values(signed)
    beside = [table.bounds[:-1], table.bounds[:-1].nextafter(numbers[0]), table.bounds[:-1].nextafter(-numbers[0])]
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-45, float("nan")])
    ratios = torch.cat([numbers, *beside, special, table.values])
    assert find_codes(ratios, table).tolist() == torch.bucketize(ratios, table.bounds[:-1]).tolist()


@pytest.mark.parametrize("signed", [True, False])
def test_zero_stays_zero_and_the_largest_positive_value_stays_what_it_is(signed):
    values = torch.zeros(2 * BLOCK_SIZE)
    values[3] = 0.3
    assert torch.equal(dequantize(*quantize(values, signed=signed), signed=signed), values)


def test_no_positive_mean_of_squares_becomes_zero():
    values = torch.full((BLOCK_SIZE,), 1e-30)
    values[0] = 1
    assert (dequantize(*quantize(values, signed=False), signed=False) > 0).all()


def test_a_block_does_not_depend_on_the_others():
    values = torch.randn(3 * BLOCK_SIZE + 7, generator=torch.Generator().manual_seed(0))
    codes, scales = quantize(values, signed=True)
    parts = [quantize(part, signed=True) for part in values.split(BLOCK_SIZE)]
    assert torch.equal(codes, torch.cat([part for part, _ in parts]))
    assert torch.equal(scales, torch.cat([scale for _, scale in parts]))
    assert torch.equal(scales, torch.stack([part.abs().max() for part in values.split(BLOCK_SIZE)]))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_leaves_no_finite_scale(value):
    values = torch.ones(2 * BLOCK_SIZE)
    values[0] = value
    restored = dequantize(*quantize(values, signed=True), signed=True)
    assert not restored[0].isfinite()
    assert restored[BLOCK_SIZE:].tolist() == [1.0] * BLOCK_SIZE


def test_values_in_float64_have_scales_in_float64():
    values = spread_values(signed=True, dtype=torch.float64) * 1e200
    codes, scales = quantize(values, signed=True)
    assert (codes.dtype, scales.dtype) == (torch.uint8, torch.float64)
    assert dequantize(codes, scales, signed=True).isfinite().all()
