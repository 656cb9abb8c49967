"""Gathers and reduce-scatters of encoded shards: the stated error, and the same bits on all transports."""

import pytest
import torch

from counterpoint.fabric.compression import compress, decompress
from counterpoint.fabric.local import LocalWorld
from counterpoint.fabric.quantized_collectives import start_quantized_all_gather, start_quantized_reduce_scatter
from counterpoint.program.compression import SHARD_CODECS, find_codec

CHUNK, LEVELS = 1024, {"int8": 127, "int4": 7}
LENGTH = 3 * CHUNK + 77
RANGES = [[(0, CHUNK)], [(CHUNK, 2 * CHUNK), (2 * CHUNK, 2 * CHUNK + 7)], [], [(2 * CHUNK + 7, LENGTH)]]
"""Of four members: one range, the end of a parameter and the beginning of another, nothing, and chunks with a rest."""


def values_of(rank, dtype=torch.float32, length=LENGTH):
    draw = torch.Generator().manual_seed(rank)
    return (torch.randn(length, generator=draw) * torch.logspace(-4, 2, length)).to(dtype)


def scales_of(values, name, ranges=RANGES):
    """Return for each element the scale of its chunk."""
    scales = torch.zeros(len(values), dtype=torch.float64)
    for start, stop in [pair for own in ranges for pair in own]:
        for low in range(start, stop, CHUNK):
            high = min(low + CHUNK, stop)
            scales[low:high] = values[low:high].double().abs().max() / LEVELS[name]
    return scales


def decoded(values, name):
    codec = find_codec(name)
    parts = [values[start:stop] for own in RANGES for start, stop in own]
    return torch.cat([decompress(codec, compress(codec, part), part) for part in parts])


def gather(fabric, dtype=torch.float32, target=None):
    """Gather a tensor of which each member has its ranges only."""
    results = []
    for name in SHARD_CODECS:
        own = values_of(9, dtype)[slice(*bounds_of(fabric.rank))]
        whole = torch.full((LENGTH,), torch.nan, dtype=target or dtype)
        start_quantized_all_gather(fabric, "weights", own, whole, RANGES, (0, 1, 2, 3), find_codec(name)).wait()
        results.append(whole)
    return [whole.double().tolist() for whole in results]


def bounds_of(member):
    return (RANGES[member][0][0], RANGES[member][-1][1]) if RANGES[member] else (0, 0)


def reduce_scatter(fabric, dtype=torch.float32):
    results = []
    for name in SHARD_CODECS:
        whole = values_of(fabric.rank, dtype)
        work = start_quantized_reduce_scatter(fabric, "sum", whole, RANGES, (0, 1, 2, 3), find_codec(name))
        work.wait()
        work.wait()  # returns at once
        results.append(whole)
    return [whole.double().tolist() for whole in results]


@pytest.mark.long(quick=["local", "shm", "gloo"])
def test_every_member_decodes_the_same_weights_on_every_transport(run_scenario):
    expected = [decoded(values_of(9), name).double().tolist() for name in SHARD_CODECS]
    assert run_scenario(gather, 4) == [expected] * 4


@pytest.mark.long(quick=["local", "shm", "gloo"])
def test_each_member_adds_up_its_range_in_the_order_of_the_group(run_scenario):
    sums = [sum(decoded(values_of(rank), name) for rank in range(4)) for name in SHARD_CODECS]
    for rank, result in enumerate(run_scenario(reduce_scatter, 4)):
        for total, whole in zip(sums, result, strict=True):
            expected, (start, stop) = values_of(rank), bounds_of(rank)
            expected[start:stop] = total[start:stop]
            assert whole == expected.double().tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_weight_is_within_half_a_scale(dtype):
    with LocalWorld(4, 10.0) as world:
        results = world.run(lambda fabric: gather(fabric, dtype))[0]
    for name, result in zip(SHARD_CODECS, results, strict=True):
        exact, read = values_of(9, dtype).double(), torch.tensor(result, dtype=torch.float64)
        rounding = read.abs() * torch.finfo(dtype).eps
        assert ((read - exact).abs() <= scales_of(exact, name) / 2 + rounding).all()
        assert ((read - exact).abs() > scales_of(exact, name) / 8).any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_sum_is_within_half_of_the_sum_of_the_scales(dtype):
    with LocalWorld(4, 10.0) as world:
        results = world.run(lambda fabric: reduce_scatter(fabric, dtype))
    for place, name in enumerate(SHARD_CODECS):
        exact = [values_of(rank, dtype).double() for rank in range(4)]
        bound = sum(scales_of(one, name) for one in exact) / 2 * (1 + 1e-5)
        for rank, result in enumerate(results):
            span = slice(*bounds_of(rank))
            errors = (torch.tensor(result[place], dtype=torch.float64) - sum(exact)).abs()
            assert (errors[span] <= bound[span]).all()


def test_weights_are_decoded_into_the_dtype_that_is_read():
    with LocalWorld(4, 10.0) as world:
        results = world.run(lambda fabric: gather(fabric, torch.float32, torch.bfloat16))[0]
    for name, result in zip(SHARD_CODECS, results, strict=True):
        assert result == decoded(values_of(9), name).bfloat16().double().tolist()


@pytest.mark.parametrize("wrong", [torch.inf, torch.nan])
@pytest.mark.parametrize("name", SHARD_CODECS)
def test_what_is_not_finite_becomes_nan_with_its_chunk(name, wrong):
    values = values_of(0)
    values[3] = wrong
    result = decoded(values, name)
    assert result[:CHUNK].isnan().all()
    assert result[CHUNK:].isfinite().all()


@pytest.mark.parametrize("name", SHARD_CODECS)
def test_zeros_stay_zeros(name):
    assert decoded(torch.zeros(LENGTH), name).tolist() == [0.0] * LENGTH
