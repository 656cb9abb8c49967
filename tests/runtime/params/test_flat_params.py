"""Flat parameters: contiguous in one buffer, split where the optimizer allows it, and freed while sharded."""

import mmap
from fractions import Fraction

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from counterpoint.runtime.params import flat_grads as flat_grads_module
from counterpoint.runtime.params.flat_layout import WHOLE, build_layouts
from counterpoint.runtime.params.flat_params import FlatParams

F32, F64 = torch.float32, torch.float64
PARAMS = [("a", (2, 3), F64, 0), ("b", (3,), F64, 1), ("c", (2,), F32, 0), ("d", (4,), F64, 0)]


def half(index):
    return Fraction(index, 2), Fraction(index + 1, 2)


def make_flat_params(*, local_shard=WHOLE, split_size=1):
    """Return flat parameters a (2, 3), d (4) and b (3) in float64, filled with 0, 1, 2, ..., and the parameters."""
    layout = next(layout for layout in build_layouts(PARAMS, split_size=split_size) if layout.dtype == F64)
    values = torch.arange(13, dtype=F64)
    params = {slot.name: nn.Parameter(values[slot.start : slot.stop].view(slot.shape)) for slot in layout.slots}
    return FlatParams(layout, params, local_shard), params


def test_there_is_one_layout_per_dtype_and_groups_are_contiguous():
    doubles, singles = build_layouts(PARAMS, split_size=1)
    assert [(slot.name, slot.start, slot.stop) for slot in doubles.slots] == [("a", 0, 6), ("d", 6, 10), ("b", 10, 13)]
    assert [(slot.name, slot.start, slot.stop) for slot in singles.slots] == [("c", 0, 2)]
    assert (doubles.dtype, singles.dtype) == (F64, F32)


@pytest.mark.parametrize(
    ("split_size", "num_parts", "bounds"),
    [
        (1, 2, [0, 6, 13]),
        (1, 3, [0, 4, 8, 13]),
        (2, 3, [0, 4, 8, 13]),
        (2, 5, [0, 2, 6, 8, 10, 13]),
        (3, 5, [0, 3, 6, 10, 10, 13]),
        (None, 2, [0, 6, 13]),
        (None, 3, [0, 6, 10, 13]),
        (None, 5, [0, 6, 6, 10, 10, 13]),
    ],
)
def test_shards_split_parameters_only_where_the_optimizer_allows_it(split_size, num_parts, bounds):
    layout, _ = build_layouts(PARAMS, split_size=split_size)
    assert layout.shard_bounds(num_parts) == bounds


def test_an_optimizer_gets_one_tensor_for_each_group_or_one_for_each_parameter():
    merged, separate = (build_layouts(PARAMS, split_size=split_size)[0] for split_size in (1, None))
    assert merged.optimizer_ranges(WHOLE) == [(0, 0, 10), (1, 10, 13)]
    assert merged.optimizer_ranges(half(1)) == [(0, 6, 10), (1, 10, 13)]
    assert separate.optimizer_ranges(WHOLE) == [(0, 0, 6), (0, 6, 10), (1, 10, 13)]
    assert separate.optimizer_ranges((Fraction(0), Fraction(1, 3))) == [(0, 0, 6)]


shapes = st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=1, max_size=6)


@given(shapes, st.integers(1, 7), st.sampled_from([1, 2, 3, None]))
def test_the_shards_of_any_number_of_ranks_cover_every_element_once(shapes, num_parts, split_size):
    params = [(str(at), shape, F32, at % 2) for at, shape in enumerate(shapes)]
    (layout,) = build_layouts(params, split_size=split_size)
    covered = [
        (slot.name, element)
        for index in range(num_parts)
        for slot, start, stop in layout.slots_in((Fraction(index, num_parts), Fraction(index + 1, num_parts)))
        for element in range(start, stop)
    ]
    assert covered == [(slot.name, element) for slot in layout.slots for element in range(slot.start, slot.stop)]
    assert all(may_cut(layout, bound) for bound in layout.shard_bounds(num_parts))


def may_cut(layout, bound):
    """Return whether a bound is one of parameters, or leaves both parts of one large enough, and the first aligned."""
    slot = next(slot for slot in layout.slots if bound <= slot.stop)
    if bound in {0, slot.stop}:
        return True
    size, first = layout.split_size, bound - slot.start
    return size is not None and first % size == 0 and slot.stop - bound >= size


def test_parameters_are_views_of_one_buffer():
    flat_params, params = make_flat_params()
    flat_params.weights[7] = 70
    assert params["d"].tolist() == [6, 70, 8, 9]
    assert {param.untyped_storage().data_ptr() for param in params.values()} == {flat_params.weights.data_ptr()}


def test_only_the_local_shard_survives_resharding():
    flat_params, params = make_flat_params(local_shard=half(1))
    assert flat_params.weights.untyped_storage().size() == 0
    assert all(param.untyped_storage().size() == 0 for param in params.values())
    flat_params.unshard_weights()
    assert flat_params.weights[6:].tolist() == list(range(6, 13))
    flat_params.weights[8] = -1
    flat_params.reshard_weights()
    flat_params.unshard_weights()
    assert flat_params.weights[8] == 8, "changes of a gathered copy are dropped"


def test_an_update_of_the_local_shard_is_gathered_next():
    flat_params, params = make_flat_params(local_shard=half(1))
    flat_params.optimizer_view(6, 10).fill_(5)
    flat_params.unshard_weights()
    assert params["d"].tolist() == [5, 5, 5, 5]


@pytest.mark.parametrize("local_shard", [WHOLE, half(0), half(1)])
def test_a_parameter_is_written_into_the_part_that_is_stored_here(local_shard):
    flat_params, _ = make_flat_params(local_shard=local_shard)
    flat_params.write_param("a", torch.full((2, 3), 7.0, dtype=F64))
    flat_params.write_param("d", torch.full((4,), 8.0, dtype=F64))
    low, high = flat_params.shard_bounds
    expected = [*[7.0] * 6, *[8.0] * 4, 10.0, 11.0, 12.0]
    assert flat_params.flat_view(low, high).tolist() == expected[low:high]


def test_gradients_of_several_microbatches_are_added_up_in_one_buffer():
    flat_params, params = make_flat_params()
    for factor in (1.0, 10.0):
        params["a"].grad = torch.full((2, 3), factor, dtype=F64)
        if factor > 1:
            params["b"].grad = torch.full((3,), factor, dtype=F64)
        flat = flat_params.own_grads.collect_all()
    assert flat.tolist() == [*[11.0] * 6, *[0.0] * 4, *[10.0] * 3]
    assert all(param.grad is None for param in params.values())


def test_a_shard_is_accumulated_over_microbatches_while_the_flat_gradient_is_freed():
    flat_params, params = make_flat_params(local_shard=half(0))
    for _ in range(3):
        flat_params.unshard_weights()
        params["a"].grad = torch.ones(2, 3, dtype=F64)
        flat_params.own_grads.collect_all()
        flat_params.own_grads.accumulate_shard(0, 6)
        flat_params.own_grads.free()
        assert flat_params.own_grads.flat is None
    assert flat_params.grads.optimizer_grad(0, 6).tolist() == [3.0] * 6
    assert flat_params.own_grads.shard.untyped_storage().size() == 6 * 8


def test_a_shard_stays_in_place_without_a_copy_and_the_pages_around_it_are_released():
    page = mmap.PAGESIZE // 8
    layout = build_layouts([("a", (16 * page,), F64, 0)], split_size=1)[0]
    flat_params = FlatParams(layout, {"a": nn.Parameter(torch.ones(16 * page, dtype=F64))}, half(1))
    grads = flat_params.own_grads
    grads.keeps_shard_in_place = True
    for _ in range(2):
        grads.add_packed(iter([torch.arange(16 * page, dtype=F64)]))
        whole = grads.collect_all()
        grads.accumulate_shard(8 * page, 16 * page)
        grads.free()
        assert not whole[page : 7 * page].any()  # only a test has another reference to it
    assert grads.shard is not None
    assert grads.shard.untyped_storage().nbytes() == 8 * page * 8
    assert torch.equal(grads.optimizer_grad(8 * page, 16 * page), 2 * torch.arange(8 * page, 16 * page, dtype=F64))


def test_whole_tensors_keep_their_shape_for_optimizers_that_are_not_elementwise():
    flat_params, params = make_flat_params(split_size=None)
    params["a"].grad = torch.ones(2, 3, dtype=F64)
    assert flat_params.optimizer_view(0, 6).shape == (2, 3)
    assert flat_params.grads.optimizer_grad(0, 6).shape == (2, 3)


def test_a_sparse_gradient_of_a_parameter_without_rows_is_added_as_a_dense_one():
    """Torch adds it next to the view instead of into it (torch 2.13)."""
    flat_params, params = make_flat_params()
    for _ in range(2):
        params["d"].grad = torch.ones(4, dtype=F64).to_sparse()
        flat = flat_params.own_grads.collect_all()
    assert flat.tolist() == [0.0] * 6 + [2.0] * 4 + [0.0] * 3


def test_large_gradients_are_collected_one_by_one(monkeypatch):
    """So that at most one of them is in memory twice."""
    (layout,) = build_layouts(
        [("small", (3,), F64, 0), ("large", (9000,), F64, 0), ("last", (2,), F64, 0)], split_size=1
    )
    params = {slot.name: nn.Parameter(torch.zeros(slot.shape, dtype=F64)) for slot in layout.slots}
    for param in params.values():
        param.grad = torch.ones_like(param)
    copied: list[str] = []
    monkeypatch.setattr(
        flat_grads_module, "copy_small_grads", lambda slots, *_: copied.extend(slot.name for slot in slots)
    )
    flat_grad = FlatParams(layout, params, WHOLE).own_grads.collect_all()
    assert (copied, flat_grad.tolist()) == (["small", "last"], [1.0] * 9005)
    assert all(param.grad is None for param in params.values())
