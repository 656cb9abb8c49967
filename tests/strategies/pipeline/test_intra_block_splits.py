"""Where a pipeline splits blocks in two: where its slowest stage gets faster by that, and nowhere else."""

from itertools import pairwise

import pytest

from counterpoint.compiler.compile import compile  # noqa: A004 - read as cp.compile
from counterpoint.errors import PlanError
from counterpoint.model.spec import Block, LayerSpec, ModelSpec, Param
from counterpoint.plan.plan import Plan


def model(*costs_of_blocks, left=4):
    """Return a model of blocks whose layers have these costs; a stage may begin with any of them."""
    num_layers, blocks = 0, []
    for costs in costs_of_blocks:
        run = [
            LayerSpec(f"p{num_layers + at}", (f"w{num_layers + at}",), cost, left, can_start_stage=at > 0)
            for at, cost in enumerate(costs)
        ]
        blocks.append(Block(tuple(run), num_layers))
        num_layers += len(run)
    return ModelSpec(tuple(blocks), tuple(Param(f"w{at}", (2,)) for at in range(num_layers)))


def stages(plan, spec):
    """Return the layers of each stage of a plan that begins with a pipeline."""
    compiled = compile(Plan.parse(plan, num_microbatches=4), spec)
    starts = [rank.chunk_starts[0] for rank in compiled.cost.ranks]
    runs = pairwise([*starts, compiled.model.num_blocks])
    return [
        [layer.name for block in compiled.model.blocks[start:stop] for layer in block.layers] for start, stop in runs
    ]


def test_a_block_is_split_where_the_slowest_stage_gets_faster_by_that():
    assert stages("pipeline(2)", model([2, 2], [2, 2], [2, 2])) == [["p0", "p1", "p2"], ["p3", "p4", "p5"]]


def test_only_the_blocks_are_split_that_a_stage_begins_in():
    compiled = compile(Plan.parse("pipeline(2)", num_microbatches=4), model([2, 2], [2, 2], [2, 2])).model
    assert [block.name for block in compiled.blocks] == ["p0..p1", "p2", "p3", "p4..p5"]


def test_a_block_stays_whole_for_less_than_one_per_cent():
    assert stages("pipeline(2)", model([99.5, 0.5], [99])) == [["p0", "p1"], ["p2"]]


def test_of_partitions_that_are_as_fast_one_with_fewest_splits_inside_blocks_is_taken():
    result = compile(Plan.parse("pipeline(3)", num_microbatches=4), model([4, 4], [1, 1], [1, 1], [8, 4])).model
    assert [block.name for block in result.blocks] == ["p0..p1", "p2..p3", "p4..p5", "p6", "p7"]


@pytest.mark.parametrize("plan", ["pipeline(2, balance=(1,2))", "pipeline(2, split_points=p2)", "zero3(2)", "data(2)"])
def test_blocks_stay_whole_without_a_pipeline(plan):
    compiled = compile(Plan.parse(plan, num_microbatches=4), model([2, 2], [2, 2], [2, 2])).model
    assert compiled.num_blocks == 3


def test_there_may_be_more_stages_than_blocks():
    assert stages("pipeline(3)", model([1, 1], [1])) == [["p0"], ["p1"], ["p2"]]


def test_more_stages_than_parts_are_refused():
    with pytest.raises(PlanError, match="has 4 stages, but the model has only 2 blocks"):
        stages("pipeline(4)", model([1, 1], [1]))


def test_blocks_of_a_stream_that_share_weights_stay_whole():
    spec = model([2, 2], [2, 2], [2, 2])
    shared = LayerSpec("p5", ("w0",), 2, 4, can_start_stage=True)
    last = Block((spec.blocks[2].layers[0], shared), 4)
    with pytest.raises(PlanError, match="blocks 0 and 2 share weights"):
        stages("pipedream(2)", ModelSpec((*spec.blocks[:2], last), spec.params))
