"""Whose memory a rank's parameters are in."""

import torch
from torch import nn

from counterpoint.partitioning.partition import partition_model
from counterpoint.runtime.rank_builder import build_local_params


def params_of(model, *, is_only):
    partitioned = partition_model(model, (torch.zeros(2, 3),), granularity="blocks")
    return build_local_params(partitioned.spec, partitioned, model, (0, 1), {"0.weight", "0.bias"}, is_only=is_only)


def chain():
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def test_the_only_rank_of_a_process_trains_in_the_memory_of_the_model():
    model = chain()
    result = params_of(model, is_only=True)
    assert result["0.weight"].data_ptr() == model[0].weight.data_ptr()
    assert "1.weight" not in result


def test_changes_that_training_makes_are_not_counted_as_changes_of_the_user():
    model = chain()
    before = model[0].weight._version
    with torch.no_grad():
        params_of(model, is_only=True)["0.weight"].add_(1)
    assert model[0].weight._version == before


def test_one_of_several_ranks_has_copies():
    model = chain()
    assert params_of(model, is_only=False)["0.weight"].data_ptr() != model[0].weight.data_ptr()


def test_memory_that_processes_share_is_left_alone():
    model = chain().share_memory()
    assert params_of(model, is_only=True)["0.weight"].data_ptr() != model[0].weight.data_ptr()
