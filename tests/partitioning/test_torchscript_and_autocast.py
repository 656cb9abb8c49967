"""Models whose inside partitioning cannot see: scripts, a forward inside autocast, one layer for three."""

import copy
import warnings

import pytest
import torch
from torch import nn

from counterpoint.errors import PlanError
from counterpoint.partitioning.partition import partition_model
from counterpoint.partitioning.tracing.traced import TracedPartition
from counterpoint.partitioning.tracing.verify_tensor_parallel import verify_tensor_parallel
from tests.partitioning.segment_runs import clone_tensors, seed


def script(*, dropout=0.0):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it deprecated
        return torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.Dropout(dropout)))


def test_a_script_without_a_signature_runs_whole():
    """A copy of a script has none, as one loaded from a file."""
    model, inputs = copy.deepcopy(script()), (torch.randn(4, 3),)
    (output,) = partition_model(model, inputs, granularity="whole").segment(0, 1, training=True)(
        inputs, *clone_tensors(model), seed
    )
    assert torch.equal(output, model(*inputs))


@pytest.mark.parametrize(("dropout", "granularity"), [(0.0, "blocks"), (0.0, "tensor_parallel"), (0.5, "whole")])
def test_a_script_is_refused_where_its_inside_must_be_seen(dropout, granularity):
    with pytest.raises(PlanError, match=r"^RecursiveScriptModule is a TorchScript module, .* pass the module that it"):
        partition_model(script(dropout=dropout), (torch.randn(4, 3),), granularity=granularity)


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layers(x)


@pytest.mark.parametrize("granularity", ["blocks", "tensor_parallel"])
def test_a_forward_inside_autocast_is_refused_by_that_name(granularity):
    with pytest.raises(
        PlanError, match=r"^all of Wrapped.forward runs inside torch.autocast, .* in the forward of eac"
    ):
        partition_model(Wrapped(), (torch.randn(4, 3),), granularity=granularity)


def test_query_key_and_value_from_one_layer_are_not_taken_for_three_heads():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    partitioned = TracedPartition(model, (torch.randn(3, 5, 8),), prefer="pairs")
    split = next(layer.tp for layer in partitioned.spec.layers if layer.tp is not None)
    assert (split.dim, split.dim_size) == ("heads", 2)
    with pytest.raises(PlanError, match=r"as one fused layer for query, key and value does, .* write separate"):
        verify_tensor_parallel(
            partitioned, partitioned.spec.split_out_tp_blocks(("heads",), 2), dict(model.named_parameters())
        )
