"""The systems by name train as one rank does, but for those that say otherwise."""

import pytest

from counterpoint.plan.registry import STRATEGIES
from counterpoint.testing import parity

STREAMS = {"pipedream", "pipedream_2bw"}
"""Their law is another one, and stands in test_streams."""
LATE = {"downpour", "project_adam", "parameter_server_strategy", "easgd"}
"""Theirs stand in test_ssp and test_elastic."""
NAMES_OF_ITS_OWN = {"placement"}
SYNCHRONOUS = [
    *(
        named.example or f"{name}(2)"
        for name, named in STRATEGIES.items()
        if not isinstance(named.doc_source, type) and name not in STREAMS | LATE | NAMES_OF_ITS_OWN
    ),
    "placement(2, modules=0:0+2:1+4:0)",
    "placement(3, modules=0:2+3:0+6:1)",
    "zero_bubble(2, chunks_per_stage=2)",
    "mpi_caffe(4, comm_group=1)",
    "hypar_flow(4, num_replicas=2) + overlap",
    "mirrored(4, cross_device_ops=hierarchical_copy)",
    "chainermn(4, communicator=two_dimensional, per_host=2)",
    "horovod(4, hierarchical_allreduce=on, per_host=2)",
    "pipeline(2) * firecaffe(2)",
    "kvstore(4, type=device)",
    "kvstore(2, type=dist_sync, servers=2)",
    "kvstore(4, type=dist_device_sync, devices=2)",
    "kvstore(2, type=dist_sync, update_on_kvstore=off)",
    "mxnet_mpi(4, groups=1, servers=0)",
    "parameter_server_strategy(2, mode=sync)",
]


@pytest.mark.long(quick=["pipeline(2) * firecaffe(2)", "gpipe(2)"])
@pytest.mark.parametrize("plan", SYNCHRONOUS)
def test_a_system_ends_where_solo_ends(plan):
    assert parity.check_parity("mlp", plan).worst <= parity.TOLERANCE


def test_trees_and_a_sum_between_their_owners_take_a_tied_weight_for_one():
    assert parity.check_parity("gpt", "chainermn(4, communicator=hierarchical, per_host=2)").worst <= parity.TOLERANCE


def test_the_owner_of_a_tree_clips_by_the_norm_of_all():
    assert parity.check_parity("mlp", "s_caffe(4, per_host=2)", clip_norm=0.3).worst <= parity.TOLERANCE


def test_half_floats_are_not_taken_for_the_same():
    assert parity.check_parity("mlp", "ddp(2, comm_hook=fp16_compress)").params > parity.TOLERANCE
