"""Outputs that hold what no trace can show: a cache of keys and values comes out as None, the rest as it is."""

import pytest
import torch
from torch import nn

from counterpoint.errors import PlanError
from counterpoint.partitioning.partition import partition_model
from counterpoint.partitioning.tracing.traced import TracedPartition
from tests.partitioning.segment_runs import clone_tensors, seed


class Cache:
    """What a decoder keeps of a forward; torch does not know what is in it."""

    def __init__(self):
        self.keys = []


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        cache = Cache()
        for layer in self.layers:
            cache.keys.append(x * 2)
            x = torch.tanh(layer(x))
        return {"logits": x, "cache": cache, "length": 3, "hidden": (x, None)}


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        cache = Cache()
        cache.keys.append(self.layer(x))
        return cache


@pytest.mark.parametrize("granularity", ["whole", "blocks"])
def test_a_cache_in_an_output_is_none_and_all_else_unchanged(granularity):
    model, x = Decoder(), torch.randn(3, 4)
    partitioned = partition_model(model, (x,), granularity=granularity)
    values = partitioned.flatten_inputs((x,)).values
    output = partitioned.unflatten_output(
        partitioned.segment(0, len(partitioned.spec.layers), training=True)(values, *clone_tensors(model), seed)
    )
    expected = model(x)
    assert output["cache"] is None
    assert output["length"] == 3
    assert torch.equal(output["logits"], expected["logits"])
    assert torch.equal(output["hidden"][0], expected["logits"])


def test_what_was_only_kept_in_a_cache_is_not_computed():
    partitioned = TracedPartition(Decoder(), (torch.randn(3, 4),))
    targets = [str(node.target) for node in partitioned.split_trace(training=True).order]
    assert [target for target in targets if "mul" in target] == []


def test_an_output_that_is_nothing_but_such_a_thing_is_refused_by_its_type():
    with pytest.raises(PlanError, match=r"Found <class '.*Cache'> in output"):
        partition_model(Wrapped(), (torch.randn(3, 4),), granularity="blocks")
