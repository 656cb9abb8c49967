"""Adasum against its formula in exact arithmetic, and its bounds on directions."""

import pytest
import torch

from counterpoint.fabric.collectives.adasum import adasum, adasum_pair


def by_the_paper(a, b):
    """Equation of the paper, in plain Python floats."""
    product = sum(x * y for x, y in zip(a, b, strict=True))
    squares = sum(x * x for x in a), sum(y * y for y in b)
    first, second = (1 - product / (2 * square) for square in squares)
    return [first * x + second * y for x, y in zip(a, b, strict=True)]


@pytest.fixture
def vectors():
    return list(torch.randn(5, 6, dtype=torch.float64))


def test_two_vectors_are_combined_as_the_paper_says(vectors):
    expected = by_the_paper(*(vector.tolist() for vector in vectors[:2]))
    assert adasum(vectors[:2]).tolist() == pytest.approx(expected, rel=1e-14, abs=1e-14)


def test_any_number_of_vectors_is_combined_in_pairs(vectors):
    a, b, c, d, e = vectors
    pairs = adasum_pair(adasum_pair(a, b), adasum_pair(c, d))
    assert torch.equal(adasum(vectors), adasum_pair(pairs, e))
    assert torch.equal(adasum(vectors[:3]), adasum_pair(adasum_pair(a, b), c))


@pytest.mark.parametrize("num_vectors", [1, 2, 3, 4, 7])
def test_orthogonal_vectors_are_added_and_equal_ones_averaged(num_vectors):
    corners = torch.eye(num_vectors, dtype=torch.float64)
    assert torch.equal(adasum(list(corners)), torch.ones(num_vectors, dtype=torch.float64))
    same = torch.tensor([1.0, -2.0], dtype=torch.float64)
    assert torch.allclose(adasum([same] * num_vectors), same, rtol=1e-15)


def test_a_vector_of_zeros_changes_nothing_and_the_given_ones_stay(vectors):
    kept = vectors[0].clone()
    assert torch.equal(adasum([torch.zeros(6, dtype=torch.float64), vectors[0]]), kept)
    adasum([vectors[0]]).zero_()
    assert torch.equal(vectors[0], kept)


def test_scalar_products_do_not_overflow_in_half_precision():
    large = torch.full((4,), 300.0, dtype=torch.float16)
    assert torch.equal(adasum([large, large]), large)
