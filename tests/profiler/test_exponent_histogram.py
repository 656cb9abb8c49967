"""Counts of values by power of two: the same as numpy's, on the device, and exact about fp16."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from counterpoint.profiler import exponent_histogram
from counterpoint.profiler.exponent_histogram import (
    ExponentHistogram,
    count_values,
    merge_histograms,
    new_bins,
    read_bins,
)

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def count(*tensors):
    """Return the histogram of tensors."""
    bins = new_bins(torch.device("cpu"))
    for tensor in tensors:
        count_values(bins, tensor)
    return read_bins(bins)


def random_values(dtype, seed=0, num=2000):
    """Return values of all exponents of a dtype, also subnormal ones, with zeros, inf and nan among them."""
    generator = torch.Generator().manual_seed(seed)
    info = torch.finfo(dtype)
    low, high = np.log2(info.smallest_normal) + np.log2(info.eps), np.log2(info.max)
    exponents = low + (high - low) * torch.rand(num, generator=generator, dtype=torch.float64)
    values = 2.0**exponents * torch.where(torch.rand(num, generator=generator) < 0.5, -1.0, 1.0)
    values[::7] = 2.0 ** torch.round(exponents[::7]).clamp(max=high - 1)  # powers of two
    values = values.to(dtype)
    for index, special in enumerate((0.0, -0.0, float("inf"), -float("inf"), float("nan"), info.max)):
        values[index * 11] = special
    return values


def reference(values):
    """Return the histogram by numpy's frexp, one value at a time."""
    exponents: dict[int, int] = {}
    powers: dict[int, int] = {}
    zeros = infinite = nan = over = 0
    for value in values.to(torch.float64).numpy().ravel():
        if np.isnan(value):
            nan += 1
        elif np.isinf(value):
            infinite += 1
        elif value == 0:
            zeros += 1
        else:
            mantissa, exponent = np.frexp(abs(value))
            exponents[int(exponent) - 1] = exponents.get(int(exponent) - 1, 0) + 1
            if mantissa == 0.5:
                powers[int(exponent) - 1] = powers.get(int(exponent) - 1, 0) + 1
            over += bool(abs(value) >= 65520)
    return ExponentHistogram(dict(sorted(exponents.items())), dict(sorted(powers.items())), zeros, infinite, nan, over)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_counted_as_numpy_counts_them(dtype):
    values = random_values(dtype)
    counted = count(values)
    assert counted == reference(values)
    smallest = min(counted.exponents)
    assert smallest < np.log2(torch.finfo(dtype).smallest_normal)  # subnormal numbers were among them
    assert (counted.num_values, counted.num_infinite, counted.num_nan) == (2000, 2, 1)


def test_a_large_tensor_is_counted_in_chunks(monkeypatch):
    monkeypatch.setattr(exponent_histogram, "CHUNK", 300)
    values = random_values(torch.float32).reshape(40, 50)
    assert count(values.t()) == reference(values)


def test_bins_add_up_over_tensors_and_histograms():
    first, second = random_values(torch.float32, 1), random_values(torch.float16, 2)
    assert count(first, second) == merge_histograms([count(first), count(second)])
    assert merge_histograms([]) == count(torch.empty(0, 3)) == ExponentHistogram()


def test_complex_numbers_count_as_two_and_rows_that_are_not_stored_as_zeros():
    assert count(torch.tensor([1 + 4j]).conj()).exponents == {0: 1, 2: 1}
    indices, values = torch.tensor([[1, 1]]), torch.tensor([[1.0, 2.0], [1.0, 0.0]])  # one row, given twice
    rows = torch.sparse_coo_tensor(indices, values, (4, 2), check_invariants=True)
    assert count(rows) == count(rows.to_dense())


class RefuseHostReads(TorchDispatchMode):
    """Fail where the host would wait for a device: when a number or a shape is read from a tensor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        assert not any(wait in name for wait in ("_local_scalar_dense", "nonzero", "unique", "bincount")), name
        return func(*args, **(kwargs or {}))


def test_counting_does_not_wait_for_the_device():
    bins, values = new_bins(torch.device("cpu")), random_values(torch.bfloat16)
    with RefuseHostReads():
        count_values(bins, values)
    assert read_bins(bins) == reference(values)


@pytest.mark.parametrize("exponent", [0, 3, 8, 17, -4])
def test_zeros_and_subnormals_are_those_of_a_conversion_to_fp16(exponent):
    values = random_values(torch.float32)
    values = values[values.isfinite() & (values.abs() < 2.0**12) & (values != 0)]
    values = torch.cat([values, 2.0 ** torch.arange(-45.0, -10.0), 1.5 * 2.0 ** torch.arange(-45.0, -10.0)])
    counted, converted = count(values), (values.double() * 2.0**exponent).half()
    assert counted.num_lost(exponent) == int((converted == 0).sum()) > 0
    is_small = (values.double() * 2.0**exponent).abs() < 2.0**-14
    assert counted.num_subnormal(exponent) == int(((converted != 0) & is_small).sum())


def test_overflow_is_that_of_a_conversion_to_fp16():
    values = torch.tensor([65504.0, 65519.9, 65520.0, -65536.0, 1e30, float("inf")])
    assert count(values).num_overflowing == int((values.half().isinf() & values.isfinite()).sum()) == 3


def test_zeros_of_bf16_are_those_of_a_conversion():
    values = torch.cat([2.0 ** torch.arange(-149.0, -120.0), 1.5 * 2.0 ** torch.arange(-140.0, -120.0)])
    zero = int((values.bfloat16() == 0).sum())
    assert count(values).num_lost(zero_exponent=exponent_histogram.BF16_ZERO_EXPONENT) == zero > 0


@pytest.mark.parametrize("largest", [3.9e-30, 1e-5, 0.5, 1.0, 1000.0])
def test_the_suggested_scale_is_the_largest_with_a_margin(largest):
    exponent = count(torch.tensor([largest, largest / 3])).find_loss_scale_exponent()
    assert exponent == 100 or 2.0**14 <= largest * 2.0**exponent < 2.0**15
    assert torch.tensor(largest * 2.0**exponent).half().isfinite()
