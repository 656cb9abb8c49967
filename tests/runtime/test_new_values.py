"""Extremes of a batch that are new are found in the first samples whose halves have them in different numbers."""

import math

import torch

from counterpoint.runtime.loss.new_values import MAX_FOUND, NewValues


def find(values, *batches):
    return [values.find([torch.tensor(batch)], len(batch)) for batch in batches]


def test_the_first_padding_is_found_once():
    batch = [[1, 2], [2, 1]]
    assert find(NewValues(), batch, batch, [[2, -100], [2, 1]], [[1, -100], [1, 1]]) == [False, False, True, False]


def test_padding_in_equal_numbers_is_waited_with():
    padded, uneven = [[1, -100], [1, -100]], [[1, 2], [1, -100]]
    assert find(NewValues(), [[1, 2], [1, 2]], padded, uneven, uneven) == [False, False, True, False]


def test_a_first_zero_of_a_mask_and_a_first_nan_are_found():
    assert find(NewValues(), [True, True], [True, False]) == [False, True]
    assert find(NewValues(), [1.0, 1.0], [1.0, math.nan], [1.0, math.nan]) == [False, True, False]


def test_halves_of_different_lengths_are_compared_by_share():
    assert find(NewValues(), [5, 5, 5], [5, 5, 4]) == [False, True]


def test_a_single_sample_is_compared_with_the_one_before():
    padded, more = [[1, -100]], [[-100, -100]]
    assert find(NewValues(), [[1, 1]], [[1, 1]], padded, padded, more, more) == [True, False, True, False, True, False]


def test_what_is_no_sample_each_is_left_out_and_values_that_grow_are_found_only_so_often():
    values = NewValues()
    assert not values.find([torch.tensor([1, 2, 3]), torch.tensor(1), torch.zeros(2, 0), torch.ones(2) * 1j], 2)
    assert sum(find(NewValues(), *[[number, 0] for number in range(1, 2 * MAX_FOUND)])) == MAX_FOUND
