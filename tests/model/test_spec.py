"""Models as strategies see them: units, shards, bytes."""

from dataclasses import replace

import pytest

from counterpoint.model.spec import Block, LayerSpec, ModelSpec, Param, TensorParallelSpec, linear_chain

UP = TensorParallelSpec("hidden", (("up.weight", 0), ("down.weight", 1)), 8, 16, 16)
HEADS = TensorParallelSpec("heads", (("qkv.weight", 0),), 4, 16, 16)
PIECES = (
    LayerSpec("embed", ("table",), 1.0, 16),
    LayerSpec("attention", ("qkv.weight",), 2.0, 16, HEADS),
    LayerSpec("norm", ("norm.weight",), 0.5, 16),
    LayerSpec("mlp", ("up.weight", "down.weight", "down.bias"), 4.0, 16, UP),
    LayerSpec("head", ("table", "scale"), 1.0, 40),
)
PARAMS = (
    Param("table", (10, 4)),
    Param("qkv.weight", (12, 4)),
    Param("norm.weight", (4,)),
    Param("up.weight", (8, 4)),
    Param("down.weight", (4, 8)),
    Param("down.bias", (4,)),
    Param("scale", (1,), 8),
    Param("unused", (100,)),
)
WHOLE = ModelSpec((Block(PIECES, 0),), PARAMS)
FINE = ModelSpec(tuple(Block((piece,), index) for index, piece in enumerate(PIECES)), PARAMS)


def test_a_parameter_counts_its_elements_and_bytes():
    assert (Param("w", (3, 5)).num_elements, Param("w", (3, 5)).num_bytes, Param("w", (), 8).num_bytes) == (15, 60, 8)


def test_parameters_used_by_the_same_blocks_are_one_unit_and_units_of_one_block_come_first():
    assert FINE.units == {
        (1,): ("qkv.weight",),
        (2,): ("norm.weight",),
        (3,): ("up.weight", "down.weight", "down.bias"),
        (4,): ("scale",),
        (0, 4): ("table",),
    }


def test_a_parameter_that_no_block_uses_is_in_no_unit():
    assert "unused" not in {name for names in FINE.units.values() for name in names}


def test_a_weight_tied_within_one_block_is_an_ordinary_unit():
    assert list(WHOLE.units) == [(0,)]
    assert WHOLE.blocks[0].params.count("table") == 1


def test_the_bytes_of_a_unit_are_those_of_its_parameters():
    assert FINE.unit_bytes((0, 4)) == 160
    assert FINE.unit_bytes((4,)) == 8
    assert sum(map(FINE.unit_bytes, FINE.units)) == sum(p.num_bytes for p in PARAMS if p.name != "unused")


def test_refining_gives_every_sliced_layer_a_block_of_its_own():
    refined = WHOLE.split_out_tp_blocks(("hidden", "heads"), 2)
    assert [block.name for block in refined.blocks] == ["embed", "attention", "norm", "mlp", "head"]
    assert [block.tp_degree for block in refined.blocks] == [1, 2, 1, 2, 1]
    assert [block.first_layer for block in refined.blocks] == [0, 1, 2, 3, 4]
    assert refined.layers == WHOLE.layers


def test_refining_along_one_dim_leaves_the_others_whole():
    refined = WHOLE.split_out_tp_blocks(("heads",), 2)
    assert [block.name for block in refined.blocks] == ["embed", "attention", "norm..head"]
    assert [block.tp is None for block in refined.blocks] == [True, False, True]


def test_refining_twice_shards_what_is_still_whole():
    twice = WHOLE.split_out_tp_blocks(("heads",), 2).split_out_tp_blocks(("heads", "hidden"), 4)
    assert [block.tp_degree for block in twice.blocks] == [1, 2, 1, 4, 1]


@pytest.mark.parametrize(
    ("name", "shape"),
    [("up.weight", (4, 4)), ("down.weight", (4, 4)), ("down.bias", (4,)), ("qkv.weight", (6, 4)), ("table", (10, 4))],
)
def test_a_shard_splits_the_named_dim_of_a_parameter_and_nothing_else(name, shape):
    assert WHOLE.split_out_tp_blocks(("hidden", "heads"), 2).shard_shape(name) == shape


def test_a_shard_has_its_part_of_the_bytes_and_of_the_work():
    refined = WHOLE.split_out_tp_blocks(("hidden",), 2)
    assert refined.unit_bytes((1,)) == 64 + 64 + 16
    assert refined.blocks[1].cost == 2.0
    assert WHOLE.blocks[0].cost == 8.5


def test_a_block_sends_what_is_alive_after_its_last_layer():
    assert WHOLE.blocks[0].output_bytes == 40
    assert FINE.blocks[0].output_bytes == 16


def test_a_chain_is_equal_blocks_that_all_may_be_sliced():
    model = linear_chain(3, width=8)
    assert model.units == {(i,): (f"block{i}.weight",) for i in range(3)}
    assert model.split_out_tp_blocks(("hidden",), 2).shard_shape("block1.weight") == (4, 8)


def test_a_tied_chain_shares_the_weight_of_its_ends():
    assert list(linear_chain(4, tied=True).units) == [(1,), (2,), (0, 3)]
    assert list(linear_chain(1, tied=True).units) == [(0,)]
    assert [piece.tp is None for piece in linear_chain(3, tied=True).layers] == [True, False, True]


def test_a_model_without_parameters_has_no_units():
    empty = replace(FINE, blocks=(Block((LayerSpec("noise", ()),), 0),))
    assert empty.units == {}
