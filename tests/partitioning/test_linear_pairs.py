"""Pairs of linear layers are found, and their shards add up to the whole, forward and backward."""

import pytest
import torch
from torch import nn

from counterpoint.errors import PlanError
from counterpoint.partitioning.tracing.traced import TracedPartition
from counterpoint.partitioning.tracing.verify_tensor_parallel import shard_params, verify_tensor_parallel
from tests.partitioning.models import FusedAttention, fixed_heads, gpt, perceptron, transposed
from tests.partitioning.segment_runs import clone_tensors, forward, seed


def splits(partitioned):
    return {layer.name: layer.tp for layer in partitioned.spec.layers if layer.tp}


def run(part, values, params, buffers):
    """Return the partial output and the gradient of the partial input for a gradient of ones."""
    taken = [value.detach().requires_grad_() for value in values]
    gave = part(taken, params, buffers, seed)[part.outputs.index(part.partial_outputs[0])]
    return gave.detach(), torch.autograd.grad(gave.sum(), taken[part.inputs.index(part.partial_inputs[0])])[0]


def test_attention_and_feed_forward_of_a_gpt_are_found():
    result = splits(TracedPartition(*gpt(num_layers=1)))
    assert [(name, split.dim, split.dim_size) for name, split in result.items()] == [
        ("blocks.0.attention.q..proj", "heads", 4),
        ("blocks.0.mlp.fc..proj", "hidden", 64),
    ]
    assert result["blocks.0.mlp.fc..proj"].sharded_dims == (
        ("blocks.0.mlp.fc.weight", 0),
        ("blocks.0.mlp.fc.bias", 0),
        ("blocks.0.mlp.proj.weight", 1),
    )


def test_layers_with_transposed_weights_are_sharded_along_their_other_dims():
    partitioned = TracedPartition(*transposed(), prefer="pairs")
    (pair,) = splits(partitioned).values()  # one layer for query, key and value stays whole
    assert pair.sharded_dims == (("up.weight", 1), ("up.bias", 0), ("down.weight", 0))
    index = next(index for index, layer in enumerate(partitioned.spec.layers) if layer.tp)
    assert partitioned.spec.layers[index + 1].params == ("down.bias",)


def test_a_pair_over_the_end_of_a_block_is_taken_only_where_pairs_go_first():
    model, inputs = perceptron()
    assert not splits(TracedPartition(model, inputs))
    assert list(splits(TracedPartition(model, inputs, prefer="pairs"))) == ["0..2"]


@pytest.mark.long(quick=["perceptron-4", "fixed_heads-2", "gpt-2"])
@pytest.mark.parametrize(
    ("make", "num_slices"), [(gpt, 2), (gpt, 4), (fixed_heads, 2), (perceptron, 4), (transposed, 4)]
)
def test_shards_add_up_forward_and_backward(make, num_slices):
    model, inputs = make()
    partitioned, (params, buffers) = TracedPartition(model, inputs, prefer="pairs"), clone_tensors(model)
    verify_tensor_parallel(partitioned, partitioned.spec.split_out_tp_blocks(("heads", "hidden"), num_slices), params)
    steps = forward(partitioned, range(len(partitioned.spec.layers) + 1), inputs, params, buffers, training=True)
    checked = 0
    for layer, (part, values, _) in zip(partitioned.spec.layers, steps, strict=True):
        if layer.tp:
            whole = run(part, values, params, buffers)
            parts = [shard_params(params, layer.tp, place, num_slices) for place in range(num_slices)]
            sums = [sum(both) for both in zip(*(run(part, values, own, buffers) for own in parts), strict=True)]
            assert all(torch.allclose(ours, theirs, 1e-12, 1e-13) for ours, theirs in zip(sums, whole, strict=True))
            checked += 1
    assert checked


def test_what_is_also_used_elsewhere_enters_a_region_under_a_name_of_its_own():
    partitioned = TracedPartition(*fixed_heads(), prefer="pairs")
    index = next(place for place, layer in enumerate(partitioned.spec.layers) if layer.tp)
    part = partitioned.segment(index, index + 1, training=True)
    assert part.inputs == part.partial_inputs
    assert partitioned.values(training=True)[part.inputs[0]].consumers == (index,)


def test_the_bias_of_the_row_layer_belongs_to_the_next_layer():
    first, entry, pair, last = TracedPartition(*fixed_heads(), prefer="pairs").spec.layers
    assert "out.weight" in pair.params
    assert (first.params, entry.params, last.params) == (("norm.weight", "norm.bias"), (), ("out.bias",))


def test_bytes_of_a_split_are_those_of_one_sample():
    split = splits(TracedPartition(*gpt(num_layers=1)))["blocks.0.mlp.fc..proj"]
    assert (split.output_bytes, split.input_bytes) == (8 * 16 * 8, 8 * 16 * 8)


def test_the_user_may_name_the_dim():
    dims = {"blocks.*.mlp.fc": ("wide", "model"), "blocks.*.mlp.proj": ("model", "wide")}
    result = splits(TracedPartition(*gpt(num_layers=1), dims=dims))
    assert [split.dim for split in result.values()] == ["heads", "wide"]


def test_one_dim_with_two_names_is_refused():
    dims = {"*.fc": ("wide", "model"), "*.mlp.proj": ("model", "broad")}
    with pytest.raises(PlanError, match=r"one dim has two names: out of blocks\.0\.mlp\.fc is 'wide', in of"):
        TracedPartition(*gpt(), dims=dims)


def test_dropout_inside_keeps_a_pair_from_being_sharded():
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 4))
    assert not splits(TracedPartition(model, (torch.randn(3, 4),), prefer="pairs"))


def test_a_weight_used_twice_is_not_sharded():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
    model[2].weight = model[0].weight
    assert not splits(TracedPartition(model, (torch.randn(3, 4),), prefer="pairs"))


def test_one_layer_for_query_key_and_value_is_refused_with_the_remedy():
    model, inputs = FusedAttention(), (torch.randn(3, 5, 8),)
    partitioned = TracedPartition(model, inputs, prefer="pairs")
    with pytest.raises(PlanError, match=r"qkv..out does not run on shard 0 of 2 along heads: .* write separate"):
        verify_tensor_parallel(
            partitioned, partitioned.spec.split_out_tp_blocks(("heads",), 2), dict(model.named_parameters())
        )


def test_features_that_are_mixed_do_not_add_up():
    model = nn.Sequential(nn.Linear(4, 8), nn.Softmax(-1), nn.Linear(8, 4))
    partitioned = TracedPartition(model, (torch.randn(3, 4),), prefer="pairs")
    with pytest.raises(PlanError, match=r"2 shards of 0..2 along heads do not add up: the sum is off by"):
        verify_tensor_parallel(
            partitioned, partitioned.spec.split_out_tp_blocks(("heads",), 2), dict(model.named_parameters())
        )


def test_shards_that_do_not_divide_the_heads_are_refused():
    model, inputs = gpt()
    partitioned = TracedPartition(model, inputs)
    with pytest.raises(PlanError, match=r"has 4 heads, which 3 ranks do not divide; .* use 2, 4 ranks"):
        verify_tensor_parallel(
            partitioned, partitioned.spec.split_out_tp_blocks(("heads",), 3), dict(model.named_parameters())
        )


class Scaled(nn.Module):
    """A float32 model with a table computed without gradients between the layers, as rotary embeddings are."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
        self.table: torch.Tensor
        self.register_buffer("table", torch.tensor([3.0]))

    def forward(self, x):
        with torch.no_grad():
            scale = (self.table.to(torch.int64).to(torch.float32) * 2).to(x.dtype)
        return self.second(self.first(x) * scale)


def test_a_float32_model_is_checked_in_float64():
    model = Scaled().float()
    partitioned = TracedPartition(model, (torch.randn(3, 4, dtype=torch.float32),), prefer="pairs")
    params = dict(model.named_parameters())
    verify_tensor_parallel(partitioned, (refined := partitioned.spec.split_out_tp_blocks(("hidden",), 2)), params)
    assert [block.tp_degree for block in refined.blocks if block.tp_degree > 1] == [2]
