"""Arenas: parameters back to back in one buffer, cut where the optimizer allows it, with their memory freed."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from counterpoint.runtime.params import flat_params as arenas
from counterpoint.runtime.params.flat_layout import WHOLE, build_layouts
from counterpoint.runtime.params.flat_params import FlatParams

F32, F64 = torch.float32, torch.float64
DESCRIBED = [("a", (2, 3), F64, 0), ("b", (3,), F64, 1), ("c", (2,), F32, 0), ("d", (4,), F64, 0)]


def half(index):
    return Fraction(index, 2), Fraction(index + 1, 2)


def arena(*, home=WHOLE, cut_anywhere=True):
    """Return an arena of a (2, 3), d (4) and b (3) in float64, filled with 0, 1, 2, …, and its parameters."""
    layout = next(layout for layout in build_layouts(DESCRIBED, may_split_params=cut_anywhere) if layout.dtype == F64)
    numbers = torch.arange(13, dtype=F64)
    params = {slot.name: nn.Parameter(numbers[slot.start : slot.stop].view(slot.shape)) for slot in layout.slots}
    return FlatParams(layout, params, home), params


def test_there_is_one_arena_for_each_dtype_and_groups_lie_together():
    doubles, singles = build_layouts(DESCRIBED, may_split_params=True)
    assert [(slot.name, slot.start, slot.stop) for slot in doubles.slots] == [("a", 0, 6), ("d", 6, 10), ("b", 10, 13)]
    assert [(slot.name, slot.start, slot.stop) for slot in singles.slots] == [("c", 0, 2)]
    assert (doubles.dtype, singles.dtype) == (F64, F32)


@pytest.mark.parametrize(
    ("cut_anywhere", "num_parts", "bounds"),
    [
        (True, 2, [0, 6, 13]),
        (True, 3, [0, 4, 8, 13]),
        (False, 2, [0, 6, 13]),
        (False, 3, [0, 6, 10, 13]),
        (False, 5, [0, 6, 6, 10, 10, 13]),
    ],
)
def test_shares_end_within_parameters_only_where_the_optimizer_allows_it(cut_anywhere, num_parts, bounds):
    layout, _ = build_layouts(DESCRIBED, may_split_params=cut_anywhere)
    assert layout.shard_bounds(num_parts) == bounds


def test_an_optimizer_gets_one_tensor_for_each_group_or_one_for_each_parameter():
    joined, apart = (build_layouts(DESCRIBED, may_split_params=cut)[0] for cut in (True, False))
    assert joined.optimizer_ranges(WHOLE) == [(0, 0, 10), (1, 10, 13)]
    assert joined.optimizer_ranges(half(1)) == [(0, 6, 10), (1, 10, 13)]
    assert apart.optimizer_ranges(WHOLE) == [(0, 0, 6), (0, 6, 10), (1, 10, 13)]
    assert apart.optimizer_ranges((Fraction(0), Fraction(1, 3))) == [(0, 0, 6)]


shapes = st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=1, max_size=6)


@given(shapes, st.integers(1, 7), st.booleans())
def test_the_shares_of_any_number_of_ranks_cover_every_element_once(shapes, num_parts, cut_anywhere):
    described = [(str(at), shape, F32, at % 2) for at, shape in enumerate(shapes)]
    (layout,) = build_layouts(described, may_split_params=cut_anywhere)
    covered = [
        (slot.name, element)
        for index in range(num_parts)
        for slot, start, stop in layout.slots_in((Fraction(index, num_parts), Fraction(index + 1, num_parts)))
        for element in range(start, stop)
    ]
    assert covered == [(slot.name, element) for slot in layout.slots for element in range(slot.start, slot.stop)]
    if not cut_anywhere:
        assert set(layout.shard_bounds(num_parts)) <= {0, *(slot.stop for slot in layout.slots)}


def test_parameters_are_views_of_one_buffer():
    one, params = arena()
    one.weights[7] = 70
    assert params["d"].tolist() == [6, 70, 8, 9]
    assert {param.untyped_storage().data_ptr() for param in params.values()} == {one.weights.data_ptr()}


def test_only_the_kept_share_survives_a_release():
    one, params = arena(home=half(1))
    assert one.weights.untyped_storage().size() == 0
    assert all(param.untyped_storage().size() == 0 for param in params.values())
    one.unshard_weights()
    assert one.weights[6:].tolist() == list(range(6, 13))
    one.weights[8] = -1
    one.reshard_weights()
    one.unshard_weights()
    assert one.weights[8] == 8, "what is done to a gathered copy is not kept"


def test_an_update_of_the_kept_share_is_what_is_gathered_next():
    one, params = arena(home=half(1))
    one.optimizer_view(6, 10).fill_(5)
    one.unshard_weights()
    assert params["d"].tolist() == [5, 5, 5, 5]


@pytest.mark.parametrize("home", [WHOLE, half(0), half(1)])
def test_a_parameter_is_written_into_whatever_of_it_lies_here(home):
    one, _ = arena(home=home)
    one.write_param("a", torch.full((2, 3), 7.0, dtype=F64))
    one.write_param("d", torch.full((4,), 8.0, dtype=F64))
    low, high = one.shard_bounds
    expected = [*[7.0] * 6, *[8.0] * 4, 10.0, 11.0, 12.0]
    assert one.flat_view(low, high).tolist() == expected[low:high]


def test_gradients_of_several_microbatches_are_folded_into_one_buffer():
    one, params = arena()
    for factor in (1.0, 10.0):
        params["a"].grad = torch.full((2, 3), factor, dtype=F64)
        if factor > 1:
            params["b"].grad = torch.full((3,), factor, dtype=F64)
        flat = one.collect_flat_grad()
    assert flat.tolist() == [*[11.0] * 6, *[0.0] * 4, *[10.0] * 3]
    assert all(param.grad is None for param in params.values())


def test_a_share_adds_up_over_microbatches_while_the_flat_gradient_is_freed():
    one, params = arena(home=half(0))
    for _ in range(3):
        one.unshard_weights()
        params["a"].grad = torch.ones(2, 3, dtype=F64)
        one.collect_flat_grad()
        one.accumulate_shard(0, 6)
        one.free_grad()
        assert one.grad is None
    assert one.optimizer_grad(0, 6, half(0)).tolist() == [3.0] * 6
    assert one.grad_shard.untyped_storage().size() == 6 * 8


def test_whole_tensors_keep_their_shape_for_optimizers_that_look_at_it():
    one, params = arena(cut_anywhere=False)
    params["a"].grad = torch.ones(2, 3, dtype=F64)
    assert one.optimizer_view(0, 6).shape == (2, 3)
    assert one.optimizer_grad(0, 6, WHOLE).shape == (2, 3)


def test_a_sparse_gradient_of_what_has_no_rows_is_folded_as_a_dense_one():
    """Added to a view by torch itself, it is written beside it (torch 2.13)."""
    one, params = arena()
    for _ in range(2):
        params["d"].grad = torch.ones(4, dtype=F64).to_sparse()
        flat = one.collect_flat_grad()
    assert flat.tolist() == [0.0] * 6 + [2.0] * 4 + [0.0] * 3


def test_large_gradients_leave_their_parameters_one_by_one(monkeypatch):
    """So that no more than one of them is there twice."""
    (layout,) = build_layouts(
        [("small", (3,), F64, 0), ("large", (9000,), F64, 0), ("last", (2,), F64, 0)], may_split_params=True
    )
    params = {slot.name: nn.Parameter(torch.zeros(slot.shape, dtype=F64)) for slot in layout.slots}
    for param in params.values():
        param.grad = torch.ones_like(param)
    together: list[str] = []
    monkeypatch.setattr(arenas, "copy_small_grads", lambda slots, *_: together.extend(slot.name for slot in slots))
    whole = FlatParams(layout, params, WHOLE).collect_flat_grad()
    assert (together, whole.tolist()) == (["small", "last"], [1.0] * 9005)
    assert all(param.grad is None for param in params.values())
