"""Coordinates of ranks in a mesh."""

import pytest

from counterpoint.world.mesh import Axis, Mesh

MESH = Mesh((Axis("tensor", 2), Axis("stage", 3), Axis("data", 4)))


def test_the_first_axis_varies_fastest():
    assert [MESH.coordinates(rank)["tensor"] for rank in range(4)] == [0, 1, 0, 1]
    assert MESH.coordinates(7) == {"tensor": 1, "stage": 0, "data": 1}
    assert MESH.coordinates(MESH.num_ranks - 1) == {"tensor": 1, "stage": 2, "data": 3}


def test_every_rank_has_a_different_coordinate():
    places = {tuple(MESH.coordinates(rank).items()) for rank in range(MESH.num_ranks)}
    assert len(places) == MESH.num_ranks == 24


@pytest.mark.parametrize(("mesh", "text"), [(MESH, "tensor=2, stage=3, data=4"), (Mesh(()), "one rank")])
def test_a_mesh_says_what_it_is(mesh, text):
    assert mesh.describe() == text


def test_a_mesh_without_axes_is_one_rank_in_the_one_place():
    assert (Mesh(()).num_ranks, Mesh(()).coordinates(0)) == (1, {})
