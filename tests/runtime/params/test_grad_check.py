"""Gradients that are not finite are found, and which of them are read."""

import math

import pytest
import torch
from torch import nn

from counterpoint.fabric.shm.magnitudes import find_edge_magnitudes, find_magnitude, find_magnitudes
from counterpoint.runtime.params.grad_check import GradCheck, GradReport, ParamGroup

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [1, 2, 31, 1000, 3_000_001])
def test_magnitudes_are_those_of_torch(dtype, size):
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    tiny = torch.full((3,), torch.finfo(dtype).smallest_normal / 4, dtype=dtype)
    found = find_magnitudes([tensor, tensor[:0], tiny])
    assert [float(value) for value in found] == [float(tensor.abs().max()), 0.0, float(tiny[0])]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, -math.nan])
@pytest.mark.parametrize(("size", "place"), [(1, 0), (100, 99), (2_500_000, 2_499_999), (2_500_000, 1_300_000)])
def test_one_bad_element_is_found_wherever_it_is(dtype, bad, size, place):
    tensor = torch.ones(size, dtype=dtype)
    tensor[place] = bad
    assert [math.isfinite(value) for value in find_magnitudes([tensor[:0], tensor, torch.ones(5, dtype=dtype)])] == [
        True,
        False,
        True,
    ]


def test_other_tensors_are_read_by_torch():
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([3.0, -5.0]), (4,), check_invariants=True)
    strided = torch.arange(12.0).view(3, 4).t()
    mixed = torch.ones(2, dtype=torch.float64)
    assert [float(value) for value in find_magnitudes([sparse, strided, mixed])] == [5.0, 11.0, 1.0]
    assert [*map(find_magnitude, [sparse, strided, mixed])] == [5.0, 11.0, 1.0]
    assert not len(find_magnitudes([]))


def make_check(micro=0):
    check = GradCheck(is_enabled=True)
    check.micro = micro
    return check


def test_the_first_microbatch_and_its_first_parameter_are_reported_once():
    check, bad = make_check(3), torch.tensor([1.0, math.nan])
    check.check(["a", "b"], [torch.ones(2), bad])
    check.micro = 1
    check.check(["c", "d"], [bad, bad])
    assert check.take_report(range(1, 3))[:2] == (1, "c")
    assert check.take_report(range(4))[:2] == (3, "b")
    assert check.take_report(range(4)) == GradReport()


def test_the_microbatch_that_is_reported_is_the_first_that_ran():
    """GPipe runs the last one first, and the gradients of later ones are added to it."""
    check, bad = make_check(), torch.tensor([math.nan])
    for check.micro in (2, 1, 0):
        check.check(["a"], [bad if check.micro < 2 else torch.ones(1)])
    assert check.take_report(range(4))[:2] == (1, "a")


def test_shares_of_the_largest_number_are_added_up_over_microbatches():
    check, most = make_check(), torch.finfo(torch.float16).max
    for check.micro in range(3):
        check.check(["a", "b"], [torch.tensor([most / 4], dtype=torch.float16), torch.ones(1, dtype=torch.float16)])
    assert check.take_report(range(3)).share == pytest.approx(0.75, rel=1e-3)


def is_bounded(rows, inputs):
    """Return whether the product need not be read, and the report."""
    check = make_check()
    return check.is_bounded(rows, inputs), check.take_report([0])


def test_a_product_is_not_read_if_its_factors_bound_it():
    bounded, report = is_bounded(torch.randn(4, 64), torch.randn(4, 32))
    assert bounded
    assert 0 < report.share < 1e-30


@pytest.mark.parametrize("value", [1e30, math.inf, math.nan])
def test_a_product_is_read_if_its_factors_do_not_bound_it(value):
    assert is_bounded(torch.full((4, 64), value), torch.full((4, 32), 1e30)) == (False, GradReport())


def test_where_gradients_are_is_kept_until_they_change():
    module, check = nn.Linear(2, 2), GradCheck(is_enabled=True)
    params = ParamGroup(dict(module.named_parameters()))
    with check.check_backward(0, params):
        for param in module.parameters():
            param.grad = torch.ones_like(param)
    grads = [param.grad for param in module.parameters() if param.grad is not None]
    collected = check.collected
    assert collected is not None
    assert [*collected.addresses] == [grad.data_ptr() for grad in grads]
    with check.check_backward(1, params):
        has_begun = check.collected
        module.bias.grad = None
    assert has_begun is None
    assert check.collected is not None
    assert [*check.collected.group.params] == ["weight"]
    assert not check.collected.are_of([*module.parameters()])


def test_rows_that_are_added_up_have_the_share_of_their_sum():
    check = make_check()
    check.check_rows("table", torch.tensor([[4096.0, 0.0]], dtype=torch.float16), 8)
    assert check.take_report([0]).share >= 8 * 4096 / torch.finfo(torch.float16).max
    check.check_rows("table", torch.ones(0, 2), 0)
    check.check_rows("table", torch.tensor([[1.0, math.nan]]), 1)
    assert check.take_report([0]) == GradReport(0, "table", 0.0)


def test_several_products_have_the_share_of_their_sum():
    check, rows, inputs = make_check(), torch.ones(4, 64), torch.ones(4, 32)
    assert [check.is_bounded(rows, inputs) for _ in range(3)] == [True] * 3
    assert check.take_report([0]).share == pytest.approx(3 * 4 / torch.finfo(torch.float32).max)


def test_one_gradient_is_read_whole():
    check = make_check()
    check.check_one("a", torch.tensor([[1.0, math.inf]]))
    assert check.take_report([0])[:2] == (0, "a")


def test_a_checked_gradient_is_read_again_after_it_was_changed():
    module, check = nn.Linear(2, 2, bias=False), GradCheck(is_enabled=True)
    params = ParamGroup(dict(module.named_parameters()))
    with check.check_backward(0, params):
        module.weight.grad = torch.zeros(2, 2)
        check.mark_checked("weight", module.weight.grad)
        module.weight.grad.add_(math.inf)
    assert check.take_report([0])[:2] == (0, "weight")
    with check.check_backward(1, params):
        check.mark_checked("weight", module.weight.grad)
    assert check.take_report([1]) == GradReport()


def test_nothing_is_read_outside_of_a_backward_or_if_disabled():
    bad = torch.tensor([math.nan])
    check = GradCheck(is_enabled=True)
    check.check(["a"], [bad])
    disabled = GradCheck()
    with disabled.check_backward(0, ParamGroup({})):
        disabled.check(["a"], [bad])
    assert check.take_report([0]) == disabled.take_report([0]) == GradReport()


def accumulate(check, layer, micro, product, *, accumulates):
    """Add a product to the gradient of a layer's weight in the backward of a microbatch."""
    with check.check_backward(micro, ParamGroup(dict(layer.named_parameters()), {"weight"}), accumulates=accumulates):
        for param, grad in zip(layer.parameters(), [product, product.sum(1)], strict=False):
            param.grad = grad.clone() if param.grad is None else param.grad.add_(grad)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("factor", [0, 1])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_microbatch_that_made_a_sum_of_products_bad_is_reported(has_bias, factor, bad):
    layer, check = nn.Linear(200, 300, bias=has_bias), GradCheck(is_enabled=True)
    for micro in range(4):
        factors = torch.randn(5, 300), torch.randn(5, 200)
        if micro == 2:
            factors[factor][3, 77] = bad
        accumulate(check, layer, micro, factors[0].T @ factors[1], accumulates=micro < 3)
    report = check.take_report(range(4))
    assert (report.micro, report.name in {"weight", "bias"}) == (2, True)


def test_a_sum_that_overflows_within_is_reported_with_its_microbatches():
    layer, check = nn.Linear(200, 300, bias=False), GradCheck(is_enabled=True)
    for micro in range(4):
        product = torch.zeros(300, 200)
        product[7, 9] = 2e38
        accumulate(check, layer, micro, product, accumulates=micro < 3)
    assert check.take_report(range(4))[:2] == (3, "weight (summed since microbatch 0)")


def test_what_is_deferred_is_read_although_no_backward_is_the_last():
    layer, check = nn.Linear(200, 300, bias=False), GradCheck(is_enabled=True)
    product = torch.zeros(300, 200)
    product[7, 9] = math.nan
    accumulate(check, layer, 0, product, accumulates=True)
    assert check.take_report(range(4))[:2] == (0, "weight")
    check.begin_step()
    assert check.take_report(range(4)) == GradReport()


@pytest.mark.parametrize("dtype", FLOATS)
def test_edges_are_those_of_torch(dtype):
    matrices = [torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype) for shape in [(3, 5), (70, 2)]]
    expected = [max(m[0].abs().max(), m[:rows, 0].abs().max()) for m, rows in zip(matrices, (3, 40), strict=True)]
    assert find_edge_magnitudes(matrices, [3, 40]) == [*map(float, expected)]
    strided = [matrix.T.contiguous().T for matrix in matrices]
    assert find_edge_magnitudes(strided, [3, 40]) == [*map(float, expected)]


def test_a_matrix_that_is_not_of_a_linear_layer_is_read_whole_after_each_microbatch():
    table, check = nn.Parameter(torch.zeros(200, 200)), GradCheck(is_enabled=True)
    for micro in range(3):
        grad = torch.zeros(200, 200)
        grad[7, 9] = math.nan if micro == 1 else 0.0
        with check.check_backward(micro, ParamGroup({"table": table}), accumulates=micro < 2):
            table.grad = grad if table.grad is None else table.grad.add_(grad)
    assert check.take_report(range(3))[:2] == (1, "table")
