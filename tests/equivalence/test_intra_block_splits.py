"""Stages that begin inside a block, between attention and feed-forward, change nothing."""

import pytest

from counterpoint.testing import parity

PLANS = [
    "pipeline(2)", "gpipe(4)", "zero_bubble(4)", "interleaved(3)", "zero_bubble(2, chunks_per_stage=2)",
    "pipeline(3, replicas=(1,2,1))", "pipeline(2) * data(2) + overlap", "pipeline(2) * zero(2, level=3)",
    "gpipe(4, checkpoint=always)",
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("plan", PLANS)
def test_stages_that_begin_inside_a_block_end_where_solo_ends(plan):
    assert parity.check_parity("gpt", plan).worst <= parity.TOLERANCE
