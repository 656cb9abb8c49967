"""Times at the roofline of a device, and memory that no plan may take; computed by hand."""

from dataclasses import replace
from fractions import Fraction

import pytest

from counterpoint.compiler.compile import message_size_fn
from counterpoint.errors import PlanError
from counterpoint.model.precision import parse_precision
from counterpoint.model.spec import Block, linear_chain
from counterpoint.plan.plan import Plan
from counterpoint.planner.ranking import predict_plan
from counterpoint.program.instruction import Backward, Forward, Update
from counterpoint.simulator.cost_model import analytic_costs
from counterpoint.world.cluster import Cluster, Device, Link, Roofline
from counterpoint.world.known_clusters import find_known_cluster

WIDTH = 1024
LAUNCH_S = 1e-6
CARD = Roofline("card", (("fp32", 1e12), ("bf16", 16e12)), flops_fraction=0.5, memory_fraction=0.8, launch_s=LAUNCH_S)
CLUSTER = Cluster(Device(1e12, 2**34, 1e12, 2**30, CARD), Link(0.0, 1e9))


def chain(precision=None):
    """Return two linear layers with the FLOPs of one sample."""
    model = linear_chain(2, width=WIDTH, precision=parse_precision(precision))
    blocks = tuple(
        Block(tuple(replace(layer, cost=2.0 * WIDTH * WIDTH) for layer in block.layers), block.first_layer)
        for block in model.blocks
    )
    return replace(model, blocks=blocks)


def costs(precision, samples, cluster=CLUSTER):
    model = chain(precision)
    return analytic_costs(model, cluster, message_size_fn(model, samples), samples_per_microbatch=samples)


@pytest.mark.parametrize(("precision", "flops_per_s", "item_bytes"), [(None, 0.5e12, 4), ("bf16", 8e12, 2)])
@pytest.mark.parametrize("samples", [1, 64, 4096])
def test_a_forward_takes_its_arithmetic_or_its_bytes_and_a_launch(precision, flops_per_s, item_bytes, samples):
    arithmetic_s = samples * 2 * WIDTH * WIDTH / flops_per_s
    memory_s = item_bytes * (WIDTH * WIDTH + 2 * samples * WIDTH) / 0.8e12
    forward_s = costs(precision, samples).compute_s(Forward(0, 0), Fraction(1))
    assert forward_s == pytest.approx(max(arithmetic_s, memory_s) + LAUNCH_S, rel=1e-12)
    assert costs(precision, samples).compute_s(Backward(0, 0), Fraction(1)) == pytest.approx(2 * forward_s, rel=1e-12)


def test_one_product_on_an_h100_takes_as_long_as_by_hand():
    """8192 samples of a layer of 1024 x 1024 in bf16: 17.2 GFLOP at 0.75 of 989.4 TFLOP/s, and 0.9 us."""
    forward_s = costs("bf16", 8192, find_known_cluster("8xh100")).compute_s(Forward(0, 0), Fraction(1))
    assert forward_s == pytest.approx(17179869184 / (0.75 * 989.4e12) + 0.9e-6, rel=1e-12)


def test_more_samples_and_wider_dtypes_never_take_less():
    grid = [[costs(p, n).compute_s(Forward(0, 0), Fraction(1)) for n in (1, 8, 64, 512)] for p in ("bf16", None)]
    assert all(row == sorted(row) for row in grid)
    assert all(narrow <= wide for narrow, wide in zip(*grid, strict=True))


@pytest.mark.parametrize("precision", [None, "bf16", "bf16(reduce=bf16, weights=compute)"])
def test_an_update_moves_28_bytes_of_a_parameter_whatever_ranks_hold(precision):
    """Adam reads and writes two states and the (master) weights in float32; a gradient is read, perhaps casts written."""
    seconds = costs(precision, 1).compute_s(Update((0,)), Fraction(1))
    assert seconds == pytest.approx(28 * WIDTH * WIDTH / 0.8e12, rel=1e-12)


def test_reserved_memory_is_no_memory_for_a_plan():
    predicted = predict_plan(Plan(), chain(), CLUSTER, batch_size=8)
    assert predicted.capacity_bytes == 15 * 2**30
    tight = replace(CLUSTER, device=replace(CLUSTER.device, memory_bytes=predicted.memory_bytes + 2**30 - 1))
    assert [predict_plan(Plan(), chain(), cluster, batch_size=8).fits for cluster in (CLUSTER, tight)] == [True, False]


def test_gradients_that_are_summed_in_bf16_take_half_as_long_on_the_link():
    times = [
        predict_plan(Plan.parse("data(2)"), chain(precision), CLUSTER, batch_size=8).communication_s
        for precision in ("bf16", "bf16(reduce=bf16)")
    ]
    assert times[1] == pytest.approx(times[0] / 2, rel=0.01)


@pytest.mark.parametrize("peaks", [(), (("bf16", 1e12),), (("fp32", 0.0), ("bf16", 1e12))])
def test_a_roofline_without_a_peak_of_fp32_is_refused(peaks):
    with pytest.raises(PlanError, match=r"Roofline\('card'\) has the peaks .*that of fp32 is needed.*add"):
        Roofline("card", peaks)
