"""A pipeline whose stages begin with named modules trains as one rank does, wherever the modules lie."""

import pytest

from counterpoint.testing import parity


@pytest.mark.long(quick=["pipeline(3, split_points=blocks.0+head)"])
@pytest.mark.parametrize(
    "plan",
    [
        "pipeline(2, split_points=blocks.1.attention)",
        "pipeline(3, split_points=blocks.0+head)",
        "interleaved(2, split_points=blocks.0+blocks.1+head)",
        "zero_bubble(2, chunks_per_stage=2, split_points=blocks.0.mlp+blocks.1+norm)",
        "gpipe(2, split_points=tok:0+blocks.0:1+norm:0)",
        "placement(3, modules=tok:2+blocks.0:0+blocks.1:1+blocks.2:0+norm:2)",
        "placement(2, modules=tok:0+blocks.0:1+norm:0) * data(2) + overlap",
        "tensor(2) * pipeline(2, split_points=blocks.1)",
        "mpi_caffe(4, comm_group=2, split_points=blocks.2)",
    ],
)
def test_stages_that_begin_with_named_modules_end_where_solo_ends(plan):
    assert parity.check_parity("gpt", plan).worst <= parity.TOLERANCE


def test_children_of_a_chain_that_have_no_parameters_may_begin_a_stage():
    assert parity.check_parity("mlp", "pipeline(3, split_points=1+5)").worst <= parity.TOLERANCE
