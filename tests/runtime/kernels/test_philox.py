"""Philox gives the published numbers, in the native library as in torch, and each sample its own."""

import pytest
import torch
from hypothesis import given, strategies as st

from counterpoint.fabric.shm.native import NativeLibrary
from counterpoint.runtime.kernels import philox

CPU = torch.device("cpu")
LOW = 0xFFFFFFFF
PUBLISHED = [  # counter, key, result: the known answers of Random123 1.14
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((LOW,) * 4, (LOW,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox4x32(counter, key):
    """The generator as it is published, in whole numbers."""
    (x0, x1, x2, x3), (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = x0 * 0xD2511F53, x2 * 0xCD9E8D57
        x0, x1, x2, x3 = (p1 >> 32) ^ x1 ^ k0, p1 & LOW, (p0 >> 32) ^ x3 ^ k1, p0 & LOW
        k0, k1 = (k0 + 0x9E3779B9) & LOW, (k1 + 0xBB67AE85) & LOW
    return x0, x1, x2, x3


def expected_words(key, first_sample, num_samples, width):
    halves = key & LOW, key >> 32
    return [
        [philox4x32((i // 4, 0, s & LOW, s >> 32), halves)[i % 4] for i in range(width)]
        for s in range(first_sample, first_sample + num_samples)
    ]


def without_native(monkeypatch):
    monkeypatch.setattr(philox, "native", lambda: NativeLibrary(None, "for this test"))


@pytest.mark.parametrize(("counter", "key", "result"), PUBLISHED)
def test_the_reference_of_these_tests_gives_the_known_answers(counter, key, result):
    assert philox4x32(counter, key) == result


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**62), st.integers(1, 5), st.integers(1, 90))
def test_words_are_those_of_the_published_generator(key, first_sample, num_samples, width):
    words = philox.philox_words(key, first_sample, num_samples, width, CPU)
    assert words.tolist() == expected_words(key, first_sample, num_samples, width)


def test_torch_computes_the_same_words_where_there_is_no_native_library(monkeypatch):
    without_native(monkeypatch)
    assert philox.philox_words(2**63 - 25, 2**40, 3, 70, CPU).tolist() == expected_words(2**63 - 25, 2**40, 3, 70)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("is_native", [True, False])
def test_an_element_is_zero_where_its_number_is_below_the_bound(dtype, is_native, monkeypatch):
    if not is_native:
        without_native(monkeypatch)
    value = 1.0 if dtype == torch.bool else 1 / 0.75
    out = torch.empty(7, 70, dtype=dtype)
    philox.philox_select(out, 12345, 5, 0.25, value)
    kept = torch.tensor(expected_words(12345, 5, 7, 70)) >= 2**30
    assert torch.equal(out, (kept * torch.tensor(value, dtype=torch.float64)).to(dtype))


def test_several_threads_write_the_same(monkeypatch):
    single = philox.philox_words(7, 0, 3, 300_001, CPU)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(philox.philox_words(7, 0, 3, 300_001, CPU), single)
